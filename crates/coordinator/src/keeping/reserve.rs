//! Disk space that is reserved for the state.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The disk space that is reserved for the state. The state's size is bounded, and redb writes a new state
/// before it frees the old one.
pub(super) const RESERVE_BYTES: usize = 4 << 20;

/// The number of writes after which a released reserve is made again, if there is room.
pub(super) const RESERVE_AGAIN: u32 = 256;

/// A file that reserves disk space for the state. If checkpoints or logs fill the disk, this file is deleted
/// and the state is written in its place.
pub(super) struct Reserve {
    pub(super) path: PathBuf,
    pub(super) state: PathBuf,
    held: bool,
    /// True if a released reserve is made again.
    pub(super) wanted: bool,
    writes: u32,
}

impl Reserve {
    pub(super) fn beside(state: &Path) -> Self {
        let path = state.with_extension("reserve");
        Self {
            held: path.exists(),
            path,
            state: state.to_owned(),
            wanted: true,
            writes: 0,
        }
    }

    /// Deletes the file. Returns whether that has freed space.
    pub(super) fn release(&mut self) -> bool {
        std::mem::take(&mut self.held) && std::fs::remove_file(&self.path).is_ok()
    }

    /// Creates the file, if there is room. The coordinator works without it too.
    pub(super) fn make(&mut self) {
        let found = std::fs::metadata(&self.path);
        self.held = found.is_ok_and(|found| found.len() == RESERVE_BYTES as u64);
        if self.held {
            return;
        }
        // Written, because a sparse file takes no room.
        let made = File::create(&self.path).and_then(|mut file| {
            let zeros = vec![0; RESERVE_BYTES];
            file.write_all(&zeros)?;
            file.sync_all()
        });
        self.held = made.is_ok();
        if let Err(error) = made {
            let path = self.path.display();
            tracing::warn!("cannot reserve room for the state in {path}: {error}");
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Creates a released reserve again after [`RESERVE_AGAIN`] writes.
    pub(super) fn see_to(&mut self) {
        if self.held || !self.wanted {
            return;
        }
        self.writes += 1;
        if self.writes >= RESERVE_AGAIN {
            self.writes = 0;
            self.make();
        }
    }
}
