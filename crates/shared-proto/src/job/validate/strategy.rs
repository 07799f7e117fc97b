//! Checks of a job's strategy.

use crate::job::require::{Shown, require};
use crate::job::{
    BatchNorm, Correction, CrossDevice, Job, JobError, Mode, Strategy, StrategyName, Wire,
};

/// The maximum number of micro-batches of a batch. It is limited, as is the number of stages of a model, because the
/// order of a step is made from both.
const MOST_MICRO_BATCHES: u32 = 4096;
const MOST_STAGES: u32 = 1024;

/// The largest size of buckets of gradients, in MiB.
const MOST_BUCKET: f64 = 65536.0;

impl Strategy {
    /// Checks the number of steps that are computed ahead. It has an effect only where servers apply gradients as they
    /// arrive.
    pub(super) fn validate_pipeline(&self) -> Result<(), JobError> {
        let Self {
            name,
            mode,
            staleness,
            pipeline,
            ..
        } = *self;
        let unused = |other, other_value, advice| JobError::Unused {
            field: "strategy.pipeline",
            value: pipeline.to_string(),
            other,
            other_value,
            advice,
        };
        match (pipeline, mode) {
            (0, _) => Ok(()),
            (2.., _) => Err(JobError::Setting {
                field: "strategy.pipeline",
                value: pipeline.to_string(),
                expected: "must be 0 or 1",
            }),
            _ if name.has_ring() => Err(unused(
                "strategy.name",
                format!("{:?}", name.name()),
                "leave it out, or use \"parameter-server\"",
            )),
            (_, Mode::Sync) => Err(unused(
                "strategy.mode",
                "\"sync\"".to_owned(),
                "leave it out, or set the mode to \"bounded\" or \"async\"",
            )),
            (_, Mode::Bounded) if staleness == 0 => Err(unused(
                "strategy.staleness",
                staleness.to_string(),
                "leave it out, or allow a lead of at least one step",
            )),
            (_, Mode::Bounded | Mode::Async) => Ok(()),
        }
    }

    /// Checks the corrections of old gradients. They have an effect only where servers apply gradients as they arrive.
    pub(super) fn validate_correction(&self) -> Result<(), JobError> {
        let Correction {
            step_limit,
            average,
            ..
        } = self.correction;
        require!(
            step_limit.is_finite() && step_limit > 0.0,
            "strategy.correction.step_limit" => step_limit,
            "must be above 0; to leave steps as they are, set strategy.correction.enabled to false"
        );
        require!(
            (0.0..=1.0).contains(&average),
            "strategy.correction.average" => average,
            "must be from 0 (evaluate the newest weights) to 1 (their mean over a pass)"
        );
        let default = Correction::default();
        let (field, value) = if step_limit != default.step_limit {
            ("strategy.correction.step_limit", step_limit.to_string())
        } else if self.correction.look_ahead != default.look_ahead {
            let value = self.correction.look_ahead.to_string();
            ("strategy.correction.look_ahead", value)
        } else if average != default.average {
            ("strategy.correction.average", average.to_string())
        } else {
            return Ok(());
        };
        let unused = |other, other_value, advice| JobError::Unused {
            field,
            value,
            other,
            other_value,
            advice,
        };
        if self.name.has_ring() {
            let name = format!("{:?}", self.name.name());
            let advice = "leave it out, or use \"parameter-server\"";
            return Err(unused("strategy.name", name, advice));
        }
        match self.mode {
            Mode::Sync => Err(unused(
                "strategy.mode",
                "\"sync\"".to_owned(),
                "leave it out, or set the mode to \"bounded\" or \"async\"",
            )),
            Mode::Bounded | Mode::Async if !self.correction.enabled => Err(unused(
                "strategy.correction.enabled",
                "false".to_owned(),
                "leave it out, or leave `enabled` out",
            )),
            Mode::Bounded | Mode::Async => Ok(()),
        }
    }

    /// Checks the size of buckets. It applies only where workers, each with the whole model on one device, add up dense gradients.
    fn check_buckets(&self) -> Result<(), JobError> {
        let Some(mebibytes) = self.bucket_mebibytes else {
            return Ok(());
        };
        let unused = |other, other_value, advice| JobError::Unused {
            field: "strategy.bucket_mebibytes",
            value: mebibytes.to_string(),
            other,
            other_value,
            advice,
        };
        match self.name {
            _ if !(mebibytes > 0.0 && mebibytes <= MOST_BUCKET) => Err(JobError::Setting {
                field: "strategy.bucket_mebibytes",
                value: mebibytes.to_string(),
                expected: "must be more than 0 and at most 65536, or absent",
            }),
            StrategyName::MultiWorkerMirrored | StrategyName::Hybrid => {
                match (self.optimizer_copies, self.batch_norm) {
                    (Some(copies), _) => Err(unused(
                        "strategy.optimizer_copies",
                        copies.to_string(),
                        "leave one of them out",
                    )),
                    (None, BatchNorm::Synchronised) => Err(unused(
                        "strategy.batch_norm",
                        "\"synchronised\"".to_owned(),
                        "leave one of them out",
                    )),
                    (None, BatchNorm::PerReplica) => Ok(()),
                }
            }
            name => Err(unused(
                "strategy.name",
                format!("{:?}", name.name()),
                "leave it out, or use \"multi-worker-mirrored\" or \"hybrid\"",
            )),
        }
    }

