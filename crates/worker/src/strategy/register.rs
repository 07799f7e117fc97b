//! Registration: the call by which workers agree on the variables, and on the worker that sends the initial values.

use daemon::membership::Membership;
use replica::Description;
use shared_proto::blocks::ShardMap;
use shared_proto::ids::ViewNumber;
use shared_proto::wire;

use super::error::StrategyError;

/// The coordinator's answer to a worker that has registered its variables.
#[derive(Clone, Debug)]
pub struct Registered {
    /// The shard map; `None` for a strategy without servers.
    pub map: Option<ShardMap>,
    /// The newest view that the coordinator has decided.
    pub view: ViewNumber,
    /// True if this worker sends the initial values.
    pub initialize: bool,
}

impl Registered {
    /// Returns the shard map.
    ///
    /// # Errors
    /// [`StrategyError::Answer`] if there is none.
    pub fn shard_map(self) -> Result<ShardMap, StrategyError> {
        let missing = "it has no shard map; is the coordinator of the same release?";
        self.map.ok_or_else(|| unusable(missing.to_owned()))
    }
}

fn unusable(problem: String) -> StrategyError {
    StrategyError::Answer {
        call: "RegisterVariables",
        problem,
    }
}

/// Registers the variables. If the strategy has a shard map, waits until there is one. Also waits until there are
/// initial values, unless this worker has to send them.
///
/// # Errors
/// The coordinator's, or [`StrategyError::Answer`] if its shard map cannot be read.
pub async fn register(
    membership: &Membership,
    description: &Description,
) -> Result<Registered, StrategyError> {
    let request = wire::RegisterVariablesRequest {
        origin: Some(membership.next_origin().into()),
        variables: description.variables.iter().map(Into::into).collect(),
        training_samples: description.training_samples,
        evaluation_samples: description.evaluation_samples,
        data_digest: description.data_digest.clone(),
        tables: description.tables.iter().map(Into::into).collect(),
    };
    let mut said = String::new();
    loop {
        let registered = membership.coordinator.register_variables(request.clone());
        let reply = registered.await?;
        let initialize = match reply.initialization() {
            wire::Initialization::Yours => true,
            wire::Initialization::Done => false,
            wire::Initialization::Pending | wire::Initialization::Unspecified => {
                if said != reply.waiting_for {
                    tracing::info!("waiting: {}", reply.waiting_for);
                    said = reply.waiting_for;
                }
                continue;
            }
        };
        let map = reply.shard_map.map(ShardMap::try_from).transpose();
        return Ok(Registered {
            map: map.map_err(|error| unusable(format!("the shard map cannot be read: {error}")))?,
            view: ViewNumber(reply.view),
            initialize,
        });
    }
}
