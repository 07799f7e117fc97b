//! The processes among which a loop is distributed: their addresses, and their collective operations.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use collective::{
    CollectiveError, Exchange, Group, Identity, LinkService, Peer, StreamLinks, take_links,
};
use network::SystemNetwork;
use network::connections::{Connections, Limits, Port};
use network::listener::Listener;
use network::security::{Security, SecurityFiles};
use network::transport::Listen;
use pollster::block_on;
use sha2::{Digest, Sha256};
use shared_proto::ids::{Epoch, Generation, RunNumber, Task, TaskId};
use shared_proto::payload::Dtype;
use shared_proto::protocol::{MAX_MESSAGE_BYTES, is_address};
use shared_proto::task;
use tokio::runtime::{Builder, EnterGuard, Runtime};
use tokio::task::unconstrained;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::act::Act;
use super::error::{HostError, LoopError};
use crate::tf_config::{Address, TfConfig, TfConfigError};

/// The longest time for which a process that ends its loop waits until the others have received its last messages.
const FAREWELL: Duration = Duration::from_secs(5);

/// The longest time until the others have received the last messages and have closed their links.
const CLOSING: Duration = Duration::from_secs(2);

/// The time for the first exchange of messages, beyond the time in which the links must open.
const GRACE: Duration = Duration::from_secs(2);

/// The most connections from other processes.
const MOST_LINKS: usize = 1024;

/// The most numbers that are added up by one message in each direction.
const MOST_NUMBERS: usize = MAX_MESSAGE_BYTES / size_of::<f64>() / 2;

/// The epoch of the ring: a loop has only one.
const RING: Epoch = Epoch(1);

/// The processes of a training loop. Each process runs the same program, with the same list of addresses and its own
/// index.
///
/// A process takes links from the others at its own address. If a process is lost, each later step of the others fails. A [`Trainer`] on a
/// cluster continues after such a failure.
///
/// [`Trainer`]: https://docs.rs/flambeau/latest/flambeau/struct.Trainer.html
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts {
    addresses: Vec<String>,
    index: usize,
    listen: Option<SocketAddr>,
    security: SecurityFiles,
    patience: Duration,
}

impl Hosts {
    /// Lists the processes by their addresses, each as host:port. `index` is the index of this process in the list,
    /// from 0.
    pub fn new<A: Into<String>>(addresses: impl IntoIterator<Item = A>, index: usize) -> Self {
        Self {
            addresses: addresses.into_iter().map(Into::into).collect(),
            index,
            listen: None,
            security: SecurityFiles::default(),
            patience: Duration::from_secs(300),
        }
    }

    /// Returns the processes that the environment variable `TF_CONFIG` lists: the chief, then the workers. Returns `None` if it is not set.
    ///
    /// # Errors
    /// If it makes no sense, or describes a parameter server or an evaluator.
    pub fn of_tf_config() -> Result<Option<Self>, TfConfigError> {
        if std::env::var_os(crate::tf_config::VARIABLE).is_none() {
            return Ok(None);
        }
        let config = TfConfig::of_environment()?;
        let index = config.index.ok_or_else(|| {
            TfConfigError::new(format!(
                "{} cannot take part in a loop of your own: only the chief and the workers run it",
                config.identity
            ))
        })?;
        let addresses = config.training.iter().map(Address::to_string);
        Ok(Some(Self::new(addresses, index)))
    }

    /// Sets the address to listen on. Default: the port of this process's address, on all interfaces, or on loopback if that address is
    /// loopback.
    #[must_use]
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = Some(address);
        self
    }

    /// Sets the certificates and the token, which must be those of a worker (`flambeau certs`). By default links are neither encrypted nor
    /// authenticated: whoever reaches the port can take the place of a process.
    #[must_use]
    pub fn security(mut self, files: SecurityFiles) -> Self {
        self.security = files;
        self
    }

    /// Sets the time to wait for the other processes to start (default: 5 minutes).
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Returns the address on which this process listens.
    ///
    /// # Errors
    /// If the index or an address makes no sense.
    fn own_listen(&self) -> Result<SocketAddr, HostError> {
        let count = self.addresses.len();
        let own = self.addresses.get(self.index).ok_or(HostError::Index {
            index: self.index,
            count,
        })?;
        let of_port = |text: &String| is_address(text) && !text.starts_with("unix:");
        let wrong = self.addresses.iter().find(|text| !of_port(text));
        if let Some(address) = wrong {
            return Err(HostError::Address(address.clone()));
        }
        let twice = (1..count).find(|i| self.addresses[..*i].contains(&self.addresses[*i]));
        if let Some(twice) = twice {
            return Err(HostError::Twice(self.addresses[twice].clone()));
        }
        if let Some(listen) = self.listen {
            return Ok(listen);
        }
        let address = Address::parse(own);
        let address = address.ok_or_else(|| HostError::Address(own.clone()))?;
        Ok(address.to_listen_on())
    }

    /// Returns the identity of a process of the loop. The run number is a digest of the list, so processes with
    /// different lists refuse each other.
    fn identity(&self, index: usize) -> Identity {
        let digest = Sha256::digest(self.addresses.join(" "));
        Identity {
            job: "loop".to_owned(),
            run: RunNumber(u64::from_le_bytes(first_bytes(&digest))),
            task: Task {
                id: TaskId::worker(u32::try_from(index).unwrap_or(u32::MAX)),
                generation: Generation(1),
            },
        }
    }
}