    /// Returns the settings that exclude backup workers: for each its name, its value if it is set, and advice to the user.
    fn excluded_by_backups(&self) -> [(&'static str, Option<String>, &'static str); 5] {
        let strategy = match self.name {
            StrategyName::MultiWorkerMirrored | StrategyName::ModelParallel => None,
            name => Some(format!("{:?}", name.name())),
        };
        let synchronised = self.batch_norm == BatchNorm::Synchronised;
        let number = |value: u32| value.to_string();
        [
            (
                "strategy.name",
                strategy,
                "leave it out, or use \"multi-worker-mirrored\" or \"model-parallel\"",
            ),
            (
                "strategy.optimizer_copies",
                self.optimizer_copies.map(number),
                "leave one of them out",
            ),
            (
                "strategy.stage_workers",
                self.stage_workers.map(number),
                "leave one of them out: the workers of a stage group wait for each other",
            ),
            (
                "strategy.bucket_mebibytes",
                self.bucket_mebibytes.map(|mebibytes| mebibytes.to_string()),
                "leave one of them out: a gradient that may come too late leaves as a whole",
            ),
            (
                "strategy.batch_norm",
                synchronised.then(|| "\"synchronised\"".to_owned()),
                "leave one of them out: batch normalisation waits for all workers",
            ),
        ]
    }

    /// Checks the number of backup workers. They are for strategies in which workers add up whole gradients of dense variables, once in each
    /// step.
    fn check_backup_workers(&self) -> Result<(), JobError> {
        let Some(backups) = self.backup_workers else {
            return Ok(());
        };
        for (other, value, advice) in self.excluded_by_backups() {
            if let Some(other_value) = value {
                return Err(JobError::Unused {
                    field: "strategy.backup_workers",
                    value: backups.to_string(),
                    other,
                    other_value,
                    advice,
                });
            }
        }
        match backups {
            0 => Err(JobError::Setting {
                field: "strategy.backup_workers",
                value: backups.to_string(),
                expected: "must be at least 1, or absent",
            }),
            _ => Ok(()),
        }
    }

    /// Checks the place where devices add up gradients. It can be chosen only with `mirrored`, and where workers, each
    /// with the whole model, add up dense gradients.
    pub(super) fn validate_cross_device(&self) -> Result<(), JobError> {
        let Some(place) = self.cross_device else {
            return Ok(());
        };
        let among_workers = match self.name {
            StrategyName::Mirrored => false,
            StrategyName::MultiWorkerMirrored | StrategyName::Hybrid => place == CrossDevice::Nccl,
            name => {
                return Err(JobError::Unused {
                    field: "strategy.cross_device",
                    value: format!("{:?}", place.name()),
                    other: "strategy.name",
                    other_value: format!("{:?}", name.name()),
                    advice: "leave it out, or use \"mirrored\", \"multi-worker-mirrored\" or \"hybrid\"",
                });
            }
        };
        for (field, value, why) in self.excluded_by_nccl() {
            if let Some(value) = value.filter(|_| among_workers) {
                return Err(JobError::Unused {
                    field,
                    value,
                    other: "strategy.cross_device",
                    other_value: "\"nccl\"".to_owned(),
                    advice: why,
                });
            }
        }
        Ok(())
    }

    /// Returns the settings with which workers cannot add up gradients by NCCL: for each its name, its value if it is
    /// set, and advice to the user.
    fn excluded_by_nccl(&self) -> [(&'static str, Option<String>, &'static str); 5] {
        let number = |value: u32| value.to_string();
        let synchronised = self.batch_norm == BatchNorm::Synchronised;
        // With `hybrid`, rows travel in this type.
        let without_rows = self.name == StrategyName::MultiWorkerMirrored;
        let unused_wire = self.wire != Wire::F32 && without_rows;
        [
            (
                "strategy.optimizer_copies",
                self.optimizer_copies.map(number),
                "leave one of them out: each GPU has the whole state of the optimizer",
            ),
            (
                "strategy.backup_workers",
                self.backup_workers.map(number),
                "leave one of them out: NCCL waits for all GPUs",
            ),
            (
                "strategy.bucket_mebibytes",
                self.bucket_mebibytes.map(|mebibytes| mebibytes.to_string()),
                "leave one of them out: the gradients of GPUs are added up as a whole",
            ),
            (
                "strategy.batch_norm",
                synchronised.then(|| "\"synchronised\"".to_owned()),
                "leave one of them out: batch normalisation adds up in the workers' memory",
            ),
            (
                "strategy.wire",
                unused_wire.then(|| format!("{:?}", self.wire.name())),
                "leave one of them out: NCCL adds up f32",
            ),
        ]
    }

