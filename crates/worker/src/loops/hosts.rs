//! The processes among which a loop is distributed: their addresses, and what they do together.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use collective::{
    CollectiveError, Exchange, Group, Identity, LinkService, Peer, StreamLinks, take_links,
};
use pollster::block_on;
use sha2::{Digest, Sha256};
use shared_proto::connections::{Connections, Limits, Port};
use shared_proto::ids::{Epoch, Generation, Role, RunNumber, Task, TaskId};
use shared_proto::listener::Listener;
use shared_proto::network::SystemNetwork;
use shared_proto::payload::Dtype;
use shared_proto::security::{Security, SecurityFiles};
use shared_proto::transport::{Listen, is_address};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::act::Act;
use super::error::{HostError, LoopError};
use crate::tf_config::{TfConfig, TfConfigError};

/// The time for which a process that ends its loop waits for the others to have received what it has sent.
const FAREWELL: Duration = Duration::from_secs(5);

/// The time in which what was sent last leaves this process.
const FLUSH: Duration = Duration::from_millis(200);

/// The most connections of other processes.
const MOST_LINKS: usize = 1024;

/// The only ring of a loop.
const RING: Epoch = Epoch(1);

/// The processes of a training loop. Each one runs the same program with the same list and an index of its own.
///
/// A process takes links from the others at its own address. The loop is as strong as the weakest of them: once a process is lost, each
/// step of the others fails. A [`Trainer`] on a cluster goes on.
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
    /// The processes at these addresses, each as host:port, of which this is number `index`, from 0.
    pub fn new<A: Into<String>>(addresses: impl IntoIterator<Item = A>, index: usize) -> Self {
        Self {
            addresses: addresses.into_iter().map(Into::into).collect(),
            index,
            listen: None,
            security: SecurityFiles::default(),
            patience: Duration::from_secs(300),
        }
    }

    /// The chief and the workers that the environment variable `TF_CONFIG` names. None if it is not set.
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
                "{} has no part in a loop of your own; start the program as chief and worker only",
                config.identity
            ))
        })?;
        let addresses = config.training.iter().map(|address| address.to_string());
        let hosts = Self::new(addresses, index);
        let own = config.training.get(index);
        Ok(Some(match own.map(|address| address.to_listen_on()) {
            Some(listen) => hosts.listen(listen),
            None => hosts,
        }))
    }

    /// Listens here. By default it is the port of its own address, on all interfaces, or on loopback if the address is one of it.
    #[must_use]
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = Some(address);
        self
    }

    /// Uses these certificates and this token; they are a worker's (`flambeau certs`). By default links are not encrypted.
    #[must_use]
    pub fn security(mut self, files: SecurityFiles) -> Self {
        self.security = files;
        self
    }

    /// Waits so long for the other processes to start (default: 5 minutes).
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Returns where it listens.
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
        let (host, port) = own.rsplit_once(':').unwrap_or((own, ""));
        let port = port.parse().map_err(|_| HostError::Address(own.clone()))?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let ip = match host {
            "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            host => host.parse().ok().filter(IpAddr::is_loopback),
        };
        let all = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Ok(SocketAddr::new(ip.unwrap_or(all), port))
    }

    /// Returns the place of a process in the loop. Lists that differ make different runs, which refuse each other.
    fn identity(&self, index: usize) -> Identity {
        let digest = Sha256::digest(self.addresses.join(" "));
        Identity {
            job: "loop".to_owned(),
            run: RunNumber(u64::from_le_bytes(first_bytes(&digest))),
            task: Task {
                id: TaskId {
                    role: Role::Worker,
                    index: u32::try_from(index).unwrap_or(u32::MAX),
                },
                generation: Generation(1),
            },
        }
    }
}

/// This process among those of a loop.
pub(super) struct Together {
    addresses: Vec<String>,
    index: usize,
    /// The replicas of the processes before this one.
    before: usize,
    /// The replicas of all processes.
    replicas: usize,
    /// None once a replica of this process has failed, or another process is lost.
    group: Mutex<Option<Group<StreamLinks>>>,
    /// It drives the links. None once it is shut down.
    runtime: Option<Runtime>,
    _stop: DropGuard,
}

