//! Pictures that are resized, normalised, and varied in training.
//!
//! Random changes depend only on the job's seed, the pass and the position. So a step that is computed again, on
//! whichever worker, gets the same pictures.

use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use shared_proto::job;

use crate::dataset::Dataset;
use crate::error::InputError;
use crate::samples::column::{Column, Values};
use crate::samples::field::{Field, ValueType};
use crate::samples::memory::InMemory;
use crate::samples::{Order, Samples};

/// Returns a data set with its pictures changed.
///
/// # Errors
/// [`InputError::Invalid`] if the samples are not pictures, or if the settings do not fit the pictures;
/// [`InputError::Fields`] if there is not exactly one input.
pub(super) fn change(data: Dataset, settings: &job::Pictures) -> Result<Dataset, InputError> {
    let input = data.signature.input()?;
    let shape = Shape::new(input, settings)?;
    let changed = |samples| -> Box<dyn Samples> {
        Box::new(Pictures {
            samples,
            name: input.name.clone(),
            shape,
            down: Tap::of_axis(shape.rows),
            across: Tap::of_axis(shape.columns),
            settings: settings.clone(),
        })
    };
    let mut signature = data.signature.clone();
    signature.inputs[0].shape = vec![shape.channels, shape.rows.1, shape.columns.1];
    Ok(Dataset {
        training: changed(data.training),
        evaluation: changed(data.evaluation),
        signature,
        transforms: data.transforms,
    })
}

/// The shape of all pictures.
#[derive(Clone, Copy)]
struct Shape {
    channels: usize,
    /// The rows before and after the change.
    rows: (usize, usize),
    columns: (usize, usize),
}

impl Shape {
    fn new(input: &Field, settings: &job::Pictures) -> Result<Self, InputError> {
        let invalid = |problem: String| {
            Err(InputError::Invalid(format!(
                "`data.pictures` does not fit the data: {problem}"
            )))
        };
        let numbers = input.values == ValueType::F32 && input.categories.is_none() && !input.ragged;
        let shape = input.shape.as_slice();
        let &[channels, rows, columns] = shape else {
            return invalid(not_pictures(input));
        };
        if !numbers || shape.contains(&0) {
            return invalid(not_pictures(input));
        }
        for (name, numbers) in [("mean", &settings.mean), ("deviation", &settings.deviation)] {
            if !numbers.is_empty() && numbers.len() != channels {
                return invalid(format!(
                    "`{name}` has {} numbers, but pictures have {channels} channels; give one for each",
                    numbers.len()
                ));
            }
        }
        let resized = settings.resize.map(|side| side as usize);
        let smallest = resized.unwrap_or(rows.min(columns));
        if settings.crop as usize >= smallest {
            return invalid(format!(
                "`crop` is {}, but the smallest side of a picture has {smallest} pixels; give fewer than these",
                settings.crop
            ));
        }
        Ok(Self {
            channels,
            rows: (rows, resized.unwrap_or(rows)),
            columns: (columns, resized.unwrap_or(columns)),
        })
    }
}

fn not_pictures(input: &Field) -> String {
    format!(
        "samples have {input}, and are not pictures, numbers of shape [channels, rows, columns]; leave it out"
    )
}

/// Samples with changed pictures.
struct Pictures {
    samples: Box<dyn Samples>,
    /// The name of the input.
    name: String,
    shape: Shape,
    /// The taps that resize the rows and the columns.
    down: Vec<Tap>,
    across: Vec<Tap>,
    settings: job::Pictures,
}

impl Samples for Pictures {
    fn count(&self) -> u64 {
        self.samples.count()
    }

