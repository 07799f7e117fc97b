//! The `flambeau` command, with the models that come with Flambeau.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    flambeau::App::new().main()
}
