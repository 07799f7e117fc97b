//! The hosts of a simulated cluster, and the processes on them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use collective::Exchange;
use coordinator::embedded::Embedded;
use coordinator::{CoordinatorError, Summary};
use daemon::membership::{Coordinator, Registration};
use futures_util::stream;
use network::connections::AcceptedStream;
use ps_server::RowStorage;
use replica::Replica;
use shared_proto::ids::Role;
use table::disk::Disk;
use tokio_util::sync::CancellationToken;
use turmoil::Sim;
use worker::strategy::{Joining, Stores};

use crate::history::Event;
use crate::model::{Counting, Observed};
use crate::network::{PORT, Simulated, incoming, registration};
use crate::pause::Pause;
use crate::world::World;

/// The numbers of shards, of hosts of servers (one is a spare, or has another's identity), and of workers.
pub(crate) const SHARDS: u32 = 2;
pub(crate) const PS: u32 = 3;
pub(crate) const WORKERS: u32 = 3;

/// The time at which, in some worlds, a second server starts under the identity of the first one.
const MOVE: Duration = Duration::from_secs(6);

/// The time at which, in some worlds, a second coordinator starts: the first is at work by then.
const SECOND: Duration = Duration::from_secs(3);

/// The host of the second coordinator.
pub(crate) const SECOND_COORDINATOR: &str = "coordinator-2";

/// The time for which processes continue without an answer of other processes.
pub(crate) const MEMBER_PATIENCE: Duration = Duration::from_secs(60);

impl World {
    /// Adds all hosts, and returns their names: the coordinator's first.
    pub(crate) fn hosts(&self, sim: &mut Sim<'_>) -> Vec<String> {
        let mut names = vec!["coordinator".to_owned()];
        self.coordinator(sim);
        for index in 0..PS {
            let name = format!("ps-{index}");
            // By mistake, a second process has an identity that is in use.
            let twice = index + 1 == PS && self.plan.identity_twice;
            let identity = if twice { "ps-0" } else { &name };
            let after = if twice { MOVE } else { Duration::ZERO };
            self.ps(sim, &name, identity, after);
            names.push(name);
        }
        for index in 0..WORKERS {
            let name = format!("worker-{index}");
            self.worker(sim, &name, index);
            names.push(name);
        }
        if self.plan.second_coordinator {
            self.second_coordinator(sim);
        }
        names
    }

    fn coordinator(&self, sim: &mut Sim<'_>) {
        let world = self.clone();
        let pause = self.pauses.of("coordinator");
        sim.host("coordinator", move || {
            let (world, pause) = (world.clone(), pause.clone());
            async move {
                let history = world.history.clone();
                let (fresh, number) = history.next_run();
                let restored = match fresh {
                    true => world.newest().await,
                    false => None,
                };
                let embedded = Embedded {
                    job: world.job.clone(),
                    storage: world.disk.open(),
                    checkpoints: world.stores.seen_from("coordinator"),
                    restore: restored.is_some(),
                    run: world.run_id(number),
                };
                let recorded = history.clone();
                let tell = move |record| recorded.add(Event::Recorded(record));
                let repeats = world.plan.repeats.then(|| world.repeats.clone());
                let begun = move || {
                    if fresh {
                        history.begin_run(number, restored);
                    }
                };
                let incoming = once_polled(incoming(pause.clone(), repeats).await?, begun);
                let ended = pause.over(embedded.coordinate(incoming, tell)).await;
                if let Ok(summary) = &ended {
                    let lost = summary.lost_updates;
                    world.history.add(Event::Summary { lost });
                }
                world.ended("coordinator", outcome(ended));
                Ok(())
            }
        });
    }

    /// Adds a coordinator of another run, which uses the same store of checkpoints.
    fn second_coordinator(&self, sim: &mut Sim<'_>) {
        let world = self.clone();
        sim.host(SECOND_COORDINATOR, move || {
            let world = world.clone();
            async move {
                tokio::time::sleep(SECOND).await;
                let embedded = Embedded {
                    job: world.job.clone(),
                    storage: crate::disk::Disk::default().open(),
                    checkpoints: world.stores.seen_from(SECOND_COORDINATOR),
                    restore: world.seed.is_multiple_of(2),
                    run: "ffffffffffffffff".to_owned(),
                };
                let incoming = incoming(Pause::default(), None).await?;
                let outcome = embedded.coordinate(incoming, |_| {}).await;
                // The rest of the text contains the time, which differs in each run.
                let shortened =
                    |error: String| error.split(", there since").next().map(str::to_owned);
                let refused = outcome.err().and_then(|error| shortened(error.to_string()));
                world.history.add(Event::Second {
                    refused,
                    has_written: world.stores.has_written(SECOND_COORDINATOR),
                });
                Ok(())
            }
        });
    }

