//! How the replicas of a process add up numbers.

use collective::{Group, MemoryLinks};
use pollster::block_on;
use shared_proto::payload::Dtype;

use super::error::LoopError;

/// What replicas do together. The vectors with which they agree have different lengths, so none is taken for another.
#[derive(Clone, Copy)]
enum Act {
    End,
    Sum,
    Minimize,
}

/// A replica's place among the others. If it is dropped, the others fail when they meet it.
pub(super) struct Meeting {
    group: Group<MemoryLinks>,
}

impl Meeting {
    /// Returns the place of each of so many replicas.
    pub(super) fn among(replicas: usize) -> Vec<Self> {
        let links = MemoryLinks::among(replicas).into_iter().enumerate();
        let place = |(rank, links)| Self {
            group: Group::new(rank, replicas, links, Dtype::F32),
        };
        links.map(place).collect()
    }

    /// Returns whether there is no other replica.
    pub(super) fn is_alone(&self) -> bool {
        self.group.ranks() == 1
    }

    /// Agrees with the others on an act with these numbers, and returns their sums.
    fn agree(&self, act: Act, numbers: &[f64]) -> Result<Vec<f64>, LoopError> {
        let own = [f64::from(act as u8)];
        let all: Vec<f64> = own.iter().chain(numbers).copied().collect();
        if self.is_alone() {
            return Ok(numbers.to_vec());
        }
        let sum = block_on(self.group.sum_short(all))?;
        match sum.split_first() {
            Some((acts, numbers)) if *acts == own[0] * self.group.ranks() as f64 => {
                Ok(numbers.to_vec())
            }
            _ => Err(LoopError::OutOfStep),
        }
    }

    /// Ends a step.
    pub(super) fn end(&self) -> Result<(), LoopError> {
        self.agree(Act::End, &[]).map(drop)
    }

    /// Returns the sums of the replicas' numbers.
    pub(super) fn sum(&self, numbers: &[f64]) -> Result<Vec<f64>, LoopError> {
        self.agree(Act::Sum, numbers)
    }

    /// Agrees on an update of so many elements by an optimizer. Returns the number of samples of all, and of replicas with a gradient
    /// that is not finite.
    pub(super) fn agree_on_update(
        &self,
        optimizer: usize,
        elements: usize,
        samples: usize,
        finite: bool,
    ) -> Result<(f64, f64), LoopError> {
        let own = [optimizer as f64, elements as f64];
        let [samples, failed] = [samples as f64, f64::from(u8::from(!finite))];
        let sums = self.agree(Act::Minimize, &[own[0], own[1], samples, failed])?;
        let ranks = self.group.ranks() as f64;
        match sums[..] {
            [optimizers, elements, samples, failed]
                if optimizers == own[0] * ranks && elements == own[1] * ranks =>
            {
                Ok((samples, failed))
            }
            _ => Err(LoopError::OutOfStep),
        }
    }

    /// Makes each element the sum of all replicas' elements at its place, with the same bits on each one.
    pub(super) fn add_up(&self, values: &mut [f32]) -> Result<(), LoopError> {
        match self.is_alone() {
            true => Ok(()),
            false => Ok(block_on(self.group.all_reduce(values))?),
        }
    }
}
