//! The run directory: `metrics.jsonl` and TensorBoard's event files while the job runs, `summary.json` at its end.

use std::io::{ErrorKind, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use checkpoint::Store;
use cluster::{Record, Summary};
use daemon::Offload;
use metrics::counter;
use parking_lot::Mutex;
use shared_proto::job::{Job, run_dir};
use shared_proto::task;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::history::History;
use super::tensorboard;

/// The longest wait for the last records to be written, among them the histograms of the last checkpoint.
pub(crate) const LAST_RECORDS: Duration = Duration::from_secs(15);

/// The number of lines that may wait to be written. Beyond that, the sender waits.
const QUEUE: usize = 1024;

/// The pause between two writes. A cluster of many workers makes hundreds of records in a second. The records of the
/// last pause are lost if the process is killed.
const PAUSE: Duration = Duration::from_millis(20);

/// The most bytes of earlier records that a resumed run reads for its curves. More would delay its start by seconds.
const MOST_HISTORY: u64 = 256 << 20;

/// Writes records as they come.
pub(crate) struct Recorder {
    dir: PathBuf,
    lines: mpsc::Sender<Record>,
    writer: tokio::task::JoinHandle<()>,
    events: tokio::task::JoinHandle<()>,
    history: Arc<Mutex<History>>,
}

impl Recorder {
    /// Creates the run directory and writes the job to it. If `again`, the run is resumed, and its metrics are kept. The
    /// histograms of weights come from the checkpoints in `store`.
    pub(crate) async fn open(
        dir: &Path,
        job: &Job,
        again: bool,
        store: Option<Store>,
    ) -> std::io::Result<Self> {
        tokio::fs::create_dir_all(dir).await?;
        tokio::fs::write(dir.join(run_dir::JOB), job.to_toml()).await?;
        let mut options = File::options();
        options
            .create(true)
            .write(true)
            .append(again)
            .truncate(!again);
        let path = dir.join(run_dir::METRICS);
        let torn = again && is_torn(&path).await?;
        let mut file = options.open(path).await?;
        if torn {
            file.write_all(b"\n").await?;
        }
        let history = match again {
            true => {
                let dir = dir.to_owned();
                let read = move || History::read_newest(&dir, MOST_HISTORY);
                Offload::Threads.run(read).await?
            }
            false => {
                tensorboard::remove_earlier(dir)?;
                History::default()
            }
        };
        let history = Arc::new(Mutex::new(history));
        let (lines, queue) = mpsc::channel(QUEUE);
        let (events, queue_of_events) = mpsc::channel(QUEUE);
        Ok(Self {
            dir: dir.to_owned(),
            lines,
            writer: task::spawn(write(file, queue, events, Arc::clone(&history))),
            events: task::spawn(tensorboard::write(dir.to_owned(), store, queue_of_events)),
            history,
        })
    }

    /// Returns the history of the job. Each record is added to it.
    pub(crate) fn history(&self) -> Arc<Mutex<History>> {
        Arc::clone(&self.history)
    }

    pub(crate) fn lines(&self) -> mpsc::Sender<Record> {
        self.lines.clone()
    }

    /// Writes the summary.
    pub(crate) async fn summarise(&self, summary: &Summary) -> std::io::Result<()> {
        let text = summary.to_text().map_err(std::io::Error::other)?;
        let unfinished = self.dir.join(format!("{}.unfinished", run_dir::SUMMARY));
        tokio::fs::write(&unfinished, text).await?;
        tokio::fs::rename(unfinished, self.dir.join(run_dir::SUMMARY)).await
    }

    /// Writes the remaining records. All other senders must be dropped before, because the queue ends with its last
    /// sender.
    pub(crate) async fn close(self) {
        drop(self.lines);
        if self.writer.await.is_err() || self.events.await.is_err() {
            tracing::warn!("the last lines of metrics may be missing");
        }
    }
}

/// Returns whether the last line of a file was cut short, because its writer was killed.
async fn is_torn(path: &Path) -> std::io::Result<bool> {
    let mut file = match File::open(path).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        opened => opened?,
    };
    if file.metadata().await?.len() == 0 {
        return Ok(false);
    }
    file.seek(SeekFrom::End(-1)).await?;
    Ok(file.read_u8().await? != b'\n')
}

/// Writes records as lines. One write has all records that have arrived since the last one.
async fn write(
    mut file: File,
    mut queue: mpsc::Receiver<Record>,
    events: mpsc::Sender<Record>,
    history: Arc<Mutex<History>>,
) {
    let mut records = Vec::new();
    // The number of lines that could not be written, since the disk is full. It may have room again later.
    let mut lost = 0;
    while queue.recv_many(&mut records, QUEUE).await > 0 {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        let time = since_1970.ok().map(|time| time.as_millis() as f64 / 1e3);
        {
            let mut history = history.lock();
            records.iter().for_each(|record| history.add(time, record));
        }
        let written = async {
            // The last line may have been cut short.
            let mut text = if lost > 0 { vec![b'\n'] } else { Vec::new() };
            for record in &records {
                text.extend(record.to_line(time).map_err(std::io::Error::other)?);
            }
            file.write_all(&text).await?;
            file.flush().await
        };
        match written.await {
            Ok(()) if lost == 0 => {}
            Ok(()) => {
                tracing::warn!(lost, "metrics can be written again; lines are missing");
                lost = 0;
            }
            Err(error) => {
                if lost == 0 {
                    tracing::error!(%error, "metrics cannot be written at present");
                }
                lost += records.len();
                counter!("flambeau_coordinator_records_lost_total").increment(records.len() as u64);
            }
        }
        let is_full = records.len() == QUEUE;
        for record in records.drain(..) {
            let _ = events.send(record).await;
        }
        if !is_full && !queue.is_closed() {
            tokio::time::sleep(PAUSE).await;
        }
    }
}
