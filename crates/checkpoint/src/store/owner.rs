//! Which run writes at a location. Two that write at the same one would number and delete in one space.
//!
//! A run owns a location by a claim, a file `owner-N`. It is created where no file of that name is and
//! never changed, so of two runs that claim N only one does. The claim with the highest N counts. A
//! claim is kept up by a counter, `pulse-N`, which its process raises every [`BEAT`]; at a clean end it
//! says `released` instead.
//!
//! A run that finds another's claim watches the counter: if it moves, or another claim comes, the other
//! run lives. If it stands still for [`DEAD_AFTER`], by the watcher's own clock, the other counts as
//! dead, and its claim is superseded by one with a higher number. Clocks of different machines are never
//! compared. A run that counts as dead and is not (it was stopped, or could not reach the store) finds
//! the higher claim at its next beat, and writes no more. What it wrote until then harms nobody: parts
//! are named by their run, manifests never replace another, and a run deletes only what is its own.

use std::fmt;
use std::time::Duration;

use object_store::path::Path;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::Store;
use crate::error::CheckpointError;

/// How often an owner raises its counter.
pub const BEAT: Duration = Duration::from_secs(3);

/// An owner is dead when its counter has not changed for this long.
pub const DEAD_AFTER: Duration = Duration::from_secs(15);

/// How often a counter is looked at while it is watched.
const LOOK: Duration = Duration::from_millis(500);

/// How often a claim is tried while others claim as well.
const ROUNDS: usize = 8;

const OWNER: &str = "owner-";
const PULSE: &str = "pulse-";
const RELEASED: &str = "released";

/// Who owns a location.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The claim's number: the highest counts.
    pub term: u64,
    /// The run's id.
    pub run: String,
    /// Made anew by each coordinator of the run: an older one that is still there is superseded too.
    pub process: String,
    /// The job's name.
    pub job: String,
    /// When it was claimed, in seconds since 1970-01-01 00:00 UTC, by the owner's clock: for people.
    pub since: u64,
    /// The coordinator's host and address, for people.
    pub coordinator: String,
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "run {} of job {:?}, there since {}, its coordinator at {}",
            self.run,
            self.job,
            utc(self.since),
            self.coordinator
        )
    }
}

