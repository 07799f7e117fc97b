//! The thread of a device: it makes the passes of the device's stages, one after the other.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use candle_core::{Device, Error};
use model::Batch;

use super::schedule::{Direction, Operation};
use super::stage::{Running, StageResult, StepOf};
use super::ways::{Inlet, Parcel};
use crate::error::panic_message;

/// A device within a step.
pub(super) struct Lane<'a> {
    step: &'a StepOf<'a>,
    device: &'a Device,
    stages: Vec<Running<'a>>,
    /// True once a stage of any device has failed.
    failed: &'a AtomicBool,
}

/// The results of a device in a step.
pub(super) struct Done {
    pub(super) begun: Option<Instant>,
    pub(super) ended: Option<Instant>,
    /// The time in which the device computed.
    pub(super) busy: Duration,
    pub(super) stages: Vec<StageResult>,
}

/// The reason why a device did not complete its step.
pub(super) enum Failure {
    /// A stage has failed.
    Computing { stage: usize, source: Error },
    /// A stage has panicked.
    Panicked { stage: usize, said: String },
    /// The thread could not be started.
    Thread(io::Error),
    /// Another device has failed, or a neighbour is gone.
    Gone,
}

impl<'a> Lane<'a> {
    pub(super) fn new(step: &'a StepOf<'a>, device: &'a Device, failed: &'a AtomicBool) -> Self {
        Self {
            step,
            device,
            stages: Vec::new(),
            failed,
        }
    }

    pub(super) fn add(&mut self, stage: Running<'a>) {
        self.stages.push(stage);
    }

    /// Makes the operations in order. If one fails, the channels of this lane close, and then all other lanes end too.
    pub(super) fn run(mut self, operations: &[Operation]) -> Result<Done, Failure> {
        let mut done = Done {
            begun: None,
            ended: None,
            busy: Duration::ZERO,
            stages: Vec::new(),
        };
        let first = operations.first().map_or(0, |operation| operation.stage);
        let made = catch_unwind(AssertUnwindSafe(|| self.micro_batches()));
        let batches = self.outcome(first, made)?;
        for operation in operations {
            if self.failed.load(Ordering::Relaxed) {
                return Err(Failure::Gone);
            }
            self.make(*operation, &batches, &mut done)?;
        }
        done.stages = self.stages.into_iter().map(Running::result).collect();
        Ok(done)
    }

    /// Returns the step's micro-batches on this device.
    fn micro_batches(&self) -> candle_core::Result<Vec<Batch>> {
        let batches = self.step.batches.iter();
        // Copied whole: candle copies all of a tensor's memory, also for a part of it.
        let batches = batches.map(|batch| batch.to_device(self.device));
        let batches = batches.collect::<candle_core::Result<Vec<_>>>()?;
        let micro_batches = self.step.micro_batches.iter();
        let part = micro_batches.map(|part| batches[part.batch].part(part.samples.clone()));
        part.collect()
    }

    /// Makes an operation: receives its input from a neighbour, computes, and sends the result to the other neighbour.
    fn make(
        &mut self,
        operation: Operation,
        batches: &[Batch],
        done: &mut Done,
    ) -> Result<(), Failure> {
        let (stage, number) = (operation.stage, operation.micro_batch);
        let numbers: Vec<usize> = self.stages.iter().map(|own| own.stage.number()).collect();
        let place = numbers.iter().position(|own| *own == stage);
        let place = place.ok_or(Failure::Gone)?;
        let (before_is_own, next_is_own) = (place > 0, place + 1 < numbers.len());
        let (running, step) = (&mut self.stages[place], self.step);
        let sent = match operation.direction {
            Direction::Forward => {
                let inputs = receive(running.ways.from_before.as_mut(), before_is_own)?;
                let batch = (number, &batches[number]);
                let outputs = done.computing(|| running.forward(inputs, batch, step));
                let outputs = self.outcome(stage, outputs)?;
                let next = self.stages[place].ways.to_next.as_ref();
                let handed = outputs.zip(next);
                handed.map(|(outputs, next)| next.send(outputs))
            }
            Direction::Backward => {
                let gradient = receive(running.ways.from_next.as_mut(), next_is_own)?;
                let gradient = done.computing(|| running.backward(gradient, number));
                let gradient = self.outcome(stage, gradient)?;
                let before = self.stages[place].ways.to_before.as_ref();
                let handed = gradient.zip(before);
                handed.map(|(gradient, before)| before.send(gradient))
            }
        };
        match sent {
            Some(false) => Err(Failure::Gone),
            Some(true) | None => Ok(()),
        }
    }

    /// Returns the result of a stage's computation. If the stage has failed or panicked, makes the other lanes end.
    fn outcome<T>(
        &self,
        stage: usize,
        outcome: std::thread::Result<candle_core::Result<T>>,
    ) -> Result<T, Failure> {
        let failure = match outcome {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(source)) => Failure::Computing { stage, source },
            Err(panic) => Failure::Panicked {
                stage,
                said: panic_message(&*panic),
            },
        };
        self.failed.store(true, Ordering::Relaxed);
        Err(failure)
    }
}

impl Done {
    /// Calls `compute`, and measures the time. Catches a panic, so that the caller can name the stage.
    fn computing<T>(&mut self, compute: impl FnOnce() -> T) -> std::thread::Result<T> {
        let begun = Instant::now();
        let computed = catch_unwind(AssertUnwindSafe(compute));
        let ended = Instant::now();
        self.begun.get_or_insert(begun);
        self.ended = Some(ended);
        self.busy += ended - begun;
        computed
    }
}

/// Receives a value from a neighbour; `None` if there is no neighbour.
fn receive<T>(way: Option<&mut Inlet<T>>, is_in_lane: bool) -> Result<Option<Parcel<T>>, Failure> {
    let received = way.map(|way| way.receive(is_in_lane).ok_or(Failure::Gone));
    received.transpose()
}

/// Waits for a lane's end.
pub(super) fn end(
    thread: io::Result<ScopedJoinHandle<'_, Result<Done, Failure>>>,
) -> Result<Done, Failure> {
    // Panics of stages are caught within the lane.
    let ended = thread.map_err(Failure::Thread)?.join();
    ended.unwrap_or(Err(Failure::Gone))
}
