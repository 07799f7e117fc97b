//! Connections of callers: their handshakes, and refusals, which are logged and counted.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use metrics::counter;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{ReadAhead, SecureStream, Security, certificate_error};
use crate::connections::Guarded;
use crate::quiet::Quiet;

/// The longest time for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// The most handshakes at a time.
const HANDSHAKES: usize = 1024;

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
    /// Returns the connections of a listener that has a certificate, after their handshakes. If a handshake fails, or
    /// takes more than five seconds, the connection is closed and counted. If callers must have certificates, those
    /// that pass are members. Up to 1,024 handshakes run at a time; more wait.
    pub fn secured<S: Stream<Item = io::Result<Guarded<TcpStream>>>>(
        &self,
        incoming: S,
    ) -> impl Stream<Item = io::Result<SecureStream>> + use<S> {
        self.handshakes(incoming, Audience::Processes)
    }

    /// Returns the connections of a port for browsers after their handshakes, as [`secured`](Self::secured) does. Callers
    /// need no certificates, so the port must check the token.
    pub fn secured_for_browsers<S: Stream<Item = io::Result<Guarded<TcpStream>>>>(
        &self,
        incoming: S,
    ) -> impl Stream<Item = io::Result<SecureStream>> + use<S> {
        self.handshakes(incoming, Audience::Browsers)
    }

    fn handshakes<S: Stream<Item = io::Result<Guarded<TcpStream>>>>(
        &self,
        incoming: S,
        audience: Audience,
    ) -> impl Stream<Item = io::Result<SecureStream>> + use<S> {
        let security = self.clone();
        let greet = move |connection: io::Result<Guarded<TcpStream>>| {
            let security = security.clone();
            async move {
                match connection {
                    Ok(connection) => security.greet(connection, audience).await.map(Ok),
                    Err(error) => Some(Err(error)),
                }
            }
        };
        let greeted = incoming.map(greet).buffer_unordered(HANDSHAKES);
        greeted.filter_map(std::future::ready)
    }

    async fn greet(
        &self,
        connection: Guarded<TcpStream>,
        audience: Audience,
    ) -> Option<SecureStream> {
        let mutual = audience == Audience::Processes && self.demands_certificates();
        let material = self.material();
        // Users of this function check for a certificate first.
        let acceptor = match audience {
            Audience::Processes => material.listener.clone()?,
            Audience::Browsers => material.for_browsers.clone()?,
        };
        let caller = connection.caller().clone();
        let peer = caller.peer();
        let accept = acceptor.accept(ReadAhead::new(connection)).into_fallible();
        match timeout(HANDSHAKE, accept).await {
            Ok(Ok(_)) if mutual && !caller.admit() => {}
            Ok(Ok(stream)) => return Some(stream),
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

/// Sets the counters of refusals to 0: a counter that does not exist yet has no rate.
pub(super) fn begin_to_count() {
    for reason in [CERTIFICATE, TOKEN, HANDSHAKE_BROKEN] {
        count(reason, 0);
    }
}
