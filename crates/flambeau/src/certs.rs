//! `flambeau certs`: a private authority, and for each role a folder with a certificate and the job's
//! token: what a trial needs. Those who have an authority of their own let it sign the same names.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use shared_proto::ids::Role;
use shared_proto::security::{SecurityFiles, name_of};

use crate::error::CommandError;

/// Who looks at a cluster without being part of it: `flambeau status`.
const OPERATOR: &str = "operator";

/// Random bytes in a token.
const TOKEN_BYTES: usize = 32;

/// Days that the authority is valid for; what it signs is renewed more often.
const AUTHORITY_DAYS: u16 = 3650;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The folder to write to. What is there is kept; delete a role's tls.crt to have it renewed.
    #[arg(long, default_value = "certs", value_name = "DIR")]
    dir: PathBuf,
    /// Days that the roles' certificates are valid for.
    #[arg(long, default_value_t = 365)]
    days: u16,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let dir = arguments.dir.display();
    let made = make(&arguments.dir, arguments.days)?;
    if made.is_empty() {
        println!("{dir} has all that is needed; nothing was changed");
        return Ok(());
    }
    for name in made {
        println!("wrote {dir}/{name}");
    }
    println!(
        "give each process its role's folder and no other, by --tls-ca, --tls-cert, --tls-key and --token-file; keep {AUTHORITY_KEY} to yourself"
    );
    Ok(())
}

// What the files are called in Kubernetes' secrets of certificates, too.
const AUTHORITY: &str = "ca.crt";
const AUTHORITY_KEY: &str = "ca.key";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const TOKEN: &str = "token";

/// The files that a process of a role is given: all in a folder of its own.
pub(crate) fn files(dir: &Path, role: Role) -> SecurityFiles {
    let dir = dir.join(role.to_string());
    SecurityFiles {
        authority: Some(dir.join(AUTHORITY)),
        certificate: Some(dir.join(CERTIFICATE)),
        key: Some(dir.join(KEY)),
        anonymous_callers: false,
        token: Some(dir.join(TOKEN)),
    }
}

/// Makes those that are not there; returns the names of the files that were written.
///
/// # Errors
/// If a file cannot be read or written.
pub(crate) fn make(dir: &Path, days: u16) -> Result<Vec<String>, CommandError> {
    let mut to = Folder { dir, made: vec![] };
    let roles = [Role::Coordinator, Role::Ps, Role::Worker];
    let mut roles = Vec::from(roles.map(|role| (role.to_string(), name_of(role))));
    roles.push((OPERATOR.to_owned(), format!("{OPERATOR}.flambeau")));

    let lacks = |role: &str, file| !dir.join(role).join(file).exists();
    let unsigned = |role: &str| lacks(role, CERTIFICATE) || lacks(role, KEY);
    // One that has signed for others is not replaced: they would not trust each other.
    let begin = !dir.join(AUTHORITY).exists() && roles.iter().all(|(role, _)| unsigned(role));
    if begin {
        to.write_authority()?;
    }
    // Who has nothing to be signed may keep the authority elsewhere.
    if roles.iter().any(|(role, _)| unsigned(role)) {
        let (pem, authority) = known_authority(dir)?;
        for (role, name) in roles.iter().filter(|(role, _)| unsigned(role)) {
            // Somebody may have put a second authority into it.
            if begin || lacks(role, AUTHORITY) {
                to.write(format!("{role}/{AUTHORITY}"), &pem, PUBLIC)?;
            }
            let (certificate, key) = signed(&authority, name, days).map_err(failed(dir))?;
            to.write(format!("{role}/{KEY}"), &key, SECRET)?;
            to.write(format!("{role}/{CERTIFICATE}"), &certificate, PUBLIC)?;
        }
    }
    let (without, with): (Vec<_>, Vec<_>) = roles.iter().partition(|(role, _)| lacks(role, TOKEN));
    if !without.is_empty() {
        let token = match with.first() {
            Some((role, _)) => read(&dir.join(role).join(TOKEN))?,
            None => new_token(),
        };
        for (role, _) in without {
            to.write(format!("{role}/{TOKEN}"), &token, SECRET)?;
        }
    }
    Ok(to.made)
}

/// Where files are written to.
struct Folder<'a> {
    dir: &'a Path,
    /// What was, by name.
    made: Vec<String>,
}

impl Folder<'_> {
    fn write_authority(&mut self) -> Result<(), CommandError> {
        let (certificate, key) = new_authority().map_err(failed(self.dir))?;
        self.write(AUTHORITY_KEY.to_owned(), &key, SECRET)?;
        self.write(AUTHORITY.to_owned(), &certificate, PUBLIC)
    }

    /// Writes a file under a temporary name first, so that what has a name is whole, and nobody may
    /// read in between who may not in the end.
    fn write(&mut self, name: String, text: &str, mode: u32) -> Result<(), CommandError> {
        let path = self.dir.join(&name);
        let folder = path.parent().unwrap_or(self.dir);
        fs::create_dir_all(folder).map_err(CommandError::file(folder))?;
        let permissions = fs::Permissions::from_mode(mode);
        let mut file = tempfile::Builder::new()
            .permissions(permissions)
            .tempfile_in(folder)
            .map_err(CommandError::file(&path))?;
        let written = file.write_all(text.as_bytes());
        written.map_err(CommandError::file(&path))?;
        let kept = file.persist(&path).map_err(|error| error.error);
        kept.map(drop).map_err(CommandError::file(&path))?;
        self.made.push(name);
        Ok(())
    }
}

