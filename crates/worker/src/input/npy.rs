//! Arrays of NumPy in `.npy` files, a file for each class, as Quick, Draw! has them.
//!
//! `data.dir` is a folder of files such as `cat.npy`, each an array `(N, ...)` of bytes or numbers; the classes are the
//! files in the order of their names. Bytes are divided by 255. Rows of `(N, 784)` or `(N, 1, 784)`, and of other squares,
//! become pictures `(1, 28, 28)`. A share of each class is held out (`data.held_out`), chosen by the job's seed.
//! `data.options.most` limits the samples that are read of each class.

use std::io::Read;
use std::path::Path;

use half::f16;

use super::classes::Sorted;
use super::column::Column;
use super::dataset::Dataset;
use super::error::InputError;
use super::files;
use super::source::{DataSetup, Source};

/// The source `npy`.
pub struct Npy;

impl Source for Npy {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&["most"])?;
        let folder = setup.dir()?;
        let mut files = files::in_folder(folder)?;
        files.retain(|path| path.extension().is_some_and(|extension| extension == "npy"));
        let Some((first, others)) = files.split_first() else {
            return Err(InputError::Missing {
                folder: folder.to_owned(),
                names: "*.npy, a file for each class".to_owned(),
            });
        };
        let most = setup.whole_number("most")?;
        let mut all = Array::read(first, most)?;
        let mut counts = vec![all.count];
        for path in others {
            let array = Array::read(path, most)?;
            counts.push(array.count);
            all.append(array, path)?;
        }
        let classes: Vec<_> = files.into_iter().zip(counts).collect();
        Sorted::of(&classes, setup)?.in_memory(all.column())
    }
}

/// The samples of a file, or of several.
struct Array {
    shape: Vec<usize>,
    count: usize,
    elements: Elements,
}

/// The elements of an array.
enum Elements {
    Bytes(Vec<u8>),
    Numbers(Vec<f32>),
}

impl Array {
    /// Reads the first `most` samples of a file, or all.
    fn read(path: &Path, most: Option<u64>) -> Result<Self, InputError> {
        let length = files::size(path)?;
        let mut file = files::stored(path)?;
        let header = Header::read(&mut file).map_err(|problem| wrong(path, &problem))?;
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
        let size: usize = sample.iter().product();
        let mut bytes = vec![0; count * size * header.size];
        file.read_exact(&mut bytes)
            .map_err(files::unreadable(path))?;
        let elements = header.elements(bytes);
        if let Elements::Numbers(numbers) = &elements
            && let Some(at) = numbers.iter().position(|v| !v.is_finite())
        {
            let problem = format!("sample {} holds NaN or infinity", at / size);
            return Err(wrong(path, &problem));
        }
        Ok(Self {
            shape: picture(sample),
            count,
            elements,
        })
    }

    /// Appends the samples of another class, read from `path`.
    fn append(&mut self, next: Self, path: &Path) -> Result<(), InputError> {
        let (ours, theirs) = (self.described(), next.described());
        match (&mut self.elements, next.elements) {
            (Elements::Bytes(all), Elements::Bytes(more)) if ours == theirs => all.extend(more),
            (Elements::Numbers(all), Elements::Numbers(more)) if ours == theirs => all.extend(more),
            _ => {
                return Err(wrong(
                    path,
                    &format!(
                        "samples are {theirs}, those of the classes before {ours}; give all classes the same"
                    ),
                ));
            }
        }
        self.count += next.count;
        Ok(())
    }

    /// Returns type and shape of a sample.
    fn described(&self) -> String {
        let kind = match self.elements {
            Elements::Bytes(_) => "u8",
            Elements::Numbers(_) => "f32",
        };
        format!("{kind} of shape {:?}", self.shape)
    }

    fn column(self) -> Column {
        match self.elements {
            Elements::Bytes(values) => Column::bytes("image", self.shape, values, 255.0),
            Elements::Numbers(values) => Column::numbers("image", self.shape, values),
        }
    }
}

/// The header of a file: a magic number, the version, the length of a text, and the text, which is a dictionary of Python
/// ("NumPy Enhancement Proposal 1").
struct Header {
    /// The bytes before the values.
    length: u64,
    /// The type of the values, as in `<f4`.
    kind: String,
    /// The bytes of each value.
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
            "|u1" | "<u1" => 1,
            "<f2" => 2,
            "<f4" | "<i4" | "<u4" => 4,
            "<f8" | "<i8" => 8,
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

    /// Returns bytes as they are, and other values as numbers.
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
            _ => Elements::Bytes(bytes),
        }
    }
}

/// Returns the shape of a sample, which is a picture if it is a square of values in one row.
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
