//! The version of the format, and the names of the folders of checkpoints.

/// Version of the format that this program writes; newer ones are refused.
pub const FORMAT: u32 = 5;

const FOLDER: &str = "checkpoint-";

/// Returns the name of a checkpoint's folder.
pub fn folder_name(number: u64) -> String {
    format!("{FOLDER}{number:012}")
}

/// Returns the number of the checkpoint in a folder of this name.
pub(crate) fn number_of(folder: &str) -> Option<u64> {
    let number = folder.strip_prefix(FOLDER)?.parse().ok()?;
    (folder_name(number) == folder).then_some(number)
}