    fn read(&mut self, order: Order, positions: Range<u64>) -> Result<InMemory, InputError> {
        let batch = self.samples.read(order, positions.clone())?;
        let samples = batch.len();
        let (inputs, targets, weights) = batch.into_columns();
        let input = inputs.into_iter().next().map(Column::into_batch);
        let Some(Values::F32(values)) = input.map(|input| input.values) else {
            return Err(InputError::Invalid(format!(
                "`data.pictures` needs samples with {:?} as numbers first, as the signature of the data says",
                self.name
            )));
        };
        let Shape {
            channels,
            rows,
            columns,
        } = self.shape;
        let mut changed = Vec::new();
        let sizes = [samples, channels, rows.1, columns.1];
        let pixels = sizes
            .iter()
            .try_fold(1usize, |n, size| n.checked_mul(*size));
        if pixels.is_none_or(|pixels| changed.try_reserve_exact(pixels).is_err()) {
            return Err(InputError::Invalid(format!(
                "a batch of pictures of shape {sizes:?} does not fit into memory; lower data.pictures.resize"
            )));
        }
        let pictures = values.chunks_exact(channels * rows.0 * columns.0);
        for (position, picture) in positions.zip(pictures) {
            let variation = match order {
                Order::Stored => Variation::default(),
                Order::Shuffled { seed, epoch } => {
                    Variation::draw(&self.settings, seed, epoch, position)
                }
            };
            for (channel, values) in picture.chunks_exact(rows.0 * columns.0).enumerate() {
                self.change_channel(channel, values, variation, &mut changed);
            }
        }
        let shape = vec![channels, rows.1, columns.1];
        let pictures = Column::numbers(&self.name, shape, changed);
        Ok(InMemory::of_checked(
            vec![pictures],
            targets,
            weights,
            samples,
        ))
    }

    fn digest(&self, hash: &mut dyn FnMut(&[u8])) {
        self.samples.digest(hash);
    }
}

impl Pictures {
    /// Appends the changed values of a channel to `to`.
    fn change_channel(
        &self,
        channel: usize,
        values: &[f32],
        variation: Variation,
        to: &mut Vec<f32>,
    ) {
        let (rows, columns) = (self.shape.rows, self.shape.columns);
        let resized;
        let values = match (rows.0, columns.0) == (rows.1, columns.1) {
            true => values,
            false => {
                resized = resize(values, &self.down, &self.across);
                &resized
            }
        };
        let of_channel = |numbers: &[f32], usual| numbers.get(channel).copied().unwrap_or(usual);
        let mean = of_channel(&self.settings.mean, 0.0);
        let deviation = of_channel(&self.settings.deviation, 1.0);
        for row in 0..rows.1 {
            for column in 0..columns.1 {
                let column = match variation.mirrored {
                    true => columns.1 - 1 - column,
                    false => column,
                };
                let value = variation.place(row, column, rows.1, columns.1);
                let value = value.map_or(0.0, |(row, column)| values[row * columns.1 + column]);
                to.push((value - mean) / deviation);
            }
        }
    }
}

/// Returns the values of a channel, with its rows and columns resized by these taps: a bilinear interpolation, in which
/// a pixel of a smaller picture is the weighted mean of all pixels that it replaces. The resizing of the crate `image`
/// would limit values to the range from 0 to 1.
fn resize(values: &[f32], down: &[Tap], across: &[Tap]) -> Vec<f32> {
    let width = across.last().map_or(0, Tap::end);
    let mut narrow = Vec::new();
    for row in values.chunks_exact(width) {
        narrow.extend(across.iter().map(|tap| tap.sum(|at| row[at])));
    }
    let mut resized = Vec::with_capacity(down.len() * across.len());
    for tap in down {
        let column = |column: usize| tap.sum(|at| narrow[at * across.len() + column]);
        resized.extend((0..across.len()).map(column));
    }
    resized
}

/// The pixels along an axis whose weighted mean is a new pixel.
struct Tap {
    first: usize,
    weights: Vec<f32>,
}

impl Tap {
    /// Returns the taps of an axis, given its number of pixels before and after the change.
    fn of_axis((before, after): (usize, usize)) -> Vec<Self> {
        let scale = before as f64 / after as f64;
        let reach = scale.max(1.0);
        let tap = |place: usize| {
            let centre = (place as f64 + 0.5) * scale;
            let first = (centre - reach).max(0.0) as usize;
            let end = ((centre + reach).ceil() as usize).min(before);
            let weight = |at: usize| (1.0 - (at as f64 + 0.5 - centre).abs() / reach).max(0.0);
            let weights: Vec<f64> = (first..end).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            Self {
                first,
                weights: weights.into_iter().map(|w| (w / sum) as f32).collect(),
            }
        };
        (0..after).map(tap).collect()
    }

