//! Classification of errors. After an error of its own, only this worker leaves. An error that every worker would meet
//! ends the job.

use daemon::membership::MembershipError;
use daemon::process::Failure;
use replica::ReplicaError;
use shared_proto::wire::WorkerFailure;
use variables::VariablesError;

use crate::error::WorkerError;
use crate::strategy::StrategyError;

/// Exit code of a worker that cannot work while others can.
pub(crate) const CANNOT_WORK: u8 = 3;

/// Returns whether an exit code means that this worker cannot work while others can.
pub fn cannot_work(code: Option<i32>) -> bool {
    code == Some(CANNOT_WORK.into())
}

impl Failure for WorkerError {
    fn exit_code(&self) -> u8 {
        match self {
            Self::CannotWork(_) => CANNOT_WORK,
            _ => 1,
        }
    }
}

/// The report of an error to the coordinator.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) failure: WorkerFailure,
    pub(crate) error: String,
}

impl WorkerError {
    /// Returns the report to the coordinator; `None` for errors that the coordinator itself has reported.
    pub(crate) fn to_tell(&self) -> Option<Told> {
        let failure = self.failure();
        match self {
            Self::Membership(_) if failure == WorkerFailure::Unspecified => None,
            error => Some(Told {
                failure,
                error: error.to_string(),
            }),
        }
    }

    /// Returns whether this worker may still be able to work on another job.
    pub(crate) fn is_of_this_job(&self) -> bool {
        let of_the_process = matches!(self, Self::Device(_) | Self::Listen { .. });
        !of_the_process && self.to_tell().is_some()
    }

    /// Returns what keeps this worker from working; unspecified if every worker would meet the same.
    fn failure(&self) -> WorkerFailure {
        match self {
            Self::Membership(MembershipError::Refused(_)) => WorkerFailure::Refused,
            Self::Strategy(StrategyError::Answer { .. } | StrategyError::Store(_)) => {
                WorkerFailure::Refused
            }
            Self::Membership(_) | Self::Strategy(_) => WorkerFailure::Unspecified,
            Self::Build(error) if error.is_out_of_memory() => WorkerFailure::Memory,
            Self::Build(ReplicaError::Input(_)) => WorkerFailure::Data,
            Self::Build(ReplicaError::Thread(_)) => WorkerFailure::Memory,
            Self::Build(_) => WorkerFailure::Model,
            Self::Replica(error) => failure_in_a_step(error),
            Self::Device(_) => WorkerFailure::Device,
            Self::RunDir { .. } => WorkerFailure::RunDirectory,
            Self::Protocol(_) | Self::Location(_) | Self::Job(_) | Self::Listen { .. } => {
                WorkerFailure::Refused
            }
            Self::CannotWork(_) => WorkerFailure::Unspecified,
        }
    }

    /// Returns the error with an explanation, if it is this worker's own.
    pub(crate) fn explained(self) -> Self {
        match self.failure() {
            WorkerFailure::Unspecified => self,
            _ => Self::CannotWork(Box::new(self)),
        }
    }
}

fn failure_in_a_step(error: &ReplicaError) -> WorkerFailure {
    match error {
        error if error.is_out_of_memory() => WorkerFailure::Memory,
        ReplicaError::Input(_) => WorkerFailure::Data,
        // It has another number of devices than the others of its ring.
        ReplicaError::Devices(_) => WorkerFailure::Device,
        ReplicaError::Variables(VariablesError::File { .. }) => WorkerFailure::RunDirectory,
        // The same batch and weights would fail on every worker.
        _ => WorkerFailure::Unspecified,
    }
}

#[cfg(test)]
mod tests {
    use checkpoint::CheckpointError;

    use super::*;
    use model::input::InputError;

    #[test]
    fn a_workers_own_troubles_are_told_from_the_jobs() {
        let candle = |text: &str| ReplicaError::Compute(candle_core::Error::msg(text));
        let memory = "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";
        let no_disk = || VariablesError::File {
            action: "written",
            path: "model.safetensors".into(),
            source: std::io::Error::other("disk"),
        };
        let no_store = || CheckpointError::NotFound("the store".to_owned());
        for (error, expected) in [
            (
                WorkerError::Build(InputError::NoPlace.into()),
                WorkerFailure::Data,
            ),
            (WorkerError::Build(candle("shape")), WorkerFailure::Model),
            (WorkerError::Build(candle(memory)), WorkerFailure::Memory),
            (WorkerError::Replica(candle(memory)), WorkerFailure::Memory),
            (
                WorkerError::Replica(no_disk().into()),
                WorkerFailure::RunDirectory,
            ),
            (
                WorkerError::Replica(candle("shape")),
                WorkerFailure::Unspecified,
            ),
            (
                WorkerError::Replica(ReplicaError::Panicked("x".to_owned())),
                WorkerFailure::Unspecified,
            ),
            (
                WorkerError::Membership(MembershipError::Refused("other data".to_owned())),
                WorkerFailure::Refused,
            ),
            (
                WorkerError::Strategy(StrategyError::Store(no_store())),
                WorkerFailure::Refused,
            ),
        ] {
            let told = error.to_tell().unwrap();
            assert_eq!(told.failure, expected, "{error}");
            let own = expected != WorkerFailure::Unspecified;
            let explained = error.explained();
            assert_eq!(
                daemon::process::Failure::exit_code(&explained) == CANNOT_WORK,
                own
            );
            assert_eq!(explained.to_string().contains("cannot work"), own);
        }
        let failed = WorkerError::Membership(MembershipError::JobFailed("x".to_owned()));
        assert!(failed.to_tell().is_none());
    }
}
