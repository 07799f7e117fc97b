//! Memory that the two processes of a connection share: a ring of bytes for each direction. Both sides use a ring at
//! the same time, without a lock. Each side changes only its own counter of a ring, and checks the counter of the other
//! side, which may be broken or hostile.

use std::fs::File;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use tokio::io::ReadBuf;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use super::file;

/// The size of a ring in bytes: a block fits in, and both rings stay in the processors' cache.
pub(super) const RING_BYTES: usize = 1 << 20;

/// The most bytes of one write, so that the other side reads them while the next ones are written.
const WRITE_BYTES: usize = 256 << 10;

/// The most bytes that a reader copies at a time. They stay in the first-level cache.
const PIECE_BYTES: usize = 16 << 10;

/// The number of bytes before each ring, for its counters.
const COUNTERS_BYTES: usize = 4 << 10;

/// The offsets of the counters of written and of read bytes, and of the flags of a waiting reader and of a waiting
/// writer. Each has its own cache line.
const WRITTEN: usize = 0;
const READ: usize = 128;
const READER_WAITS: usize = 256;
const WRITER_WAITS: usize = 384;

/// The size of the memory in bytes.
const BYTES: usize = 2 * (COUNTERS_BYTES + RING_BYTES);

/// Creates memory. Returns this side's ends of the rings, and the file by which the other side opens it.
///
/// # Errors
/// If the system has no such memory.
pub(super) fn create() -> io::Result<(Writer, Reader, File)> {
    let file = file::create(BYTES as u64)?;
    let [first, second] = rings(file.try_clone()?)?;
    Ok((Writer::new(first), Reader::new(second), file))
}

/// Opens memory that the other side has created.
///
/// # Errors
/// If the file is not such memory, or could be truncated while it is in use.
pub(super) fn open(file: File) -> io::Result<(Writer, Reader)> {
    file::check(&file, BYTES as u64)?;
    let [first, second] = rings(file)?;
    Ok((Writer::new(second), Reader::new(first)))
}

fn rings(file: File) -> io::Result<[Ring; 2]> {
    let region = MmapRegion::from_file(FileOffset::new(file, 0), BYTES);
    let memory = Arc::new(region.map_err(io::Error::other)?);
    Ok([0, COUNTERS_BYTES + RING_BYTES].map(|start| Ring {
        memory: Arc::clone(&memory),
        start,
    }))
}

/// A ring in the memory.
struct Ring {
    memory: Arc<MmapRegion>,
    /// The offset of the ring's counters.
    start: usize,
}

impl Ring {
    fn counter(&self, offset: usize) -> io::Result<&AtomicU64> {
        let counter = self.memory.get_atomic_ref(self.start + offset);
        counter.map_err(io::Error::other)
    }

    /// Returns the contiguous memory of at most `most` bytes, from the byte that follows the first `position` bytes of
    /// the stream.
    fn slice(&self, position: u64, most: usize) -> io::Result<VolatileSlice<'_>> {
        let place = (position % RING_BYTES as u64) as usize;
        let count = most.min(RING_BYTES - place);
        let slice = self
            .memory
            .get_slice(self.start + COUNTERS_BYTES + place, count);
        slice.map_err(io::Error::other)
    }

    /// Sets a flag. Both sides use `SeqCst`. So either this side sees the other side's change when it checks the
    /// counter again, or the other side sees the flag after its change.
    fn set(&self, flag: usize) -> io::Result<()> {
        self.counter(flag)?.store(1, SeqCst);
        Ok(())
    }

    /// Clears a flag. Returns whether it was set.
    fn clear(&self, flag: usize) -> io::Result<bool> {
        let flag = self.counter(flag)?;
        Ok(flag.load(SeqCst) != 0 && flag.swap(0, SeqCst) != 0)
    }
}

/// Returns the number of unread bytes in a ring, given both counters.
fn filled(written: u64, read: u64) -> io::Result<usize> {
    let filled = written.wrapping_sub(read);
    if filled > RING_BYTES as u64 {
        let broken = "the peer has broken the memory that it shares";
        return Err(io::Error::new(io::ErrorKind::InvalidData, broken));
    }
    Ok(filled as usize)
}

/// The writing end of a ring.
pub(super) struct Writer {
    ring: Ring,
    written: u64,
}

impl Writer {
    fn new(ring: Ring) -> Self {
        let written = 0;
        Self { ring, written }
    }