    /// Returns the end of the tap's pixels. The last tap ends at the number of pixels of the axis.
    fn end(&self) -> usize {
        self.first + self.weights.len()
    }

    fn sum(&self, value: impl Fn(usize) -> f32) -> f32 {
        let weights = self.weights.iter().enumerate();
        weights
            .map(|(i, weight)| weight * value(self.first + i))
            .sum()
    }
}

/// The random changes of a picture.
#[derive(Clone, Copy, Default)]
struct Variation {
    /// The rows and the columns by which the picture's window is moved down and to the right.
    moved: (i64, i64),
    mirrored: bool,
}

impl Variation {
    fn draw(settings: &job::Pictures, seed: u64, epoch: u32, position: u64) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..12].copy_from_slice(&epoch.to_le_bytes());
        key[12..20].copy_from_slice(&position.to_le_bytes());
        let mut random = ChaCha8Rng::from_seed(key);
        let most = i64::from(settings.crop);
        let moved = (
            random.random_range(-most..=most),
            random.random_range(-most..=most),
        );
        Self {
            moved,
            mirrored: settings.flip && random.random(),
        }
    }

    /// Returns the source pixel of an output pixel; `None` if it lies outside of the picture.
    fn place(
        self,
        row: usize,
        column: usize,
        rows: usize,
        columns: usize,
    ) -> Option<(usize, usize)> {
        let moved = |place: usize, by: i64, end: usize| {
            let place = usize::try_from(place as i64 + by).ok()?;
            (place < end).then_some(place)
        };
        Some((
            moved(row, self.moved.0, rows)?,
            moved(column, self.moved.1, columns)?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four pictures of two channels, three rows and four columns, with the numbers from 1 on.
    fn pictures(settings: &job::Pictures) -> Result<Dataset, InputError> {
        let samples = || {
            let values = (1..=96u16).map(f32::from).collect();
            let column = Column::numbers("image", vec![2, 3, 4], values);
            let labels = Column::category("label", vec![0, 1, 2, 3], 4);
            InMemory::new(vec![column], vec![labels])
        };
        change(Dataset::in_memory(samples()?, samples()?)?, settings)
    }

    fn read(data: &mut Dataset, order: Order) -> (Vec<Vec<f32>>, Vec<u32>) {
        let batch = data.training.read(order, 0..4).unwrap();
        let pixels: Vec<f32> = batch.numbers("image").iter().map(|v| *v as f32).collect();
        let labels = batch.numbers("label").iter().map(|v| *v as u32).collect();
        let rows = pixels.chunks_exact(pixels.len() / 4);
        (rows.map(<[f32]>::to_vec).collect(), labels)
    }

    fn shuffled(epoch: u32) -> Order {
        Order::Shuffled { seed: 7, epoch }
    }

    #[test]
    fn a_varied_picture_is_a_moved_or_mirrored_window_and_the_same_when_read_again() {
        let settings = job::Pictures {
            crop: 1,
            flip: true,
            ..job::Pictures::default()
        };
        let mut data = pictures(&settings).unwrap();
        let (mut mirrored, mut moved) = (0, std::collections::BTreeSet::new());
        for epoch in 0..50 {
            let (rows, labels) = read(&mut data, shuffled(epoch));
            assert_eq!(read(&mut data, shuffled(epoch)).0, rows);
            for (picture, label) in rows.iter().zip(labels) {
                let original = |channel: i64, row: i64, column: i64| {
                    let inside = (0..3).contains(&row) && (0..4).contains(&column);
                    let place = ((i64::from(label) * 2 + channel) * 3 + row) * 4 + column;
                    if inside { (place + 1) as f32 } else { 0.0 }
                };
                let window = |down: i64, right: i64, mirror: bool| -> Vec<f32> {
                    let places = (0..24).map(|i| (i / 12, i / 4 % 3, i % 4));
                    let pixel = |(channel, row, column): (i64, i64, i64)| {
                        let column = if mirror { 3 - column } else { column };
                        original(channel, row + down, column + right)
                    };
                    places.map(pixel).collect()
                };
                let moves = (-1..=1).flat_map(|down| (-1..=1).map(move |right| (down, right)));
                let all = moves.flat_map(|m| [(m, false), (m, true)]);
                let found: Vec<_> = all
                    .filter(|((down, right), mirror)| *picture == window(*down, *right, *mirror))
                    .collect();
                assert_eq!(found.len(), 1, "{picture:?}");
                mirrored += usize::from(found[0].1);
                moved.insert(found[0].0);
            }
        }
        // Of 200 pictures, half are mirrored, and all nine places occur.
        assert!((70..130).contains(&mirrored), "{mirrored}");
        assert_eq!(moved.len(), 9);
        // What is measured is never varied.
        let (stored, labels) = read(&mut data, Order::Stored);
        assert_eq!(labels, [0, 1, 2, 3]);
        assert!(stored.concat().into_iter().eq((1..=96u16).map(f32::from)));
    }

    #[test]
    fn channels_are_normalised_and_pictures_resized() {
        let settings = job::Pictures {
            resize: Some(1),
            mean: vec![6.5, 10.5],
            deviation: vec![1.0, 4.0],
            ..job::Pictures::default()
        };
        let mut data = pictures(&settings).unwrap();
        assert_eq!(data.signature.inputs[0].shape, [2, 1, 1]);
        // The mean of 1 to 12 is 6.5, that of 13 to 24 is 18.5.
        let (rows, _) = read(&mut data, Order::Stored);
        let near = |(a, b): (&f32, f32)| (a - b).abs() < 1e-5;
        assert!(rows[0].iter().zip([0.0, 2.0]).all(near), "{rows:?}");
        let larger = job::Pictures {
            resize: Some(8),
            ..job::Pictures::default()
        };
        let mut data = pictures(&larger).unwrap();
        let (rows, _) = read(&mut data, Order::Stored);
        assert_eq!(rows[0].len(), 2 * 8 * 8);
        // As PyTorch's `interpolate` (bilinear, without corners aligned): 1, 2, 3, 4 become eight numbers.
        let expected = [1.0, 1.25, 1.75, 2.25, 2.75, 3.25, 3.75, 4.0];
        assert_eq!(rows[0][..8], expected);
        assert_eq!((rows[0][0], rows[0][63]), (1.0, 12.0));
        // As PyTorch's `interpolate` with antialias: 1 to 12 in rows of four become two rows of two.
        let values: Vec<f32> = (1..=12u16).map(f32::from).collect();
        let taps = resize(&values, &Tap::of_axis((3, 2)), &Tap::of_axis((4, 2)));
        assert!(taps.iter().zip(SMALLER).all(near), "{taps:?}");
    }

    /// PyTorch's `F.interpolate(torch.arange(1., 13.).reshape(1, 1, 3, 4), (2, 2), mode="bilinear", antialias=True)`.
    const SMALLER: [f32; 4] = [3.214_285_9, 4.785_714, 8.214_286, 9.785_714];

    #[test]
    fn settings_that_do_not_fit_are_refused() {
        let few = job::Pictures {
            mean: vec![0.5],
            ..job::Pictures::default()
        };
        let error = pictures(&few).unwrap_err().to_string();
        assert!(
            error.contains("`mean` has 1 numbers") && error.contains("2 channels"),
            "{error}"
        );
        let wide = job::Pictures {
            crop: 3,
            ..job::Pictures::default()
        };
        let error = pictures(&wide).unwrap_err().to_string();
        assert!(
            error.contains("`crop` is 3") && error.contains("has 3 pixels"),
            "{error}"
        );
        let row = || {
            let column = Column::numbers("x", vec![3], vec![0.0; 6]);
            InMemory::new(vec![column], vec![Column::category("label", vec![0, 1], 2)])
        };
        let data = Dataset::in_memory(row().unwrap(), row().unwrap()).unwrap();
        let error = change(data, &job::Pictures::default())
            .unwrap_err()
            .to_string();
        assert!(error.contains("are not pictures"), "{error}");
    }
}
