//! Text files with one sample per line, cut into chunks of whole lines.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memchr::memchr_iter;

use crate::columns::table::{Numbers, Rows};
use crate::error::InputError;
use crate::files::DataFile;
use crate::place::{Place, Unit};
use crate::reading::chunks::{Chunk, Chunks};

/// The most bytes that are read at once to find the lines.
const PIECE: u64 = 1 << 20;

/// The byte order mark with which some editors begin UTF-8 files. It is not part of the first line.
pub(crate) const BYTE_ORDER_MARK: [u8; 3] = *b"\xef\xbb\xbf";

/// Returns whether a line has a sample.
type IsSample = Box<dyn Fn(&[u8]) -> bool + Send + Sync>;

/// Text files, cut into chunks.
pub(crate) struct Lines {
    files: Vec<DataFile>,
    parts: Vec<Part>,
    chunks: Vec<Chunk>,
    is_sample: IsSample,
}

/// The place of a chunk in its file.
struct Part {
    file: usize,
    bytes: Range<u64>,
    /// The number of the chunk's first line.
    first: u64,
    crc: u32,
}

/// A chunk in memory.
pub(crate) struct Text {
    file: Arc<Path>,
    content: Vec<u8>,
    /// The bytes and the line number of each sample.
    lines: Vec<(Range<usize>, u64)>,
}

/// Copies of some lines of a chunk, in the order of the selected samples.
pub(crate) struct Selected {
    text: String,
    /// The end of each line in `text`.
    ends: Vec<usize>,
}

impl Selected {
    /// Returns each line, without its line ending.
    pub(crate) fn lines(&self) -> impl Iterator<Item = &str> {
        let starts = [0].into_iter().chain(self.ends.iter().map(|end| end + 1));
        starts
            .zip(&self.ends)
            .map(|(start, end)| &self.text[start..*end])
    }
}

impl Lines {
    /// Finds the lines of files, and cuts the files into chunks of about `size` bytes.
    ///
    /// # Errors
    /// [`InputError::Unreadable`]; [`InputError::Line`] if no file has a sample.
    pub(crate) fn open(
        files: Vec<DataFile>,
        size: u64,
        is_sample: impl Fn(&[u8]) -> bool + Send + Sync + 'static,
    ) -> Result<Self, InputError> {
        let mut lines = Self {
            files: Vec::new(),
            parts: Vec::new(),
            chunks: Vec::new(),
            is_sample: Box::new(is_sample),
        };
        for file in files {
            lines.cut(&file, size)?;
            lines.files.push(file);
        }
        // Of several files, some may be empty: Spark writes a file for each part of its data.
        match (lines.parts.is_empty(), lines.files.first()) {
            (true, Some(first)) => {
                Err(Place::line(first.path(), 1).wrong("there is no sample".to_owned()))
            }
            _ => Ok(lines),
        }
    }

    /// Adds the chunks of a file.
    fn cut(&mut self, file: &DataFile, size: u64) -> Result<(), InputError> {
        let mut chunk = Vec::new();
        let mark = BYTE_ORDER_MARK.len() as u64;
        let (mut start, mut read, mut line) = (0, 0, 1);
        while read < file.size() {
            let end = file.size().min(read + size.clamp(mark, PIECE));
            let searched = chunk.len();
            chunk.extend(file.read(read..end)?);
            if read == 0 && chunk.starts_with(&BYTE_ORDER_MARK) {
                chunk.drain(..BYTE_ORDER_MARK.len());
                start = mark;
            }
            read = end;
            let whole = match read == file.size() {
                true => Some(chunk.len()),
                false if (chunk.len() as u64) < size => None,
                false => memchr::memrchr(b'\n', &chunk[searched..]).map(|at| searched + at + 1),
            };
            if let Some(whole) = whole {
                line += self.add(start, &chunk[..whole], line);
                start += whole as u64;
                chunk.drain(..whole);
            }
        }
        Ok(())
    }

    /// Adds a chunk, unless it has no sample. Returns the number of its lines.
    fn add(&mut self, start: u64, content: &[u8], first: u64) -> u64 {
        let (mut samples, mut lines) = (0, 0);
        for line in split(content) {
            samples += u32::from((self.is_sample)(&content[line]));
            lines += 1;
        }
        if samples > 0 {
            self.parts.push(Part {
                file: self.files.len(),
                bytes: start..start + content.len() as u64,
                first,
                crc: crc32fast::hash(content),
            });
            self.chunks.push(Chunk {
                samples,
                bytes: content.len() as u64,
            });
        }
        lines
    }

