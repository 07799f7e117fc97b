//! Targets of a prediction, read from text: a class, 0 or 1, or a number.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use shared_proto::job::{Data, LabelTransform, TargetKind};

use super::moments::Moments;
use crate::columns::cell::{known, number_text, truth_text};
use crate::columns::texts::Texts;
use crate::error::InputError;
use crate::place::Place;
use crate::samples::column::Column;
use crate::samples::field::Scale;

/// The most classes that labels can have: each class costs a row of the model's output layer.
const MAX_CLASSES: u32 = 1 << 16;

/// If labels are numbers without a transform, a mean or deviation larger than this causes a warning.
const LARGE: f64 = 10.0;

/// If the labels are more distinct whole numbers than this, the job has to say whether they are classes.
const MOST_CERTAIN_CLASSES: usize = 1000;

/// The meaning of labels, as determined from the training files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Target {
    /// Each label is a class.
    Class {
        /// The index of each label's class.
        numbers: BTreeMap<String, u32>,
        /// The number of classes, which is larger than each index.
        count: u64,
    },
    /// One label is 0, the other 1.
    Binary {
        /// The value of each label.
        values: BTreeMap<String, f32>,
    },
    /// Each label is a number.
    Number {
        /// The transform of the labels; `None` if the model learns the labels as they are.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scale: Option<Scale>,
    },
}

/// The labels that occur in the training files, as far as the target needs them.
#[derive(Debug)]
pub(crate) struct Labels {
    kind: TargetKind,
    transform: LabelTransform,
    /// True if two labels become 0 and 1 in a job that does not set the kind of its target.
    two_are_binary: bool,
    /// The distinct labels, at most one more than [`MAX_CLASSES`]. One more is enough to show that there are too many
    /// for classes.
    texts: Texts,
    /// The first label that is a number, but not a finite one.
    not_finite: Option<(String, Place)>,
    /// The first label that is a number, but not a whole one.
    fraction: Option<(String, Place)>,
    /// The mean and deviation of the training labels that are numbers.
    moments: Moments,
}

impl Labels {
    /// Returns an empty collection of labels, for the target that the job's settings name.
    pub(crate) fn new(settings: &Data, two_are_binary: bool) -> Self {
        Self {
            kind: settings.target,
            transform: settings.label_transform,
            two_are_binary,
            texts: Texts::default(),
            not_finite: None,
            fraction: None,
            moments: Moments::default(),
        }
    }

    /// Adds labels. Only the samples at the indices in `training` count for the mean and the deviation.
    pub(crate) fn note(&mut self, labels: &Texts, training: &[u32]) {
        if matches!(self.kind, TargetKind::Number | TargetKind::Auto) {
            let numbers = labels.each(number);
            let numbers = training.iter().map(|sample| numbers[*sample as usize]);
            numbers
                .flatten()
                .for_each(|number| self.moments.add(number));
        }
        for (text, place) in &labels.texts {
            if let Ok(number) = text.parse::<f64>() {
                let is_whole = number_text(text).is_none_or(|text| !text.contains('.'));
                let first = match (number.is_finite(), is_whole) {
                    (false, _) => Some(&mut self.not_finite),
                    (true, false) => Some(&mut self.fraction),
                    (true, true) => None,
                };
                if let Some(first @ None) = first {
                    *first = Some((text.clone(), place.clone()));
                }
            }
            if self.texts.texts.len() <= MAX_CLASSES as usize {
                self.texts.note(text, place);
            }
        }
    }

    /// Decides what the labels mean. If the job does not say, labels are numbers if one of them has a fraction, 0 and 1
    /// if there are two labels and `two_are_binary` is true, and classes otherwise.
    ///
    /// # Errors
    /// Names the first label or the setting that does not fit.
    pub(crate) fn target(self) -> Result<Target, InputError> {
        if self.kind != TargetKind::Binary
            && let Some((text, place)) = &self.not_finite
        {
            return Err(place.wrong(format!(
                "label {text} is no finite number; leave the sample out, or correct it"
            )));
        }
        match (self.kind, &self.fraction) {
            (TargetKind::Number, _) | (TargetKind::Auto, Some(_)) => self.numbers(),
            _ if self.transform != LabelTransform::None => Err(InputError::Invalid(
                "data.label_transform is set, but the labels are classes; leave it out, or set data.target to \"number\"".to_owned(),
            )),
            (TargetKind::Class, Some((text, place))) => Err(place.wrong(format!(
                "label {text} is no class; set data.target to \"number\" to predict it as a number, or number the classes from 0 or name them"
            ))),
            (TargetKind::Binary, _) => self.binary(),
            (TargetKind::Auto, None) if self.two_are_binary && self.texts.texts.len() == 2 => {
                self.binary()
            }
            (TargetKind::Auto | TargetKind::Class, None) => self.classes(),
        }
    }

