//! A column of texts, in which each different text is held once.

use std::collections::HashMap;

use super::cell::number_text;
use crate::place::Place;

/// Up to this number of distinct texts, a text is found by comparison with each instead of by its hash.
const FEW: usize = 4;

/// The texts of a column, in the order of the samples.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    /// The index in `texts` of each sample's text.
    pub(crate) samples: Vec<u32>,
    /// The distinct texts, each with the first place where it occurs.
    pub(crate) texts: Vec<(String, Place)>,
    known: HashMap<String, u32>,
}

impl Texts {
    /// Adds the text of the next sample, which is at this place.
    pub(crate) fn push(&mut self, text: &str, place: impl Fn() -> Place) {
        let index = self.index(text, place);
        self.samples.push(index);
    }

    /// Adds the label of the next sample. Labels that are equal as numbers are one label.
    pub(crate) fn push_label(&mut self, text: &str, place: impl Fn() -> Place) {
        self.push(number_text(text).as_deref().unwrap_or(text), place);
    }

    /// Adds a text that occurs, without a sample.
    pub(crate) fn note(&mut self, text: &str, place: &Place) {
        self.index(text, || place.clone());
    }

    fn index(&mut self, text: &str, place: impl Fn() -> Place) -> u32 {
        // Of few texts the right one is found sooner than its hash.
        if self.texts.len() <= FEW {
            let found = self.texts.iter().position(|(known, _)| known == text);
            if let Some(index) = found {
                return index as u32;
            }
        } else if let Some(index) = self.known.get(text) {
            return *index;
        }
        let new = self.texts.len() as u32;
        self.known.insert(text.to_owned(), new);
        self.texts.push((text.to_owned(), place()));
        new
    }

    /// Returns the text of each sample.
    pub(crate) fn owned(&self) -> impl Iterator<Item = String> {
        let text = |index: &u32| self.texts[*index as usize].0.clone();
        self.samples.iter().map(text)
    }

    /// Returns the texts of the samples at these indices, in this order.
    pub(crate) fn select(&self, samples: &[u32]) -> Self {
        let mut selected = Self::default();
        for sample in samples {
            let (text, place) = &self.texts[self.samples[*sample as usize] as usize];
            selected.push(text, || place.clone());
        }
        selected
    }

    /// Applies `value` once to each distinct text, and returns the result for each sample.
    pub(crate) fn each<T: Copy>(&self, value: impl Fn(&str) -> T) -> Vec<T> {
        let values: Vec<T> = self.texts.iter().map(|(text, _)| value(text)).collect();
        self.of_samples(&values)
    }

    /// Applies `value` once to each distinct text and the first place where it occurs, and returns the result for each
    /// sample.
    ///
    /// # Errors
    /// Those of `value`.
    pub(crate) fn try_each<T: Copy, E>(
        &self,
        value: impl Fn(&str, &Place) -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        let values = self.texts.iter().map(|(text, place)| value(text, place));
        Ok(self.of_samples(&values.collect::<Result<Vec<T>, E>>()?))
    }

    fn of_samples<T: Copy>(&self, values: &[T]) -> Vec<T> {
        self.samples
            .iter()
            .map(|text| values[*text as usize])
            .collect()
    }
}
