//! The process: registers, follows views, serves, reports, and ends when the job does.

use std::num::NonZeroUsize;
use std::sync::{Arc, Once};
use std::time::Duration;

use daemon::Offload;
use daemon::membership::{Coordinator, Membership, MembershipError, Registration};
use daemon::process::{After, Again, Onward, Process};
use daemon::settings::{ConnectionSettings, MemberSettings, ProcessSettings};
use network::connections::{Connections, Port};
use network::listener::Listener;
use network::transport::Listen;
use shared_proto::ids::{Role, RunNumber};
use shared_proto::task::{self, boxed};

use crate::error::PsError;
use crate::lookup::{Listening, LookupSettings, LookupThread};
use crate::row_settings::{RowSettings, RowStorage};
use crate::server::{DRAIN, Parts, Server};
use crate::serving::SessionThreads;

/// The settings of a parameter server.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Listen here for workers: IP:PORT, where port 0 takes a free one, or unix:PATH, a socket file
    /// for workers on this host.
    #[arg(long, env = "FLAMBEAU_LISTEN", default_value = "127.0.0.1:0")]
    pub listen: Listen,
    /// The address by which workers reach this server, as host:port or unix:PATH. Default: the address it listens
    /// on, or if that is 0.0.0.0, the one by which it reaches the coordinator.
    #[arg(long, env = "FLAMBEAU_ADVERTISE")]
    pub advertise: Option<String>,
    /// Threads that serve workers. Default: as many as there are cores.
    #[arg(long, env = "FLAMBEAU_THREADS")]
    pub threads: Option<NonZeroUsize>,
    /// Memory for weights, optimizer state and staged gradients, in MiB: a model that needs more is refused.
    /// Default: nine tenths of the memory that the container or the machine has.
    #[arg(long, env = "FLAMBEAU_CAPACITY_MEBIBYTES")]
    pub capacity_mebibytes: Option<u64>,
    /// The memory for rows of tables.
    #[command(flatten)]
    pub rows: RowSettings,
    /// The settings of lookups.
    #[command(flatten)]
    pub lookup: LookupSettings,
    /// The settings by which the server finds its cluster.
    #[command(flatten)]
    pub member: MemberSettings,
    /// The limits on connections.
    #[command(flatten)]
    pub connections: ConnectionSettings,
    /// The settings of every process.
    #[command(flatten)]
    pub process: ProcessSettings,
}

impl Settings {
    fn threads(&self) -> usize {
        let cores = std::thread::available_parallelism();
        self.threads.or(cores.ok()).map_or(1, NonZeroUsize::get)
    }

    fn capacity_bytes(&self) -> u64 {
        match self.capacity_mebibytes {
            Some(mebibytes) => mebibytes.saturating_mul(1 << 20),
            None => daemon::memory_limit() / 10 * 9,
        }
    }
}

/// Serves one shard of a job. If processes stay after a job, then serves a shard of each job that follows.
///
/// # Errors
/// See the variants of [`PsError`].
#[boxed(?Send)]
pub async fn run(settings: Settings, process: Process) -> Result<(), PsError> {
    process.security.for_listening()?;
    let rows = settings.rows.storage()?;
    let announced = Once::new();
    let member = &settings.member;
    let patience = Duration::from_secs(member.patience_seconds);
    let coordinator = Coordinator::at(&member.coordinator, patience, process.security.clone())?;
    let mut again = Again::default();
    let mut unable_in = None;
    loop {
        let (run, error) =
            match serve_job(&settings, &process, &coordinator, rows.clone(), &announced).await? {
                Next::End => return Ok(()),
                Next::Job => continue,
                Next::Unable(run, error) => (Some(run), error),
            };
        if run != unable_in {
            (again, unable_in) = (Again::default(), run);
        }
        let after = After::Unable {
            coordinator: &coordinator,
            run,
            again: again.next_pause(),
            error: &error,
        };
        match process.next_job(after).await {
            Onward::Registers => {}
            Onward::ToldToGo => return Ok(()),
            Onward::Ends => return Err(error),
        }
    }
}

/// What a server does after a job.
enum Next {
    /// It ends.
    End,
    /// It registers for the next job.
    Job,
    /// It could not serve this run because of this error, and has left the run.
    Unable(RunNumber, PsError),
}