    /// Checks the settings of stages, which have an effect only with `model-parallel`.
    pub(super) fn validate_stages(&self) -> Result<(), JobError> {
        let (micro_batches, stages) = (self.micro_batches, self.stages);
        self.check_stages_count()?;
        let check = |field, value: Option<u32>, most, expected| {
            let fits = value.is_none_or(|value| (1..=most).contains(&value));
            let value = value.shown();
            match fits {
                true => Ok(()),
                false => Err(JobError::Setting {
                    field,
                    value,
                    expected,
                }),
            }
        };
        check(
            "strategy.micro_batches",
            micro_batches,
            MOST_MICRO_BATCHES,
            "must be at least 1 and at most 4096, or absent",
        )?;
        check(
            "strategy.stages",
            stages,
            MOST_STAGES,
            "must be at least 1 and at most 1024, or absent",
        )?;
        check(
            "strategy.stage_workers",
            self.stage_workers,
            MOST_STAGES,
            "must be at least 1 and at most 1024, or absent",
        )?;
        let without_a_stage = stages.filter(|stages| *stages < self.stage_groups().workers);
        check(
            "strategy.stages",
            without_a_stage,
            0,
            "must be at least `strategy.stage_workers`, so that each worker has a stage",
        )
    }
}

impl Strategy {
    /// Checks that no setting of stages is given without `model-parallel`.
    fn check_stages_count(&self) -> Result<(), JobError> {
        let schedule = self.schedule;
        let schedule = schedule.map(|schedule| format!("{:?}", schedule.name()));
        let number = |value: Option<u32>| value.map(|value| value.to_string());
        let given = [
            ("strategy.schedule", schedule),
            ("strategy.micro_batches", number(self.micro_batches)),
            ("strategy.stages", number(self.stages)),
            ("strategy.stage_workers", number(self.stage_workers)),
        ];
        let mut given = given
            .into_iter()
            .filter_map(|(field, value)| Some((field, value?)));
        match given.next() {
            Some((field, value)) if self.name != StrategyName::ModelParallel => {
                Err(JobError::Unused {
                    field,
                    value,
                    other: "strategy.name",
                    other_value: format!("{:?}", self.name.name()),
                    advice: "leave it out, or use \"model-parallel\"",
                })
            }
            _ => Ok(()),
        }
    }
}

impl Job {
    /// Checks that the workers that the job waits for are enough to hold a whole model.
    pub(super) fn validate_stage_workers(&self) -> Result<(), JobError> {
        let needed = self.strategy.stage_groups().workers;
        match self.cluster.workers {
            Some(workers) if workers < needed => Err(JobError::Setting {
                field: "cluster.workers",
                value: workers.to_string(),
                expected: "must be at least `strategy.stage_workers`, or absent: so many workers hold a model together",
            }),
            _ => Ok(()),
        }
    }

    /// Checks the number of backup workers, which must leave a worker that each step waits for.
    pub(super) fn validate_backup_workers(&self) -> Result<(), JobError> {
        self.strategy.check_backup_workers()?;
        match (self.strategy.backup_workers, self.cluster.workers) {
            (Some(backups), Some(workers)) if backups >= workers => Err(JobError::Setting {
                field: "strategy.backup_workers",
                value: backups.to_string(),
                expected: "must be less than `cluster.workers`: a step counts the gradient of at least one worker",
            }),
            _ => Ok(()),
        }
    }

    /// Checks the size of buckets. With it, no setting may change gradients after the backward pass, because they are
    /// sent before its end.
    pub(super) fn validate_buckets(&self) -> Result<(), JobError> {
        self.strategy.check_buckets()?;
        let before_leaving = [
            ("clip_value", self.clip_value.map(|value| value.to_string())),
            ("clip_norm", self.clip_norm.map(|norm| norm.to_string())),
            (
                "accumulate",
                (self.accumulate > 1).then(|| self.accumulate.to_string()),
            ),
        ];
        if let Some(mebibytes) = self.strategy.bucket_mebibytes {
            for (other, other_value) in before_leaving {
                if let Some(other_value) = other_value {
                    return Err(JobError::Unused {
                        field: "strategy.bucket_mebibytes",
                        value: mebibytes.to_string(),
                        other,
                        other_value,
                        advice: "leave one of them out",
                    });
                }
            }
        }
        Ok(())
    }
}
