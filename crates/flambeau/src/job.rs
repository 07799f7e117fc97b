//! `flambeau job`: writes job files.

use daemon::{out, outln};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use model::registry::Registry;
use shared_proto::job::template;

use crate::error::CommandError;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Write a commented job file with every setting and its default.
    Init {
        /// The file to write; "-" is stdout. An existing file is not replaced.
        #[arg(default_value = "job.toml")]
        path: PathBuf,
    },
}

pub(crate) fn run(command: &Command, registry: &Registry) -> Result<(), CommandError> {
    match command {
        Command::Init { path } => write_template(path, registry),
    }
}

fn write_template(path: &Path, registry: &Registry) -> Result<(), CommandError> {
    let template = template(registry.sources(), registry.models());
    if path.as_os_str() == "-" {
        out!("{template}");
        return Ok(());
    }
    let write = || {
        let mut file = std::fs::File::create_new(path)?;
        std::io::Write::write_all(&mut file, template.as_bytes())
    };
    write().map_err(CommandError::file(path))?;
    outln!("wrote {}; flambeau train {0} runs it", path.display());
    Ok(())
}
