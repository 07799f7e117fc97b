//! The history of a world of rings: what its processes and faults do, and what each replica holds. It checks the values after
//! each change of a replica, and compares them with those of the others.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};

use replica::{MirrorState, Positions, StepsMade};
use serde_json::Value;

use super::values::{SAMPLES, Shape, Values};

/// An event of a world.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A worker has computed the gradient of its samples of the step after this clock.
    Computed {
        #[allow(dead_code, reason = "for people, and for the hash")]
        worker: String,
        #[allow(dead_code, reason = "for people, and for the hash")]
        clock: u64,
        #[allow(dead_code, reason = "for people, and for the hash")]
        positions: Positions,
    },
    /// A replica's values have changed, or belong to another ring now.
    Holds {
        #[allow(dead_code, reason = "for people, and for the hash")]
        worker: String,
        #[allow(dead_code, reason = "for people, and for the hash")]
        how: &'static str,
        #[allow(dead_code, reason = "for people, and for the hash")]
        ring: u64,
        #[allow(dead_code, reason = "for people, and for the hash")]
        clock: u64,
        #[allow(dead_code, reason = "for people, and for the hash")]
        digest: u64,
    },
    /// A record of the coordinator.
    Recorded(#[allow(dead_code, reason = "for people, and for the hash")] Value),
    /// The coordinator's summary at the end.
    Summary { steps: u64, samples: u64 },
    /// A fault that the simulation has caused or mended.
    Fault(#[allow(dead_code, reason = "for people, and for the hash")] String),
    /// A process has ended by itself.
    Ended {
        name: String,
        outcome: Result<(), String>,
    },
    /// A process has ended because of the store, the disk or its operator, and is started again.
    Exited {
        #[allow(dead_code, reason = "for people, and for the hash")]
        name: String,
        #[allow(dead_code, reason = "for people, and for the hash")]
        why: String,
    },
    /// A promise is broken.
    Violation(String),
}

/// The values of a replica, and the steps that they have according to its worker.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) values: Values,
    pub(crate) made: Option<StepsMade>,
    /// True while its worker adds up a gradient with the others.
    adding: bool,
}

#[derive(Debug)]
struct Inner {
    /// The events, each with the simulated time in milliseconds.
    events: Vec<(u64, Event)>,
    shape: Shape,
    /// True if a step does not wait for the slowest worker, so some samples do not count.
    backups: bool,
    /// The replicas of the processes that live, or have ended well.
    held: BTreeMap<String, Held>,
    /// The digest of the values of each ring and clock, and the worker that has held them first.
    of_ring: BTreeMap<(u64, u64), (u64, String)>,
    /// The digests of all values that training has made, each with its clock.
    known: BTreeSet<(u64, u64)>,
    ended: BTreeSet<String>,
    exits: Vec<String>,
    has_begun: bool,
    has_checkpoint: bool,
}

/// The history, shared by all processes.
#[derive(Clone, Debug)]
pub(crate) struct History(Arc<Mutex<Inner>>);

impl History {
    pub(crate) fn new(shape: Shape, backups: bool) -> Self {
        let initial = Values::initial(shape).digest();
        Self(Arc::new(Mutex::new(Inner {
            events: Vec::new(),
            shape,
            backups,
            held: BTreeMap::new(),
            of_ring: BTreeMap::new(),
            known: [(0, initial)].into(),
            ended: BTreeSet::new(),
            exits: Vec::new(),
            has_begun: false,
            has_checkpoint: false,
        })))
    }

    pub(crate) fn shape(&self) -> Shape {
        self.0.lock().unwrap().shape
    }

    pub(crate) fn add(&self, event: Event) {
        let at = turmoil::sim_elapsed().unwrap_or_default().as_millis() as u64;
        self.add_at(at, event);
    }