    fn numbers(&self) -> Result<Target, InputError> {
        let (mean, deviation) = self.moments.finish();
        let standardises = self.transform == LabelTransform::Standardise;
        if standardises && !deviation.is_finite() {
            return Err(InputError::Invalid(
                "the labels are too large to be standardised: the sum of their squares overflows; divide them, or leave out data.label_transform".to_owned(),
            ));
        }
        let scale = standardises.then_some(Scale { mean, deviation });
        if scale.is_none() && mean.abs().max(deviation) > LARGE {
            tracing::warn!(
                "the labels have the mean {mean:.4} and the standard deviation {deviation:.4}, which a model learns slowly; data.label_transform = \"standardise\" has it learn them with mean 0 and deviation 1"
            );
        }
        Ok(Target::Number { scale })
    }

    fn binary(&self) -> Result<Target, InputError> {
        let texts = &self.texts.texts;
        if let Some((text, place)) = texts.get(2) {
            return Err(place.wrong(format!(
                "{text} is a third label; a binary target has two, so set data.target to \"class\""
            )));
        }
        let mut sorted: Vec<&String> = texts.iter().map(|(text, _)| text).collect();
        // As numbers, if they are: -1 is less than +1.
        let number = |text: &&String| text.parse::<f64>().ok();
        sorted.sort_by(|a, b| match (number(a), number(b)) {
            (Some(a), Some(b)) => a.total_cmp(&b),
            _ => a.cmp(b),
        });
        let one = |(i, text): (usize, &String)| {
            // A single label tells its value only if it is a number.
            let value = number(&text).filter(|_| texts.len() == 1);
            let value = value.map_or(i as f32, |v| if v > 0.0 { 1.0 } else { 0.0 });
            (text.clone(), value)
        };
        Ok(Target::Binary {
            values: sorted.into_iter().enumerate().map(one).collect(),
        })
    }

    fn classes(&self) -> Result<Target, InputError> {
        let all = &self.texts.texts;
        let texts = all.iter();
        let whole: Option<BTreeMap<String, u32>> = texts
            .clone()
            .map(|(text, _)| Some((text.clone(), whole(text)?)))
            .collect();
        let Some(numbers) = whole else {
            let mut others = all.iter().filter(|(text, _)| number_text(text).is_none());
            let most_are_numbers = 2 * others.clone().count() < all.len();
            if let Some((text, place)) = others.next()
                && self.kind == TargetKind::Auto
                && most_are_numbers
            {
                return Err(place.wrong(format!(
                    "label {text:?} is no number, and most others are; correct it or leave the sample out, or set data.target to \"class\" if labels are names"
                )));
            }
            if let Some((text, place)) = all.get(MAX_CLASSES as usize) {
                return Err(place.wrong(format!(
                    "{text} is one label of more than {MAX_CLASSES}; set data.target to \"number\" if labels are numbers"
                )));
            }
            let sorted: BTreeSet<&String> = texts.map(|(text, _)| text).collect();
            return Ok(Target::Class {
                count: sorted.len() as u64,
                numbers: sorted.into_iter().cloned().zip(0..).collect(),
            });
        };
        if self.kind == TargetKind::Auto && all.len() > MOST_CERTAIN_CLASSES {
            let (_, place) = &all[MOST_CERTAIN_CLASSES];
            let more = if all.len() > MAX_CLASSES as usize {
                "more than "
            } else {
                ""
            };
            return Err(place.wrong(format!(
                "there are {more}{} different whole numbers as labels; set data.target to \"number\" to predict them as numbers, or to \"class\" if each is a class",
                all.len().min(MAX_CLASSES as usize)
            )));
        }
        let too_large = |(text, _): &&(String, Place)| numbers[text] >= MAX_CLASSES;
        if let Some((text, place)) = all.iter().find(too_large) {
            return Err(place.wrong(format!(
                "label {text} is too large; number the classes from 0, below {MAX_CLASSES}, or set data.target to \"number\""
            )));
        }
        let highest = numbers.values().max().copied().unwrap_or(0);
        Ok(Target::Class {
            numbers,
            count: u64::from(highest) + 1,
        })
    }
}

