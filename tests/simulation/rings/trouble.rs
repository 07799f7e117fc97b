//! The faults of a world of rings: those that the simulation causes and mends.

use std::collections::BTreeSet;
use std::time::Duration;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use turmoil::Sim;

use super::World;
use super::history::Event;
use crate::sim::LATENCY;
use crate::store::Mood;

/// The time in which faults begin, and the longest time that the job may take after it, both simulated.
pub(crate) const TROUBLE: Duration = Duration::from_secs(18);
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// The time at which, in some worlds, a worker dies for good.
const DOOM: Duration = Duration::from_secs(5);

/// The worker that leaves for good, in worlds in which one dies or departs.
const LEAVER: &str = "worker-1";

/// The delay before a process that has ended because of the store or the disk is started again.
const START_AGAIN: Duration = Duration::from_secs(1);

/// The longest time that a message takes on a slow link, in milliseconds.
const SLOW: std::ops::Range<u64> = 40..400;

/// The longest time, in milliseconds, between the beginning of an all-reduce and the death of a worker that is to die in one.
const WITHIN_STEP: u64 = 45;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Crash,
    /// A worker dies while it adds up a gradient with the others.
    CrashInStep,
    AllDie,
    /// Two workers cannot reach each other, or one of them not the other.
    Parted,
    OneWay,
    /// A worker and the coordinator cannot reach each other, or one of them not the other.
    Lost,
    LostOneWay,
    /// What two processes send to each other arrives later.
    Late,
    Slow,
    Store,
    Disk,
    Stop,
    Depart,
}

/// The end of a fault.
#[derive(Clone, Debug)]
enum Mend {
    Start(String),
    Repair(String, String),
    Release(String, String),
    Fast(String, String),
    Store(String),
    Disk,
    GoOn(String),
}

/// Causes and mends faults.
pub(crate) struct Trouble<'w> {
    world: &'w World,
    names: Vec<String>,
    rng: ChaCha8Rng,
    next: Duration,
    to_mend: Vec<(Duration, Mend)>,
    down: BTreeSet<String>,
    /// Workers that do not come back.
    gone: BTreeSet<String>,
    is_doomed: bool,
    /// A worker that is to die in its next all-reduce, and the time once that has begun.
    ambush: Option<(String, Option<Duration>)>,
}

impl<'w> Trouble<'w> {
    /// Creates the faults of hosts with these names, of which the first is the coordinator.
    pub(crate) fn new(world: &'w World, names: Vec<String>) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(world.seed);
        Self {
            world,
            names,
            next: Duration::from_millis(rng.random_range(300..2000)),
            rng,
            to_mend: Vec::new(),
            down: BTreeSet::new(),
            gone: BTreeSet::new(),
            is_doomed: world.plan.doomed,
            ambush: None,
        }
    }

    /// Causes and mends faults for [`TROUBLE`], and then lets the job finish.
    pub(crate) fn run(mut self, sim: &mut Sim<'_>) -> Result<(), String> {
        loop {
            let now = sim.elapsed();
            self.mend_what_is_due(sim);
            for name in self.world.history.take_exits() {
                self.restart(now, name);
            }
            if now >= self.next && now < TROUBLE {
                self.next = now + Duration::from_millis(self.rng.random_range(100..2500));
                if let Some(mend) = self.inject_fault(sim) {
                    self.to_mend.push(mend);
                }
            }
            self.spring_ambush(sim);
            // A job does not begin before its workers are there.
            if self.is_doomed && now >= DOOM && self.world.history.has_begun() {
                self.is_doomed = false;
                self.kill_for_good(sim);
            }
            let ended =
                |name: &&String| self.world.history.has_ended(name) || self.gone.contains(*name);
            if self.names.iter().all(|name| ended(&name)) {
                return Ok(());
            }
            if now > TROUBLE + PATIENCE {
                let missing: Vec<&String> = self.names.iter().filter(|n| !ended(n)).collect();
                return Err(format!("after {now:?} these have not ended: {missing:?}"));
            }
            sim.step().map_err(|error| error.to_string())?;
        }
    }

    fn say(&self, sim: &Sim<'_>, what: String) {
        let now = sim.elapsed().as_millis() as u64;
        self.world.history.add_at(now, Event::Fault(what));
    }

    fn kill(&mut self, sim: &mut Sim<'_>, name: &str) {
        if !self.down.insert(name.to_owned()) {
            return;
        }
        if name == "coordinator" {
            let machine_dies = self.rng.random_range(0..3) > 0;
            self.world.disk.kill(machine_dies, &mut self.rng);
        }
        self.world.pauses.of(name).go_on();
        self.world.history.dies(name);
        sim.crash(name);
    }

