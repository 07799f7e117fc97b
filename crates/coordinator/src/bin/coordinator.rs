//! The `coordinator` binary.

use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Coordinates a Flambeau cluster. All other processes are given its address.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(flatten)]
    settings: flambeau_coordinator::Settings,
}

fn main() -> ExitCode {
    let settings = Arguments::parse().settings;
    daemon::process::main(settings.process.clone(), async |process| {
        flambeau_coordinator::run(settings, process).await
    })
}
