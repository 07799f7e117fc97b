//! Authentication: certificates of one private authority, and a job's token.
//!
//! A certificate is one role's: it is valid for the name `ROLE.flambeau`, wherever its holder runs.
//! A caller verifies the name of the role that it means to reach, so a worker's certificate does not
//! make a process a server. A process that registers, or opens a session, must hold a certificate of
//! its role.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use http::{Extensions, HeaderMap, HeaderValue, header};
use metrics::counter;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use subtle::ConstantTimeEq;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tonic::service::Interceptor;
use tonic::transport::server::TlsConnectInfo;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};

use crate::connections::{Caller, Guarded};
use crate::ids::Role;
use crate::planted;
use crate::quiet::Quiet;
use crate::transport;

/// The longest time for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// The most handshakes at a time.
const HANDSHAKES: usize = 1024;

/// Reasons for refusing a connection or call.
const CERTIFICATE: &str = "certificate";
const TOKEN: &str = "token";
const HANDSHAKE_BROKEN: &str = "handshake";

/// The beginning of the error text when a peer refuses a certificate.
const ALERT: &str = "received fatal alert: ";

/// How long a caller that is refused may take to read why.
const HANG_UP: Duration = Duration::from_secs(1);

/// The text before the token in its header.
const BEARER: &str = "Bearer ";

/// A TCP connection whose caller has shown its certificate, if one is demanded.
pub type SecureStream = tokio_rustls::server::TlsStream<Guarded<TcpStream>>;

/// The files that a process is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecurityFiles {
    /// The authority that has signed all certificates.
    pub authority: Option<PathBuf>,
    /// This process's certificate.
    pub certificate: Option<PathBuf>,
    /// The private key of the certificate.
    pub key: Option<PathBuf>,
    /// Callers need no certificates; listeners have theirs.
    pub anonymous_callers: bool,
    /// The job's token.
    pub token: Option<PathBuf>,
}

/// The credentials of a process, and those that it demands of its callers. By default there are none,
/// and calls travel in the clear.
#[derive(Clone, Default)]
pub struct Security {
    caller: Option<ClientTlsConfig>,
    listener: Option<TlsAcceptor>,
    /// Callers must have certificates.
    mutual: bool,
    /// When the own certificate is no longer valid, in seconds since 1970.
    expires: Option<i64>,
    /// The token as the value of a header.
    token: Option<HeaderValue>,
}

impl fmt::Debug for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Security")
            .field("calls_are_encrypted", &self.caller.is_some())
            .field("listens_encrypted", &self.listener.is_some())
            .field("callers_have_certificates", &self.mutual)
            .field("token", &self.token.is_some())
            .finish()
    }
}

