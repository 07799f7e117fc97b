//! The faults that the simulation causes and mends.

use std::collections::BTreeSet;
use std::time::Duration;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use turmoil::Sim;

use crate::history::Event;
use crate::store::Mood;
use crate::world::World;

/// The time in which faults begin, and the longest time that the job may take after it, both simulated.
pub(crate) const TROUBLE: Duration = Duration::from_secs(25);
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// The time at which, in some worlds, a worker dies for good.
const DOOM: Duration = Duration::from_secs(4);

/// The delay before a process that has ended because of the store or the disk is started again.
const START_AGAIN: Duration = Duration::from_secs(1);

/// The time limit of a server that is told to stop. After it, the server is killed.
const TIME_TO_STOP: Duration = Duration::from_secs(6);

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Crash,
    Parted,
    OneWay,
    Late,
    PartedForLong,
    OneWayForLong,
    Store,
    Disk,
    Stop,
    Drain,
}

/// The end of a fault.
#[derive(Clone, Debug)]
enum Mend {
    Start(String),
    Repair(String, String),
    Release(String, String),
    Store(String),
    Disk,
    GoOn(String),
    EndAtOnce(String),
}

/// Causes and mends faults.
pub(crate) struct Trouble<'w> {
    world: &'w World,
    names: Vec<String>,
    rng: ChaCha8Rng,
    next: Duration,
    to_mend: Vec<(Duration, Mend)>,
    down: BTreeSet<String>,
    /// The worker that is to die for good, and the same worker once it is dead.
    doomed: Option<&'static str>,
    dead: Option<&'static str>,
    /// The time at which the coordinator's state is lost, if it is.
    loss: Option<Duration>,
}

impl<'w> Trouble<'w> {
    /// Creates the faults of hosts with these names, of which the first is the coordinator.
    pub(crate) fn new(world: &'w World, names: Vec<String>) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(world.seed);
        let next = Duration::from_millis(rng.random_range(500..3000));
        let loss = Duration::from_millis(rng.random_range(3000..18_000));
        Self {
            world,
            names,
            rng,
            next,
            to_mend: Vec::new(),
            down: BTreeSet::new(),
            doomed: world.plan.doomed.then_some("worker-1"),
            dead: None,
            loss: world.plan.loses_state.then_some(loss),
        }
    }

    /// Causes and mends faults for [`TROUBLE`], and then lets the job finish.
    pub(crate) fn run(mut self, sim: &mut Sim<'_>) -> Result<(), String> {
        loop {
            let now = sim.elapsed();
            self.mend_what_is_due(sim);
            for name in self.world.history.take_exits() {
                self.down.insert(name.clone());
                self.to_mend.push((now + START_AGAIN, Mend::Start(name)));
            }
            if now >= self.next && now < TROUBLE {
                self.next = now + Duration::from_millis(self.rng.random_range(200..4000));
                if let Some(mend) = self.inject_fault(sim) {
                    self.to_mend.push(mend);
                }
            }
            // A job does not begin before its workers are there.
            let has_begun = self.world.history.has_begun();
            if let Some(name) = self.doomed.take_if(|_| now >= DOOM && has_begun) {
                self.kill_for_good(sim, name);
            }
            if self.loss.take_if(|at| now >= *at).is_some() {
                self.lose_the_state(sim);
            }
            let ended = |name: &&String| {
                self.world.history.has_ended(name) || self.dead == Some(name.as_str())
            };
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
            // After a loss of power, damage of the newest change looks like a write that was cut short.
            let damages = self.world.plan.damages && self.rng.random_bool(0.6);
            let machine_dies = !damages && self.rng.random_range(0..3) > 0;
            self.world.disk.kill(machine_dies, &mut self.rng);
            if damages {
                let what = self.world.disk.damage(&mut self.rng);
                self.say(sim, format!("the coordinator's state is damaged: {what}"));
            }
        }
        self.world.pauses.of(name).go_on();
        sim.crash(name);
    }

