//! The settings of a server for rows of tables.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use table::disk::Disk;

use crate::error::PsError;

/// The settings of a server for rows of tables.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct RowSettings {
    /// Memory for the rows of embedding tables and their index, in MiB. When it is full, the least recently used rows
    /// go to disk. Default: all rows stay in memory.
    #[arg(long, env = "FLAMBEAU_TABLE_MEBIBYTES")]
    pub table_mebibytes: Option<u64>,
    /// The folder for rows on disk. The files have no name, and the system deletes them when the process ends. Default:
    /// the system's folder for temporary files.
    #[arg(long, env = "FLAMBEAU_TABLE_FOLDER", value_name = "DIR")]
    pub table_folder: Option<PathBuf>,
    /// Count the gradients of each id, and keep the N ids with the most gradients in each bucket of a table (0 to 100),
    /// for `flambeau table NAME heat`. Each of these ids takes some 100 bytes. Ids may be personal data, and every
    /// reader of rows can read them.
    #[arg(long, env = "FLAMBEAU_HOTTEST_IDS", value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=100))]
    pub hottest_ids: u32,
}

/// A server's options for rows of tables.
#[derive(Clone, Debug, Default)]
pub struct RowStorage {
    /// The disk for rows beyond the limit on memory; `None` if there is no limit.
    pub disk: Option<Arc<Disk>>,
    /// The number of hottest ids to keep for each bucket.
    pub hottest_ids: usize,
}

impl RowSettings {
    /// Returns the command-line flags that give a server these settings.
    pub fn flags(&self) -> Vec<OsString> {
        let mut flags = Vec::new();
        if let Some(mebibytes) = self.table_mebibytes {
            flags.extend(["--table-mebibytes".into(), mebibytes.to_string().into()]);
        }
        if let Some(folder) = &self.table_folder {
            flags.extend(["--table-folder".into(), folder.into()]);
        }
        if self.hottest_ids > 0 {
            flags.extend(["--hottest-ids".into(), self.hottest_ids.to_string().into()]);
        }
        flags
    }

    /// Returns the server's options for rows, as these settings give them.
    ///
    /// # Errors
    /// If the folder for rows on disk cannot be used.
    pub(crate) fn storage(&self) -> Result<RowStorage, PsError> {
        Ok(RowStorage {
            disk: self.disk()?,
            hottest_ids: self.hottest_ids as usize,
        })
    }

    /// Returns the disk for rows beyond the limit on memory, or `None` if there is no limit.
    fn disk(&self) -> Result<Option<Arc<Disk>>, PsError> {
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
