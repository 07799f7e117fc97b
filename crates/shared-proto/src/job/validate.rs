//! Checks of a job's settings. `strategy` has those of its strategy.

mod strategy;

use super::require::require;
use super::{BatchNorm, Evaluations, Job, JobError, MOST_SERVERS, Mode, Strategy, groups};

/// The longest time that a setting may give, in seconds: 30 days. No wait in a job is longer, and the time can be added
/// to any instant without overflow.
const LONGEST_SECONDS: f64 = 30.0 * 86_400.0;

/// The most mebibytes of streamed data that are shuffled together.
const MOST_SHUFFLED: u32 = 1 << 16;

/// The most incremental checkpoints in a row. A restore reads the files of all of them.
const MOST_INCREMENTS: u32 = 64;

/// The most batches that a worker may prepare ahead: each takes memory.
const MAX_PREFETCH: u32 = 1024;

/// The most elements of the vector of a category.
const MAX_EMBEDDING: usize = 1 << 16;

fn is_positive(number: f64) -> bool {
    number.is_finite() && number > 0.0
}

impl Job {
    /// Refuses a staleness bound other than the default in a mode that does not use it, because the user expects it to
    /// have an effect.
    ///
    /// # Errors
    /// [`JobError::Unused`] names both settings.
    pub fn check_staleness_counts(&self) -> Result<(), JobError> {
        let strategy = &self.strategy;
        let default = Strategy::default().staleness;
        match strategy.mode {
            Mode::Sync | Mode::Async if strategy.staleness != default => {
                Err(JobError::staleness_unused(strategy))
            }
            _ => Ok(()),
        }
    }

    /// Checks that every setting makes sense.
    ///
    /// # Errors
    /// Names the first setting that makes no sense.
    pub fn validate(&self) -> Result<(), JobError> {
        self.validate_training()?;
        self.validate_data()?;
        self.validate_model()?;
        self.validate_strategy()?;
        self.validate_cluster()?;
        self.validate_checkpoint()?;
        self.data.validate_columns()?;
        if let Some(pictures) = &self.data.pictures {
            pictures.validate()?;
        }
        self.objective.validate()?;
        self.validate_monitors()?;
        self.optimizer.validate()?;
        for group in &self.groups {
            group.validate(&self.optimizer)?;
        }
        for tables in &self.tables {
            tables.validate()?;
        }
        self.schedule.validate()
    }

    fn validate_training(&self) -> Result<(), JobError> {
        require!(!self.name.is_empty(), "name" => self.name, "must not be empty");
        require!(self.epochs > 0, "epochs" => self.epochs, "must be at least 1");
        require!(self.steps != Some(0), "steps" => self.steps, "must be at least 1, or absent");
        require!(self.batch_size > 0, "batch_size" => self.batch_size, "must be at least 1");
        require!(self.accumulate > 0, "accumulate" => self.accumulate, "must be at least 1");
        require!(self.log_every > 0, "log_every" => self.log_every, "must be at least 1");
        let clip = self.clip_norm;
        require!(clip.is_none_or(|c| is_positive(c.into())), "clip_norm" => clip, "must be positive, or absent");
        let clip = self.clip_value;
        require!(clip.is_none_or(|c| is_positive(c.into())), "clip_value" => clip, "must be positive, or absent");
        let ema = self.ema_decay;
        require!(
            ema.is_none_or(|decay| decay > 0.0 && decay < 1.0),
            "ema_decay" => ema, "must lie between 0 and 1, or be absent"
        );
        Ok(())
    }

    fn validate_data(&self) -> Result<(), JobError> {
        let data = &self.data;
        let held_out = data.held_out;
        require!(held_out > 0.0 && held_out < 1.0, "data.held_out" => held_out, "must lie between 0 and 1");
        require!(data.prefetch <= MAX_PREFETCH, "data.prefetch" => data.prefetch, "must be at most 1024");
        require!(
            (1..=MOST_SHUFFLED).contains(&data.shuffle_mebibytes),
            "data.shuffle_mebibytes" => data.shuffle_mebibytes, "must be at least 1 and at most 65536"
        );
        require!(!data.kind.is_empty(), "data.kind" => data.kind, "must not be empty");
        Ok(())
    }

    fn validate_model(&self) -> Result<(), JobError> {
        let model = &self.model;
        require!(!model.name.is_empty(), "model.name" => model.name, "must not be empty");
        require!(!model.hidden.contains(&0), "model.hidden" => model.hidden, "no layer may be empty");
        require!(!model.channels.contains(&0), "model.channels" => model.channels, "no layer may be empty");
        let bad = |text: &&String| !groups::is_pattern(text);
        if let Some(text) = model.init_except.iter().find(bad) {
            return Err(JobError::Setting {
                field: "model.init_except",
                value: format!("{text:?}"),
                expected: "must be patterns of names, as in \"output.*\"",
            });
        }
        if !model.init_except.is_empty() && model.init_from.is_none() {
            return Err(JobError::Unused {
                field: "model.init_except",
                value: "given".to_owned(),
                other: "model.init_from",
                other_value: "absent".to_owned(),
                advice: "leave it out, or name a file with initial values",
            });
        }
        require!(
            (1..=MAX_EMBEDDING).contains(&model.embedding),
            "model.embedding" => model.embedding, "must be at least 1 and at most 65536"
        );
        Ok(())
    }

