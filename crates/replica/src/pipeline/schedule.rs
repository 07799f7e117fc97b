//! The order in which stages compute micro-batches: policy, without threads and clocks.

use shared_proto::job::PipelineSchedule;

/// A pass of a stage for a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Operation {
    pub(super) stage: usize,
    pub(super) micro_batch: usize,
    pub(super) direction: Direction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Direction {
    Backward,
    Forward,
}

/// The operations of a step, in the order in which each device makes them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Timeline {
    pub(super) devices: Vec<Vec<Operation>>,
    /// The share of the devices' time in which they wait, if all stages take equally long.
    pub(super) ideal_bubble: f64,
}

/// The time of a forward and of a backward pass in a timeline, in arbitrary units. A backward pass has twice the work:
/// the gradients of inputs and of weights.
const FORWARD_TIME: u64 = 1;
const BACKWARD_TIME: u64 = 2;

/// Returns the operations of a stage in order. In both schedules, a stage makes the passes of each direction in the
/// order of the micro-batches. So both schedules add up gradients in the same order.
pub(super) fn order(
    schedule: PipelineSchedule,
    stage: usize,
    stages: usize,
    micro_batches: usize,
) -> Vec<Operation> {
    let forward_first = held(schedule, stage, stages, micro_batches);
    let operation = |direction| {
        move |micro_batch| Operation {
            stage,
            micro_batch,
            direction,
        }
    };
    let (forward, backward) = (
        operation(Direction::Forward),
        operation(Direction::Backward),
    );
    let mut operations: Vec<Operation> = (0..forward_first).map(forward).collect();
    for done in 0..micro_batches {
        operations.push(backward(done));
        let next = forward_first + done;
        if next < micro_batches {
            operations.push(forward(next));
        }
    }
    operations
}

/// Returns the largest number of micro-batches whose activations a stage holds at the same time.
///
/// - GPipe (Huang et al., "GPipe", NeurIPS 2019, section 2.2): all of them.
/// - 1F1B (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
///   2021, section 2.2.1, "PipeDream-Flush"): at most the number of stages from this one to the last.
pub(super) fn held(
    schedule: PipelineSchedule,
    stage: usize,
    stages: usize,
    micro_batches: usize,
) -> usize {
    match schedule {
        PipelineSchedule::GPipe => micro_batches,
        PipelineSchedule::OneForwardOneBackward => micro_batches.min(stages - stage),
    }
}

/// Simulates a step. `device_of` has the device of each stage. A device with several stages next makes the operation
/// that can begin first. Of operations that can begin at the same time, it prefers a backward pass, and then the
/// micro-batch that has come furthest.
pub(super) fn timeline(
    schedule: PipelineSchedule,
    device_of: &[usize],
    micro_batches: usize,
) -> Timeline {
    let stages = device_of.len();
    let device_count = device_of.iter().max().map_or(0, |last| last + 1);
    let orders: Vec<Vec<Operation>> = (0..stages)
        .map(|stage| order(schedule, stage, stages, micro_batches))
        .collect();
    let mut made = Made::new(stages);
    let mut devices = vec![Vec::new(); device_count];
    let mut free_at = vec![0; device_count];
    for _ in 0..2 * stages * micro_batches {
        let begin = |stage: usize| {
            let next = *orders[stage].get(made.count[stage])?;
            let begin = made.inputs_at(next)?.max(free_at[device_of[stage]]);
            let rest = match next.direction {
                Direction::Backward => stage,
                Direction::Forward => stages - stage,
            };
            Some((begin, next.direction, rest, next))
        };
        let first = (0..stages).filter_map(begin);
        let Some((begin, .., next)) =
            first.min_by_key(|(begin, direction, rest, _)| (*begin, *direction, *rest))
        else {
            // Each order has the passes of a stage in the order of its inputs, so one of the stages can go on.
            break;
        };
        let end = begin + time(next.direction);
        made.note(next, end);
        free_at[device_of[next.stage]] = end;
        devices[device_of[next.stage]].push(next);
    }
    let span = free_at.iter().max().copied().unwrap_or(0) * device_count as u64;
    let busy = devices
        .iter()
        .flatten()
        .map(|made: &Operation| time(made.direction));
    Timeline {
        ideal_bubble: match span {
            0 => 0.0,
            span => 1.0 - busy.sum::<u64>() as f64 / span as f64,
        },
        devices,
    }
}

