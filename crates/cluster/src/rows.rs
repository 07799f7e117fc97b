//! The state as rows: one for each field, and one for each member. A change rewrites only the rows that differ, not the
//! whole state.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shared_proto::ids::TaskId;

use super::durable::Durable;
use super::stored;

/// The prefix of the names of members' rows.
const MEMBER: &str = "members/";

/// The row of the workers that are expected back.
#[derive(Serialize, Deserialize)]
struct Awaited(#[serde(with = "stored::tasks")] BTreeMap<TaskId, Instant>);

impl Durable {
    /// Passes the name of each row, and its value as JSON, to `take`. `take` returns whether the row differs from the
    /// persisted one. Builds with debug assertions read such a row back.
    ///
    /// # Errors
    /// If a row cannot be written as JSON.
    ///
    /// # Panics
    /// With debug assertions, if a row changes when it is read back and written again.
    pub fn rows(&self, take: &mut dyn FnMut(&str, &[u8]) -> bool) -> Result<(), String> {
        let mut rows = Encoded {
            take,
            value: Vec::new(),
        };
        let Self {
            run,
            members,
            awaited,
            forgotten,
            variables,
            training,
            ring,
            evaluations,
            checkpoints,
            losses,
            unable,
            outcome,
        } = self;
        rows.row("run", run)?;
        for (id, member) in members {
            rows.row(&format!("{MEMBER}{id}"), member)?;
        }
        rows.row("awaited", &Awaited(awaited.clone()))?;
        rows.row("forgotten", forgotten)?;
        rows.row("variables", variables)?;
        rows.row("training", training)?;
        rows.row("ring", ring)?;
        rows.row("evaluations", evaluations)?;
        rows.row("checkpoints", checkpoints)?;
        rows.row("losses", losses)?;
        rows.row("unable", unable)?;
        rows.row("outcome", outcome)
    }

    /// Reads a state from the values of its rows, as JSON.
    ///
    /// # Errors
    /// If a row is missing, or is not what this release writes.
    pub fn of_rows(rows: &[(&str, &[u8])]) -> Result<Self, serde_json::Error> {
        let (members, parts): (Vec<_>, Vec<_>) =
            rows.iter().partition(|(name, _)| name.starts_with(MEMBER));
        let members: Vec<&[u8]> = members.into_iter().map(|(_, value)| value).collect();
        let mut whole = b"{\"members\":[".to_vec();
        whole.extend(members.join(&b',').iter());
        whole.push(b']');
        for (name, value) in parts {
            whole.extend(format!(",{name:?}:").as_bytes());
            whole.extend(value);
        }
        whole.push(b'}');
        serde_json::from_slice(&whole)
    }
}

/// Writes rows as JSON. The type is not generic over `take`, so the code that writes the rows is compiled only once.
struct Encoded<'a> {
    take: &'a mut dyn FnMut(&str, &[u8]) -> bool,
    value: Vec<u8>,
}

impl Encoded<'_> {
    fn row<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        value: &T,
    ) -> Result<(), String> {
        let wrong = |error: serde_json::Error| format!("{name}: {error}");
        self.value.clear();
        serde_json::to_writer(&mut self.value, value).map_err(wrong)?;
        let has_changed = (self.take)(name, &self.value);
        if cfg!(debug_assertions) && has_changed {
            let read: T = serde_json::from_slice(&self.value).map_err(wrong)?;
            let again = serde_json::to_vec(&read).map_err(wrong)?;
            assert_eq!(again, self.value, "{name} changes when it is read back");
        }
        Ok(())
    }
}
