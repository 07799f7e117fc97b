//! The decisions about jobs: their order, their ids, and what a call changes.

use std::collections::BTreeMap;

use shared_proto::job::Job;
use shared_proto::refusal::{Reason, Refusal};

use super::entry::{Entry, JobState, Outcome};

/// The maximum number of jobs that wait in the queue.
pub(crate) const MOST_QUEUED: usize = 1000;

/// The maximum number of ended jobs that are remembered. Older ones are forgotten.
pub(crate) const MOST_ENDED: usize = 1000;

/// The maximum total size of the TOML texts of waiting jobs, in bytes. The same limit holds for remembered ended jobs.
pub(super) const MOST_BYTES: usize = 16 << 20;

/// The maximum number of characters of a job's name in the name of its folder.
const LONGEST_FOLDER: usize = 64;

/// The jobs of a queue.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Jobs {
    pub(super) entries: BTreeMap<u64, Entry>,
    /// The highest id that was given to a job so far.
    pub(super) newest: u64,
}

/// A job that is to be added.
#[derive(Clone, Debug)]
pub(crate) struct Submission {
    /// The number of the submission; 0 for the job that the coordinator is started with.
    pub(crate) number: u64,
    /// The job, without a run directory.
    pub(crate) job: Job,
    pub(crate) restore: String,
    /// The id of the job's run.
    pub(crate) run: String,
}

/// The end of a job.
#[derive(Clone, Debug, Default)]
pub(crate) struct End {
    /// The error with which the job failed; empty if it did not fail.
    pub(crate) error: String,
    /// True if the job was told to end before its data ended.
    pub(crate) stopped: bool,
    /// The job's figures; `None` if it has not begun.
    pub(crate) outcome: Option<Outcome>,
}

/// What the caller still has to do after it has cancelled a job in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cancelled {
    /// Nothing: the job was still queued, or had ended.
    Nothing,
    /// End the running job in good order, with a last checkpoint.
    InGoodOrder,
    /// End the running job at once, without a last checkpoint.
    AtOnce,
}

impl Jobs {
    /// Adds a job, and returns its id. A repeated submission changes nothing, and returns the same id. A job that sets
    /// no location for its checkpoints gets a folder below `locations`, if this is given. The name of the folder
    /// includes the id of the run, because other queues may have the same location.
    ///
    /// # Errors
    /// [`Reason::TooManyRequests`].
    pub(super) fn submit(
        &mut self,
        mut submission: Submission,
        locations: Option<&str>,
        folder_is_free: impl Fn(&str) -> bool,
        now: u64,
    ) -> Result<u64, Refusal> {
        let number = submission.number;
        let same = |entry: &&Entry| number != 0 && entry.submission == number;
        if let Some(known) = self.entries.values().find(same) {
            return Ok(known.id);
        }
        let queued = self.entries.values();
        let queued = queued.filter(|entry| entry.state == JobState::Queued);
        let (count, bytes) = queued.fold((0, 0), |(count, bytes), entry| {
            (count + 1, bytes + entry.job_toml.len())
        });
        if count >= MOST_QUEUED || bytes >= MOST_BYTES {
            return Err(Refusal::new(
                Reason::TooManyRequests,
                format!(
                    "{count} jobs of {bytes} bytes are queued already, and the queue takes {MOST_QUEUED} jobs or {MOST_BYTES} bytes; wait for some to end, or cancel some"
                ),
            ));
        }
        let id = self.newest + 1;
        let folder = folder_of(&submission.job.name, id, folder_is_free);
        let checkpoints = &mut submission.job.checkpoint;
        if let (None, Some(locations)) = (&checkpoints.location, locations) {
            let locations = locations.trim_end_matches('/');
            checkpoints.location = Some(format!("{locations}/{folder}-{}", submission.run));
        }
        self.add(id, submission, folder, now);
        Ok(id)
    }

    /// Adds the job that the coordinator is started with, which runs in the coordinator's folder and comes first. Does
    /// nothing if an earlier process has added it.
    pub(super) fn begin_with(&mut self, given: Submission, now: u64) {
        let in_the_folder = |entry: &Entry| entry.folder.is_empty();
        if !self.entries.values().any(in_the_folder) {
            let id = self.newest + 1;
            self.add(id, given, String::new(), now);
        }
    }

    /// Replaces the settings of the job in the coordinator's folder, and queues it anew. The job's run must not have
    /// begun.
    pub(super) fn replace(&mut self, given: Submission, now: u64) {
        let known = self.entries.values().find(|e| e.folder.is_empty());
        if let Some((id, run)) = known.map(|entry| (entry.id, entry.run.clone())) {
            // The run keeps its id, because it may own the store of checkpoints already.
            let given = Submission { run, ..given };
            self.add(id, given, String::new(), now);
        }
    }

    fn add(&mut self, id: u64, submission: Submission, folder: String, now: u64) {
        self.newest = self.newest.max(id);
        let entry = Entry {
            id,
            submission: submission.number,
            name: submission.job.name.clone(),
            job_toml: submission.job.to_toml(),
            restore: submission.restore,
            folder,
            run: submission.run,
            state: JobState::Queued,
            cancelling: false,
            at_once: false,
            error: String::new(),
            submitted: now,
            began: 0,
            ended: 0,
            outcome: None,
        };
        self.entries.insert(id, entry);
    }

