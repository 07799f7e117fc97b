//! TensorBoard's event files in the run directory: scalars of all steps and evaluations, and histograms of the weights of
//! checkpoints. `tensorboard --logdir runs` shows each run.
//!
//! - `format`: the format of the files
//! - `histogram`: the distribution of values
//! - `weights`: histograms of the weights in a checkpoint

mod format;
mod histogram;
mod weights;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use checkpoint::Store;
use cluster::Record;
use daemon::Offload;
use metrics::counter;
use shared_proto::job::run_dir;
use tokio::fs::File;
use tokio::io::{AsyncWriteExt, BufWriter};
use tokio::sync::{mpsc, oneshot};

use self::format::{Event, Value};

/// The suffix of the names of event files that this module writes.
const OURS: &str = ".flambeau";

/// The pause after histograms, as a multiple of the time that they took. So histograms take a twentieth of a core at
/// most.
const PAUSES: u32 = 20;

/// The longest wait at the end for the histograms of the last checkpoint.
const LAST_HISTOGRAMS: Duration = Duration::from_secs(10);

/// Writes the records of a job until the queue ends. Reads checkpoints from `store`, if there is one.
pub(crate) async fn write(dir: PathBuf, store: Option<Store>, mut queue: mpsc::Receiver<Record>) {
    let mut file = EventFile::new(dir);
    let mut histograms = Histograms::new(store);
    loop {
        let record = tokio::select! {
            record = queue.recv() => record,
            event = histograms.next() => {
                file.write(event, true).await;
                continue;
            }
        };
        let Some(record) = record else { break };
        if let Record::Checkpoint { number, .. } = &record {
            histograms.want(*number);
        }
        if let Some(event) = event_of(&record, wall_time()) {
            file.write(Some(event), queue.is_empty()).await;
        }
    }
    histograms.hurry();
    let last = async {
        while histograms.is_at_work() {
            let event = histograms.next().await;
            file.write(event, true).await;
        }
    };
    if tokio::time::timeout(LAST_HISTOGRAMS, last).await.is_err() {
        tracing::warn!("no histograms of the last checkpoint: reading it takes too long");
    }
}

/// Deletes the event files of an earlier run in the same folder.
///
/// # Errors
/// If they cannot be deleted.
pub(crate) fn remove_earlier(dir: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(run_dir::EVENTS) && name.ends_with(OURS) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Returns the seconds since 1970.
fn wall_time() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// Returns the event for a record. `None` for a record that TensorBoard does not show.
fn event_of(record: &Record, wall_time: f64) -> Option<Event> {
    match record {
        Record::Steps {
            steps,
            epoch,
            loss,
            samples_per_second,
            ..
        } => {
            let values = vec![
                Value::scalar("train/loss", *loss),
                Value::scalar("train/samples_per_second", *samples_per_second),
                Value::scalar("train/epoch", *epoch),
            ];
            Some(Event::of_values(wall_time, *steps, values))
        }
        Record::Evaluation { steps, metrics, .. } => {
            let value =
                |(name, value): (&String, &f64)| Value::scalar(&format!("test/{name}"), *value);
            let values = metrics.iter().map(value).collect();
            Some(Event::of_values(wall_time, *steps, values))
        }
        Record::LearningRate { steps, factor, .. } => {
            let value = Value::scalar("train/learning_rate_factor", *factor);
            Some(Event::of_values(wall_time, *steps, vec![value]))
        }
        Record::Restored {
            shard: None, steps, ..
        } => Some(Event::went_back(wall_time, *steps)),
        _ => None,
    }
}

/// An event file. After a failed write the next event begins another file, since a reader stops at a record that was cut
/// short.
struct EventFile {
    dir: PathBuf,
    open: Option<BufWriter<File>>,
    files: u32,
    /// The number of events that could not be written since the last successful write.
    lost: u64,
}

impl EventFile {
    fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            open: None,
            files: 0,
            lost: 0,
        }
    }

    /// Writes an event, if there is one. If `flush`, flushes the events that are still buffered, too.
    async fn write(&mut self, event: Option<Event>, flush: bool) {
        let Some(event) = event else { return };
        match self.try_write(&event, flush).await {
            Ok(()) if self.lost == 0 => {}
            Ok(()) => {
                let lost = std::mem::take(&mut self.lost);
                tracing::warn!(
                    lost,
                    "TensorBoard's events can be written again; some are missing"
                );
            }
            Err(error) => {
                self.open = None;
                if self.lost == 0 {
                    tracing::error!(%error, "TensorBoard's events cannot be written at present");
                }
                self.lost += 1;
                counter!("flambeau_coordinator_events_lost_total").increment(1);
            }
        }
    }

    async fn try_write(&mut self, event: &Event, flush: bool) -> std::io::Result<()> {
        let file = match &mut self.open {
            Some(file) => file,
            None => {
                let file = self.create().await?;
                self.open.insert(file)
            }
        };
        file.write_all(&event.to_record()).await?;
        if flush {
            file.flush().await?;
        }
        Ok(())
    }

    /// Creates the next file. TensorBoard reads the files of a run in the order of their names.
    async fn create(&mut self) -> std::io::Result<BufWriter<File>> {
        let now = wall_time();
        let name = format!(
            "{}{:010}.{}.{:03}{OURS}",
            run_dir::EVENTS,
            now as u64,
            std::process::id(),
            self.files
        );
        self.files += 1;
        let mut options = File::options();
        let options = options.create(true).append(true);
        let mut file = BufWriter::new(options.open(self.dir.join(name)).await?);
        file.write_all(&Event::version(now).to_record()).await?;
        Ok(file)
    }
}