impl Target {
    /// Returns the labels as a column of this name.
    ///
    /// # Errors
    /// Names the first label that the training part does not have, or that is no finite number.
    pub(crate) fn column(&self, name: &str, labels: &Texts) -> Result<Column, InputError> {
        match self {
            Self::Class { numbers, count } => {
                let ids = each(labels, |text| of_label(numbers, text), UNKNOWN)?;
                Ok(Column::category(name, ids, *count))
            }
            Self::Binary { values } => {
                let values = each(labels, |text| of_label(values, text), UNKNOWN)?;
                Ok(Column::binary(name, values))
            }
            Self::Number { scale } => {
                let scaled = |text: &str| {
                    let number = number(text)?;
                    let scaled = scale.map_or(number, |scale| scale.apply(number)) as f32;
                    Some(scaled).filter(|value| value.is_finite())
                };
                let values = each(labels, scaled, "is no finite number")?;
                Ok(Column::numbers(name, Vec::new(), values).scaled(*scale))
            }
        }
    }
}

impl Target {
    /// Replaces labels that are numbers by their canonical texts. Earlier releases stored labels as the files have
    /// them.
    pub(crate) fn name_numbers(&mut self) {
        fn name<T: Copy>(labels: &mut BTreeMap<String, T>) {
            let named = labels
                .iter()
                .map(|(text, value)| (known(text, true).into_owned(), *value));
            *labels = named.collect();
        }
        match self {
            Self::Class { numbers, .. } => name(numbers),
            Self::Binary { values } => name(values),
            Self::Number { .. } => {}
        }
    }

    /// Returns whether the target is valid: each class is below the number of classes, each binary value is 0 or 1, and
    /// a scale is finite with a positive deviation.
    pub(crate) fn is_whole(&self) -> bool {
        match self {
            Self::Class { numbers, count } => {
                (1..=u64::from(MAX_CLASSES)).contains(count)
                    && numbers.values().all(|number| u64::from(*number) < *count)
            }
            Self::Binary { values } => values.values().all(|value| [0.0, 1.0].contains(value)),
            Self::Number { scale } => scale.is_none_or(|scale| {
                scale.mean.is_finite() && scale.deviation.is_finite() && scale.deviation > 0.0
            }),
        }
    }

    /// Returns a column of unknown labels for `samples` samples. Each label is 0.
    pub(crate) fn unknown(&self, name: &str, samples: usize) -> Column {
        match self {
            Self::Class { count, .. } => Column::category(name, vec![0; samples], *count),
            Self::Binary { .. } => Column::binary(name, vec![0.0; samples]),
            Self::Number { scale } => {
                Column::numbers(name, Vec::new(), vec![0.0; samples]).scaled(*scale)
            }
        }
    }
}

/// Returns a label as a number; `None` if it is not a finite number. The labels `True` and `False` are 1 and 0.
fn number(text: &str) -> Option<f64> {
    let number = truth_text(text).unwrap_or(text.into()).parse().ok();
    number.filter(|number: &f64| number.is_finite())
}

/// Returns the value of a label. Looks up booleans as `1` and `0` too, because earlier releases read the booleans of
/// Parquet as numbers.
fn of_label<T: Copy>(labels: &BTreeMap<String, T>, text: &str) -> Option<T> {
    let as_number = || labels.get(truth_text(text)?.as_ref());
    labels.get(text).or_else(as_number).copied()
}

const UNKNOWN: &str = "does not occur in the training data";

/// Returns the value of each sample's label.
fn each<T: Copy>(
    labels: &Texts,
    value: impl Fn(&str) -> Option<T>,
    problem: &str,
) -> Result<Vec<T>, InputError> {
    labels.try_each(|text, place| {
        value(text).ok_or_else(|| place.wrong(format!("label {text:?} {problem}")))
    })
}

