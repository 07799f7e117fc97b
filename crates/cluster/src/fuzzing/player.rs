//! Plays events on a cluster, and checks the invariants after each event.

use std::time::{Duration, Instant};

use checkpoint::Manifest;
use fuzz_input::Near;
use shared_proto::ids::{Role, RunNumber, Task};
use shared_proto::job::Job;
use shared_proto::refusal::Refusal;
use shared_proto::view::View;
use shared_proto::wire;

use super::events::{Call, Caller, Event, Join, Registration, Setting};
use super::{kept, resumed, without_generation};
use crate::Record;
use crate::limits::check_lengths;
use crate::{CheckpointPlace, Cluster, DurableCheckpoint, Failure, SavedProgress, StoreTask};

/// The number of processes of each role.
const PROCESSES: u8 = 3;

const TICK: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_secs(7);

/// A cluster, its members and its store.
pub(super) struct Player {
    pub(super) cluster: Cluster,
    pub(super) now: Instant,
    place: Option<CheckpointPlace>,
    /// The present state, as it is persisted.
    pub(super) kept: String,
    /// The number of urgent changes, and the persisted state after the newest of them.
    urgent: (u64, String),
    counts: Counts,
    manifests: Vec<Manifest>,
}

/// Numbers that do not fall while a coordinator runs, unless the job goes back to a checkpoint.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    steps: u64,
    samples: u64,
    min_clock: u64,
    epoch: u64,
    lost: u64,
    view: u64,
}

impl Player {
    pub(super) fn new(setting: &Setting) -> Self {
        let place = setting.checkpoints.then(|| CheckpointPlace {
            location: "there".to_owned(),
            run_id: "00000000000000aa".to_owned(),
        });
        let cluster = Cluster::new(setting.job());
        let mut player = Self {
            cluster,
            now: Instant::now(),
            place,
            kept: String::new(),
            urgent: (0, String::new()),
            counts: Counts::default(),
            manifests: Vec::new(),
        };
        player.begin(0);
        if setting.begun {
            player.train();
        }
        player
    }

    /// Returns the persisted state.
    pub(super) fn state(&self) -> serde_json::Value {
        serde_json::from_str(&self.kept).expect("what was kept")
    }

    /// Prepares the cluster as a new coordinator process does.
    fn begin(&mut self, next: u64) {
        let mut cluster = std::mem::replace(&mut self.cluster, Cluster::new(Job::default()));
        if let Some(place) = &self.place {
            cluster = cluster.with_checkpoints(place.clone(), next);
        }
        self.cluster = cluster.with_run_number(RunNumber(0xaa));
        self.counts = Counts {
            view: self.counts.view,
            ..Counts::default()
        };
        self.kept = kept(&self.cluster, self.now);
        self.urgent = (self.cluster.changes().urgent, self.kept.clone());
    }

