//! NumPy arrays in `.npy` files, one file for each class, as in Quick, Draw!
//!
//! `data.dir` is a folder of files such as `cat.npy`, each with an array `(N, ...)` of bytes or numbers. The classes
//! are sorted by the names of their files. Bytes are divided by 255. Samples of `(N, 784)` or `(N, 1, 784)`, and of
//! other square numbers, become pictures `(1, 28, 28)`. A share of each class is held out (`data.held_out`), chosen by
//! the job's seed. `data.options.most` limits the number of samples that are read of each class.

use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::f16;

use super::classes::Sorted;
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::files::{self, DataFile};
use crate::reading::chunks::{self, Chunk, Chunks};
use crate::reading::parts;
use crate::samples::column::Column;
use crate::samples::memory::InMemory;
use crate::source::{DataSetup, Source};

/// The source `npy`.
pub struct Npy;

impl Source for Npy {
    const STREAMS: bool = true;

    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&["most"])?;
        let folder = setup.dir()?;
        let mut paths = files::in_folder(folder)?;
        paths.retain(|path| {
            path.extension()
                .is_some_and(|extension| extension.eq_ignore_ascii_case("npy"))
        });
        if paths.is_empty() {
            return Err(InputError::Missing {
                folder: folder.to_owned(),
                names: "*.npy, a file for each class".to_owned(),
            });
        }
        let most = setup.whole_number("most")?;
        let files = parts::open(setup, &paths)?;
        let size = chunks::size(setup, &files);
        let arrays = files.into_iter().map(|file| Array::open(file, most));
        let arrays = arrays.collect::<Result<Vec<_>, _>>()?;
        for array in &arrays {
            array.check_like(&arrays[0])?;
        }
        if setup.settings.stream {
            return stream(setup, arrays, size);
        }
        let counts = arrays.iter().map(|array| array.count);
        let classes: Vec<_> = paths.into_iter().zip(counts).collect();
        let sorted = Sorted::new(&classes, setup)?;
        let mut elements = arrays[0].elements(0..arrays[0].count)?;
        for array in &arrays[1..] {
            elements.append(array.elements(0..array.count)?);
        }
        sorted.in_memory(arrays[0].column(elements))
    }
}

/// Returns a data set that reads the samples from their files, in chunks of about `size` bytes. A share of the chunks
/// of each class is held out.
fn stream(setup: &DataSetup, arrays: Vec<Array>, size: u64) -> Result<Dataset, InputError> {
    let mut parts = Vec::new();
    let mut classes: Vec<(PathBuf, usize)> = Vec::new();
    for (number, array) in arrays.iter().enumerate() {
        // Whole chunks are held out. A chunk is at most an eighth of the held-out share, so rounding up to whole chunks adds
        // few samples.
        let share = (array.count as f64 * setup.settings.held_out / 8.0) as usize;
        let most = (size as usize / array.sample_bytes()).min(share).max(1);
        // The chunks have nearly the same size, so the choice of chunks hardly changes the number of held-out samples.
        let samples = array.count.div_ceil(array.count.div_ceil(most));
        let before = parts.len();
        for start in (0..array.count).step_by(samples) {
            parts.push((number, start..array.count.min(start + samples)));
        }
        classes.push((array.file.path().to_path_buf(), parts.len() - before));
    }
    let Sorted {
        labels,
        transforms,
        training,
        evaluation,
    } = Sorted::new(&classes, setup)?;
    let chunk = |(number, samples): &(usize, Range<usize>)| Chunk {
        samples: samples.len() as u32,
        bytes: (samples.len() * arrays[*number].sample_bytes()) as u64,
    };
    let classes = Arc::new(Classes {
        chunks: parts.iter().map(chunk).collect(),
        arrays,
        parts,
        labels,
    });
    let target = transforms.target.clone();
    let decode =
        move |(inputs, labels)| InMemory::new(vec![inputs], vec![Sorted::column(&target, labels)]);
    let (training, evaluation) = ((classes.clone(), training), (classes, evaluation));
    let transforms = Some(transforms);
    chunks::streamed(setup, training, evaluation, Arc::new(decode), transforms)
}

/// Arrays in files, one for each class.
struct Classes {
    arrays: Vec<Array>,
    /// The index of each chunk's array, and the samples of the chunk in it.
    parts: Vec<(usize, Range<usize>)>,
    chunks: Vec<Chunk>,
    /// The label of each chunk's samples.
    labels: Vec<u32>,
}

impl Chunks for Classes {
    /// The index of a chunk, and its bytes.
    type Raw = (usize, Vec<u8>);
    /// The samples, and their labels.
    type Parsed = (Column, Vec<u32>);

    fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    fn read(&self, chunk: usize) -> Result<Self::Raw, InputError> {
        let (array, samples) = &self.parts[chunk];
        Ok((chunk, self.arrays[*array].read(samples.clone())?))
    }

