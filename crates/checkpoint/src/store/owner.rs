//! The run that owns a location. Two runs at one location would use the same checkpoint numbers and delete each other's
//! checkpoints.
//!
//! A run owns a location by a claim, a file `owner-N`. The file is created only if it does not exist and
//! is never changed, so of two runs that claim N only one succeeds. The claim with the highest N counts.
//! The owner's process raises a counter, `pulse-N`, every [`BEAT`]. At a clean end it writes `released`
//! there instead.
//!
//! A run that finds another run's claim watches the counter. If the counter moves, or another claim
//! appears, the other run is alive. If the counter does not change for [`DEAD_AFTER`] by the watcher's
//! own clock, the other run counts as dead, and a claim with a higher number supersedes its claim. Clocks
//! of different machines are never compared. A run that was only paused, or could not reach the store,
//! finds the higher claim at its next beat and stops writing. Its writes until then do no harm: the names
//! of parts contain the run, a manifest never replaces another, and a run deletes only its own files.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shared_proto::task::boxed;
use time::OffsetDateTime;

use super::Store;
use crate::error::CheckpointError;
use crate::manifest::sha256;

/// The interval at which an owner raises its counter.
pub const BEAT: Duration = Duration::from_secs(3);

/// The time without a change of its counter after which an owner counts as dead.
pub const DEAD_AFTER: Duration = Duration::from_secs(15);

/// The interval at which a watched counter is read.
const LOOK: Duration = Duration::from_millis(500);

/// The number of attempts of an operation while other runs claim the location too.
const ROUNDS: usize = 8;

const OWNER: &str = "owner-";
const PULSE: &str = "pulse-";
const RELEASED: &str = "released";

/// A run's claim to a location.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The claim's number. The highest one counts.
    pub term: u64,
    /// The run's id.
    pub run: String,
    /// The id of the coordinator process. It differs between processes of one run, so that a new one
    /// supersedes an old one that still runs.
    pub process: String,
    /// The job's name.
    pub job: String,
    /// The time of the claim by the owner's clock, in seconds since 1970-01-01 00:00 UTC. Only shown.
    pub since: u64,
    /// The coordinator's host and address. Only shown.
    pub coordinator: String,
}

/// The content of a claim's file.
#[derive(Serialize, Deserialize)]
struct ClaimFile {
    #[serde(flatten)]
    claim: Claim,
    /// The checksum of the rest; none in files of earlier releases.
    #[serde(default)]
    sha256: Option<String>,
}

impl Claim {
    fn checksum(&self) -> serde_json::Result<String> {
        Ok(sha256(&serde_json::to_vec(self)?))
    }

    /// Returns the content of the claim's file.
    fn to_file(&self) -> serde_json::Result<Vec<u8>> {
        let sha256 = Some(self.checksum()?);
        let claim = self.clone();
        serde_json::to_vec_pretty(&ClaimFile { claim, sha256 })
    }

