//! Groups of processes, here tasks of one process with links on loopback.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use flambeau_collective::{
    Algorithm, CollectiveError, Exchange, Group, Identity, LinkService, Peer, StreamLinks,
    take_links,
};
use futures_util::future::{join_all, try_join_all};
use shared_proto::connections::{Connections, Limits, Port};
use shared_proto::ids::{Epoch, Generation, Role, RunNumber, Task, TaskId};
use shared_proto::listener::Listener;
use shared_proto::network::SystemNetwork;
use shared_proto::payload::Dtype;
use shared_proto::security::Security;
use shared_proto::transport::Listen;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Several pieces in each segment, more than shared memory has slots.
const LARGE: usize = 2_000_003;

const PATIENCE: Duration = Duration::from_secs(30);

/// A process that listens.
struct Host {
    exchange: Exchange,
    address: SocketAddr,
    _stop: DropGuard,
}

fn identity(index: usize) -> Identity {
    let id = TaskId {
        role: Role::Worker,
        index: index as u32,
    };
    let generation = Generation(1);
    Identity {
        job: "sums".to_owned(),
        run: RunNumber(1),
        task: Task { id, generation },
    }
}

async fn host(index: usize, exchange: Exchange) -> Host {
    let listen: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind(&Listen::Tcp(listen)).await.unwrap();
    let address = listener.address().unwrap().to_string().parse().unwrap();
    exchange.belong_to(identity(index));
    let service = LinkService {
        exchange: exchange.clone(),
        security: Security::default(),
    };
    let stop = CancellationToken::new();
    let places = Connections::new(Port::Data, Limits::of(64, None));
    tokio::spawn(take_links(service, listener, places, stop.clone()));
    Host {
        exchange,
        address,
        _stop: stop.drop_guard(),
    }
}

/// A ring of processes that share memory by these folders.
struct Ring {
    hosts: Vec<Host>,
    addresses: Vec<SocketAddr>,
    /// The bytes that have gone over connections.
    sent: Arc<AtomicU64>,
}

impl Ring {
    async fn of(folders: &[Option<&Path>]) -> Self {
        let sent = Arc::new(AtomicU64::new(0));
        let host = |(index, folder): (usize, &Option<&Path>)| {
            let folder = folder.map(PathBuf::from);
            host(index, Exchange::sharing_memory(folder))
        };
        let hosts = join_all(folders.iter().enumerate().map(host)).await;
        let counted = hosts.iter().map(|host| counted(host.address, sent.clone()));
        let addresses = join_all(counted).await;
        Self {
            hosts,
            addresses,
            sent,
        }
    }

    fn links(&self, rank: usize, ring: u64) -> StreamLinks {
        let peer = |(index, address): (usize, &SocketAddr)| Peer {
            task: identity(index).task,
            address: address.to_string(),
        };
        let peers = self.addresses.iter().enumerate().map(peer).collect();
        let network = Arc::new(SystemNetwork::default());
        let exchange = &self.hosts[rank].exchange;
        StreamLinks::of(exchange, network, Epoch(ring), rank, peers, PATIENCE).unwrap()
    }

    /// The members of a ring that is formed anew.
    async fn groups(&self, ring: u64, wire: Dtype) -> Vec<Group<StreamLinks>> {
        let ranks = self.hosts.len();
        let connect = async |rank| {
            let links = self.links(rank, ring);
            links.connect(0).await?;
            Ok::<_, CollectiveError>(Group::new(rank, ranks, links, wire))
        };
        try_join_all((0..ranks).map(connect)).await.unwrap()
    }
}

/// Returns an address that leads to `to`, and counts the bytes in both directions.
async fn counted(to: SocketAddr, count: Arc<AtomicU64>) -> SocketAddr {
    async fn pass_on(
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
        count: Arc<AtomicU64>,
    ) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            count.fetch_add(read as u64, Relaxed);
            if to.write_all(&buffer[..read]).await.is_err() {
                return;
            }
        }
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let Ok(far) = TcpStream::connect(to).await else {
                continue;
            };
            let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
            tokio::spawn(pass_on(near_in, far_out, count.clone()));
            tokio::spawn(pass_on(far_in, near_out, count.clone()));
        }
    });
    address
}

/// A vector of each rank. The sums of whole numbers are exact.
fn vectors(ranks: usize, elements: usize) -> Vec<Vec<f32>> {
    let vector = |rank| {
        (0..elements)
            .map(|i| (i % 97 * (rank + 1)) as f32)
            .collect()
    };
    (0..ranks).map(vector).collect()
}

fn is_sum(vector: &[f32], ranks: usize) -> bool {
    let times = ranks * (ranks + 1) / 2;
    let mut elements = vector.iter().enumerate();
    elements.all(|(i, element)| *element == (i % 97 * times) as f32)
}

async fn all_reduce(groups: &[Group<StreamLinks>], vectors: &mut [Vec<f32>]) {
    let reduced = groups.iter().zip(vectors);
    let reduced = reduced.map(|(group, vector)| group.all_reduce(vector));
    try_join_all(reduced).await.unwrap();
}

