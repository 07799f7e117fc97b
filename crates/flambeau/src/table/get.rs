//! `flambeau table NAME get`: rows by their ids, read from running servers.

use std::time::Duration;

use clap::Args;
use comfy_table::{Table, presets};
use daemon::membership::Coordinator;
use daemon::settings::SecuritySettings;
use ps_client::lookup::{FoundRows, Lookup};
use serde_json::json;
use shared_proto::security::Security;

use crate::error::CommandError;
use crate::status;

/// The time for which rows may be out of reach.
const PATIENCE: Duration = Duration::from_secs(5);

/// The values of a row that are shown in a table.
const SHOWN: usize = 8;

#[derive(Args)]
pub(super) struct Get {
    /// The ids.
    #[arg(required = true, value_name = "ID")]
    ids: Vec<u64>,
    /// The coordinator, as host:port. It knows where servers answer lookups.
    #[arg(long, env = "FLAMBEAU_COORDINATOR", default_value = "127.0.0.1:7070")]
    coordinator: String,
    /// The addresses at which servers answer lookups, instead of the coordinator's.
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,...")]
    servers: Vec<String>,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    security: SecuritySettings,
}

impl Get {
    pub(super) async fn run(&self, table: &str) -> Result<(), CommandError> {
        let security = self.security.load()?;
        let servers = match self.servers.is_empty() {
            true => servers(&self.coordinator, &security).await?,
            false => self.servers.clone(),
        };
        let mut lookup = Lookup::new(&servers, &security, PATIENCE)?;
        let found = lookup.rows(table, &self.ids).await?;
        if self.json {
            println!("{}", json(table, &self.ids, &found));
        } else {
            println!("{}", shown(&self.ids, &found).trim_fmt());
        }
        Ok(())
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

/// Returns the values of each row, with its id.
fn rows<'a>(ids: &'a [u64], found: &'a FoundRows) -> impl Iterator<Item = (u64, bool, &'a [f32])> {
    let dimension = found.values.len() / ids.len().max(1);
    let values = found.values.chunks(dimension.max(1));
    let rows = ids.iter().zip(&found.present).zip(values);
    rows.map(|((id, present), values)| (*id, *present, values))
}

fn json(table: &str, ids: &[u64], found: &FoundRows) -> serde_json::Value {
    let row = |(id, present, values)| json!({ "id": id, "present": present, "values": values });
    json!({ "table": table, "rows": rows(ids, found).map(row).collect::<Vec<_>>() })
}

fn shown(ids: &[u64], found: &FoundRows) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_header(["id", "row", "norm", "values"]);
    for (id, present, values) in rows(ids, found) {
        let norm = values.iter().map(|value| f64::from(*value).powi(2));
        let first = values.iter().take(SHOWN);
        let first: Vec<String> = first.map(|value| format!("{value:.4}")).collect();
        let more = if values.len() > SHOWN { " ..." } else { "" };
        table.add_row([
            id.to_string(),
            if present { "yes" } else { "no" }.to_owned(),
            format!("{:.4}", norm.sum::<f64>().sqrt()),
            first.join(" ") + more,
        ]);
    }
    table
}
