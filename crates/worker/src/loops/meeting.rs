//! How the replicas of a loop add up numbers.

use std::sync::Arc;

use collective::{Group, MemoryLinks};
use pollster::block_on;
use shared_proto::payload::Dtype;

use super::act::Act;
use super::error::LoopError;
use super::hosts::HostGroup;

/// The links of a replica to the others of its process. The first replica also exchanges sums with other processes. If the links are
/// dropped, the others of the process fail at their next call.
pub(super) struct Meeting {
    here: Group<MemoryLinks>,
    hosts: Option<Arc<HostGroup>>,
    /// The number of all replicas.
    replicas: usize,
    /// The index of the model in this process. It keeps processes that use several models in different orders from
    /// adding up numbers of different models.
    model: usize,
}

impl Meeting {
    /// Returns the meetings of this process's replicas, one for each.
    pub(super) fn among(replicas: usize, hosts: Option<&Arc<HostGroup>>) -> Vec<Self> {
        let links = MemoryLinks::among(replicas).into_iter().enumerate();
        let model = hosts.map_or(0, |hosts| hosts.next_model());
        let place = |(rank, links)| Self {
            here: Group::new(rank, replicas, links, Dtype::F32),
            hosts: hosts.cloned(),
            replicas: hosts.map_or(replicas, |hosts| hosts.replicas()),
            model,
        };
        links.map(place).collect()
    }

    /// Returns whether there is no other replica.
    pub(super) fn is_alone(&self) -> bool {
        self.replicas == 1
    }

    /// Makes a collective call with these numbers, and returns their sums over all replicas. Fails if a replica makes
    /// another call.
    fn agree(&self, act: Act, numbers: &[f64]) -> Result<Vec<f64>, LoopError> {
        if self.is_alone() {
            return Ok(numbers.to_vec());
        }
        let model = [self.model as f64];
        let own = act.with(&[&model, numbers].concat());
        let here = block_on(self.here.sum_short(own))?;
        // This process first: if its own replicas differ, the other processes are not at fault.
        let of_model = |sum: &[f64], members: usize| match act.of(sum, members)?.split_first() {
            Some((models, numbers)) if *models == model[0] * members as f64 => Ok(numbers.to_vec()),
            _ => Err(LoopError::OutOfStep),
        };
        let numbers = of_model(&here, self.here.ranks())?;
        let Some(hosts) = &self.hosts else {
            return Ok(numbers);
        };
        let everywhere = match self.here.rank() {
            0 => hosts.sum(here)?,
            _ => Vec::new(),
        };
        let everywhere = block_on(self.here.sum_short(everywhere))?;
        of_model(&everywhere, self.replicas).map_err(|_| LoopError::HostsOutOfStep)
    }

    /// Ends a step.
    pub(super) fn end(&self) -> Result<(), LoopError> {
        self.agree(Act::End, &[]).map(drop)
    }

    /// Returns the sums of the replicas' numbers.
    pub(super) fn sum(&self, numbers: &[f64]) -> Result<Vec<f64>, LoopError> {
        self.agree(Act::Sum, numbers)
    }

    /// Agrees with all replicas on an update of `elements` elements by an optimizer. Returns the number of samples of
    /// all replicas, and the number of replicas with a gradient that is not finite.
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
        let ranks = self.replicas as f64;
        match sums[..] {
            [optimizers, elements, samples, failed]
                if optimizers == own[0] * ranks && elements == own[1] * ranks =>
            {
                Ok((samples, failed))
            }
            _ => Err(LoopError::OutOfStep),
        }
    }

    /// Replaces each element with the sum of all replicas' elements at the same index, with the same bits on all
    /// replicas.
    pub(super) fn add_up(&self, values: &mut [f32]) -> Result<(), LoopError> {
        if self.is_alone() {
            return Ok(());
        }
        block_on(self.here.all_reduce(values))?;
        if let Some(hosts) = &self.hosts {
            if self.here.rank() == 0 {
                hosts.add_up(values)?;
            }
            block_on(self.here.broadcast(0, values))?;
        }
        Ok(())
    }
}
