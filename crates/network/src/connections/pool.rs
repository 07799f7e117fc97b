//! The places of a port, under one lock.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use metrics::{Counter, Gauge, counter, gauge};
use tokio::time::Instant;

use super::{Limits, Port};
use shared_proto::planted;

/// The shortest time between two log lines with the same reason.
const QUIET: Duration = Duration::from_secs(10);

/// The stage of a connection. All but members are newcomers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Standing {
    /// The connection has made no request.
    Silent = 0,
    /// The connection has made a request.
    Caller = 1,
    Member = 2,
}

/// The reason why a connection is closed, or not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dropped {
    /// The connection made no request in time.
    Silent = 1,
    /// The connection made room for a newer one.
    Crowded,
    /// The address has too many connections.
    Address,
    /// The members' places are all taken.
    Full,
    /// The system could not accept the connection.
    Accept,
}

impl Dropped {
    const ALL: [Self; 5] = [
        Self::Silent,
        Self::Crowded,
        Self::Address,
        Self::Full,
        Self::Accept,
    ];

    fn label(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::Crowded => "crowded",
            Self::Address => "address",
            Self::Full => "full",
            Self::Accept => "accept",
        }
    }
}

/// The state of a connection. Its socket, its port and its requests share it.
pub(super) struct Connection {
    number: u64,
    pub(super) peer: Option<SocketAddr>,
    standing: AtomicU8,
    /// The [`Dropped`] with which the connection was ended; 0 while it may stay.
    dropped: AtomicU8,
    /// The time of the connection's latest request, in milliseconds since the port began.
    called: AtomicU64,
    /// The position of the connection's arrival or latest request in the port's order of these events.
    pub(super) turn: AtomicU64,
    /// The task that reads from the connection, woken when this state changes.
    pub(super) reader: AtomicWaker,
}

impl Connection {
    pub(super) fn standing(&self) -> Standing {
        match self.standing.load(Relaxed) {
            0 => Standing::Silent,
            1 => Standing::Caller,
            _ => Standing::Member,
        }
    }

    pub(super) fn is_dropped(&self) -> bool {
        self.dropped.load(SeqCst) != 0
    }

    fn group(&self) -> Option<IpAddr> {
        self.peer.map(|peer| group(peer.ip()))
    }
}

/// Returns the address by which callers are counted. For IPv6 this is the network of 64 bits, because a host may have
/// all of its addresses.
fn group(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        v4 => v4,
    }
}

#[derive(Clone, Copy, Default)]
struct Count {
    all: usize,
    newcomers: usize,
}

#[derive(Default)]
struct Places {
    next: u64,
    /// Newcomers by number, so that the oldest comes first.
    newcomers: BTreeMap<u64, Arc<Connection>>,
    members: usize,
    by_address: HashMap<Option<IpAddr>, Count>,
}

impl Places {
    fn count(&mut self, connection: &Connection) -> &mut Count {
        self.by_address.entry(connection.group()).or_default()
    }

    fn remove(&mut self, connection: &Connection) {
        let newcomer = self.newcomers.remove(&connection.number).is_some();
        if !newcomer {
            self.members -= 1;
        }
        let count = self.count(connection);
        count.all -= 1;
        count.newcomers -= usize::from(newcomer);
        if count.all == 0 {
            self.by_address.remove(&connection.group());
        }
    }

    /// Returns the newcomer of the address `of` that has been silent longest. If `of` is `None`, takes the address with
    /// the most newcomers.
    fn first_to_go(&self, of: Option<Option<IpAddr>>) -> Option<Arc<Connection>> {
        if planted!(NoRoom) {
            return None;
        }
        let most = || {
            let most = self
                .by_address
                .iter()
                .max_by_key(|(_, count)| count.newcomers);
            most.map(|(address, _)| *address)
        };
        let address = of.or_else(most)?;
        let of_address = self.newcomers.values().filter(|c| c.group() == address);
        let first = of_address.min_by_key(|c| c.turn.load(Relaxed));
        first.cloned()
    }
}

/// For each reason, the time of the latest log line, and the number of drops since then that were not logged.
type Logged = [(Option<Instant>, u64); Dropped::ALL.len()];

/// The places of a port.
pub(super) struct Pool {
    pub(super) port: Port,
    limits: Limits,
    began: Instant,
    turns: AtomicU64,
    places: Mutex<Places>,
    logged: Mutex<Logged>,
    newcomers: Gauge,
    members: Gauge,
    drops: [Counter; Dropped::ALL.len()],
}

impl Pool {
    pub(super) fn new(port: Port, limits: Limits) -> Self {
        let label = port.label();
        let standing = |standing: &'static str| gauge!("flambeau_connections", "port" => label, "standing" => standing);
        let drops = Dropped::ALL.map(|reason| {
            counter!("flambeau_dropped_connections_total", "port" => label, "reason" => reason.label())
        });
        let pool = Self {
            port,
            limits,
            began: Instant::now(),
            turns: AtomicU64::new(0),
            places: Mutex::default(),
            logged: Mutex::default(),
            newcomers: standing("newcomer"),
            members: standing("member"),
            drops,
        };
        // A counter that does not exist yet has no rate.
        pool.drops.iter().for_each(|drops| drops.increment(0));
        pool.show(&pool.places());
        pool
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self, places: &Places) {
        self.newcomers.set(places.newcomers.len() as f64);
        self.members.set(places.members as f64);
    }

