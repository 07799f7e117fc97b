//! Columns of ids without a fixed number of categories, for embedding tables.

use crate::columns::cell::number_text;
use crate::columns::hash::Hasher;
use crate::columns::table::Lists;
use crate::columns::texts::Texts;
use crate::error::InputError;
use crate::place::Place;
use crate::samples::column::{Column, Values};

/// All ids are below this number, so that they are non-negative as `i64`.
const LIMIT: u64 = 1 << 63;

/// A column of ids.
pub(crate) struct IdColumn<'a> {
    pub(crate) name: &'a str,
    /// The seed of the hash that turns texts into ids; `None` if the texts are whole numbers, which are the ids.
    pub(crate) seed: Option<u64>,
    /// The separator of the ids in a cell; `None` if each cell has exactly one id.
    pub(crate) separator: Option<&'a str>,
    /// True if all ids of the training samples are numbers. Texts that are equal as numbers then have the same id.
    pub(crate) numbers: bool,
}

impl IdColumn<'_> {
    /// Returns the ids of the cells: one id for each sample, or a list of ids if there is a separator. In a list, an
    /// empty text between separators has no id, so an empty cell has an empty list.
    ///
    /// # Errors
    /// If the texts must be whole numbers, and a text is not a whole number from 0 to 2^63 - 1. The error names the
    /// first place of the text.
    pub(crate) fn read(&self, cells: &Texts) -> Result<Column, InputError> {
        let Some(separator) = self.separator else {
            let ids = cells.try_each(|text, place| self.id(text, place))?;
            let column = Column::values(self.name, Vec::new(), Values::I64(ids));
            return Ok(column.below(LIMIT));
        };
        let lists = cells.texts.iter().map(|(text, place)| {
            let parts = text.split(separator).map(str::trim);
            let parts = parts.filter(|part| !part.is_empty());
            parts.map(|part| self.id(part, place)).collect()
        });
        let lists = lists.collect::<Result<Vec<Vec<i64>>, InputError>>()?;
        let (mut ids, mut offsets) = (Vec::new(), vec![0]);
        for text in &cells.samples {
            ids.extend_from_slice(&lists[*text as usize]);
            offsets.push(ids.len());
        }
        let ids = Values::I64(ids);
        Ok(Column::ragged(self.name, ids, offsets, None, Some(LIMIT)))
    }

    /// Returns the ids of lists.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) fn read_lists(&self, lists: &Lists) -> Result<Column, InputError> {
        let ids = lists.texts.try_each(|text, place| self.id(text, place))?;
        let offsets = [0].into_iter().chain(lists.ends.iter().copied()).collect();
        let ids = Values::I64(ids);
        Ok(Column::ragged(self.name, ids, offsets, None, Some(LIMIT)))
    }

    fn id(&self, text: &str, place: &Place) -> Result<i64, InputError> {
        let Some(seed) = self.seed else {
            let number = number_text(text);
            let id = number
                .as_deref()
                .unwrap_or(text)
                .parse()
                .ok()
                .filter(|id: &i64| *id >= 0);
            return id.ok_or_else(|| {
                place.wrong(format!(
                    "column {:?} holds {text:?}; a whole number from 0 to {} was expected, since its `hash` is false",
                    self.name,
                    i64::MAX
                ))
            });
        };
        let number = number_text(text).filter(|_| self.numbers);
        Ok((Hasher::new(seed).hash(number.as_deref().unwrap_or(text)) % LIMIT) as i64)
    }
}
