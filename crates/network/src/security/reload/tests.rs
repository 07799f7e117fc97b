//! Credential files that change while a process runs.

use std::fs;
use std::path::Path;

use http::{Extensions, HeaderMap, header};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use super::super::SecurityFiles;
use super::*;

fn files(dir: &Path) -> SecurityFiles {
    let file = |name| Some(dir.join(name));
    SecurityFiles {
        authority: file("ca.crt"),
        certificate: file("tls.crt"),
        key: file("tls.key"),
        anonymous_callers: false,
        token: file("token"),
    }
}

/// Makes an authority; returns its certificate, and a certificate that it has signed, with its key.
fn material(year: i32) -> [String; 3] {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(params, key);
    let mut params = CertificateParams::new(["ps.flambeau".to_owned()]).unwrap();
    params.not_after = rcgen::date_time_ymd(year, 1, 1);
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap().pem();
    [authority, certificate, key.serialize_pem()]
}

fn write(dir: &Path, file: &str, text: &str) {
    fs::write(dir.join(file), text).unwrap();
}

/// A process with files of its own.
struct Scene {
    dir: tempfile::TempDir,
    security: Security,
}

impl Scene {
    fn new() -> Self {
        Self::with_certificate_until(2090)
    }

    fn with_certificate_until(year: i32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [authority, certificate, key] = material(year);
        let texts = [&authority, &certificate, &key, "old\n"];
        for (file, text) in ["ca.crt", "tls.crt", "tls.key", "token"].iter().zip(texts) {
            write(dir.path(), file, text);
        }
        let security = Security::load(&files(dir.path())).unwrap();
        Self { dir, security }
    }

    fn write(&self, file: &str, text: &str) {
        write(self.dir.path(), file, text);
    }

    /// Adds an authority to those that are trusted.
    fn trust_too(&self, authority: &str) {
        let known = fs::read_to_string(self.dir.path().join("ca.crt")).unwrap();
        self.write("ca.crt", &format!("{known}{authority}"));
        assert!(self.look_twice());
    }

    /// Reads the files until nothing new is found. Returns whether new contents were used.
    fn look_twice(&self) -> bool {
        (0..4).fold(false, |any, _| self.security.look(true) || any)
    }

    fn reported(&self) -> bool {
        self.security.known().reported.is_some()
    }

    /// Returns the year in which the certificate expires.
    fn expires(&self) -> i64 {
        1970 + self.security.expires().unwrap() / 31_556_952
    }

    fn accepts(&self, token: &str) -> bool {
        let mut headers = HeaderMap::new();
        let token = format!("Bearer {token}");
        headers.insert(header::AUTHORIZATION, token.parse().unwrap());
        let checked = self.security.check_token(&headers, &Extensions::new());
        checked.is_ok()
    }

    fn sends(&self) -> String {
        let mut headers = HeaderMap::new();
        self.security.credentials().add(&mut headers);
        let shown = headers.get(header::AUTHORIZATION).unwrap();
        shown.to_str().unwrap().to_owned()
    }
}

#[test]
fn a_certificate_and_its_key_are_used_once_both_are_there() {
    let scene = Scene::new();
    let [authority, certificate, key] = material(2095);
    assert!(!scene.look_twice());
    scene.trust_too(&authority);
    scene.write("tls.crt", &certificate);
    assert!(!scene.look_twice());
    assert!(scene.reported());
    assert_eq!(scene.expires(), 2090);
    scene.write("tls.key", &key);
    assert!(!scene.security.look(true), "somebody may still be writing");
    assert!(scene.security.look(true));
    assert!(!scene.reported());
    assert_eq!(scene.expires(), 2095);
}

