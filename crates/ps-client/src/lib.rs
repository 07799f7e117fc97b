//! The worker's side of the data plane: splits variables by shard, pulls, pushes, sends again.
//!
//! - [`ParameterServers`]: all shards of a job; [`ParameterServers::push`] and
//!   [`ParameterServers::pull`] return handles at once, which are awaited later
//! - `session`: the stream to one shard. When it breaks, the session opens it again and sends the unanswered
//!   requests again, in order
//! - `connection`: the opening and the greeting of a stream
//! - `answers`: a shard's answers, and the check that they fit their requests
//! - [`Maps`]: the newest shard map; shards move to other servers and addresses while a job runs
//! - `losses`: acknowledged updates that were lost with a server
//! - `checks`: checks of a push before any of it is sent
//! - [`MessagePlan`]: which blocks travel together
//! - `fuzzing`: the driver of a fuzz target

mod answers;
mod checks;
mod connection;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod losses;
mod maps;
mod message_plan;
mod servers;
mod session;

pub use error::ClientError;
pub use losses::{Loss, Lost};
pub use maps::{MapSource, Maps};
pub use message_plan::MessagePlan;
pub use servers::{
    Acknowledgement, Gradients, Identity, ParameterServers, Pulled, PulledBlock, PushReceipt,
    Settled, WeightsTicket,
};