impl Store {
    /// The claim that counts, if there is any.
    ///
    /// # Errors
    /// If the store cannot be read, or what lies there is no claim.
    pub async fn owner(&self) -> Result<Option<Claim>, CheckpointError> {
        for _ in 0..ROUNDS {
            let Some(term) = self.terms(OWNER).await?.into_iter().max() else {
                return Ok(None);
            };
            let name = numbered(OWNER, term);
            match self.read("", &name).await {
                Ok(content) => {
                    let claim = serde_json::from_slice(&content);
                    return claim.map(Some).map_err(|error| {
                        CheckpointError::damaged(&self.place(&name), error.to_string())
                    });
                }
                // Superseded by a higher one meanwhile.
                Err(CheckpointError::NotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Err(self.unsettled())
    }

    /// The run that owns the location. Servers ask it to know that they see the same place as their
    /// coordinator.
    ///
    /// # Errors
    /// As [`owner`](Self::owner).
    pub async fn read_probe(&self) -> Result<Option<String>, CheckpointError> {
        Ok(self.owner().await?.map(|claim| claim.run))
    }

    /// Looks whether a run may claim the location. If another run owns it and has not released it, its
    /// counter is watched for `patience`. Changes nothing. Returns the claim to be superseded.
    ///
    /// # Errors
    /// [`CheckpointError::Taken`] if another run lives; or the store cannot be read.
    pub async fn watch_owner(
        &self,
        run: &str,
        patience: Duration,
    ) -> Result<Option<Claim>, CheckpointError> {
        for _ in 0..ROUNDS {
            let owner = self.owner().await?;
            if let Some(other) = owner.as_ref().filter(|owner| owner.run != run) {
                self.see_dead(other, patience).await?;
            }
            // Another may have come while one was watched.
            if self.owner().await? == owner {
                return Ok(owner);
            }
        }
        Err(self.unsettled())
    }

    /// Makes a run the owner, in place of `before`, and returns its claim with its number.
    ///
    /// # Errors
    /// [`CheckpointError::Taken`] if another claim has come meanwhile; or the store cannot be read or
    /// written to.
    pub async fn claim(
        &self,
        mut claim: Claim,
        before: Option<&Claim>,
    ) -> Result<Claim, CheckpointError> {
        claim.term = before.map_or(1, |before| before.term + 1);
        if self.try_claim(&claim).await? {
            return Ok(claim);
        }
        match self.owner().await? {
            Some(other) => Err(self.taken(&other)),
            None => Err(self.unsettled()),
        }
    }

    /// Writes a claim under its number. Returns whether it counts.
    ///
    /// # Errors
    /// If the store cannot be read or written to.
    pub async fn try_claim(&self, claim: &Claim) -> Result<bool, CheckpointError> {
        let content = serde_json::to_vec_pretty(claim);
        let content = content.map_err(|error| CheckpointError::Storage {
            place: self.location.clone(),
            reason: error.to_string(),
        })?;
        let name = numbered(OWNER, claim.term);
        match self.create("", &name, content.into()).await {
            // A request that was sent again may have met its own first try: see below.
            Ok(()) | Err(CheckpointError::Exists(_)) => {}
            Err(error) => return Err(error),
        }
        // One that looked long ago may claim a number below another's.
        if self.owner().await?.as_ref() != Some(claim) {
            return Ok(false);
        }
        self.beat(claim, 1).await?;
        for prefix in [OWNER, PULSE] {
            let older = self.terms(prefix).await?;
            let older = older.into_iter().filter(|term| *term < claim.term);
            let older: Vec<String> = older.map(|term| numbered(prefix, term)).collect();
            self.remove("", &older).await?;
        }
        Ok(true)
    }

    /// Shows that the owner lives: `beat` must be another one each time.
    ///
    /// # Errors
    /// If the store cannot be written to.
    pub async fn beat(&self, claim: &Claim, beat: u64) -> Result<(), CheckpointError> {
        self.pulse(claim, beat.to_string()).await
    }

    /// Gives the location up at a clean end: the next run need not wait.
    ///
    /// # Errors
    /// If the store cannot be written to.
    pub async fn release(&self, claim: &Claim) -> Result<(), CheckpointError> {
        self.pulse(claim, RELEASED.to_owned()).await
    }

    async fn pulse(&self, claim: &Claim, content: String) -> Result<(), CheckpointError> {
        let name = numbered(PULSE, claim.term);
        self.write("", &name, content.into()).await
    }

    async fn read_pulse(&self, claim: &Claim) -> Result<Option<Vec<u8>>, CheckpointError> {
        match self.read("", &numbered(PULSE, claim.term)).await {
            Ok(content) => Ok(Some(content.to_vec())),
            Err(CheckpointError::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns once the owner has released the location, or was not seen to live for `patience`.
    async fn see_dead(&self, owner: &Claim, patience: Duration) -> Result<(), CheckpointError> {
        let first = self.read_pulse(owner).await?;
        if first.as_deref() == Some(RELEASED.as_bytes()) {
            return Ok(());
        }
        tracing::warn!(
            "{} is {owner}; watching for {patience:?} whether it lives",
            self.location
        );
        let until = tokio::time::Instant::now() + patience;
        loop {
            let now = tokio::time::Instant::now();
            let next = (now + LOOK).min(until);
            tokio::time::sleep_until(next).await;
            let pulse = self.read_pulse(owner).await?;
            if pulse.as_deref() == Some(RELEASED.as_bytes()) {
                return Ok(());
            }
            if pulse != first {
                return Err(self.taken(owner));
            }
            if next == until {
                tracing::warn!("{owner}: it shows no sign of life; taking its place");
                return Ok(());
            }
        }
    }

    /// Numbers of the files of that kind.
    async fn terms(&self, prefix: &str) -> Result<Vec<u64>, CheckpointError> {
        let root = (!self.root.as_ref().is_empty()).then_some(&self.root);
        let found = self.objects.list_with_delimiter(root).await;
        let found = found.map_err(|error| self.secrets.explain(&self.location, &error))?;
        let names = found.objects.iter().map(|object| &object.location);
        let term = |path: &Path| -> Option<u64> {
            let name = path.filename()?;
            let term = name.strip_prefix(prefix)?.parse().ok()?;
            (numbered(prefix, term) == name).then_some(term)
        };
        Ok(names.filter_map(term).collect())
    }

    /// Says that another run owns the location.
    pub fn taken(&self, owner: &Claim) -> CheckpointError {
        CheckpointError::Taken {
            location: self.location.clone(),
            owner: owner.to_string(),
        }
    }

    fn unsettled(&self) -> CheckpointError {
        CheckpointError::Storage {
            place: self.location.clone(),
            reason: "several runs claim it at the same time".to_owned(),
        }
    }
}

fn numbered(prefix: &str, term: u64) -> String {
    format!("{prefix}{term:012}")
}

/// A time for people, as 2026-01-31 09:05:00 UTC.
fn utc(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    match OffsetDateTime::from_unix_timestamp(seconds) {
        Ok(time) => format!(
            "{}-{:02}-{:02} {:02}:{:02}:{:02} UTC",
            time.year(),
            u8::from(time.month()),
            time.day(),
            time.hour(),
            time.minute(),
            time.second()
        ),
        Err(_) => format!("{seconds} s after 1970"),
    }
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn times_are_shown_as_people_write_them() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_790_000_000, "2026-09-21 14:13:20 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds), expected);
        }
    }
}
