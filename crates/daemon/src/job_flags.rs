//! A job's settings by flag or by environment variable.

use std::path::PathBuf;

use shared_proto::job::{Job, JobError, Mode, Optimizer, Strategy, StrategyName, Wire};

/// A job's settings that can be given by flag or environment; they override its file.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
#[command(next_help_heading = "Job")]
pub struct JobFlags {
    /// Name of the job.
    #[arg(long, env = "FLAMBEAU_NAME")]
    pub name: Option<String>,
    /// Data set, such as digits, mnist or csv, or a source of your own.
    #[arg(long, env = "FLAMBEAU_DATA")]
    pub data: Option<String>,
    /// The folder or file of the data.
    #[arg(long, env = "FLAMBEAU_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// csv, parquet: the column with the label.
    #[arg(long, env = "FLAMBEAU_LABEL", value_name = "COLUMN")]
    pub label: Option<String>,
    /// Model, such as mlp, cnn or deepfm, or one of your own.
    #[arg(long, env = "FLAMBEAU_MODEL")]
    pub model: Option<String>,
    /// Widths of the hidden layers, as in 256,64.
    #[arg(
        long,
        env = "FLAMBEAU_HIDDEN",
        value_delimiter = ',',
        value_name = "N,..."
    )]
    pub hidden: Option<Vec<usize>>,
    /// Strategy: parameter-server, multi-worker-mirrored, hybrid, mirrored, central-storage, one-device or model-parallel.
    #[arg(long, env = "FLAMBEAU_STRATEGY", value_parser = named::<StrategyName>)]
    pub strategy: Option<StrategyName>,
    /// Number of parameter servers.
    #[arg(long, env = "FLAMBEAU_PS", value_name = "N")]
    pub ps: Option<u32>,
    /// Number of workers.
    #[arg(long, env = "FLAMBEAU_WORKERS", value_name = "N")]
    pub workers: Option<u32>,
    /// Training mode: sync, bounded or async.
    #[arg(long, env = "FLAMBEAU_MODE", value_parser = named::<Mode>)]
    pub mode: Option<Mode>,
    /// Staleness bound: the steps by which a worker may lead; implies --mode bounded.
    #[arg(long, env = "FLAMBEAU_STALENESS", value_name = "K")]
    pub staleness: Option<u64>,
    /// Steps that a worker computes ahead of the acknowledgement of its gradients, outside sync mode: 0 or 1.
    #[arg(long, env = "FLAMBEAU_PIPELINE", value_name = "N")]
    pub pipeline: Option<u32>,
    /// Numbers in which weights and gradients travel: f32, bf16 or f16.
    #[arg(long, env = "FLAMBEAU_WIRE", value_parser = named::<Wire>)]
    pub wire: Option<Wire>,
    /// sgd, momentum, adagrad, rmsprop, adam, adamw or ftrl, with its default settings.
    #[arg(long, env = "FLAMBEAU_OPTIMIZER", value_name = "NAME", value_parser = Optimizer::NAMES)]
    pub optimizer: Option<String>,
    /// Step size.
    #[arg(
        long,
        env = "FLAMBEAU_LEARNING_RATE",
        value_name = "X",
        allow_negative_numbers = true
    )]
    pub learning_rate: Option<f32>,
    /// Samples in a worker's step.
    #[arg(long, env = "FLAMBEAU_BATCH_SIZE", value_name = "B")]
    pub batch_size: Option<u32>,
    /// Largest global norm of a worker's gradients.
    #[arg(
        long,
        env = "FLAMBEAU_CLIP_NORM",
        value_name = "X",
        allow_negative_numbers = true
    )]
    pub clip_norm: Option<f32>,
    /// Passes over the training data.
    #[arg(long, env = "FLAMBEAU_EPOCHS", value_name = "E")]
    pub epochs: Option<u32>,
    /// Stop after so many steps.
    #[arg(long, env = "FLAMBEAU_STEPS", value_name = "N")]
    pub steps: Option<u64>,
    /// Seed, which decides initial values and the order of samples.
    #[arg(long, env = "FLAMBEAU_SEED", value_name = "S")]
    pub seed: Option<u64>,
    /// The time without a heartbeat after which a process counts as dead, in seconds.
    #[arg(
        long,
        env = "FLAMBEAU_LEASE_SECONDS",
        value_name = "X",
        allow_negative_numbers = true
    )]
    pub lease_seconds: Option<f64>,
    /// The run directory: metrics, summary, checkpoints and the model.
    #[arg(long, env = "FLAMBEAU_RUN_DIR", value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Any setting of the job file, as in schedule.kind=cosine; may be given more than once, or
    /// several separated by semicolons.
    #[arg(
        long,
        env = "FLAMBEAU_SET",
        value_delimiter = ';',
        value_name = "KEY=VALUE"
    )]
    pub set: Vec<String>,
}