/// An error in the files that secure a process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecurityError {
    /// Some files are of use only together.
    #[error("{0}")]
    Incomplete(&'static str),
    /// A file cannot be read.
    #[error("cannot read {path:?}: {error}")]
    Unreadable {
        /// Its path.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{path:?} cannot be used: {what}")]
    Malformed {
        /// Its path.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

impl Security {
    /// Reads the files.
    ///
    /// # Errors
    /// As the variants of [`SecurityError`] say.
    pub fn load(files: &SecurityFiles) -> Result<Self, SecurityError> {
        let token = files.token.as_deref().map(read_token).transpose()?;
        let (Some(authority), certificate, key) =
            (&files.authority, &files.certificate, &files.key)
        else {
            let some = files.certificate.is_some() || files.key.is_some();
            return if some || files.anonymous_callers {
                Err(SecurityError::Incomplete(
                    "--tls-cert, --tls-key and --tls-callers need --tls-ca too: the authority by which others are recognised",
                ))
            } else {
                Ok(Self {
                    token,
                    ..Self::default()
                })
            };
        };
        let ca = read(authority)?;
        let roots = roots(authority, &ca)?;
        let mut caller = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&ca));
        let (mut listener, mut expires) = (None, None);
        match (certificate, key) {
            (Some(certificate), Some(key)) => {
                let (chain, secret) = (read(certificate)?, read(key)?);
                caller = caller.identity(Identity::from_pem(&chain, &secret));
                let config = listening(
                    (authority, roots),
                    (certificate, &chain),
                    (key, &secret),
                    files,
                )?;
                listener = Some(TlsAcceptor::from(Arc::new(config)));
                expires = Some(end_of(certificate, &chain)?);
            }
            (None, None) => {}
            _ => {
                return Err(SecurityError::Incomplete(
                    "--tls-cert and --tls-key are of use only together",
                ));
            }
        }
        let security = Self {
            caller: Some(caller),
            listener,
            mutual: !files.anonymous_callers,
            expires,
            token,
        };
        // Errors in the files show now, not at the first call.
        let tried = security.endpoint("localhost:1", Role::Coordinator);
        tried.map_err(|error| SecurityError::Malformed {
            path: authority.clone(),
            what: chain_of(&error),
        })?;
        Ok(security)
    }

    /// Returns the endpoint of a peer of some role at `address`, given as host:port or as unix:PATH. The
    /// permissions of a socket file decide who may use it; nothing is encrypted there.
    ///
    /// # Errors
    /// If the address is invalid, or the credentials cannot be used.
    pub fn endpoint(&self, address: &str, role: Role) -> Result<Endpoint, tonic::transport::Error> {
        match &self.caller {
            Some(caller) if !transport::is_socket_file(address) => {
                transport::endpoint("https", address)?
                    .tls_config(caller.clone().domain_name(name_of(role)))
            }
            _ => transport::endpoint("http", address),
        }
    }

    /// When the own certificate is no longer valid, in seconds since 1970.
    pub fn expires(&self) -> Option<i64> {
        self.expires
    }

    /// What a caller adds to its calls.
    pub fn credentials(&self) -> Credentials {
        Credentials(self.token.clone())
    }

    /// Returns whether callers at a port must use TLS.
    pub fn is_listening_encrypted(&self) -> bool {
        self.listener.is_some()
    }

    /// Fails where a port would be open to all callers though they are to have certificates.
    ///
    /// # Errors
    /// If there is an authority, but no certificate to listen with.
    pub fn for_listening(&self) -> Result<(), SecurityError> {
        if self.caller.is_some() && self.listener.is_none() {
            return Err(SecurityError::Incomplete(
                "who listens needs --tls-cert and --tls-key, not only --tls-ca",
            ));
        }
        Ok(())
    }

    /// Returns the connections of a listener that has a certificate, after their handshakes. A connection
    /// whose handshake fails, or takes more than five seconds, is closed and counted. Where callers must
    /// have certificates, those that pass are members. Up to 1,024 handshakes run at a time; more wait.
    pub fn secured<S: Stream<Item = io::Result<Guarded<TcpStream>>>>(
        &self,
        incoming: S,
    ) -> impl Stream<Item = io::Result<SecureStream>> + use<S> {
        let acceptor = self.listener.clone();
        let mutual = self.mutual;
        let greet = move |connection: io::Result<Guarded<TcpStream>>| {
            let acceptor = acceptor.clone();
            async move {
                let (connection, acceptor) = match (connection, acceptor) {
                    (Ok(connection), Some(acceptor)) => (connection, acceptor),
                    // Callers of this function check for a certificate first.
                    (Ok(_), None) => return None,
                    (Err(error), _) => return Some(Err(error)),
                };
                let caller = connection.caller().clone();
                let peer = caller.peer();
                let accept = acceptor.accept(connection).into_fallible();
                match timeout(HANDSHAKE, accept).await {
                    Ok(Ok(_)) if mutual && !caller.admit() => {}
                    Ok(Ok(stream)) => return Some(Ok(stream)),
                    Ok(Err((error, connection))) if certificate_error(&error).is_some() => {
                        refused(CERTIFICATE, peer, &error);
                        hang_up(connection).await;
                    }
                    Ok(Err((error, _))) => refused(HANDSHAKE_BROKEN, peer, &error),
                    Err(_) => refused(HANDSHAKE_BROKEN, peer, &"nothing was shown in time"),
                }
                None
            }
        };
        let greeted = incoming.map(greet).buffer_unordered(HANDSHAKES);
        greeted.filter_map(std::future::ready)
    }

    /// Checks that a call has the token, where there is one, and makes its connection a member's.
    ///
    /// # Errors
    /// `Unauthenticated`, counted, if it has not; `ResourceExhausted` if all places are taken.
    pub fn check_token(&self, headers: &HeaderMap, extensions: &Extensions) -> Result<(), Status> {
        let Some(token) = &self.token else {
            return Ok(());
        };
        let shown = headers.get(header::AUTHORIZATION);
        let shown = shown.map_or(&b""[..], HeaderValue::as_bytes);
        let missing_is_fine = shown.is_empty() && planted!(NoToken);
        if bool::from(token.as_bytes().ct_eq(shown)) || missing_is_fine {
            return match Caller::of(extensions) {
                Some(caller) if !caller.admit() => Err(crowded()),
                _ => Ok(()),
            };
        }
        let what = if shown.is_empty() { "missing" } else { "wrong" };
        let what = format!("the job's token is {what}; give every process the same --token-file");
        refused(TOKEN, peer_of(extensions), &what);
        Err(Status::unauthenticated(what))
    }

    /// Checks that a caller has a certificate of this role, where certificates are demanded. Callers
    /// through a socket file need none.
    ///
    /// # Errors
    /// `PermissionDenied`, counted, if it has not.
    pub fn check_role(&self, extensions: &Extensions, role: Role) -> Result<(), Status> {
        let through_file = Caller::of(extensions).is_some_and(|caller| caller.peer().is_none());
        if self.listener.is_none() || !self.mutual || through_file || has_role(extensions, role) {
            return Ok(());
        }
        let what = format!(
            "the caller's certificate is not one of a {role}: it is not valid for {}",
            name_of(role)
        );
        refused(CERTIFICATE, peer_of(extensions), &what);
        Err(Status::permission_denied(what))
    }
}

/// What a caller adds to its calls.
#[derive(Clone, Debug, Default)]
pub struct Credentials(Option<HeaderValue>);

impl Credentials {
    /// Adds the token to the headers of a call.
    pub fn add(&self, headers: &mut HeaderMap) {
        if let Some(token) = &self.0 {
            headers.insert(header::AUTHORIZATION, token.clone());
        }
    }
}

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let mut headers = std::mem::take(request.metadata_mut()).into_headers();
        self.add(&mut headers);
        *request.metadata_mut() = tonic::metadata::MetadataMap::from_headers(headers);
        Ok(request)
    }
}