    /// Reads a chunk.
    ///
    /// # Errors
    /// [`InputError::Unreadable`]; [`InputError::Invalid`] if the file has changed.
    fn read(&self, chunk: usize) -> Result<Text, InputError> {
        let part = &self.parts[chunk];
        let file = &self.files[part.file];
        let content = file.read(part.bytes.clone())?;
        if crc32fast::hash(&content) != part.crc {
            return Err(changed(file.path()));
        }
        let numbered = split(&content).zip(part.first..);
        let with_sample = numbered.filter(|(line, _)| (self.is_sample)(&content[line.clone()]));
        Ok(Text {
            file: file.path().clone(),
            lines: with_sample.collect(),
            content,
        })
    }
}

impl Text {
    /// Copies the lines of these samples, in this order.
    ///
    /// # Errors
    /// [`InputError::Line`] if a line is not valid UTF-8.
    pub(crate) fn select(&self, samples: &[u32]) -> Result<Selected, InputError> {
        // The lines are scattered over the chunk. The CPU overlaps the cache misses of copies. A parser branches on each
        // byte, so the CPU does not overlap its cache misses.
        let length = |sample: &u32| self.lines[*sample as usize].0.len() + 1;
        let mut content = Vec::with_capacity(samples.iter().map(length).sum());
        let mut ends = Vec::with_capacity(samples.len());
        for sample in samples {
            let (line, _) = &self.lines[*sample as usize];
            content.extend_from_slice(&self.content[line.clone()]);
            ends.push(content.len());
            content.push(b'\n');
        }
        let text = String::from_utf8(content).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            let sample = samples[ends.partition_point(|end| *end < at)];
            let (_, number) = self.lines[sample as usize];
            Place::line(&self.file, number).wrong("the line is not valid UTF-8".to_owned())
        })?;
        Ok(Selected { text, ends })
    }

    /// Returns the place of each of these samples.
    pub(crate) fn rows(&self, samples: &[u32]) -> Rows {
        let number = |sample: &u32| self.lines[*sample as usize].1;
        Rows {
            file: self.file.clone(),
            unit: Unit::Line,
            numbers: Numbers::Each(samples.iter().map(number).collect()),
        }
    }
}

/// Returns the error for a file that has changed since it was opened.
pub(crate) fn changed(file: &Path) -> InputError {
    InputError::Invalid(format!(
        "{} has changed since the training began; leave the files of a job as they are, and train again",
        file.display()
    ))
}

/// Returns the range of bytes of each line of a text, without the line endings.
fn split(content: &[u8]) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut start = 0;
    let ends = memchr_iter(b'\n', content).chain(
        // The last line may have no end.
        (content.last().is_some_and(|last| *last != b'\n')).then_some(content.len()),
    );
    ends.map(move |end| {
        let line = start..end;
        start = end + 1;
        match content[line.clone()].ends_with(b"\r") {
            true => line.start..line.end - 1,
            false => line,
        }
    })
}

/// Parses the samples at these indices in a chunk.
type Parse<P> = Box<dyn Fn(&Text, &[u32]) -> Result<P, InputError> + Send + Sync>;

/// Text files of one format.
pub(crate) struct TextFiles<P> {
    lines: Lines,
    parse: Parse<P>,
}

impl<P> TextFiles<P> {
    pub(crate) fn new(
        lines: Lines,
        parse: impl Fn(&Text, &[u32]) -> Result<P, InputError> + Send + Sync + 'static,
    ) -> Self {
        Self {
            lines,
            parse: Box::new(parse),
        }
    }
}

impl<P: 'static> Chunks for TextFiles<P> {
    type Raw = Text;
    type Parsed = P;

    fn chunks(&self) -> &[Chunk] {
        &self.lines.chunks
    }

    fn read(&self, chunk: usize) -> Result<Text, InputError> {
        self.lines.read(chunk)
    }

    fn parse(&self, raw: &Text, samples: &[u32]) -> Result<P, InputError> {
        (self.parse)(raw, samples)
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        for part in &self.lines.parts {
            hash(&part.crc.to_le_bytes());
        }
    }
}
