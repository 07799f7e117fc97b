//! Refuses stored state and progress that no coordinator can have written. In such state, references between parts may
//! lead nowhere.

use shared_proto::blocks::{PlacedVariable, ShardMap, VariableSpec};
use shared_proto::ids::TaskId;
use shared_proto::job::StrategyName;
use shared_proto::wire;

use super::checkpoints::{Checkpoints, SavedProgress, Start};
use super::durable::Durable;
use super::forgotten::Forgotten;
use super::ledger::Ledger;
use super::monitors::Monitors;
use super::variables::Variables;

impl Durable {
    /// Checks that the parts fit together.
    ///
    /// # Errors
    /// Names the first part that does not fit.
    pub fn check(&self) -> Result<(), String> {
        let seconds = self.outcome.seconds;
        if !seconds.is_finite() || seconds < 0.0 {
            return Err(format!("it has trained for {seconds} seconds"));
        }
        self.forgotten.check(self.members.keys())?;
        let strategy = self.run.strategy();
        let has_servers = strategy.is_some_and(StrategyName::has_servers);
        let has_ring = strategy.is_some_and(StrategyName::has_ring);
        let variables = self.variables.as_ref();
        let check = |variables: &Variables| variables.check(has_servers, has_ring);
        let shards = variables.map_or(Ok(0), check)?;
        self.ring.check()?;
        self.evaluations.monitors.check()?;
        self.training
            .ledger
            .as_ref()
            .map_or(Ok(()), Ledger::check)?;
        // A ring loads the part behind those of the servers.
        self.checkpoints.check(shards + usize::from(has_ring))
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
    /// Checks the checkpoints. `parts` is the number of parts that are loaded: one for each shard, and one for the ring
    /// of a job that has one.
    fn check(&self, parts: usize) -> Result<(), String> {
        if let Some(part) = self.loading.keys().find(|part| **part >= parts) {
            return Err(format!("shard {part} of {parts} loads its values"));
        }
        let newest = self.newest.as_ref().map(|newest| &newest.progress);
        newest.map_or(Ok(()), SavedProgress::check)?;
        self.start.as_ref().map_or(Ok(()), Start::check)
    }
}

impl Variables {
    /// Checks the model and the shard map. Returns the number of shards.
    fn check(&self, has_servers: bool, has_ring: bool) -> Result<usize, String> {
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
        // Workers of a ring hold the variables, and no server does.
        let is_misplaced = |placed: &PlacedVariable| match has_ring {
            true => !placed.shards.is_empty(),
            false => placed.shards.len() != placed.spec.blocks(map.block_elements),
        };
        if let Some(placed) = map.variables.iter().find(|placed| is_misplaced(placed)) {
            let blocks = placed.shards.len();
            return Err(format!("{} has {blocks} blocks on servers", placed.spec));
        }
        Ok(map.shards.len())
    }
}

impl SavedProgress {
    /// Checks the saved metrics, and the data that is done and left.
    ///
    /// # Errors
    /// Describes the impossible value.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.monitors.as_ref().map_or(Ok(()), Monitors::check)?;
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
