//! The clusters of this machine. Each running coordinator keeps a small file in a folder of its user. With this file,
//! `flambeau status` finds the coordinator without an address.
//!
//! The coordinator holds a lock on its file. The lock ends with the process in any case. So the coordinator of a file
//! without a lock was killed, and the next reader deletes the file.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The extension of a file that is complete.
const WHOLE: &str = "json";

/// The most bytes of a file that are read. Coordinators write a few hundred.
const MOST_BYTES: u64 = 64 << 10;

/// A running coordinator, as it describes itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningCluster {
    /// The address on which the coordinator listens.
    pub coordinator: SocketAddr,
    /// The run directory.
    pub run_dir: PathBuf,
    /// The URL of the coordinator's live page; `None` if it serves none.
    #[serde(default)]
    pub page: Option<String>,
    /// True if calls must be encrypted.
    #[serde(default)]
    pub encrypted: bool,
    /// True if calls must carry a token.
    #[serde(default)]
    pub token: bool,
    /// The id of the coordinator's process.
    pub process: u32,
    /// The time at which the coordinator started, in seconds since 1970.
    pub since: u64,
}

impl RunningCluster {
    /// Returns the address at which a process on this machine reaches the coordinator.
    pub fn reachable_at(&self) -> SocketAddr {
        reachable(self.coordinator)
    }

    /// Returns the time for which the coordinator has run, in seconds.
    pub fn age(&self) -> u64 {
        now().saturating_sub(self.since)
    }
}

/// Returns an address at which a process on this machine reaches a listener.
pub fn reachable(listener: SocketAddr) -> SocketAddr {
    let ip = match listener.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listener.port())
}

/// Returns the current time, in seconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// The file of this process, which is deleted when this is dropped.
#[derive(Debug)]
pub struct Registered {
    path: PathBuf,
    /// Holds the lock.
    _file: File,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Returns the folder in which the coordinators of this user are registered.
pub fn folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => Path::new(&dir).join("flambeau"),
        None => std::env::temp_dir().join(format!("flambeau-clusters-{}", user())),
    }
}

/// Registers a coordinator in a folder.
///
/// # Errors
/// If the folder belongs to another user, or cannot be written to.
pub fn register(folder: &Path, cluster: &RunningCluster) -> io::Result<Registered> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    // Deletes the files of coordinators that were killed, so that they do not pile up where nobody asks for a status.
    find(folder)?;
    // Process ids do not distinguish the processes of several containers.
    let name = format!("{:016x}", rand::random::<u64>());
    let unfinished = folder.join(format!("{name}.unfinished"));
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&unfinished)?;
    let path = unfinished.with_extension(WHOLE);
    let written = file
        .lock()
        .and_then(|()| serde_json::to_vec(cluster).map_err(io::Error::other))
        .and_then(|text| file.write_all(&text))
        .and_then(|()| std::fs::rename(&unfinished, &path));
    if let Err(error) = written {
        let _ = std::fs::remove_file(&unfinished);
        return Err(error);
    }
    Ok(Registered { path, _file: file })
}

/// Returns the clusters that are registered in a folder, the oldest first. Deletes the files of coordinators that were
/// killed.
///
/// # Errors
/// If the folder belongs to another user, or cannot be read. A folder that does not exist has no clusters.
pub fn find(folder: &Path) -> io::Result<Vec<RunningCluster>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    check(folder)?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let whole = paths.filter(|path| path.extension() == Some(WHOLE.as_ref()));
    let mut clusters: Vec<_> = whole.filter_map(|path| read(&path)).collect();
    clusters.sort_by_key(|cluster| (cluster.since, cluster.coordinator));
    Ok(clusters)
}

/// Checks that no other user can put files into a folder.
fn check(folder: &Path) -> io::Result<()> {
    let found = std::fs::symlink_metadata(folder)?;
    if found.is_dir() && found.uid() == user() && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "{} is not a folder that this user alone may use; remove it, or set XDG_RUNTIME_DIR to another folder",
            folder.display()
        ),
    ))
}

/// Reads the file of a coordinator. Returns `None` if the content is not valid. If the coordinator no longer runs,
/// deletes the file and returns none.
fn read(path: &Path) -> Option<RunningCluster> {
    let file = File::open(path).ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => {}
        Ok(()) => {
            let _ = std::fs::remove_file(path);
            return None;
        }
        Err(TryLockError::Error(_)) => return None,
    }
    let mut text = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

fn user() -> u32 {
    rustix::process::getuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn cluster(port: u16) -> RunningCluster {
        RunningCluster {
            coordinator: SocketAddr::from(([0, 0, 0, 0], port)),
            run_dir: "/runs/a".into(),
            page: None,
            encrypted: false,
            token: true,
            process: 7,
            since: port.into(),
        }
    }

    #[test]
    fn a_coordinator_is_found_while_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("flambeau");
        assert_eq!(find(&folder).unwrap(), []);
        let second = register(&folder, &cluster(2)).unwrap();
        let first = register(&folder, &cluster(1)).unwrap();
        assert_eq!(find(&folder).unwrap(), [cluster(1), cluster(2)]);
        let local = find(&folder).unwrap()[0].reachable_at();
        assert_eq!(local, SocketAddr::from(([127, 0, 0, 1], 1)));
        drop(first);
        assert_eq!(find(&folder).unwrap(), [cluster(2)]);
        drop(second);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    }

    #[test]
    fn the_file_of_a_killed_coordinator_is_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("flambeau");
        let alive = register(&folder, &cluster(1)).unwrap();
        let left = folder.join("killed.json");
        std::fs::copy(&alive.path, &left).unwrap();
        assert_eq!(find(&folder).unwrap(), [cluster(1)]);
        assert!(!left.exists());
    }

    #[test]
    fn content_of_no_use_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("flambeau");
        let registered = register(&folder, &cluster(1)).unwrap();
        for text in ["", "{", "[]", "{\"coordinator\":\"somewhere\"}"] {
            std::fs::write(&registered.path, text).unwrap();
            assert_eq!(find(&folder).unwrap(), [], "{text}");
        }
    }

    #[test]
    fn a_folder_of_others_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("flambeau");
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
        for refused in [
            register(&folder, &cluster(1)).map(drop),
            find(&folder).map(drop),
        ] {
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains("this user alone"), "{refused}");
        }
    }
}
