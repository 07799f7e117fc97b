//! Folders of pictures: a folder for each class, with PNG and JPEG files.
//!
//! `data.dir` has a folder for each class; the classes are sorted by name. Folders within a class are not read. All
//! pictures are resized to `data.options.size` rows and columns; if it is not set, all pictures must have the same
//! size. Samples have `data.options.channels` channels, one or three; if it is not set, they have one if every picture
//! is grey, and otherwise three. The alpha channel is dropped. A share of each class is held out (`data.held_out`),
//! chosen by the job's seed.

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use image::imageops::FilterType;
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, ImageReader};

use super::classes::Sorted;
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::features::shape::{MOST, Shape};
use crate::files;
use crate::reading::chunks::{self, Chunk, Chunks};
use crate::samples::column::Column;
use crate::samples::memory::InMemory;
use crate::source::{DataSetup, Purpose, Source};

/// The most bytes that a decoded picture can have.
const MOST_BYTES: u64 = 512 << 20;

/// The source `image-folder`.
pub struct Images;

impl Source for Images {
    const STREAMS: bool = true;

    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        setup.only(&["size", "channels"])?;
        let size = setup.whole_number("size")?;
        if let Some(size) = size.filter(|size| !(1..=u64::from(MOST)).contains(size)) {
            return Err(InputError::Invalid(format!(
                "`data.options.size` is {size}, but must be at least 1 and at most {MOST}"
            )));
        }
        let channels = setup.whole_number("channels")?;
        if let Some(channels) = channels.filter(|channels| ![1, 3].contains(channels)) {
            return Err(InputError::Invalid(format!(
                "`data.options.channels` is {channels}, but must be 1 (grey) or 3 (red, green, blue)"
            )));
        }
        let classes = match setup.purpose {
            Purpose::Prediction(_) => unsorted(setup.dir()?)?,
            _ => classes(setup.dir()?)?,
        };
        let pictures = classes.iter().flat_map(|(_, files)| files);
        let fitted = setup.purpose.fitted();
        let shape = match fitted.and_then(|fitted| fitted.pictures) {
            // As in training, whatever these pictures have.
            Some(shape) => shape,
            None => {
                let found = Shape::new(pictures.clone(), size.map(|size| size as u32))?;
                let channels = channels.map_or(found.channels, |channels| channels as usize);
                Shape { channels, ..found }
            }
        };
        let files: Vec<PathBuf> = pictures.cloned().collect();
        let counts = classes.into_iter().map(|(folder, of)| (folder, of.len()));
        let mut sorted = Sorted::new(&counts.collect::<Vec<_>>(), setup)?;
        sorted.transforms.pictures = Some(shape);
        if setup.settings.stream {
            return stream(setup, files, shape, sorted);
        }
        let mut pixels = Vec::new();
        for path in &files {
            pixels.extend(shape.pixels(path, &files::read(path)?)?);
        }
        sorted.in_memory(shape.column(pixels))
    }
}

/// Leaves the pictures in their files. Each picture is a chunk.
fn stream(
    setup: &DataSetup,
    files: Vec<PathBuf>,
    shape: Shape,
    sorted: Sorted,
) -> Result<Dataset, InputError> {
    let Sorted {
        labels,
        transforms,
        training,
        evaluation,
    } = sorted;
    let chunk = |path: &PathBuf| {
        Ok(Chunk {
            samples: 1,
            bytes: files::size(path)?,
        })
    };
    let chunks = files.iter().map(chunk).collect::<Result<_, InputError>>()?;
    let target = transforms.target.clone();
    let decode = move |(pixels, label): (Vec<u8>, u32)| {
        let label = Sorted::column(&target, vec![label]);
        InMemory::new(vec![shape.column(pixels)], vec![label])
    };
    let pictures = Arc::new(Pictures {
        files,
        chunks,
        labels,
        shape,
    });
    let (training, evaluation) = ((pictures.clone(), training), (pictures, evaluation));
    chunks::streamed(
        setup,
        training,
        evaluation,
        Arc::new(decode),
        Some(transforms),
    )
}

/// Pictures in files.
struct Pictures {
    files: Vec<PathBuf>,
    chunks: Vec<Chunk>,
    labels: Vec<u32>,
    shape: Shape,
}

impl Chunks for Pictures {
    /// The index of a picture, and the content of its file.
    type Raw = (usize, Vec<u8>);
    /// A picture's bytes, and its label.
    type Parsed = (Vec<u8>, u32);

    fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    fn read(&self, chunk: usize) -> Result<Self::Raw, InputError> {
        Ok((chunk, files::read(&self.files[chunk])?))
    }

    fn parse(&self, (chunk, content): &Self::Raw, _: &[u32]) -> Result<Self::Parsed, InputError> {
        let pixels = self.shape.pixels(&self.files[*chunk], content)?;
        Ok((pixels, self.labels[*chunk]))
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        for (path, chunk) in self.files.iter().zip(&self.chunks) {
            hash(path.file_name().unwrap_or_default().as_encoded_bytes());
            hash(&chunk.bytes.to_le_bytes());
        }
    }
}

/// Returns the folder and the files of each class, sorted by name.
fn classes(place: &Path) -> Result<Vec<(PathBuf, Vec<PathBuf>)>, InputError> {
    let folders = folders(place)?;
    if folders.is_empty() {
        return Err(InputError::Missing {
            folder: place.to_owned(),
            names: "folder, one for each class, with its pictures".to_owned(),
        });
    }
    let with_files = |class: PathBuf| Ok((class.clone(), pictures(class)?));
    folders.into_iter().map(with_files).collect()
}