    /// Writes as many bytes as there is space for, and returns their number.
    ///
    /// # Errors
    /// If the other side has broken the memory.
    pub(super) fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let read = self.ring.counter(READ)?.load(SeqCst);
        let free = RING_BYTES - filled(self.written, read)?;
        let mut free = free.min(WRITE_BYTES);
        let before = self.written;
        for slice in slices {
            let mut rest = &slice[..slice.len().min(free)];
            free -= rest.len();
            while !rest.is_empty() {
                let memory = self.ring.slice(self.written, rest.len())?;
                let (now, later) = rest.split_at(memory.len());
                memory.copy_from(now);
                self.written += now.len() as u64;
                rest = later;
            }
        }
        if self.written > before {
            self.ring.counter(WRITTEN)?.store(self.written, SeqCst);
        }
        Ok((self.written - before) as usize)
    }

    /// Asks to be woken when bytes have been read. Returns true if there is still no space, so that the caller has to
    /// wait.
    pub(super) fn ask(&self) -> io::Result<bool> {
        self.ring.set(WRITER_WAITS)?;
        let read = self.ring.counter(READ)?.load(SeqCst);
        Ok(filled(self.written, read)? == RING_BYTES)
    }

    /// Returns whether the reader has asked to be woken, and clears its request.
    pub(super) fn take_question(&self) -> io::Result<bool> {
        self.ring.clear(READER_WAITS)
    }
}

/// The reading end of a ring.
pub(super) struct Reader {
    ring: Ring,
    read: u64,
}

impl Reader {
    fn new(ring: Ring) -> Self {
        let read = 0;
        Self { ring, read }
    }

    /// Reads as many of the available bytes as fit, and returns their number.
    ///
    /// # Errors
    /// If the other side has broken the memory.
    pub(super) fn read(&mut self, to: &mut ReadBuf<'_>) -> io::Result<usize> {
        let written = self.ring.counter(WRITTEN)?.load(SeqCst);
        let count = filled(written, self.read)?.min(to.remaining());
        if count == 0 {
            return Ok(0);
        }
        let end = self.read + count as u64;
        // The other side may change the memory at any time, so only copies leave this function.
        let mut piece = [0; PIECE_BYTES];
        while self.read < end {
            let rest = (end - self.read) as usize;
            let memory = self.ring.slice(self.read, rest.min(PIECE_BYTES))?;
            let piece = &mut piece[..memory.len()];
            memory.copy_to(piece);
            to.put_slice(piece);
            self.read += piece.len() as u64;
        }
        self.ring.counter(READ)?.store(self.read, SeqCst);
        Ok(count)
    }

    /// Asks to be woken when bytes have been written. Returns true if there are still none, so that the caller has to
    /// wait.
    pub(super) fn ask(&self) -> io::Result<bool> {
        self.ring.set(READER_WAITS)?;
        let written = self.ring.counter(WRITTEN)?.load(SeqCst);
        Ok(filled(written, self.read)? == 0)
    }

    /// Returns whether the writer has asked to be woken, and clears its request.
    pub(super) fn take_question(&self) -> io::Result<bool> {
        self.ring.clear(WRITER_WAITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (Writer, Reader) {
        let (writer, _, file) = create().unwrap();
        let (_, reader) = open(file).unwrap();
        (writer, reader)
    }

    fn read(reader: &mut Reader) -> usize {
        let mut bytes = vec![0; 2 * RING_BYTES];
        reader.read(&mut ReadBuf::new(&mut bytes)).unwrap()
    }

    /// A change between a look and the question wakes nobody, so the question has to find it.
    #[test]
    fn a_side_that_asks_looks_again() {
        let (mut writer, mut reader) = ends();
        let some = [IoSlice::new(&[7; WRITE_BYTES])];
        assert_eq!(read(&mut reader), 0);
        assert_eq!(writer.write(&some).unwrap(), WRITE_BYTES);
        assert!(!writer.take_question().unwrap());
        assert!(!reader.ask().unwrap(), "there are bytes");
        while writer.write(&some).unwrap() > 0 {}
        assert_eq!(read(&mut reader), RING_BYTES);
        assert!(!reader.take_question().unwrap());
        assert!(!writer.ask().unwrap(), "there is space");

        assert!(reader.ask().unwrap());
        writer.write(&some).unwrap();
        assert!(writer.take_question().unwrap());
        assert!(!writer.take_question().unwrap(), "once");
        while writer.write(&some).unwrap() > 0 {}
        assert!(writer.ask().unwrap());
        read(&mut reader);
        assert!(reader.take_question().unwrap());
        assert!(!reader.take_question().unwrap(), "once");
    }

    #[test]
    fn counters_that_the_other_side_has_broken_are_an_error() {
        let (mut writer, mut reader) = ends();
        for wrong in [1, RING_BYTES as u64 + 1, u64::MAX / 2] {
            // More was read than written.
            writer.ring.counter(READ).unwrap().store(wrong, SeqCst);
            writer.write(&[IoSlice::new(&[1])]).unwrap_err();
            writer.ask().unwrap_err();
        }
        for wrong in [RING_BYTES as u64 + 1, u64::MAX / 2, u64::MAX] {
            // More was written than fits in.
            reader.ring.counter(WRITTEN).unwrap().store(wrong, SeqCst);
            let mut bytes = [0; 9];
            reader.read(&mut ReadBuf::new(&mut bytes)).unwrap_err();
            let error = reader.ask().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().contains("broken the memory"), "{error}");
        }
    }
}
