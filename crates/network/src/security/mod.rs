//! Authentication: certificates of one private authority, and a job's token.
//!
//! A certificate is for one role: it is valid for the name `ROLE.flambeau`, on any host. A caller verifies the name
//! of the role that it calls, so a process with a worker's certificate cannot act as a server. A process that
//! registers, or opens a session, must have a certificate of its role.
//!
//! The files may be replaced at any time ([`Security::follow_files`]). Existing connections stay; each handshake and
//! each call uses the newest credentials.

mod accept;
mod dial;
mod error;
mod material;
mod read_ahead;
mod reload;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use http::{Extensions, HeaderMap, HeaderValue, header};
use rustls::pki_types::ServerName;
use subtle::{Choice, ConstantTimeEq};
use tonic::service::Interceptor;
use tonic::{Request, Status};

pub use self::dial::Remote;
pub use self::error::{Mismatch, SecurityError, certificate_error, chain_of};

pub(crate) use self::accept::HANDSHAKES;
use self::accept::{CERTIFICATE, TOKEN, refused};
use self::material::{Contents, Material};
use self::read_ahead::ReadAhead;
use self::reload::Known;
use crate::connections::{Caller, Peer};
use crate::transport;
use shared_proto::ids::Role;
use shared_proto::planted;

/// The files with the credentials of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecurityFiles {
    /// The authorities that have signed all certificates.
    pub authority: Option<PathBuf>,
    /// This process's certificate.
    pub certificate: Option<PathBuf>,
    /// The private key of the certificate.
    pub key: Option<PathBuf>,
    /// True if callers need no certificates; listeners still have theirs.
    pub anonymous_callers: bool,
    /// The tokens of the job, one on each line. The first is sent; all are accepted.
    pub token: Option<PathBuf>,
}

/// The credentials of a process, and those that it demands of its callers. By default there are none, and calls are not
/// encrypted.
#[derive(Clone, Default)]
pub struct Security(Arc<Shared>);

#[derive(Default)]
struct Shared {
    files: SecurityFiles,
    /// The credentials in use.
    material: RwLock<Arc<Material>>,
    known: Mutex<Known>,
}

impl fmt::Debug for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Security")
            .field("calls_are_encrypted", &self.files().authority.is_some())
            .field("listens_encrypted", &self.is_listening_encrypted())
            .field("callers_have_certificates", &self.demands_certificates())
            .field("token", &self.files().token.is_some())
            .finish()
    }
}

impl Security {
    /// Reads the files.
    ///
    /// # Errors
    /// See the variants of [`SecurityError`].
    pub fn load(files: &SecurityFiles) -> Result<Self, SecurityError> {
        let contents = Contents::read(files)?;
        Ok(Self(Arc::new(Shared {
            files: files.clone(),
            material: RwLock::new(Arc::new(Material::new(&contents, files)?)),
            known: Mutex::new(Known::using(&contents)),
        })))
    }

    /// Returns how to reach a peer of some role at `address`, given as host:port or as unix:PATH. The
    /// permissions of a socket file decide which users may connect; nothing is encrypted there.
    ///
    /// # Errors
    /// If the address is invalid.
    pub fn endpoint(&self, address: &str, role: Role) -> Result<Remote, tonic::transport::Error> {
        let endpoint = transport::endpoint(address)?;
        Ok(if let Some(path) = transport::socket_file(address) {
            Remote::at_socket_file(endpoint, path.to_owned())
        } else if self.files().authority.is_some() {
            Remote::secured(endpoint, self.clone(), role)
        } else {
            Remote::in_the_clear(endpoint)
        })
    }

    /// Returns the end of the validity of this process's certificate, in seconds since 1970; `None` if it has none.
    pub fn expires(&self) -> Option<i64> {
        self.material().validity.map(|validity| validity.ends)
    }

    /// Returns the headers that a caller adds to its calls.
    pub fn credentials(&self) -> Credentials {
        Credentials(self.clone())
    }

    /// Returns whether callers must use TLS at the ports of this process.
    pub fn is_listening_encrypted(&self) -> bool {
        self.files().certificate.is_some()
    }

    /// Returns whether calls must carry a token.
    pub fn demands_token(&self) -> bool {
        self.files().token.is_some()
    }

