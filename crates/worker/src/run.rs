//! The worker process: its settings, its device and how it ends.

use std::num::NonZeroUsize;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Once};
use std::time::Duration;

use candle_core::Device;
use collective::{Exchange, LinkService, take_links};
use daemon::membership::{Coordinator, Membership, Registration};
use daemon::process::{After, Process};
use daemon::settings::{ConnectionSettings, LocationSettings, MemberSettings, ProcessSettings};
use model::registry::Registry;
use network::SystemNetwork;
use network::connections::{Connections, Port};
use network::listener::Listener;
use network::transport::Listen;
use replica::DeviceReplicas;
use replica::device;
use shared_proto::ids::Role;
use shared_proto::job::Job;
use shared_proto::task::{self, boxed};
use storage::{AllowedLocations, StorageError, without_user};
use tokio_util::sync::CancellationToken;

use crate::error::WorkerError;
use crate::member::{Member, Parts, Replicas, leave};
use crate::strategy::{self, Stores};

/// The time for which a worker that cannot work tries to tell the coordinator.
const TELL: Duration = Duration::from_secs(15);

/// The settings of a worker.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// The devices to compute on, separated by commas: auto, cpu or cuda:N. Several share out the samples of each step, or hold the
    /// stages of a model (model-parallel); cpu may be named several times.
    #[arg(
        long,
        visible_alias = "devices",
        env = "FLAMBEAU_DEVICE",
        default_value = "auto"
    )]
    pub device: device::Choices,
    /// The most memory of each GPU that tensors may take: 8GiB or 512MiB. With the suffix /reserved, it is taken at the start. A device may
    /// have a limit of its own, as in cuda:0@8GiB.
    #[arg(long, env = "FLAMBEAU_DEVICE_MEMORY_LIMIT", value_name = "SIZE")]
    pub device_memory_limit: Option<device::MemoryLimit>,
    /// The place of the data's files on this worker; overrides the job's.
    #[arg(long, env = "FLAMBEAU_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// The folder in which this worker writes the final weights; overrides the job's.
    #[arg(long, env = "FLAMBEAU_RUN_DIR", value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Take links from other workers here: ADDRESS:PORT, where port 0 takes a free one, or unix:PATH. Strategies without
    /// parameter servers use them.
    #[arg(long, env = "FLAMBEAU_WORKER_LISTEN", default_value = "127.0.0.1:0")]
    pub listen: Listen,
    /// The address at which other workers reach this one, as host:port. Default: the one that it listens on; for 0.0.0.0 the
    /// address of the interface that leads to the coordinator.
    #[arg(long, env = "FLAMBEAU_WORKER_ADVERTISE", value_name = "ADDRESS")]
    pub advertise: Option<String>,
    /// The number of threads with which a worker that is a thread of a program computes on CPUs. A worker process takes it from
    /// `RAYON_NUM_THREADS`.
    #[arg(long, hide = true, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// The places that submitted jobs may use.
    #[command(flatten)]
    pub locations: LocationSettings,
    /// The limits on connections of other workers.
    #[command(flatten)]
    pub connections: ConnectionSettings,
    /// The settings with which the worker finds its cluster.
    #[command(flatten)]
    pub member: MemberSettings,
    /// The settings of all processes.
    #[command(flatten)]
    pub process: ProcessSettings,
}

/// Works on a job until it is done.
///
/// # Errors
/// See the variants of [`WorkerError`].
#[boxed(?Send)]
pub async fn run(
    settings: Settings,
    registry: Registry,
    process: Process,
) -> Result<(), WorkerError> {
    let prepared = prepare(&settings);
    let patience = Duration::from_secs(settings.member.patience_seconds);
    let coordinator = Coordinator::at(
        &settings.member.coordinator,
        patience,
        process.security.clone(),
    )?;
    let stop = CancellationToken::new();
    let (links, address) = listen(&settings, &process, stop.clone()).await?;
    let _stop = stop.drop_guard();
    let registration = Registration {
        role: Role::Worker,
        identity: settings
            .member
            .identity(&Listen::Tcp(settings.process.metrics_listen)),
        address: settings.advertise.clone().unwrap_or(address),
        metrics_address: process.metrics_address(),
        holding: None,
        capacity_bytes: 0,
    };
    let devices = match prepared {
        Ok(devices) => devices,
        Err(error) => {
            tell(coordinator, registration, &error, &process).await;
            return Err(error.explained());
        }
    };
    let parts = Parts {
        coordinator,
        registration,
        network: Arc::new(SystemNetwork::new(process.security.clone())),
        links,
        stores: Stores::default(),
        patience,
    };
    let builder = Builder {
        settings,
        registry,
        devices,
        built: None,
    };
    let announced = Once::new();
    let registered = |is: bool| {
        process.readiness.set(is);
        if is {
            announced.call_once(|| process.announce(None));
        }
    };
    let next_job = async |after: After<'_>| process.next_job(after).await;
    let member = Member::new(parts, builder, strategy::join);
    member.run(&process.shutdown, registered, next_job).await
}

/// Takes links from other workers until `stop`. Returns the place where they arrive, and its address.
async fn listen(
    settings: &Settings,
    process: &Process,
    stop: CancellationToken,
) -> Result<(Exchange, String), WorkerError> {
    if process.security.for_listening().is_err() {
        // Other workers verify its certificate, and it has none: it can only call.
        return Ok((Exchange::default(), String::new()));
    }
    let failed = |error| WorkerError::Listen {
        address: settings.listen.clone(),
        error,
    };
    let listener = Listener::bind(&settings.listen).await.map_err(failed)?;
    let address = listener.address().map_err(failed)?;
    let exchange = Exchange::default();
    let service = LinkService {
        exchange: exchange.clone(),
        security: process.security.clone(),
    };
    let places = Connections::new(Port::Data, settings.connections.limits(&settings.listen));
    task::spawn(take_links(service, listener, places, stop));
    Ok((exchange, address.to_string()))
}