    pub(crate) fn add_at(&self, at: u64, event: Event) {
        let mut inner = self.0.lock().unwrap();
        match &event {
            Event::Ended { name, .. } => drop(inner.ended.insert(name.clone())),
            Event::Recorded(record) if record["event"] == "began" => inner.has_begun = true,
            Event::Recorded(record) if record["event"] == "checkpoint" => {
                inner.has_checkpoint = true;
            }
            _ => {}
        }
        inner.events.push((at, event));
    }

    pub(crate) fn violation(&self, what: String) {
        self.add(Event::Violation(what));
    }

    /// Notes that a process has ended for a reason outside it.
    pub(crate) fn exited(&self, name: &str, why: String) {
        {
            let mut inner = self.0.lock().unwrap();
            inner.exits.push(name.to_owned());
            inner.held.remove(name);
        }
        let name = name.to_owned();
        self.add(Event::Exited { name, why });
    }

    /// Takes the names of the processes that are to be started again.
    pub(crate) fn take_exits(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().exits)
    }

    /// Returns whether a process has ended by itself.
    pub(crate) fn has_ended(&self, name: &str) -> bool {
        self.0.lock().unwrap().ended.contains(name)
    }

    /// Returns whether training has begun.
    pub(crate) fn has_begun(&self) -> bool {
        self.0.lock().unwrap().has_begun
    }

    /// Returns whether there is a checkpoint.
    pub(crate) fn has_checkpoint(&self) -> bool {
        self.0.lock().unwrap().has_checkpoint
    }

    /// Notes that a worker has started, with a replica of initial values.
    pub(crate) fn starts(&self, worker: &str) {
        let mut inner = self.0.lock().unwrap();
        let held = Held {
            values: Values::initial(inner.shape),
            made: None,
            adding: false,
        };
        inner.held.insert(worker.to_owned(), held);
    }

    /// Notes that a process was killed.
    pub(crate) fn dies(&self, name: &str) {
        self.0.lock().unwrap().held.remove(name);
    }

    /// Returns whether a worker adds up a gradient with the others at present.
    pub(crate) fn is_adding(&self, worker: &str) -> bool {
        let inner = self.0.lock().unwrap();
        inner.held.get(worker).is_some_and(|held| held.adding)
    }

    pub(crate) fn computed(&self, worker: &str, clock: u64, positions: Positions) {
        self.0.lock().unwrap().of(worker).adding = true;
        let worker = worker.to_owned();
        self.add(Event::Computed {
            worker,
            clock,
            positions,
        });
    }

    /// Notes that a worker has added up the mean gradient of a step, and updates its values.
    pub(crate) fn updated(&self, worker: &str, gradient: Vec<f32>, made: StepsMade) {
        let updated = {
            let mut inner = self.0.lock().unwrap();
            let held = inner.of(worker);
            (held.made, held.adding) = (Some(made), false);
            let updated = held.values.update(gradient, made.clock.0);
            let digest = held.values.digest();
            inner.known.insert((made.clock.0, digest));
            updated
        };
        if let Err(wrong) = updated {
            self.violation(format!("the gradient that {worker} has added up: {wrong}"));
        }
        self.holds(worker, "made a step", made);
    }

    /// Notes that the values of a worker belong to a ring that it has joined.
    pub(crate) fn noted(&self, worker: &str, made: StepsMade) {
        {
            let mut inner = self.0.lock().unwrap();
            let held = inner.of(worker);
            (held.made, held.adding) = (Some(made), false);
        }
        self.holds(worker, "keeps its values", made);
    }

    /// Notes that a worker has taken the values of another, or of a checkpoint.
    pub(crate) fn taken(&self, worker: &str, state: MirrorState, made: StepsMade) {
        let wrong = {
            let mut inner = self.0.lock().unwrap();
            let shape = inner.shape;
            match Values::of_state(shape, state) {
                Ok(values) => {
                    let known = inner.known.contains(&(made.clock.0, values.digest()));
                    let held = inner.of(worker);
                    *held = Held {
                        values,
                        made: Some(made),
                        adding: false,
                    };
                    (!known).then(|| "no training has made them".to_owned())
                }
                Err(wrong) => Some(wrong),
            }
        };
        if let Some(wrong) = wrong {
            let clock = made.clock;
            self.violation(format!(
                "the values of clock {clock} that {worker} has taken: {wrong}"
            ));
        }
        self.holds(worker, "took values", made);
    }

    /// Checks the values of a worker, and compares them with those that other members of its ring have at the same clock.
    fn holds(&self, worker: &str, how: &'static str, made: StepsMade) {
        let (ring, clock) = (made.ring.0, made.clock.0);
        let (digest, checked, others) = {
            let mut inner = self.0.lock().unwrap();
            let held = inner.of(worker);
            let (digest, checked) = (held.values.digest(), held.values.check(clock));
            let first = inner.of_ring.entry((ring, clock));
            let first = first.or_insert_with(|| (digest, worker.to_owned()));
            (digest, checked, first.clone())
        };
        self.add(Event::Holds {
            worker: worker.to_owned(),
            how,
            ring,
            clock,
            digest,
        });
        if let Err(wrong) = checked {
            self.violation(format!(
                "in ring {ring} {worker} holds values of which {wrong}"
            ));
        }
        if digest != others.0 {
            let other = others.1;
            self.violation(format!(
                "in ring {ring} {worker} holds other values of clock {clock} than {other}"
            ));
        }
    }

    /// Notes that a worker evaluates its values, and checks that they have whole epochs. In a world with a backup worker, each step
    /// counts the samples of one of two workers at least.
    pub(crate) fn evaluated(&self, worker: &str) {
        let (samples, whole): (Vec<f32>, _) = {
            let mut inner = self.0.lock().unwrap();
            let whole = if inner.backups { SAMPLES / 2 } else { SAMPLES };
            (inner.of(worker).values.samples().collect(), whole)
        };
        for (epoch, samples) in samples.chunks(SAMPLES).enumerate() {
            let counted = samples.iter().filter(|times| **times > 0.0).count();
            if counted != 0 && counted < whole {
                self.violation(format!(
                    "{worker} evaluates values that have {counted} of {SAMPLES} samples of epoch {epoch}"
                ));
            }
        }
    }

    pub(crate) fn state(&self, worker: &str) -> MirrorState {
        self.0.lock().unwrap().of(worker).values.to_state()
    }

    pub(crate) fn values(&self, worker: &str) -> Values {
        self.0.lock().unwrap().of(worker).values.clone()
    }

    pub(crate) fn made(&self, worker: &str) -> Option<StepsMade> {
        self.0.lock().unwrap().of(worker).made
    }

    /// Returns the events, each with the simulated time in milliseconds.
    pub(crate) fn events(&self) -> Vec<(u64, Event)> {
        self.0.lock().unwrap().events.clone()
    }

    /// Returns what the replicas of the workers hold that live at the end.
    pub(crate) fn held(&self) -> BTreeMap<String, Held> {
        self.0.lock().unwrap().held.clone()
    }

    /// Returns the newest ring in which a worker has had values.
    pub(crate) fn newest_ring(&self) -> u64 {
        let inner = self.0.lock().unwrap();
        let newest = inner.of_ring.last_key_value();
        newest.map_or(0, |((ring, _), _)| *ring)
    }

    /// Returns a hash of the history. Equal histories have equal hashes.
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for event in &self.0.lock().unwrap().events {
            format!("{event:?}").hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Describes the last events for people.
    pub(crate) fn tail(&self, count: usize) -> String {
        let inner = self.0.lock().unwrap();
        let from = inner.events.len().saturating_sub(count);
        let line = |(at, event): &(u64, Event)| format!("{at} ms: {event:?}\n");
        inner.events[from..].iter().map(line).collect()
    }
}

impl Inner {
    /// Returns what a worker that lives holds.
    fn of(&mut self, worker: &str) -> &mut Held {
        let shape = self.shape;
        let initial = || Held {
            values: Values::initial(shape),
            made: None,
            adding: false,
        };
        self.held.entry(worker.to_owned()).or_insert_with(initial)
    }
}
