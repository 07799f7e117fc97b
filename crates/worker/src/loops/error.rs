//! The errors of training loops.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use collective::CollectiveError;
use model::candle_error::plain;
use network::security::SecurityError;
use replica::device::DeviceError;
use shared_proto::job::JobError;
use variables::VariablesError;

use crate::tf_config::TfConfigError;

/// The error of a training loop that is distributed among replicas.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoopError {
    /// A device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Several devices where one is possible.
    #[error("one device is possible here, but {0} are named; use Strategy::mirrored for several")]
    Devices(usize),
    /// The processes of the loop cannot work together.
    #[error(transparent)]
    Host(#[from] HostError),
    /// `TF_CONFIG` cannot be used.
    #[error(transparent)]
    TfConfig(#[from] TfConfigError),
    /// A setting makes no sense.
    #[error(transparent)]
    Setting(#[from] JobError),
    /// The replicas have different variables.
    #[error(
        "the replicas have different variables; the function that builds the model must create the same ones on each device"
    )]
    Different,
    /// A pattern matches no variable.
    #[error("no variable matches {pattern:?}; the model has {variables:?}")]
    NoVariable {
        /// The pattern.
        pattern: String,
        /// The names of the model's variables.
        variables: Vec<String>,
    },
    /// A variable has an optimizer already.
    #[error(
        "variable {0:?} has an optimizer already; let the patterns of optimizers match different variables"
    )]
    TwoOptimizers(String),
    /// The variables cannot be read or written.
    #[error(transparent)]
    Variables(#[from] VariablesError),
    /// The step has failed.
    #[error("the step failed: {}", plain(.0))]
    Step(#[from] candle_core::Error),
    /// A gradient is not finite.
    #[error(
        "the gradient of a replica is NaN or infinite; no variable of this optimizer was changed; lower the learning rate, or set clip_norm"
    )]
    NonFinite,
    /// A setting has no effect in a loop.
    #[error("job setting `{setting}` has no effect in a loop of your own; {advice}")]
    NoEffect {
        /// The setting.
        setting: &'static str,
        /// Advice to the user.
        advice: &'static str,
    },
    /// The tensors of the replicas do not fit together.
    #[error("the tensors of the replicas cannot be gathered: {}", plain(.0))]
    Gather(candle_core::Error),
    /// The replicas make different calls.
    #[error(
        "the replicas make different calls of minimize and sum; each must make the same ones in the same order, whatever its samples are"
    )]
    OutOfStep,
    /// The processes make different calls.
    #[error(
        "the processes of the loop make different calls; each must make the same calls of run, minimize, sum, reduce and gather, in the same order and number. Or one of them has ended earlier: see its own error"
    )]
    HostsOutOfStep,
    /// Another replica has failed.
    #[error("another replica has failed: {0}")]
    Other(CollectiveError),
    /// A step has failed before.
    #[error(
        "a replica has failed in an earlier step, so the replicas may differ; build the model anew, and load its variables"
    )]
    Failed,
    /// A replica's step has panicked.
    #[error("the step of a replica has panicked: {0}")]
    Panicked(String),
}

impl LoopError {
    /// Returns the distance of the error from the cause of a failed step: 0 for a cause, more for a consequence. A
    /// panic may be a consequence of another replica's failure.
    pub(super) fn distance(&self) -> u8 {
        match self {
            Self::Other(_) | Self::OutOfStep => 3,
            Self::Host(_) | Self::HostsOutOfStep | Self::Failed => 2,
            Self::Panicked(_) => 1,
            _ => 0,
        }
    }
}

/// The reason why the processes of a loop cannot work together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The index of this process is not in the list.
    #[error(
        "the index of this process is {index}, but the list has {count} addresses; give an index from 0 to the number of addresses less 1"
    )]
    Index {
        /// The index.
        index: usize,
        /// The number of addresses.
        count: usize,
    },
    /// A text is not an address.
    #[error("{0:?} is not the address of a process; expected host:port")]
    Address(String),
    /// The list has an address twice.
    #[error("address {0:?} is twice in the list; give each process its own address")]
    Twice(String),
    /// The certificates or the token cannot be used.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// The process cannot listen on its address.
    #[error(
        "cannot listen on {listen}: {error}; the address must be one of this host's, with a port that is free"
    )]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// The system's error.
        error: io::Error,
    },
    /// The threads that carry the links cannot be started.
    #[error("cannot start the thread that carries the links: {0}")]
    Runtime(io::Error),
    /// Another process is lost, or has not connected.
    #[error(
        "process {index} of the loop ({address}) is lost: {reason}; start the program again on each host, with the same list of addresses and an index of its own, and load the variables that were saved last"
    )]
    Lost {
        /// The index of the process.
        index: usize,
        /// Its address.
        address: String,
        /// What happened.
        reason: String,
    },
    /// The processes have different variables, other values in them, or other settings of an optimizer.
    #[error(
        "the processes of the loop have different variables, values or settings of an optimizer; use the same program, the same seed, the same settings and the same file on each host"
    )]
    Differs,
    /// Not all processes have connected in time.
    #[error(
        "the processes of the loop have not met within {} s; start the program on each host, with the same list of addresses and an index of its own",
        .0.as_secs()
    )]
    Late(Duration),
    /// This process has left the others.
    #[error(
        "this process has left the loop after an earlier failure; start the program again on each host, with the same list of addresses, and load the variables that were saved last"
    )]
    Left,
}

impl From<CollectiveError> for LoopError {
    fn from(error: CollectiveError) -> Self {
        match error {
            CollectiveError::Differs { .. } => Self::OutOfStep,
            error => Self::Other(error),
        }
    }
}
