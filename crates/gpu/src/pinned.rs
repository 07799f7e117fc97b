//! Copies between a GPU and the host through pinned (page-locked) memory, which the GPU reads and writes directly. A
//! copy is made in pieces: while one piece is copied to or from the GPU, the host copies another.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut,
    DriverError, PinnedHostSlice, result,
};

use crate::{Error, driver_error};

/// The number of elements in a piece of 4 MiB.
const PIECE: usize = 1 << 20;

/// 8 MiB of pinned memory, as two pieces.
#[derive(Debug)]
pub struct PinnedMemory {
    stream: Arc<CudaStream>,
    /// The piece that is used next comes first.
    pieces: [Piece; 2],
}

#[derive(Debug)]
struct Piece {
    memory: PinnedHostSlice<f32>,
    /// The event at the end of the newest copy. cudarc's own event of the memory is not recorded in the stream that
    /// candle uses.
    copied: CudaEvent,
}

impl PinnedMemory {
    /// Allocates memory for copies in this stream. This is slow, so keep the memory for later copies.
    ///
    /// # Errors
    /// [`Error::Driver`], for example if the system refuses to pin more memory.
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self, Error> {
        let piece = || Piece::allocate(stream.context());
        let pieces = piece().and_then(|first| Ok([first, piece()?]));
        Ok(Self {
            stream: Arc::clone(stream),
            pieces: pieces.map_err(driver_error("allocate pinned memory"))?,
        })
    }

    /// Copies elements from the GPU to the end of a vector.
    ///
    /// # Errors
    /// [`Error::Driver`]. The vector may then have some of the elements.
    pub fn read(&mut self, from: &CudaView<'_, f32>, to: &mut Vec<f32>) -> Result<(), Error> {
        let read = self.read_pieces(from, to);
        self.settled(read, "copy memory to the host")
    }

    fn read_pieces(
        &mut self,
        from: &CudaView<'_, f32>,
        to: &mut Vec<f32>,
    ) -> Result<(), DriverError> {
        self.stream.context().bind_to_thread()?;
        to.reserve(from.len());
        let mut before: Option<usize> = None;
        for range in pieces(from.len()) {
            let [next, other] = &mut self.pieces;
            next.begin_read(&from.slice(range.clone()), &self.stream)?;
            if let Some(length) = before.replace(range.len()) {
                to.extend_from_slice(&other.elements()?[..length]);
            }
            self.pieces.swap(0, 1);
        }
        if let Some(length) = before {
            to.extend_from_slice(&self.pieces[1].elements()?[..length]);
        }
        Ok(())
    }

    /// Overwrites elements on the GPU. `fill` receives a range of indices in `to`, and memory in which it writes the
    /// new elements of this range. The GPU may copy the last elements after this has returned.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn write(
        &mut self,
        to: &mut CudaViewMut<'_, f32>,
        fill: impl FnMut(Range<usize>, &mut [f32]),
    ) -> Result<(), Error> {
        let written = self.write_pieces(to, fill);
        self.settled(written, "copy memory to the GPU")
    }

    fn write_pieces(
        &mut self,
        to: &mut CudaViewMut<'_, f32>,
        mut fill: impl FnMut(Range<usize>, &mut [f32]),
    ) -> Result<(), DriverError> {
        self.stream.context().bind_to_thread()?;
        for range in pieces(to.len()) {
            let next = &mut self.pieces[0];
            fill(range.clone(), &mut next.elements()?[..range.len()]);
            next.begin_write(&mut to.slice_mut(range), &self.stream)?;
            self.pieces.swap(0, 1);
        }
        Ok(())
    }

    /// Returns the result of copies. After an error, waits until none is under way.
    fn settled(&self, copied: Result<(), DriverError>, action: &'static str) -> Result<(), Error> {
        copied.map_err(|error| {
            wait(|| self.stream.synchronize());
            driver_error(action)(error)
        })
    }
}

impl Piece {
    fn allocate(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        // SAFETY: the memory is initialised before it is returned.
        let mut memory = unsafe { context.alloc_pinned_with_flags::<f32>(PIECE, 0) }?;
        // SAFETY: the memory has so many elements, and zeros are valid numbers.
        unsafe { ptr::write_bytes(memory.as_mut_ptr()?, 0, PIECE) };
        let copied = context.new_event(None)?;
        Ok(Self { memory, copied })
    }

    /// Returns the elements once the newest copy has ended.
    fn elements(&mut self) -> Result<&mut [f32], DriverError> {
        self.copied.synchronize()?;
        self.memory.as_mut_slice()
    }

    /// Begins to copy elements from the GPU.
    fn begin_read(
        &mut self,
        from: &CudaView<'_, f32>,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        let (address, _used_until_dropped) = from.device_ptr(stream);
        let memory = &mut self.elements()?[..from.len()];
        // SAFETY: both have so many elements. The memory is used again after the event, and later work in the stream follows the copy.
        unsafe { result::memcpy_dtoh_async(memory, address, stream.cu_stream()) }?;
        self.copied.record(stream)
    }

    /// Begins to copy elements to the GPU.
    fn begin_write(
        &mut self,
        to: &mut CudaViewMut<'_, f32>,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        let length = to.len();
        let (address, _used_until_dropped) = to.device_ptr_mut(stream);
        let memory = &self.elements()?[..length];
        // SAFETY: both have so many elements. The memory is used again after the event, and later work in the stream follows the copy.
        unsafe { result::memcpy_htod_async(address, memory, stream.cu_stream()) }?;
        self.copied.record(stream)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // The GPU must not copy memory that is free.
        wait(|| self.copied.synchronize());
    }
}

/// Waits for the GPU. The first call may return without waiting, with an error that cudarc has kept from an earlier
/// call. Then a second call waits; its error would change nothing.
fn wait(synchronize: impl Fn() -> Result<(), DriverError>) {
    let _ = synchronize().or_else(|_| synchronize());
}

/// Returns the range of each piece in a copy of `elements` elements.
fn pieces(elements: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = (0..elements).step_by(PIECE);
    starts.map(move |start| start..elements.min(start + PIECE))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of elements, with pieces that are full, not full, and none.
    const LENGTHS: [usize; 5] = [0, 1, PIECE, PIECE + 1, 3 * PIECE - 7];

    #[test]
    fn elements_pass_in_pieces() {
        let context = CudaContext::new(0).unwrap();
        // candle uses the first kind by default.
        for stream in [context.per_thread_stream(), context.new_stream().unwrap()] {
            let mut memory = PinnedMemory::new(&stream).unwrap();
            for length in LENGTHS {
                check(length, &stream, &mut memory);
            }
        }
    }

    fn check(length: usize, stream: &Arc<CudaStream>, memory: &mut PinnedMemory) {
        let mut on_gpu = stream.alloc_zeros::<f32>(length + 3).unwrap();
        let number = |n: usize| (n * 7 % 1001) as f32;
        let fill = |range: Range<usize>, piece: &mut [f32]| {
            for (n, element) in range.zip(piece) {
                *element = number(n);
            }
        };
        let mut part = on_gpu.slice_mut(2..length + 2);
        memory.write(&mut part, fill).unwrap();
        let mut numbers = vec![9.0];
        memory.read(&on_gpu.as_view(), &mut numbers).unwrap();
        let written: Vec<f32> = (0..length).map(number).collect();
        assert_eq!(numbers[..3], [9.0, 0.0, 0.0]);
        assert_eq!(numbers[3..length + 3], written);
        assert_eq!(numbers[length + 3..], [0.0]);
    }
}
