//! The worker's side of the data plane: splits variables by shard, pulls, pushes, sends again.
//!
//! The data path goes through these modules in this order:
//! - `shards`: [`Shards`], all shards of a job; [`Shards::push`] and [`Shards::pull`]
//!   return handles at once, which are awaited later
//! - `checks`: checks of a push before any of it is sent
//! - `message_plan`: [`MessagePlan`], which blocks of variables travel together; `row_plan`: the same for a step's
//!   rows; `rows`: the messages about rows
//! - `parts`: a block's entry in a pull, and its part of a variable's values; `held`: what the model holds of each
//!   block
//! - `session`: the stream to one shard. When it breaks, the session opens it again and sends the unanswered requests
//!   again, in order; `session/driver`: opens the streams and reads the answers; `session/reconcile`: finds the
//!   acknowledged pushes that a restored shard lacks
//! - `target`: the shard at the other end of a session; `connection`: the opening and the greeting of a stream
//! - `answers`: a shard's answers, and the check that they fit their requests
//!
//! Other modules:
//! - `maps`: [`Maps`], the newest shard map; shards move to other servers and addresses while a job runs
//! - `origin`: the sequence number of a message, and the version of the weights behind its gradients
//! - `identity`: the settings of a worker's sessions; `reconciled`: the epoch in which all sessions have reconciled
//! - `losses`: acknowledged updates that were lost with a server
//! - [`lookup`]: reads of rows, for programs that are not members of the job
//! - `error`: the errors of a client, by what the worker does next
//! - `fuzzing`: the driver of a fuzz target

mod answers;
mod checks;
mod connection;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod held;
mod identity;
pub mod lookup;
mod losses;
mod maps;
mod message_plan;
mod origin;
mod parts;
mod reconciled;
mod row_plan;
mod rows;
mod session;
mod shards;
mod target;

pub use error::ClientError;
pub use identity::Identity;
pub use losses::{Loss, Lost};
pub use maps::{MapSource, Maps};
pub use message_plan::MessagePlan;
pub use reconciled::Reconciled;
pub use shards::{Acknowledgement, PullOutcome, PushTicket, Shards, WeightsTicket};
