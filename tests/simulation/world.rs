//! A cluster in a simulated world, and what befalls it.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use checkpoint::Store;
use daemon::membership::{Coordinator, Registration};
use object_store::memory::InMemory;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use redb::StorageBackend;
use shared_proto::ids::Role;
use shared_proto::job::{Job, Mode, Optimizer, Sgd};
use shared_proto::payload;
use tokio_util::sync::CancellationToken;
use turmoil::Sim;

use crate::checker::check;
use crate::history::{Event, History};
use crate::model::{Counting, EPOCHS, Observed, PUSHES, VARIABLES};
use crate::network::{PORT, Simulated, incoming};

/// Shards, hosts of servers (one of them is a spare, or comes with another's identity), and workers.
const SHARDS: u32 = 2;
const PS: u32 = 3;
const WORKERS: u32 = 3;

/// How long things are done to the cluster, and how long it may take from then on, simulated.
const TROUBLE: Duration = Duration::from_secs(25);
const PATIENCE: Duration = Duration::from_secs(180);

/// When a worker dies for good, in some worlds.
const DOOM: Duration = Duration::from_secs(4);

/// When a second server starts under the identity of the first one, in some worlds.
const MOVE: Duration = Duration::from_secs(6);

/// How long processes go on without hearing from others.
const MEMBER_PATIENCE: Duration = Duration::from_secs(60);

/// Something wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    Coordinator(coordinator::embedded::Fault),
    Server(ps_server::embedded::Fault),
}

/// A run of one seed.
pub(crate) struct World {
    seed: u64,
    planted: Option<Planted>,
    job: Job,
    history: History,
    /// What outlives the coordinator's host.
    state: Shared,
    objects: Arc<InMemory>,
}

/// Memory that outlives a crash.
#[derive(Clone, Debug, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl StorageBackend for Shared {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let start = offset as usize;
        out.copy_from_slice(&self.0.lock().unwrap()[start..start + out.len()]);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.lock().unwrap().resize(len as usize, 0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let start = offset as usize;
        self.0.lock().unwrap()[start..start + data.len()].copy_from_slice(data);
        Ok(())
    }
}

/// What is to be mended.
#[derive(Clone, Debug)]
enum Mend {
    Start(String),
    Repair(String, String),
    Release(String, String),
}

impl World {
    pub(crate) fn new(seed: u64, planted: Option<Planted>) -> Self {
        let mut job = Job {
            batch_size: 2,
            epochs: EPOCHS,
            seed,
            optimizer: Optimizer::Sgd(Sgd {
                learning_rate: 1.0,
                ..Sgd::default()
            }),
            ..Job::default()
        };
        job.strategy.mode = [Mode::Async, Mode::Bounded, Mode::Sync][(seed % 3) as usize];
        job.strategy.staleness = seed / 3 % 4;
        job.cluster.ps = Some(SHARDS);
        job.cluster.workers = Some(WORKERS);
        job.cluster.lease_seconds = 2.0;
        // Longer than anything may take: it would mend what hangs.
        job.cluster.stall_seconds = 1000.0;
        job.checkpoint.every_seconds = 1.0;
        let bound = match job.strategy.mode {
            Mode::Async => None,
            Mode::Bounded => Some(job.strategy.staleness),
            Mode::Sync => Some(0),
        };
        let sync = job.strategy.mode == Mode::Sync;
        Self {
            seed,
            planted,
            job,
            history: History::with_bound(bound, sync),
            state: Shared::default(),
            objects: Arc::default(),
        }
    }

    /// Runs it, and says what of what was promised is not so.
    pub(crate) fn run(self) -> (History, Vec<String>) {
        // Delays between retries are drawn from here.
        fastrand::seed(self.seed);
        let mut sim = turmoil::Builder::new()
            .rng_seed(self.seed)
            .tick_duration(Duration::from_millis(5))
            .min_message_latency(Duration::from_millis(1))
            .max_message_latency(Duration::from_millis(12))
            .simulation_duration(TROUBLE + 2 * PATIENCE)
            .tcp_capacity(4096)
            .build();
        let names = self.hosts(&mut sim);
        let outcome = self.let_happen(&mut sim, &names);
        let mut wrong = Vec::new();
        if let Err(error) = outcome {
            wrong.push(error);
        } else {
            let sync = self.job.strategy.mode == Mode::Sync;
            self.look_at_last_checkpoint();
            wrong.extend(check(&self.history, sync));
        }
        (self.history, wrong)
    }

