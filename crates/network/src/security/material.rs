//! The credentials in the files: reads them, checks them, and prepares them for handshakes.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use http::HeaderValue;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig};
use sha2::{Digest, Sha256};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{SecurityError, SecurityFiles};

/// The text before the token in its header.
const BEARER: &str = "Bearer ";

/// The protocol of all connections between processes, as TLS names it.
pub(super) const H2: &[u8] = b"h2";

/// The protocols that a browser may choose from.
const OF_BROWSERS: [&[u8]; 2] = [H2, b"http/1.1"];

/// The seconds since 1970 between which a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Validity {
    /// The beginning of the validity.
    pub(super) begins: i64,
    /// The end of the validity.
    pub(super) ends: i64,
}

/// The bytes of the files at one moment.
#[derive(Default)]
pub(super) struct Contents {
    authority: Option<Vec<u8>>,
    certificate: Option<Vec<u8>>,
    key: Option<Vec<u8>>,
    token: Option<Vec<u8>>,
}

impl Contents {
    /// Reads the files.
    ///
    /// # Errors
    /// If one cannot be read.
    pub(super) fn read(files: &SecurityFiles) -> Result<Self, SecurityError> {
        let read = |path: &Option<_>| path.as_deref().map(read).transpose();
        Ok(Self {
            authority: read(&files.authority)?,
            certificate: read(&files.certificate)?,
            key: read(&files.key)?,
            token: read(&files.token)?,
        })
    }

    /// Returns a digest that distinguishes these bytes from others.
    pub(super) fn digest(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        for file in [&self.authority, &self.certificate, &self.key, &self.token] {
            let bytes = file.as_deref().unwrap_or_default();
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        }
        digest.finalize().into()
    }
}

/// Credentials that can be used.
#[derive(Default)]
pub(super) struct Material {
    /// Makes the handshakes of outgoing connections.
    pub(super) caller: Option<TlsConnector>,
    /// Makes the handshakes of incoming connections.
    pub(super) listener: Option<TlsAcceptor>,
    /// Makes the handshakes of browsers, which have no certificates.
    pub(super) for_browsers: Option<TlsAcceptor>,
    /// The validity of this process's certificate.
    pub(super) validity: Option<Validity>,
    /// The tokens that are accepted, as values of a header. The first is sent.
    pub(super) tokens: Vec<HeaderValue>,
    /// The number of authorities that are trusted.
    pub(super) authorities: usize,
    /// True if one of these authorities has signed this process's certificate. Some clusters have one authority for
    /// servers and another for workers.
    signed_by_its_own: bool,
    /// This process's certificate; empty if it has none.
    own: Vec<u8>,
}

impl Material {
    /// Parses the contents of the files.
    ///
    /// # Errors
    /// If files are missing, or have invalid contents.
    pub(super) fn new(contents: &Contents, files: &SecurityFiles) -> Result<Self, SecurityError> {
        let tokens = match (&files.token, &contents.token) {
            (Some(path), Some(text)) => tokens(path, text)?,
            _ => Vec::new(),
        };
        let (Some(path), Some(authority)) = (&files.authority, &contents.authority) else {
            let some = files.certificate.is_some() || files.key.is_some();
            return if some || files.anonymous_callers {
                Err(SecurityError::Incomplete(
                    "--tls-cert, --tls-key and --tls-callers need --tls-ca too: the authority by which others are recognised",
                ))
            } else {
                Ok(Self {
                    tokens,
                    ..Self::default()
                })
            };
        };
        let roots = Arc::new(roots(path, authority)?);
        let own = Own::of(contents, files)?;
        let first = own.as_ref().and_then(|own| own.chain.first());
        let own_certificate = first.map_or_else(Vec::new, |first| first.to_vec());
        let signed_by_its_own = own.as_ref().is_some_and(|own| own.is_signed_by(&roots));
        let listener = own
            .as_ref()
            .map(|own| listening((path, Arc::clone(&roots)), own, files.anonymous_callers));
        let for_browsers = own.as_ref().map(|own| {
            let mut config =
                Arc::unwrap_or_clone(listening((path, Arc::clone(&roots)), own, true)?);
            config.alpn_protocols = OF_BROWSERS.map(<[u8]>::to_vec).into();
            Ok::<_, SecurityError>(Arc::new(config))
        });
        Ok(Self {
            authorities: roots.len(),
            validity: own.as_ref().map(|own| own.validity),
            listener: listener.transpose()?.map(TlsAcceptor::from),
            for_browsers: for_browsers.transpose()?.map(TlsAcceptor::from),
            caller: Some(calling(path, roots, own)?.into()),
            tokens,
            signed_by_its_own,
            own: own_certificate,
        })
    }

    /// Checks that a running process may use these credentials instead of its old ones.
    ///
    /// # Errors
    /// If a new certificate is not valid at present, or if the authority of the certificate is no longer trusted.
    pub(super) fn check_instead_of(
        &self,
        old: &Self,
        files: &SecurityFiles,
    ) -> Result<(), SecurityError> {
        let (Some(path), Some(validity)) = (&files.certificate, self.validity) else {
            return Ok(());
        };
        let now = UnixTime::now().as_secs() as i64;
        // The certificate that is in use already does not keep new tokens or authorities from being used.
        let is_new = self.own != old.own;
        if is_new && !(validity.begins..validity.ends).contains(&now) {
            return Err(wrong(path, &"the certificate is not valid at present"));
        }
        if old.signed_by_its_own && !self.signed_by_its_own {
            let what = "no authority in --tls-ca has signed the certificate; put the authority that has signed it there";
            return Err(wrong(path, &what));
        }
        Ok(())
    }
}