/// Returns a label as a whole number, as in `3` or `3.0`; `None` if it is not one.
fn whole(text: &str) -> Option<u32> {
    number_text(text)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Unit;
    use crate::samples::memory::InMemory;
    use std::path::Path;

    fn read(texts: &[&str], kind: TargetKind) -> Result<Column, String> {
        read_as(
            texts,
            &Data {
                target: kind,
                ..Data::default()
            },
        )
    }

    fn read_as(texts: &[&str], settings: &Data) -> Result<Column, String> {
        let mut labels = Texts::default();
        for (number, text) in (2..).zip(texts) {
            labels.push_label(text, || Place {
                file: Path::new("file").into(),
                unit: Unit::Line,
                number,
            });
        }
        let mut seen = Labels::new(settings, true);
        // The last sample is held out.
        let training: Vec<u32> = (0..texts.len() as u32 - 1).collect();
        seen.note(&labels, &training);
        let column = seen.target().and_then(|target| target.column("y", &labels));
        column.map_err(|error| error.to_string())
    }

    fn values(texts: &[&str], kind: TargetKind) -> (Vec<f64>, Option<u64>) {
        let column = read(texts, kind).unwrap();
        let categories = column.field().categories;
        let samples = InMemory::without_targets(vec![column]).unwrap();
        (samples.numbers("y"), categories)
    }

    #[test]
    fn labels_mean_what_they_look_like_or_what_the_job_says() {
        use TargetKind::{Auto, Binary, Class, Number};
        assert_eq!(
            values(&["+1", "-1", "+1"], Auto),
            (vec![1.0, 0.0, 1.0], Some(2))
        );
        assert_eq!(
            values(&["b", "a", "b"], Binary),
            (vec![1.0, 0.0, 1.0], Some(2))
        );
        assert_eq!(
            values(&["2", "0", "1"], Auto),
            (vec![2.0, 0.0, 1.0], Some(3))
        );
        assert_eq!(
            values(&["c", "a", "b"], Auto),
            (vec![2.0, 0.0, 1.0], Some(3))
        );
        assert_eq!(values(&["1", "0"], Class), (vec![1.0, 0.0], Some(2)));
        assert_eq!(
            values(&["1", "-1", "+1"], Auto),
            (vec![1.0, 0.0, 1.0], Some(2))
        );
        assert_eq!(
            values(&["2.0", "0.0", "1.0"], Auto),
            (vec![2.0, 0.0, 1.0], Some(3))
        );
        assert_eq!(values(&["1.5", "2"], Auto), (vec![1.5, 2.0], None));
        assert_eq!(values(&["3", "2"], Number), (vec![3.0, 2.0], None));
    }

    #[test]
    fn numbers_are_standardised_by_the_training_labels() {
        let settings = |target| Data {
            target,
            label_transform: LabelTransform::Standardise,
            ..Data::default()
        };
        let texts = ["1700000010.5", "1700000030.5", "1700000040.5"];
        let column = read_as(&texts, &settings(TargetKind::Auto)).unwrap();
        let scale = column.field().scale.unwrap();
        assert_eq!((scale.mean, scale.deviation), (1_700_000_020.5, 10.0));
        let samples = InMemory::without_targets(vec![column]).unwrap();
        assert_eq!(samples.numbers("y"), [-1.0, 1.0, 2.0]);
        let equal = read_as(&["5", "5", "7"], &settings(TargetKind::Number)).unwrap();
        assert_eq!(equal.field().scale.unwrap().deviation, 1.0);
        let error = read_as(&["a", "b"], &settings(TargetKind::Auto)).unwrap_err();
        assert!(error.contains("data.label_transform"), "{error}");
        let error = read_as(&["1e200", "2e200", "3e200"], &settings(TargetKind::Number));
        assert!(error.unwrap_err().contains("too large"));
        // Earlier releases wrote no scale.
        let earlier: Target = serde_json::from_str(r#"{"number":{}}"#).unwrap();
        assert_eq!(earlier, Target::Number { scale: None });
    }

    #[test]
    fn labels_that_do_not_fit_are_refused_with_the_ways_out() {
        use TargetKind::{Auto, Binary, Class, Number};
        let prices: Vec<String> = (0..1577).map(|price| price.to_string()).collect();
        let prices: Vec<&str> = prices.iter().map(String::as_str).collect();
        for (texts, kind, parts) in [
            (&["0", "1.5"][..], Class, ["line 3", "\"number\""]),
            (&["0", "1", "2"], Binary, ["line 4", "\"class\""]),
            (&prices, Auto, ["1577 different", "\"class\""]),
            (&["0", "70000"], Class, ["line 3", "below 65536"]),
            (&["0", "x"], Number, ["line 3", "no finite number"]),
            // Without it, each price would be the name of a class.
            (&["10", "2", "NaN"], Auto, ["line 4", "no finite number"]),
            (&["10", "inf"], Class, ["line 3", "no finite number"]),
        ] {
            let error = read(texts, kind).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
