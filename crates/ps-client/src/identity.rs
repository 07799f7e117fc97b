//! The settings of a worker's sessions.

use std::sync::Arc;
use std::time::Duration;

use network::Network;
use shared_proto::ids::{RunNumber, Task, ViewNumber};
use shared_proto::payload::Dtype;
use tokio::sync::mpsc;

use crate::losses::Loss;

/// The settings of a worker's sessions with the servers.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The name of the job.
    pub job: String,
    /// The run that this worker is a member of.
    pub run: RunNumber,
    /// This worker.
    pub task: Task,
    /// The newest view that this worker has received.
    pub view: ViewNumber,
    /// The time for which a server may be unreachable.
    pub patience: Duration,
    /// The number type of weights and gradients on the wire.
    pub wire: Dtype,
    /// True if this worker computes with look-ahead weights where there is momentum.
    pub looks_ahead: bool,
    /// The network by which servers are reached.
    pub network: Arc<dyn Network>,
    /// The channel to which sessions send the losses that they find.
    pub losses: mpsc::Sender<Loss>,
}

#[cfg(any(test, feature = "fuzzing"))]
impl Identity {
    /// Returns the identity of worker 0 of the job `j`, for tests without a cluster.
    pub(crate) fn of_a_test(wire: Dtype, losses: mpsc::Sender<Loss>) -> Self {
        use network::SystemNetwork;
        use shared_proto::ids::{Generation, TaskId};
        let id = TaskId::worker(0);
        Self {
            job: "j".to_owned(),
            run: RunNumber::default(),
            task: Task {
                id,
                generation: Generation(1),
            },
            view: ViewNumber(1),
            patience: Duration::from_secs(60),
            wire,
            looks_ahead: false,
            network: Arc::new(SystemNetwork::default()),
            losses,
        }
    }
}
