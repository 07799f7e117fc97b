//! Files that are missing are made, and the others are kept.

use std::collections::HashSet;

use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use network::security::Security;

use super::*;

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
