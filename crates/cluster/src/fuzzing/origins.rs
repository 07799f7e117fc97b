//! Calls of members, mostly those that a correct member makes next.

use fuzz_input::Near;
use shared_proto::blocks::VariableSpec;
use shared_proto::ids::{
    Clock, Epoch, Generation, Origin, Role, RunNumber, Sequence, Task, TaskId,
};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire;
use shared_proto::wire::report_request::Report;

use super::events::{Call, Caller, Finish, Join};
use super::kept;
use super::player::Player;
use crate::messages::take_report;
use crate::{Split, Work, WorkerData};

/// The number of training samples of a correct worker.
const SAMPLES: u64 = 18;

/// The lowest index of processes that have not registered.
const UNKNOWN: u32 = 100;

/// Returns the task of a process that has not registered.
pub(super) fn unknown(role: Role, who: u8) -> Task {
    let index = UNKNOWN + u32::from(who);
    Task {
        id: TaskId { role, index },
        generation: Generation(1),
    }
}

impl Player {
    /// Makes a call, and checks that a refused call has changed nothing.
    pub(super) fn call(&mut self, caller: &Caller, call: Call) {
        let what = format!("{call:?} by {caller:?}");
        let origin = self.origin(caller, &call);
        let joins = matches!(call, Call::JoinRing(_));
        match call {
            Call::Heartbeat | Call::LeaseWork | Call::FinishStep(_) => {
                self.cluster.begin_fast_path()
            }
            _ => self.cluster.leave_fast_path(),
        }
        let answered = self.admitted(&origin, call);
        let on_purpose = match &answered {
            // A worker without receipts is put out.
            Err(refusal) if refusal.message.contains("receipt") => {
                self.cluster.admit(&origin).is_err()
            }
            // Of two workers that cannot reach each other, one is put out when it joins the next ring.
            Err(_) if joins => self.cluster.admit(&origin).is_err(),
            // A model for which the servers are too small is forgotten.
            Err(refusal) => {
                refusal.reason == Reason::Oversized && self.cluster.durable.variables.is_none()
            }
            Ok(()) => false,
        };
        if !on_purpose {
            self.unchanged(answered, &what);
        }
    }

    /// Lets a worker do what it has to do next.
    pub(super) fn work(&mut self, who: u8) {
        let caller = Caller::good(false, who);
        let task = self.member(false, who);
        if self.cluster.is_ring_broken() {
            self.call(&caller, Call::JoinRing(Join::good(true)));
            self.settle();
        }
        self.call(&caller, Call::LeaseWork);
        self.settle();
        if self.held_by(task).is_some() {
            self.call(&caller, Call::FinishStep(Finish::good()));
        } else if self.cluster.durable.evaluations.holder() == Some(task) {
            let (epoch, loss, model) = (Near::Expected, Some(1.0), true);
            self.call(&caller, Call::Evaluated { epoch, loss, model });
        }
        self.settle();
        if self.cluster.has_ring() {
            self.keep(&caller);
        }
    }

    /// Lets a member write its part of a checkpoint and load its values, and then lets the store do its task.
    fn keep(&mut self, caller: &Caller) {
        let expected = Near::Expected;
        for call in [Call::saved(0, expected), Call::restored(0, expected)] {
            self.call(caller, call);
            self.settle();
        }
        self.store(true);
    }

    /// Returns the data that a worker holds, alone or together with the others of its ring; `None` if it holds none.
    fn held_by(&self, task: Task) -> Option<Split> {
        match self.cluster.work_in_ring(task) {
            Some(Work::Shared { split, .. }) => Some(split),
            _ => self.cluster.durable.training.held_by(task),
        }
    }

