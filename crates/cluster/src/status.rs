//! The status of a job for people and dashboards.

use std::time::Instant;

use shared_proto::blocks::PlacedTable;
use shared_proto::ids::{Role, TaskId};
use shared_proto::staleness::{StalenessBound, lead};
use shared_proto::wire;

use super::Cluster;
use super::members::Member;
use super::observed::FaultCounts;

impl Cluster {
    /// Returns the whole status.
    pub fn status(&self, now: Instant) -> wire::Status {
        let members = self.durable.members.values();

        wire::Status {
            job: self.job.name.clone(),
            phase: self.durable.outcome.phase.into(),
            error: self.durable.outcome.error.clone(),
            mode: self.job.strategy.mode.name().to_owned(),
            staleness: match self.bound() {
                StalenessBound::Steps(bound) => Some(bound),
                StalenessBound::Unbounded => None,
            },
            view: self.view.number.0,
            epoch: self.view.epoch.0,
            min_clock: self.durable.training.min_clock.0,
            waiting_for: self.missing(),
            data_epoch: self.durable.training.data_epoch(),
            data_epochs: self.job.epochs,
            samples: self.durable.training.tally.samples,
            total_samples: self.total_samples(),
            steps: self.durable.training.tally.steps,
            seconds: self.seconds(now),
            tasks: members.map(|m| self.task_status(now, m)).collect(),
            shards: self.shard_status(),
            evaluations: self.durable.evaluations.reports(),
            checkpoint: self.checkpoint_status(now),
            lost_updates: self.durable.losses.total,
            run: self.run_id().to_owned(),
            checkpoint_error: self.checkpoint_error(now),
            checkpoint_store_full: self.is_store_full(),
            tables: self.table_status(),
            ring: self.ring_status(now),
            strategy: self.job.strategy.name.name().to_owned(),
            pipeline: self.job.strategy.pipeline,
            learning_rate_factor: Some(self.learning_rate_factor()),
            loss_warning: self.observed.loss_warning.clone(),
        }
    }

    /// Returns the number of samples that the job trains on before it is done.
    pub fn total_samples(&self) -> u64 {
        let samples = self.durable.training_samples();
        let all_epochs = samples.saturating_mul(self.job.epochs.into());
        let budget = self.job.steps.map(|steps| {
            let workers = match self.in_lock_step() {
                true => self.job.workers(),
                false => 1,
            };
            let computing = self.job.strategy.stage_groups().computing(workers.into());
            let per_step = self.job.samples_per_step().saturating_mul(computing);
            steps.saturating_mul(per_step)
        });
        budget.map_or(all_epochs, |budget| budget.min(all_epochs))
    }

    /// Returns, by server, the number of times that it was lost and its shard was restored, since this coordinator
    /// started.
    pub fn recoveries(&self) -> impl Iterator<Item = (TaskId, u64)> {
        let servers = self.durable.members.keys().filter(|id| id.role == Role::Ps);
        servers.map(|id| (*id, self.observed.recoveries.get(id).copied().unwrap_or(0)))
    }

    /// Returns the counts of faults since this coordinator started.
    pub fn fault_counts(&self) -> FaultCounts {
        self.observed.fault_counts
    }

    /// Returns the number of times that a coordinator of this run has started.
    pub fn starts(&self) -> u64 {
        self.durable.run.starts
    }

    /// Returns the number of updates that were acknowledged and lost with a server.
    pub fn lost_updates(&self) -> u64 {
        self.durable.losses.total
    }

    /// Returns the number of shards without a server.
    pub fn shards_without_server(&self) -> usize {
        self.durable.orphans().count()
    }

    /// Returns the metrics of the newest evaluation, by name; empty before the first evaluation.
    pub fn newest_evaluation(&self) -> impl Iterator<Item = (&str, f64)> {
        let newest = self.durable.evaluations.done.last().into_iter();
        let means = newest.flat_map(|evaluation| &evaluation.metrics);
        means.map(|(name, value)| (name.as_str(), *value))
    }