    fn kill_for_good(&mut self, sim: &mut Sim<'_>) {
        if self.gone.contains(LEAVER) || self.world.history.has_ended(LEAVER) {
            return;
        }
        self.say(sim, format!("{LEAVER} dies for good"));
        self.kill(sim, LEAVER);
        self.to_mend
            .retain(|(_, mend)| !matches!(mend, Mend::Start(down) if down == LEAVER));
        self.gone.insert(LEAVER.to_owned());
    }

    /// Starts a process again that has ended, unless it is the worker that leaves for good.
    fn restart(&mut self, now: Duration, name: String) {
        self.down.insert(name.clone());
        let departs = name == LEAVER && self.world.plan.departs && self.world.history.has_begun();
        if departs && self.rng.random_bool(0.5) {
            self.gone.insert(name);
        } else {
            self.to_mend.push((now + START_AGAIN, Mend::Start(name)));
        }
    }

    /// Kills the worker that is to die within a step, once it is in one.
    fn spring_ambush(&mut self, sim: &mut Sim<'_>) {
        let now = sim.elapsed();
        let Some((name, at)) = self.ambush.take() else {
            return;
        };
        if self.down.contains(&name) || self.world.history.has_ended(&name) {
            return;
        }
        match at {
            Some(at) if at <= now => {
                self.say(sim, format!("{name} crashes in a step"));
                self.kill(sim, &name);
                let start = now + Duration::from_millis(self.rng.random_range(50..3000));
                self.to_mend.push((start, Mend::Start(name)));
            }
            None if self.world.history.is_adding(&name) => {
                let after = Duration::from_millis(self.rng.random_range(0..WITHIN_STEP));
                self.ambush = Some((name, Some(now + after)));
            }
            at => self.ambush = Some((name, at)),
        }
    }

    /// Returns the kinds of faults of this world. A kind that is drawn more often appears more often.
    fn kinds(&self) -> Vec<Kind> {
        let plan = &self.world.plan;
        let times = |has: bool, times: usize| if has { times } else { 0 };
        [
            (Kind::Crash, 3),
            (Kind::CrashInStep, 4),
            (Kind::AllDie, times(plan.all_die, 2)),
            (Kind::Parted, 2),
            (Kind::OneWay, 3),
            (Kind::Lost, 1),
            (Kind::LostOneWay, 2),
            (Kind::Late, 2),
            (Kind::Slow, 2),
            (Kind::Store, times(plan.store, 4)),
            (Kind::Disk, times(plan.disk, 2)),
            (Kind::Stop, times(plan.stops, 3)),
            (Kind::Depart, times(plan.departs, 3)),
        ]
        .into_iter()
        .flat_map(|(kind, times)| std::iter::repeat_n(kind, times))
        .collect()
    }

    /// Returns the processes that run, or those of them that are workers.
    fn up(&self, only_workers: bool) -> Vec<String> {
        let is_meant = |name: &&String| !only_workers || name.starts_with("worker");
        let names = self.names.iter().filter(is_meant);
        let is_up = |name: &&String| {
            let has_ended = self.gone.contains(*name) || self.world.history.has_ended(name);
            !self.down.contains(*name) && !has_ended
        };
        names.filter(is_up).cloned().collect()
    }

    /// Causes one fault. Returns its end, if it has one.
    fn inject_fault(&mut self, sim: &mut Sim<'_>) -> Option<(Duration, Mend)> {
        let kind = *self.kinds().choose(&mut self.rng)?;
        match kind {
            Kind::Crash => {
                let one = self.one(false)?;
                self.say(sim, format!("{one} crashes"));
                self.kill(sim, &one);
                Some((self.until(sim, 50..3000), Mend::Start(one)))
            }
            Kind::CrashInStep => {
                self.ambush = Some((self.one(true)?, None));
                None
            }
            Kind::AllDie => {
                self.all_die(sim);
                None
            }
            Kind::Parted | Kind::OneWay | Kind::Lost | Kind::LostOneWay => self.cut(sim, kind),
            Kind::Late | Kind::Slow => self.delay(sim, kind),
            Kind::Store => self.spoil(sim),
            Kind::Disk => {
                self.say(
                    sim,
                    "the disk with the coordinator's state fails".to_owned(),
                );
                self.world.disk.set_failing(true);
                Some((self.until(sim, 100..3000), Mend::Disk))
            }
            Kind::Stop => {
                let one = self.one(false)?;
                self.say(sim, format!("{one} is stopped"));
                self.world.pauses.of(&one).stop();
                Some((self.until(sim, 50..6000), Mend::GoOn(one)))
            }
            Kind::Depart => {
                let one = self.one(true)?;
                self.say(sim, format!("{one} is told to stop"));
                self.world.drains.stop(&one);
                None
            }
        }
    }