    /// Returns whether callers must have certificates.
    fn demands_certificates(&self) -> bool {
        self.is_listening_encrypted() && !self.files().anonymous_callers
    }

    /// Checks that a port for browsers demands a token if processes must have certificates. Browsers have none, so
    /// without a token the port would be open to all callers.
    ///
    /// # Errors
    /// If processes must have certificates, and there is no token.
    pub fn for_browsers(&self) -> Result<(), SecurityError> {
        if self.demands_certificates() && !self.demands_token() {
            return Err(SecurityError::Incomplete(
                "browsers have no certificates, so the live page (--http) needs --token-file",
            ));
        }
        Ok(())
    }

    fn files(&self) -> &SecurityFiles {
        &self.0.files
    }

    fn has_files(&self) -> bool {
        *self.files() != SecurityFiles::default()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the present credentials.
    fn material(&self) -> Arc<Material> {
        let material = self.0.material.read();
        Arc::clone(&material.unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, material: Material) {
        let mut place = self.0.material.write();
        **place.as_mut().unwrap_or_else(|poisoned| poisoned.get_mut()) = Arc::new(material);
    }

    /// Checks that a process with an authority also has a certificate to listen with. Otherwise its port would be open
    /// to all callers.
    ///
    /// # Errors
    /// If there is an authority, but no certificate to listen with.
    pub fn for_listening(&self) -> Result<(), SecurityError> {
        if self.files().authority.is_some() && !self.is_listening_encrypted() {
            return Err(SecurityError::Incomplete(
                "a process that listens needs --tls-cert and --tls-key, not only --tls-ca",
            ));
        }
        Ok(())
    }

    /// Checks that a call has the job's token, if there is one, and makes its connection a member's.
    ///
    /// # Errors
    /// `Unauthenticated` if the token is missing or wrong, which is counted; `ResourceExhausted` if all members' places
    /// are taken.
    pub fn check_token(&self, headers: &HeaderMap, extensions: &Extensions) -> Result<(), Status> {
        let material = self.material();
        if material.tokens.is_empty() {
            return Ok(());
        }
        let shown = headers.get(header::AUTHORIZATION);
        let shown = shown.map_or(&b""[..], HeaderValue::as_bytes);
        let missing_is_fine = shown.is_empty() && planted!(NoToken);
        let same = |token: &HeaderValue| token.as_bytes().ct_eq(shown);
        let accepted = material.tokens.iter().map(same);
        let accepted = accepted.fold(Choice::from(0), |any, same| any | same);
        if bool::from(accepted) || missing_is_fine {
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

    /// Checks that a caller has a certificate of this role, if certificates are demanded. Callers
    /// through a socket file need none.
    ///
    /// # Errors
    /// `PermissionDenied` if the caller has no such certificate, which is counted.
    pub fn check_role(&self, extensions: &Extensions, role: Role) -> Result<(), Status> {
        let through_file = Caller::of(extensions).is_some_and(|caller| caller.peer().is_none());
        if !self.demands_certificates() || through_file || has_role(extensions, role) {
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

/// The headers that a caller adds to its calls: the token, if there is one.
#[derive(Clone, Debug, Default)]
pub struct Credentials(Security);

impl Credentials {
    /// Adds the token to the headers of a call.
    pub fn add(&self, headers: &mut HeaderMap) {
        if let Some(token) = self.0.material().tokens.first() {
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

/// Returns the answer to a caller if all members' places are taken.
pub fn crowded() -> Status {
    Status::resource_exhausted(
        "all places of this port are taken; raise --max-connections, or use more servers",
    )
}

fn has_role(extensions: &Extensions, role: Role) -> bool {
    let first = Peer::of(extensions).and_then(Peer::certificate);
    let first = first.and_then(|der| webpki::EndEntityCert::try_from(der).ok());
    let name = ServerName::try_from(name_of(role)).ok();
    first
        .zip(name)
        .is_some_and(|(first, name)| first.verify_is_valid_for_subject_name(&name).is_ok())
}

fn peer_of(extensions: &Extensions) -> Option<SocketAddr> {
    Caller::of(extensions).and_then(Caller::peer)
}
