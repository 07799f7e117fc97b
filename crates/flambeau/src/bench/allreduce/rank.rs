//! A process of the measurement. The first process leads: it starts the others, and broadcasts the number of
//! all-reduces.

use daemon::outln;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use collective::{
    Algorithm, CollectiveError, Exchange, Group, Identity, LinkService, Peer, StreamLinks,
    take_links,
};
use network::SystemNetwork;
use network::connections::{Connections, Limits, Port};
use network::listener::Listener;
use network::security::Security;
use network::transport::Listen;
use shared_proto::ids::{Epoch, Generation, RunNumber, Task, TaskId};
use shared_proto::payload::Dtype;
use shared_proto::task;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::runtime::Runtime;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::super::failed;
use crate::cluster::Transport;
use crate::error::CommandError;

/// The time in which all processes must be connected.
const PATIENCE: Duration = Duration::from_secs(20);

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    pub(super) elements: usize,
    pub(super) ranks: u32,
    pub(super) wire: &'a str,
    pub(super) algorithm: Option<&'a str>,
    pub(super) transport: Transport,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct RankArguments {
    /// This process, from 1.
    rank: u32,
    /// The address to listen on.
    listen: Listen,
    /// Elements of the vector.
    elements: usize,
    /// Numbers in which the vector travels.
    wire: String,
    /// The way to add up.
    algorithm: Option<String>,
}

/// A process of the measurement.
pub(super) struct Rank {
    group: Group<StreamLinks>,
    values: Vec<f32>,
    /// The other processes; empty except in the first process.
    others: Vec<Child>,
    _stop: DropGuard,
    _dir: Option<tempfile::TempDir>,
}

/// Returns the runtime of a process. It has one thread, like the network of a worker.
pub(super) fn runtime() -> Result<Runtime, CommandError> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build();
    runtime.map_err(CommandError::file("the runtime"))
}

/// A process that listens and has no group yet.
struct Listening {
    exchange: Exchange,
    address: String,
    stop: DropGuard,
}

impl Listening {
    async fn on(listen: &Listen, rank: u32) -> Result<Self, CommandError> {
        let listener = Listener::bind(listen).await;
        let listener = listener.map_err(|error| failed(&error))?;
        let address = listener.address().map_err(|error| failed(&error))?;
        let exchange = Exchange::default();
        exchange.belong_to(Identity {
            job: "bench".to_owned(),
            run: RunNumber(1),
            task: task(rank),
        });
        let service = LinkService {
            exchange: exchange.clone(),
            security: Security::default(),
        };
        let stop = CancellationToken::new();
        let places = Connections::new(Port::Data, Limits::new(256, None));
        task::spawn(take_links(service, listener, places, stop.clone()));
        Ok(Self {
            exchange,
            address: address.to_string(),
            stop: stop.drop_guard(),
        })
    }

    async fn join(
        self,
        rank: u32,
        addresses: Vec<String>,
        plan: Plan<'_>,
    ) -> Result<Rank, CommandError> {
        let peers: Vec<Peer> = (0..)
            .zip(addresses)
            .map(|(rank, address)| Peer {
                task: task(rank),
                address,
            })
            .collect();
        let (rank, ranks) = (rank as usize, peers.len());
        let network = Arc::new(SystemNetwork::default());
        let links = StreamLinks::new(&self.exchange, network, Epoch(1), rank, peers, PATIENCE);
        let links = links.map_err(|error| failed(&error))?;
        links.connect(0).await.map_err(|error| failed(&error))?;
        let wire = match plan.wire {
            "bf16" => Dtype::Bf16,
            "f16" => Dtype::F16,
            _ => Dtype::F32,
        };
        let group = Group::new(rank, ranks, links, wire);
        let group = match plan.algorithm.and_then(Algorithm::named) {
            Some(algorithm) => group.by(algorithm),
            None => group,
        };
        Ok(Rank {
            group,
            // Small enough that thousands of sums stay finite.
            values: vec![0.0; plan.elements],
            others: Vec::new(),
            _stop: self.stop,
            _dir: None,
        })
    }
}

fn task(rank: u32) -> Task {
    let id = TaskId::worker(rank);
    Task {
        id,
        generation: Generation(1),
    }
}

