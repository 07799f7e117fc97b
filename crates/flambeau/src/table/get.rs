//! `flambeau table NAME get`: rows by their ids, read from running servers.

use clap::Args;
use comfy_table::{Table, presets};
use daemon::outln;
use ps_client::lookup::FoundRows;
use serde_json::json;

use super::running::Running;
use crate::error::CommandError;

/// The number of values of a row that a table shows.
const SHOWN: usize = 8;

#[derive(Args)]
pub(super) struct Get {
    /// The ids.
    #[arg(required = true, value_name = "ID")]
    ids: Vec<u64>,
    #[command(flatten)]
    of: Running,
}

impl Get {
    pub(super) async fn run(&self, table: &str) -> Result<(), CommandError> {
        let found = self.of.lookup().await?.rows(table, &self.ids).await?;
        if self.of.json {
            outln!("{}", json(table, &self.ids, &found));
        } else {
            outln!("{}", shown(&self.ids, &found).trim_fmt());
        }
        Ok(())
    }
}

/// Returns the id of each row, whether the row exists, and its values.
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