    /// Returns the job to work on: the one that is at work, otherwise the one in the coordinator's folder, otherwise the
    /// one that has waited longest.
    pub(super) fn first(&self) -> Option<&Entry> {
        let rank = |entry: &&Entry| match (entry.state, entry.folder.is_empty()) {
            (JobState::Running, _) => (0, entry.id),
            (_, true) => (1, entry.id),
            (_, false) => (2, entry.id),
        };
        let unended = self.entries.values().filter(|entry| !entry.has_ended());
        unended.min_by_key(rank)
    }

    /// Notes that a job is at work. Returns false if it is not queued any more.
    pub(super) fn begin(&mut self, id: u64, now: u64) -> bool {
        match self.entries.get_mut(&id) {
            Some(entry) if entry.state == JobState::Queued => {
                (entry.state, entry.began) = (JobState::Running, now);
                true
            }
            Some(entry) => entry.state == JobState::Running,
            None => false,
        }
    }

    /// Notes that a job has ended, and forgets the oldest ones.
    pub(super) fn end(&mut self, id: u64, end: End, now: u64) {
        if let Some(entry) = self.entries.get_mut(&id).filter(|entry| !entry.has_ended()) {
            let failed = !end.error.is_empty();
            entry.state = match (end.stopped, failed) {
                (true, _) => JobState::Cancelled,
                (false, true) if entry.cancelling => JobState::Cancelled,
                (false, true) => JobState::Failed,
                (false, false) => JobState::Done,
            };
            (entry.error, entry.outcome, entry.ended) = (end.error, end.outcome, now);
        }
        self.forget();
    }

    /// Queues the job in the coordinator's folder again, if it has failed. Another job may be at work.
    pub(super) fn resume(&mut self) {
        let given = self.entries.values_mut().find(|e| e.folder.is_empty());
        if let Some(entry) = given.filter(|e| e.state == JobState::Failed) {
            (entry.state, entry.outcome) = (JobState::Queued, None);
            (entry.began, entry.ended) = (0, 0);
            entry.error.clear();
        }
    }

    /// Cancels a job. A repeated call changes nothing, unless it is the first one with `at_once`.
    ///
    /// # Errors
    /// [`Reason::UnknownJob`].
    pub(super) fn cancel(
        &mut self,
        id: u64,
        at_once: bool,
        now: u64,
    ) -> Result<Cancelled, Refusal> {
        let Some(entry) = self.entries.get_mut(&id) else {
            return Err(unknown(id));
        };
        Ok(match entry.state {
            JobState::Queued => {
                (entry.state, entry.ended) = (JobState::Cancelled, now);
                entry.cancelling = true;
                self.forget();
                Cancelled::Nothing
            }
            JobState::Running => {
                entry.cancelling = true;
                entry.at_once |= at_once;
                match entry.at_once {
                    false => Cancelled::InGoodOrder,
                    true => Cancelled::AtOnce,
                }
            }
            JobState::Done | JobState::Failed | JobState::Cancelled => Cancelled::Nothing,
        })
    }

    /// Forgets the jobs that ended longest ago. The one in the coordinator's folder stays, so that it is not begun again.
    fn forget(&mut self) {
        let ended = |entry: &&Entry| entry.has_ended() && !entry.folder.is_empty();
        let mut ended: Vec<&Entry> = self.entries.values().filter(ended).collect();
        ended.sort_by_key(|entry| std::cmp::Reverse((entry.ended, entry.id)));
        let (mut count, mut bytes) = (0, 0);
        let fits = |entry: &&&Entry| {
            (count, bytes) = (count + 1, bytes + entry.job_toml.len());
            count <= MOST_ENDED && bytes <= MOST_BYTES
        };
        let kept = ended.iter().take_while(fits).count();
        let forgotten: Vec<u64> = ended[kept..].iter().map(|entry| entry.id).collect();
        for id in forgotten {
            self.entries.remove(&id);
        }
    }
}

/// Returns the refusal of a call about a job that is not known.
pub(super) fn unknown(id: u64) -> Refusal {
    Refusal::new(
        Reason::UnknownJob,
        format!("there is no job {id}; `flambeau jobs` lists those that there are"),
    )
}

/// Returns a free folder for a job, such as `runs/digits-7`.
fn folder_of(name: &str, id: u64, is_free: impl Fn(&str) -> bool) -> String {
    let plain = |c: char| match c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') {
        true => c,
        false => '_',
    };
    let name: String = name.chars().take(LONGEST_FOLDER).map(plain).collect();
    // No folder is hidden, or leads elsewhere.
    let name = name.trim_start_matches('.');
    let first = format!("runs/{name}-{id}");
    let others = (2..).map(|number| format!("{first}-{number}"));
    let mut names = std::iter::once(first.clone()).chain(others);
    names.find(|folder| is_free(folder)).unwrap_or(first)
}
