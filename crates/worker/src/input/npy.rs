//! Arrays of NumPy in `.npy` files, a file for each class, as Quick, Draw! has them.
//!
//! `data.dir` is a folder of files such as `cat.npy`, each an array `(N, ...)` of bytes or numbers; the classes are the
//! files in the order of their names. Bytes are divided by 255. Rows of `(N, 784)` or `(N, 1, 784)`, and of other squares,
//! become pictures `(1, 28, 28)`. A share of each class is held out (`data.held_out`), chosen by the job's seed.
//! `data.options.most` limits the samples that are read of each class.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use half::f16;

use super::column::{Column, Values};
use super::dataset::Dataset;
use super::error::InputError;
use super::memory::InMemory;
use super::place;
use super::source::{DataSetup, Source};
use crate::shuffle;

/// The source `npy`.
pub struct Npy;

impl Source for Npy {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        let folder = setup.dir()?;
        let mut files = place::files(folder)?;
        files.retain(|path| path.extension().is_some_and(|extension| extension == "npy"));
        if files.is_empty() {
            return Err(InputError::Missing {
                folder: folder.to_owned(),
                names: "*.npy, a file for each class".to_owned(),
            });
        }
        let most = setup.whole_number("most")?;
        let classes = files.len() as u64;
        let mut all: Option<Array> = None;
        let (mut labels, mut training, mut held_out) = (Vec::new(), Vec::new(), Vec::new());
        for (class, path) in (0u32..).zip(&files) {
            let array = Array::read(path, most)?;
            let (begin, count) = (labels.len() as u32, array.count);
            let order = shuffle::held_out(setup.seed ^ u64::from(class), count);
            let share = (count as f64 * setup.settings.held_out).ceil() as usize;
            if count < 2 {
                return Err(wrong(
                    path,
                    "there are less than two samples; at least one to learn from and one to hold out are needed",
                ));
            }
            let (learn, hold) = order.split_at(count - share.clamp(1, count - 1));
            training.extend(learn.iter().map(|i| begin + i));
            held_out.extend(hold.iter().map(|i| begin + i));
            labels.extend(std::iter::repeat_n(class, count));
            all = Some(match all {
                None => array,
                Some(before) => before.then(array, path)?,
            });
        }
        let Some(array) = all else {
            return Err(InputError::NoPlace);
        };
        let image = array.column();
        let samples = InMemory::new(
            vec![image],
            vec![Column::category("label", labels, classes)],
        )?;
        Dataset::in_memory(samples.select(&training), samples.select(&held_out))
    }
}

/// The samples of a file, or of several.
struct Array {
    shape: Vec<usize>,
    count: usize,
    values: Values,
}

impl Array {
    /// Reads the first `most` samples of a file, or all.
    fn read(path: &Path, most: Option<u64>) -> Result<Self, InputError> {
        let unreadable = |source| InputError::Unreadable {
            path: path.to_owned(),
            source,
        };
        let mut file = File::open(path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
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
        if promised != Some(length - header.length) {
            return Err(wrong(
                path,
                &format!(
                    "the array of shape {dims:?} cannot be read: the file is truncated or damaged, with {length} bytes in all"
                ),
            ));
        }
        let count = most.map_or(*count, |most| (*count).min(most as usize));
        let size: usize = sample.iter().product();
        if size == 0 || count == 0 {
            return Err(wrong(
                path,
                &format!("the array has shape {dims:?}, which is empty"),
            ));
        }
        let mut bytes = vec![0; count * size * header.size];
        file.read_exact(&mut bytes).map_err(unreadable)?;
        let values = header.values(bytes);
        if let Values::F32(numbers) = &values
            && let Some(at) = numbers.iter().position(|v| !v.is_finite())
        {
            let problem = format!("sample {} holds NaN or infinity", at / size);
            return Err(wrong(path, &problem));
        }
        Ok(Self {
            shape: picture(sample),
            count,
            values,
        })
    }

    /// Appends the samples of another class, read from `path`.
    fn then(mut self, next: Self, path: &Path) -> Result<Self, InputError> {
        match (&mut self.values, next.values) {
            (Values::U8(all), Values::U8(more)) if self.shape == next.shape => all.extend(more),
            (Values::F32(all), Values::F32(more)) if self.shape == next.shape => all.extend(more),
            (all, more) => {
                return Err(wrong(
                    path,
                    &format!(
                        "samples are {} of shape {:?}, those of the classes before {} of shape {:?}; give all classes the same",
                        more.dtype().as_str(),
                        next.shape,
                        all.dtype().as_str(),
                        self.shape
                    ),
                ));
            }
        }
        self.count += next.count;
        Ok(self)
    }

    fn column(self) -> Column {
        match self.values {
            Values::U8(values) => Column::bytes("image", self.shape, values, 255.0),
            Values::F32(values) => Column::numbers("image", self.shape, values),
            other => Column::values("image", self.shape, other),
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
            "|u1" => 1,
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
    fn values(&self, bytes: Vec<u8>) -> Values {
        fn numbers<const N: usize>(bytes: &[u8], number: fn([u8; N]) -> f32) -> Values {
            let (values, _) = bytes.as_chunks::<N>();
            Values::F32(values.iter().map(|value| number(*value)).collect())
        }
        match self.kind.as_str() {
            "<f2" => numbers(&bytes, |v| f16::from_le_bytes(v).to_f32()),
            "<f4" => numbers(&bytes, f32::from_le_bytes),
            "<f8" => numbers(&bytes, |v| f64::from_le_bytes(v) as f32),
            "<i4" => numbers(&bytes, |v| i32::from_le_bytes(v) as f32),
            "<u4" => numbers(&bytes, |v| u32::from_le_bytes(v) as f32),
            "<i8" => numbers(&bytes, |v| i64::from_le_bytes(v) as f32),
            _ => Values::U8(bytes),
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
