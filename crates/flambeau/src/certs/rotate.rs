//! Replaces the authority, the certificates and the token of a running cluster in three steps. After the first step,
//! every process accepts the new ones beside the old; after the second, every process presents the new ones; after the
//! third, no process accepts the old. A step is complete when all processes have read their files.

use std::fs;
use std::path::Path;

use clap::Args;

use super::authority::{has_signed, new_authority};
use super::{
    ALL, AUTHORITY, AUTHORITY_KEY, CERTIFICATE, Folder, Holder, PUBLIC, SECRET, TOKEN,
    expect_trust, failed, known_authority, new_token, read,
};
use crate::error::CommandError;

/// The file beside the authority with the token that `--renew` puts first.
const NEXT_TOKEN: &str = "token.next";

#[derive(Clone, Debug, Args)]
pub(super) struct Rotation {
    /// Make a new authority or token, which every process accepts beside the old one: the first step of a replacement.
    #[arg(long, value_name = "WHAT", conflicts_with_all = ["renew", "drop_old"])]
    add: Vec<Added>,
    /// Make new certificates, signed by the newest authority, and let every process send the newest token.
    #[arg(long, conflicts_with = "drop_old")]
    renew: bool,
    /// Forget all authorities and tokens but the newest: the last step of a replacement.
    #[arg(long)]
    drop_old: bool,
}

/// A thing that is replaced in three steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Added {
    Authority,
    Token,
}

/// Does the requested step. Returns the names of the files that were written; `None` if no step was requested.
///
/// # Errors
/// If a file cannot be read or written, or the previous step has not been done.
pub(super) fn rotate(
    dir: &Path,
    holders: &[Holder],
    days: u16,
    rotation: &Rotation,
) -> Result<Option<Vec<String>>, CommandError> {
    let mut to = Folder { dir, made: vec![] };
    if !rotation.add.is_empty() {
        if rotation.add.contains(&Added::Authority) {
            add_authority(&mut to)?;
        }
        if rotation.add.contains(&Added::Token) {
            add_token(&mut to)?;
        }
    } else if rotation.renew {
        renew(&mut to, holders, days)?;
    } else if rotation.drop_old {
        drop_old(&mut to)?;
    } else {
        return Ok(None);
    }
    Ok(Some(to.made))
}

/// Returns the name and the content of `file` in the folder of each role that has it. Fails if no role has it.
fn with_file(dir: &Path, file: &str) -> Result<Vec<(String, String)>, CommandError> {
    let names = ALL
        .iter()
        .map(|holder| format!("{}/{file}", holder.folder()));
    let names: Vec<String> = names.filter(|name| dir.join(name).exists()).collect();
    if names.is_empty() {
        return Err(not_yet(
            &dir.join(file),
            format!(
                "no role has a file {file}; make them first, without --add, --renew and --drop-old"
            ),
        ));
    }
    let with_text = names.into_iter().map(|name| {
        let text = read(&dir.join(&name))?;
        Ok((name, text))
    });
    with_text.collect()
}

fn add_authority(to: &mut Folder<'_>) -> Result<(), CommandError> {
    let (certificate, key) = new_authority().map_err(failed(to.dir))?;
    // Trust is written first: an authority that is trusted too early does no harm, but one that signs too early does.
    for (name, known) in with_file(to.dir, AUTHORITY)? {
        to.write(name, &format!("{certificate}{known}"), PUBLIC)?;
    }
    to.write(AUTHORITY_KEY.to_owned(), &key, SECRET)?;
    to.write(AUTHORITY.to_owned(), &certificate, PUBLIC)
}

fn add_token(to: &mut Folder<'_>) -> Result<(), CommandError> {
    let token = new_token();
    to.write(NEXT_TOKEN.to_owned(), &token, SECRET)?;
    for (name, known) in with_file(to.dir, TOKEN)? {
        to.write(name, &format!("{}\n{token}", known.trim_end()), SECRET)?;
    }
    Ok(())
}

fn renew(to: &mut Folder<'_>, holders: &[Holder], days: u16) -> Result<(), CommandError> {
    let key = to.dir.join(AUTHORITY_KEY);
    if !key.exists() {
        let why = "it is not there, so nothing can be signed; restore the authority's key, or let your own authority sign";
        return Err(not_yet(&key, why.to_owned()));
    }
    let (pem, authority) = known_authority(to.dir, holders)?;
    for (name, _) in with_file(to.dir, AUTHORITY)? {
        expect_trust(&to.dir.join(name), &pem)?;
    }
    let has_folder = |holder: &&Holder| to.dir.join(holder.folder()).join(AUTHORITY).exists();
    let holders: Vec<Holder> = holders.iter().filter(has_folder).copied().collect();
    if holders.is_empty() {
        let why = format!("none of these roles has a file {AUTHORITY}; run without --renew first");
        return Err(not_yet(to.dir, why));
    }
    for holder in holders {
        to.write_signed(&authority, holder, days)?;
    }
    let Some(next) = next_token(to.dir)? else {
        return Ok(());
    };
    for (name, known) in with_file(to.dir, TOKEN)? {
        if !known.lines().any(|line| line == next) {
            let why = format!("it lacks the token in {NEXT_TOKEN}; repeat --add token first");
            return Err(not_yet(&to.dir.join(name), why));
        }
        let others = known.lines().filter(|line| *line != next);
        let lines: Vec<&str> = std::iter::once(next.as_str()).chain(others).collect();
        to.write(name, &format!("{}\n", lines.join("\n")), SECRET)?;
    }
    Ok(())
}

