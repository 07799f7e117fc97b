//! The process: listens, records, and ends when the job does or a signal tells it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cluster::Turn;
use daemon::Offload;
use daemon::process::Process;
use daemon::settings::AfterJob;
use network::connections::{AcceptedStream, Connections, Port};
use network::transport::Listen;
use shared_proto::job::run_dir;
use shared_proto::receipt::ReceiptKey;
use shared_proto::task::{self, boxed};
use tokio::net::TcpListener;

use super::begin::{Restore, Resume, Wish, begin, here, open_store};
use super::error::CoordinatorError;
use super::long_lived::{self, Place};
use super::place::{bind, register};
use super::settings::Settings;
use super::wiring::{DRAIN, Parts};
use crate::keeping::run_dir::{LAST_RECORDS, Recorder};
use crate::keeping::state::State;
use crate::page::{Page, ShownJob};

/// The time for which a coordinator keeps serving if it is restarted after the end of its job.
const AFTERLIFE: Duration = Duration::from_secs(20);

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
    let mut job = settings.read_job()?;
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
    if without_job || process.after_job == Some(AfterJob::Wait) {
        let _registered = register(address, page_address, &dir, &process.security);
        let place = Place {
            listener,
            address,
            browsers,
            page_address,
        };
        return long_lived::run(&settings, &process, job, dir, place).await;
    }
    job.run_dir = Some(dir.clone());
    let path = dir.join(run_dir::STATE);
    let state = State::open(&path).map_err(|error| CoordinatorError::State { path, error })?;
    let wish = Wish {
        checkpoints: open_store(&job, &dir)?,
        restore: settings.restore.as_deref().map(Restore::At),
        resume: match settings.resume_failed {
            true => Resume::Failed,
            false => Resume::Unable,
        },
        run: format!("{:016x}", rand::random::<u64>()),
        receipt_key: ReceiptKey(rand::random()),
        turn: Turn::Alone,
        here: here(address),
    };
    // May take a while, if it watches whether another run is alive.
    let begun = begin(job, &dir, &state, wish);
    let Some(begun) = process.shutdown.run_until_cancelled(begun).await else {
        return Ok(());
    };
    let begun = begun?;
    let again = begun.again;
    process.announce_page(Some(Listen::Tcp(address)), page_address);
    process.readiness.set(true);
    tracing::info!(%address, run_dir = %dir.display(), again, "coordinating");
    let _registered = register(address, page_address, &dir, &process.security);
    let connections = Connections::new(
        Port::Coordinator,
        settings.connections.limits(&Listen::Tcp(settings.listen)),
    );
    let store = begun.keeping.as_ref().map(|keeping| keeping.store.clone());
    let recorder = Recorder::open(&dir, begun.cluster.job(), again, store);
    let recorder = recorder.await.map_err(run_dir)?;
    let parts = Parts {
        begun,
        state,
        records: recorder.lines(),
        offload: Offload::Threads,
        security: process.security.clone(),
    };
    let incoming = process.security.accepted(connections.incoming(listener));
    serve(parts, incoming, (recorder, browsers), &dir, &process).await
}

/// Serves a job to its end, or until the process is told to shut down.
async fn serve(
    parts: Parts,
    incoming: AcceptedStream,
    (recorder, browsers): (Recorder, Option<TcpListener>),
    dir: &Path,
    process: &Process,
) -> Result<(), CoordinatorError> {
    let (running, work) = parts.build(incoming);
    let work = task::spawn_with_result(work);
    let shared = &running.shared;
    let page = Page::serve(&process.security, browsers);
    page.show(Some(ShownJob {
        shared: Arc::clone(shared),
        history: recorder.history(),
        run_dir: dir.to_owned(),
    }));
    let ended = process.shutdown.run_until_cancelled(running.ended()).await;
    let mut error = String::new();
    if let Some(summary) = ended.transpose()? {
        error.clone_from(&summary.error);
        // If the job had ended before this process started, the existing summary knows more.
        if !(running.had_ended && dir.join(run_dir::SUMMARY).exists()) {
            let written = recorder.summarise(&summary).await;
            written.map_err(|error| CoordinatorError::RunDir {
                dir: dir.to_owned(),
                error,
            })?;
        }
        if running.had_ended {
            // Processes that are restarted together with it learn that the job has ended.
            let _ = tokio::time::timeout(AFTERLIFE, process.shutdown.cancelled()).await;
        }
        running.all_left().await;
        page.show_end().await;
    }
    // The page holds the cluster, which holds the queue of records open.
    drop(page);
    running.stop();
    // Connections that clients do not close are dropped, and the store may not answer.
    let served = tokio::time::timeout(DRAIN, work).await;
    running.release().await;
    let _ = tokio::time::timeout(DRAIN, shared.keep_all()).await;
    drop(running);
    let closed = tokio::time::timeout(LAST_RECORDS, recorder.close()).await;
    if closed.is_err() {
        tracing::warn!("the last records could not be written in time");
    }
    if let Ok(Ok(outcome)) = served {
        outcome?;
    }
    if error.is_empty() {
        Ok(())
    } else {
        Err(CoordinatorError::JobFailed(error))
    }
}
