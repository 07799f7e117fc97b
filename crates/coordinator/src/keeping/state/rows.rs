//! The rows of the store: read as a state, and compared with a state that is to be written.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::StateError;
use crate::cluster::{Durable, TakeRows};

/// The row with the form of the state. In forms before the third it has the whole state.
pub(super) const FORM_ROW: &str = "cluster";

/// The form of the state that this release writes. It is raised when an earlier release's state cannot be read as
/// this one's.
pub(super) const FORM: u32 = 4;

/// The values of rows, by name.
pub(super) type Rows = BTreeMap<String, Vec<u8>>;

/// The form of a state, and what the database has of it.
#[derive(Default, Serialize, Deserialize)]
struct Form {
    #[serde(default)]
    form: u32,
    /// The number of the write that the database was written with. The journal has those after it.
    #[serde(default)]
    sequence: u64,
}

/// Returns the value of [`FORM_ROW`] in a database that has all writes up to this one.
///
/// # Errors
/// Those of the encoder.
pub(super) fn form_row(sequence: u64) -> Result<Vec<u8>, StateError> {
    let form = Form {
        form: FORM,
        sequence,
    };
    serde_json::to_vec(&form).map_err(|error| StateError::NotReadBack(error.to_string()))
}

/// Returns the number of the newest write that a database with these rows has; 0 if it says none.
pub(super) fn sequence_of(rows: &Rows) -> u64 {
    let form = rows.get(FORM_ROW);
    let form = form.and_then(|form| serde_json::from_slice::<Form>(form).ok());
    form.unwrap_or_default().sequence
}

/// Returns the state in rows that a coordinator has written; none if there are no rows.
pub(super) fn decode(rows: &Rows) -> Result<Option<Durable>, StateError> {
    let corrupted = |what: String| {
        redb::Error::Corrupted(format!("it is not what this release writes: {what}"))
    };
    let read = |error: serde_json::Error| corrupted(error.to_string());
    if rows.is_empty() {
        return Ok(None);
    }
    let form = rows.get(FORM_ROW).map_or(b"{}".as_slice(), Vec::as_slice);
    let Form { form, .. } = serde_json::from_slice(form).map_err(read)?;
    if form != FORM {
        return Err(StateError::OtherRelease(form));
    }
    let parts = rows.iter().filter(|(name, _)| *name != FORM_ROW);
    let parts = parts.map(|(name, value)| (name.as_str(), value.as_slice()));
    let durable = Durable::of_rows(parts).map_err(read)?;
    durable.check().map_err(corrupted)?;
    Ok(Some(durable))
}

/// The differences between a state and the stored one.
pub(super) struct Changes {
    /// The rows that differ, with their new values.
    pub(super) rows: Vec<(String, Vec<u8>)>,
    /// The rows that the state has no longer.
    pub(super) removed: Vec<String>,
    /// The size of all rows of the state, in bytes.
    pub(super) encoded: usize,
}

impl Changes {
    /// Encodes a state, and finds the rows that differ from the stored ones. Checks that new rows read back the same; in debug builds it checks
    /// all that differ. With 1,000 workers such a check takes a tenth of the coordinator's processor time.
    pub(super) fn between(stored: &Rows, durable: &Durable) -> Result<Self, StateError> {
        let mut encoder = Encoder {
            stored,
            kept: BTreeSet::new(),
            changed: Vec::new(),
            value: Vec::new(),
            encoded: 0,
        };
        durable.rows(&mut encoder)?;
        let Encoder {
            kept,
            changed,
            encoded,
            ..
        } = encoder;
        let removed = stored.keys().map(String::as_str);
        let removed = removed.filter(|name| !kept.contains(name) && *name != FORM_ROW);
        Ok(Self {
            removed: removed.map(str::to_owned).collect(),
            rows: changed,
            encoded,
        })
    }

    pub(super) fn apply_to(self, stored: &mut Rows) {
        for name in &self.removed {
            stored.remove(name);
        }
        stored.extend(self.rows);
    }
}

/// Finds the rows of a state that differ from the stored ones.
struct Encoder<'a> {
    stored: &'a Rows,
    /// The names of the stored rows that the state still has.
    kept: BTreeSet<&'a str>,
    changed: Vec<(String, Vec<u8>)>,
    value: Vec<u8>,
    encoded: usize,
}

impl TakeRows for Encoder<'_> {
    type Error = StateError;

    fn row<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        value: &T,
    ) -> Result<(), StateError> {
        let wrong = |what: String| StateError::NotReadBack(format!("{name}: {what}"));
        let wrong_json = |error: serde_json::Error| wrong(error.to_string());
        self.value.clear();
        serde_json::to_writer(&mut self.value, value).map_err(wrong_json)?;
        self.encoded += self.value.len();
        let stored = self.stored.get_key_value(name);
        if let Some((name, stored)) = stored {
            self.kept.insert(name);
            if *stored == self.value {
                return Ok(());
            }
        }
        if stored.is_none() || cfg!(debug_assertions) {
            let read: T = serde_json::from_slice(&self.value).map_err(wrong_json)?;
            if serde_json::to_vec(&read).map_err(wrong_json)? != self.value {
                return Err(wrong("a value changes when it is read back".to_owned()));
            }
        }
        self.changed.push((name.to_owned(), self.value.clone()));
        Ok(())
    }
}
