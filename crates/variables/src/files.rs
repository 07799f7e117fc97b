//! Variables as safetensors files.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use bytes::Bytes;
use safetensors::tensor::TensorView;
use safetensors::{SafeTensorError, SafeTensors};
use sha2::{Digest, Sha256};
use shared_proto::payload::{Dtype, Elements};

use super::error::VariablesError;
use super::set::Variables;

impl Variables {
    /// Writes all variables to a safetensors file, under their own names. The file appears whole
    /// or not at all.
    ///
    /// # Errors
    /// [`VariablesError::File`] names the file, or candle's.
    pub fn save(&self, path: &Path) -> Result<(), VariablesError> {
        let values: Vec<Bytes> = (0..self.0.len())
            .map(|variable| self.values(variable))
            .collect::<Result<_, _>>()?;
        let write = || {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            let mut views = Vec::with_capacity(values.len());
            for ((spec, _), bytes) in self.0.iter().zip(&values) {
                let shape = spec.shape.clone();
                let view = TensorView::new(safetensors::Dtype::F32, shape, bytes);
                views.push((&spec.name, view.map_err(io::Error::other)?));
            }
            let mut partial = OsString::from(path);
            partial.push(".partial");
            // The file gets the usual permissions. safetensors would create one for the owner alone.
            let usual = File::create(&partial)?.metadata()?.permissions();
            let written = safetensors::serialize_to_file(views, None, Path::new(&partial));
            if let Err(error) = written {
                // It may have filled the disk.
                let _ = std::fs::remove_file(&partial);
                return Err(match error {
                    SafeTensorError::IoError(error) => error,
                    error => io::Error::other(error),
                });
            }
            std::fs::set_permissions(&partial, usual)?;
            File::open(&partial)?.sync_all()?;
            std::fs::rename(&partial, path)
        };
        write().map_err(|source| VariablesError::File {
            action: "written",
            path: path.to_owned(),
            source,
        })
    }

    /// Sets all variables from a safetensors file. Either all are set, or none.
    ///
    /// # Errors
    /// [`VariablesError::File`] if it cannot be read, [`VariablesError::Mismatch`] if it holds
    /// other variables than these, or candle's.
    pub fn load(&self, path: &Path) -> Result<(), VariablesError> {
        self.take(&read(path)?, path)
    }

    /// Sets all variables from the content of a safetensors file at `path`. Either all are set, or none.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn take(&self, content: &[u8], path: &Path) -> Result<(), VariablesError> {
        let file = parse(content, path)?;
        let differences = self.differences(&file);
        if !differences.is_empty() {
            return Err(VariablesError::Mismatch {
                path: path.to_owned(),
                differences: differences.join("; "),
            });
        }
        for (variable, (spec, _)) in self.0.iter().enumerate() {
            // The file has it. A missing variable is one of the differences.
            if let Ok(tensor) = file.tensor(&spec.name) {
                let values = Bytes::copy_from_slice(tensor.data());
                self.write(variable, 0, &Elements::new(values, Dtype::F32))?;
            }
        }
        Ok(())
    }

    fn differences(&self, file: &SafeTensors) -> Vec<String> {
        let mut differences = Vec::new();
        for (spec, _) in &self.0 {
            match file.tensor(&spec.name) {
                Err(_) => differences.push(format!("{spec} is missing")),
                Ok(found)
                    if found.shape() != spec.shape || found.dtype() != safetensors::Dtype::F32 =>
                {
                    differences.push(format!(
                        "{spec} of F32 is there with shape {:?} of {}",
                        found.shape(),
                        found.dtype()
                    ));
                }
                Ok(_) => {}
            }
        }
        let unknown = |name: &&str| !self.0.iter().any(|(spec, _)| spec.name == **name);
        let mut names = file.names();
        names.sort_unstable();
        for name in names.into_iter().filter(|name| unknown(name)) {
            differences.push(format!("{name:?} is none of the model's"));
        }
        differences
    }
}

/// Returns the content of a file.
///
/// # Errors
/// [`VariablesError::File`] if it cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>, VariablesError> {
    std::fs::read(path).map_err(|source| unreadable(path, source))
}

/// Returns the tensors in the content of a safetensors file.
fn parse<'a>(content: &'a [u8], path: &Path) -> Result<SafeTensors<'a>, VariablesError> {
    SafeTensors::deserialize(content)
        .map_err(|error| unreadable(path, io::Error::new(io::ErrorKind::InvalidData, error)))
}

fn unreadable(path: &Path, source: io::Error) -> VariablesError {
    VariablesError::File {
        action: "read",
        path: path.to_owned(),
        source,
    }
}

/// Returns the SHA-256 of a file's content.
///
/// # Errors
/// [`VariablesError::File`] if it cannot be read.
pub fn digest_of(path: &Path) -> Result<Bytes, VariablesError> {
    let read = || {
        let mut hash = Sha256::new();
        let mut file = BufReader::with_capacity(1 << 20, File::open(path)?);
        loop {
            let part = file.fill_buf()?;
            if part.is_empty() {
                return Ok(Bytes::copy_from_slice(&hash.finalize()));
            }
            hash.update(part);
            let length = part.len();
            file.consume(length);
        }
    };
    read().map_err(|source| VariablesError::File {
        action: "read back",
        path: path.to_owned(),
        source,
    })
}