    /// Reads the content of a claim's file.
    fn of_file(content: &[u8]) -> Result<Self, String> {
        let read = || -> serde_json::Result<_> {
            let ClaimFile { claim, sha256 } = serde_json::from_slice(content)?;
            let right = claim.checksum()?;
            Ok((claim, sha256.is_none_or(|sha256| sha256 == right)))
        };
        match read() {
            Ok((claim, true)) => Ok(claim),
            Ok((_, false)) => Err("its checksum is wrong".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
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
    /// Checks that the run of this store may write a part of a checkpoint: there is no whole checkpoint of that number,
    /// and no other run owns the store.
    ///
    /// # Errors
    /// [`CheckpointError::Storage`] if the checkpoint is whole, [`CheckpointError::Taken`], or if the store cannot be
    /// read.
    #[boxed]
    pub async fn check_writable(&self, number: u64) -> Result<(), CheckpointError> {
        match self.manifest(number).await {
            Err(CheckpointError::NotFound(_)) => {}
            Ok(_) => {
                return Err(CheckpointError::Storage {
                    place: self.checkpoint_location(number),
                    reason: "it is whole already".to_owned(),
                });
            }
            Err(error) => return Err(error),
        }
        match self.owner().await? {
            Some(other) if other.run != self.run() => Err(self.taken(&other)),
            _ => Ok(()),
        }
    }

    /// Reads the claim that counts, if there is one.
    ///
    /// # Errors
    /// If the store cannot be read, or if the claim's file is damaged.
    #[boxed]
    pub async fn owner(&self) -> Result<Option<Claim>, CheckpointError> {
        for _ in 0..ROUNDS {
            let Some(term) = self.terms(OWNER).await?.into_iter().max() else {
                return Ok(None);
            };
            let name = numbered(OWNER, term);
            match self.files.read("", &name).await {
                Ok(content) => {
                    return Claim::of_file(&content).map(Some).map_err(|reason| {
                        let reason = format!(
                            "{reason}; delete the file if no other run writes its checkpoints there"
                        );
                        CheckpointError::damaged(&self.files.place(&name), reason)
                    });
                }
                // A higher claim has replaced it meanwhile.
                Err(CheckpointError::NotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Err(self.contested())
    }

    /// Checks that a run owns the location, which shows that the run's coordinator uses this store too. Returns the
    /// store for this run.
    ///
    /// # Errors
    /// [`CheckpointError::Elsewhere`], or as [`owner`](Self::owner).
    #[boxed]
    pub async fn owned_by(&self, run: &str) -> Result<Self, CheckpointError> {
        match self.owner().await? {
            Some(claim) if claim.run == run => Ok(self.clone().of_run(run)),
            _ => Err(CheckpointError::Elsewhere(self.location().to_owned())),
        }
    }

    /// Checks that a run may claim the location. If another run owns it and has not released it, watches that run's
    /// counter for `patience`. Changes nothing. Returns the claim to supersede, or `None` if there is none.
    ///
    /// # Errors
    /// [`CheckpointError::Taken`] if another run is alive; or if the store cannot be read.
    #[boxed]
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
            // A third run may have claimed it while the counter was watched.
            if self.owner().await? == owner {
                return Ok(owner);
            }
        }
        Err(self.contested())
    }

    /// Makes a run the owner in place of `before`, and returns its claim with its number.
    ///
    /// # Errors
    /// [`CheckpointError::Taken`] if another claim was made meanwhile; or if the store cannot be read or
    /// written to.
    #[boxed]
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
            None => Err(self.contested()),
        }
    }

    /// Writes a claim under its number. Returns whether the claim counts. If it does, shows that the owner is alive,
    /// and removes earlier claims.
    ///
    /// # Errors
    /// If the store cannot be read or written to.
    #[boxed]
    pub async fn try_claim(&self, claim: &Claim) -> Result<bool, CheckpointError> {
        let content = claim.to_file().map_err(|error| CheckpointError::Storage {
            place: self.location().to_owned(),
            reason: error.to_string(),
        })?;
        let name = numbered(OWNER, claim.term);
        match self.files.create("", &name, content.into()).await {
            // A retried request may have found the file of its own first attempt. The next check shows that.
            Ok(()) | Err(CheckpointError::Exists(_)) => {}
            Err(error) => return Err(error),
        }
        // If this run last looked long ago, a higher claim may exist.
        if self.owner().await?.as_ref() != Some(claim) {
            return Ok(false);
        }
        self.beat(claim, 1).await?;
        for prefix in [OWNER, PULSE] {
            let older = self.terms(prefix).await?;
            let older = older.into_iter().filter(|term| *term < claim.term);
            let older: Vec<String> = older.map(|term| numbered(prefix, term)).collect();
            self.files.remove("", &older).await?;
        }
        Ok(true)
    }

    /// Writes the counter of an owner, which shows that the owner is alive. `beat` must differ from the value before.
    ///
    /// # Errors
    /// If the store cannot be written to.
    #[boxed]
    pub async fn beat(&self, claim: &Claim, beat: u64) -> Result<(), CheckpointError> {
        self.pulse(claim, beat.to_string()).await
    }

    /// Releases the location at a clean end, so that the next run need not wait.
    ///
    /// # Errors
    /// If the store cannot be written to.
    #[boxed]
    pub async fn release(&self, claim: &Claim) -> Result<(), CheckpointError> {
        self.pulse(claim, RELEASED.to_owned()).await
    }

    /// Returns whether the newest owner has released the location, so that no checkpoint follows.
    ///
    /// # Errors
    /// As [`owner`](Self::owner).
    #[boxed]
    pub async fn is_released(&self) -> Result<bool, CheckpointError> {
        let Some(claim) = self.owner().await? else {
            return Ok(false);
        };
        let pulse = self.read_pulse(&claim).await?;
        Ok(pulse.is_some_and(|pulse| pulse == RELEASED.as_bytes()))
    }

    async fn pulse(&self, claim: &Claim, content: String) -> Result<(), CheckpointError> {
        let name = numbered(PULSE, claim.term);
        self.files.write("", &name, content.into()).await
    }

    async fn read_pulse(&self, claim: &Claim) -> Result<Option<Vec<u8>>, CheckpointError> {
        match self.files.read("", &numbered(PULSE, claim.term)).await {
            Ok(content) => Ok(Some(content.to_vec())),
            Err(CheckpointError::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns once the owner has released the location, or its counter has stood still for `patience`.
    ///
    /// # Errors
    /// [`CheckpointError::Taken`] if the counter moves; or if the store cannot be read.
    async fn see_dead(&self, owner: &Claim, patience: Duration) -> Result<(), CheckpointError> {
        let first = self.read_pulse(owner).await?;
        if first.as_deref() == Some(RELEASED.as_bytes()) {
            return Ok(());
        }
        tracing::warn!(
            "{} belongs to {owner}. It did not release the place; if it shows no sign of life for {} s, this run takes the place",
            self.location(),
            patience.as_secs()
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

    /// Returns the numbers of the files with a prefix.
    async fn terms(&self, prefix: &str) -> Result<Vec<u64>, CheckpointError> {
        let files = self.files.list("").await?;
        let term = |name: &str| -> Option<u64> {
            let term = name.strip_prefix(prefix)?.parse().ok()?;
            (numbered(prefix, term) == name).then_some(term)
        };
        Ok(files.iter().filter_map(|(name, _)| term(name)).collect())
    }

    /// Returns the error for a location that another run owns.
    pub fn taken(&self, owner: &Claim) -> CheckpointError {
        CheckpointError::Taken {
            location: self.location().to_owned(),
            owner: owner.to_string(),
        }
    }

    fn contested(&self) -> CheckpointError {
        CheckpointError::Storage {
            place: self.location().to_owned(),
            reason: "several runs claim it at the same time".to_owned(),
        }
    }
}

fn numbered(prefix: &str, term: u64) -> String {
    format!("{prefix}{term:012}")
}

/// Formats a time as 2026-01-31 09:05:00 UTC.
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
    use super::{Claim, utc};

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

    fn claim() -> Claim {
        Claim {
            term: 3,
            run: "0f".to_owned(),
            process: "a1".to_owned(),
            job: "digits".to_owned(),
            since: 1_790_000_000,
            coordinator: "alpha (127.0.0.1:7070)".to_owned(),
        }
    }

    #[test]
    fn no_flipped_bit_of_a_claim_makes_another_one() {
        let content = claim().to_file().unwrap();
        assert_eq!(Claim::of_file(&content).unwrap(), claim());
        for bit in 0..8 * content.len() {
            let mut damaged = content.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            if let Ok(read) = Claim::of_file(&damaged) {
                assert_eq!(read, claim(), "bit {bit}");
            }
        }
        for length in 0..content.len() {
            assert!(Claim::of_file(&content[..length]).is_err());
        }
    }

    #[test]
    fn claims_of_earlier_releases_are_read_and_later_ones_by_them() {
        let earlier = serde_json::to_vec_pretty(&claim()).unwrap();
        assert_eq!(Claim::of_file(&earlier).unwrap(), claim());
        let later = claim().to_file().unwrap();
        assert_eq!(serde_json::from_slice::<Claim>(&later).unwrap(), claim());
    }
}