/// Returns the name that a role's certificates are valid for.
pub fn name_of(role: Role) -> String {
    format!("{role}.flambeau")
}

/// Returns what is wrong with a peer's certificate, if an error comes from there.
pub fn certificate_error(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        let inner = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        let tls = error
            .downcast_ref::<rustls::Error>()
            .or_else(|| inner.and_then(|inner| inner.downcast_ref()));
        if let Some(tls) = tls {
            return Some(tls.to_string());
        }
        next = error.source();
    }
    // A listener rejects a certificate after HTTP/2 has begun, which keeps only the text of the error.
    let words = chain_of(error);
    words.find(ALERT).map(|at| words[at..].to_owned())
}

/// Returns the answer to a caller for which the members have no place.
pub fn crowded() -> Status {
    Status::resource_exhausted(
        "all places of this port are taken; raise --max-connections, or use more servers",
    )
}

fn has_role(extensions: &Extensions, role: Role) -> bool {
    let info = extensions.get::<TlsConnectInfo<Caller>>();
    let certificates = info.and_then(TlsConnectInfo::peer_certs);
    let first = certificates.as_ref().and_then(|chain| chain.first());
    let first = first.and_then(|der| webpki::EndEntityCert::try_from(der).ok());
    let name = ServerName::try_from(name_of(role)).ok();
    first
        .zip(name)
        .is_some_and(|(first, name)| first.verify_is_valid_for_subject_name(&name).is_ok())
}