/// The group of a loop's processes, as one of them sees it.
pub(super) struct HostGroup {
    addresses: Vec<String>,
    index: usize,
    /// The number of replicas of the processes before this one.
    before: usize,
    /// The number of replicas of all processes.
    replicas: usize,
    /// The number of models that were built.
    models: AtomicUsize,
    /// `None` once a replica of this process has failed, or another process is lost.
    group: Mutex<Option<Group<StreamLinks>>>,
    /// Stops the listener.
    stop: CancellationToken,
    runtime: LinkRuntime,
}

/// The runtime that drives the links. It may be dropped in asynchronous code, where a runtime must not be waited for.
struct LinkRuntime(Option<Runtime>);

impl LinkRuntime {
    /// Enters this runtime, so that links open on it even if the caller has a runtime of its own.
    fn enter(&self) -> Option<EnterGuard<'_>> {
        self.0.as_ref().map(Runtime::enter)
    }
}

impl Drop for LinkRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl HostGroup {
    /// Connects to the other processes, and exchanges how many replicas each has.
    pub(super) fn meet(hosts: &Hosts, own_replicas: usize) -> Result<Self, LoopError> {
        let listen = hosts.own_listen()?;
        let security = Security::load(&hosts.security).map_err(HostError::Security)?;
        security.for_listening().map_err(HostError::Security)?;
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).thread_name("links").enable_all();
        let runtime = LinkRuntime(Some(runtime.build().map_err(HostError::Runtime)?));
        let stop = CancellationToken::new();
        let exchange = Exchange::once();
        exchange.belong_to(hosts.identity(hosts.index));
        let entered = runtime.enter();
        let listener = block_on(unconstrained(Listener::bind(&Listen::Tcp(listen))))
            .map_err(|error| HostError::Listen { listen, error })?;
        let service = LinkService {
            exchange: exchange.clone(),
            security: security.clone(),
        };
        let places = Connections::new(Port::Data, Limits::new(MOST_LINKS, None));
        task::spawn(take_links(service, listener, places, stop.clone()));
        let peer = |(index, address): (usize, &String)| Peer {
            task: hosts.identity(index).task,
            address: address.clone(),
        };
        let peers: Vec<Peer> = hosts.addresses.iter().enumerate().map(peer).collect();
        let count = peers.len();
        let network = Arc::new(SystemNetwork::new(security));
        let links = StreamLinks::new(&exchange, network, RING, hosts.index, peers, hosts.patience);
        let index = hosts.index;
        let lost = |error: CollectiveError| explained(error, &hosts.addresses);
        let links = links.map_err(|error| lost(error.into()))?;
        tracing::info!(
            hosts = count,
            index,
            "waiting for the other processes of the loop"
        );
        let mut replicas = vec![0.0; count];
        replicas[index] = own_replicas as f64;
        let meeting = async {
            links.connect(0).await?;
            let group = Group::new(index, count, links, Dtype::F32);
            let replicas = group.sum_short(Act::Meet.with(&replicas)).await?;
            Ok((group, replicas))
        };
        // A link that does not open in time says which one it is.
        let met = block_on(unconstrained(timeout(hosts.patience + GRACE, meeting)));
        let (group, replicas) = met
            .map_err(|_| HostError::Late(hosts.patience))?
            .map_err(lost)?;
        let replicas = Act::Meet.of(&replicas, count);
        let replicas = replicas.map_err(|_| LoopError::HostsOutOfStep)?;
        drop(entered);
        Ok(Self {
            addresses: hosts.addresses.clone(),
            index,
            before: replicas[..index].iter().sum::<f64>() as usize,
            replicas: replicas.iter().sum::<f64>() as usize,
            models: AtomicUsize::new(0),
            group: Mutex::new(Some(group)),
            stop,
            runtime,
        })
    }

    /// Returns the index of this process.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Returns the number of replicas of the processes before this one.
    pub(super) fn before(&self) -> usize {
        self.before
    }

    /// Returns the index of a new model. A model has the same index in all processes, because they build models in the
    /// same order.
    pub(super) fn next_model(&self) -> usize {
        self.models.fetch_add(1, Relaxed)
    }

    /// Returns the number of replicas of all processes.
    pub(super) fn replicas(&self) -> usize {
        self.replicas
    }

    /// Makes a collective call with these numbers, and returns their sums. Fails if a process makes another call.
    pub(super) fn agree(&self, act: Act, numbers: &[f64]) -> Result<Vec<f64>, LoopError> {
        let sum = self.sum(act.with(numbers))?;
        let all = act.of(&sum, self.addresses.len());
        all.map_err(|_| LoopError::HostsOutOfStep)
    }

    /// Returns the sums of the processes' numbers. Fails if a process has more or fewer numbers.
    pub(super) fn sum(&self, numbers: Vec<f64>) -> Result<Vec<f64>, LoopError> {
        if numbers.len() <= MOST_NUMBERS {
            return self.play(async |group| group.sum_short(numbers).await);
        }
        let count = numbers.len() as f64;
        let counts = self.play(async |group| group.sum_short(vec![count]).await)?;
        if counts != [count * self.addresses.len() as f64] {
            return Err(LoopError::HostsOutOfStep);
        }
        self.play(async |group| {
            let mut sums = Vec::with_capacity(numbers.len());
            for part in numbers.chunks(MOST_NUMBERS) {
                sums.extend(group.sum_short(part.to_vec()).await?);
            }
            Ok(sums)
        })
    }

    /// Replaces each element with the sum of all processes' elements at the same index.
    pub(super) fn add_up(&self, values: &mut [f32]) -> Result<(), LoopError> {
        self.play(async |group| group.all_reduce(values).await)
    }

    /// Returns the bytes of all processes, in the order of the processes.
    pub(super) fn gather(&self, own: Bytes) -> Result<Vec<Bytes>, LoopError> {
        self.play(async |group| group.gather_bytes(own).await)
    }

    /// Checks that all processes have the same content, by 40 of its first 64 bits. So a digest must stand for longer
    /// content.
    pub(super) fn same(&self, content: &[u8]) -> Result<(), LoopError> {
        // 40 bits, so that the sum of some thousands is exact.
        let own = (u64::from_le_bytes(first_bytes(content)) >> 24) as f64;
        let sum = self.agree(Act::Compare, &[own])?;
        match sum[..] == [own * self.addresses.len() as f64] {
            true => Ok(()),
            false => Err(HostError::Differs.into()),
        }
    }

    /// Closes the links, so the next step of the other processes fails.
    pub(super) fn leave(&self) {
        let _entered = self.runtime.enter();
        // In a statement of its own, so that the lock is free while the links close.
        let group = self.group().take();
        close(group);
        self.stop.cancel();
    }

    fn play<T>(
        &self,
        operation: impl AsyncFnOnce(&Group<StreamLinks>) -> Result<T, CollectiveError>,
    ) -> Result<T, LoopError> {
        let _entered = self.runtime.enter();
        let mut held = self.group();
        let group = held.as_ref().ok_or(HostError::Left)?;
        // The caller may be a task, whose budget would not be renewed in here.
        let done = block_on(unconstrained(operation(group)));
        if let Err(error) = &done {
            match error {
                // Each process sees that the calls differ by what it receives.
                CollectiveError::Differs { .. } => close(held.take()),
                _ => *held = None,
            }
            self.stop.cancel();
        }
        done.map_err(|error| explained(error, &self.addresses))
    }

    fn group(&self) -> MutexGuard<'_, Option<Group<StreamLinks>>> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HostGroup {
    fn drop(&mut self) {
        let group = self.group().take();
        if let Some(group) = group.filter(|_| !std::thread::panicking()) {
            // The last pieces may be on their way to others that still need them.
            let _entered = self.runtime.enter();
            let farewell = group.sum_short(Act::Leave.with(&[]));
            let farewell = block_on(unconstrained(timeout(FAREWELL, farewell)));
            if let Ok(Ok(_) | Err(CollectiveError::Differs { .. })) = farewell {
                close(Some(group));
            }
        }
        self.stop.cancel();
    }
}

/// Names the process that an error is about.
fn explained(error: CollectiveError, addresses: &[String]) -> LoopError {
    match error {
        CollectiveError::Link(error) => LoopError::Host(HostError::Lost {
            address: addresses.get(error.rank).cloned().unwrap_or_default(),
            index: error.rank,
            reason: error.reason,
        }),
        _ => LoopError::HostsOutOfStep,
    }
}

/// Closes the links of a group so that the others receive all that was sent.
fn close(group: Option<Group<StreamLinks>>) {
    if let Some(group) = group {
        block_on(unconstrained(group.into_links().close(CLOSING)));
    }
}

fn first_bytes(bytes: &[u8]) -> [u8; 8] {
    std::array::from_fn(|i| bytes.get(i).copied().unwrap_or(0))
}
