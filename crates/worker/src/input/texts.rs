//! A column of texts, in which each different text is held once.

use std::collections::HashMap;

/// The texts of a column, in the order of the samples.
#[derive(Debug, Default)]
pub(super) struct Texts {
    /// The index in `texts` of each sample's text.
    pub(super) samples: Vec<u32>,
    /// The texts that occur, each with the first line or row where it does.
    pub(super) texts: Vec<(String, u64)>,
    known: HashMap<String, u32>,
}

impl Texts {
    /// Adds the text of the next sample.
    pub(super) fn push(&mut self, text: &str, line: u64) {
        let index = match self.known.get(text) {
            Some(index) => *index,
            None => {
                let new = self.texts.len() as u32;
                self.known.insert(text.to_owned(), new);
                self.texts.push((text.to_owned(), line));
                new
            }
        };
        self.samples.push(index);
    }

    /// Adds the label of the next sample: LIBSVM files have `+1` as well as `1`.
    pub(super) fn push_label(&mut self, text: &str, line: u64) {
        let number = text.strip_prefix('+');
        let number = number.filter(|rest| rest.parse::<f64>().is_ok());
        self.push(number.unwrap_or(text), line);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Returns the value of each sample's text.
    pub(super) fn each<T: Copy>(&self, value: impl Fn(&str) -> T) -> Vec<T> {
        let values: Vec<T> = self.texts.iter().map(|(text, _)| value(text)).collect();
        self.of_samples(&values)
    }

    /// Returns the value of each sample's text. `value` also gets the first line or row where the text occurs.
    ///
    /// # Errors
    /// Those of `value`.
    pub(super) fn try_each<T: Copy, E>(
        &self,
        value: impl Fn(&str, u64) -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        let values = self.texts.iter().map(|(text, line)| value(text, *line));
        Ok(self.of_samples(&values.collect::<Result<Vec<T>, E>>()?))
    }

    fn of_samples<T: Copy>(&self, values: &[T]) -> Vec<T> {
        self.samples
            .iter()
            .map(|text| values[*text as usize])
            .collect()
    }
}
