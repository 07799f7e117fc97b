//! Data sets of files that are read in chunks: held in memory, or read anew in each pass (`data.stream`).
//!
//! A format cuts its files into chunks (`Chunks`) and turns parsed chunks into samples (`Format`). This module makes a
//! data set of both: it chooses the samples that are held out, passes the samples to the format to learn from, and
//! either keeps the samples in memory or leaves them in their files.

use std::path::Path;
use std::sync::Arc;

use super::held_out::HeldOut;
use crate::dataset::Dataset;
use crate::error::InputError;
use crate::features::fitted::Fitted;
use crate::files::DataFile;
use crate::samples::Samples;
use crate::samples::field::Signature;
use crate::samples::memory::{InMemory, check_equal};
pub(crate) use crate::samples::stream::Chunk;
use crate::samples::stream::{Load, Loaded, Streamed};
use crate::source::DataSetup;

/// The largest target size of a chunk in bytes. Many chunks fit into a window, so that streamed samples are well mixed.
const LARGEST: u64 = 4 << 20;
/// The least number of chunks of target size in a window.
const OF_A_WINDOW: u64 = 16;
/// The approximate least number of chunks of all training files. Small files have several chunks too, so that some can
/// be held out.
const OF_ALL: u64 = 64;

/// Returns the target size in bytes of the chunks of these files.
pub(crate) fn size(setup: &DataSetup, files: &[DataFile]) -> u64 {
    if !setup.settings.stream {
        return LARGEST;
    }
    let all: u64 = files.iter().map(DataFile::size).sum();
    let window = setup.window() / OF_A_WINDOW;
    (all / OF_ALL).clamp(1, window.clamp(1, LARGEST))
}

/// Files that are cut into chunks.
pub(crate) trait Chunks: Send + Sync + 'static {
    /// A chunk as it is read.
    type Raw: Send + 'static;
    /// Samples in the form of the file.
    type Parsed;

    /// Returns whether reading a chunk parses the whole chunk, and its samples take no more memory than
    /// [`Chunk::bytes`]. If so, the thread that reads a streamed chunk also decodes it. Otherwise each worker parses
    /// only its own samples.
    fn decodes_whole(&self) -> bool {
        false
    }

    /// Returns the chunks, in the order of the samples.
    fn chunks(&self) -> &[Chunk];

    /// Reads a chunk.
    ///
    /// # Errors
    /// [`InputError`] names the file.
    fn read(&self, chunk: usize) -> Result<Self::Raw, InputError>;

    /// Parses the samples at these indices in a chunk, in this order.
    ///
    /// # Errors
    /// [`InputError`] names the file and the place in it.
    fn parse(&self, raw: &Self::Raw, samples: &[u32]) -> Result<Self::Parsed, InputError>;

    /// Parses all samples of a chunk. `samples` has their indices.
    ///
    /// # Errors
    /// As [`Self::parse`].
    fn parse_all(&self, raw: Self::Raw, samples: &[u32]) -> Result<Self::Parsed, InputError> {
        self.parse(&raw, samples)
    }

    /// Passes values to `hash` that differ between workers with different files.
    fn digest(&self, hash: &mut dyn FnMut(&[u8]));
}

/// Converts parsed samples to samples in memory.
pub(crate) type Decode<P> = Arc<dyn Fn(P) -> Result<InMemory, InputError> + Send + Sync>;

/// A format that learns from the data how to decode it.
pub(crate) trait Format {
    /// Samples in the form of the file.
    type Parsed;

    /// Returns whether the format has anything to learn. If not, streamed samples are not read before training.
    fn learns(&self) -> bool {
        true
    }

    /// Learns from parsed samples. Each sample of all files is passed once, held-out samples included.
    ///
    /// # Errors
    /// Names a sample that does not fit.
    fn learn(&mut self, parsed: &Self::Parsed, subset: Subset) -> Result<(), InputError>;

    /// Returns the function that decodes samples, and the parameters with which later data is read, if there are any.
    ///
    /// # Errors
    /// Names the sample or setting that does not fit.
    fn finish(self) -> Result<(Decode<Self::Parsed>, Option<Fitted>), InputError>;
}

/// The subset of a data set that parsed samples belong to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Subset<'a> {
    /// Samples of a training file. The samples at these indices are trained on, and the others are held out.
    Training(&'a [u32]),
    /// A file of samples that are held out.
    HeldOut,
}

/// The files of a data set, cut into chunks.
pub(crate) struct Files<'a, C> {
    pub(crate) training: C,
    /// The files of the held-out samples; `None` if the held-out samples are taken from the training files.
    pub(crate) evaluation: Option<C>,
    /// The path or URL of the data.
    pub(crate) place: &'a Path,
}

