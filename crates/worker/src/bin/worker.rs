//! The `worker` binary, with the models that come with Flambeau.

use std::process::ExitCode;

use clap::Parser;
use model::registry::Registry;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Works on a Flambeau job: pulls weights, computes gradients, pushes them.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(flatten)]
    settings: flambeau_worker::Settings,
}

fn main() -> ExitCode {
    replica::threads::reexecute_if_unset();
    let settings = Arguments::parse().settings;
    daemon::process::main(settings.process.clone(), async |process| {
        flambeau_worker::run(settings, Registry::builtin(), process).await
    })
}
