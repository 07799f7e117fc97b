//! The worker's copy of the model, with its data.
//!
//! - `interface`: what the training step and strategies ask of a replica; `step`: a step, and its result
//! - `mirror`: what strategies without servers ask of it besides; `mirrored`: how the thread does it
//! - `devices`: several replicas as one, each on a device of its own
//! - `pipeline`: a model in stages on several devices
//! - `neighbours`: the ways to the workers with the other stages of a model
//! - `rounds`: sums over the replicas of a step in the middle of their passes
//! - `filling`: gradients that leave in the middle of a backward pass
//! - `thread`: a candle model on a thread of its own; `build`: the model, its variables and tables
//! - `reader`: the thread that reads its batches; `evaluating`: an evaluation, part by part
//! - `error`: the errors of all of these
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
