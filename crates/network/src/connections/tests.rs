use std::net::Ipv4Addr;

use futures_util::{FutureExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{advance, timeout};

use super::pool::Standing;
use super::*;

fn from(host: u8) -> Option<SocketAddr> {
    Some(SocketAddr::from((Ipv4Addr::new(10, 0, 0, host), 1)))
}

fn limits(total: usize, newcomers: usize, per_address: usize) -> Limits {
    Limits {
        total,
        newcomers,
        per_address,
    }
}

fn is_open(place: &Place) -> bool {
    !place.0.connection.is_dropped()
}

#[test]
fn a_flood_displaces_itself_and_neither_members_nor_others() {
    let port = Connections::new(Port::Data, limits(40, 8, 40));
    let member = port.open(from(1)).unwrap();
    assert!(member.0.admit());
    let caller = port.open(from(2)).unwrap();
    let silent = port.open(from(2)).unwrap();
    let flood: Vec<_> = (0..100).map(|_| port.open(from(3)).unwrap()).collect();
    let open = flood.iter().filter(|place| is_open(place)).count();
    assert_eq!(open, 6);
    assert!(is_open(&flood[99]) && !is_open(&flood[0]));
    assert!(is_open(&member) && is_open(&caller) && is_open(&silent));
    drop(flood);
    // Within one address, the longest silent connection goes first.
    for _ in 0..100 {
        let _flood = [0; 5].map(|_| port.open(from(2)).unwrap());
        caller.0.record_request();
    }
    let flood: Vec<_> = (0..7).map(|_| port.open(from(2)).unwrap()).collect();
    assert!(is_open(&member) && is_open(&caller) && !is_open(&silent));
    assert!(caller.0.admit() && flood.iter().all(is_open));
}

#[test]
fn members_have_the_rest_of_the_places_and_an_address_its_share() {
    let port = Connections::new(Port::Data, limits(6, 2, 3));
    let admitted = |host| {
        let place = port.open(from(host))?;
        place.0.admit().then_some(place)
    };
    let mut members: Vec<_> = (0..3).filter_map(|_| admitted(1)).collect();
    // A fourth connection of this address displaces none, since all of them are members.
    assert!(members.len() == 3 && port.open(from(1)).is_none());
    members.extend(admitted(2));
    assert_eq!(members.len(), 4);
    let late = port.open(from(3)).unwrap();
    assert!(!late.0.admit() && !is_open(&late));
    drop(members.remove(0));
    members.extend(admitted(3));
    assert_eq!(members.len(), 4);
    assert!(members.iter().all(is_open));
    drop(members);
    assert!(admitted(1).is_some());
}

#[test]
fn a_network_of_ipv6_counts_as_one_address() {
    let port = Connections::new(Port::Data, limits(100, 50, 2));
    let open = |text: &str| port.open(Some(SocketAddr::new(text.parse().unwrap(), 1)));
    let [first, second] = ["2001:db8::1", "2001:db8::2"].map(|text| open(text).unwrap());
    let other = open("2001:db8:0:1::1").unwrap();
    let third = open("2001:db8::3").unwrap();
    assert!(!is_open(&first) && is_open(&second) && is_open(&other) && is_open(&third));
    assert!(open("::ffff:10.0.0.1").is_some());
}

/// Returns the client's end of a connection, and the guarded end of the listener.
fn connection(port: &Connections) -> (tokio::io::DuplexStream, Guarded<tokio::io::DuplexStream>) {
    let (client, server) = tokio::io::duplex(1 << 20);
    (client, Guarded::new(server, port.open(from(1)).unwrap()))
}

#[tokio::test(start_paused = true)]
async fn whoever_asks_for_nothing_is_hung_up_on() {
    let port = Connections::new(Port::Data, limits(40, 8, 40));
    let (_silent, mut server) = connection(&port);
    let mut byte = [0; 1];
    let error = timeout(2 * OPENING, server.read(&mut byte)).await.unwrap();
    assert_eq!(error.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);

    let (_caller, mut server) = connection(&port);
    server.caller().record_request();
    assert!(timeout(IDLE / 2, server.read(&mut byte)).await.is_err());
    server.caller().record_request();
    assert!(timeout(IDLE * 3 / 4, server.read(&mut byte)).await.is_err());
    assert!(
        timeout(IDLE, server.read(&mut byte))
            .await
            .unwrap()
            .is_err()
    );

    let (_member, mut server) = connection(&port);
    assert!(server.caller().admit());
    assert!(timeout(100 * IDLE, server.read(&mut byte)).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_waits_learns_that_its_place_is_gone() {
    let port = Connections::new(Port::Data, limits(4, 1, 4));
    let (_client, mut server) = connection(&port);
    let reading = tokio::spawn(async move { server.read_u8().await });
    tokio::task::yield_now().await;
    let _next = port.open(from(1)).unwrap();
    assert!(
        timeout(OPENING / 10, reading)
            .await
            .unwrap()
            .unwrap()
            .is_err()
    );
}

#[tokio::test(start_paused = true)]
async fn a_newcomer_may_send_little_until_it_is_admitted() {
    let port = Connections::new(Port::Data, limits(40, 8, 40));
    let (mut client, mut server) = connection(&port);
    client.write_all(&vec![7; 10 * FIRST_BYTES]).await.unwrap();
    let mut bytes = vec![0; FIRST_BYTES];
    server.read_exact(&mut bytes).await.unwrap();
    assert!(server.read_u8().now_or_never().is_none());
    let caller = server.caller().clone();
    let rest = tokio::spawn(async move {
        let mut rest = vec![0; 9 * FIRST_BYTES];
        server.read_exact(&mut rest).await.map(|_| rest)
    });
    advance(Duration::from_secs(1)).await;
    assert!(caller.admit());
    let rest = timeout(OPENING, rest).await.unwrap().unwrap().unwrap();
    assert!(rest.iter().all(|byte| *byte == 7));
}

#[tokio::test]
async fn places_come_back_when_connections_end() {
    let port = Connections::new(Port::Data, limits(8, 2, 8));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut incoming = std::pin::pin!(port.clone().incoming(listener));
    for _ in 0..20 {
        let client = TcpStream::connect(address).await.unwrap();
        let server = incoming.next().await.unwrap();
        assert!(server.caller().admit());
        assert_eq!(server.caller().peer(), client.local_addr().ok());
    }
    let server = port.open(from(1)).unwrap();
    assert_eq!(server.0.connection.standing(), Standing::Silent);
}

/// A listener that fails for a while, as one without descriptors does.
struct Stuck(std::sync::atomic::AtomicUsize);

impl Door for Stuck {
    type Io = ();

    async fn accept(&self) -> io::Result<((), Option<SocketAddr>)> {
        match self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
            ..9 => Err(io::Error::from_raw_os_error(24)),
            _ => Ok(((), from(1))),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn where_nothing_can_be_accepted_the_listener_waits_longer_and_longer() {
    let port = Connections::new(Port::Data, limits(8, 2, 8));
    let began = tokio::time::Instant::now();
    port.accept(&Stuck(0.into())).await;
    let waited = began.elapsed();
    assert!(waited > Duration::from_secs(3) && waited < Duration::from_secs(5));
}