#[tokio::test]
async fn ranks_of_a_host_send_no_numbers_over_connections() {
    let folder = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let (here, there) = (Some(folder.path()), Some(elsewhere.path()));
    let nowhere = Some(Path::new("/nowhere"));
    let bytes = (LARGE * size_of::<f32>()) as u64;
    // The part of the links that shares memory.
    for (folders, shared) in [
        (vec![here, here], 1.0),
        (vec![here, here, here, here], 1.0),
        (vec![here, here, there, there], 0.5),
        (vec![here, there], 0.0),
        (vec![here, None], 0.0),
        (vec![None, here], 0.0),
        (vec![nowhere, nowhere], 0.0),
    ] {
        let ranks = folders.len();
        let ring = Ring::of(&folders).await;
        let groups = ring.groups(1, Dtype::F32).await;
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
        for _ in 0..2 {
            let before = ring.sent.load(Relaxed);
            let mut reduced = vectors(ranks, LARGE);
            all_reduce(&groups, &mut reduced).await;
            assert!(reduced.iter().all(|vector| is_sum(vector, ranks)));
            let sent = (ring.sent.load(Relaxed) - before) as f64;
            // Each rank sends `2 (n - 1) / n` of the vector.
            let all = 2.0 * (ranks - 1) as f64 * bytes as f64;
            let over_connections = sent / all;
            assert!(
                (over_connections - (1.0 - shared)).abs() < 0.01,
                "{folders:?}: {over_connections} of the bytes went over connections"
            );
        }
    }
}

#[tokio::test]
async fn all_operations_work_with_shared_memory() {
    let folder = tempfile::tempdir().unwrap();
    let algorithms = [
        None,
        Some(Algorithm::Doubling),
        Some(Algorithm::ReduceToOne),
    ];
    for ranks in [2, 3, 5] {
        let ring = Ring::of(&vec![Some(folder.path()); ranks]).await;
        let wires = [Dtype::F32, Dtype::Bf16];
        let kinds = wires
            .into_iter()
            .flat_map(|wire| algorithms.map(|chosen| (wire, chosen)));
        for (number, (wire, algorithm)) in (1..).zip(kinds) {
            let groups = ring.groups(number, wire).await.into_iter();
            let groups: Vec<_> = match algorithm {
                Some(algorithm) => groups.map(|group| group.by(algorithm)).collect(),
                None => groups.collect(),
            };
            for elements in [1, 5_000, 70_000, LARGE] {
                // Such small whole numbers are exact in 16 bits too.
                let one = |rank| vec![(rank + 1) as f32; elements];
                let mut reduced: Vec<Vec<f32>> = (0..ranks).map(one).collect();
                all_reduce(&groups, &mut reduced).await;
                let sum = (ranks * (ranks + 1) / 2) as f32;
                assert!(reduced.iter().flatten().all(|element| *element == sum));
            }
            let others = async |group: &Group<_>| {
                let mut values = vec![group.rank() as f32; LARGE];
                group.broadcast(0, &mut values).await?;
                group.pass_around(0, &mut values).await?;
                let own = vec![group.rank() as u8; 1 << 20];
                let all = group.gather_bytes(own.into()).await?;
                let sum = group.sum_short(vec![1.0; 10_000]).await?;
                Ok::<_, CollectiveError>((values, all, sum))
            };
            for (values, all, sum) in try_join_all(groups.iter().map(others)).await.unwrap() {
                assert!(values.iter().all(|value| *value == 0.0));
                assert!(sum == vec![ranks as f64; 10_000]);
                for (rank, bytes) in all.iter().enumerate() {
                    assert!(*bytes == vec![rank as u8; 1 << 20]);
                }
            }
        }
    }
}

#[tokio::test]
async fn the_death_of_a_peer_that_shares_memory_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let ring = Ring::of(&[Some(folder.path()); 2]).await;
    let mut groups = ring.groups(1, Dtype::F32).await;
    let (dying, living) = (groups.pop().unwrap(), groups.pop().unwrap());
    let mut vector = vec![1.0; 20 * LARGE];
    // It waits for a slot, and not for a piece alone.
    let dies = async {
        let mut vector = vec![1.0; 20 * LARGE];
        let _ =
            tokio::time::timeout(Duration::from_millis(20), dying.all_reduce(&mut vector)).await;
        drop(dying);
    };
    let lives = tokio::time::timeout(PATIENCE, living.all_reduce(&mut vector));
    let ((), ended) = tokio::join!(dies, lives);
    let error = ended.expect("it hangs").unwrap_err();
    assert_eq!(error.rank(), 1, "{error}");
}

#[tokio::test]
async fn a_task_that_has_started_again_is_not_admitted_to_the_old_ring() {
    let exchanges = [(); 2].map(|()| Exchange::once(None));
    let hosts = join_all((0..2).map(|index| host(index, exchanges[index].clone()))).await;
    let addresses = hosts.iter().map(|host| host.address).collect();
    let mut ring = Ring {
        hosts,
        addresses,
        sent: Arc::default(),
    };
    let old = ring.groups(1, Dtype::F32).await;
    // The second task starts again, and opens its link while the first one is still in the ring.
    let again = ring.links(1, 1);
    let quick = tokio::time::timeout(Duration::from_millis(500), again.connect(0)).await;
    assert!(quick.is_err(), "it is admitted: {quick:?}");
    drop(old);
    // The first one starts again too, with another exchange and the same address.
    let started = host(0, Exchange::once(None)).await;
    ring.addresses[0] = started.address;
    ring.hosts[0] = started;
    let groups = ring.groups(1, Dtype::F32).await;
    let mut reduced = vectors(2, 1000);
    all_reduce(&groups, &mut reduced).await;
    assert!(reduced.iter().all(|vector| is_sum(vector, 2)));
}
