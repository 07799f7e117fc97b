//! The state as rows: one for each part of it, and one for each member. So a change rewrites the rows that differ, and not the whole state.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shared_proto::ids::TaskId;

use super::durable::Durable;
use super::stored;

/// The name of a member's row begins with it.
const MEMBER: &str = "members/";

/// Takes the rows of a state.
pub(crate) trait TakeRows {
    type Error;

    /// Takes a row.
    ///
    /// # Errors
    /// The error of the taker.
    fn row<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        value: &T,
    ) -> Result<(), Self::Error>;
}

/// The row of the workers that are expected back.
#[derive(Serialize, Deserialize)]
struct Awaited(#[serde(with = "stored::tasks")] BTreeMap<TaskId, Instant>);

impl Durable {
    /// Hands over each row.
    ///
    /// # Errors
    /// The error of the taker.
    pub(crate) fn rows<R: TakeRows>(&self, rows: &mut R) -> Result<(), R::Error> {
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
    pub(crate) fn of_rows<'a>(
        rows: impl Iterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<Self, serde_json::Error> {
        let (members, parts): (Vec<_>, Vec<_>) =
            rows.partition(|(name, _)| name.starts_with(MEMBER));
        let members = members.into_iter().map(|(_, value)| value);
        let members: Vec<&[u8]> = members.collect();
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
