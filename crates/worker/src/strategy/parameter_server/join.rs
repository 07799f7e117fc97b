//! The calls to the coordinator by which workers agree on the variables and their initial values.

use daemon::membership::Membership;
use shared_proto::blocks::ShardMap;
use shared_proto::ids::ViewNumber;
use shared_proto::wire;

use crate::replica::Description;
use crate::strategy::error::StrategyError;

/// The coordinator's answer to a worker that has registered its variables.
#[derive(Clone, Debug)]
pub struct Registered {
    /// The shard map.
    pub map: ShardMap,
    /// The newest view that the coordinator has decided.
    pub view: ViewNumber,
    /// True if this worker sends the initial values.
    pub initialize: bool,
}

/// Registers the variables. Waits until there is a shard map and, unless this worker is to send them, initial
/// values.
///
/// # Errors
/// The coordinator's.
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
    };
    let unusable = |problem: String| StrategyError::Answer {
        call: "RegisterVariables",
        problem,
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
        let map = reply.shard_map.ok_or_else(|| {
            unusable("it has no shard map; is the coordinator of the same release?".to_owned())
        })?;
        return Ok(Registered {
            map: map
                .try_into()
                .map_err(|error| unusable(format!("the shard map cannot be read: {error}")))?,
            view: ViewNumber(reply.view),
            initialize,
        });
    }
}