    /// Brings the job to the point at which its workers train.
    fn train(&mut self) {
        for (server, who) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
            self.register(&Registration {
                server,
                who,
                ..Registration::default()
            });
        }
        let (ticks, alive, long) = (7, u8::MAX, false);
        self.play(Event::Pass { ticks, alive, long });
        let (model, samples, digest) = (0, Near::Expected, 0);
        let variables = Call::Variables {
            model,
            samples,
            digest,
        };
        for call in [variables, Call::Initialized, Call::LeaseWork] {
            self.call(&Caller::good(false, 0), call);
            self.settle();
        }
        if self.cluster.has_ring() {
            return self.train_in_ring();
        }
        self.play(Event::Serve);
        self.call(&Caller::good(false, 1), Call::LeaseWork);
        self.settle();
    }

    /// Lets two workers form a ring, and write the first checkpoint.
    fn train_in_ring(&mut self) {
        for who in [0, 1, 0] {
            let join = Call::JoinRing(Join::good(false));
            self.call(&Caller::good(false, who), join);
            self.settle();
        }
        for who in [0, 1, 0, 1] {
            self.work(who);
        }
    }

    /// Plays an event.
    pub(super) fn play(&mut self, event: Event) {
        if !matches!(event, Event::Work { .. } | Event::Call { .. }) {
            self.cluster.leave_fast_path();
        }
        match event {
            Event::Work { worker, times } => {
                for _ in 0..=times % 8 {
                    self.work(worker);
                }
            }
            Event::Serve => self.serve(),
            Event::Call { caller, call } => self.call(&caller, call),
            Event::Register(registration) => self.register(&registration),
            Event::Pass { ticks, alive, long } => self.pass(ticks, alive, long),
            Event::Store { works } => self.store(works),
            Event::Stop { other } => {
                let job = if other { "other" } else { "flambeau" };
                let stopped = self.cluster.stop(job);
                self.unchanged(stopped, "stop");
            }
            Event::TakenOver => self.cluster.taken_over(self.now, "another run"),
            Event::Restart {
                crash,
                resume_failed,
            } => self.restart(crash, resume_failed),
            Event::NewRun => self.new_run(),
        }
        self.settle();
    }

    /// Checks that a refused call has changed nothing.
    pub(super) fn unchanged(&self, called: Result<(), Refusal>, what: &str) {
        if let Err(refusal) = called {
            assert!(!refusal.message.is_empty());
            let now = kept(&self.cluster, self.now);
            assert_eq!(now, self.kept, "{what} was refused ({refusal})");
        }
    }

    /// Publishes what has changed, and checks it.
    pub(super) fn settle(&mut self) {
        let view = self.cluster.refresh_view().clone();
        self.check_fast_path(&view);
        let read = View::try_from(wire::View::from(&view));
        assert_eq!(read.as_ref(), Ok(&view));
        let records = self.cluster.take_records();
        let back = records.iter().any(|r| matches!(r, Record::Restored { .. }));
        self.kept = kept(&self.cluster, self.now);
        let urgent = self.cluster.changes().urgent;
        if urgent != self.urgent.0 {
            self.urgent = (urgent, self.kept.clone());
        }
        self.count(back);
    }

    /// Checks that a view of the fast path equals a view that is computed from all members. Its list of the slowest
    /// workers may be older.
    fn check_fast_path(&mut self, view: &View) {
        if !self.cluster.on_fast_path() {
            return;
        }
        let counts = self.cluster.fast_path.take();
        let fresh = View {
            slowest: view.slowest.clone(),
            ..self.cluster.fresh_view()
        };
        self.cluster.fast_path = counts;
        assert_eq!(*view, fresh);
    }

    fn count(&mut self, back: bool) {
        let status = self.cluster.status(self.now);
        let before = self.counts;
        let counts = Counts {
            steps: status.steps,
            samples: status.samples,
            min_clock: status.min_clock,
            epoch: status.epoch,
            lost: status.lost_updates,
            view: status.view,
        };
        let grow = counts.epoch >= before.epoch && counts.lost >= before.lost;
        assert!(grow && counts.view >= before.view, "{before:?} {counts:?}");
        let forth = counts.steps >= before.steps
            && counts.samples >= before.samples
            && counts.min_clock >= before.min_clock;
        assert!(forth || back, "{before:?} {counts:?}");
        let job = self.cluster.job();
        let all = self
            .cluster
            .durable
            .training_samples()
            .saturating_mul(job.epochs.into());
        assert!(counts.samples <= all, "{counts:?} of {all} samples");
        self.counts = counts;
    }

    fn register(&mut self, registration: &Registration) {
        self.cluster.leave_fast_path();
        let role = role(registration.server);
        let earlier = self.member(registration.server, registration.who);
        let holding = registration.holding.map(|shard| wire::Holding {
            shard: shard.into(),
            source_epoch: self.source_epoch(shard),
            generation: earlier.generation.0,
        });
        let identity = identity(registration.who);
        let request = wire::RegisterRequest {
            role: wire::Role::from(role).into(),
            address: format!("{identity}:1"),
            identity,
            process: registration.process.into(),
            attempt: registration.attempt.into(),
            holding,
            capacity_bytes: registration.capacity.map_or(0, u64::from),
            ..wire::RegisterRequest::default()
        };
        check_lengths(&request).expect("short names");
        let registered = self.cluster.register(self.now, role, request);
        self.unchanged(registered.map(drop), "Register");
    }

    /// Returns the task of a process; an unknown task if the process has not registered.
    pub(super) fn member(&self, server: bool, who: u8) -> Task {
        let role = role(server);
        let identity = identity(who);
        let mut members = self
            .cluster
            .durable
            .members
            .values()
            .map(|m| (m.task, &m.identity));
        let found = members.find(|(task, of)| task.id.role == role && **of == identity);
        let unknown = || super::origins::unknown(role, who);
        found.map_or_else(unknown, |(task, _)| task)
    }

    fn pass(&mut self, ticks: u8, alive: u8, long: bool) {
        for _ in 0..=ticks % 32 {
            self.now += if long { PAUSE } else { TICK };
            for index in (0..2 * PROCESSES).filter(|index| alive >> index & 1 == 1) {
                let member = self.member(index >= PROCESSES, index);
                self.cluster.heartbeat(self.now, member);
            }
            self.cluster.tick(self.now);
            self.cluster.refresh_view();
        }
    }

    pub(super) fn store(&mut self, works: bool) {
        self.cluster.leave_fast_path();
        self.cluster.take_sweep(self.now);
        match self.cluster.take_store_task() {
            None => {}
            Some(StoreTask::Write(manifest, _)) => {
                // Refused where the files of the shards do not make a whole checkpoint.
                let _ = manifest.to_bytes();
                SavedProgress::of_manifest(&manifest).expect("progress that can be read");
                let failure = Failure {
                    why: "it is broken".to_owned(),
                    full: false,
                };
                let written = if works { Ok(()) } else { Err(failure) };
                if self
                    .cluster
                    .manifest_written(self.now, manifest.number, written)
                {
                    self.manifests.push(*manifest);
                }
            }
            Some(StoreTask::FindBefore(damaged)) => {
                let before = |manifest: &&Manifest| manifest.number < damaged.number && works;
                let found = self.manifests.iter().rev().find(before).map(kept_of);
                let found = found.ok_or_else(|| "there is none".to_owned());
                self.cluster.older_found(self.now, &damaged, found);
            }
        }
    }

    fn restart(&mut self, crash: bool, resume_failed: bool) {
        let kept = if crash { &self.urgent.1 } else { &self.kept };
        let cluster = resumed(kept.as_bytes(), self.now).expect("what was kept");
        assert_eq!(cluster.job(), self.cluster.job());
        let before = without_generation(kept);
        self.cluster = cluster;
        self.begin(0);
        assert_eq!(
            without_generation(&self.kept),
            before,
            "resumed as something else"
        );
        if resume_failed || self.cluster.failed_without_members() {
            self.cluster.resume_failed(self.now);
            self.begin(0);
        }
    }

    fn new_run(&mut self) {
        let Some(manifest) = self.manifests.last() else {
            return;
        };
        let begun = SavedProgress::of_manifest(manifest).expect("progress that can be read");
        let mut cluster = Cluster::new(self.cluster.job().clone());
        cluster.start_from("there".to_owned(), manifest, begun);
        let next = manifest.number + 1;
        (self.cluster, self.counts) = (cluster, Counts::default());
        self.begin(next);
    }
}

fn role(server: bool) -> Role {
    match server {
        true => Role::Ps,
        false => Role::Worker,
    }
}

fn identity(who: u8) -> String {
    format!("process-{}", who % PROCESSES)
}

/// Returns a checkpoint in the store as one that the job can go back to.
fn kept_of(manifest: &Manifest) -> DurableCheckpoint {
    DurableCheckpoint {
        location: "there".to_owned(),
        number: manifest.number,
        progress: SavedProgress::of_manifest(manifest).expect("progress that can be read"),
        run: manifest.run.clone(),
    }
}
