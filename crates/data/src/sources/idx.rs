//! MNIST and its relatives: pictures and labels in IDX files, compressed or not.
//!
//! An IDX file is a magic number (two zero bytes, the element type, the number of dimensions), the
//! size of each dimension as a big-endian `u32`, and the elements, here unsigned bytes.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use crate::dataset::Dataset;
use crate::error::InputError;
use crate::files;
use crate::samples::column::Column;
use crate::samples::memory::InMemory;
use crate::source::{DataSetup, Source};

const CLASSES: usize = 10;
const UNSIGNED_BYTE: u32 = 0x08;

/// The sources `mnist` and `fashion-mnist`.
pub struct Idx;

impl Source for Idx {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&[])?;
        load(setup.dir()?)
    }
}

fn load(folder: &Path) -> Result<Dataset, InputError> {
    let training = read_samples(folder, "train")?;
    let evaluation = read_samples(folder, "t10k")?;
    let shape = |samples: &InMemory| samples.inputs[0].field().shape.clone();
    if shape(&training) != shape(&evaluation) {
        return Err(InputError::Bytes {
            path: find(folder, "t10k-images-idx3-ubyte")?,
            offset: 8,
            problem: format!(
                "pictures have shape {:?}, those of train-images-idx3-ubyte {:?}; take both from one data set",
                shape(&evaluation),
                shape(&training)
            ),
        });
    }
    Dataset::in_memory(training, evaluation)
}

fn read_samples(folder: &Path, part: &str) -> Result<InMemory, InputError> {
    let images = IdxFile::read(find(folder, &format!("{part}-images-idx3-ubyte"))?, 3)?;
    let labels = IdxFile::read(find(folder, &format!("{part}-labels-idx1-ubyte"))?, 1)?;
    if labels.sizes[0] != images.sizes[0] {
        return Err(labels.wrong(
            4,
            format!(
                "there are {} labels, but {} pictures in {}; take both from one data set",
                labels.sizes[0],
                images.sizes[0],
                images.path.display()
            ),
        ));
    }
    if let Some(at) = labels
        .values
        .iter()
        .position(|l| usize::from(*l) >= CLASSES)
    {
        return Err(labels.wrong(
            labels.header() + at as u64,
            format!("label {} is not among 0 to 9", labels.values[at]),
        ));
    }
    let sample_shape = vec![1, images.sizes[1], images.sizes[2]];
    let labels = labels.values.into_iter().map(u32::from).collect();
    let image = Column::bytes("image", sample_shape, images.values, 255.0);
    InMemory::new(
        vec![image],
        vec![Column::category("label", labels, CLASSES as u64)],
    )
}

fn find(folder: &Path, name: &str) -> Result<PathBuf, InputError> {
    let compressed = format!("{name}.gz");
    for path in [name, &compressed].map(|name| folder.join(name)) {
        if files::is_file(&path)? {
            return Ok(path);
        }
    }
    Err(InputError::Missing {
        folder: folder.to_owned(),
        names: format!("{name} or {compressed}"),
    })
}

/// The content of one file.
struct IdxFile {
    path: PathBuf,
    sizes: Vec<usize>,
    values: Vec<u8>,
}

impl IdxFile {
    fn read(path: PathBuf, dimensions: u32) -> Result<Self, InputError> {
        let file = files::stored(&path)?;
        let mut content: Box<dyn Read> = match files::is_gzipped(&path) {
            true => Box::new(MultiGzDecoder::new(file)),
            false => file,
        };
        let mut idx = Self {
            path,
            sizes: Vec::new(),
            values: Vec::new(),
        };
        idx.read_header(&mut content, dimensions)?;
        idx.read_values(&mut content)?;
        Ok(idx)
    }

    fn read_header(&mut self, content: &mut dyn Read, dimensions: u32) -> Result<(), InputError> {
        let mut header = Vec::new();
        let length = 4 + 4 * u64::from(dimensions);
        let read = content.take(length).read_to_end(&mut header);
        let end = header.len() as u64;
        read.map_err(|error| self.broken(end, &error))?;
        let mut words = header
            .chunks_exact(4)
            .map(|word| word.iter().fold(0, |n, byte| n << 8 | u32::from(*byte)));
        let expected = UNSIGNED_BYTE << 8 | dimensions;
        if let Some(magic) = words.next().filter(|magic| *magic != expected) {
            return Err(self.wrong(
                0,
                format!(
                    "the file begins with {magic:#010x}, not with {expected:#010x}; an IDX file of unsigned bytes in {dimensions} dimensions was expected"
                ),
            ));
        }
        if end < length {
            return Err(self.wrong(
                end,
                format!("the file ends within its header of {length} bytes; get it again"),
            ));
        }
        self.sizes = words.map(|size| size as usize).collect();
        if let Some(empty) = self.sizes.iter().position(|size| *size == 0) {
            return Err(self.wrong(
                4 + 4 * empty as u64,
                "a size of 0 was found; at least 1 was expected".to_owned(),
            ));
        }
        Ok(())
    }

    /// Reads the elements. Memory grows with the content that is read; the sizes in the header allocate nothing.
    fn read_values(&mut self, content: &mut dyn Read) -> Result<(), InputError> {
        let promised = self
            .sizes
            .iter()
            .try_fold(1u64, |n, size| n.checked_mul(*size as u64))
            .filter(|n| *n < u64::MAX);
        let Some(promised) = promised else {
            return Err(self.wrong(
                4,
                format!(
                    "sizes {:?} are larger than any file; get it again",
                    self.sizes
                ),
            ));
        };
        // One more than promised, to find surplus content.
        let read = content.take(promised + 1).read_to_end(&mut self.values);
        let found = self.values.len() as u64;
        let end = self.header() + found;
        read.map_err(|error| self.broken(end, &error))?;
        if found < promised {
            return Err(self.wrong(
                end,
                format!(
                    "the file ends after {found} of the {promised} elements that its header promises ({:?}); get it again",
                    self.sizes
                ),
            ));
        }
        if found > promised {
            return Err(self.wrong(
                self.header() + promised,
                format!(
                    "the file goes on after the {promised} elements that its header promises ({:?}); get it again",
                    self.sizes
                ),
            ));
        }
        Ok(())
    }

    fn header(&self) -> u64 {
        4 + 4 * self.sizes.len() as u64
    }

    fn broken(&self, offset: u64, error: &io::Error) -> InputError {
        self.wrong(
            offset,
            format!("reading failed here ({error}); the file may be damaged, get it again"),
        )
    }

    fn wrong(&self, offset: u64, problem: String) -> InputError {
        InputError::Bytes {
            path: self.path.clone(),
            offset,
            problem,
        }
    }
}