    fn ps(&self, sim: &mut Sim<'_>, name: &str, identity: &str, after: Duration) {
        let (world, pause) = (self.clone(), self.pauses.of(name));
        let own = (name.to_owned(), identity.to_owned());
        sim.host(name, move || {
            let (world, pause, (name, identity)) = (world.clone(), pause.clone(), own.clone());
            async move {
                let elapsed = turmoil::sim_elapsed().unwrap_or_default();
                tokio::time::sleep(after.saturating_sub(elapsed)).await;
                let store = world.stores.seen_from(&name);
                let drain = world.drains.begin(&name);
                let embedded = ps_server::embedded::Embedded {
                    coordinator: find_coordinator(&pause)?,
                    registration: Registration {
                        identity,
                        ..registration(Role::Ps, &name)
                    },
                    checkpoints: Arc::new(move |_| Ok(store.clone())),
                    rows: RowStorage {
                        disk: world.rows_on_disk()?,
                        ..RowStorage::default()
                    },
                    drain: drain.clone(),
                };
                let served = embedded.serve(incoming(pause.clone(), None).await?);
                let outcome = pause.over(served).await;
                let job_is_over = world.history.has_ended("coordinator");
                match outcome {
                    Ok(()) if drain.is_cancelled() && !job_is_over => {
                        world.history.exited(&name, "told to stop".to_owned());
                    }
                    outcome => world.ended(&name, outcome.map_err(|error| error.to_string())),
                }
                Ok(())
            }
        });
    }

    /// Returns a limit of no memory for rows in a quarter of the schedules: each row goes to disk when its update is over.
    fn rows_on_disk(&self) -> io::Result<Option<Arc<Disk>>> {
        let has_limit = self.seed.is_multiple_of(4);
        let disk = has_limit.then(|| Disk::new(&std::env::temp_dir(), 0));
        Ok(disk.transpose()?.map(Arc::new))
    }

    fn worker(&self, sim: &mut Sim<'_>, name: &str, index: u32) {
        let (world, pause) = (self.clone(), self.pauses.of(name));
        let own = name.to_owned();
        // The last worker is slow.
        let step = Duration::from_millis(if index + 1 == WORKERS { 150 } else { 60 });
        sim.host(name, move || {
            let (world, pause, name) = (world.clone(), pause.clone(), own.clone());
            async move {
                let parts = worker::embedded::Parts {
                    coordinator: find_coordinator(&pause)?,
                    registration: registration(Role::Worker, &name),
                    network: Arc::new(Simulated::new(pause.clone())),
                    links: Exchange::default(),
                    stores: Stores::default(),
                    patience: MEMBER_PATIENCE,
                };
                let replica = Counting::new(&name, &world.history, step);
                let (name, history) = (&name, &world.history);
                let join = async |joining: &Joining<'_>, replica: &dyn Replica| {
                    Observed::join(joining, replica, name, history).await
                };
                let never = CancellationToken::new();
                let work = worker::embedded::work(parts, replica, &never, join);
                let outcome = pause.over(work).await;
                world.ended(name, outcome.map_err(|error| error.to_string()));
                Ok(())
            }
        });
    }
}

/// Returns the outcome of a job: an error is the job's or the coordinator's.
pub(crate) fn outcome(ended: Result<Summary, CoordinatorError>) -> Result<(), String> {
    match ended {
        Ok(summary) if summary.error.is_empty() => Ok(()),
        Ok(summary) => Err(summary.error),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns the same stream, which calls `tell` when it is first polled.
fn once_polled(
    mut inner: AcceptedStream,
    tell: impl FnOnce() + Send + Unpin + 'static,
) -> AcceptedStream {
    let mut tell = Some(tell);
    Box::pin(stream::poll_fn(move |context| {
        if let Some(tell) = tell.take() {
            tell();
        }
        inner.as_mut().poll_next(context)
    }))
}

pub(crate) fn find_coordinator(pause: &Pause) -> Result<Coordinator, Box<dyn std::error::Error>> {
    let address = format!("coordinator:{PORT}");
    let network = Simulated::new(pause.clone());
    Ok(Coordinator::over(&network, &address, MEMBER_PATIENCE)?)
}