    /// Reads the newest checkpoint as anybody would who restores it.
    fn look_at_last_checkpoint(&self) {
        let store = Store::over(self.objects.clone(), "the store");
        let read = async {
            let manifest = store.newest().await.ok()??;
            let mut weights = vec![vec![0.0; PUSHES]; VARIABLES];
            for file in &manifest.files {
                for block in store.read_file(&manifest, file).await.ok()? {
                    let values = payload::elements(&block.weights).iter().map(|v| v.get());
                    weights[block.id.variable as usize] = values.collect();
                }
            }
            let number = manifest.number;
            Some(Event::Checkpoint { number, weights })
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        if let Some(event) = runtime.unwrap().block_on(read) {
            self.history.add_at(u64::MAX, event);
        }
    }

    fn hosts(&self, sim: &mut Sim<'_>) -> Vec<String> {
        let mut names = vec!["coordinator".to_owned()];
        self.coordinator(sim);
        for index in 0..PS {
            let name = format!("ps-{index}");
            // Somebody has started a second process with an identity that is in use.
            let twice = index + 1 == PS && self.has_identity_twice();
            let identity = if twice { "ps-0" } else { &name };
            self.ps(
                sim,
                &name,
                identity,
                if twice { MOVE } else { Duration::ZERO },
            );
            names.push(name);
        }
        for index in 0..WORKERS {
            let name = format!("worker-{index}");
            self.worker(sim, &name, index);
            names.push(name);
        }
        names
    }

    fn coordinator(&self, sim: &mut Sim<'_>) {
        let (job, history, state) = (self.job.clone(), self.history.clone(), self.state.clone());
        let objects = Arc::clone(&self.objects);
        let fault = match self.planted {
            Some(Planted::Coordinator(fault)) => Some(fault),
            _ => None,
        };
        sim.host("coordinator", move || {
            let (job, history, state) = (job.clone(), history.clone(), state.clone());
            let checkpoints = Store::over(objects.clone(), "the store");
            async move {
                let embedded = coordinator::embedded::Embedded {
                    job,
                    storage: state,
                    checkpoints,
                    fault,
                };
                let recorded = history.clone();
                let tell = move |record| recorded.add(Event::Recorded(record));
                let ended = embedded.coordinate(incoming().await?, tell).await;
                let outcome = match ended {
                    Ok(summary) if summary.error.is_empty() => Ok(()),
                    Ok(summary) => Err(summary.error),
                    Err(error) => Err(error.to_string()),
                };
                ended_by_itself(&history, "coordinator", outcome);
                Ok(())
            }
        });
    }

    /// Whether two servers share an identity, instead of one being a spare.
    fn has_identity_twice(&self) -> bool {
        self.seed % 5 == 3
    }

    fn ps(&self, sim: &mut Sim<'_>, name: &str, identity: &str, after: Duration) {
        let (history, objects) = (self.history.clone(), Arc::clone(&self.objects));
        let fault = match self.planted {
            Some(Planted::Server(fault)) => Some(fault),
            _ => None,
        };
        let own = (name.to_owned(), identity.to_owned());
        sim.host(name, move || {
            let (history, objects, (name, identity)) =
                (history.clone(), objects.clone(), own.clone());
            async move {
                let elapsed = turmoil::sim_elapsed().unwrap_or_default();
                tokio::time::sleep(after.saturating_sub(elapsed)).await;
                let embedded = ps_server::embedded::Embedded {
                    coordinator: find_coordinator()?,
                    registration: Registration {
                        identity,
                        ..registration(Role::Ps, &name)
                    },
                    checkpoints: Arc::new(move |_| Ok(Store::over(objects.clone(), "the store"))),
                    fault,
                    drain: CancellationToken::new(),
                };
                let outcome = embedded.serve(incoming().await?).await;
                ended_by_itself(&history, &name, outcome.map_err(|error| error.to_string()));
                Ok(())
            }
        });
    }

    fn worker(&self, sim: &mut Sim<'_>, name: &str, index: u32) {
        let history = self.history.clone();
        let own = name.to_owned();
        // The last one is slow.
        let step = Duration::from_millis(if index + 1 == WORKERS { 150 } else { 60 });
        sim.host(name, move || {
            let (history, name) = (history.clone(), own.clone());
            async move {
                let embedded = worker::embedded::Embedded {
                    coordinator: find_coordinator()?,
                    registration: registration(Role::Worker, &name),
                    network: Arc::new(Simulated::default()),
                    patience: MEMBER_PATIENCE,
                };
                let replica = Counting::new(&name, &history, step);
                let strategy = |servers| Observed::new(servers, &name, &history);
                let outcome = embedded.work(replica, strategy).await;
                ended_by_itself(&history, &name, outcome.map_err(|error| error.to_string()));
                Ok(())
            }
        });
    }

    /// Does things to the cluster until it has had enough, and lets it finish.
    fn let_happen(&self, sim: &mut Sim<'_>, names: &[String]) -> Result<(), String> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let mut next = Duration::from_millis(rng.random_range(500..3000));
        let mut to_mend: Vec<(Duration, Mend)> = Vec::new();
        let mut down = BTreeSet::new();
        // In some worlds a worker dies for good: the others must not wait for it.
        let mut doomed = (self.seed % 4 == 1).then_some("worker-1");
        let mut dead = None;
        loop {
            let now = sim.elapsed();
            let (due, later): (Vec<_>, Vec<_>) =
                to_mend.into_iter().partition(|(at, _)| *at <= now);
            to_mend = later;
            for (_, mend) in due {
                if let Mend::Start(name) = &mend {
                    down.remove(name);
                }
                self.mend(sim, mend);
            }
            if now >= next && now < TROUBLE {
                next = now + Duration::from_millis(rng.random_range(200..4000));
                to_mend.extend(self.trouble(sim, names, &mut down, &mut rng));
            }
            if let Some(name) = doomed.take_if(|_| now >= DOOM) {
                self.history.add_at(
                    now.as_millis() as u64,
                    Event::Fault(format!("{name} dies for good")),
                );
                if !down.contains(name) {
                    sim.crash(name);
                }
                down.insert(name.to_owned());
                to_mend.retain(|(_, mend)| !matches!(mend, Mend::Start(down) if down == name));
                dead = Some(name);
            }
            let mut ended = self.history.ended();
            ended.extend(dead.map(str::to_owned));
            if names.iter().all(|name| ended.contains(name)) {
                return Ok(());
            }
            if now > TROUBLE + PATIENCE {
                let missing: Vec<&String> =
                    names.iter().filter(|name| !ended.contains(*name)).collect();
                return Err(format!("after {now:?} these have not ended: {missing:?}"));
            }
            sim.step().map_err(|error| error.to_string())?;
        }
    }

    /// One thing that goes wrong, and when it is mended.
    fn trouble(
        &self,
        sim: &mut Sim<'_>,
        names: &[String],
        down: &mut BTreeSet<String>,
        rng: &mut ChaCha8Rng,
    ) -> Option<(Duration, Mend)> {
        let now = sim.elapsed();
        let say = |what: String| {
            self.history
                .add_at(now.as_millis() as u64, Event::Fault(what))
        };
        let ended = self.history.ended();
        let up: Vec<&String> = names
            .iter()
            .filter(|name| !down.contains(*name) && !ended.contains(*name))
            .collect();
        let mut one = (*up.choose(rng)?).clone();
        let mut other = (*up.choose(rng)?).clone();
        let kind = rng_kind(self.seed, now);
        if kind >= 10 {
            // A server and the coordinator lose each other, while workers reach both.
            let servers: Vec<&&String> = up.iter().filter(|name| name.starts_with("ps-")).collect();
            one = servers.choose(rng)?.to_string();
            other = "coordinator".to_owned();
            if rng.random_bool(0.5) {
                std::mem::swap(&mut one, &mut other);
            }
        }
        let mut until = |range| now + Duration::from_millis(rng.random_range(range));
        match kind {
            0..4 => {
                say(format!("{one} crashes"));
                down.insert(one.clone());
                sim.crash(one.as_str());
                Some((until(50..3000), Mend::Start(one)))
            }
            _ if one == other => None,
            4..6 => {
                say(format!("{one} and {other} are parted"));
                sim.partition(one.as_str(), other.as_str());
                Some((until(100..6000), Mend::Repair(one, other)))
            }
            6..8 => {
                say(format!("{other} does not hear {one}"));
                sim.partition_oneway(one.as_str(), other.as_str());
                Some((until(100..6000), Mend::Repair(one, other)))
            }
            10..12 => {
                say(format!("{one} and {other} are parted for long"));
                sim.partition(one.as_str(), other.as_str());
                Some((until(3000..15000), Mend::Repair(one, other)))
            }
            12..14 => {
                say(format!("{other} does not hear {one} for long"));
                sim.partition_oneway(one.as_str(), other.as_str());
                Some((until(3000..15000), Mend::Repair(one, other)))
            }
            _ => {
                say(format!("what {one} and {other} say to each other is late"));
                sim.hold(one.as_str(), other.as_str());
                Some((until(100..4000), Mend::Release(one, other)))
            }
        }
    }

    fn mend(&self, sim: &mut Sim<'_>, mend: Mend) {
        let now = sim.elapsed().as_millis() as u64;
        self.history
            .add_at(now, Event::Fault(format!("mended: {mend:?}")));
        match mend {
            Mend::Start(name) => sim.bounce(name.as_str()),
            Mend::Repair(one, other) => sim.repair(one.as_str(), other.as_str()),
            Mend::Release(one, other) => sim.release(one.as_str(), other.as_str()),
        }
    }
}

/// A number below 14, by the seed and the time.
fn rng_kind(seed: u64, now: Duration) -> u32 {
    let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ now.as_millis() as u64;
    ChaCha8Rng::seed_from_u64(mixed).random_range(0..14)
}

fn find_coordinator() -> Result<Coordinator, Box<dyn std::error::Error>> {
    let address = format!("coordinator:{PORT}");
    Ok(Coordinator::over(
        &Simulated::default(),
        &address,
        MEMBER_PATIENCE,
    )?)
}

fn registration(role: Role, name: &str) -> Registration {
    Registration {
        role,
        identity: name.to_owned(),
        address: format!("{name}:{PORT}"),
        metrics_address: String::new(),
        holding: None,
    }
}

fn ended_by_itself(history: &History, name: &str, outcome: Result<(), String>) {
    let name = name.to_owned();
    history.add(Event::Ended { name, outcome });
}