    fn validate_strategy(&self) -> Result<(), JobError> {
        let Strategy {
            name,
            mode,
            batch_norm,
            optimizer_copies,
            ..
        } = self.strategy;
        if let (BatchNorm::Synchronised, Err(advice)) = (batch_norm, name.adds_up_within_steps()) {
            return Err(JobError::Unused {
                field: "strategy.batch_norm",
                value: "\"synchronised\"".to_owned(),
                other: "strategy.name",
                other_value: format!("{:?}", name.name()),
                advice,
            });
        }
        if let Some(copies) = optimizer_copies.filter(|_| !name.has_many_replicas()) {
            return Err(JobError::Unused {
                field: "strategy.optimizer_copies",
                value: copies.to_string(),
                other: "strategy.name",
                other_value: format!("{:?}", name.name()),
                advice: "leave it out, or use \"multi-worker-mirrored\", \"hybrid\" or \"model-parallel\"",
            });
        }
        require!(
            optimizer_copies != Some(0),
            "strategy.optimizer_copies" => optimizer_copies, "must be at least 1, or absent"
        );
        require!(
            name.has_servers() || mode == Mode::Sync,
            "strategy.mode" => mode.name().to_owned(), "must be \"sync\", or absent, for strategies without parameter servers"
        );
        self.validate_buckets()?;
        self.strategy.validate_stages()?;
        self.strategy.validate_pipeline()?;
        self.strategy.validate_correction()?;
        self.strategy.validate_cross_device()?;
        Ok(())
    }

    fn validate_cluster(&self) -> Result<(), JobError> {
        let (cluster, name) = (&self.cluster, self.strategy.name);
        let shards = cluster
            .ps
            .is_none_or(|ps| (1..=MOST_SERVERS).contains(&(ps as usize)));
        require!(shards, "cluster.ps" => cluster.ps, "must lie between 1 and 65536, or be absent");
        require!(cluster.workers != Some(0), "cluster.workers" => cluster.workers, "must be at least 1, or absent");
        self.validate_stage_workers()?;
        self.validate_backup_workers()?;
        require!(
            !name.has_one_worker() || cluster.workers.is_none_or(|workers| workers == 1),
            "cluster.workers" => cluster.workers, "must be 1, or absent, for the strategies mirrored, central-storage and one-device"
        );
        let lease = cluster.lease_seconds;
        require!((0.1..=3600.0).contains(&lease), "cluster.lease_seconds" => lease, "must lie between 0.1 and 3600");
        let stall = cluster.stall_seconds;
        require!(
            (lease..=LONGEST_SECONDS).contains(&stall),
            "cluster.stall_seconds" => stall, "must lie between cluster.lease_seconds and 2592000 (30 days)"
        );
        Ok(())
    }

    fn validate_checkpoint(&self) -> Result<(), JobError> {
        let checkpoint = &self.checkpoint;
        require!(
            is_positive(checkpoint.every_seconds) && checkpoint.every_seconds <= LONGEST_SECONDS,
            "checkpoint.every_seconds" => checkpoint.every_seconds, "must be positive, and at most 2592000 (30 days)"
        );
        require!(
            checkpoint.every_steps != Some(0),
            "checkpoint.every_steps" => checkpoint.every_steps, "must be at least 1, or absent"
        );
        require!(checkpoint.keep > 0, "checkpoint.keep" => checkpoint.keep, "must be at least 1");
        require!(
            checkpoint.increments <= MOST_INCREMENTS,
            "checkpoint.increments" => checkpoint.increments, "must be at most 64"
        );
        require!(
            checkpoint.snapshot_mebibytes > 0,
            "checkpoint.snapshot_mebibytes" => checkpoint.snapshot_mebibytes, "must be at least 1"
        );
        Ok(())
    }

    fn validate_monitors(&self) -> Result<(), JobError> {
        let monitors = [
            ("early_stopping", self.early_stopping.is_some()),
            ("plateau", self.plateau.is_some()),
            ("best", self.best.is_some()),
        ];
        if let (Some((field, _)), Evaluations::Last) = (
            monitors.into_iter().find(|(_, given)| *given),
            self.evaluations,
        ) {
            return Err(JobError::Unused {
                field,
                value: "given".to_owned(),
                other: "evaluations",
                other_value: "\"last\"".to_owned(),
                advice: "leave it out, or set evaluations to \"each-epoch\"",
            });
        }
        if let Some(early_stopping) = &self.early_stopping {
            early_stopping.validate()?;
        }
        if let Some(plateau) = &self.plateau {
            plateau.validate()?;
        }
        if let Some(best) = &self.best {
            best.validate()?;
        }
        Ok(())
    }
}
