//! The setting of the memory for rows of tables.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use table::disk::Disk;

use crate::error::PsError;

/// The memory for rows of tables.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TableMemory {
    /// Memory for the rows of embedding tables with their index, in MiB. The least recently used rows beyond it go to disk.
    /// Default: all rows stay in memory.
    #[arg(long, env = "FLAMBEAU_TABLE_MEBIBYTES")]
    pub table_mebibytes: Option<u64>,
    /// The folder for rows on disk. The files have no name, and the system deletes them when the process ends. Default: the
    /// system's folder for temporary files.
    #[arg(long, env = "FLAMBEAU_TABLE_FOLDER", value_name = "DIR")]
    pub table_folder: Option<PathBuf>,
}

impl TableMemory {
    /// Returns the flags that give a server this setting.
    pub fn flags(&self) -> Vec<OsString> {
        let mut flags = Vec::new();
        if let Some(mebibytes) = self.table_mebibytes {
            flags.extend(["--table-mebibytes".into(), mebibytes.to_string().into()]);
        }
        if let Some(folder) = &self.table_folder {
            flags.extend(["--table-folder".into(), folder.into()]);
        }
        flags
    }

    /// Returns the limit on the memory of rows, if there is one.
    pub(crate) fn disk(&self) -> Result<Option<Arc<Disk>>, PsError> {
        let Some(mebibytes) = self.table_mebibytes else {
            return Ok(None);
        };
        let folder = self.table_folder.clone();
        let folder = folder.unwrap_or_else(std::env::temp_dir);
        let limit = usize::try_from(mebibytes.saturating_mul(1 << 20)).unwrap_or(usize::MAX);
        let disk = Disk::new(&folder, limit).map_err(|error| PsError::TableFolder {
            folder: folder.display().to_string(),
            error,
        })?;
        metrics::gauge!("flambeau_ps_table_memory_limit_bytes").set(limit as f64);
        Ok(Some(Arc::new(disk)))
    }
}