impl<C: Chunks> Files<'_, C> {
    /// Opens the data set.
    ///
    /// # Errors
    /// Those of the files and of the format; [`InputError::Invalid`] if there are too few samples.
    pub(crate) fn open(
        self,
        setup: &DataSetup,
        held_out: HeldOut,
        format: impl Format<Parsed = C::Parsed>,
    ) -> Result<Dataset, InputError> {
        match setup.settings.stream {
            true => self.stream(setup, held_out, format),
            false => self.read_all(setup, held_out, format),
        }
    }

    /// Opens the training files for prediction: all their samples become the held-out samples of the data set.
    ///
    /// # Errors
    /// Those of the files and of `decode`.
    pub(crate) fn open_all(
        self,
        setup: &DataSetup,
        decode: Decode<C::Parsed>,
        transforms: &Fitted,
    ) -> Result<Dataset, InputError> {
        let transforms = Some(transforms.clone());
        if setup.settings.stream {
            let chunks = all(self.training.chunks().len());
            let files = Arc::new(self.training);
            let part = || (files.clone(), chunks.clone());
            return streamed(setup, part(), part(), decode, transforms);
        }
        let samples = decode_all(parse_all(&self.training)?, &decode)?;
        Ok(Dataset {
            transforms,
            ..Dataset::in_memory(samples.select_unchecked(&[0]), samples)?
        })
    }

    /// Reads all samples into memory.
    fn read_all(
        self,
        setup: &DataSetup,
        held_out: HeldOut,
        mut format: impl Format<Parsed = C::Parsed>,
    ) -> Result<Dataset, InputError> {
        let training = parse_all(&self.training)?;
        let evaluation = self.evaluation.as_ref().map(parse_all).transpose()?;
        let counts = self
            .training
            .chunks()
            .iter()
            .map(|chunk| chunk.samples as usize);
        let samples = counts.sum();
        let split = match &evaluation {
            Some(_) => None,
            None => Some(held_out.split(samples, setup, self.place)?),
        };
        let mut trained = vec![true; samples];
        if let Some((_, evaluation)) = &split {
            for sample in evaluation {
                trained[*sample as usize] = false;
            }
        }
        if format.learns() {
            let mut first = 0;
            for (parsed, chunk) in training.iter().zip(self.training.chunks()) {
                let count = chunk.samples;
                let is_trained = |sample: &u32| trained[first + *sample as usize];
                let samples: Vec<u32> = (0..count).filter(is_trained).collect();
                format.learn(parsed, Subset::Training(&samples))?;
                first += count as usize;
            }
            for parsed in evaluation.iter().flatten() {
                format.learn(parsed, Subset::HeldOut)?;
            }
        }
        let (decode, transforms) = format.finish()?;
        let training = decode_all(training, &decode)?;
        let dataset = match (evaluation, split) {
            (Some(evaluation), _) => {
                Dataset::in_memory(training, decode_all(evaluation, &decode)?)?
            }
            (None, Some((learn, hold))) => Dataset::in_memory(
                training.select_unchecked(&learn),
                training.select_unchecked(&hold),
            )?,
            (None, None) => unreachable!("without files of their own, samples are split"),
        };
        Ok(Dataset {
            transforms,
            ..dataset
        })
    }

    /// Leaves the samples in their files. If the held-out samples have no files of their own, whole chunks are held
    /// out.
    fn stream(
        self,
        setup: &DataSetup,
        held_out: HeldOut,
        mut format: impl Format<Parsed = C::Parsed>,
    ) -> Result<Dataset, InputError> {
        let count = self.training.chunks().len();
        let (mut learned, mut held) = match &self.evaluation {
            Some(evaluation) => (all(count), all(evaluation.chunks().len())),
            None => held_out
                .split(count, setup, self.place)
                .map_err(|error| match count {
                    0 | 1 => self.too_few_chunks(),
                    _ => error,
                })?,
        };
        learned.sort_unstable();
        held.sort_unstable();
        let training = Arc::new(self.training);
        let evaluation = self.evaluation.map_or_else(|| training.clone(), Arc::new);
        if format.learns() {
            for chunk in &learned {
                let (parsed, samples) = parse(&*training, *chunk)?;
                format.learn(&parsed, Subset::Training(&samples))?;
            }
            for chunk in &held {
                let subset = match Arc::ptr_eq(&training, &evaluation) {
                    true => Subset::Training(&[]),
                    false => Subset::HeldOut,
                };
                format.learn(&parse(&*evaluation, *chunk)?.0, subset)?;
            }
        }
        let (decode, transforms) = format.finish()?;
        let (training, evaluation) = ((training, learned), (evaluation, held));
        streamed(setup, training, evaluation, decode, transforms)
    }

    fn too_few_chunks(&self) -> InputError {
        InputError::Invalid(format!(
            "{}: streamed data is held out in whole parts, but there is {}; give a file of held-out samples, give more samples or smaller row groups, or set data.stream to false",
            self.place.display(),
            match self.training.chunks().len() {
                0 => "no sample",
                _ => "a single part",
            }
        ))
    }
}