    /// Returns the lead of each worker; `None` for a worker that is gone.
    pub fn leads(&self) -> impl Iterator<Item = (TaskId, Option<u64>)> {
        let workers = self.durable.members.values();
        let workers = workers.filter(|member| member.task.id.role == Role::Worker);
        workers.map(|worker| {
            let work = &worker.progress;
            let ahead = match work.active {
                true => lead(work.clock, self.durable.training.min_clock),
                false => 0,
            };
            (worker.task.id, worker.is_alive().then_some(ahead))
        })
    }

    /// Returns the number of live members of a role.
    pub fn live_tasks(&self, role: Role) -> usize {
        self.durable.live(role).count()
    }

    fn shard_status(&self) -> Vec<wire::ShardStatus> {
        let lost_steps = self.durable.lost_steps();
        self.durable
            .servers()
            .iter()
            .zip(0u32..)
            .map(|(task, shard)| wire::ShardStatus {
                server: Some((*task).into()),
                report: self.observed.shard_reports.get(&task.id).cloned(),
                lost_steps: lost_steps.get(&shard).copied().unwrap_or(0),
            })
            .collect()
    }

    fn table_status(&self) -> Vec<wire::TableStatus> {
        let servers = self.durable.servers();
        let sum = |number: usize| {
            let reports = servers.iter();
            let reports = reports.filter_map(|task| self.observed.shard_reports.get(&task.id));
            let of_table = reports.filter_map(|report| report.tables.get(number));
            of_table.fold(wire::TableReport::default(), |sum, of| wire::TableReport {
                rows: sum.rows.saturating_add(of.rows),
                bytes: sum.bytes.saturating_add(of.bytes),
                created: sum.created.saturating_add(of.created),
                refused: sum.refused.saturating_add(of.refused),
                evicted: sum.evicted.saturating_add(of.evicted),
                on_disk: sum.on_disk.saturating_add(of.on_disk),
            })
        };
        let tables = self.durable.tables().iter().enumerate();
        let status = |(number, table): (usize, &PlacedTable)| wire::TableStatus {
            name: table.spec.name.clone(),
            report: Some(sum(number)),
        };
        tables.map(status).collect()
    }

    fn task_status(&self, now: Instant, member: &Member) -> wire::TaskStatus {
        let work = &member.progress;
        let ahead = lead(work.clock, self.durable.training.min_clock);
        let held_back = !self
            .bound()
            .admits(work.clock, self.durable.training.min_clock);
        let activity = match member.task.id.role {
            _ if !member.is_alive() => "gone",
            Role::Coordinator | Role::Ps => "serving",
            Role::Worker if self.durable.evaluations.holder() == Some(member.task) => "evaluating",
            Role::Worker if work.active && held_back => "waiting",
            Role::Worker if work.active => "training",
            Role::Worker => "idle",
        };
        let waiting_on = if activity == "waiting" && work.waiting_on.is_empty() {
            self.stragglers().into_iter().map(Into::into).collect()
        } else {
            work.waiting_on.clone()
        };
        wire::TaskStatus {
            task: Some(cluster_task(member)),
            alive: member.is_alive(),
            heartbeat_age: now.duration_since(member.seen).as_secs_f64(),
            clock: work.clock.0,
            lead: if work.active { ahead } else { 0 },
            samples: work.samples,
            samples_per_second: work.samples_per_second,
            loss: work.loss,
            activity: activity.to_owned(),
            waiting_on,
            times: Some(work.times.into()),
            trouble: self.durable.unable.reason(member.task.id).to_owned(),
            failure: self.durable.unable.failure(member.task.id).into(),
        }
    }
}

fn cluster_task(member: &Member) -> wire::ClusterTask {
    wire::ClusterTask {
        task: Some(member.task.into()),
        identity: member.identity.clone(),
        address: member.address.clone(),
        metrics_address: member.metrics_address.clone(),
    }
}
