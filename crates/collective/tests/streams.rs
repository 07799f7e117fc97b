//! Groups of processes, here tasks of one process with links on loopback.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use flambeau_collective::{
    Algorithm, CollectiveError, Exchange, Group, Identity, LinkService, Links, Peer, StreamLinks,
    take_links,
};
use futures_util::future::{join_all, try_join_all};
use network::connections::{Connections, Limits, Port};
use network::listener::Listener;
use network::security::Security;
use network::stream::{self, BodyKind};
use network::transport::Listen;
use network::{Network, SystemNetwork};
use shared_proto::ids::{
    Clock, Epoch, Generation, Origin, Role, RunNumber, Sequence, Task, TaskId,
};
use shared_proto::payload::Dtype;
use shared_proto::protocol::PROTOCOL_VERSION;
use shared_proto::wire::{self, link_message::Kind};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Several pieces in each segment.
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

/// A ring of processes.
struct Ring {
    hosts: Vec<Host>,
}

impl Ring {
    async fn new(ranks: usize) -> Self {
        let hosts = (0..ranks).map(|index| host(index, Exchange::default()));
        Self {
            hosts: join_all(hosts).await,
        }
    }

    fn links(&self, rank: usize, ring: u64) -> StreamLinks {
        let peer = |(index, host): (usize, &Host)| Peer {
            task: identity(index).task,
            address: host.address.to_string(),
        };
        let peers = self.hosts.iter().enumerate().map(peer).collect();
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
async fn all_operations_work_over_links() {
    let algorithms = [
        None,
        Some(Algorithm::Doubling),
        Some(Algorithm::ReduceToOne),
    ];
    for ranks in [2, 3, 5] {
        let ring = Ring::new(ranks).await;
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
    let ring = Ring::new(5).await;
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
async fn a_message_that_is_not_due_ends_a_link_with_the_reason() {
    let ring = Ring::new(2).await;
    let links = ring.links(0, 1);
    let (outgoing, mut incoming) = raw_link(ring.hosts[0].address, greeting(1, 0)).await;
    let admitted = incoming.message().await.unwrap().unwrap();
    assert_eq!(admitted.kind, Some(Kind::Admitted(wire::Admitted {})));
    let again = Kind::Greeting(greeting(1, 0));
    outgoing.send(Ok(again.into())).await.unwrap();
    // The stream stays open: the link does not end by itself.
    let ended = tokio::time::timeout(PATIENCE, links.receive(1)).await;
    let error = ended.expect("it hangs").unwrap_err();
    assert!(error.reason.contains("not due"), "{error}");
}

#[tokio::test]
async fn a_link_ends_when_the_peer_has_opened_another_one() {
    let ring = Ring::new(2).await;
    let links = ring.links(0, 1);
    let first = raw_link(ring.hosts[0].address, greeting(1, 0)).await;
    let waits = links.receive(1);
    let second = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut second = raw_link(ring.hosts[0].address, greeting(1, 0)).await;
        second.1.message().await.unwrap();
        second
    };
    // The first one stays open: the peer cannot tell that it has given it up.
    let (ended, _second) = tokio::join!(tokio::time::timeout(PATIENCE, waits), second);
    let error = ended.expect("it hangs").unwrap_err();
    assert!(error.reason.contains("another link"), "{error}");
    drop(first);
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
    let exchanges = [(); 2].map(|()| Exchange::once());
    let hosts = join_all((0..2).map(|index| host(index, exchanges[index].clone()))).await;
    let mut ring = Ring { hosts };
    let old = ring.groups(1, Dtype::F32).await;
    // The second task starts again, and opens its link while the first one is still in the ring.
    let again = ring.links(1, 1);
    let quick = tokio::time::timeout(Duration::from_millis(500), again.connect(0)).await;
    assert!(quick.is_err(), "it is admitted: {quick:?}");
    drop(old);
    // The first one starts again too, with another exchange and the same address.
    ring.hosts[0] = host(0, Exchange::once()).await;
    let groups = ring.groups(1, Dtype::F32).await;
    let mut reduced = vectors(2, 1000);
    all_reduce(&groups, &mut reduced).await;
    assert!(reduced.iter().all(|vector| is_sum(vector, 2)));
}
