//! All channels of a result as lines, each a sum over channels and taps.

use pulp::Simd;

use super::kernel::combine;
use crate::simd::Element;

/// The sums that make the lines of a result from the frames of a source, `M` lines at a time.
pub(super) struct Combination<T, const M: usize> {
    groups: usize,
    /// The number of channels in a group of the result.
    targets: usize,
    /// For each group and each `M` channels of the result: for each term, the weight in each of the `M` channels.
    weights: Vec<T>,
    /// The offset of each term in the frames of a group.
    offsets: Vec<usize>,
    /// The number of elements of a group's frames.
    group: usize,
}

impl<T: Element, const M: usize> Combination<T, M> {
    /// Creates sums over `sources` channels of `plane` elements each, and over taps. A tap has an index, and an offset
    /// in the plane. `weight` returns the weight for a group, target, source and tap.
    pub(super) fn new(
        (groups, targets, sources): (usize, usize, usize),
        plane: usize,
        taps: &[(usize, usize)],
        weight: impl Fn(usize, usize, usize, usize) -> T,
    ) -> Self {
        let mut weights = Vec::new();
        for group in 0..groups {
            for first in (0..targets).step_by(M) {
                for source in 0..sources {
                    for (tap, _) in taps {
                        let weight = |target| match target < targets {
                            true => weight(group, target, source, *tap),
                            false => T::zero(),
                        };
                        weights.extend((first..first + M).map(weight));
                    }
                }
            }
        }
        let offsets = (0..sources).flat_map(|source| {
            let taps = taps.iter();
            taps.map(move |(_, place)| source * plane + place)
        });
        Self {
            groups,
            targets,
            weights,
            offsets: offsets.collect(),
            group: sources * plane,
        }
    }

    /// Computes lines of the given length, `V` vectors of each line at a time.
    #[inline(always)]
    pub(super) fn run<S: Simd, const V: usize>(
        &self,
        simd: S,
        source: &[T],
        length: usize,
        lines: &mut Vec<T>,
    ) {
        let tiles = self.groups * self.targets.div_ceil(M);
        lines.resize(tiles * M * length, T::zero());
        if length == 0 {
            return;
        }
        let weights = M * self.offsets.len();
        for (tile, lines) in lines.chunks_exact_mut(M * length).enumerate() {
            let group = tile / self.targets.div_ceil(M);
            let (weights, source) = (
                &self.weights[tile * weights..][..weights],
                &source[group * self.group..],
            );
            combine::<S, T, M, V>(simd, weights, source, &self.offsets, length, lines);
        }
    }

    /// Returns the line of a channel of the result.
    #[inline(always)]
    pub(super) fn line<'a>(&self, lines: &'a [T], channel: usize, length: usize) -> &'a [T] {
        let (group, target) = (channel / self.targets, channel % self.targets);
        let row = group * self.targets.next_multiple_of(M) + target;
        &lines[row * length..][..length]
    }
}

/// Pictures of a convolution with a kernel of 1x1, which needs no frame. Small pictures of several samples are joined,
/// channel by channel, so that a line is long.
pub(super) struct Pixels<'a, T> {
    pictures: &'a [T],
    channels: usize,
    size: usize,
    block: usize,
    gathered: Vec<T>,
}

impl<'a, T: Element> Pixels<'a, T> {
    /// Pictures with fewer pixels are joined.
    const SMALL: usize = 128;

    /// The length that joined lines have at least, if there are enough samples.
    const LINE: usize = 1024;

    pub(super) fn new(pictures: &'a [T], channels: usize, size: usize) -> Self {
        let samples = pictures.len() / (channels * size);
        let block = match size < Self::SMALL {
            true => Self::LINE.div_ceil(size).min(samples),
            false => 1,
        };
        let gathered = vec![
            T::zero();
            if block > 1 {
                block * channels * size
            } else {
                0
            }
        ];
        Self {
            pictures,
            channels,
            size,
            block,
            gathered,
        }
    }

    /// Returns the number of elements from one channel of a piece to the next.
    pub(super) fn plane(&self) -> usize {
        self.block * self.size
    }

    pub(super) fn pieces(&self) -> usize {
        let samples = self.pictures.len() / (self.channels * self.size);
        samples.div_ceil(self.block)
    }

    /// Returns a piece, and the number of samples in it.
    pub(super) fn piece(&mut self, piece: usize) -> (&[T], usize) {
        let sample = self.channels * self.size;
        let pictures = &self.pictures[piece * self.block * sample..];
        if self.block == 1 {
            return (&pictures[..sample], 1);
        }
        let samples = self.block.min(pictures.len() / sample);
        for (i, sample) in pictures[..samples * sample]
            .chunks_exact(sample)
            .enumerate()
        {
            let lines = self.gathered.chunks_exact_mut(self.block * self.size);
            for (picture, line) in sample.chunks_exact(self.size).zip(lines) {
                line[i * self.size..][..self.size].copy_from_slice(picture);
            }
        }
        (&self.gathered, samples)
    }
}