fn time(direction: Direction) -> u64 {
    match direction {
        Direction::Forward => FORWARD_TIME,
        Direction::Backward => BACKWARD_TIME,
    }
}

/// The operations that stages have made, and when each ended.
struct Made {
    /// The number of operations that each stage has made.
    count: Vec<usize>,
    /// The end times of the forward and of the backward passes of each stage.
    forward: Vec<Vec<u64>>,
    backward: Vec<Vec<u64>>,
}

impl Made {
    fn new(stages: usize) -> Self {
        Self {
            count: vec![0; stages],
            forward: vec![Vec::new(); stages],
            backward: vec![Vec::new(); stages],
        }
    }

    /// Returns the time at which the inputs of an operation are available; `None` if they are not computed yet.
    fn inputs_at(&self, operation: Operation) -> Option<u64> {
        let Operation {
            stage, micro_batch, ..
        } = operation;
        let last = stage + 1 == self.count.len();
        let (ends, stage) = match operation.direction {
            Direction::Forward if stage == 0 => return Some(0),
            Direction::Forward => (&self.forward, stage - 1),
            Direction::Backward if last => (&self.forward, stage),
            Direction::Backward => (&self.backward, stage + 1),
        };
        ends[stage].get(micro_batch).copied()
    }

    fn note(&mut self, operation: Operation, end: u64) {
        let ends = match operation.direction {
            Direction::Forward => &mut self.forward,
            Direction::Backward => &mut self.backward,
        };
        ends[operation.stage].push(end);
        self.count[operation.stage] += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use PipelineSchedule::{GPipe, OneForwardOneBackward};

    /// Writes operations as in "F0 F1 B0 B1": the direction and the micro-batch.
    fn written(operations: &[Operation]) -> String {
        let word = |operation: &Operation| {
            let direction = match operation.direction {
                Direction::Forward => "F",
                Direction::Backward => "B",
            };
            format!("{direction}{}", operation.micro_batch)
        };
        operations.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    /// Returns the device of each stage.
    fn spread(stages: usize, devices: usize) -> Vec<usize> {
        (0..stages).map(|stage| stage * devices / stages).collect()
    }

    #[test]
    fn the_orders_are_those_of_the_papers() {
        let of = |schedule, stage| written(&order(schedule, stage, 3, 4));
        assert_eq!(of(GPipe, 1), "F0 F1 F2 F3 B0 B1 B2 B3");
        assert_eq!(of(OneForwardOneBackward, 0), "F0 F1 F2 B0 F3 B1 B2 B3");
        assert_eq!(of(OneForwardOneBackward, 1), "F0 F1 B0 F2 B1 F3 B2 B3");
        assert_eq!(of(OneForwardOneBackward, 2), "F0 B0 F1 B1 F2 B2 F3 B3");
    }

    #[test]
    fn the_bubble_of_equal_stages_is_that_of_the_formula() {
        for schedule in [GPipe, OneForwardOneBackward] {
            for stages in 1..=8usize {
                for micro_batches in 1..=24usize {
                    let timeline = timeline(schedule, &spread(stages, stages), micro_batches);
                    let waits = (stages - 1) as f64;
                    let formula = waits / (micro_batches as f64 + waits);
                    let bubble = timeline.ideal_bubble;
                    assert!(
                        (bubble - formula).abs() < 1e-12,
                        "{schedule:?} {stages} {micro_batches}: {bubble} {formula}"
                    );
                }
            }
        }
    }

    /// Devices that play their operations.
    struct Playing<'a> {
        capacity: &'a dyn Fn(usize) -> usize,
        /// The micro-batches on their way to each stage.
        activations: Vec<VecDeque<usize>>,
        gradients: Vec<VecDeque<usize>>,
        held: Vec<VecDeque<usize>>,
        /// The most micro-batches that each stage has held.
        most: Vec<usize>,
    }

    impl Playing<'_> {
        /// Makes a pass. Returns false if its inputs are not there.
        fn make(&mut self, operation: &Operation) -> bool {
            let (stage, stages) = (operation.stage, self.held.len());
            let micro_batch = operation.micro_batch;
            let (queue, first) = match operation.direction {
                Direction::Forward => (&mut self.activations[stage], stage == 0),
                Direction::Backward => (&mut self.gradients[stage], stage + 1 == stages),
            };
            if !first {
                match queue.pop_front() {
                    None => return false,
                    Some(came) => assert_eq!(came, micro_batch, "another micro-batch is there"),
                }
            }
            let held = &mut self.held[stage];
            let sent = match operation.direction {
                Direction::Forward => {
                    held.push_back(micro_batch);
                    self.most[stage] = self.most[stage].max(held.len());
                    self.activations
                        .get_mut(stage + 1)
                        .map(|queue| (queue, stage))
                }
                Direction::Backward => {
                    assert_eq!(
                        held.pop_front(),
                        Some(micro_batch),
                        "forward before backward"
                    );
                    let before = stage.checked_sub(1);
                    before.map(|before| (&mut self.gradients[before], before))
                }
            };
            if let Some((queue, sender)) = sent {
                queue.push_back(micro_batch);
                assert!(
                    queue.len() <= (self.capacity)(sender),
                    "a sender would wait"
                );
            }
            true
        }
    }

