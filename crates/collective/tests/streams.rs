//! Groups of processes, here tasks of one process with links on loopback.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use flambeau_collective::{
    Algorithm, CollectiveError, Exchange, Group, Identity, LinkService, Links, Peer, SHARED_MEMORY,
    StreamLinks, take_links,
};
use futures_util::future::{join_all, try_join_all};
use network::connections::{Connections, Limits, Port};
use network::listener::Listener;
use network::security::Security;
use network::stream::{self, BodyKind};
use network::transport::Listen;
use network::{Network, SystemNetwork};
use rustix::fs::statvfs;
use shared_proto::ids::{
    Clock, Epoch, Generation, Origin, Role, RunNumber, Sequence, Task, TaskId,
};
use shared_proto::payload::Dtype;
use shared_proto::protocol::PROTOCOL_VERSION;
use shared_proto::wire::{self, link_message::Kind};
use tempfile::{NamedTempFile, TempDir};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
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
    let id = TaskId::worker(index as u32);
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
    let places = Connections::new(Port::Data, Limits::new(64, None));
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
    async fn new(folders: &[Option<&Path>]) -> Self {
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
        StreamLinks::new(exchange, network, Epoch(ring), rank, peers, PATIENCE).unwrap()
    }

    /// The members of a ring that is formed anew.
    async fn groups(&self, ring: u64, wire: Dtype) -> Vec<Group<StreamLinks>> {
        let ranks = self.hosts.len();
        let connect = async |rank| {
            let links = self.links(rank, ring);
            let star = links.connect_star(0, 0);
            tokio::try_join!(links.connect(0), star)?;
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
    let Some(folder) = memory() else {
        return;
    };
    let Some(elsewhere) = memory() else {
        return;
    };
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
        let ring = Ring::new(&folders).await;
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
    let Some(folder) = memory() else {
        return;
    };
    let algorithms = [
        None,
        Some(Algorithm::Doubling),
        Some(Algorithm::ReduceToOne),
    ];
    for ranks in [2, 3, 5] {
        let ring = Ring::new(&vec![Some(folder.path()); ranks]).await;
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

/// A signal that is awaited in vain is not lost, and sums go on between signals.
#[tokio::test]
async fn rank_0_and_each_other_rank_send_signals_to_each_other() {
    let ring = Ring::new(&[None; 5]).await;
    let groups = ring.groups(1, Dtype::F32).await;
    let play = async |group: &Group<StreamLinks>| {
        for round in 0..20 {
            match group.rank() {
                0 => {
                    for rank in 1..group.ranks() {
                        let mut signal = None;
                        while signal.is_none() {
                            let received = group.receive_signal(rank);
                            let received = timeout(Duration::from_micros(50), received).await;
                            signal = received.ok().transpose()?;
                        }
                        assert_eq!(signal, Some(rank as u8 + round));
                        group.send_signal(rank, round).await?;
                    }
                }
                rank => {
                    group.send_signal(0, rank as u8 + round).await?;
                    assert_eq!(group.receive_signal(0).await?, round);
                }
            }
            let mut sum = [1.0];
            group.all_reduce(&mut sum).await?;
            assert_eq!(sum, [5.0]);
        }
        Ok::<_, CollectiveError>(())
    };
    try_join_all(groups.iter().map(play)).await.unwrap();
}

#[tokio::test]
async fn a_sender_that_waits_for_a_slot_notices_that_the_peer_dies() {
    let Some(folder) = memory() else {
        return;
    };
    let ring = Ring::new(&[Some(folder.path()); 2]).await;
    let (living, dying) = (ring.links(0, 1), ring.links(1, 1));
    tokio::try_join!(living.connect(0), dying.connect(0)).unwrap();
    let piece = Bytes::from(vec![1; 64 << 10]);
    let send = async |links: &StreamLinks| {
        let sent = links.send(1, piece.clone());
        tokio::time::timeout(Duration::from_millis(200), sent).await
    };
    let mut sent = 0;
    // The peer receives nothing, so the slots fill up.
    while let Ok(done) = send(&living).await {
        done.unwrap();
        sent += 1;
    }
    assert_eq!(sent, 8);
    let dies = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(dying);
    };
    let lives = tokio::time::timeout(PATIENCE, living.send(1, piece.clone()));
    let ((), ended) = tokio::join!(dies, lives);
    let error = ended.expect("it hangs").unwrap_err();
    assert_eq!(error.rank, 1, "{error}");
}

#[tokio::test]
async fn messages_that_are_not_due_end_a_link_with_the_reason() {
    let Some(folder) = memory() else {
        return;
    };
    let shared = Some(folder.path());
    let large = Kind::Piece(vec![0; 1 << 20].into());
    for (folder, messages, expected) in [
        (None, vec![Kind::Shared(100)], "not due"),
        (None, vec![Kind::Freed(1)], "not due"),
        (shared, vec![Kind::Freed(1)], "more than it was sent"),
        (shared, vec![Kind::Shared(u32::MAX)], "does not exist"),
        (None, vec![Kind::Greeting(greeting(1, 0))], "not due"),
        (shared, vec![large; 20], "more pieces than are due"),
    ] {
        let ring = Ring::new(&[folder, folder]).await;
        let links = ring.links(0, 1);
        let files: Vec<NamedTempFile> = folder.iter().flat_map(shared_files).collect();
        let name = |file: &NamedTempFile| {
            let name = file.path().file_name().unwrap();
            name.to_string_lossy().into_owned()
        };
        let hello = wire::Greeting {
            shared_memory: files.iter().map(name).collect(),
            ..greeting(1, 0)
        };
        let (outgoing, mut incoming) = raw_link(ring.addresses[0], hello).await;
        let admitted = incoming.message().await.unwrap().unwrap();
        let shares_memory = folder.is_some();
        let expected_answer = Kind::Admitted(wire::Admitted { shares_memory });
        assert_eq!(admitted.kind, Some(expected_answer));
        tokio::spawn(async move {
            for message in messages {
                let _ = outgoing.send(Ok(message.into())).await;
            }
            // Kept open: the link does not end by itself.
            tokio::time::sleep(PATIENCE).await;
        });
        let piece = Bytes::from(vec![1; 64 << 10]);
        let act = async {
            match expected {
                // It takes in messages while it waits for slots.
                "more pieces than are due" => loop {
                    links.send(1, piece.clone()).await?;
                },
                _ => links.receive(1).await,
            }
        };
        let ended = tokio::time::timeout(PATIENCE, act).await;
        let error = ended.expect("it hangs").unwrap_err();
        assert!(error.reason.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn a_link_ends_when_the_peer_has_opened_another_one() {
    let ring = Ring::new(&[None, None]).await;
    let links = ring.links(0, 1);
    let first = raw_link(ring.addresses[0], greeting(1, 0)).await;
    let waits = links.receive(1);
    let second = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut second = raw_link(ring.addresses[0], greeting(1, 0)).await;
        second.1.message().await.unwrap();
        second
    };
    // The first one stays open: the peer cannot tell that it has given it up.
    let (ended, _second) = tokio::join!(tokio::time::timeout(PATIENCE, waits), second);
    let error = ended.expect("it hangs").unwrap_err();
    assert!(error.reason.contains("another link"), "{error}");
    drop(first);
}

/// Two files as a caller creates them.
fn shared_files(folder: &&Path) -> [NamedTempFile; 2] {
    [(); 2].map(|()| {
        let mut name = tempfile::Builder::new();
        let file = name.prefix("flambeau-").rand_bytes(24);
        let file = file.tempfile_in(folder).unwrap();
        file.as_file().set_len(8 * (256 << 10)).unwrap();
        file
    })
}

/// A new folder in memory. None if there is none with room for the links of these tests.
fn memory() -> Option<TempDir> {
    let free = statvfs(SHARED_MEMORY).map(|found| found.f_bavail * found.f_frsize);
    match free {
        Ok(128_000_000..) => Some(tempfile::tempdir_in(SHARED_MEMORY).unwrap()),
        _ => {
            println!("SKIPPED: {SHARED_MEMORY} does not exist or has less than 128 MB");
            None
        }
    }
}

/// The greeting of a task to another, in ring 1.
fn greeting(from: usize, to: usize) -> wire::Greeting {
    let from = identity(from);
    let origin = Origin {
        job: from.job,
        run: from.run,
        task: from.task,
        epoch: Epoch(1),
        clock: Clock(0),
        sequence: Sequence(0),
    };
    wire::Greeting {
        protocol_version: PROTOCOL_VERSION,
        origin: Some(origin.into()),
        to: Some(identity(to).task.into()),
        shared_memory: Vec::new(),
    }
}

/// Opens a stream of messages with a greeting.
async fn raw_link(
    to: SocketAddr,
    greeting: wire::Greeting,
) -> (stream::Sender, stream::Incoming<wire::LinkMessage>) {
    let network = SystemNetwork::default();
    let security = network.security();
    let remote = security.endpoint(&to.to_string(), Role::Worker).unwrap();
    let channel = network.connect(remote).await.unwrap();
    let (outgoing, body) = stream::body(4, BodyKind::Request);
    outgoing
        .send(Ok(Kind::Greeting(greeting).into()))
        .await
        .unwrap();
    let credentials = security.credentials();
    let called = stream::call(channel, stream::LINK_PATH, body, &credentials).await;
    (outgoing, called.unwrap())
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