    fn parse(
        &self,
        (chunk, bytes): &Self::Raw,
        samples: &[u32],
    ) -> Result<Self::Parsed, InputError> {
        let (array, range) = &self.parts[*chunk];
        let array = &self.arrays[*array];
        let size = array.sample_bytes();
        let mut selected = Vec::with_capacity(samples.len() * size);
        for sample in samples {
            selected.extend_from_slice(&bytes[*sample as usize * size..][..size]);
        }
        let elements = array.checked(selected, |sample| range.start + samples[sample] as usize)?;
        Ok((
            array.column(elements),
            vec![self.labels[*chunk]; samples.len()],
        ))
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        for array in &self.arrays {
            let name = array.file.path().file_name().unwrap_or_default();
            hash(name.as_encoded_bytes());
            hash(&array.file.size().to_le_bytes());
        }
    }
}

/// The array in a file.
struct Array {
    file: DataFile,
    header: Header,
    /// The shape of a sample.
    shape: Vec<usize>,
    /// The number of samples that are read.
    count: usize,
}

/// The elements of samples.
enum Elements {
    Bytes(Vec<u8>),
    Numbers(Vec<f32>),
}

impl Elements {
    /// Appends elements of the same type.
    fn append(&mut self, more: Self) {
        match (self, more) {
            (Self::Bytes(all), Self::Bytes(more)) => all.extend(more),
            (Self::Numbers(all), Self::Numbers(more)) => all.extend(more),
            _ => unreachable!("all classes have elements of one type"),
        }
    }
}

impl Array {
    /// Reads the header of a file. The array has the first `most` samples of the file, or all samples without `most`.
    fn open(file: DataFile, most: Option<u64>) -> Result<Self, InputError> {
        let (path, length) = (file.path(), file.size());
        let header = Header::read(&mut file.reader()).map_err(|problem| wrong(path, &problem))?;
        let dims = &header.shape;
        let [count, sample @ ..] = dims.as_slice() else {
            return Err(wrong(
                path,
                "the array is a single value; (N, ...) was expected",
            ));
        };
        // The file is not trusted: its header may promise more than there is.
        let elements = dims.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64));
        let promised = elements.and_then(|n| n.checked_mul(header.size as u64));
        if promised.is_none() || promised != length.checked_sub(header.length) {
            return Err(wrong(
                path,
                &format!(
                    "the array of shape {dims:?} cannot be read: the file is truncated or damaged, with {length} bytes in all"
                ),
            ));
        }
        let count = most.map_or(*count, |most| (*count).min(most as usize));
        if count == 0 || sample.contains(&0) {
            return Err(wrong(
                path,
                &format!("the array has shape {dims:?}, of which no sample is read"),
            ));
        }
        Ok(Self {
            shape: picture(sample),
            count,
            header,
            file,
        })
    }

    /// Refuses the array if its samples differ in type or shape from the samples of the first class.
    fn check_like(&self, first: &Self) -> Result<(), InputError> {
        let (ours, theirs) = (self.described(), first.described());
        match ours == theirs {
            true => Ok(()),
            false => Err(wrong(
                self.file.path(),
                &format!(
                    "samples are {ours}, but samples of the first class are {theirs}; give all classes the same type and shape"
                ),
            )),
        }
    }

    /// Returns the type and the shape of a sample, for messages.
    fn described(&self) -> String {
        let kind = match self.header.size {
            1 => "u8",
            _ => "f32",
        };
        format!("{kind} of shape {:?}", self.shape)
    }

    fn sample_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.header.size
    }

    /// Returns the bytes of samples.
    fn read(&self, samples: Range<usize>) -> Result<Vec<u8>, InputError> {
        let place = |sample: usize| self.header.length + (sample * self.sample_bytes()) as u64;
        self.file.read(place(samples.start)..place(samples.end))
    }

    fn elements(&self, samples: Range<usize>) -> Result<Elements, InputError> {
        let first = samples.start;
        self.checked(self.read(samples)?, |sample| first + sample)
    }

    /// Returns the elements of samples with these bytes. Refuses NaN and infinity. `number` maps the index of a sample
    /// in `bytes` to its index in the file.
    fn checked(
        &self,
        bytes: Vec<u8>,
        number: impl Fn(usize) -> usize,
    ) -> Result<Elements, InputError> {
        let elements = self.header.elements(bytes);
        if let Elements::Numbers(numbers) = &elements
            && let Some(at) = numbers.iter().position(|v| !v.is_finite())
        {
            let sample = number(at * self.header.size / self.sample_bytes());
            let problem = format!("sample {sample} holds NaN or infinity");
            return Err(wrong(self.file.path(), &problem));
        }
        Ok(elements)
    }

    fn column(&self, elements: Elements) -> Column {
        let shape = self.shape.clone();
        match elements {
            Elements::Bytes(values) => Column::bytes("image", shape, values, 255.0),
            Elements::Numbers(values) => Column::numbers("image", shape, values),
        }
    }
}

