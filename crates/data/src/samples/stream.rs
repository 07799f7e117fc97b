//! Samples that are read from their files in each pass.
//!
//! Each training pass shuffles the chunks, groups them into windows of about `data.shuffle_mebibytes`, and shuffles the
//! samples of each window. So the sample at a position depends only on the seed, the pass, and the sizes of the chunks
//! and windows. A worker holds two windows in memory: the current one, and the next one, which another thread reads
//! ahead.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use super::memory::InMemory;
use super::{Order, Samples};
use crate::error::InputError;
use crate::shuffle;

/// A part of a file that is read at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) samples: u32,
    /// The number of bytes that the chunk occupies in memory once it is read.
    pub(crate) bytes: u64,
}

/// Reads chunks.
pub(crate) trait Load: Send + Sync + 'static {
    /// Reads a chunk.
    ///
    /// # Errors
    /// [`InputError`] names the file.
    fn load(self: Arc<Self>, chunk: usize) -> Result<Box<dyn Loaded>, InputError>;

    /// Passes values to `hash` that differ between workers with different data.
    fn digest(&self, hash: &mut dyn FnMut(&[u8]));
}

/// A chunk in memory.
pub(crate) trait Loaded: Send {
    /// Decodes the samples at these indices, in this order.
    ///
    /// # Errors
    /// [`InputError`] names the file and the place in it.
    fn samples(&self, samples: &[u32]) -> Result<InMemory, InputError>;
}

/// The samples of chunks that are read in each pass.
pub(crate) struct Streamed {
    source: Arc<dyn Load>,
    chunks: Vec<Chunk>,
    count: u64,
    /// The most bytes of a window. A larger chunk has a window of its own.
    window: u64,
    plan: Option<Plan>,
    /// The window that was read last.
    current: Option<Window>,
    ahead: Ahead,
}

impl Streamed {
    /// Returns the samples of chunks with these sizes. `window` is the size of a window in bytes.
    ///
    /// # Errors
    /// [`InputError::Invalid`] if there is no sample.
    pub(crate) fn new(
        source: Arc<dyn Load>,
        chunks: Vec<Chunk>,
        window: u64,
    ) -> Result<Self, InputError> {
        let count = chunks.iter().map(|chunk| u64::from(chunk.samples)).sum();
        if count == 0 {
            return Err(InputError::Invalid(
                "there is no sample; at least one is needed".to_owned(),
            ));
        }
        Ok(Self {
            source,
            chunks,
            count,
            window,
            plan: None,
            current: None,
            ahead: Ahead::default(),
        })
    }

    /// Returns samples of a window, and the index among them of the sample at each position. The positions count from
    /// the start of the window.
    fn part(
        &mut self,
        order: Order,
        index: usize,
        positions: Range<u64>,
    ) -> Result<(InMemory, Vec<u32>), InputError> {
        self.enter(order, index)?;
        let window = self.current.as_ref().filter(|w| w.of == (order, index));
        let Some(window) = window else {
            unreachable!("the window has been entered");
        };
        window.read(positions.start as usize..positions.end as usize)
    }

    /// Makes a window the current one, and starts to read the next one ahead.
    fn enter(&mut self, order: Order, index: usize) -> Result<(), InputError> {
        if self
            .current
            .as_ref()
            .is_some_and(|w| w.of == (order, index))
        {
            return Ok(());
        }
        // The memory of the last window is free before the one after the next is read.
        self.current = None;
        let Some(plan) = &self.plan else {
            unreachable!("a plan has been made");
        };
        let loaded = self.ahead.take(&self.source, (order, index), plan)?;
        let counts = plan.counts(index, &self.chunks);
        self.current = Some(Window {
            of: (order, index),
            samples: samples(order, index, &counts),
            loaded,
        });
        if index + 1 < plan.windows.len() {
            self.ahead.start(&self.source, (order, index + 1), plan)?;
        }
        Ok(())
    }
}

impl Samples for Streamed {
    fn count(&self) -> u64 {
        self.count
    }