#[test]
fn half_written_files_are_not_used() {
    let scene = Scene::new();
    let [authority, certificate, key] = material(2095);
    let half = |text: &str| text[..text.len() / 2].to_owned();
    for (file, text) in [
        ("tls.crt", half(&certificate)),
        ("tls.key", half(&key)),
        ("ca.crt", half(&authority)),
        ("ca.crt", String::new()),
        ("token", "\n".to_owned()),
        ("token", "\u{1}".to_owned()),
    ] {
        let before = fs::read_to_string(scene.dir.path().join(file)).unwrap();
        scene.write(file, &text);
        assert!(!scene.look_twice(), "{file}");
        assert!(scene.reported(), "{file}");
        assert!(scene.accepts("old"), "{file}");
        scene.write(file, &before);
        assert!(!scene.look_twice(), "{file}");
        assert!(!scene.reported(), "{file}");
    }
    fs::remove_file(scene.dir.path().join("tls.key")).unwrap();
    assert!(!scene.look_twice());
    assert!(scene.reported());
    assert_eq!(scene.expires(), 2090);
}

#[test]
fn what_changes_from_look_to_look_is_neither_used_nor_reported() {
    let scene = Scene::new();
    for token in ["n", "ne", "new"] {
        scene.write("token", token);
        assert!(!scene.security.look(true));
    }
    scene.write("token", "");
    assert!(!scene.security.look(true) && !scene.reported());
    assert!(scene.accepts("old") && !scene.accepts("new"));
}

#[test]
fn a_token_is_replaced_line_by_line() {
    let scene = Scene::new();
    for (lines, sent, accepted, refused) in [
        ("old\nnew\n", "Bearer old", "new", "other"),
        ("new\nold\n", "Bearer new", "old", "ne"),
        ("\nnew \n\n", "Bearer new", "new", "old"),
    ] {
        scene.write("token", lines);
        assert!(scene.look_twice(), "{lines:?}");
        assert_eq!(scene.sends(), sent);
        assert!(scene.accepts(accepted), "{lines:?}");
        assert!(!scene.accepts(refused), "{lines:?}");
    }
}

#[test]
fn all_authorities_of_a_file_are_trusted() {
    let scene = Scene::new();
    let old = fs::read_to_string(scene.dir.path().join("ca.crt")).unwrap();
    let [new, certificate, key] = material(2095);
    scene.trust_too(&new);
    assert_eq!(scene.security.material().authorities, 2);
    scene.write("tls.crt", &certificate);
    scene.write("tls.key", &key);
    scene.write("ca.crt", &new);
    assert!(scene.look_twice());
    assert_eq!(scene.security.material().authorities, 1);
    assert!(!old.contains(&new));
}

#[test]
fn a_certificate_that_peers_would_refuse_does_not_replace_one_that_works() {
    let scene = Scene::new();
    let [authority, expired, key] = material(2020);
    scene.trust_too(&authority);
    for (certificate, key) in [(expired, key), {
        let [_, of_a_stranger, key] = material(2095);
        (of_a_stranger, key)
    }] {
        scene.write("tls.crt", &certificate);
        scene.write("tls.key", &key);
        assert!(!scene.look_twice());
        assert!(scene.reported());
        assert_eq!(scene.expires(), 2090);
    }
    // It does not keep a token from being replaced.
    let expired = Scene::with_certificate_until(2020);
    expired.write("token", "new\n");
    assert!(expired.look_twice() && expired.accepts("new"));
    // The only authority has not signed the process's own certificate.
    let scene = Scene::new();
    scene.write("ca.crt", &authority);
    assert!(!scene.look_twice());
    assert!(scene.reported());
}

#[test]
fn a_pipe_is_read_once() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    let made = std::process::Command::new("mkfifo").arg(&token).status();
    assert!(made.unwrap().success());
    let writer = token.clone();
    let writer = std::thread::spawn(move || fs::write(writer, "old\n").unwrap());
    let files = SecurityFiles {
        token: Some(token),
        ..SecurityFiles::default()
    };
    let security = Security::load(&files).unwrap();
    writer.join().unwrap();
    assert!(!security.has_files_to_follow());
}

#[tokio::test]
async fn a_caller_that_is_refused_reads_the_files_at_once() {
    let scene = Scene::new();
    assert!(!scene.security.read_again().await);
    scene.write("token", "new\n");
    assert!(scene.security.read_again().await);
    assert_eq!(scene.sends(), "Bearer new");
    assert!(!scene.security.read_again().await);
    assert!(!Security::default().read_again().await);
}
