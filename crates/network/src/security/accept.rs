//! Connections of callers: their handshakes, and refusals, which are logged and counted.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use metrics::counter;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{ReadAhead, Security, certificate_error};
use crate::connections::{Accepted, AcceptedStream, Guarded};
use shared_proto::quiet::Quiet;

/// The longest time for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// The most handshakes of a listener that run at the same time. Further ones wait.
pub(crate) const HANDSHAKES: usize = 1024;

/// Reasons for refusing a connection or call.
pub(super) const CERTIFICATE: &str = "certificate";
pub(super) const TOKEN: &str = "token";
const HANDSHAKE_BROKEN: &str = "handshake";

/// The time for which a refused connection stays open, so that the caller can read the reason.
const HANG_UP: Duration = Duration::from_secs(1);

/// The callers that a port is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Audience {
    /// Processes of the cluster, which may have to show certificates.
    Processes,
    /// Browsers, which have no certificates.
    Browsers,
}

impl Security {
    /// Returns the connections of a port for processes. If this process listens encrypted, a connection is returned
    /// after its handshake. If a handshake fails, or takes more than five seconds, the connection is closed and
    /// counted. If callers must have certificates, those with a valid certificate become members.
    pub fn accepted(&self, connections: BoxStream<'static, Guarded<TcpStream>>) -> AcceptedStream {
        self.handshakes(connections, Audience::Processes)
    }

    /// Returns the connections of a port for browsers, as [`accepted`](Self::accepted) does. Callers
    /// need no certificates, so the port must check the token.
    pub fn accepted_from_browsers(
        &self,
        connections: BoxStream<'static, Guarded<TcpStream>>,
    ) -> AcceptedStream {
        self.handshakes(connections, Audience::Browsers)
    }

    fn handshakes(
        &self,
        connections: BoxStream<'static, Guarded<TcpStream>>,
        audience: Audience,
    ) -> AcceptedStream {
        let security = self.clone();
        let greet = move |connection| {
            let security = security.clone();
            async move { security.greet(connection, audience).await.map(Ok) }
        };
        let greeted = connections.map(greet).buffer_unordered(HANDSHAKES);
        greeted.filter_map(std::future::ready).boxed()
    }

    /// Returns a connection to a port for processes, after its handshake if this process listens encrypted. Returns
    /// `None` if the handshake fails.
    pub(crate) async fn accept(&self, connection: Guarded<TcpStream>) -> Option<Accepted> {
        self.greet(connection, Audience::Processes).await
    }

    async fn greet(&self, connection: Guarded<TcpStream>, audience: Audience) -> Option<Accepted> {
        if !self.is_listening_encrypted() {
            return Some(connection.into());
        }
        let mutual = audience == Audience::Processes && self.demands_certificates();
        let material = self.material();
        let acceptor = match audience {
            Audience::Processes => material.listener.clone()?,
            Audience::Browsers => material.for_browsers.clone()?,
        };
        let caller = connection.caller().clone();
        let peer = caller.peer();
        let accept = acceptor.accept(ReadAhead::new(connection)).into_fallible();
        match timeout(HANDSHAKE, accept).await {
            Ok(Ok(_)) if mutual && !caller.admit() => {}
            Ok(Ok(stream)) => {
                let certificates = stream.get_ref().1.peer_certificates().map(<[_]>::to_vec);
                return Some(Accepted::secured(stream, caller, certificates.as_deref()));
            }
            Ok(Err((error, connection))) if certificate_error(&error).is_some() => {
                refused(CERTIFICATE, peer, &error);
                hang_up(connection.into_inner()).await;
            }
            Ok(Err((error, _))) => refused(HANDSHAKE_BROKEN, peer, &error),
            Err(_) => refused(HANDSHAKE_BROKEN, peer, &"nothing was shown in time"),
        }
        None
    }
}

/// Ends a connection so that the other side can still read the reason.
async fn hang_up(mut connection: Guarded<TcpStream>) {
    let drain = async {
        connection.shutdown().await?;
        tokio::io::copy(&mut connection, &mut tokio::io::sink()).await
    };
    let _ = timeout(HANG_UP, drain).await;
}

pub(super) fn refused(reason: &'static str, peer: Option<SocketAddr>, why: &dyn fmt::Display) {
    static LOG: Quiet = Quiet::new();
    count(reason, 1);
    if let Some(left_out) = LOG.admit() {
        tracing::warn!(
            reason,
            peer = peer.map(tracing::field::display),
            left_out,
            "refused: {why}"
        );
    }
}

fn count(reason: &'static str, refused: u64) {
    counter!("flambeau_refused_connections_total", "reason" => reason).increment(refused);
}

/// Sets the counters of refusals to 0, because a counter that does not exist yet has no rate.
pub(super) fn begin_to_count() {
    for reason in [CERTIFICATE, TOKEN, HANDSHAKE_BROKEN] {
        count(reason, 0);
    }
}