    fn kill_for_good(&mut self, sim: &mut Sim<'_>, name: &'static str) {
        self.say(sim, format!("{name} dies for good"));
        self.kill(sim, name);
        self.to_mend
            .retain(|(_, mend)| !matches!(mend, Mend::Start(down) if down == name));
        self.dead = Some(name);
    }

    fn lose_the_state(&mut self, sim: &mut Sim<'_>) {
        // A new run would wait for workers that have ended.
        if self.world.history.job_is_over() {
            return;
        }
        self.say(sim, "the coordinator and its state are lost".to_owned());
        if !self.down.contains("coordinator") {
            self.kill(sim, "coordinator");
            let after = Duration::from_millis(self.rng.random_range(200..4000));
            let start = Mend::Start("coordinator".to_owned());
            self.to_mend.push((sim.elapsed() + after, start));
        }
        self.world.disk.lose();
        self.world.history.lose_run();
    }

    /// Returns the kinds of faults of this world. A kind that is drawn more often appears more often.
    fn kinds(&self) -> Vec<Kind> {
        use Kind::{
            Crash, Disk, Drain, Late, OneWay, OneWayForLong, Parted, PartedForLong, Stop, Store,
        };
        let plan = &self.world.plan;
        let times = |has: bool, times: usize| if has { times } else { 0 };
        [
            (Crash, 4),
            (Parted, 2),
            (OneWay, 2),
            (Late, 2),
            (PartedForLong, 2),
            (OneWayForLong, 2),
            (Store, times(plan.store, 5)),
            (Disk, times(plan.disk, 2)),
            (Stop, times(plan.stops, 4)),
            (Drain, times(plan.drains, 5)),
        ]
        .into_iter()
        .flat_map(|(kind, times)| std::iter::repeat_n(kind, times))
        .collect()
    }

    /// Causes one fault. Returns its end, if it has one.
    fn inject_fault(&mut self, sim: &mut Sim<'_>) -> Option<(Duration, Mend)> {
        let now = sim.elapsed();
        let up: Vec<String> = self
            .names
            .iter()
            .filter(|name| !self.down.contains(*name) && !self.world.history.has_ended(name))
            .cloned()
            .collect();
        let kind = *self.kinds().choose(&mut self.rng)?;
        let mut one = up.choose(&mut self.rng)?.clone();
        let mut other = up.choose(&mut self.rng)?.clone();
        let of_server = matches!(
            kind,
            Kind::PartedForLong | Kind::OneWayForLong | Kind::Drain
        );
        if of_server {
            let servers: Vec<&String> = up.iter().filter(|name| name.starts_with("ps-")).collect();
            one = (*servers.choose(&mut self.rng)?).clone();
        }
        if of_server && kind != Kind::Drain {
            // A server and the coordinator lose each other, while workers reach both.
            other = "coordinator".to_owned();
            if self.rng.random_bool(0.5) {
                std::mem::swap(&mut one, &mut other);
            }
        }
        let until =
            |rng: &mut ChaCha8Rng, range| now + Duration::from_millis(rng.random_range(range));
        match kind {
            Kind::Crash => {
                self.say(sim, format!("{one} crashes"));
                self.kill(sim, &one);
                Some((until(&mut self.rng, 50..3000), Mend::Start(one)))
            }
            Kind::Store => {
                let moods = [Mood::Fails, Mood::Refuses, Mood::Full, Mood::Slow];
                let mood = *moods.choose(&mut self.rng)?;
                if one.starts_with("worker") || self.rng.random_bool(0.4) {
                    "coordinator".clone_into(&mut one);
                }
                self.spoil(sim, &one, mood)
                    .then(|| (until(&mut self.rng, 500..9000), Mend::Store(one)))
            }
            Kind::Disk => {
                self.say(
                    sim,
                    "the disk with the coordinator's state fails".to_owned(),
                );
                self.world.disk.set_failing(true);
                Some((until(&mut self.rng, 100..3000), Mend::Disk))
            }
            // A run that does not raise its counter rightly loses its store.
            Kind::Stop if self.world.plan.second_coordinator && one == "coordinator" => None,
            Kind::Stop => {
                self.say(sim, format!("{one} is stopped"));
                self.world.pauses.of(&one).stop();
                Some((until(&mut self.rng, 50..7000), Mend::GoOn(one)))
            }
            Kind::Drain => {
                self.say(sim, format!("{one} is told to stop"));
                self.world.drains.stop(&one);
                Some((now + TIME_TO_STOP, Mend::EndAtOnce(one)))
            }
            _ if one == other => None,
            Kind::Parted => {
                self.say(sim, format!("{one} and {other} are parted"));
                sim.partition(one.as_str(), other.as_str());
                Some((until(&mut self.rng, 100..6000), Mend::Repair(one, other)))
            }
            Kind::OneWay => {
                self.say(sim, format!("{other} does not hear {one}"));
                sim.partition_oneway(one.as_str(), other.as_str());
                Some((until(&mut self.rng, 100..6000), Mend::Repair(one, other)))
            }
            Kind::PartedForLong => {
                self.say(sim, format!("{one} and {other} are parted for long"));
                sim.partition(one.as_str(), other.as_str());
                Some((until(&mut self.rng, 3000..15_000), Mend::Repair(one, other)))
            }
            Kind::OneWayForLong => {
                self.say(sim, format!("{other} does not hear {one} for long"));
                sim.partition_oneway(one.as_str(), other.as_str());
                Some((until(&mut self.rng, 3000..15_000), Mend::Repair(one, other)))
            }
            Kind::Late => {
                self.say(
                    sim,
                    format!("what {one} and {other} say to each other is late"),
                );
                sim.hold(one.as_str(), other.as_str());
                Some((until(&mut self.rng, 100..4000), Mend::Release(one, other)))
            }
        }
    }

