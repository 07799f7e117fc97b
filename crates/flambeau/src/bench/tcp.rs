//! The references: push, update and pull over plain TCP, with as little overhead as possible. Threads block, buffers
//! are reused, and there are no messages: both sides know the number of bytes.

use daemon::outln;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use clap::Args;
use shared_proto::kernel::Kernel;

use crate::error::CommandError;

/// The most bytes in one read or write. The overlapped reference has smaller chunks, which travel in both directions at
/// the same time.
const CHUNK: usize = 1 << 20;
const OVERLAPPED_CHUNK: usize = 256 << 10;

#[derive(Clone, Debug, Args)]
pub(crate) struct ServerArguments {
    /// Bytes of the weights.
    size: usize,
    /// Answer chunk by chunk, while more chunks arrive.
    #[arg(long)]
    overlapped: bool,
}

/// Runs the server of a reference: prints its address, serves one client, and ends when the client closes the stream.
pub(crate) fn serve(arguments: &ServerArguments) -> Result<(), CommandError> {
    let failed = || CommandError::file("the reference server");
    let listener = TcpListener::bind("127.0.0.1:0").map_err(failed())?;
    outln!("{}", listener.local_addr().map_err(failed())?);
    let (stream, _) = listener.accept().map_err(failed())?;
    stream.set_nodelay(true).map_err(failed())?;
    let weights = vec![0f32; arguments.size / size_of::<f32>()];
    let served = if arguments.overlapped {
        overlapped_server(stream, weights)
    } else {
        sequential_server(stream, weights)
    };
    // The client ends it by closing the stream.
    drop(served);
    Ok(())
}

fn update(weights: &mut [f32], gradient: &[u8]) {
    let gradient = bytemuck::cast_slice::<u8, [u8; 4]>(gradient);
    Kernel::best().run(|| {
        for (w, g) in weights.iter_mut().zip(gradient) {
            *w -= 0.01 * f32::from_le_bytes(*g);
        }
    });
}

fn sequential_server(mut stream: TcpStream, mut weights: Vec<f32>) -> std::io::Result<()> {
    let mut gradient = vec![0u8; size_of_val(&*weights)];
    loop {
        for chunk in gradient.chunks_mut(CHUNK) {
            stream.read_exact(chunk)?;
        }
        update(&mut weights, &gradient);
        for chunk in bytemuck::cast_slice(&weights).chunks(CHUNK) {
            stream.write_all(chunk)?;
        }
    }
}

/// Serves with two threads. One reads and updates, the other writes updated chunks; chunks of the weights pass
/// between them.
fn overlapped_server(mut stream: TcpStream, weights: Vec<f32>) -> std::io::Result<()> {
    let mut out = stream.try_clone()?;
    let chunks = weights.chunks(OVERLAPPED_CHUNK / size_of::<f32>());
    let count = chunks.len();
    let (updated, to_write) = sync_channel::<Vec<f32>>(count);
    let (written, to_update) = sync_channel::<Vec<f32>>(count);
    for chunk in chunks {
        let _ = written.send(chunk.to_vec());
    }
    std::thread::spawn(move || {
        for chunk in to_write {
            let bytes = bytemuck::cast_slice(&chunk);
            if out.write_all(bytes).is_err() || written.send(chunk).is_err() {
                return;
            }
        }
    });
    let mut gradient = vec![0u8; OVERLAPPED_CHUNK];
    for mut chunk in to_update {
        let gradient = &mut gradient[..size_of_val(&*chunk)];
        stream.read_exact(gradient)?;
        update(&mut chunk, gradient);
        if updated.send(chunk).is_err() {
            break;
        }
    }
    Ok(())
}

/// A reference's client, and the process that serves it.
pub(crate) struct Reference {
    server: Child,
    stream: TcpStream,
    gradient: Vec<u8>,
    weights: Vec<u8>,
    overlapped: bool,
}

impl Reference {
    pub(crate) fn start(size: usize, overlapped: bool) -> Result<Self, CommandError> {
        let failed = || CommandError::file("the reference server");
        let executable = std::env::current_exe().map_err(failed())?;
        let mut command = Command::new(executable);
        command.args(["bench-tcp-server", &size.to_string()]);
        if overlapped {
            command.arg("--overlapped");
        }
        let mut server = command.stdout(Stdio::piped()).spawn().map_err(failed())?;
        let mut line = String::new();
        if let Some(stdout) = server.stdout.take() {
            BufReader::new(stdout)
                .read_line(&mut line)
                .map_err(failed())?;
        }
        let address: SocketAddr = line.trim().parse().map_err(|_| CommandError::Start {
            name: "the reference server".to_owned(),
            reason: format!("it says {line:?}"),
        })?;
        let stream = TcpStream::connect(address).map_err(failed())?;
        stream.set_nodelay(true).map_err(failed())?;
        Ok(Self {
            server,
            stream,
            gradient: vec![0u8; size],
            weights: vec![0u8; size],
            overlapped,
        })
    }

    /// Repeats round trips for this time, and returns the seconds of each.
    pub(crate) fn measure(&mut self, time: Duration) -> Result<Vec<f64>, CommandError> {
        let begin = Instant::now();
        let mut seconds = Vec::new();
        while begin.elapsed() < time || seconds.len() < 3 {
            let at = Instant::now();
            self.round_trip()
                .map_err(CommandError::file("the reference's stream"))?;
            seconds.push(at.elapsed().as_secs_f64());
        }
        Ok(seconds)
    }

    fn round_trip(&mut self) -> std::io::Result<()> {
        let (stream, gradient, weights) = (&self.stream, &self.gradient, &mut self.weights);
        let send = |mut stream: &TcpStream, chunk: usize| {
            let mut chunks = gradient.chunks(chunk);
            chunks.try_for_each(|chunk| stream.write_all(chunk))
        };
        let receive = |weights: &mut [u8], mut stream: &TcpStream, chunk: usize| {
            let mut chunks = weights.chunks_mut(chunk);
            chunks.try_for_each(|chunk| stream.read_exact(chunk))
        };
        // Below a few chunks a thread costs more than it saves, and the kernel's buffers hold all bytes.
        if self.overlapped && gradient.len() > CHUNK {
            std::thread::scope(|scope| {
                scope.spawn(|| send(stream, OVERLAPPED_CHUNK));
                receive(weights, stream, OVERLAPPED_CHUNK)
            })
        } else {
            send(stream, CHUNK)?;
            receive(weights, stream, CHUNK)
        }
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let _ = self.server.wait();
    }
}