/// Serves one shard of the coordinator's job, and waits for the next one.
async fn serve_job(
    settings: &Settings,
    process: &Process,
    coordinator: &Coordinator,
    rows: RowStorage,
    announced: &Once,
) -> Result<Next, PsError> {
    let listen = |error| PsError::Listen {
        address: settings.listen.clone(),
        error,
    };
    let listener = Listener::bind(&settings.listen).await.map_err(listen)?;
    let address = listener.address().map_err(listen)?;
    let lookups = bind_lookups(&settings.lookup, coordinator).await?;
    let advertise = settings.advertise.clone();
    let registration = Registration {
        role: Role::Ps,
        identity: settings.member.identity(&settings.listen),
        address: advertise.unwrap_or_else(|| address.to_string()),
        metrics_address: process.metrics_address(),
        holding: None,
        capacity_bytes: settings.capacity_bytes(),
    };
    let announce = || announced.call_once(|| process.announce(Some(address.clone())));
    let waits = || {
        announce();
        process.readiness.set(true);
    };
    let join = Membership::join_or_wait(coordinator.clone(), registration.clone(), waits);
    let Some(membership) = process.shutdown.run_until_cancelled(join).await else {
        return Ok(Next::End);
    };
    let membership = membership?;
    let run = membership.run;
    announce();

    let server = Server::new(
        &membership,
        Parts {
            coordinator: coordinator.clone(),
            registration,
            security: process.security.clone(),
            offload: Offload::Threads,
            checkpoints: Arc::new(checkpoint::Store::open),
            rows,
            readiness: process.readiness.clone(),
            drain: process.shutdown.clone(),
        },
    );
    let (sessions, stop) = (&server.sessions, &server.stop);
    let lookups = match lookups {
        Some((listening, address)) => {
            tracing::info!(address, "answering lookups");
            server.answers_lookups_at(address);
            let served = server.served();
            let started =
                LookupThread::start(&settings.lookup, listening, served, stop.clone(), DRAIN);
            Some(started?)
        }
        None => None,
    };
    let threads = SessionThreads::start(settings.threads(), sessions, stop).map_err(listen)?;
    let connections = Connections::new(Port::Data, settings.connections.limits(&settings.listen));
    let accepting = task::spawn(threads.accept(listener, connections, stop.clone()));

    let mut place = Some(membership);
    let outcome = serve_until_stopped(process, server.follow(&mut place)).await;
    let next = after_job(process, outcome, place.as_ref(), run).await;
    let registers_again = matches!(next, Ok(Next::Job));
    let error = match &next {
        Ok(Next::Unable(_, error)) | Err(error) => Some(error),
        Ok(Next::End | Next::Job) => None,
    };
    server.end(place.filter(|_| !registers_again), error).await;
    let _ = tokio::time::timeout(DRAIN, accepting).await;
    if let Some(lookups) = lookups {
        let _ = tokio::time::timeout(2 * DRAIN, lookups.join()).await;
    }
    next
}

/// Begins to listen for lookups. Returns the port, and the address by which readers reach it, or `None` if the settings
/// name no port.
async fn bind_lookups(
    settings: &LookupSettings,
    coordinator: &Coordinator,
) -> Result<Option<(Listening, String)>, PsError> {
    let Some(listening) = settings.bind()? else {
        return Ok(None);
    };
    let address = match &settings.lookup_advertise {
        Some(address) => address.clone(),
        None => coordinator.reachable(listening.address.to_string()).await?,
    };
    Ok(Some((listening, address)))
}

/// Serves until the job is over or the process is told to stop. If it is told to stop, first waits for a checkpoint
/// with the shard's updates, as long as the time for shutting down allows. Returns the outcome of serving, or `None` if
/// the process stops and serving has not failed.
async fn serve_until_stopped(
    process: &Process,
    serve: impl Future<Output = Result<(), PsError>>,
) -> Option<Result<(), PsError>> {
    let mut serve = std::pin::pin!(serve);
    let outcome = process.shutdown.run_until_cancelled(serve.as_mut()).await;
    if outcome.is_some() {
        return outcome;
    }
    let within = process.shutdown_within.saturating_sub(3 * DRAIN);
    let saved = tokio::time::timeout(within, serve).await;
    if saved.is_err() {
        tracing::warn!(
            ?within,
            "stopping without a checkpoint: it takes too long; see --shutdown-seconds"
        );
    }
    saved.ok().filter(Result::is_err)
}

/// Decides what follows a job with this outcome.
async fn after_job(
    process: &Process,
    outcome: Option<Result<(), PsError>>,
    place: Option<&Membership>,
    run: RunNumber,
) -> Result<Next, PsError> {
    match (outcome, place) {
        (None, _) | (Some(Ok(())), None) => Ok(Next::End),
        (Some(Ok(())), Some(ended)) => match process.next_job(After::Done(ended)).await {
            Onward::Registers => Ok(Next::Job),
            Onward::ToldToGo | Onward::Ends => Ok(Next::End),
        },
        (Some(Err(PsError::OtherRun)), _) => Ok(Next::Job),
        (Some(Err(PsError::Membership(error @ MembershipError::JobFailed(_)))), Some(ended)) => {
            match process.next_job(After::Failed(ended, &error)).await {
                Onward::Registers => Ok(Next::Job),
                Onward::ToldToGo => Ok(Next::End),
                Onward::Ends => Err(error.into()),
            }
        }
        (Some(Err(error)), _) if error.is_of_this_job() => Ok(Next::Unable(run, error)),
        (Some(Err(error)), _) => Err(error),
    }
}
