//! Any events, in any order.

use proptest::prelude::*;

use super::*;

/// What happens to a cluster.
#[derive(Clone, Debug)]
enum Event {
    Step(Vec<bool>, bool),
    Stage(Vec<bool>),
    Kill(usize),
    Start,
    /// A server dies and comes back, with or without a step in between.
    Server(usize),
    KillAll(usize),
    Write,
    Resume,
}

fn event() -> impl Strategy<Value = Event> {
    let some = || prop::collection::vec(any::<bool>(), 4);
    prop_oneof![
        6 => (some(), any::<bool>()).prop_map(|(which, reports)| Event::Step(which, reports)),
        4 => Just(Event::Step(vec![true; 4], true)),
        2 => some().prop_map(Event::Stage),
        2 => (0usize..4).prop_map(Event::Kill),
        1 => Just(Event::Start),
        1 => (0..SERVERS).prop_map(Event::Server),
        1 => (1usize..4).prop_map(Event::KillAll),
        3 => Just(Event::Write),
        1 => Just(Event::Resume),
    ]
}

proptest! {
    #[test]
    fn each_sample_counts_once_in_values_and_rows(events in prop::collection::vec(event(), 0..40)) {
        let mut hybrid = Hybrid::new(3);
        for event in events {
            if hybrid.scene.cluster.ended() {
                return Ok(());
            }
            hybrid.happens(event);
        }
        if !hybrid.scene.cluster.ended() {
            hybrid.join_all();
            hybrid.finish();
        }
    }
}

impl Hybrid {
    fn happens(&mut self, event: Event) {
        let workers = self.workers.len();
        match event {
            Event::Step(which, reports) => {
                // The sum of a step that some lack is lost with the others only if they die.
                let clocks: Vec<Clock> = self.workers.iter().map(|worker| worker.clock).collect();
                if clocks.windows(2).all(|pair| pair[0] == pair[1]) {
                    self.step(&which, reports);
                } else {
                    self.join_all();
                }
            }
            Event::Stage(which) => drop(self.stage(&which)),
            Event::Kill(worker) if workers > 1 => {
                self.kill(worker % workers);
                self.join_all();
            }
            Event::Start if workers < 4 => {
                self.start();
                self.join_all();
            }
            Event::Server(server) => {
                self.kill_server(server);
                self.stage(&[true]);
                self.start_server(server);
                self.join_all();
            }
            Event::KillAll(others) => {
                while !self.workers.is_empty() {
                    self.kill(0);
                }
                for _ in 0..others {
                    self.start();
                }
                self.join_all();
            }
            Event::Write => drop(self.write()),
            Event::Resume => self.resume(),
            Event::Kill(_) | Event::Start => {}
        }
    }
}
