//! `flambeau table NAME heat`: how often rows are read and changed on running servers.

use daemon::outln;
use std::cmp::Reverse;

use clap::Args;
use comfy_table::{Table, presets};
use ps_client::lookup::ServerHeat;
use serde_json::{Value, json};
use shared_proto::wire::{BucketHeat, HotId};

use super::running::Running;
use crate::error::CommandError;

#[derive(Args)]
pub(super) struct Heat {
    /// The most buckets and the most ids to show.
    #[arg(long, short = 'n', default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    most: u32,
    #[command(flatten)]
    of: Running,
}

impl Heat {
    pub(super) async fn run(&self, table: &str) -> Result<(), CommandError> {
        let servers = self.of.lookup().await?.heat(table, self.most).await?;
        let most = self.most as usize;
        if self.of.json {
            outln!("{}", json(table, &servers, most));
            return Ok(());
        }
        outln!("{}", shown_servers(&servers).trim_fmt());
        outln!(
            "\n{}",
            shown_buckets(&hottest_buckets(&servers, most)).trim_fmt()
        );
        let ids = hottest_ids(&servers, most);
        match ids.is_empty() {
            true => outln!(
                "\nno ids: servers count them with --hottest-ids, from the first gradient on"
            ),
            false => outln!("\n{}", shown_ids(&ids).trim_fmt()),
        }
        Ok(())
    }
}

/// Returns the hottest buckets of all servers, each with its server's address, the hottest first.
fn hottest_buckets(servers: &[ServerHeat], most: usize) -> Vec<(&str, BucketHeat)> {
    let all = servers.iter().flat_map(|server| {
        let buckets = server.heat.buckets.iter().copied();
        buckets.map(|bucket| (server.address.as_str(), bucket))
    });
    let mut all: Vec<_> = all.collect();
    all.sort_by_key(|(_, bucket)| Reverse(bucket.read_rows + bucket.updated_rows));
    all.truncate(most);
    all
}

/// Returns the hottest ids of all servers, the hottest first. Each id is on one server only.
fn hottest_ids(servers: &[ServerHeat], most: usize) -> Vec<HotId> {
    let all = servers.iter().flat_map(|server| &server.heat.ids);
    let mut all: Vec<HotId> = all.copied().collect();
    all.sort_by_key(|hot| (Reverse(hot.updates), hot.id));
    all.truncate(most);
    all
}

fn json(table: &str, servers: &[ServerHeat], most: usize) -> Value {
    let server = |of: &ServerHeat| {
        json!({
            "address": of.address,
            "read_rows": of.heat.read_rows,
            "updated_rows": of.heat.updated_rows,
        })
    };
    let bucket = |(address, bucket): (&str, BucketHeat)| {
        json!({
            "bucket": bucket.bucket,
            "server": address,
            "rows": bucket.rows,
            "read_rows": bucket.read_rows,
            "updated_rows": bucket.updated_rows,
        })
    };
    let id = |hot: &HotId| json!({ "id": hot.id, "updates": hot.updates, "error": hot.error });
    let buckets = hottest_buckets(servers, most).into_iter().map(bucket);
    json!({
        "table": table,
        "servers": servers.iter().map(server).collect::<Vec<_>>(),
        "buckets": buckets.collect::<Vec<_>>(),
        "ids": hottest_ids(servers, most).iter().map(id).collect::<Vec<_>>(),
    })
}

/// Returns an empty table with these columns.
fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    table
}

fn shown_servers(servers: &[ServerHeat]) -> Table {
    let mut table = table(["server", "rows read", "rows updated"]);
    for server in servers {
        let (read, updated) = (server.heat.read_rows, server.heat.updated_rows);
        table.add_row([
            server.address.clone(),
            read.to_string(),
            updated.to_string(),
        ]);
    }
    table
}

fn shown_buckets(buckets: &[(&str, BucketHeat)]) -> Table {
    let mut table = table(["bucket", "server", "rows", "rows read", "rows updated"]);
    for (address, bucket) in buckets {
        table.add_row([
            bucket.bucket.to_string(),
            (*address).to_owned(),
            bucket.rows.to_string(),
            bucket.read_rows.to_string(),
            bucket.updated_rows.to_string(),
        ]);
    }
    table
}

fn shown_ids(ids: &[HotId]) -> Table {
    let mut table = table(["id", "updates", "max. overcount"]);
    for hot in ids {
        table.add_row([hot.id, hot.updates, hot.error].map(|number| number.to_string()));
    }
    table
}
