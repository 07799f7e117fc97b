//! The `ps-server` binary.

use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Serves a shard of a Flambeau job's variables.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(flatten)]
    settings: flambeau_ps_server::Settings,
}

fn main() -> ExitCode {
    let settings = Arguments::parse().settings;
    daemon::process::main(settings.process.clone(), async |process| {
        flambeau_ps_server::run(settings, process).await
    })
}
