//! `flambeau certs`: makes a private authority, and for each role a folder with a certificate and the job's token.
//! Another authority may sign the same names instead.

mod folder;
mod rotate;

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use shared_proto::ids::Role;
use shared_proto::security::{SecurityFiles, name_of};

use self::folder::{Folder, PUBLIC, SECRET};
use crate::error::CommandError;

/// The number of random bytes in a token.
const TOKEN_BYTES: usize = 32;

/// The days for which the authority is valid; its certificates are renewed more often.
const AUTHORITY_DAYS: u16 = 3650;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The folder to write to. Existing files are kept, unless one of the flags below replaces them.
    #[arg(long, default_value = "certs", value_name = "DIR")]
    dir: PathBuf,
    /// Make files for these roles only. Default: all.
    #[arg(long = "role", value_name = "ROLE", conflicts_with_all = ["add", "drop_old"])]
    roles: Vec<Holder>,
    /// Days that the roles' certificates are valid for.
    #[arg(long, default_value_t = 365, conflicts_with_all = ["add", "drop_old"])]
    days: u16,
    #[command(flatten)]
    rotation: rotate::Rotation,
}

/// A holder of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Holder {
    Coordinator,
    Ps,
    Worker,
    /// The operator, for `flambeau status`.
    Operator,
}

/// All holders.
pub(crate) const ALL: [Holder; 4] = [
    Holder::Coordinator,
    Holder::Ps,
    Holder::Worker,
    Holder::Operator,
];

impl Holder {
    /// Returns the name of its folder.
    fn folder(self) -> String {
        match self.role() {
            Some(role) => role.to_string(),
            None => "operator".to_owned(),
        }
    }

    /// Returns the name that its certificate is valid for.
    fn name(self) -> String {
        self.role()
            .map_or_else(|| "operator.flambeau".to_owned(), name_of)
    }

