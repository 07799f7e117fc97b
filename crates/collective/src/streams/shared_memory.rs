//! Memory that two processes of a host share: files in a folder that the kernel keeps in memory, such as `/dev/shm`.
//!
//! The process that opens a link creates the files and tells the peer their names. If the peer finds files of these names, both
//! processes are on one host, and pieces go through the files instead of the connection: the kernel copies them without dividing them
//! into packets, and both copies stay in the processor's cache. The names are removed as soon as the peer has answered.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use bytes::Bytes;
use rustix::buffer::spare_capacity;
use rustix::fs::OFlags;
#[cfg(target_os = "linux")]
use rustix::fs::fstatfs;
use rustix::io::{Errno, pread};
use rustix::process::geteuid;
use tempfile::TempPath;

use crate::pieces::PIECE_BYTES;

/// The folder for shared memory, on systems that have one.
pub const SHARED_MEMORY: &str = "/dev/shm";

/// The number of slots, each for a piece, in one direction. With more slots, the memory does not stay in the cache.
pub(super) const SLOTS: usize = 8;

/// The size of a file in bytes. A file has the slots of one direction.
const BYTES: usize = SLOTS * PIECE_BYTES;

/// The prefix of file names.
const PREFIX: &str = "flambeau-";

/// The number of random characters in a name, which keep two hosts from having files of the same name.
const RANDOM: usize = 24;

/// Memory that is shared with a peer. Each side writes to its own slots, one after the other, and reads the peer's
/// slots. Each side's slots are in a separate file, because writes to a file exclude each other.
pub(super) struct SharedMemory {
    own: File,
    theirs: File,
}

/// Memory that the peer has not opened yet. Dropping the value removes the names of its files.
pub(super) struct Offered {
    paths: [TempPath; 2],
    memory: SharedMemory,
}

impl Offered {
    /// Creates memory in a folder.
    ///
    /// # Errors
    /// If the folder does not exist, is full, or is not in memory.
    pub(super) fn create(folder: &Path) -> io::Result<Self> {
        let ((own, own_path), (theirs, theirs_path)) = (create(folder)?, create(folder)?);
        Ok(Self {
            paths: [own_path, theirs_path],
            memory: SharedMemory { own, theirs },
        })
    }

    /// Returns the names of the files that the peer has to open: that with this side's slots, then that with the
    /// peer's.
    pub(super) fn names(&self) -> Vec<String> {
        let names = self.paths.iter().map(|path| path.file_name());
        let text = |name: Option<&OsStr>| name.unwrap_or_default().to_string_lossy().into_owned();
        names.map(text).collect()
    }

    /// Returns the memory once the peer has opened it, and removes the names of its files.
    pub(super) fn accepted(self) -> SharedMemory {
        self.memory
    }
}

impl SharedMemory {
    /// Opens the memory of a peer. Returns `None` if there are no files of these names: then the peer is on another
    /// host.
    pub(super) fn open(folder: &Path, names: &[String]) -> Option<Self> {
        let [theirs, own] = names else {
            return None;
        };
        Some(Self {
            own: open(folder, own)?,
            theirs: open(folder, theirs)?,
        })
    }

    /// Writes this side's piece `number`, counted from 0. Its slot must be free.
    pub(super) fn write(&self, number: usize, piece: &[u8]) -> io::Result<()> {
        self.own.write_all_at(piece, offset(number))
    }

    /// Reads the peer's piece `number`, counted from 0, which has `length` bytes.
    pub(super) fn read(&self, number: usize, length: usize) -> io::Result<Bytes> {
        let mut piece = Vec::with_capacity(length);
        while piece.len() < length {
            let begin = offset(number) + piece.len() as u64;
            match pread(&self.theirs, spare_capacity(&mut piece), begin) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // The allocator may have reserved more.
        piece.truncate(length);
        Ok(piece.into())
    }
}

/// Creates a file of a random name, which only this user can open.
fn create(folder: &Path) -> io::Result<(File, TempPath)> {
    let named = tempfile::Builder::new()
        .prefix(PREFIX)
        .rand_bytes(RANDOM)
        .tempfile_in(folder)?;
    check_in_memory(named.as_file())?;
    // Written now, so that no later write finds the folder full.
    named.as_file().write_all_at(&vec![0; BYTES], 0)?;
    Ok(named.into_parts())
}

/// Refuses a file on a disk, which would be slow, or on a network file system, which two hosts could share.
#[cfg(target_os = "linux")]
fn check_in_memory(file: &File) -> io::Result<()> {
    /// `TMPFS_MAGIC` of statfs(2).
    const TMPFS: i128 = 0x0102_1994;
    match i128::from(fstatfs(file)?.f_type) {
        TMPFS => Ok(()),
        _ => Err(io::Error::other("the folder is not in memory (tmpfs)")),
    }
}

/// Other systems have no such folder.
#[cfg(not(target_os = "linux"))]
fn check_in_memory(_: &File) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Opens a file that a peer has created, and nothing else: no link to another file, and no file of another user.
fn open(folder: &Path, name: &str) -> Option<File> {
    let random = name.strip_prefix(PREFIX)?;
    if random.len() != RANDOM || !random.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return None;
    }
    // The call must not wait for another process that holds a lease on the file.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags.bits() as i32)
        .open(folder.join(name))
        .ok()?;
    let found = file.metadata().ok()?;
    let is_peers = found.is_file()
        && found.len() == BYTES as u64
        && found.nlink() == 1
        && found.uid() == geteuid().as_raw();
    is_peers.then_some(file)
}