/// Reads the name of a setting's value, as a job file has it.
///
/// # Errors
/// If the text is not one of the names.
pub fn named<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    let value = serde::de::value::StrDeserializer::<serde::de::value::Error>::new(text);
    T::deserialize(value).map_err(|error| error.to_string())
}

impl JobFlags {
    /// Returns whether these settings say what to train, and not only how large the cluster is and where it keeps its files.
    pub fn name_a_job(&self) -> bool {
        let of_cluster = |setting: &&String| {
            let tables = ["cluster.", "checkpoint."];
            tables
                .iter()
                .any(|table| setting.trim_start().starts_with(table))
        };
        let of_job = self.set.iter().filter(|setting| !of_cluster(setting));
        let job = Self {
            ps: None,
            workers: None,
            lease_seconds: None,
            run_dir: None,
            set: of_job.cloned().collect(),
            ..self.clone()
        };
        job != Self::default()
    }

    /// Returns the job of `file` (or the default job) with these flags applied, and checks it.
    ///
    /// # Errors
    /// If the resulting job is invalid.
    pub fn over(self, file: Option<Job>) -> Result<Job, JobError> {
        fn set<T>(place: &mut T, flag: Option<T>) {
            if let Some(value) = flag {
                *place = value;
            }
        }
        fn set_some<T>(place: &mut Option<T>, flag: Option<T>) {
            if flag.is_some() {
                *place = flag;
            }
        }
        let mut job = file.unwrap_or_default();
        set(&mut job.name, self.name);
        set(&mut job.data.kind, self.data);
        set_some(&mut job.data.dir, self.data_dir);
        set(&mut job.data.label, self.label);
        set(&mut job.model.name, self.model);
        set(&mut job.model.hidden, self.hidden);
        set_some(&mut job.cluster.ps, self.ps);
        set_some(&mut job.cluster.workers, self.workers);
        if let Some(name) = self.strategy.filter(|name| *name != job.strategy.name) {
            (job.strategy.name, job.strategy.mode) = (name, name.usual_mode());
        }
        if let Some(staleness) = self.staleness {
            job.strategy.staleness = staleness;
            job.strategy.mode = self.mode.unwrap_or(Mode::Bounded);
            if job.strategy.mode != Mode::Bounded {
                return Err(JobError::staleness_unused(&job.strategy));
            }
        }
        if self.mode.is_some_and(|mode| mode != job.strategy.mode) {
            // A bound in the file is meant for the file's mode, not for this one.
            job.strategy.staleness = Strategy::default().staleness;
        }
        set(&mut job.strategy.mode, self.mode);
        if self.strategy.is_some_and(StrategyName::has_ring) || self.mode == Some(Mode::Sync) {
            // The file computes ahead with servers that apply gradients as they come, and here there are none.
            job.strategy.pipeline = Strategy::default().pipeline;
        }
        set(&mut job.strategy.pipeline, self.pipeline);
        set(&mut job.strategy.wire, self.wire);
        // If the flag and the file name the same optimizer, the file's settings of it stay.
        if let Some(name) = self.optimizer.filter(|name| name != job.optimizer.name()) {
            set(&mut job.optimizer, Optimizer::named(&name));
        }
        set(job.optimizer.learning_rate_mut(), self.learning_rate);
        set(&mut job.batch_size, self.batch_size);
        set_some(&mut job.clip_norm, self.clip_norm);
        set(&mut job.epochs, self.epochs);
        set_some(&mut job.steps, self.steps);
        set(&mut job.seed, self.seed);
        set(&mut job.cluster.lease_seconds, self.lease_seconds);
        set_some(&mut job.run_dir, self.run_dir);
        for setting in &self.set {
            job = job.with(setting)?;
        }
        job.check_staleness_counts()?;
        job.validate()?;
        Ok(job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_override_the_file_and_the_file_overrides_defaults() {
        let file =
            Job::from_toml("epochs = 7\nbatch_size = 5\n[optimizer]\nname = \"adam\"\nbeta1 = 0.5")
                .unwrap();
        let flags = JobFlags {
            epochs: Some(3),
            optimizer: Some("adam".to_owned()),
            staleness: Some(2),
            ..JobFlags::default()
        };
        let job = flags.over(Some(file)).unwrap();
        assert_eq!((job.epochs, job.batch_size, job.seed), (3, 5, 1));
        assert_eq!(job.strategy.mode, Mode::Bounded);
        assert!(matches!(job.optimizer, Optimizer::Adam(adam) if adam.beta1 == 0.5));
        let other = JobFlags {
            optimizer: Some("sgd".to_owned()),
            learning_rate: Some(0.3),
            ..JobFlags::default()
        };
        let job = other.over(None).unwrap();
        assert!(matches!(job.optimizer, Optimizer::Sgd(sgd) if sgd.learning_rate == 0.3));
    }

    #[test]
    fn steps_computed_ahead_are_of_the_mode_that_the_file_names() {
        let file = || Some(Job::parse("[strategy]\nmode = \"async\"\npipeline = 1").unwrap());
        let pipeline = |flags: JobFlags| flags.over(file()).map(|job| job.strategy.pipeline);
        let flags = JobFlags::default;
        assert_eq!(pipeline(flags()).unwrap(), 1);
        let staleness = Some(3);
        assert_eq!(
            pipeline(JobFlags {
                staleness,
                ..flags()
            })
            .unwrap(),
            1
        );
        let mode = Some(Mode::Sync);
        assert_eq!(pipeline(JobFlags { mode, ..flags() }).unwrap(), 0);
        let strategy = Some(StrategyName::MultiWorkerMirrored);
        assert_eq!(
            pipeline(JobFlags {
                strategy,
                ..flags()
            })
            .unwrap(),
            0
        );
        let given = Some(1);
        let error = pipeline(JobFlags {
            mode,
            pipeline: given,
            ..flags()
        })
        .unwrap_err();
        assert!(
            error.to_string().contains("`strategy.pipeline` is 1"),
            "{error}"
        );
    }

    #[test]
    fn a_staleness_bound_that_would_not_count_is_refused_with_both_settings() {
        let flags = |mode, staleness| JobFlags {
            mode,
            staleness,
            ..JobFlags::default()
        };
        let file = |text: &str| Some(Job::parse(text).unwrap());
        let sync = "[strategy]\nmode = \"sync\"\nstaleness = 3";
        for refused in [
            flags(Some(Mode::Sync), Some(3)).over(None),
            // The mode is the default, but was given as a flag.
            flags(Some(Mode::Async), Some(4)).over(None),
            flags(None, None).over(file(sync)),
        ] {
            let error = refused.unwrap_err().to_string();
            assert!(
                error.contains("`strategy.staleness` is") && error.contains("`strategy.mode`"),
                "{error}"
            );
        }
        let bounded = "[strategy]\nmode = \"bounded\"\nstaleness = 8";
        let job = flags(Some(Mode::Sync), None).over(file(bounded)).unwrap();
        assert_eq!(job.strategy.mode, Mode::Sync);
        let job = flags(None, Some(3))
            .over(file("[strategy]\nmode = \"sync\""))
            .unwrap();
        assert_eq!(
            (job.strategy.mode, job.strategy.staleness),
            (Mode::Bounded, 3)
        );
    }

    #[test]
    fn any_setting_can_be_given_by_its_key() {
        let set = |settings: &[&str]| {
            let set = settings.iter().map(|s| (*s).to_owned()).collect();
            let flags = JobFlags {
                set,
                ..JobFlags::default()
            };
            flags.over(None)
        };
        let job = set(&[
            "optimizer.beta1=0.5",
            "schedule.kind=cosine",
            "model.hidden=[8, 4]",
        ]);
        let job = job.unwrap();
        assert!(matches!(job.optimizer, Optimizer::Adam(adam) if adam.beta1 == 0.5));
        assert_eq!(job.model.hidden, [8, 4]);
        for wrong in ["optimizer.beta3=0.5", "optimizer", "steps=0", "data=5"] {
            let error = set(&[wrong]).unwrap_err().to_string();
            let key = wrong.split('=').next().unwrap().rsplit('.').next().unwrap();
            assert!(error.contains(key), "{error}");
        }
    }

    #[test]
    fn names_are_read_as_in_the_file() {
        assert_eq!(named::<Wire>("bf16"), Ok(Wire::Bf16));
        let wrong = named::<Mode>("eventually").unwrap_err();
        assert!(
            wrong.contains("eventually") && wrong.contains("bounded"),
            "{wrong}"
        );
    }
}