    fn role(self) -> Option<Role> {
        match self {
            Self::Coordinator => Some(Role::Coordinator),
            Self::Ps => Some(Role::Ps),
            Self::Worker => Some(Role::Worker),
            Self::Operator => None,
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let dir = arguments.dir.display();
    let holders = match arguments.roles.as_slice() {
        [] => &ALL,
        roles => roles,
    };
    let made = match rotate::rotate(&arguments.dir, holders, arguments.days, &arguments.rotation)? {
        Some(rotated) => rotated,
        None => make(&arguments.dir, holders, arguments.days)?,
    };
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

// The files have the same names as in Kubernetes' secrets of certificates.
const AUTHORITY: &str = "ca.crt";
const AUTHORITY_KEY: &str = "ca.key";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const TOKEN: &str = "token";

/// Returns the files of a role's processes: all in a folder of its own.
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

/// Makes the files that are missing. Returns the names of those that were written.
///
/// # Errors
/// If a file cannot be read or written, or if there is no authority that both can sign and is trusted.
pub(crate) fn make(dir: &Path, holders: &[Holder], days: u16) -> Result<Vec<String>, CommandError> {
    let mut to = Folder { dir, made: vec![] };
    let there = |holder: Holder, file: &str| dir.join(holder.folder()).join(file).exists();
    let lacks = |holder: Holder, files: &[&str]| files.iter().any(|file| !there(holder, file));
    let unsigned: Vec<Holder> = holders
        .iter()
        .copied()
        .filter(|holder| lacks(*holder, &[AUTHORITY, CERTIFICATE, KEY]))
        .collect();
    // An authority that existing files trust is not replaced: their processes would not trust the new one.
    let known = |holder: &Holder| there(*holder, CERTIFICATE) || there(*holder, AUTHORITY);
    if !dir.join(AUTHORITY).exists() && !ALL.iter().any(known) {
        to.write_authority()?;
    }
    // If nothing is to be signed, the authority may be kept elsewhere.
    if !unsigned.is_empty() {
        let (pem, authority) = known_authority(dir, &unsigned)?;
        for holder in ALL.iter().filter(|holder| there(**holder, AUTHORITY)) {
            expect_trust(&dir.join(holder.folder()).join(AUTHORITY), &pem)?;
        }
        for holder in unsigned {
            let folder = holder.folder();
            // It may hold a second authority, put there by hand.
            if !there(holder, AUTHORITY) {
                to.write(format!("{folder}/{AUTHORITY}"), &pem, PUBLIC)?;
            }
            if lacks(holder, &[CERTIFICATE, KEY]) {
                // The old certificate is removed first, so that every certificate has its key, whenever this stops.
                let certificate = dir.join(&folder).join(CERTIFICATE);
                if certificate.exists() {
                    fs::remove_file(&certificate).map_err(CommandError::file(&certificate))?;
                }
                to.write_signed(&authority, holder, days)?;
            }
        }
    }
    let mut with_token = ALL.iter();
    let token = match with_token.find(|holder| there(**holder, TOKEN)) {
        Some(holder) => read(&dir.join(holder.folder()).join(TOKEN))?,
        None => new_token(),
    };
    for holder in holders.iter().filter(|holder| !there(**holder, TOKEN)) {
        to.write(format!("{}/{TOKEN}", holder.folder()), &token, SECRET)?;
    }
    Ok(to.made)
}

impl Folder<'_> {
    fn write_authority(&mut self) -> Result<(), CommandError> {
        let (certificate, key) = new_authority().map_err(failed(self.dir))?;
        self.write(AUTHORITY_KEY.to_owned(), &key, SECRET)?;
        self.write(AUTHORITY.to_owned(), &certificate, PUBLIC)
    }

    /// Writes a new certificate of a role, and its key.
    fn write_signed(
        &mut self,
        authority: &Authority,
        holder: Holder,
        days: u16,
    ) -> Result<(), CommandError> {
        let folder = holder.folder();
        let pair = signed(authority, &holder.name(), days).map_err(failed(self.dir))?;
        self.write(format!("{folder}/{KEY}"), &pair.1, SECRET)?;
        self.write(format!("{folder}/{CERTIFICATE}"), &pair.0, PUBLIC)
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

/// Reads the authority's certificate and its key.
///
/// # Errors
/// If one is missing or cannot be used, or they do not belong together.
fn known_authority(dir: &Path, for_whom: &[Holder]) -> Result<(String, Authority), CommandError> {
    let (key, pem) = (dir.join(AUTHORITY_KEY), dir.join(AUTHORITY));
    if let Some(path) = [&key, &pem].into_iter().find(|path| !path.exists()) {
        let folders: Vec<String> = for_whom.iter().map(|holder| holder.folder()).collect();
        return Err(CommandError::Content {
            path: path.clone(),
            reason: format!(
                "it is missing, and {} lacks {AUTHORITY}, {CERTIFICATE} or {KEY} of: {}; restore the missing files, or the authority that has signed the others",
                dir.display(),
                folders.join(", ")
            ),
        });
    }
    let secret = KeyPair::from_pem(&read(&key)?).map_err(failed(&key))?;
    let certificate = read(&pem)?;
    let authority = Issuer::from_ca_cert_pem(&certificate, secret).map_err(failed(&pem))?;
    // The library does not compare the key with the certificate.
    let trial = signed(&authority, &Holder::Operator.name(), 1).map_err(failed(&key))?;
    if !rotate::has_signed(&certificate, &trial.0) {
        return Err(CommandError::Content {
            path: key,
            reason: format!(
                "it is not the key of {}; restore the two that belong together",
                pem.display()
            ),
        });
    }
    Ok((certificate, authority))
}

/// Checks that a role trusts the authority that is about to sign.
fn expect_trust(path: &Path, authority: &str) -> Result<(), CommandError> {
    if read(path)?.contains(authority.trim()) {
        return Ok(());
    }
    Err(CommandError::Content {
        path: path.to_owned(),
        reason: format!(
            "it does not contain the {AUTHORITY} that would sign, so this role would not trust the others; restore the authority that it contains, or the missing files"
        ),
    })
}

/// Makes a new authority. Returns its certificate and its key.
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

/// Makes a certificate for a name. Returns it and its key.
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
    // The clocks of machines differ.
    params.not_before = now - time::Duration::hours(1);
    params.not_after = now + time::Duration::days(days.into());
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use std::io::{self, Write};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;
    use shared_proto::security::Security;

    const NOTHING: [String; 0] = [];

    #[test]
    fn what_is_missing_is_made_and_the_rest_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert_eq!(make(dir, &ALL, 30).unwrap().len(), 2 + 4 * 4);
        assert_eq!(make(dir, &ALL, 30).unwrap(), NOTHING);
        let authority = fs::read(dir.join(AUTHORITY)).unwrap();
        let mut tokens = HashSet::new();
        for role in ["coordinator", "ps", "worker", "operator"] {
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
        fs::remove_file(dir.join("ps").join(KEY)).unwrap();
        fs::remove_file(dir.join("worker").join(TOKEN)).unwrap();
        fs::remove_file(dir.join("coordinator").join(AUTHORITY)).unwrap();
        let renewed = make(dir, &ALL, 90).unwrap();
        let expected = [
            "coordinator/ca.crt",
            "ps/tls.key",
            "ps/tls.crt",
            "worker/token",
        ];
        assert_eq!(renewed, expected);
        assert_eq!(fs::read(dir.join(AUTHORITY)).unwrap(), authority);
        let token = fs::read(dir.join("worker").join(TOKEN)).unwrap();
        assert!(tokens.contains(&token));
        let later = load().expires().unwrap() - before;
        assert!((later / 86_400 - 60).abs() <= 1, "{later} s later");
    }

    #[test]
    fn only_an_authority_that_the_others_trust_signs() {
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [ours, theirs] = dirs.each_ref().map(|dir| dir.path());
        make(ours, &[Holder::Ps], 30).unwrap();
        assert!(!ours.join("worker").exists());
        make(theirs, &ALL, 30).unwrap();
        // An authority that is kept elsewhere is needed only to sign, and no other is made.
        for lost in [AUTHORITY_KEY, AUTHORITY] {
            fs::remove_file(ours.join(lost)).unwrap();
            assert_eq!(make(ours, &[Holder::Ps], 90).unwrap(), NOTHING);
        }
        let refused = make(ours, &ALL, 90).unwrap_err().to_string();
        assert!(
            refused.contains("coordinator, worker, operator"),
            "{refused}"
        );
        assert!(!ours.join(AUTHORITY).exists());
        // Another authority does not sign while a role trusts the first alone, not even for other roles.
        for file in [AUTHORITY_KEY, AUTHORITY] {
            fs::copy(theirs.join(file), ours.join(file)).unwrap();
        }
        let refused = make(ours, &ALL, 90).unwrap_err().to_string();
        assert!(refused.contains("ps/ca.crt"), "{refused}");
        assert!(!ours.join("worker").exists());
        // A key that is not the authority's does not sign either.
        fs::copy(
            dirs[0].path().join("ps").join(AUTHORITY),
            ours.join(AUTHORITY),
        )
        .unwrap();
        let refused = make(ours, &ALL, 90).unwrap_err().to_string();
        assert!(refused.contains("not the key of"), "{refused}");
        assert!(!ours.join("worker").exists());
        // A new authority is not made either.
        for file in [AUTHORITY_KEY, AUTHORITY, "ps/tls.crt"] {
            fs::remove_file(ours.join(file)).unwrap();
        }
        let refused = make(ours, &[Holder::Ps], 90).unwrap_err().to_string();
        assert!(refused.contains(AUTHORITY_KEY), "{refused}");
    }

    #[test]
    fn a_file_that_is_replaced_keeps_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("ps").join(KEY);
        make(dir.path(), &ALL, 30).unwrap();
        if std::os::unix::fs::chown(&key, Some(10001), Some(10002)).is_err() {
            // Written to the real stderr, which the test harness does not capture.
            let _ = writeln!(
                io::stderr(),
                "SKIPPED: owners of certificates: only root gives files away"
            );
            return;
        }
        let mut folder = Folder {
            dir: dir.path(),
            made: vec![],
        };
        let name = format!("ps/{KEY}");
        folder.write(name, "another", SECRET).unwrap();
        let found = key.metadata().unwrap();
        assert_eq!((found.uid(), found.gid()), (10001, 10002));
        assert_eq!(found.permissions().mode() & 0o777, SECRET);
    }
}
