//! CIFAR-10: pictures of 32 x 32 in binary files.
//!
//! A file is a sequence of records of 3,073 bytes: the label, and the red, green and blue values, row by row
//! (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; "Binary version"). `data.dir` is a
//! folder. Its files `data_batch*.bin` are the training files, read in the order of their names, and its files
//! `test_batch*.bin` have the held-out samples. The whole data set has `data_batch_1.bin` to `data_batch_5.bin` and
//! `test_batch.bin`.

use std::path::{Path, PathBuf};

use crate::dataset::Dataset;
use crate::error::InputError;
use crate::files;
use crate::samples::column::Column;
use crate::samples::memory::InMemory;
use crate::source::{DataSetup, Source};

const SHAPE: [usize; 3] = [3, 32, 32];
const PIXELS: usize = 3 * 32 * 32;
const RECORD: usize = 1 + PIXELS;
const CLASSES: u8 = 10;

/// The source `cifar10`.
pub struct Cifar10;

impl Source for Cifar10 {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&[])?;
        let folder = setup.dir()?;
        let part = |prefix| read_part(folder, prefix);
        Dataset::in_memory(part("data_batch")?, part("test_batch")?)
    }
}

fn read_part(folder: &Path, prefix: &str) -> Result<InMemory, InputError> {
    let is_of_part = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(prefix) && name.ends_with(".bin")
    };
    let files: Vec<_> = files::in_folder(folder)?
        .into_iter()
        .filter(is_of_part)
        .collect();
    if files.is_empty() {
        return Err(InputError::Missing {
            folder: folder.to_owned(),
            names: format!("{prefix}*.bin"),
        });
    }
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for path in files {
        let content = files::read(&path)?;
        let wrong = |offset: usize, problem: String| InputError::Bytes {
            path: path.clone(),
            offset: offset as u64,
            problem,
        };
        if content.len() % RECORD != 0 || content.is_empty() {
            let whole = content.len() - content.len() % RECORD;
            return Err(wrong(
                whole,
                format!(
                    "{} bytes follow; records have {RECORD}, so the file is damaged, get it again",
                    content.len() - whole
                ),
            ));
        }
        for (record, bytes) in content.chunks_exact(RECORD).enumerate() {
            let (label, picture) = (bytes[0], &bytes[1..]);
            if label >= CLASSES {
                return Err(wrong(
                    record * RECORD,
                    format!("label {label} is not among 0 to 9"),
                ));
            }
            labels.push(u32::from(label));
            pixels.extend_from_slice(picture);
        }
    }
    let image = Column::bytes("image", SHAPE.to_vec(), pixels, 255.0);
    InMemory::new(
        vec![image],
        vec![Column::category("label", labels, CLASSES.into())],
    )
}
