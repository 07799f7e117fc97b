//! A strategy decides where variables live and how gradients become updates. The training step and the trainer
//! know only its interface.
//!
//! - `interface`: the trait, and the types that steps and strategies exchange
//! - `error`: its errors, by what the worker does next
//! - `stores`: the stores of checkpoints
//! - `register`: the registration of variables, which every strategy needs
//! - `waits`: reports of the tasks that a worker waits for
//! - `parameter_server`: variables on sharded parameter servers
//! - `mirrored`: all variables on each worker; the workers add up their gradients
//! - `hybrid`: dense variables as in `mirrored`, tables as in `parameter_server`

mod error;
mod hybrid;
mod interface;
mod mirrored;
mod parameter_server;
mod register;
mod stores;
mod waits;

pub use error::StrategyError;
pub use hybrid::Hybrid;
pub use interface::{Evaluated, Joining, Pulled, Pushed, Pushing, Reconciled, Strategy};
pub use mirrored::Mirrored;
pub use parameter_server::ParameterServer;
pub use register::{Registered, register};
pub use stores::{Opener, Stores};

use shared_proto::job::StrategyName;

use replica::Replica;

/// Joins the cluster by the strategy that the job names.
///
/// # Errors
/// The strategy's.
pub async fn join(
    joining: &Joining<'_>,
    replica: &dyn Replica,
) -> Result<Box<dyn Strategy>, StrategyError> {
    match joining.job.strategy.name {
        StrategyName::ParameterServer => {
            let strategy = ParameterServer::join(joining, replica).await?;
            Ok(Box::new(strategy))
        }
        StrategyName::Hybrid => Ok(Box::new(Hybrid::join(joining, replica).await?)),
        StrategyName::Mirrored
        | StrategyName::CentralStorage
        | StrategyName::MultiWorkerMirrored
        | StrategyName::OneDevice
        | StrategyName::ModelParallel => Ok(Box::new(Mirrored::join(joining, replica).await?)),
    }
}
