//! Conversions between the files of a checkpoint and the messages that name them.

use shared_proto::wire;

use crate::manifest::{BlockRange, FileEntry};

impl From<BlockRange> for wire::BlockRange {
    fn from(range: BlockRange) -> Self {
        Self {
            variable: range.variable,
            first: range.first,
            last: range.last,
        }
    }
}

impl From<wire::BlockRange> for BlockRange {
    fn from(range: wire::BlockRange) -> Self {
        Self {
            variable: range.variable,
            first: range.first,
            last: range.last,
        }
    }
}

impl From<FileEntry> for wire::CheckpointFile {
    fn from(file: FileEntry) -> Self {
        Self {
            blocks: file.blocks.into_iter().map(Into::into).collect(),
            changes: file.changes.into_iter().map(Into::into).collect(),
            name: file.name,
            bytes: file.bytes,
            sha256: file.sha256,
        }
    }
}

/// The result is a file in the checkpoint's own folder.
impl From<wire::CheckpointFile> for FileEntry {
    fn from(file: wire::CheckpointFile) -> Self {
        Self {
            name: file.name,
            bytes: file.bytes,
            sha256: file.sha256,
            blocks: file.blocks.into_iter().map(Into::into).collect(),
            changes: file.changes.into_iter().map(Into::into).collect(),
            checkpoint: None,
        }
    }
}
