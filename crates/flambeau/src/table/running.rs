//! The servers of a running cluster that answer lookups.

use std::time::Duration;

use clap::Args;
use daemon::membership::Coordinator;
use daemon::settings::SecuritySettings;
use network::security::Security;
use ps_client::lookup::Lookup;

use crate::error::CommandError;
use crate::status;

/// The longest time for which the coordinator or a server may not answer.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Args)]
pub(super) struct Running {
    /// The coordinator, as host:port. It has the addresses at which servers answer lookups.
    #[arg(long, env = "FLAMBEAU_COORDINATOR", default_value = "127.0.0.1:7070")]
    coordinator: String,
    /// The addresses at which servers answer lookups, instead of the coordinator's.
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,...")]
    servers: Vec<String>,
    /// One JSON object instead of a table.
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    security: SecuritySettings,
}

impl Running {
    /// Connects to the servers.
    pub(super) async fn lookup(&self) -> Result<Lookup, CommandError> {
        let security = self.security.load()?;
        let servers = match self.servers.is_empty() {
            true => servers(&self.coordinator, &security).await?,
            false => self.servers.clone(),
        };
        Ok(Lookup::new(&servers, &security, PATIENCE)?)
    }
}

/// Returns the addresses at which the servers of a coordinator's job answer lookups.
async fn servers(coordinator: &str, security: &Security) -> Result<Vec<String>, CommandError> {
    let at = Coordinator::at(coordinator, PATIENCE, security.clone())?;
    let status = status::fetch(&at).await?;
    let reports = status.shards.into_iter().filter_map(|shard| shard.report);
    let addresses = reports.map(|report| report.lookup_address);
    let addresses: Vec<String> = addresses.filter(|address| !address.is_empty()).collect();
    match addresses.is_empty() {
        true => Err(CommandError::NoLookups {
            coordinator: coordinator.to_owned(),
        }),
        false => Ok(addresses),
    }
}
