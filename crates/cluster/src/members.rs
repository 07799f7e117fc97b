//! Members of the cluster: registration, leases, generations.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize, Serializer};
use serde_tuple::{Deserialize_tuple, Serialize_tuple};
use shared_proto::blocks::ShardServer;
use shared_proto::ids::{Clock, Origin, Role, Sequence, Task, TaskId};
use shared_proto::planted;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;

use super::Cluster;
use super::process::Process;
use super::record::Record;
use super::times::Times;

/// Whether a process is a member at present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Alive,
    /// The process has left, or was removed. The text is the reason.
    Gone(String),
}

/// One process of the job. Members and their parts are stored as arrays, without field names, because there may be
/// thousands of members.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "StoredMember")]
pub(crate) struct Member {
    pub(crate) task: Task,
    pub(crate) identity: String,
    pub(crate) address: String,
    pub(crate) metrics_address: String,
    pub(crate) process: Process,
    /// Servers only: the number of bytes of values for which the server has memory; `None` if the server has not stated
    /// it.
    pub(crate) capacity: Option<u64>,
    pub(crate) seen: Instant,
    pub(crate) standing: Standing,
    /// The worker's progress; unused for servers.
    pub(crate) progress: WorkerProgress,
}

/// A worker's part in the training.
#[derive(Clone, Debug, Serialize_tuple, Deserialize_tuple)]
pub(crate) struct WorkerProgress {
    pub(crate) clock: Clock,
    /// True if the worker holds data, so that others wait for it.
    pub(crate) active: bool,
    /// True once the worker has asked for work. It then has the variables, and can take part in a step.
    pub(crate) ready: bool,
    /// True if the coordinator has restarted since the worker's last report, so that the worker's clock may be higher.
    #[serde(skip)]
    pub(crate) uncertain: bool,
    /// The sequence number of the newest counted `FinishStep`, so that a repeated one does not count again.
    pub(crate) finished: Sequence,
    /// The sequence number of the newest counted report of losses, so that a repeated one does not count again.
    pub(crate) told_lost: Sequence,
    /// The time at which the worker last finished a step or was given work.
    #[serde(skip, default = "Instant::now")]
    pub(crate) acted: Instant,
    /// The time from which the stall time-out counts. It is later than `acted` if the worker could make no step
    /// meanwhile.
    #[serde(skip, default = "Instant::now")]
    pub(crate) moved: Instant,
    pub(crate) samples: u64,
    pub(crate) steps: u64,
    /// The number of steps of this generation that count and have changed the weights.
    pub(crate) pushes: u64,
    #[serde(skip)]
    pub(crate) loss: f64,
    #[serde(skip)]
    pub(crate) samples_per_second: f64,
    pub(super) times: Times,
    #[serde(skip)]
    pub(crate) waiting_on: Vec<wire::Task>,
    /// The time since which the worker reports that it waits for others; `None` while it waits for none.
    #[serde(skip)]
    pub(crate) waits_since: Option<Instant>,
}

/// The stored form of a [`Member`]: its fields in order, without `seen`. The standing becomes two fields: whether the
/// member is alive, and the reason why not.
type StoredMember = (
    Task,
    String,
    String,
    String,
    Process,
    Option<u64>,
    bool,
    String,
    WorkerProgress,
);

impl From<StoredMember> for Member {
    fn from(stored: StoredMember) -> Self {
        let (task, identity, address, metrics_address, process, capacity, alive, why, progress) =
            stored;
        Self {
            task,
            identity,
            address,
            metrics_address,
            process,
            capacity,
            seen: Instant::now(),
            standing: match alive {
                true => Standing::Alive,
                false => Standing::Gone(why),
            },
            progress,
        }
    }
}

impl Serialize for Member {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (alive, why) = match &self.standing {
            Standing::Alive => (true, ""),
            Standing::Gone(why) => (false, why.as_str()),
        };
        let stored = (
            &self.task,
            &self.identity,
            &self.address,
            &self.metrics_address,
            &self.process,
            &self.capacity,
            alive,
            why,
            &self.progress,
        );
        stored.serialize(serializer)
    }
}