/// Returns the pictures to predict: those in the classes' folders, those in a folder that has no folders, or a single
/// file.
fn unsorted(place: &Path) -> Result<Vec<(PathBuf, Vec<PathBuf>)>, InputError> {
    let single = |files| Ok(vec![(place.to_owned(), files)]);
    match files::is_file(place)? {
        true => single(vec![place.to_owned()]),
        false if folders(place)?.is_empty() => single(pictures(place.to_owned())?),
        false => classes(place),
    }
}

/// Returns the folders in a folder, sorted by name. Leaves out hidden ones.
fn folders(folder: &Path) -> Result<Vec<PathBuf>, InputError> {
    let (mut folders, _) = files::list(folder)?;
    folders.retain(|path| !is_hidden(path));
    Ok(folders)
}

/// Returns the files in a folder, sorted by name. Leaves out hidden ones.
fn pictures(folder: PathBuf) -> Result<Vec<PathBuf>, InputError> {
    let mut files = files::in_folder(&folder)?;
    files.retain(|path| !is_hidden(path));
    match files.is_empty() {
        false => Ok(files),
        true => Err(InputError::Missing {
            folder,
            names: "picture".to_owned(),
        }),
    }
}

fn is_hidden(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with('.')
}

impl Shape {
    /// Returns the shape of pictures, which have `size` rows and columns if it is given. Does not decode the pictures.
    fn new<'a>(
        pictures: impl Iterator<Item = &'a PathBuf>,
        size: Option<u32>,
    ) -> Result<Self, InputError> {
        let mut first: Option<(&Path, (u32, u32))> = None;
        let mut channels = 1;
        for path in pictures {
            let mut decoder = open(path)?.into_decoder().map_err(|e| wrong(path, &e))?;
            if decoder.color_type().has_color() {
                channels = 3;
            }
            let (columns, rows) = decoder.dimensions();
            let found = match orientation(&mut decoder) {
                Orientation::Rotate90
                | Orientation::Rotate270
                | Orientation::Rotate90FlipH
                | Orientation::Rotate270FlipH => (rows, columns),
                _ => (columns, rows),
            };
            let (of, expected) = *first.get_or_insert((path, found));
            if size.is_none() && found != expected {
                let sides =
                    |(columns, rows): (u32, u32)| format!("{rows} rows and {columns} columns");
                return Err(InputError::Invalid(format!(
                    "{} has {}, but {} has {}; set data.options.size to give all pictures one size",
                    path.display(),
                    sides(found),
                    of.display(),
                    sides(expected)
                )));
            }
        }
        let found = first.map(|(_, found)| found);
        let (columns, rows) = size.map(|size| (size, size)).or(found).unwrap_or_default();
        Ok(Self {
            channels,
            rows,
            columns,
        })
    }

    /// Returns pictures as an input.
    fn column(&self, pixels: Vec<u8>) -> Column {
        let sizes = vec![self.channels, self.rows as usize, self.columns as usize];
        Column::bytes("image", sizes, pixels, 255.0)
    }

    /// Decodes the picture in a file with this content, and resizes it. Returns its bytes, channel by channel and row
    /// by row.
    fn pixels(&self, path: &Path, content: &[u8]) -> Result<Vec<u8>, InputError> {
        let reader = limited(path, ImageReader::new(Cursor::new(content)))?;
        let mut decoder = reader.into_decoder().map_err(|e| wrong(path, &e))?;
        if decoder.total_bytes() > MOST_BYTES {
            return Err(InputError::Invalid(format!(
                "{} would need {} bytes of memory; make it smaller, or remove it",
                path.display(),
                decoder.total_bytes()
            )));
        }
        let turned = orientation(&mut decoder);
        let mut picture = DynamicImage::from_decoder(decoder).map_err(|e| wrong(path, &e))?;
        picture.apply_orientation(turned);
        if (picture.width(), picture.height()) != (self.columns, self.rows) {
            picture = picture.resize_exact(self.columns, self.rows, FilterType::Triangle);
        }
        Ok(match self.channels {
            1 => picture.into_luma8().into_raw(),
            channels => {
                let mixed = DynamicImage::into_rgb8(picture).into_raw();
                let channel = |channel| mixed.iter().skip(channel).step_by(channels).copied();
                (0..channels).flat_map(channel).collect()
            }
        })
    }
}

/// Returns the orientation in a picture's EXIF data, or the upright one if it cannot be read.
fn orientation(decoder: &mut impl ImageDecoder) -> Orientation {
    decoder.orientation().unwrap_or(Orientation::NoTransforms)
}

/// Opens a picture whose header will be read. Only a picture outside of the file system is read whole.
fn open(path: &Path) -> Result<ImageReader<Box<dyn Content>>, InputError> {
    let content: Box<dyn Content> = match files::is_local(path) {
        true => {
            let file = File::open(path).map_err(files::unreadable(path))?;
            Box::new(BufReader::new(file))
        }
        false => Box::new(Cursor::new(files::read(path)?)),
    };
    limited(path, ImageReader::new(content))
}

/// The bytes of a picture.
trait Content: BufRead + Seek {}

impl<T: BufRead + Seek> Content for T {}

/// Returns a reader that refuses pictures that are too large.
fn limited<R: BufRead + Seek>(
    path: &Path,
    reader: ImageReader<R>,
) -> Result<ImageReader<R>, InputError> {
    let guessed = reader.with_guessed_format();
    let mut reader = guessed.map_err(files::unreadable(path))?;
    let mut limits = image::Limits::default();
    limits.max_image_width = Some(MOST);
    limits.max_image_height = Some(MOST);
    reader.limits(limits);
    Ok(reader)
}

fn wrong(path: &Path, error: &ImageError) -> InputError {
    InputError::Invalid(format!(
        "{} cannot be read as PNG or JPEG: {error}; get it again, convert it, or remove it",
        path.display()
    ))
}