/// Checks what a worker needs of its host before it registers, and opens the devices.
fn prepare(settings: &Settings) -> Result<Vec<Device>, WorkerError> {
    let devices = settings
        .device
        .clone()
        .limited(settings.device_memory_limit);
    let devices = devices.open_to_train()?;
    if let Some(dir) = &settings.run_dir {
        // Checked now, so that it does not fail when the final weights are written.
        std::fs::create_dir_all(dir).map_err(|error| WorkerError::RunDir {
            dir: dir.clone(),
            error,
        })?;
    }
    Ok(devices)
}

/// Registers only to report why this worker cannot work. The process ends in any case.
async fn tell(
    coordinator: Coordinator,
    registration: Registration,
    error: &WorkerError,
    process: &Process,
) {
    let telling = async {
        match Membership::join(coordinator, registration).await {
            Ok(membership) => leave(membership, Some(&Err(error))).await,
            Err(unheard) => tracing::warn!("the coordinator cannot be told: {unheard}"),
        }
    };
    let telling = tokio::time::timeout(TELL, telling);
    if let Some(Err(_)) = process.shutdown.run_until_cancelled(telling).await {
        tracing::warn!("the coordinator does not answer, so it is not told");
    }
}

/// Builds the replica of a job, and keeps it across registrations.
struct Builder {
    settings: Settings,
    registry: Registry,
    devices: Vec<Device>,
    /// The replica and the job that it was built for. It outlives a membership.
    built: Option<(Arc<Job>, Arc<DeviceReplicas>)>,
}

impl Replicas for Builder {
    type Replica = DeviceReplicas;

    fn job(&self, membership: &Membership) -> Result<Job, WorkerError> {
        let mut job = membership.job.clone();
        if let Some(dir) = &self.settings.data_dir {
            job.data.dir = Some(dir.clone());
        }
        if let Some(dir) = &self.settings.run_dir {
            job.run_dir = Some(own_folder(dir, &membership.run_folder)?);
        }
        if !membership.run_folder.is_empty() {
            self.check_locations(membership)?;
        }
        job.validate()?;
        Ok(job)
    }

    async fn replica(&mut self, job: &Job) -> Result<Arc<DeviceReplicas>, WorkerError> {
        let job = Arc::new(job.clone());
        if let Some((of, replica)) = &self.built
            && *of == job
        {
            return Ok(Arc::clone(replica));
        }
        self.built = None;
        let threads = self.settings.threads.map(NonZeroUsize::get);
        let replica =
            DeviceReplicas::start_on_threads(&job, &self.registry, &self.devices, threads);
        let replica = replica.await.map_err(WorkerError::Build)?;
        let replica = Arc::new(replica);
        self.built = Some((job, Arc::clone(&replica)));
        Ok(replica)
    }

    fn forget(&mut self) {
        self.built = None;
    }
}

impl Builder {
    /// Refuses a submitted job that reads from places which this worker does not allow.
    fn check_locations(&self, membership: &Membership) -> Result<(), WorkerError> {
        let job = &membership.job;
        let text = |path: &PathBuf| path.display().to_string();
        // Without a run directory of its own, it writes to the coordinator's.
        let coordinators = job
            .run_dir
            .as_ref()
            .filter(|_| self.settings.run_dir.is_none());
        let coordinators = coordinators.map(|dir| {
            let depth = Path::new(&membership.run_folder).components().count();
            dir.ancestors().nth(depth).unwrap_or(dir).to_owned()
        });
        let unread = |error: StorageError| WorkerError::Location(error.to_string());
        let given = self.settings.locations.allow_location.iter();
        let mut allowed = AllowedLocations::read(given.map(String::as_str)).map_err(unread)?;
        let own = [
            &self.settings.run_dir,
            &self.settings.data_dir,
            &coordinators,
        ];
        for own in own.into_iter().flatten() {
            allowed = allowed.and(&text(own)).map_err(unread)?;
        }
        let data = job
            .data
            .dir
            .as_ref()
            .filter(|_| self.settings.data_dir.is_none());
        for (setting, path) in [
            ("data.dir", data),
            ("model.init_from", job.model.init_from.as_ref()),
        ] {
            let Some(path) = path else {
                continue;
            };
            let location = text(path);
            // A pattern may match links, and names that lead upwards.
            let matched = data::matching(path).unwrap_or_default();
            let mut places = [location.clone()]
                .into_iter()
                .chain(matched.iter().map(text));
            let outside = places.try_fold(false, |outside, place| {
                Ok::<_, StorageError>(outside || !allowed.have(&place)?)
            });
            if outside.map_err(unread)? {
                return Err(WorkerError::Location(format!(
                    "the job's `{setting}` is {}, and this worker allows submitted jobs only places in: {allowed}; name one there, or start the worker with --allow-location",
                    without_user(&location)
                )));
            }
        }
        Ok(())
    }
}

/// Returns the folder of a job in this worker's own run directory, and creates it.
fn own_folder(dir: &Path, of_job: &str) -> Result<PathBuf, WorkerError> {
    let below = |part: Component<'_>| matches!(part, Component::Normal(_));
    if !Path::new(of_job).components().all(below) {
        return Err(WorkerError::Protocol("Register"));
    }
    let folder = dir.join(of_job);
    match std::fs::create_dir_all(&folder) {
        Ok(()) => Ok(folder),
        Err(error) => Err(WorkerError::RunDir { dir: folder, error }),
    }
}
