//! The hosts of a world of rings, and the processes on them.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use collective::{Exchange, LinkService};
use coordinator::embedded::Embedded;
use daemon::Offload;
use network::security::Security;
use ps_server::RowStorage;
use shared_proto::ids::Role;
use tokio_util::sync::CancellationToken;
use turmoil::Sim;
use worker::embedded::Parts;
use worker::strategy::{self, Stores};

use super::World;
use super::history::Event;
use super::model::Kept;
use crate::hosts::{MEMBER_PATIENCE, PS, find_coordinator, outcome};
use crate::network::{Simulated, incoming, registration};
use crate::pause::Pause;

/// The time for which the system of an ended process still sends what closes its connections.
const CLOSING: Duration = Duration::from_millis(200);

impl World {
    /// Adds all hosts, and returns their names: the coordinator's first.
    pub(crate) fn hosts(&self, sim: &mut Sim<'_>) -> Vec<String> {
        let mut names = vec!["coordinator".to_owned()];
        self.coordinator(sim);
        for index in 0..self.plan.all_workers() {
            let name = format!("worker-{index}");
            self.worker(sim, &name, index);
            names.push(name);
        }
        let servers = if self.plan.servers { PS } else { 0 };
        for index in 0..servers {
            let name = format!("ps-{index}");
            self.ps(sim, &name);
            names.push(name);
        }
        names
    }

    fn ps(&self, sim: &mut Sim<'_>, name: &str) {
        let (world, pause, own) = (self.clone(), self.pauses.of(name), name.to_owned());
        sim.host(name, move || {
            let (world, pause, name) = (world.clone(), pause.clone(), own.clone());
            async move {
                let store = world.stores.seen_from(&name);
                let embedded = ps_server::embedded::Embedded {
                    coordinator: find_coordinator(&pause)?,
                    registration: registration(Role::Ps, &name),
                    checkpoints: Arc::new(move |_| Ok(store.clone())),
                    rows: RowStorage::default(),
                    drain: CancellationToken::new(),
                };
                let served = embedded.serve(incoming(pause.clone(), None).await?);
                let outcome = pause.over(served).await;
                world.ended(&name, outcome.map_err(|error| error.to_string()));
                Ok(())
            }
        });
    }

    fn coordinator(&self, sim: &mut Sim<'_>) {
        let world = self.clone();
        let pause = self.pauses.of("coordinator");
        sim.host("coordinator", move || {
            let (world, pause) = (world.clone(), pause.clone());
            async move {
                let embedded = Embedded {
                    job: world.job.clone(),
                    storage: world.disk.open(),
                    checkpoints: world.stores.seen_from("coordinator"),
                    restore: false,
                    run: format!("{:016x}", world.seed),
                };
                let recorded = world.history.clone();
                let tell = move |record| recorded.add(Event::Recorded(record));
                let repeats = world.plan.repeats.then(|| world.repeats.clone());
                let incoming = incoming(pause.clone(), repeats).await?;
                let ended = pause.over(embedded.coordinate(incoming, tell)).await;
                if let Ok(summary) = &ended {
                    let (steps, samples) = (summary.steps, summary.samples);
                    world.history.add(Event::Summary { steps, samples });
                }
                world.ended("coordinator", outcome(ended));
                Ok(())
            }
        });
    }

    fn worker(&self, sim: &mut Sim<'_>, name: &str, index: u32) {
        let (world, pause) = (self.clone(), self.pauses.of(name));
        let (own, start) = (name.to_owned(), self.plan.start_of(index));
        let step = Duration::from_millis(40 + 10 * u64::from(index));
        sim.host(name, move || {
            let (world, pause, name) = (world.clone(), pause.clone(), own.clone());
            async move {
                let elapsed = turmoil::sim_elapsed().unwrap_or_default();
                tokio::time::sleep(start.saturating_sub(elapsed)).await;
                let (links, stop) = (Exchange::default(), world.drains.begin(&name));
                let service = LinkService {
                    exchange: links.clone(),
                    security: Security::default(),
                };
                let incoming = incoming(pause.clone(), None).await?;
                tokio::spawn(service.serve(incoming, CancellationToken::new()));
                let parts = world.parts(&name, &pause, links)?;
                let replica = Kept::new(&name, &world, step);
                let work = worker::embedded::work(parts, replica, &stop, strategy::join);
                let outcome = pause.over(work).await;
                let job_is_over = world.history.has_ended("coordinator");
                match outcome {
                    Ok(()) if stop.is_cancelled() && !job_is_over => {
                        world.history.exited(&name, "told to stop".to_owned());
                    }
                    outcome => world.ended(&name, outcome.map_err(|error| error.to_string())),
                }
                tokio::time::sleep(CLOSING).await;
                Ok(())
            }
        });
    }

    /// Returns the identity of a worker, and its connections to other processes.
    fn parts(&self, name: &str, pause: &Pause, links: Exchange) -> Result<Parts, Box<dyn Error>> {
        let store = self.stores.seen_from(name);
        Ok(Parts {
            coordinator: find_coordinator(pause)?,
            registration: registration(Role::Worker, name),
            network: Arc::new(Simulated::new(pause.clone())),
            links,
            stores: Stores {
                open: Arc::new(move |_| Ok(store.clone())),
                offload: Offload::Inline,
            },
            patience: MEMBER_PATIENCE,
        })
    }
}