    /// Returns the time of a fault's end, so many milliseconds from now.
    fn until(&mut self, sim: &Sim<'_>, after: std::ops::Range<u64>) -> Duration {
        sim.elapsed() + Duration::from_millis(self.rng.random_range(after))
    }

    /// Returns a process that runs, or a worker.
    fn one(&mut self, only_workers: bool) -> Option<String> {
        self.up(only_workers).choose(&mut self.rng).cloned()
    }

    /// Returns a worker that runs, or a server: a process that workers have connections to.
    fn peer(&mut self) -> Option<String> {
        let mut peers = self.up(false);
        peers.retain(|name| name != "coordinator");
        peers.choose(&mut self.rng).cloned()
    }

    fn all_die(&mut self, sim: &mut Sim<'_>) {
        self.say(sim, "all workers crash".to_owned());
        for name in self.up(true) {
            self.kill(sim, &name);
            let start = self.until(sim, 50..4000);
            self.to_mend.push((start, Mend::Start(name)));
        }
    }

    /// Cuts a link between a worker and another one, a server or the coordinator.
    fn cut(&mut self, sim: &mut Sim<'_>, kind: Kind) -> Option<(Duration, Mend)> {
        let mut one = self.one(true)?;
        let mut other = match kind {
            Kind::Lost | Kind::LostOneWay => "coordinator".to_owned(),
            _ => self.peer().filter(|other| *other != one)?,
        };
        if self.rng.random_bool(0.5) {
            std::mem::swap(&mut one, &mut other);
        }
        if matches!(kind, Kind::Parted | Kind::Lost) {
            self.say(sim, format!("{one} and {other} are parted"));
            sim.partition(one.as_str(), other.as_str());
        } else {
            self.say(sim, format!("{other} does not hear {one}"));
            sim.partition_oneway(one.as_str(), other.as_str());
        }
        Some((self.until(sim, 100..9000), Mend::Repair(one, other)))
    }

    fn delay(&mut self, sim: &mut Sim<'_>, kind: Kind) -> Option<(Duration, Mend)> {
        let one = self.one(false)?;
        let other = self.one(true).filter(|other| *other != one)?;
        if kind == Kind::Late {
            self.say(
                sim,
                format!("what {one} and {other} say to each other is late"),
            );
            sim.hold(one.as_str(), other.as_str());
            return Some((self.until(sim, 50..3000), Mend::Release(one, other)));
        }
        let latency = Duration::from_millis(self.rng.random_range(SLOW));
        self.say(
            sim,
            format!("messages between {one} and {other} take up to {latency:?}"),
        );
        sim.set_link_max_message_latency(one.as_str(), other.as_str(), latency);
        Some((self.until(sim, 500..8000), Mend::Fast(one, other)))
    }

    /// Begins a fault of the store for a host.
    fn spoil(&mut self, sim: &Sim<'_>) -> Option<(Duration, Mend)> {
        let moods = [Mood::Fails, Mood::Refuses, Mood::Full, Mood::Slow];
        let mood = *moods.choose(&mut self.rng)?;
        let one = self.one(false)?;
        // A run that the store refuses at its start ends.
        if mood == Mood::Refuses && !self.world.history.has_checkpoint() {
            return None;
        }
        self.say(sim, format!("the store {mood:?} for {one}"));
        self.world.stores.spoil(&one, mood);
        Some((self.until(sim, 500..8000), Mend::Store(one)))
    }

    fn mend_what_is_due(&mut self, sim: &mut Sim<'_>) {
        let now = sim.elapsed();
        let all = std::mem::take(&mut self.to_mend);
        let (due, later): (Vec<_>, Vec<_>) = all.into_iter().partition(|(at, _)| *at <= now);
        self.to_mend = later;
        for (_, mend) in due {
            self.say(sim, format!("mended: {mend:?}"));
            match mend {
                // There is no coordinator that it could find.
                Mend::Start(name) if self.world.history.has_ended("coordinator") => {
                    self.gone.insert(name);
                }
                Mend::Start(name) => {
                    self.down.remove(&name);
                    sim.bounce(name.as_str());
                }
                Mend::Repair(one, other) => sim.repair(one.as_str(), other.as_str()),
                Mend::Release(one, other) => sim.release(one.as_str(), other.as_str()),
                Mend::Fast(one, other) => {
                    sim.set_link_max_message_latency(one.as_str(), other.as_str(), LATENCY);
                }
                Mend::Store(host) => self.world.stores.mend(&host, now),
                Mend::Disk => self.world.disk.set_failing(false),
                Mend::GoOn(name) => self.world.pauses.of(&name).go_on(),
            }
        }
    }
}