impl Member {
    /// Returns whether the process is a member at present.
    pub(crate) fn is_alive(&self) -> bool {
        self.standing == Standing::Alive
    }

    /// Continues with a member that an earlier coordinator has persisted. The member's lease begins anew.
    pub(super) fn resumed(&mut self, now: Instant) {
        self.seen = now;
        let progress = &mut self.progress;
        (progress.acted, progress.moved) = (now, now);
        (progress.uncertain, progress.loss) = (true, f64::NAN);
    }
}

impl WorkerProgress {
    /// Returns the progress with which a new generation of a task begins. Its steps, samples and times stay counted.
    fn after(earlier: &Self, now: Instant) -> Self {
        Self {
            samples: earlier.samples,
            steps: earlier.steps,
            times: earlier.times,
            loss: earlier.loss,
            ..Self::new(now)
        }
    }

    pub(super) fn new(now: Instant) -> Self {
        Self {
            clock: Clock(0),
            active: false,
            ready: false,
            uncertain: false,
            finished: Sequence(0),
            told_lost: Sequence(0),
            acted: now,
            moved: now,
            samples: 0,
            steps: 0,
            pushes: 0,
            loss: f64::NAN,
            samples_per_second: 0.0,
            times: Times::default(),
            waiting_on: Vec::new(),
            waits_since: None,
        }
    }
}

/// The result of identifying the caller of a registration.
pub(super) enum Identified {
    /// The caller is a member already. It repeats a registration whose reply was lost.
    Member(Task),
    /// The caller becomes a member.
    Newcomer(Box<Newcomer>),
}

/// A process that becomes a member.
pub(super) struct Newcomer {
    task: Task,
    /// The progress that stays counted; `None` if the task is new.
    progress: Option<WorkerProgress>,
    process: Process,
    /// Servers only: the shard of which the process still has the values in memory.
    kept: Option<usize>,
    request: wire::RegisterRequest,
}

impl Cluster {
    /// Checks a registration and identifies its sender, as [`Self::register`] says. Evicts the earlier process of the
    /// identity.
    pub(super) fn identify(
        &mut self,
        now: Instant,
        role: Role,
        request: wire::RegisterRequest,
    ) -> Result<Identified, Refusal> {
        if role == Role::Coordinator || request.identity.is_empty() {
            return Err(Refusal::new(
                Reason::Malformed,
                "only ps and worker processes register, each with an identity that is not empty",
            ));
        }
        let same = |m: &&Member| m.task.id.role == role && m.identity == request.identity;
        let earlier = self.durable.members.values().find(same).map(|m| m.task);
        let known = earlier.and_then(|task| self.durable.members.get_mut(&task.id));
        let process = match &known {
            Some(known) => known.process.next(&request)?,
            None => Process::new(&request),
        };
        if let Some(known) = known.filter(|known| known.process == process) {
            if !known.is_alive() {
                return Err(process.is_over(&known.identity));
            }
            // The answer to this registration was lost.
            known.seen = now;
            return Ok(Identified::Member(known.task));
        }
        let kept = self.kept_shard(earlier, request.holding.as_ref());
        let (task, progress) = match earlier {
            Some(task) => self.supersede(now, task, &process),
            None => {
                let index = self.new_index(role);
                let task = Task {
                    id: TaskId { role, index },
                    generation: self.durable.forgotten.first_generation,
                };
                (task, None)
            }
        };
        Ok(Identified::Newcomer(Box::new(Newcomer {
            task,
            progress,
            process,
            kept,
            request,
        })))
    }