    fn read(&mut self, order: Order, positions: Range<u64>) -> Result<InMemory, InputError> {
        if positions.is_empty() || positions.end > self.count {
            return Err(InputError::Invalid(format!(
                "positions {} to {} are not in the data, which has {} samples",
                positions.start, positions.end, self.count
            )));
        }
        if self.plan.as_ref().is_none_or(|plan| plan.order != order) {
            self.plan = Some(Plan::new(order, &self.chunks, self.window));
        }
        let mut all: Option<(InMemory, Vec<u32>)> = None;
        let mut at = positions.start;
        while at < positions.end {
            let plan = self.plan.as_ref().map(|plan| plan.window_at(at));
            let (index, window) = plan.unwrap_or_default();
            let end = positions.end.min(window.end);
            let part = self.part(order, index, at - window.start..end - window.start)?;
            match &mut all {
                None => all = Some(part),
                Some((samples, numbers)) => {
                    let first = samples.len() as u32;
                    numbers.extend(part.1.into_iter().map(|number| first + number));
                    samples.append(part.0)?;
                }
            }
            at = end;
        }
        let Some((samples, numbers)) = all else {
            unreachable!("there is a position");
        };
        if order == Order::Stored && positions.end == self.count {
            // An evaluation is over; the next one begins with the first window.
            self.current = None;
        }
        samples.select(&numbers)
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        for chunk in &self.chunks {
            hash(&chunk.samples.to_le_bytes());
        }
        hash(&self.window.to_le_bytes());
        self.source.digest(hash);
    }
}

/// The windows of a pass.
struct Plan {
    order: Order,
    /// The chunks, in the order of the pass.
    chunks: Vec<u32>,
    windows: Vec<Planned>,
}

/// A window of a plan.
struct Planned {
    /// The range of the window's chunks in the chunks of the plan.
    chunks: Range<usize>,
    positions: Range<u64>,
}

impl Plan {
    fn new(order: Order, chunks: &[Chunk], window: u64) -> Self {
        let numbers = match order {
            Order::Stored => (0u32..).take(chunks.len()).collect(),
            Order::Shuffled { seed, epoch } => shuffle::chunks(seed, epoch, chunks.len()),
        };
        let mut windows: Vec<Planned> = Vec::new();
        let mut bytes = window;
        for (i, number) in numbers.iter().enumerate() {
            let chunk = chunks[*number as usize];
            let samples = u64::from(chunk.samples);
            match windows.last_mut() {
                Some(last) if bytes + chunk.bytes <= window => {
                    last.chunks.end = i + 1;
                    last.positions.end += samples;
                    bytes += chunk.bytes;
                }
                last => {
                    let start = last.map_or(0, |last| last.positions.end);
                    windows.push(Planned {
                        chunks: i..i + 1,
                        positions: start..start + samples,
                    });
                    bytes = chunk.bytes;
                }
            }
        }
        Self {
            order,
            chunks: numbers,
            windows,
        }
    }

    /// Returns the index and the positions of the window that contains a position. The position must be in the data.
    fn window_at(&self, position: u64) -> (usize, Range<u64>) {
        let after = self
            .windows
            .partition_point(|window| window.positions.end <= position);
        (after, self.windows[after].positions.clone())
    }

    /// Returns the indices of a window's chunks.
    fn chunks(&self, window: usize) -> Vec<usize> {
        let chunks = &self.chunks[self.windows[window].chunks.clone()];
        chunks.iter().map(|chunk| *chunk as usize).collect()
    }

    /// Returns the number of samples of each chunk of a window.
    fn counts(&self, window: usize, sizes: &[Chunk]) -> Vec<u32> {
        let chunks = self.chunks(window).into_iter();
        chunks.map(|chunk| sizes[chunk].samples).collect()
    }
}

/// Returns the samples of a window in the window's order. Each sample is given by the index of its chunk in the window,
/// and by its own index in the chunk.
fn samples(order: Order, window: usize, counts: &[u32]) -> Vec<(u32, u32)> {
    let stored = (0u32..).zip(counts);
    let stored = stored.flat_map(|(chunk, count)| (0..*count).map(move |sample| (chunk, sample)));
    let stored: Vec<(u32, u32)> = stored.collect();
    match order {
        Order::Stored => stored,
        Order::Shuffled { seed, epoch } => {
            let order = shuffle::window(seed, epoch, window as u64, stored.len());
            order.iter().map(|place| stored[*place as usize]).collect()
        }
    }
}