    /// Plays the devices' operations with queues of this capacity for each stage, in a given order of turns. Returns the most
    /// activations that each stage has held.
    fn play(
        timeline: &Timeline,
        stages: usize,
        capacity: &dyn Fn(usize) -> usize,
        turns: &[usize],
    ) -> Vec<usize> {
        let queues = || vec![VecDeque::new(); stages];
        let mut playing = Playing {
            capacity,
            activations: queues(),
            gradients: queues(),
            held: queues(),
            most: vec![0; stages],
        };
        let mut next = vec![0; timeline.devices.len()];
        let total: usize = timeline.devices.iter().map(Vec::len).sum();
        while next.iter().sum::<usize>() < total {
            let before = next.clone();
            // In each round each device has a turn, and some have more.
            for device in turns.iter().copied().chain(0..next.len()) {
                let device = device % next.len();
                if let Some(operation) = timeline.devices[device].get(next[device])
                    && playing.make(operation)
                {
                    next[device] += 1;
                }
            }
            assert_ne!(next, before, "all devices wait");
        }
        playing.most
    }

    proptest! {
        #[test]
        fn no_device_waits_for_ever_and_stages_hold_what_they_may(
            stages in 1usize..10, devices in 1usize..10, micro_batches in 1usize..24,
            gpipe: bool, turns in proptest::collection::vec(0usize..10, 1..50),
        ) {
            let devices = devices.min(stages);
            let schedule = if gpipe { GPipe } else { OneForwardOneBackward };
            let timeline = timeline(schedule, &spread(stages, devices), micro_batches);
            let mut all: Vec<Operation> = timeline.devices.iter().flatten().copied().collect();
            prop_assert_eq!(all.len(), 2 * stages * micro_batches);
            all.sort_by_key(|o| (o.stage, o.micro_batch, o.direction));
            all.dedup();
            prop_assert_eq!(all.len(), 2 * stages * micro_batches, "each pass is made once");
            for (device, operations) in timeline.devices.iter().enumerate() {
                for stage in 0..stages {
                    let own: Vec<_> = operations.iter().filter(|o| o.stage == stage).copied().collect();
                    let expected = match spread(stages, devices)[stage] == device {
                        true => order(schedule, stage, stages, micro_batches),
                        false => Vec::new(),
                    };
                    prop_assert_eq!(own, expected);
                }
            }
            let capacity = |stage| held(schedule, stage, stages, micro_batches);
            let most = play(&timeline, stages, &capacity, &turns);
            for (stage, most) in most.into_iter().enumerate() {
                let expected = if gpipe { micro_batches } else { micro_batches.min(stages - stage) };
                prop_assert_eq!(most, expected);
            }
        }
    }

    #[test]
    fn several_stages_on_a_device_wait_little_longer_than_one() {
        for (stages, devices) in [(4, 2), (8, 2), (8, 4), (12, 3)] {
            for micro_batches in 1..=24 {
                let waits = (devices - 1) as f64;
                let formula = waits / (micro_batches as f64 + waits);
                let bubble = |schedule| {
                    timeline(schedule, &spread(stages, devices), micro_batches).ideal_bubble
                };
                assert!((bubble(GPipe) - formula).abs() < 1e-12);
                // Stages that may hold few activations sometimes wait for each other.
                let most = 1.25 * formula + 1e-12;
                assert!(
                    bubble(OneForwardOneBackward) < most,
                    "{stages} {devices} {micro_batches}"
                );
            }
        }
    }
}