    /// Lets all servers write their parts of a checkpoint and load their values, and then lets the store do its task.
    pub(super) fn serve(&mut self) {
        for (server, shard) in [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)] {
            let caller = Caller::good(true, server);
            let expected = Near::Expected;
            for call in [
                Call::saved(shard, expected),
                Call::restored(shard, expected),
            ] {
                self.call(&caller, call);
                self.settle();
            }
        }
        self.store(true);
    }

    /// Makes a call as the service does.
    fn admitted(&mut self, origin: &Origin, call: Call) -> Result<(), Refusal> {
        self.cluster.admit(origin)?;
        let member = self.cluster.durable.members.get(&origin.task.id);
        let uncertain = member.is_some_and(|member| member.progress.uncertain);
        self.cluster.catch_up_clock(origin);
        if uncertain {
            // What is heard of a worker's clock is kept, whatever becomes of the call.
            self.kept = kept(&self.cluster, self.now);
        }
        let role = match call {
            Call::Drain => Role::Ps,
            Call::Variables { .. } | Call::Initialized | Call::LeaseWork => Role::Worker,
            Call::FinishStep(_) | Call::JoinRing(_) => Role::Worker,
            _ => origin.task.id.role,
        };
        if role != origin.task.id.role {
            return Err(Refusal::new(Reason::Malformed, "a call of the other role"));
        }
        self.make(origin, call)
    }

    fn make(&mut self, origin: &Origin, call: Call) -> Result<(), Refusal> {
        let (now, task) = (self.now, origin.task);
        match call {
            Call::Heartbeat => self.cluster.heartbeat(now, task),
            Call::Variables {
                model,
                samples,
                digest,
            } => {
                let data = WorkerData {
                    training_samples: samples.of(SAMPLES),
                    evaluation_samples: 4,
                    digest: vec![digest % 2; usize::from(digest % 3) * 16],
                };
                let specs = variables(model)
                    .iter()
                    .map(VariableSpec::read)
                    .collect::<Result<Vec<_>, _>>()?;
                self.cluster.register_variables(now, task, specs, data)?;
            }
            Call::Initialized => self.cluster.finish_initialization(task)?,
            Call::LeaseWork => {
                // A worker of a ring has copied its values.
                let copied = self.cluster.view().checkpoint.map(|order| order.number);
                drop(self.cluster.lease_work(now, origin, copied));
            }
            Call::JoinRing(join) => self.join_ring(origin, &join)?,
            Call::FinishStep(finish) => self.finish(origin, &finish)?,
            Call::Leave { failure, error } => {
                let request = wire::LeaveRequest {
                    failure: (failure % 8).into(),
                    error: text(error),
                    ..wire::LeaveRequest::default()
                };
                self.cluster.leave(now, task, &request);
            }
            Call::Drain => drop(self.cluster.drain(now, task)),
            report => {
                let report = self.report(report);
                take_report(&mut self.cluster, now, origin, report)?;
            }
        }
        Ok(())
    }

    fn join_ring(&mut self, origin: &Origin, join: &Join) -> Result<(), Refusal> {
        let newest = self.cluster.durable.epoch().0;
        let request = wire::JoinRingRequest {
            origin: None,
            values_ring: if join.has_values {
                join.ring.of(newest)
            } else {
                0
            },
            lost: join.lost.map(|who| self.member(false, who).into()),
            skipped: join.skipped.as_ref().map(|step| step.of(origin.clock.0)),
        };
        self.cluster.join_ring(self.now, origin, &request)?;
        Ok(())
    }

    fn origin(&self, caller: &Caller, call: &Call) -> Origin {
        let task = self.member(caller.server, caller.who);
        let progress = self
            .cluster
            .durable
            .members
            .get(&task.id)
            .map(|m| &m.progress);
        let clock = progress.map_or(0, |progress| progress.clock.0);
        let steps = match call {
            Call::FinishStep(finish) => finish.steps.of(1),
            _ => 0,
        };
        let newest = progress.map_or(0, |progress| match call {
            Call::Lost { .. } => progress.told_lost.0,
            Call::JoinRing(_) => self.cluster.durable.ring.newest_request(task).0,
            _ => progress.finished.0,
        });
        Origin {
            job: "flambeau".to_owned(),
            run: RunNumber(0),
            task: Task {
                generation: Generation(caller.generation.of(task.generation.0)),
                ..task
            },
            epoch: Epoch(caller.epoch.of(self.cluster.durable.epoch().0)),
            clock: Clock(caller.clock.of(clock.saturating_add(steps))),
            sequence: Sequence(caller.sequence.of(newest.saturating_add(1))),
        }
    }

    /// Finishes steps, and checks that no more samples are counted than the worker holds.
    fn finish(&mut self, origin: &Origin, finish: &Finish) -> Result<(), Refusal> {
        let held = self.held_by(origin.task);
        let (split, start, end) = held.map_or((1, 0, 0), |held| (held.id, held.start, held.end));
        let steps = finish.steps.of(1);
        let batch = u64::from(self.cluster.job().batch_size);
        let position = start.saturating_add(steps.saturating_mul(batch)).min(end);
        let key = self.cluster.receipt_key();
        let step = Clock(origin.clock.0.saturating_sub(1));
        let receipt = |shard| wire::ShardReceipt {
            shard,
            receipt: key.receipt(shard, origin.task, step).to_vec().into(),
        };
        let shards = if finish.bare {
            0
        } else {
            self.cluster.durable.servers().len() as u32
        };
        let request = wire::FinishStepRequest {
            split: finish.split.of(split),
            position: finish.position.of(position),
            steps,
            skipped: finish.skipped.of(0),
            pushes: finish.pushes.of(origin.clock.0),
            loss_sum: finish.loss,
            times: finish.time.map(|pull| wire::StepTimes {
                pull,
                ..wire::StepTimes::default()
            }),
            receipts: (0..shards).map(receipt).collect(),
            ..wire::FinishStepRequest::default()
        };
        let before = self.cluster.durable.training.tally.samples;
        self.cluster.finish_step(self.now, origin, &request)?;
        let newly = self.cluster.durable.training.tally.samples - before;
        assert!(
            newly <= end - start,
            "{newly} samples of {held:?}: {request:?}"
        );
        Ok(())
    }

    fn report(&self, call: Call) -> Option<Report> {
        Some(match call {
            Call::Lost {
                shard,
                updates,
                first,
                last,
            } => Report::Lost(wire::LostReport {
                shard: (shard % 3).into(),
                updates: updates.of(1),
                first_step: first.of(0),
                last_step: last.of(1),
            }),
            Call::Evaluated { epoch, loss, model } => {
                let at_work = self.cluster.durable.evaluations.at_work;
                let due = at_work.map_or(0, |evaluation| evaluation.data_epoch.into());
                let metrics = loss.map(|loss| ("loss".to_owned(), loss));
                Report::Evaluation(wire::EvaluationReport {
                    data_epoch: epoch.of(due) as u32,
                    samples: 4,
                    metrics: metrics.into_iter().collect(),
                    model_sha256: vec![7; if model { 32 } else { 0 }].into(),
                })
            }
            Call::Waits { on } => {
                let on = vec![self.member(false, on).into()];
                Report::Wait(wire::WaitReport { on })
            }
            Call::ShardReport { shard, count, bad } => Report::Shard(wire::ShardReport {
                shard: (shard % 3).into(),
                updates: count.of(1),
                staleness_sum: count.of(1),
                max_clock_lead: count.of(1),
                checkpoint_bytes: count.of(1),
                last: bad,
                non_finite: text(bad),
                ..wire::ShardReport::default()
            }),
            Call::Saved {
                shard,
                number,
                fails,
                full,
            } => {
                let order = self.cluster.view().checkpoint;
                Report::Checkpoint(wire::CheckpointReport {
                    number: number.of(order.map_or(0, |order| order.number)),
                    shard: (shard % 3).into(),
                    error: text(fails),
                    store_full: full,
                    ..wire::CheckpointReport::default()
                })
            }
            Call::Restored {
                shard,
                epoch,
                fails,
                failure,
                marks,
            } => {
                let shard = shard % 3;
                let watermarks = marks
                    .into_iter()
                    .map(|(who, taken, blocks)| wire::Watermark {
                        task: Some(self.member(false, who).into()),
                        taken: taken.of(1),
                        blocks: blocks.of(1),
                    });
                Report::Restore(wire::RestoreReport {
                    shard: shard.into(),
                    epoch: epoch.of(self.source_epoch(shard)),
                    error: text(fails),
                    failure: (failure % 4).into(),
                    watermarks: watermarks.collect(),
                    ..wire::RestoreReport::default()
                })
            }
            _ => return None,
        })
    }

    /// Returns the epoch in which the values of a shard were loaded.
    pub(super) fn source_epoch(&self, shard: u8) -> u64 {
        if self.cluster.has_ring() {
            return self.cluster.durable.epoch().0;
        }
        let map = self.cluster.shard_map().ok();
        let source = map.and_then(|map| {
            map.shards
                .get(usize::from(shard))
                .map(|placed| &placed.source)
        });
        source.map_or(0, |source| source.epoch.0)
    }
}

fn text(wrong: bool) -> String {
    let text = if wrong { "it is broken" } else { "" };
    text.to_owned()
}

/// Returns the variables of a model: valid ones, large ones, or some that no job accepts.
fn variables(model: u8) -> Vec<wire::Variable> {
    let variable = |name: &str, shape: &[u64]| wire::Variable {
        name: name.to_owned(),
        shape: shape.to_vec(),
        // A known kind, or one that is not.
        kind: i32::from(model / 6) % 4,
    };
    match model % 6 {
        0..2 => vec![variable("b", &[4]), variable("w", &[1 << 20])],
        2 => vec![variable("w", &[64, 1 << 10])],
        3 => Vec::new(),
        4 => vec![variable("w", &[2]), variable("b", &[2])],
        _ => vec![variable("w", &[1 << 40, 1 << 20])],
    }
}