/// The header of a file: a magic number, the version, the length of a text, and the text, which is a Python dictionary
/// ("NumPy Enhancement Proposal 1").
struct Header {
    /// The number of bytes before the values.
    length: u64,
    /// The type of the values, as in `<f4`.
    kind: String,
    /// The number of bytes of each value.
    size: usize,
    shape: Vec<usize>,
}

impl Header {
    fn read(file: &mut impl Read) -> Result<Self, String> {
        let broken = |_| "the array cannot be read: its header is not whole".to_owned();
        let mut begin = [0; 8];
        file.read_exact(&mut begin).map_err(broken)?;
        if !begin.starts_with(b"\x93NUMPY") {
            return Err("the array cannot be read: it is no .npy file".to_owned());
        }
        // The length has two bytes in version 1, and four in later ones.
        let mut length = [0; 4];
        let width = if begin[6] == 1 { 2 } else { 4 };
        file.read_exact(&mut length[..width]).map_err(broken)?;
        let length = u32::from_le_bytes(length);
        if length > 1 << 16 {
            return Err("the array cannot be read: its header is too long".to_owned());
        }
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(broken)?;
        let text = String::from_utf8_lossy(&text);
        let after = |key: &str| text.split_once(key).map(|(_, rest)| rest.trim_start());
        let kind = after("'descr':").and_then(|rest| rest.strip_prefix('\'')?.split_once('\''));
        let shape = after("'shape':").and_then(|rest| rest.strip_prefix('(')?.split_once(')'));
        let (Some((kind, _)), Some((shape, _))) = (kind, shape) else {
            return Err("the array cannot be read: its header has no type or shape".to_owned());
        };
        if after("'fortran_order':").is_some_and(|rest| rest.starts_with("True")) {
            return Err(
                "the array is in Fortran's order; save it with numpy.ascontiguousarray".to_owned(),
            );
        }
        let sizes = shape
            .split(',')
            .map(str::trim)
            .filter(|size| !size.is_empty());
        let shape: Result<Vec<usize>, _> = sizes.map(str::parse).collect();
        let size = match kind {
            // candle writes the latter.
            "|u1" | "<u1" | ">u1" => 1,
            "<f2" | ">f2" => 2,
            "<f4" | "<i4" | "<u4" | ">f4" | ">i4" | ">u4" => 4,
            "<f8" | "<i8" | ">f8" | ">i8" => 8,
            other => {
                return Err(format!(
                    "the array is of type {other}; save it as uint8, or as float32 or another number of 4 or 8 bytes"
                ));
            }
        };
        Ok(Self {
            length: 8 + width as u64 + u64::from(length),
            kind: kind.to_owned(),
            size,
            shape: shape.map_err(|_| {
                "the array cannot be read: its shape is no list of sizes".to_owned()
            })?,
        })
    }

    /// Returns the elements with these bytes. Elements of one byte stay bytes, and others become `f32`.
    fn elements(&self, bytes: Vec<u8>) -> Elements {
        fn numbers<const N: usize>(bytes: &[u8], number: fn([u8; N]) -> f32) -> Elements {
            let (values, _) = bytes.as_chunks::<N>();
            Elements::Numbers(values.iter().map(|value| number(*value)).collect())
        }
        match self.kind.as_str() {
            "<f2" => numbers(&bytes, |v| f16::from_le_bytes(v).to_f32()),
            "<f4" => numbers(&bytes, f32::from_le_bytes),
            "<f8" => numbers(&bytes, |v| f64::from_le_bytes(v) as f32),
            "<i4" => numbers(&bytes, |v| i32::from_le_bytes(v) as f32),
            "<u4" => numbers(&bytes, |v| u32::from_le_bytes(v) as f32),
            "<i8" => numbers(&bytes, |v| i64::from_le_bytes(v) as f32),
            ">f2" => numbers(&bytes, |v| f16::from_be_bytes(v).to_f32()),
            ">f4" => numbers(&bytes, f32::from_be_bytes),
            ">f8" => numbers(&bytes, |v| f64::from_be_bytes(v) as f32),
            ">i4" => numbers(&bytes, |v| i32::from_be_bytes(v) as f32),
            ">u4" => numbers(&bytes, |v| u32::from_be_bytes(v) as f32),
            ">i8" => numbers(&bytes, |v| i64::from_be_bytes(v) as f32),
            _ => Elements::Bytes(bytes),
        }
    }
}

/// Returns the shape of a sample. A single row of at least 64 values becomes a square picture if its length is a square
/// number.
fn picture(sample: &[usize]) -> Vec<usize> {
    let (&[size] | &[1, size]) = sample else {
        return sample.to_vec();
    };
    let side = size.isqrt();
    match side * side == size && side >= 8 {
        true => vec![1, side, side],
        false => vec![size],
    }
}

fn wrong(path: &Path, problem: &str) -> InputError {
    InputError::Invalid(format!("{}: {problem}", path.display()))
}