impl Together {
    /// Meets the other processes, of which each says how many replicas it has.
    pub(super) fn meet(hosts: &Hosts, own_replicas: usize) -> Result<Self, LoopError> {
        let listen = hosts.own_listen()?;
        let security = Security::load(&hosts.security).map_err(HostError::Security)?;
        security.for_listening().map_err(HostError::Security)?;
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).thread_name("links").enable_all();
        let runtime = runtime.build().map_err(HostError::Runtime)?;
        let stop = CancellationToken::new();
        let exchange = Exchange::default();
        exchange.belong_to(hosts.identity(hosts.index));
        let entered = runtime.enter();
        let listener = block_on(Listener::bind(&Listen::Tcp(listen)))
            .map_err(|error| HostError::Listen { listen, error })?;
        let service = LinkService {
            exchange: exchange.clone(),
            security: security.clone(),
        };
        let places = Connections::new(Port::Data, Limits::of(MOST_LINKS, None));
        runtime.spawn(take_links(service, listener, places, stop.clone()));
        let peer = |(index, address): (usize, &String)| Peer {
            task: hosts.identity(index).task,
            address: address.clone(),
        };
        let peers: Vec<Peer> = hosts.addresses.iter().enumerate().map(peer).collect();
        let count = peers.len();
        let network = Arc::new(SystemNetwork::new(security));
        let links = StreamLinks::of(&exchange, network, RING, hosts.index, peers, hosts.patience);
        let links = links.map_err(|error| HostError::Lost {
            index: hosts.index,
            address: hosts.addresses[hosts.index].clone(),
            reason: error.reason,
        })?;
        drop(entered);
        let mut together = Self {
            addresses: hosts.addresses.clone(),
            index: hosts.index,
            before: 0,
            replicas: own_replicas,
            group: Mutex::new(Some(Group::new(hosts.index, count, links, Dtype::F32))),
            runtime: Some(runtime),
            _stop: stop.drop_guard(),
        };
        tracing::info!(
            hosts = count,
            index = hosts.index,
            "waiting for the other processes of the loop"
        );
        let mut replicas = vec![0.0; count];
        replicas[hosts.index] = own_replicas as f64;
        let replicas = together.agree(Act::Meet, &replicas)?;
        together.before = replicas[..hosts.index].iter().sum::<f64>() as usize;
        together.replicas = replicas.iter().sum::<f64>() as usize;
        Ok(together)
    }

    /// Returns the number of this process.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Returns the number of replicas of the processes before this one.
    pub(super) fn before(&self) -> usize {
        self.before
    }

    /// Returns the number of replicas of all processes.
    pub(super) fn replicas(&self) -> usize {
        self.replicas
    }

    /// Agrees with the other processes on an act with these numbers, and returns their sums.
    pub(super) fn agree(&self, act: Act, numbers: &[f64]) -> Result<Vec<f64>, LoopError> {
        let sum = self.sum(act.with(numbers))?;
        let all = act.of(&sum, self.addresses.len());
        all.map_err(|_| LoopError::HostsOutOfStep)
    }

    /// Returns the sums of the processes' numbers.
    pub(super) fn sum(&self, numbers: Vec<f64>) -> Result<Vec<f64>, LoopError> {
        self.play(async |group| group.sum_short(numbers).await)
    }

    /// Makes each element the sum of all processes' elements at its place.
    pub(super) fn add_up(&self, values: &mut [f32]) -> Result<(), LoopError> {
        self.play(async |group| group.all_reduce(values).await)
    }

    /// Returns the bytes of all processes, in their order.
    pub(super) fn gather(&self, own: Bytes) -> Result<Vec<Bytes>, LoopError> {
        self.play(async |group| group.gather_bytes(own).await)
    }

    /// Checks that all processes have the same content.
    pub(super) fn same(&self, content: &[u8]) -> Result<(), LoopError> {
        // 48 bits, so that a sum of `f64` is exact.
        let own = (u64::from_le_bytes(first_bytes(content)) >> 16) as f64;
        let sum = self.agree(Act::Compare, &[own])?;
        match sum[..] == [own * self.addresses.len() as f64] {
            true => Ok(()),
            false => Err(HostError::Differs.into()),
        }
    }

    /// Leaves the others, whose next step fails then.
    pub(super) fn leave(&self) {
        let _entered = self.runtime.as_ref().map(Runtime::enter);
        *self.group() = None;
    }

    fn play<T>(
        &self,
        operation: impl AsyncFnOnce(&Group<StreamLinks>) -> Result<T, CollectiveError>,
    ) -> Result<T, LoopError> {
        // The links open on this runtime, also where the caller has one of its own.
        let _entered = self.runtime.as_ref().map(Runtime::enter);
        let mut held = self.group();
        let group = held.as_ref().ok_or(LoopError::Failed)?;
        let done = block_on(operation(group));
        if done.is_err() {
            part(held.take(), &done);
        }
        done.map_err(|error| self.explained(error))
    }

    /// Names the process that an error is about.
    fn explained(&self, error: CollectiveError) -> LoopError {
        match error {
            CollectiveError::Link(error) => LoopError::Host(HostError::Lost {
                address: self.addresses.get(error.rank).cloned().unwrap_or_default(),
                index: error.rank,
                reason: error.reason,
            }),
            _ => LoopError::HostsOutOfStep,
        }
    }

    fn group(&self) -> MutexGuard<'_, Option<Group<StreamLinks>>> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        let group = self.group().take();
        if let Some(group) = group.filter(|_| !std::thread::panicking()) {
            // The last pieces may be on their way to others that still need them.
            let _entered = runtime.enter();
            let farewell = group.sum_short(Act::End.with(&[]));
            let farewell = block_on(tokio::time::timeout(FAREWELL, farewell));
            part(Some(group), &farewell.unwrap_or(Ok(Vec::new())));
        }
        // The program may be asynchronous, where a runtime must not be waited for.
        runtime.shutdown_background();
    }
}

/// Drops the links after an operation. If it was another one than the peers', they need its numbers to see that.
fn part<T>(links: Option<Group<StreamLinks>>, done: &Result<T, CollectiveError>) {
    if matches!(done, Err(CollectiveError::Differs { .. })) {
        std::thread::sleep(FLUSH);
    }
    drop(links);
}

fn first_bytes(bytes: &[u8]) -> [u8; 8] {
    std::array::from_fn(|i| bytes.get(i).copied().unwrap_or(0))
}