/// Makes the histograms of checkpoints: of one checkpoint at a time, and always of the newest.
struct Histograms {
    store: Option<Store>,
    /// The number of the newest checkpoint, until its histograms are begun.
    wanted: Option<u64>,
    running: Option<(Instant, oneshot::Receiver<Option<Event>>)>,
    /// The time before which no histograms are made.
    pause: Option<tokio::time::Instant>,
}

impl Histograms {
    fn new(store: Option<Store>) -> Self {
        Self {
            store,
            wanted: None,
            running: None,
            pause: None,
        }
    }

    fn want(&mut self, number: u64) {
        self.wanted = Some(number);
    }

    /// Ends the pause, so that the wanted histograms are made at once.
    fn hurry(&mut self) {
        self.pause = None;
    }

    fn is_at_work(&self) -> bool {
        self.store.is_some() && (self.running.is_some() || self.wanted.is_some())
    }

    /// Returns the next histograms as an event. `None` if the checkpoint could not be read. Waits while no histograms
    /// are wanted. Cancel-safe.
    async fn next(&mut self) -> Option<Event> {
        if self.running.is_none() {
            let (Some(number), Some(store)) = (self.wanted, &self.store) else {
                return std::future::pending().await;
            };
            if let Some(pause) = self.pause {
                tokio::time::sleep_until(pause).await;
            }
            self.wanted = None;
            self.running = Some((Instant::now(), start(store.clone(), number)));
        }
        let (began, running) = self.running.as_mut()?;
        let event = running.await.ok().flatten();
        self.pause = Some(tokio::time::Instant::now() + PAUSES * began.elapsed());
        self.running = None;
        event
    }
}

/// Starts to make the histograms of a checkpoint, at a low priority.
fn start(store: Store, number: u64) -> oneshot::Receiver<Option<Event>> {
    let (done, result) = oneshot::channel();
    Offload::Threads.spawn_background(async move {
        let made = weights::histograms(&store, number).await;
        // The checkpoint may have been deleted in favour of a newer one.
        let none = |error| tracing::debug!(number, "no histograms of a checkpoint: {error}");
        let _ = done.send(made.map_err(none).ok());
    });
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_the_values_of_their_records() {
        let record = Record::Evaluation {
            seconds: 1.0,
            epoch: 1,
            steps: 7,
            samples: 70,
            metrics: [("accuracy".to_owned(), 0.5), ("loss".to_owned(), 2.0)].into(),
        };
        let event = event_of(&record, 3.0).unwrap();
        let values = [
            Value::scalar("test/accuracy", 0.5),
            Value::scalar("test/loss", 2.0),
        ];
        assert_eq!(event, Event::of_values(3.0, 7, values.into()));
        let restored = |shard| Record::Restored {
            seconds: 1.0,
            checkpoint: 2,
            shard,
            steps: 5,
        };
        // In sync mode all shards go back, and the steps with them.
        assert_eq!(
            event_of(&restored(None), 3.0),
            Some(Event::went_back(3.0, 5))
        );
        assert_eq!(event_of(&restored(Some(1)), 3.0), None);
    }

    #[tokio::test]
    async fn a_file_begins_with_its_version_and_another_one_after_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("run");
        let mut file = EventFile::new(place.clone());
        let event = Event::went_back(1.0, 2);
        file.write(Some(event.clone()), true).await;
        assert_eq!(file.lost, 1, "there is no folder yet");
        std::fs::create_dir(&place).unwrap();
        file.write(Some(event.clone()), true).await;
        assert_eq!(file.lost, 0);
        let files: Vec<_> = std::fs::read_dir(&place).unwrap().collect();
        let [Ok(one)] = &files[..] else {
            panic!("{files:?}")
        };
        let content = std::fs::read(one.path()).unwrap();
        assert!(content.ends_with(&event.to_record()));
        let first = content.len() - event.to_record().len();
        assert_eq!(first, Event::version(1.0).to_record().len());
        remove_earlier(&place).unwrap();
        assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0);
    }
}