    /// Makes a newcomer a member. If the newcomer is a server, gives it a shard that needs one.
    pub(super) fn add_member(&mut self, now: Instant, newcomer: Newcomer) -> Task {
        let Newcomer { task, request, .. } = newcomer;
        let member = Member {
            task,
            identity: request.identity,
            address: request.address,
            metrics_address: request.metrics_address,
            process: newcomer.process,
            capacity: (request.capacity_bytes > 0).then_some(request.capacity_bytes),
            seen: now,
            standing: Standing::Alive,
            progress: newcomer
                .progress
                .unwrap_or_else(|| WorkerProgress::new(now)),
        };
        self.durable.members.insert(task.id, member);
        self.forget_the_dead();
        self.must_persist();
        if task.id.role == Role::Ps {
            self.place_server(now, task, newcomer.kept);
        }
        self.records.push_back(Record::Joined {
            seconds: self.seconds(now),
            task: task.to_string(),
            generation: task.generation.0,
        });
        task
    }

    /// Evicts the earlier process of an identity, and begins the next generation of its task. Returns the task with the
    /// new generation, and the progress that stays counted.
    fn supersede(
        &mut self,
        now: Instant,
        task: Task,
        process: &Process,
    ) -> (Task, Option<WorkerProgress>) {
        let shard = self.durable.shard_of(task);
        // Another process has the identity: the earlier one has ended without leaving. A process that registers again is not
        // lost.
        let replaced = |m: &Member| m.is_alive() && m.progress.ready && !m.process.is_same(process);
        if !self.ended() && self.durable.member(task.id).is_some_and(replaced) {
            self.observed.fault_counts.lost_workers += 1;
        }
        let why = "superseded by a newer process of its identity";
        self.remove_from_work(now, task.id, why);
        let generation = match planted!(OneGeneration) {
            true => task.generation,
            false => task.generation.next(),
        };
        let task = Task { generation, ..task };
        // The new generation keeps the shard, so no spare takes it.
        if let (Some(shard), Some(map)) = (shard, self.durable.map_mut()) {
            match &mut map.shards[shard].server {
                ShardServer::At(server, _) | ShardServer::Lost(server) => *server = task,
            }
        }
        let earlier = self.durable.member(task.id).map(|m| &m.progress);
        let progress = earlier.map(|earlier| WorkerProgress::after(earlier, now));
        (task, progress)
    }

    /// Gives a new server the shard of its task or, if it has none, a shard without a server. `kept` is the shard whose
    /// values the server still has in memory.
    fn place_server(&mut self, now: Instant, task: Task, kept: Option<usize>) {
        self.instants.last_ps_joined = Some(now);
        let fits = |shard: &usize| self.has_room_for(task, *shard);
        let orphan = self
            .durable
            .shard_of(task)
            .or_else(|| self.durable.orphans().find(fits));
        match orphan.filter(|_| !self.ended()) {
            Some(shard) if kept == Some(shard) => self.give_back(now, task, shard),
            Some(shard) => self.assign(now, task, shard),
            None => {}
        }
    }

    /// After a restart of the coordinator, raises a worker's clock to the one that its call states. The worker may have
    /// finished steps that this state lacks. Without them the min clock would stay low, and the worker would wait for
    /// itself.
    pub fn catch_up_clock(&mut self, origin: &Origin) {
        if self.in_lock_step() {
            return;
        }
        let uncertain = |m: &Member| m.progress.uncertain;
        if self.durable.member(origin.task.id).is_some_and(uncertain) {
            let catch_up = |p: &mut WorkerProgress| p.clock = p.clock.max(origin.clock);
            self.change_progress(origin.task.id, catch_up);
        }
    }

    /// Renews a member's lease.
    pub fn heartbeat(&mut self, now: Instant, task: Task) {
        if let Some(member) = self.durable.members.get_mut(&task.id) {
            member.seen = now;
        }
    }

    /// Shifts all deadlines by `gap`, for which this process did not run.
    pub(super) fn was_stopped(&mut self, gap: Duration) {
        for member in self.durable.members.values_mut() {
            member.seen += gap;
            member.progress.acted += gap;
            if let Some(since) = &mut member.progress.waits_since {
                *since += gap;
            }
            member.progress.moved += gap;
        }
        for until in self.durable.awaited.values_mut() {
            *until += gap;
        }
        self.saving.was_stopped(gap);
        self.observed.rings.was_stopped(gap);
        self.durable.unable.was_stopped(gap);
        let instants = &mut self.instants;
        let waits = [
            &mut instants.none_able_since,
            &mut instants.no_servers_since,
            &mut instants.too_few_since,
        ];
        for since in waits.into_iter().flatten() {
            *since += gap;
        }
    }