    fn turn(&self) -> u64 {
        self.turns.fetch_add(1, Relaxed)
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    /// Gives a newcomer a place. If all places of newcomers are taken, another newcomer loses its place.
    pub(super) fn open(&self, peer: Option<SocketAddr>) -> Result<Arc<Connection>, Dropped> {
        let mut gone = Vec::new();
        let opened = {
            let mut places = self.places();
            let opened = self.open_in(&mut places, peer, &mut gone);
            self.show(&places);
            opened
        };
        for (connection, reason) in gone {
            self.dropped(reason, connection.peer, None);
        }
        opened
    }

    fn open_in(
        &self,
        places: &mut Places,
        peer: Option<SocketAddr>,
        gone: &mut Vec<(Arc<Connection>, Dropped)>,
    ) -> Result<Arc<Connection>, Dropped> {
        let address = peer.map(|peer| group(peer.ip()));
        let of_address = places.by_address.get(&address).map_or(0, |count| count.all);
        if address.is_some() && of_address >= self.limits.per_address {
            let first = places.first_to_go(Some(address)).ok_or(Dropped::Address)?;
            end(places, &first, Dropped::Address);
            gone.push((first, Dropped::Address));
        }
        if places.newcomers.len() >= self.limits.newcomers {
            let first = places.first_to_go(None).ok_or(Dropped::Full)?;
            end(places, &first, Dropped::Crowded);
            gone.push((first, Dropped::Crowded));
        }
        let number = places.next;
        places.next += 1;
        let connection = Arc::new(Connection {
            number,
            peer,
            standing: AtomicU8::new(Standing::Silent as u8),
            dropped: AtomicU8::new(0),
            called: AtomicU64::new(0),
            turn: AtomicU64::new(self.turn()),
            reader: AtomicWaker::new(),
        });
        let count = places.count(&connection);
        count.all += 1;
        count.newcomers += 1;
        places.newcomers.insert(number, Arc::clone(&connection));
        Ok(connection)
    }

    pub(super) fn close(&self, connection: &Connection) {
        let mut places = self.places();
        if !connection.is_dropped() {
            connection.dropped.store(Dropped::Silent as u8, SeqCst);
            places.remove(connection);
            self.show(&places);
        }
    }

    /// Ends a connection that makes no requests, unless it has become a member's.
    pub(super) fn end_silent(&self, connection: &Connection) {
        let mut places = self.places();
        if !connection.is_dropped() && connection.standing() != Standing::Member {
            end(&mut places, connection, Dropped::Silent);
            self.show(&places);
            drop(places);
            self.dropped(Dropped::Silent, connection.peer, None);
        }
    }

    pub(super) fn record_request(&self, connection: &Connection) {
        connection.called.store(self.now(), Relaxed);
        connection.turn.store(self.turn(), Relaxed);
        let (silent, caller) = (Standing::Silent as u8, Standing::Caller as u8);
        let _ = connection
            .standing
            .compare_exchange(silent, caller, SeqCst, Relaxed);
        connection.reader.wake();
    }

    pub(super) fn has_room(&self, connection: &Connection) -> bool {
        connection.standing() == Standing::Member
            || self.places().members < self.limits.total - self.limits.newcomers
    }

    pub(super) fn admit(&self, connection: &Connection) -> bool {
        if connection.standing() == Standing::Member {
            return true;
        }
        let mut places = self.places();
        if connection.is_dropped() {
            return false;
        }
        if connection.standing() == Standing::Member {
            return true;
        }
        if places.members >= self.limits.total - self.limits.newcomers {
            end(&mut places, connection, Dropped::Full);
            self.show(&places);
            drop(places);
            self.dropped(Dropped::Full, connection.peer, None);
            return false;
        }
        places.newcomers.remove(&connection.number);
        places.members += 1;
        places.count(connection).newcomers -= 1;
        connection.standing.store(Standing::Member as u8, SeqCst);
        self.show(&places);
        drop(places);
        connection.reader.wake();
        true
    }

    /// Returns the time since the latest request of a caller that is not a member; `None` before its first request.
    pub(super) fn idle(&self, connection: &Connection) -> Option<Duration> {
        let called = connection.called.load(Relaxed);
        let caller = connection.standing() == Standing::Caller;
        caller.then(|| Duration::from_millis(self.now().saturating_sub(called)))
    }

    /// Counts a dropped connection. Logs it, unless one with the same reason was logged a short time ago.
    pub(super) fn dropped(
        &self,
        reason: Dropped,
        peer: Option<SocketAddr>,
        error: Option<&io::Error>,
    ) {
        let index = reason as usize - 1;
        self.drops[index].increment(1);
        let others = {
            let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
            let (last, others) = &mut logged[index];
            if last.is_some_and(|last| last.elapsed() < QUIET) {
                *others += 1;
                return;
            }
            *last = Some(Instant::now());
            std::mem::take(others)
        };
        let (port, reason) = (self.port.label(), reason.label());
        let peer = peer.map(tracing::field::display);
        match error {
            Some(error) => tracing::warn!(
                port,
                %error,
                others,
                "connections cannot be accepted; raise the limit of open files, or lower --max-connections"
            ),
            None => tracing::warn!(port, reason, peer, others, "dropped a connection"),
        }
    }
}

/// Takes a connection's place away. Its socket closes when its task runs next.
fn end(places: &mut Places, connection: &Connection, reason: Dropped) {
    places.remove(connection);
    connection.dropped.store(reason as u8, SeqCst);
    connection.reader.wake();
}
