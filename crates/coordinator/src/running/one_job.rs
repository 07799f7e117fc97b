//! The coordinator of one job. It ends when the job ends, or when a signal tells it to.

use std::path::PathBuf;
use std::time::Duration;

use cluster::{Summary, Turn};
use daemon::process::Process;
use network::transport::Listen;
use shared_proto::job::Job;
use tokio_util::sync::CancellationToken;

use super::begin::Resume;
use super::error::CoordinatorError;
use super::place::{Place, register};
use super::settings::Settings;
use super::wiring::{DRAIN, spawn_server};
use super::work::{Beginning, Work};
use crate::calls::current_job::CurrentJob;
use crate::calls::service::Service;
use crate::calls::slot::Slot;
use crate::page::Page;

/// The time for which a coordinator keeps serving if it is restarted after the end of its job.
const AFTERLIFE: Duration = Duration::from_secs(20);

/// Works on a job to its end, or until the process is told to shut down.
///
/// # Errors
/// See the variants of [`CoordinatorError`]; a failed job is one of them.
pub(super) async fn run(
    settings: &Settings,
    process: &Process,
    job: Job,
    dir: PathBuf,
    place: Place,
) -> Result<(), CoordinatorError> {
    let Place {
        listener,
        address,
        browsers,
        page_address,
    } = place;
    let beginning = Beginning {
        dir: dir.clone(),
        job,
        restore: settings.restore.as_deref(),
        resume: match settings.resume_failed {
            true => Resume::Failed,
            false => Resume::Unable,
        },
        run: format!("{:016x}", rand::random::<u64>()),
        turn: Turn::Alone,
        address,
        process,
    };
    // May take a while, if it watches whether another run is alive.
    let begun = process.shutdown.run_until_cancelled(beginning.begin());
    let Some(begun) = begun.await else {
        return Ok(());
    };
    let work = begun?.start().await?;
    let slot = Slot::new(Some(work.active(0, "")));
    let service = Service {
        current_job: CurrentJob {
            slot: slot.clone(),
            security: process.security.clone(),
        },
        queue: None,
    };
    let stop = CancellationToken::new();
    let server = spawn_server(service, settings, process, listener, stop.clone());
    process.announce_page(Some(Listen::Tcp(address)), page_address);
    process.readiness.set(true);
    let again = work.again;
    tracing::info!(%address, run_dir = %dir.display(), again, "coordinating");
    let _registered = register(address, page_address, &dir, &process.security);
    let page = Page::serve(&process.security, browsers);
    page.show(Some(work.shown()));
    let summary = see_to_its_end(&work, &page, process).await;
    // The page and calls hold the cluster, which holds the queue of records open.
    drop(page);
    work.running.stop();
    stop.cancel();
    // Connections that clients do not close are dropped.
    let served = tokio::time::timeout(DRAIN, server).await;
    slot.set(None);
    work.close().await;
    let summary = summary?;
    if let Ok(Ok(served)) = served {
        served?;
    }
    match summary.map(|summary| summary.error).unwrap_or_default() {
        error if error.is_empty() => Ok(()),
        error => Err(CoordinatorError::JobFailed(error)),
    }
}

/// Waits for the end of a job and for its members to leave. Returns the summary, or `None` if the process is told to
/// shut down before the job has ended.
async fn see_to_its_end(
    work: &Work,
    page: &Page,
    process: &Process,
) -> Result<Option<Summary>, CoordinatorError> {
    let running = &work.running;
    let ended = process.shutdown.run_until_cancelled(running.ended()).await;
    let Some(summary) = ended.transpose()? else {
        return Ok(None);
    };
    work.summarise(&summary).await?;
    if running.had_ended {
        // Processes that are restarted together with it learn that the job has ended.
        let _ = tokio::time::timeout(AFTERLIFE, process.shutdown.cancelled()).await;
    }
    running.all_left().await;
    page.show_end().await;
    Ok(Some(summary))
}