    /// Evicts each member with an expired lease.
    pub(super) fn evict_silent(&mut self, now: Instant) {
        let lease = self.lease();
        let members = self.durable.members.values();
        let silent: Vec<TaskId> = members
            .filter(|m| {
                m.is_alive() && now.duration_since(m.seen) > lease && !planted!(EndlessLeases)
            })
            .map(|m| m.task.id)
            .collect();
        for id in silent {
            if !self.ended() {
                match id.role {
                    Role::Ps => self.observed.fault_counts.lost_servers += 1,
                    Role::Worker | Role::Coordinator => {
                        self.observed.fault_counts.lost_workers += 1
                    }
                }
            }
            self.remove(now, id, "nothing was heard from it");
        }
    }

    /// Evicts workers that hold up others and have made no progress for the stall time-out.
    pub(super) fn evict_stalled(&mut self, now: Instant) {
        let stall = self.stall();
        let blamed = self
            .stragglers()
            .into_iter()
            .chain(self.durable.evaluations.holder());
        let stalled: Vec<TaskId> = blamed
            .map(|task| task.id)
            .filter(|id| {
                let member = self.durable.members.get(id);
                member.is_some_and(|m| now.duration_since(m.progress.moved) > stall)
            })
            .collect();
        for id in stalled {
            self.observed.fault_counts.lost_workers += 1;
            self.remove(now, id, "it finished no step for the stall time-out");
        }
    }

    pub(super) fn remove(&mut self, now: Instant, id: TaskId, why: &'static str) {
        let shard = self
            .durable
            .member(id)
            .and_then(|m| self.durable.shard_of(m.task));
        let was_there = self.durable.member(id).is_some_and(|m| m.is_alive());
        self.remove_from_work(now, id, why);
        let task = self.durable.member(id).map(|m| m.task);
        if let (Some(shard), Some(task)) = (shard.filter(|_| was_there), task)
            && !self.ended()
        {
            self.orphan(now, shard, task);
        }
    }

    fn remove_from_work(&mut self, now: Instant, id: TaskId, why: &'static str) {
        self.draining.remove(&id);
        let Some(member) = self.durable.members.get_mut(&id).filter(|m| m.is_alive()) else {
            return;
        };
        self.fast_path = None;
        member.standing = Standing::Gone(why.to_owned());
        member.progress.active = false;
        member.progress.ready = false;
        let (task, pushes) = (member.task, member.progress.pushes);
        if !self.ended() {
            tracing::warn!(%task, generation = task.generation.0, why, "a member is gone");
        }
        self.records.push_back(Record::Left {
            seconds: self.seconds(now),
            task: task.to_string(),
            why: why.into(),
        });
        if let Some(variables) = &mut self.durable.variables {
            variables.initializer = variables.initializer.filter(|t| *t != task);
        }
        let released = !planted!(LostData);
        if let Some(ledger) = self.durable.training.ledger.as_mut().filter(|_| released) {
            ledger.release(task);
        }
        self.durable.evaluations.release(task);
        self.must_persist();
        self.end_life(now, task, pushes);
        self.leave_step(now, task);
        self.leave_ring(now, task);
    }

    /// Evicts workers so that they register again, and waits for them, at most for the length of a lease.
    pub(super) fn evict_workers(&mut self, now: Instant, workers: &[Task], why: &'static str) {
        let until = now + self.lease();
        for worker in workers {
            let is_there = |member: &Member| member.is_alive() && member.task == *worker;
            if self.durable.member(worker.id).is_some_and(is_there) {
                self.remove(now, worker.id, why);
                self.durable.awaited.insert(worker.id, until);
            }
        }
    }
}
