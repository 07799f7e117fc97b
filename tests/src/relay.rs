//! A slow and unreliable network in user space: a relay that forwards each byte after a delay, and cuts connections
//! at random.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

/// The number of chunks that may be under way in one direction. Beyond it, the sender is held back.
const UNDER_WAY: usize = 1024;

/// The properties of the network.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// The delay of each byte, each way.
    pub delay: Duration,
    /// The mean life of connections, which live for 0.5 to 1.5 times as long; none for no cuts.
    pub life: Option<Duration>,
    /// The seed of the connections' lives.
    pub seed: u64,
}

/// A relay to one address, which may be set after the start. It serves until the process ends.
#[derive(Clone, Debug)]
pub struct Relay {
    address: SocketAddr,
    target: Arc<OnceLock<SocketAddr>>,
    cuts: Arc<AtomicUsize>,
    silent: Arc<AtomicBool>,
}

impl Relay {
    /// Listens on a free port.
    pub fn start(weather: Weather) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Self {
            address: listener.local_addr().unwrap(),
            target: Arc::default(),
            cuts: Arc::default(),
            silent: Arc::default(),
        };
        let accepting = relay.clone();
        spawn(move || {
            let mut random = fastrand::Rng::with_seed(weather.seed);
            for caller in listener.incoming().flatten() {
                let life = weather.life.map(|life| life.mul_f64(0.5 + random.f64()));
                let relay = accepting.clone();
                spawn(move || relay.serve(&caller, weather.delay, life));
            }
        });
        relay
    }

    /// Returns the address that it listens on.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Sets the address that it forwards to. Earlier callers wait for this.
    pub fn lead_to(&self, target: &str) {
        self.target.set(target.parse().unwrap()).unwrap();
    }

    /// Forwards nothing, and ends no connection, like a network with a pulled cable.
    pub fn fall_silent(&self) {
        self.silent.store(true, Relaxed);
    }

    /// Forwards all bytes again, including those that were held back.
    pub fn speak_again(&self) {
        self.silent.store(false, Relaxed);
    }

    /// Returns the number of connections that it has cut.
    pub fn cuts(&self) -> usize {
        self.cuts.load(Relaxed)
    }

    fn serve(&self, caller: &TcpStream, delay: Duration, life: Option<Duration>) {
        let Ok(called) = TcpStream::connect(self.target.wait()) else {
            return;
        };
        let pair = [caller, &called];
        if pair.iter().any(|side| side.set_nodelay(true).is_err()) {
            return;
        }
        let [there, back] = [(caller, &called), (&called, caller)].map(|(from, to)| {
            self.carry(from.try_clone().unwrap(), to.try_clone().unwrap(), delay)
        });
        if let Some(life) = life {
            sleep(life);
            // A connection that both sides have closed already is not cut.
            let cut = pair.map(|side| side.shutdown(Shutdown::Both).is_ok());
            self.cuts
                .fetch_add(usize::from(cut == [true, true]), Relaxed);
        }
        let _ = (there.join(), back.join());
    }

    /// Forwards all pieces in order, each after its delay.
    fn carry(
        &self,
        mut from: TcpStream,
        mut to: TcpStream,
        delay: Duration,
    ) -> std::thread::JoinHandle<()> {
        let silent = Arc::clone(&self.silent);
        let (sender, pieces) = mpsc::sync_channel::<(Instant, Vec<u8>)>(UNDER_WAY);
        let reader = spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            while let Ok(length @ 1..) = from.read(&mut buffer) {
                let piece = (Instant::now() + delay, buffer[..length].to_vec());
                if sender.send(piece).is_err() {
                    return;
                }
            }
        });
        spawn(move || {
            for (due, piece) in pieces {
                sleep(due.saturating_duration_since(Instant::now()));
                while silent.load(Relaxed) {
                    sleep(Duration::from_millis(20));
                }
                if to.write_all(&piece).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
            let _ = reader.join();
        })
    }
}