/// Returns the fields of the samples, taken from the first sample of a chunk.
fn signature<C: Chunks>(
    files: &C,
    chunk: u32,
    decode: &Decode<C::Parsed>,
) -> Result<Signature, InputError> {
    let raw = files.read(chunk as usize)?;
    Ok(decode(files.parse(&raw, &[0])?)?.signature())
}

/// Returns a data set of chunks that are read anew in each pass. `training` and `evaluation` each have files and the
/// indices of at least one of their chunks.
///
/// # Errors
/// Those of the first chunks; [`InputError::Invalid`] if their fields differ.
pub(crate) fn streamed<C: Chunks>(
    setup: &DataSetup,
    training: (Arc<C>, Vec<u32>),
    evaluation: (Arc<C>, Vec<u32>),
    decode: Decode<C::Parsed>,
    transforms: Option<Fitted>,
) -> Result<Dataset, InputError> {
    let first = |(files, chunks): &(Arc<C>, Vec<u32>)| signature(&**files, chunks[0], &decode);
    let signature = first(&training)?;
    check_equal(&signature, &first(&evaluation)?)?;
    let samples = |(files, chunks): (Arc<C>, Vec<u32>)| -> Result<Box<dyn Samples>, InputError> {
        let sizes = chunks.iter().map(|chunk| files.chunks()[*chunk as usize]);
        let sizes = sizes.collect();
        let decode = decode.clone();
        let source = SomeChunks {
            files,
            decode,
            chunks,
        };
        Ok(Box::new(Streamed::new(
            Arc::new(source),
            sizes,
            setup.window(),
        )?))
    };
    Ok(Dataset {
        training: samples(training)?,
        evaluation: samples(evaluation)?,
        signature,
        transforms,
    })
}

/// Some chunks of files, with the function that decodes them.
struct SomeChunks<C: Chunks> {
    files: Arc<C>,
    decode: Decode<C::Parsed>,
    /// The indices of these chunks among the chunks of `files`.
    chunks: Vec<u32>,
}

impl<C: Chunks> Load for SomeChunks<C> {
    fn load(self: Arc<Self>, chunk: usize) -> Result<Box<dyn Loaded>, InputError> {
        let chunk = self.chunks[chunk];
        if self.files.decodes_whole() {
            let (parsed, _) = parse(&*self.files, chunk)?;
            return Ok(Box::new(DecodedChunk((self.decode)(parsed)?)));
        }
        let raw = self.files.read(chunk as usize)?;
        Ok(Box::new(ChunkInMemory { source: self, raw }))
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        for chunk in &self.chunks {
            hash(&chunk.to_le_bytes());
        }
        self.files.digest(hash);
    }
}

/// A chunk that has been read but not parsed.
struct ChunkInMemory<C: Chunks> {
    source: Arc<SomeChunks<C>>,
    raw: C::Raw,
}

impl<C: Chunks> Loaded for ChunkInMemory<C> {
    fn samples(&self, samples: &[u32]) -> Result<InMemory, InputError> {
        (self.source.decode)(self.source.files.parse(&self.raw, samples)?)
    }
}

/// The decoded samples of a chunk.
struct DecodedChunk(InMemory);

impl Loaded for DecodedChunk {
    fn samples(&self, samples: &[u32]) -> Result<InMemory, InputError> {
        self.0.select(samples)
    }
}

/// Parses all samples of a chunk, and returns them with their indices.
fn parse<C: Chunks>(files: &C, chunk: u32) -> Result<(C::Parsed, Vec<u32>), InputError> {
    // First the chunk, which is not as large as a damaged file promises.
    let raw = files.read(chunk as usize)?;
    let samples: Vec<u32> = (0..files.chunks()[chunk as usize].samples).collect();
    Ok((files.parse_all(raw, &samples)?, samples))
}

fn parse_all<C: Chunks>(files: &C) -> Result<Vec<C::Parsed>, InputError> {
    let chunks = all(files.chunks().len()).into_iter();
    chunks.map(|chunk| Ok(parse(files, chunk)?.0)).collect()
}

/// Decodes the parsed chunks one after another, and frees each of them after it is decoded.
fn decode_all<P>(parsed: Vec<P>, decode: &Decode<P>) -> Result<InMemory, InputError> {
    let mut all: Option<InMemory> = None;
    for parsed in parsed {
        let samples = decode(parsed)?;
        match &mut all {
            None => all = Some(samples),
            Some(all) => all.append(samples)?,
        }
    }
    all.ok_or_else(|| InputError::Invalid("there is no sample; at least one is needed".to_owned()))
}

fn all(count: usize) -> Vec<u32> {
    (0u32..).take(count).collect()
}