fn drop_old(to: &mut Folder<'_>) -> Result<(), CommandError> {
    let pem = read(&to.dir.join(AUTHORITY))?;
    let (authorities, tokens) = (with_file(to.dir, AUTHORITY)?, with_file(to.dir, TOKEN)?);
    for (name, _) in &authorities {
        expect_trust(&to.dir.join(name), &pem)?;
    }
    for (name, certificate) in with_file(to.dir, CERTIFICATE)? {
        if !has_signed(&pem, &certificate) {
            let why = "the newest authority has not signed it; use --renew first, and wait until all processes have read their files";
            return Err(not_yet(&to.dir.join(name), why.to_owned()));
        }
    }
    let next = next_token(to.dir)?;
    for (name, known) in &tokens {
        if next.is_some() && known.lines().next() != next.as_deref() {
            let why = "its first line is not the newest token; use --renew first, and wait until all processes have read their files";
            return Err(not_yet(&to.dir.join(name), why.to_owned()));
        }
    }
    for (name, _) in authorities.into_iter().filter(|(_, known)| *known != pem) {
        to.write(name, &pem, PUBLIC)?;
    }
    for (name, known) in tokens {
        let newest = format!("{}\n", known.lines().next().unwrap_or_default());
        if known != newest {
            to.write(name, &newest, SECRET)?;
        }
    }
    match next {
        Some(_) => {
            let path = to.dir.join(NEXT_TOKEN);
            fs::remove_file(&path).map_err(CommandError::file(&path))
        }
        None => Ok(()),
    }
}

fn next_token(dir: &Path) -> Result<Option<String>, CommandError> {
    let path = dir.join(NEXT_TOKEN);
    let token = path.exists().then(|| read(&path)).transpose()?;
    Ok(token.map(|token| token.trim().to_owned()))
}

fn not_yet(path: &Path, reason: String) -> CommandError {
    CommandError::Content {
        path: path.to_owned(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::super::make;
    use super::*;

    const ADD: [Added; 2] = [Added::Authority, Added::Token];

    fn step(dir: &Path, add: &[Added], renew: bool, drop_old: bool) -> Result<Vec<String>, String> {
        let add = add.to_vec();
        let rotation = Rotation {
            add,
            renew,
            drop_old,
        };
        let rotated = rotate(dir, &ALL, 30, &rotation).map_err(|error| error.to_string());
        rotated.map(Option::unwrap)
    }

    fn count(dir: &Path, file: &str, what: &str) -> Vec<usize> {
        let files = with_file(dir, file).unwrap();
        files
            .iter()
            .map(|(_, text)| text.matches(what).count())
            .collect()
    }

    #[test]
    fn each_step_needs_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let nothing = step(dir, &ADD, false, false).unwrap_err();
        assert!(nothing.contains("make them first"), "{nothing}");
        make(dir, &ALL, 30).unwrap();
        assert_eq!(step(dir, &[], false, true).unwrap(), Vec::<String>::new());
        let old = read(&dir.join("ps/token")).unwrap();
        let first = read(&dir.join(AUTHORITY)).unwrap();

        step(dir, &ADD, false, false).unwrap();
        let early = step(dir, &[], false, true).unwrap_err();
        assert!(early.contains("--renew first"), "{early}");
        assert_eq!(count(dir, AUTHORITY, "BEGIN"), [2; 4]);
        assert_eq!(count(dir, TOKEN, "\n"), [2; 4]);
        assert!(read(&dir.join("ps/token")).unwrap().starts_with(&old));

        // A repeated step changes nothing of importance.
        for _ in 0..2 {
            step(dir, &[], true, false).unwrap();
            assert!(read(&dir.join("ps/token")).unwrap().ends_with(&old));
        }
        let newest = read(&dir.join(AUTHORITY)).unwrap();
        let certificate = read(&dir.join("ps/tls.crt")).unwrap();
        assert!(has_signed(&newest, &certificate) && !has_signed(&first, &certificate));

        step(dir, &[], false, true).unwrap();
        assert_eq!(count(dir, AUTHORITY, newest.trim()), [1; 4]);
        assert_eq!(count(dir, AUTHORITY, "BEGIN"), [1; 4]);
        assert_eq!(count(dir, TOKEN, "\n"), [1; 4]);
        assert_eq!(count(dir, TOKEN, old.trim()), [0; 4]);
        assert!(!dir.join(NEXT_TOKEN).exists());
        assert_eq!(make(dir, &ALL, 30).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn renewing_keeps_authority_and_token() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        make(dir, &[Holder::Ps, Holder::Worker], 30).unwrap();
        let [authority, token, certificate] = ["ca.crt", "ps/token", "ps/tls.crt"];
        let before = [authority, token, certificate].map(|file| read(&dir.join(file)).unwrap());
        let written = step(dir, &[], true, false).unwrap();
        let expected = [
            "ps/tls.key",
            "ps/tls.crt",
            "worker/tls.key",
            "worker/tls.crt",
        ];
        assert_eq!(written, expected);
        assert_eq!(read(&dir.join(authority)).unwrap(), before[0]);
        assert_eq!(read(&dir.join(token)).unwrap(), before[1]);
        assert_ne!(read(&dir.join(certificate)).unwrap(), before[2]);
    }
}