/// Returns the offset of a piece in its side's file, in bytes.
fn offset(number: usize) -> u64 {
    (number % SLOTS * PIECE_BYTES) as u64
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    /// A new folder in memory, where this system has that.
    fn folder() -> Option<TempDir> {
        let folder = tempfile::tempdir_in(SHARED_MEMORY);
        let missing = |_: &io::Error| println!("SKIPPED: there is no {SHARED_MEMORY}");
        folder.inspect_err(missing).ok()
    }

    /// Returns both sides of memory in a new folder.
    fn shared() -> Option<(SharedMemory, SharedMemory, TempDir)> {
        let folder = folder()?;
        let offered = Offered::create(folder.path()).unwrap();
        let theirs = SharedMemory::open(folder.path(), &offered.names()).unwrap();
        Some((offered.accepted(), theirs, folder))
    }

    #[test]
    fn both_sides_write_to_slots_of_their_own() {
        let Some((caller, callee, folder)) = shared() else {
            return;
        };
        // The names are removed, so nothing remains when the processes end.
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
        let piece = |side: u8, number: usize| vec![side + number as u8; PIECE_BYTES - number];
        for number in 0..SLOTS {
            caller.write(number, &piece(0, number)).unwrap();
            callee.write(number, &piece(100, number)).unwrap();
        }
        for number in 0..SLOTS {
            let length = PIECE_BYTES - number;
            assert!(callee.read(number, length).unwrap() == piece(0, number));
            assert!(caller.read(number, length).unwrap() == piece(100, number));
        }
        caller.write(SLOTS, b"again").unwrap();
        assert_eq!(callee.read(0, 5).unwrap(), "again");
    }

    #[test]
    fn nothing_else_is_opened() {
        let (Some(folder), Some(elsewhere)) = (folder(), folder()) else {
            return;
        };
        let offered = Offered::create(folder.path()).unwrap();
        let names = offered.names();
        let name = &names[0];
        let open = |name: &str| super::open(folder.path(), name).is_some();
        assert!(names.iter().all(|name| open(name)));
        assert!(SharedMemory::open(elsewhere.path(), &names).is_none());
        for wrong in [&[], &names[..1], &[names.clone(), names.clone()].concat()] {
            assert!(SharedMemory::open(folder.path(), wrong).is_none());
        }
        for wrong in ["", "flambeau-", "/etc/passwd", "../etc/passwd", &name[1..]] {
            assert!(!open(wrong), "{wrong}");
        }
        // Of the right form, but short, or no file.
        let other = |last: char| format!("{}{last}", &name[..name.len() - 1]);
        let others = ['+', '/', '.'].map(other);
        assert!(others.iter().all(|name| !open(name)));
        let short = format!("{PREFIX}{}", "a".repeat(RANDOM));
        std::fs::write(folder.path().join(&short), b"short").unwrap();
        assert!(!open(&short));
        let linked = format!("{PREFIX}{}", "b".repeat(RANDOM));
        symlink(folder.path().join(name), folder.path().join(&linked)).unwrap();
        assert!(!open(&linked));
        let other = format!("{PREFIX}{}", "c".repeat(RANDOM));
        std::fs::hard_link(folder.path().join(name), folder.path().join(&other)).unwrap();
        assert!(!open(&other) && !open(name));
        std::fs::remove_file(folder.path().join(&other)).unwrap();
        assert!(open(name));
        drop(offered);
        assert!(!names.iter().any(|name| open(name)));
    }

    #[test]
    fn memory_that_a_peer_has_cut_is_an_error() {
        let Some((caller, callee, _folder)) = shared() else {
            return;
        };
        callee.write(3, &[1; 1000]).unwrap();
        caller.theirs.set_len(10).unwrap();
        let error = caller.read(3, 1000).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_folder_on_a_disk_or_nowhere_is_not_used() {
        assert!(Offered::create(Path::new("/nowhere")).is_err());
        let disk = Path::new(env!("CARGO_MANIFEST_DIR"));
        if let Err(error) = Offered::create(disk) {
            assert!(error.to_string().contains("not in memory"), "{error}");
        } else {
            println!("SKIPPED: the sources are in memory");
        }
    }
}
