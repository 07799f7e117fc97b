//! `flambeau table`: rows of a table, from running servers or from a run's newest checkpoint.
//!
//! - `running`: the servers of a running cluster
//! - `get`: rows by their ids, from servers
//! - `heat`: how often rows are read and changed, from servers
//! - `survey`: the largest rows and the sizes of all rows, from a checkpoint

mod get;
mod heat;
mod running;
mod survey;

use clap::{Args, Subcommand};

use self::get::Get;
use self::heat::Heat;
use self::survey::{Histogram, Top};
use crate::command::block_on;
use crate::error::CommandError;

#[derive(Args)]
pub(crate) struct Arguments {
    /// The table's name.
    table: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the values of rows of a running cluster.
    Get(Get),
    /// Show how often rows are read and changed in a running cluster: by server and bucket, and of which ids the most.
    Heat(Heat),
    /// Show the rows of a checkpoint with the largest norm, or with the most updates.
    Top(Top),
    /// Show a histogram of the norms of a checkpoint's rows.
    Histogram(Histogram),
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let table = &arguments.table;
    block_on(async {
        match &arguments.command {
            Command::Get(get) => get.run(table).await,
            Command::Heat(heat) => heat.run(table).await,
            Command::Top(top) => top.run(table).await,
            Command::Histogram(histogram) => histogram.run(table).await,
        }
    })
}
