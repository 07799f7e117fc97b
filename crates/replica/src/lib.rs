//! The worker's copy of the model, with its data.
//!
//! - `interface`: the interface between replicas and strategies; `step`: a step, and its result
//! - `mirror`: the additional interface for strategies without servers; `mirrored`: its implementation on the model's
//!   thread
//! - `devices`: a worker's replicas, one on each device, behind the interface of one replica
//! - `pipeline`: a model in stages on several devices
//! - `neighbours`: the channels to the workers that have the other stages of a model
//! - `rounds`: sums over all replicas of a step, in the middle of their passes
//! - `filling`: buckets of gradients that are sent during the backward pass
//! - `thread`: a candle model on a thread of its own; `build`: the model, its variables and tables
//! - `reader`: the thread that reads the batches; `evaluating`: an evaluation, part by part
//! - `error`: the errors of replicas
//! - [`device`]: the device to compute on; [`threads`]: the number of threads of a process

mod build;
pub mod device;
mod devices;
mod error;
mod evaluating;
mod filling;
mod interface;
mod mirror;
mod mirrored;
mod neighbours;
mod pipeline;
mod reader;
mod rounds;
mod step;
mod thread;
pub mod threads;

pub use build::{Built, Place, build, precision};
pub use devices::DeviceReplicas;
pub use error::{ReplicaError, panic_message};
pub use evaluating::{EVALUATION_BATCH, Evaluating};
pub use filling::{Filled, Filling, filling};
pub use interface::{Computing, Description, Evaluation, EvaluationPart, Prepared, Replica};
pub use mirror::{
    DeviceGroup, DeviceSteps, FirstReplica, GroupError, Held, InBuckets, Mirror, MirrorState,
    SlotShare, StageSteps, StepsMade, ValuesId,
};
pub use neighbours::{Begun, Carried, Carrier, Ends, Neighbour, Neighbours, Wait};
pub use rounds::{Others, Round, Rounds, rounds};
pub use step::{Computed, Positions, Step};
pub use thread::ModelReplica;