fn peer_of(extensions: &Extensions) -> Option<SocketAddr> {
    Caller::of(extensions).and_then(Caller::peer)
}

/// Ends a connection so that the other side can still read why.
async fn hang_up(mut connection: Guarded<TcpStream>) {
    let drain = async {
        connection.shutdown().await?;
        tokio::io::copy(&mut connection, &mut tokio::io::sink()).await
    };
    let _ = timeout(HANG_UP, drain).await;
}

fn refused(reason: &'static str, peer: Option<SocketAddr>, why: &dyn fmt::Display) {
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
pub fn begin_to_count() {
    for reason in [CERTIFICATE, TOKEN, HANDSHAKE_BROKEN] {
        count(reason, 0);
    }
}

fn wrong(path: &Path, what: &impl fmt::Display) -> SecurityError {
    SecurityError::Malformed {
        path: path.to_owned(),
        what: what.to_string(),
    }
}

fn roots(path: &Path, pem: &[u8]) -> Result<RootCertStore, SecurityError> {
    let mut roots = RootCertStore::empty();
    for root in certificates(pem).map_err(|what| wrong(path, &what))? {
        roots.add(root).map_err(|error| wrong(path, &error))?;
    }
    Ok(roots)
}

fn listening(
    (ca_path, roots): (&Path, RootCertStore),
    (chain_path, chain): (&Path, &[u8]),
    (key_path, key): (&Path, &[u8]),
    files: &SecurityFiles,
) -> Result<ServerConfig, SecurityError> {
    let chain = certificates(chain).map_err(|what| wrong(chain_path, &what))?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| wrong(key_path, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(chain_path, &error))?;
    let config = if files.anonymous_callers {
        config.with_no_client_auth()
    } else {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
        let verifier = verifier.build().map_err(|error| wrong(ca_path, &error))?;
        config.with_client_cert_verifier(verifier)
    };
    let mut config = config
        .with_single_cert(chain, key)
        .map_err(|error| wrong(key_path, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

/// Returns the time at which the first certificate of a chain expires.
fn end_of(path: &Path, chain: &[u8]) -> Result<i64, SecurityError> {
    let chain = certificates(chain).map_err(|what| wrong(path, &what))?;
    let first = chain.first().map_or(&b""[..], AsRef::as_ref);
    let (_, first) = x509_parser::parse_x509_certificate(first).map_err(|e| wrong(path, &e))?;
    Ok(first.validity().not_after.timestamp())
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(none) if none.is_empty() => Err("there is no certificate in it".to_owned()),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(error.to_string()),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, SecurityError> {
    std::fs::read(path).map_err(|error| SecurityError::Unreadable {
        path: path.to_owned(),
        error,
    })
}

fn read_token(path: &Path) -> Result<HeaderValue, SecurityError> {
    let malformed = |what: &str| SecurityError::Malformed {
        path: path.to_owned(),
        what: what.to_owned(),
    };
    let text =
        String::from_utf8(read(path)?).map_err(|_| malformed("a token is a line of text"))?;
    let token = text.trim();
    if token.is_empty() {
        return Err(malformed("there is no token in it"));
    }
    let value = HeaderValue::from_str(&format!("{BEARER}{token}"));
    let mut value = value.map_err(|_| malformed("a token is one line of visible ASCII"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Returns the message of an error and those of its causes, each once, in words for people.
pub fn chain_of(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = said(error);
    let mut source = error.source();
    while let Some(error) = source {
        let more = said(error);
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

/// Returns the message of one error. The text of a status would show its cause in debug formatting.
fn said(error: &(dyn std::error::Error + 'static)) -> String {
    match error.downcast_ref::<Status>() {
        Some(status) => status.message().to_owned(),
        None => error.to_string(),
    }
}
