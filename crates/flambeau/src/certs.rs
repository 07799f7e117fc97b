//! `flambeau certs`: makes a private authority, and for each role a folder with a certificate and the job's token.
//! Another authority may sign the same names instead.

mod authority;
mod folder;
mod rotate;

use daemon::outln;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use network::security::{SecurityFiles, name_of};
use rcgen::{Issuer, KeyPair};
use shared_proto::ids::Role;

use self::authority::{Authority, has_signed, new_authority, signed};
use self::folder::{Folder, PUBLIC, SECRET};
use crate::error::CommandError;

/// The number of random bytes in a token.
const TOKEN_BYTES: usize = 32;

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
    /// Returns the name of the holder's folder.
    fn folder(self) -> String {
        match self.role() {
            Some(role) => role.to_string(),
            None => "operator".to_owned(),
        }
    }

    /// Returns the name for which the holder's certificate is valid.
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
        outln!("{dir} has all that is needed; nothing was changed");
        return Ok(());
    }
    for name in made {
        outln!("wrote {dir}/{name}");
    }
    outln!(
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

/// Returns the paths of the files of a role's processes. All are in the role's folder in `dir`.
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
/// If a file cannot be read or written, or if a certificate must be signed, but the authority cannot sign or a role
/// does not trust it.
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

fn failed(path: &Path) -> impl Fn(rcgen::Error) -> CommandError + '_ {
    |error| CommandError::Content {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

/// Reads the authority's certificate and its key.
///
/// # Errors
/// If the certificate or the key is missing or cannot be used, or if they do not belong together.
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
    if !has_signed(&certificate, &trial.0) {
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

#[cfg(test)]
mod tests;
