//! Refuses stored state and progress that no coordinator can have written. If it were resumed, references between its
//! parts would lead nowhere.

use shared_proto::blocks::{ShardMap, VariableSpec};
use shared_proto::ids::TaskId;
use shared_proto::wire;

use super::checkpoints::{Checkpoints, SavedProgress, Start};
use super::durable::Durable;
use super::forgotten::Forgotten;
use super::ledger::Ledger;
use super::variables::Variables;

impl Durable {
    /// Checks that the parts fit together.
    ///
    /// # Errors
    /// Names the first part that does not fit.
    pub(crate) fn check(&self) -> Result<(), String> {
        let seconds = self.outcome.seconds;
        if !seconds.is_finite() || seconds < 0.0 {
            return Err(format!("it has trained for {seconds} seconds"));
        }
        self.forgotten.check(self.members.keys())?;
        let has_servers = self.run.has_servers();
        let variables = self.variables.as_ref();
        let shards = variables.map_or(Ok(0), |variables| variables.check(has_servers))?;
        self.ring.check()?;
        self.training
            .ledger
            .as_ref()
            .map_or(Ok(()), Ledger::check)?;
        self.checkpoints.check(shards)
    }
}

impl Forgotten {
    /// Checks that no index of a member can be assigned again.
    fn check<'a>(&self, mut members: impl Iterator<Item = &'a TaskId>) -> Result<(), String> {
        match members.find(|id| id.index >= self.next_index(id.role)) {
            Some(id) => Err(format!("the index of {id} is to be assigned again")),
            None => Ok(()),
        }
    }
}

impl Checkpoints {
    fn check(&self, shards: usize) -> Result<(), String> {
        if let Some(shard) = self.loading.keys().find(|shard| **shard >= shards) {
            return Err(format!("shard {shard} of {shards} loads its values"));
        }
        let newest = self.newest.as_ref().map(|newest| &newest.progress);
        newest.map_or(Ok(()), SavedProgress::check)?;
        self.start.as_ref().map_or(Ok(()), Start::check)
    }
}

impl Variables {
    /// Checks the model and the shard map. Returns the number of shards.
    fn check(&self, has_servers: bool) -> Result<usize, String> {
        for spec in &self.model.variables {
            let read = VariableSpec::read(&wire::Variable::from(spec));
            read.map_err(|refusal| refusal.message)?;
        }
        let Some(map) = &self.map else {
            return match self.initialized && has_servers {
                true => Err("the variables have values, but no shards".to_owned()),
                false => Ok(0),
            };
        };
        ShardMap::try_from(wire::ShardMap::from(map)).map_err(|refusal| refusal.message)?;
        if !map
            .variables
            .iter()
            .map(|placed| &placed.spec)
            .eq(&self.model.variables)
            || !map
                .tables
                .iter()
                .map(|placed| &placed.spec)
                .eq(&self.model.tables)
        {
            return Err("the shard map is of another model".to_owned());
        }
        Ok(map.shards.len())
    }
}

impl SavedProgress {
    /// Checks the data that is done and left.
    ///
    /// # Errors
    /// Describes the impossible value.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.ledger.check()
    }
}

impl Start {
    fn check(&self) -> Result<(), String> {
        match self.block_elements {
            0 => Err("the job begins with blocks of 0 elements".to_owned()),
            _ => Ok(()),
        }
    }
}
