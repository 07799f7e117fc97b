//! The input: what happens to a coordinator.

use arbitrary::Arbitrary;
use fuzz_input::Near;
use shared_proto::job::{Job, Mode, StrategyName};

/// The lowest `Setting::mode` of a job with rings of workers.
const RINGS: u8 = 192;

/// The job, and how far it is at the beginning.
#[derive(Arbitrary, Debug, Default)]
pub(super) struct Setting {
    mode: u8,
    servers: Option<bool>,
    workers: u8,
    steps: Option<u8>,
    run_dir: bool,
    pub(super) checkpoints: bool,
    /// True if the job's members have registered and train.
    pub(super) begun: bool,
}

impl Setting {
    /// A job that trains with one server and two workers.
    pub(super) fn training(mode: u8) -> Self {
        Self {
            mode,
            servers: Some(false),
            workers: 1,
            checkpoints: true,
            begun: true,
            ..Self::default()
        }
    }

    /// A job without servers, in which two workers form a ring.
    pub(super) fn rings() -> Self {
        Self {
            mode: RINGS,
            servers: None,
            ..Self::training(0)
        }
    }

    pub(super) fn job(&self) -> Job {
        let mut job = Job {
            epochs: 2,
            batch_size: 4,
            steps: self.steps.map(|steps| 1 + u64::from(steps)),
            run_dir: self.run_dir.then(|| "run".into()),
            ..Job::default()
        };
        job.strategy.mode = [Mode::Async, Mode::Bounded, Mode::Sync][usize::from(self.mode % 3)];
        job.cluster.ps = self.servers.map(|two| 1 + u32::from(two));
        if self.mode >= RINGS {
            let name = StrategyName::MultiWorkerMirrored;
            (job.strategy.name, job.strategy.mode, job.cluster.ps) = (name, Mode::Sync, None);
        }
        if job.strategy.mode == Mode::Bounded {
            job.strategy.staleness = 1;
        }
        job.cluster.workers = Some(1 + u32::from(self.workers % 2));
        (job.cluster.lease_seconds, job.cluster.stall_seconds) = (2.0, 5.0);
        (job.checkpoint.every_steps, job.checkpoint.keep) = (Some(2), 1);
        job
    }
}

/// One thing that happens to a coordinator.
#[derive(Arbitrary, Debug)]
pub(super) enum Event {
    /// A worker does what it has to do next, `times % 8 + 1` times.
    Work { worker: u8, times: u8 },
    /// The servers write and load values, and the store works.
    Serve,
    /// A member calls.
    Call { caller: Caller, call: Call },
    /// A process registers.
    Register(Registration),
    /// Time passes, in which the members in the bit mask `alive` send heartbeats.
    Pass { ticks: u8, alive: u8, long: bool },
    /// The store carries out its task. It fails unless `works` is true.
    Store { works: bool },
    /// A user stops the job or, if `other`, a job of another name.
    Stop { other: bool },
    /// Another run takes the store of checkpoints.
    TakenOver,
    /// The coordinator restarts. If `crash`, it loses the changes since the newest urgent one.
    Restart { crash: bool, resume_failed: bool },
    /// Another run begins with the newest checkpoint.
    NewRun,
}

/// The sender of a call.
#[derive(Arbitrary, Debug)]
pub(super) struct Caller {
    pub(super) server: bool,
    pub(super) who: u8,
    pub(super) generation: Near,
    pub(super) epoch: Near,
    pub(super) clock: Near,
    pub(super) sequence: Near,
}

impl Caller {
    /// Returns a worker, or a server, that states everything correctly in its calls.
    pub(super) fn good(server: bool, who: u8) -> Self {
        Self {
            server,
            who,
            generation: Near::Expected,
            epoch: Near::Expected,
            clock: Near::Expected,
            sequence: Near::Expected,
        }
    }
}

#[derive(Arbitrary, Debug, Default)]
pub(super) struct Registration {
    pub(super) server: bool,
    pub(super) who: u8,
    pub(super) process: u8,
    pub(super) attempt: u8,
    /// The shard of which a server still has the values in memory.
    pub(super) holding: Option<u8>,
    /// The memory of a server, in bytes; `None` if it does not state it.
    pub(super) capacity: Option<u16>,
}

/// A call of a member.
#[derive(Arbitrary, Debug)]
pub(super) enum Call {
    Heartbeat,
    Variables {
        model: u8,
        samples: Near,
        digest: u8,
    },
    Initialized,
    LeaseWork,
    FinishStep(Finish),
    Lost {
        shard: u8,
        updates: Near,
        first: Near,
        last: Near,
    },
    Evaluated {
        epoch: Near,
        loss: Option<f64>,
        model: bool,
    },
    Waits {
        on: u8,
    },
    Leave {
        failure: u8,
        error: bool,
    },
    Drain,
    JoinRing(Join),
    ShardReport {
        shard: u8,
        count: Near,
        bad: bool,
    },
    Saved {
        shard: u8,
        number: Near,
        fails: bool,
        full: bool,
    },
    Restored {
        shard: u8,
        epoch: Near,
        fails: bool,
        failure: u8,
        marks: Vec<(u8, Near, Near)>,
    },
}

impl Call {
    /// The report of a server that has written its part of a checkpoint.
    pub(super) fn saved(shard: u8, number: Near) -> Self {
        Self::Saved {
            shard,
            number,
            fails: false,
            full: false,
        }
    }

    /// The report of a server that has loaded its values.
    pub(super) fn restored(shard: u8, epoch: Near) -> Self {
        Self::Restored {
            shard,
            epoch,
            fails: false,
            failure: 0,
            marks: Vec::new(),
        }
    }
}

/// A worker's request to join the next ring.
#[derive(Arbitrary, Debug)]
pub(super) struct Join {
    /// The ring in which the worker got its values. `has_values` says whether it has any.
    pub(super) ring: Near,
    pub(super) has_values: bool,
    /// The worker with which the sender could not exchange data.
    pub(super) lost: Option<u8>,
    /// The clock before the step in which the worker's gradient was left out.
    pub(super) skipped: Option<Near>,
}

impl Join {
    /// A worker that has the values of the newest ring, or none.
    pub(super) fn good(has_values: bool) -> Self {
        Self {
            ring: Near::Expected,
            has_values,
            lost: None,
            skipped: None,
        }
    }
}

/// The report of finished steps.
#[derive(Arbitrary, Debug)]
pub(super) struct Finish {
    pub(super) steps: Near,
    pub(super) split: Near,
    pub(super) position: Near,
    pub(super) skipped: Near,
    pub(super) pushes: Near,
    pub(super) loss: f64,
    pub(super) time: Option<f64>,
    /// True if the receipts of the shards are missing.
    pub(super) bare: bool,
}

impl Finish {
    /// Returns a correct report of one step.
    pub(super) fn good() -> Self {
        Self {
            steps: Near::Expected,
            split: Near::Expected,
            position: Near::Expected,
            skipped: Near::Expected,
            pushes: Near::Expected,
            loss: 1.0,
            time: None,
            bare: false,
        }
    }
}