/// A window in memory.
struct Window {
    of: (Order, usize),
    loaded: Vec<Box<dyn Loaded>>,
    /// The index of each sample's chunk in the window, and the index of the sample in the chunk.
    samples: Vec<(u32, u32)>,
}

impl Window {
    /// Returns samples, and the index among them of the sample at each position.
    fn read(&self, positions: Range<usize>) -> Result<(InMemory, Vec<u32>), InputError> {
        let wanted = &self.samples[positions];
        let mut of_chunk = vec![Vec::new(); self.loaded.len()];
        for (chunk, sample) in wanted {
            of_chunk[*chunk as usize].push(*sample);
        }
        let mut all: Option<InMemory> = None;
        let mut next = vec![0; self.loaded.len()];
        let mut count = 0;
        for (chunk, samples) in of_chunk.iter().enumerate().filter(|(_, s)| !s.is_empty()) {
            next[chunk] = count;
            count += samples.len() as u32;
            let decoded = self.loaded[chunk].samples(samples)?;
            match &mut all {
                None => all = Some(decoded),
                Some(all) => all.append(decoded)?,
            }
        }
        let mut place = |chunk: u32| {
            let next = &mut next[chunk as usize];
            *next += 1;
            *next - 1
        };
        let places = wanted.iter().map(|(chunk, _)| place(*chunk)).collect();
        let all = all.ok_or_else(|| InputError::Invalid("no position was asked for".to_owned()))?;
        Ok((all, places))
    }
}

/// A thread that reads windows in advance, and the window that it was asked for.
#[derive(Default)]
struct Ahead {
    thread: Option<Thread>,
    /// The window that was requested but not yet received.
    asked: Option<(Order, usize)>,
}

/// The sender of requests to a thread that reads windows, and the receiver of its answers.
type Thread = (SyncSender<Vec<usize>>, Receiver<LoadedWindow>);

/// The chunks of a window, or the first error in reading them.
type LoadedWindow = Result<Vec<Box<dyn Loaded>>, InputError>;

impl Ahead {
    /// Returns a window. If it was not read ahead, reads it now.
    fn take(&mut self, source: &Arc<dyn Load>, of: (Order, usize), plan: &Plan) -> LoadedWindow {
        if self.asked.is_some_and(|asked| asked != of) {
            // The thread reads one window after the other.
            drop(self.receive()?);
        }
        if self.asked.is_none() {
            self.start(source, of, plan)?;
        }
        self.receive()?
    }

    /// Requests a window from the thread. If there is no thread yet, starts it.
    fn start(
        &mut self,
        source: &Arc<dyn Load>,
        of: (Order, usize),
        plan: &Plan,
    ) -> Result<(), InputError> {
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => spawn(source.clone()).map_err(|error| {
                InputError::Invalid(format!(
                    "no thread that reads the data can be started: {error}"
                ))
            })?,
        };
        let (requests, _) = self.thread.insert(thread);
        // If the thread has ended, `receive` says so.
        let _ = requests.send(plan.chunks(of.1));
        self.asked = Some(of);
        Ok(())
    }

    fn receive(&mut self) -> Result<LoadedWindow, InputError> {
        self.asked = None;
        let received = self
            .thread
            .as_ref()
            .and_then(|(_, chunks)| chunks.recv().ok());
        received.ok_or_else(|| {
            InputError::Invalid("the thread that reads the data has ended; see above".to_owned())
        })
    }
}

/// Starts a thread that reads windows. The thread ends when the sender of requests is dropped.
fn spawn(source: Arc<dyn Load>) -> io::Result<Thread> {
    let (requests, asked) = sync_channel::<Vec<usize>>(1);
    let (answer, chunks) = sync_channel(1);
    let read = move || {
        for chunks in asked {
            let load = |chunk| source.clone().load(chunk);
            let loaded = chunks.into_iter().map(load).collect();
            if answer.send(loaded).is_err() {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("read-ahead".to_owned());
    thread.spawn(read)?;
    Ok((requests, chunks))
}