/// This process's certificate and its key.
struct Own<'a> {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    key_path: &'a Path,
    validity: Validity,
}

impl<'a> Own<'a> {
    fn of(contents: &Contents, files: &'a SecurityFiles) -> Result<Option<Self>, SecurityError> {
        let certificate = files
            .certificate
            .as_deref()
            .zip(contents.certificate.as_ref());
        let key = files.key.as_deref().zip(contents.key.as_ref());
        let ((path, certificate), (key_path, key)) = match (certificate, key) {
            (Some(certificate), Some(key)) => (certificate, key),
            (None, None) => return Ok(None),
            _ => {
                return Err(SecurityError::Incomplete(
                    "--tls-cert and --tls-key are of use only together",
                ));
            }
        };
        let chain = certificates(certificate).map_err(|what| wrong(path, &what))?;
        Ok(Some(Self {
            validity: validity(path, &chain)?,
            chain,
            key: PrivateKeyDer::from_pem_slice(key).map_err(|error| wrong(key_path, &error))?,
            key_path,
        }))
    }

    /// Returns whether one of these authorities has signed the certificate, and it is valid at present.
    fn is_signed_by(&self, roots: &Arc<RootCertStore>) -> bool {
        let provider = cryptography();
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider).build();
        let (Ok(verifier), Some((own, intermediates))) = (verifier, self.chain.split_first())
        else {
            return false;
        };
        let verified = verifier.verify_client_cert(own, intermediates, UnixTime::now());
        verified.is_ok()
    }
}

/// Returns the cryptography of all connections: `ring`, with the cipher suites of AES-128 before all others. They are
/// safe, and take less time for each byte than those of AES-256.
fn cryptography() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| {
        let is_aes_128 = matches!(
            suite.suite(),
            CipherSuite::TLS13_AES_128_GCM_SHA256
                | CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
                | CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
        );
        !is_aes_128
    });
    Arc::new(provider)
}

fn calling(
    path: &Path,
    roots: Arc<RootCertStore>,
    own: Option<Own<'_>>,
) -> Result<Arc<ClientConfig>, SecurityError> {
    let provider = cryptography();
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(path, &error))?
        .with_root_certificates(roots);
    let mut config = match own {
        Some(own) => config
            .with_client_auth_cert(own.chain, own.key)
            .map_err(|error| wrong(own.key_path, &error))?,
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(Arc::new(config))
}

fn listening(
    (path, roots): (&Path, Arc<RootCertStore>),
    own: &Own<'_>,
    anonymous_callers: bool,
) -> Result<Arc<ServerConfig>, SecurityError> {
    let provider = cryptography();
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(path, &error))?;
    let config = if anonymous_callers {
        config.with_no_client_auth()
    } else {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
        let verifier = verifier.build().map_err(|error| wrong(path, &error))?;
        config.with_client_cert_verifier(verifier)
    };
    // Fails for a key of another certificate.
    let mut config = config
        .with_single_cert(own.chain.clone(), own.key.clone_key())
        .map_err(|error| wrong(own.key_path, &error))?;
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(Arc::new(config))
}

fn roots(path: &Path, pem: &[u8]) -> Result<RootCertStore, SecurityError> {
    let mut roots = RootCertStore::empty();
    for root in certificates(pem).map_err(|what| wrong(path, &what))? {
        roots.add(root).map_err(|error| wrong(path, &error))?;
    }
    Ok(roots)
}

/// Returns the validity of the first certificate of a chain.
fn validity(path: &Path, chain: &[CertificateDer<'_>]) -> Result<Validity, SecurityError> {
    let first = chain.first().map_or(&b""[..], AsRef::as_ref);
    let (_, first) = x509_parser::parse_x509_certificate(first).map_err(|e| wrong(path, &e))?;
    let validity = first.validity();
    Ok(Validity {
        begins: validity.not_before.timestamp(),
        ends: validity.not_after.timestamp(),
    })
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(none) if none.is_empty() => Err("there is no certificate in it".to_owned()),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(error.to_string()),
    }
}

fn tokens(path: &Path, text: &[u8]) -> Result<Vec<HeaderValue>, SecurityError> {
    let text = std::str::from_utf8(text).map_err(|_| wrong(path, &"a token is a line of text"))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let tokens = lines.map(|token| {
        let mut value = HeaderValue::from_str(&format!("{BEARER}{token}"))
            .map_err(|_| wrong(path, &"a token is one line of visible ASCII"))?;
        value.set_sensitive(true);
        Ok(value)
    });
    let tokens = tokens.collect::<Result<Vec<_>, SecurityError>>()?;
    match tokens.is_empty() {
        true => Err(wrong(path, &"there is no token in it")),
        false => Ok(tokens),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, SecurityError> {
    std::fs::read(path).map_err(|error| SecurityError::Unreadable {
        path: path.to_owned(),
        error,
    })
}

fn wrong(path: &Path, what: &impl fmt::Display) -> SecurityError {
    SecurityError::Malformed {
        path: path.to_owned(),
        what: what.to_string(),
    }
}