fn read(path: &Path) -> Result<String, CommandError> {
    fs::read_to_string(path).map_err(CommandError::file(path))
}

fn new_token() -> String {
    let token: [u8; TOKEN_BYTES] = rand::random();
    let token: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{token}\n")
}

type Authority = Issuer<'static, KeyPair>;

fn failed(path: &Path) -> impl Fn(rcgen::Error) -> CommandError + '_ {
    |error| CommandError::Content {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

/// The authority's certificate, and what signs with it.
fn known_authority(dir: &Path) -> Result<(String, Authority), CommandError> {
    let (key, pem) = (dir.join(AUTHORITY_KEY), dir.join(AUTHORITY));
    if let Some(path) = [&key, &pem].into_iter().find(|path| !path.exists()) {
        return Err(CommandError::Content {
            path: path.clone(),
            reason: "it is not there to sign for the roles whose tls.crt or tls.key is missing; bring it back, or give another --dir to begin anew".to_owned(),
        });
    }
    let secret = KeyPair::from_pem(&read(&key)?).map_err(failed(&key))?;
    let certificate = read(&pem)?;
    let authority = Issuer::from_ca_cert_pem(&certificate, secret).map_err(failed(&pem))?;
    Ok((certificate, authority))
}

/// A new authority's certificate, and its key.
fn new_authority() -> Result<(String, String), rcgen::Error> {
    let mut params = valid_for(AUTHORITY_DAYS);
    params
        .distinguished_name
        .push(DnType::CommonName, "Flambeau's private authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
}

/// A certificate for a name, and its key.
fn signed(authority: &Authority, name: &str, days: u16) -> Result<(String, String), rcgen::Error> {
    let mut params = valid_for(days);
    params.subject_alt_names = CertificateParams::new([name.to_owned()])?.subject_alt_names;
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let key = KeyPair::generate()?;
    Ok((
        params.signed_by(&key, authority)?.pem(),
        key.serialize_pem(),
    ))
}

fn valid_for(days: u16) -> CertificateParams {
    let mut params = CertificateParams::default();
    let now = time::OffsetDateTime::now_utc();
    // Clocks differ between machines.
    params.not_before = now - time::Duration::hours(1);
    params.not_after = now + time::Duration::days(days.into());
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
}

/// Modes of files.
const SECRET: u32 = 0o600;
const PUBLIC: u32 = 0o644;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use shared_proto::security::Security;

    const NOTHING: [String; 0] = [];

    #[test]
    fn what_is_missing_is_made_and_the_rest_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert_eq!(make(dir, 30).unwrap().len(), 2 + 4 * 4);
        assert_eq!(make(dir, 30).unwrap(), NOTHING);
        let authority = fs::read(dir.join(AUTHORITY)).unwrap();
        let mut tokens = HashSet::new();
        for role in ["coordinator", "ps", "worker", OPERATOR] {
            for entry in fs::read_dir(dir.join(role)).unwrap().map(Result::unwrap) {
                let name = entry.file_name().into_string().unwrap();
                let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
                let secret = name == KEY || name == TOKEN;
                assert_eq!(mode, if secret { SECRET } else { PUBLIC }, "{role}/{name}");
            }
            let its = |file| fs::read(dir.join(role).join(file)).unwrap();
            assert_eq!(its(AUTHORITY), authority);
            tokens.insert(its(TOKEN));
        }
        assert_eq!(tokens.len(), 1);
        let load = || Security::load(&files(dir, Role::Ps)).unwrap();
        let before = load().expires().unwrap();
        fs::remove_file(dir.join("ps").join(CERTIFICATE)).unwrap();
        fs::remove_file(dir.join("worker").join(TOKEN)).unwrap();
        let renewed = make(dir, 90).unwrap();
        assert_eq!(renewed, ["ps/tls.key", "ps/tls.crt", "worker/token"]);
        assert_eq!(fs::read(dir.join(AUTHORITY)).unwrap(), authority);
        let token = fs::read(dir.join("worker").join(TOKEN)).unwrap();
        assert!(tokens.contains(&token));
        let later = load().expires().unwrap() - before;
        assert!((later / 86_400 - 60).abs() <= 1, "{later} s later");
    }

    #[test]
    fn an_authority_that_is_elsewhere_is_needed_only_to_sign() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        make(dir, 30).unwrap();
        for lost in [AUTHORITY_KEY, AUTHORITY] {
            fs::remove_file(dir.join(lost)).unwrap();
            assert_eq!(make(dir, 90).unwrap(), NOTHING);
        }
        // No other is made that the rest would not trust.
        fs::remove_file(dir.join("ps").join(CERTIFICATE)).unwrap();
        let refused = make(dir, 90).unwrap_err().to_string();
        assert!(refused.contains(AUTHORITY_KEY), "{refused}");
        assert!(!dir.join(AUTHORITY).exists());
    }
}