impl Rank {
    /// Starts the other processes, and connects with them.
    pub(super) async fn lead(plan: Plan<'_>) -> Result<Self, CommandError> {
        let dir = tempfile::tempdir().map_err(CommandError::file("a temporary folder"))?;
        let listen = |rank| listen(plan.transport, dir.path(), rank);
        let own = Listening::on(&listen(0)?, 0).await?;
        let (mut others, mut addresses) = (Vec::new(), vec![own.address.clone()]);
        let mut outputs = Vec::new();
        for rank in 1..plan.ranks {
            let (child, output, address) = start(rank, &listen(rank)?, plan).await?;
            others.push(child);
            outputs.push(output);
            addresses.push(address);
        }
        let line = serde_json::to_string(&addresses).map_err(|error| failed(&error))? + "\n";
        for child in &mut others {
            if let Some(input) = &mut child.stdin {
                let written = input.write_all(line.as_bytes()).await;
                written.map_err(|error| failed(&error))?;
            }
        }
        let joined = own.join(0, addresses, plan).await?;
        Ok(Self {
            others,
            _dir: Some(dir),
            ..joined
        })
    }

    /// Runs `count` all-reduces together with all ranks. Returns the seconds of each.
    pub(super) async fn all_reduce(&mut self, count: usize) -> Result<Vec<f64>, CollectiveError> {
        self.group.broadcast(0, &mut [count as f32]).await?;
        self.repeat(count).await
    }

    async fn repeat(&mut self, count: usize) -> Result<Vec<f64>, CollectiveError> {
        self.group.barrier().await?;
        let mut seconds = Vec::with_capacity(count);
        for _ in 0..count {
            let begun = Instant::now();
            self.group.all_reduce(&mut self.values).await?;
            seconds.push(begun.elapsed().as_secs_f64());
        }
        Ok(seconds)
    }

    /// Takes part in the all-reduces that the first process announces. Returns the error that ends this loop.
    async fn obey(&mut self) -> CollectiveError {
        loop {
            let mut count = [0.0];
            if let Err(error) = self.group.broadcast(0, &mut count).await {
                return error;
            }
            if let Err(error) = self.repeat(count[0] as usize).await {
                return error;
            }
        }
    }

    /// Ends the other processes by closing their standard input. A message over the links could be lost: a process that
    /// has to pass it on may end first.
    pub(super) async fn stop(mut self) -> Result<(), CommandError> {
        for child in &mut self.others {
            drop(child.stdin.take());
        }
        for mut child in self.others {
            let ended = child.wait().await.map_err(|error| failed(&error))?;
            if !ended.success() {
                return Err(failed(&"a process of the measurement has failed"));
            }
        }
        Ok(())
    }
}

fn listen(transport: Transport, dir: &Path, rank: u32) -> Result<Listen, CommandError> {
    match transport {
        Transport::Tcp => "127.0.0.1:0"
            .parse()
            .map_err(|error: String| failed(&error)),
        Transport::Unix => Ok(Listen::Unix(dir.join(format!("{rank}.sock")))),
    }
}

/// Starts a process. Returns it with its standard output and the address on which it listens, which is the first line
/// of this output.
async fn start(
    rank: u32,
    listen: &Listen,
    plan: Plan<'_>,
) -> Result<(Child, BufReader<tokio::process::ChildStdout>, String), CommandError> {
    let executable = std::env::current_exe().map_err(CommandError::file("this executable"))?;
    let mut child = Command::new(executable)
        .arg("bench-rank")
        .args([
            rank.to_string(),
            listen.to_string(),
            plan.elements.to_string(),
        ])
        .arg(plan.wire)
        .args(plan.algorithm)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| failed(&error))?;
    let output = child.stdout.take().ok_or_else(|| failed(&"no output"))?;
    let mut output = BufReader::new(output);
    let mut line = String::new();
    let read = output.read_line(&mut line).await;
    read.map_err(|error| failed(&error))?;
    Ok((child, output, line.trim().to_owned()))
}

/// Runs a process that follows the first one.
pub(crate) fn follow(arguments: &RankArguments) -> Result<(), CommandError> {
    runtime()?.block_on(async {
        let own = Listening::on(&arguments.listen, arguments.rank).await?;
        outln!("{}", own.address);
        let mut line = String::new();
        let mut input = BufReader::new(tokio::io::stdin());
        input
            .read_line(&mut line)
            .await
            .map_err(|error| failed(&error))?;
        let addresses: Vec<String> = serde_json::from_str(&line).map_err(|error| failed(&error))?;
        let plan = Plan {
            elements: arguments.elements,
            ranks: addresses.len() as u32,
            wire: &arguments.wire,
            algorithm: arguments.algorithm.as_deref(),
            transport: Transport::Tcp,
        };
        let mut rank = own.join(arguments.rank, addresses, plan).await?;
        line.clear();
        let ended = input.read_line(&mut line);
        tokio::pin!(ended);
        tokio::select! {
            biased;
            _ = &mut ended => return Ok(()),
            _ = rank.obey() => {}
        }
        // The first process notices a failure by its links, and ends. At the end of the measurement another process may have
        // ended before this one.
        drop(rank);
        let _ = ended.await;
        Ok(())
    })
}
