//! Any events, in any order.

use proptest::prelude::*;

use super::*;

/// What happens to a cluster.
#[derive(Clone, Debug)]
enum Event {
    /// Some of the workers make a step, and report it or not.
    Step(Vec<bool>, bool),
    Kill(usize),
    /// A worker is evicted, and keeps its values.
    Evict(usize),
    /// An evicted worker registers again.
    ComeBack,
    /// The next ring is formed, but only some of its members take the values before one dies.
    Half(Vec<bool>, usize),
    Start,
    /// The checkpoint that is being written becomes whole, or fails.
    Write(bool),
    /// All workers die, and so many others start. One may be evicted instead, and come back when they have formed a ring.
    KillAll(usize, bool),
    /// The coordinator starts again with what it has persisted.
    Resume,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (prop::collection::vec(any::<bool>(), 4), any::<bool>())
            .prop_map(|(which, report)| Event::Step(which, report)),
        4 => Just(Event::Step(vec![true; 4], true)),
        1 => (0usize..4).prop_map(Event::Kill),
        1 => (0usize..4).prop_map(Event::Evict),
        1 => Just(Event::ComeBack),
        1 => (prop::collection::vec(any::<bool>(), 4), 0usize..4)
            .prop_map(|(which, dies)| Event::Half(which, dies)),
        1 => Just(Event::Start),
        2 => any::<bool>().prop_map(Event::Write),
        1 => (1usize..4, any::<bool>())
            .prop_map(|(others, returns)| Event::KillAll(others, returns)),
        1 => Just(Event::Resume),
    ]
}

proptest! {
    /// After any deaths, joins and restarts, each sample is in the values once, and all workers have the same values.
    #[test]
    fn each_sample_counts_once(
        has_checkpoints in any::<bool>(),
        events in prop::collection::vec(event(), 0..40),
    ) {
        let mut rings = match has_checkpoints {
            true => Rings::with_checkpoints(3),
            false => Rings::new(3),
        };
        for event in events {
            rings.happens(event);
            if rings.scene.cluster.ended() {
                break;
            }
        }
        if !rings.scene.cluster.ended() {
            rings.join_all();
            rings.finish();
        }
    }
}

impl Rings {
    fn happens(&mut self, event: Event) {
        let workers = self.workers.len();
        match event {
            Event::Step(which, report) => {
                // None makes a second step before all have made the first: it lacks their gradients.
                let behind = self
                    .workers
                    .iter()
                    .map(|worker| worker.clock)
                    .min()
                    .unwrap();
                let able = self.all().into_iter();
                let able =
                    able.filter(|i| which[i % which.len()] && self.workers[*i].clock == behind);
                self.step(&able.collect::<Vec<_>>(), report);
            }
            Event::Kill(worker) if workers > 1 => {
                self.kill(worker % workers);
                self.join_all();
            }
            Event::Start if workers < 4 => {
                self.start();
                self.join_all();
            }
            Event::Resume => self.resume(),
            Event::Evict(worker) if workers > 1 => {
                self.evict(worker % workers);
                self.join_all();
            }
            Event::ComeBack if workers < 4 => {
                self.come_back();
                self.join_all();
            }
            Event::Half(which, dies) if workers > 1 => {
                let ring = self.form();
                let some = self.all().into_iter().filter(|i| which[i % which.len()]);
                self.take(&ring, &some.collect::<Vec<_>>());
                self.enter(&ring);
                self.kill(dies % workers);
                self.join_all();
            }
            Event::Write(succeeds) => drop(self.write(succeeds)),
            Event::KillAll(others, returns) if self.has_checkpoints => {
                if returns {
                    self.evict(0);
                }
                self.replace_all(others);
                if returns {
                    self.form();
                    self.come_back();
                }
                self.join_all();
            }
            Event::Kill(_)
            | Event::KillAll(..)
            | Event::Start
            | Event::Evict(_)
            | Event::ComeBack
            | Event::Half(..) => {}
        }
    }
}
