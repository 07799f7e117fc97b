//! `flambeau certs`: a private authority, a certificate for each role, and a job's token: what a trial
//! needs. Those who have an authority of their own let it sign the same names.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use shared_proto::ids::Role;
use shared_proto::security::{SecurityFiles, name_of};

use crate::error::CommandError;

/// Who looks at a cluster without being part of it: `flambeau status`.
const OPERATOR: &str = "operator";

/// Random bytes in a token.
const TOKEN_BYTES: usize = 32;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The folder to write to. Where it has an authority already, nothing is changed.
    #[arg(long, default_value = "certs", value_name = "DIR")]
    dir: PathBuf,
    /// Days that the certificates are valid for.
    #[arg(long, default_value_t = 365)]
    days: u16,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let dir = &arguments.dir;
    if dir.join(AUTHORITY).exists() {
        println!("{} has certificates; nothing was changed", dir.display());
        return Ok(());
    }
    make(dir, arguments.days)?;
    println!(
        "wrote an authority, certificates of the roles and a token to {}; give each process its own with --tls-ca, --tls-cert, --tls-key and --token-file, and keep {}/ca.key to yourself",
        dir.display(),
        dir.display()
    );
    Ok(())
}

const AUTHORITY: &str = "ca.pem";
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

/// Makes all of them. The authority's certificate is written last: where it is, the others are.
///
/// # Errors
/// If a file cannot be written.
pub(crate) fn make(dir: &Path, days: u16) -> Result<(), CommandError> {
    let failed = |error: rcgen::Error| CommandError::Content {
        path: dir.to_owned(),
        reason: error.to_string(),
    };
    fs::create_dir_all(dir).map_err(CommandError::file(dir))?;
    let mut authority = valid_for(days);
    authority
        .distinguished_name
        .push(DnType::CommonName, "Flambeau's private authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate().map_err(failed)?;
    let authority = CertifiedIssuer::self_signed(authority, key).map_err(failed)?;

    let roles = [Role::Coordinator, Role::Ps, Role::Worker];
    let roles = roles.map(|role| (role.to_string(), name_of(role)));
    let operator = (OPERATOR.to_owned(), format!("{OPERATOR}.flambeau"));
    for (role, name) in roles.into_iter().chain([operator]) {
        let mut params = valid_for(days);
        params.distinguished_name.push(DnType::CommonName, &name);
        params.subject_alt_names = CertificateParams::new([name])
            .map_err(failed)?
            .subject_alt_names;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.signed_by(&key, &authority).map_err(failed)?;
        write(
            &dir.join(format!("{role}.key")),
            &key.serialize_pem(),
            0o600,
        )?;
        write(&dir.join(format!("{role}.pem")), &certificate.pem(), 0o644)?;
    }
    let token: [u8; TOKEN_BYTES] = rand::random();
    let token: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
    write(&dir.join(TOKEN), &format!("{token}\n"), 0o600)?;
    write(&dir.join("ca.key"), &authority.key().serialize_pem(), 0o600)?;
    write(&dir.join(AUTHORITY), &authority.pem(), 0o644)
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

/// Writes a file that nobody may read in between if nobody may in the end.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), CommandError> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(mode);
    let mut file = options.open(path).map_err(CommandError::file(path))?;
    let written = file.write_all(text.as_bytes());
    written.map_err(CommandError::file(path))
}
