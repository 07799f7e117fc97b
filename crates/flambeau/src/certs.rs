//! `flambeau certs`: a private authority, a certificate for each role, and a job's token: what a trial
//! needs. Those who have an authority of their own let it sign the same names.

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
    /// The folder to write to. What is there is kept; delete a role's certificate to have it renewed.
    #[arg(long, default_value = "certs", value_name = "DIR")]
    dir: PathBuf,
    /// Days that the roles' certificates are valid for.
    #[arg(long, default_value_t = 365)]
    days: u16,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let dir = arguments.dir.display();
    match make(&arguments.dir, arguments.days)?.as_slice() {
        [] => println!("{dir} has all that is needed; nothing was changed"),
        made => println!(
            "wrote {} to {dir}; give each process its own with --tls-ca, --tls-cert, --tls-key and --token-file, and keep {dir}/{AUTHORITY_KEY} to yourself",
            made.join(", ")
        ),
    }
    Ok(())
}

const AUTHORITY: &str = "ca.pem";
const AUTHORITY_KEY: &str = "ca.key";
const TOKEN: &str = "token";

/// The files that a process of a role is given.
pub(crate) fn files(dir: &Path, role: Role) -> SecurityFiles {
    SecurityFiles {
        authority: Some(dir.join(AUTHORITY)),
        certificate: Some(dir.join(format!("{role}.pem"))),
        key: Some(dir.join(format!("{role}.key"))),
        anonymous_callers: false,
        token: Some(dir.join(TOKEN)),
    }
}

/// Makes those that are not there; returns the names of the files that were written.
///
/// # Errors
/// If a file cannot be read or written.
pub(crate) fn make(dir: &Path, days: u16) -> Result<Vec<String>, CommandError> {
    fs::create_dir_all(dir).map_err(CommandError::file(dir))?;
    let mut made = Vec::new();
    let roles = [Role::Coordinator, Role::Ps, Role::Worker];
    let roles = roles.map(|role| (role.to_string(), name_of(role)));
    let operator = (OPERATOR.to_owned(), format!("{OPERATOR}.flambeau"));
    let mut missing = Vec::from(roles);
    missing.push(operator);
    missing.retain(|(role, _)| !dir.join(format!("{role}.pem")).exists());
    let authority = match dir.join(AUTHORITY).exists() {
        false => Some(new_authority(dir, &mut made)?),
        // Who has nothing to be signed may keep the authority's key elsewhere.
        true if missing.is_empty() => None,
        true => Some(known_authority(dir)?),
    };
    if let Some(authority) = authority {
        for (role, name) in missing {
            let (certificate, key) = (format!("{role}.pem"), format!("{role}.key"));
            let (pem, secret) = signed(&authority, &name, days).map_err(failed(dir))?;
            // What is there without the other is half of an earlier attempt.
            write(&dir.join(&key), &secret, SECRET)?;
            write(&dir.join(&certificate), &pem, PUBLIC)?;
            made.extend([certificate, key]);
        }
    }
    if !dir.join(TOKEN).exists() {
        let token: [u8; TOKEN_BYTES] = rand::random();
        let token: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
        write(&dir.join(TOKEN), &format!("{token}\n"), SECRET)?;
        made.push(TOKEN.to_owned());
    }
    Ok(made)
}

type Authority = Issuer<'static, KeyPair>;

fn failed(path: &Path) -> impl Fn(rcgen::Error) -> CommandError + '_ {
    |error| CommandError::Content {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

fn known_authority(dir: &Path) -> Result<Authority, CommandError> {
    let read = |name| {
        let path = dir.join(name);
        fs::read_to_string(&path).map_err(CommandError::file(&path))
    };
    let key = KeyPair::from_pem(&read(AUTHORITY_KEY)?);
    let key = key.map_err(failed(&dir.join(AUTHORITY_KEY)))?;
    Issuer::from_ca_cert_pem(&read(AUTHORITY)?, key).map_err(failed(&dir.join(AUTHORITY)))
}

fn new_authority(dir: &Path, made: &mut Vec<String>) -> Result<Authority, CommandError> {
    let mut params = valid_for(AUTHORITY_DAYS);
    params
        .distinguished_name
        .push(DnType::CommonName, "Flambeau's private authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate().map_err(failed(dir))?;
    let certificate = params.self_signed(&key).map_err(failed(dir))?;
    write(&dir.join(AUTHORITY_KEY), &key.serialize_pem(), SECRET)?;
    write(&dir.join(AUTHORITY), &certificate.pem(), PUBLIC)?;
    made.extend([AUTHORITY, AUTHORITY_KEY].map(str::to_owned));
    Ok(Issuer::new(params, key))
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

/// Writes a file under a temporary name first, so that what has a name is whole, and nobody may read in
/// between who may not in the end.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), CommandError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let permissions = fs::Permissions::from_mode(mode);
    let mut file = tempfile::Builder::new()
        .permissions(permissions)
        .tempfile_in(folder)
        .map_err(CommandError::file(path))?;
    let written = file.write_all(text.as_bytes());
    written.map_err(CommandError::file(path))?;
    let kept = file.persist(path).map_err(|error| error.error);
    kept.map(drop).map_err(CommandError::file(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_proto::security::Security;

    #[test]
    fn what_is_missing_is_made_and_the_rest_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert_eq!(make(dir, 30).unwrap().len(), 11);
        assert_eq!(make(dir, 30).unwrap(), Vec::<String>::new());
        for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
            let secret = name.ends_with(".key") || name == TOKEN;
            assert_eq!(mode, if secret { SECRET } else { PUBLIC }, "{name}");
        }
        let load = || Security::load(&files(dir, Role::Ps)).unwrap();
        let before = load().expires().unwrap();
        let authority = fs::read(dir.join(AUTHORITY)).unwrap();
        fs::remove_file(dir.join("ps.pem")).unwrap();
        assert_eq!(make(dir, 90).unwrap(), ["ps.pem", "ps.key"]);
        assert_eq!(fs::read(dir.join(AUTHORITY)).unwrap(), authority);
        let later = load().expires().unwrap() - before;
        assert!((later / 86_400 - 60).abs() <= 1, "{later} s later");
        // The authority's key is needed only to sign.
        fs::remove_file(dir.join(AUTHORITY_KEY)).unwrap();
        assert_eq!(make(dir, 90).unwrap(), Vec::<String>::new());
        fs::remove_file(dir.join("ps.pem")).unwrap();
        let refused = make(dir, 90).unwrap_err().to_string();
        assert!(refused.contains(AUTHORITY_KEY), "{refused}");
    }
}
