//! The process: listens, and works on one job, or on one after the other.

use std::path::PathBuf;

use daemon::process::Process;
use daemon::settings::AfterJob;
use shared_proto::task::boxed;

use super::error::CoordinatorError;
use super::place::{Place, bind, register};
use super::settings::Settings;
use super::{long_lived, one_job};

/// Coordinates one job, or in a long-lived cluster one after the other.
///
/// # Errors
/// See the variants of [`CoordinatorError`]; a failed job is one of them.
#[boxed(?Send)]
pub async fn run(settings: Settings, process: Process) -> Result<(), CoordinatorError> {
    process.security.for_listening()?;
    if settings.http.is_some() {
        process.security.for_browsers()?;
    }
    let job = settings.read_job()?;
    let (listener, address) = bind(settings.listen, "--listen").await?;
    let (browsers, page_address) = match settings.http {
        Some(http) => {
            let (listener, address) = bind(http, "--http").await?;
            (Some(listener), Some(address))
        }
        None => (None, None),
    };

    let without_job = settings.begins_without_job(process.after_job);
    let name = if without_job { "cluster" } else { &job.name };
    let default_dir = || PathBuf::from("runs").join(name);
    let dir = job.run_dir.clone().unwrap_or_else(default_dir);
    let run_dir = |error| CoordinatorError::RunDir {
        dir: dir.clone(),
        error,
    };
    // Workers write there too, and may have another working directory.
    let dir = std::path::absolute(&dir).map_err(run_dir)?;
    tokio::fs::create_dir_all(&dir).await.map_err(run_dir)?;
    let place = Place {
        listener,
        address,
        browsers,
        page_address,
    };
    if without_job || process.after_job == Some(AfterJob::Wait) {
        let _registered = register(address, page_address, &dir, &process.security);
        return long_lived::run(&settings, &process, job, dir, place).await;
    }
    one_job::run(&settings, &process, job, dir, place).await
}