    /// Begins a fault of the store for `host`, if it may have one now. Returns whether it does.
    fn spoil(&self, sim: &Sim<'_>, host: &str, mood: Mood) -> bool {
        let history = &self.world.history;
        // A run that the store refuses at its start ends.
        let starts = self.world.plan.loses_state || !history.has_checkpoint();
        if mood == Mood::Refuses && starts {
            return false;
        }
        // A run that does not raise its counter rightly loses its store.
        if self.world.plan.second_coordinator && host == "coordinator" {
            return false;
        }
        self.say(sim, format!("the store {mood:?} for {host}"));
        self.world.stores.spoil(host, mood);
        true
    }

    fn mend_what_is_due(&mut self, sim: &mut Sim<'_>) {
        let now = sim.elapsed();
        let all = std::mem::take(&mut self.to_mend);
        let (due, later): (Vec<_>, Vec<_>) = all.into_iter().partition(|(at, _)| *at <= now);
        self.to_mend = later;
        for (_, mend) in due {
            self.say(sim, format!("mended: {mend:?}"));
            match mend {
                Mend::Start(name) => {
                    self.down.remove(&name);
                    sim.bounce(name.as_str());
                }
                Mend::Repair(one, other) => sim.repair(one.as_str(), other.as_str()),
                Mend::Release(one, other) => sim.release(one.as_str(), other.as_str()),
                Mend::Store(host) => self.world.stores.mend(&host, now),
                Mend::Disk => self.world.disk.set_failing(false),
                Mend::EndAtOnce(name) => {
                    let runs = !self.down.contains(&name) && !self.world.history.has_ended(&name);
                    if runs && self.world.drains.is_stopping(&name) {
                        self.kill(sim, &name);
                        self.to_mend.push((now + START_AGAIN, Mend::Start(name)));
                    }
                }
                Mend::GoOn(name) => self.world.pauses.of(&name).go_on(),
            }
        }
    }
}
