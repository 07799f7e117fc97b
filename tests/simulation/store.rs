//! The store of checkpoints as a host sees it, and its faults: it fails, refuses, is full, is slow, and leaves torn
//! parts behind.
//!
//! It keeps the promises of the stores of `crates/checkpoint`: a manifest or a claim exists whole or not at all, and
//! a file that was written without an error stays. A request that fails may have been done all the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio_stream::{Stream, StreamExt};

type Streamed<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T>> + Send>>;

/// The time after the end of a store's fault in which a process may still end because of it.
const AFTERMATH: Duration = Duration::from_secs(5);

/// The fault of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    /// Two of three requests fail.
    Fails,
    /// All requests are refused.
    Refuses,
    /// Nothing can be written.
    Full,
    /// Requests take up to three seconds, and parts are torn meanwhile.
    Slow,
}

#[derive(Debug)]
struct Inner {
    moods: BTreeMap<String, Mood>,
    /// The simulated time at which each host's mood has ended.
    mended: BTreeMap<String, Duration>,
    /// Hosts that have written or deleted something.
    writers: BTreeSet<String>,
    rng: ChaCha8Rng,
}

/// The store, for all hosts.
#[derive(Clone, Debug)]
pub(crate) struct Stores {
    objects: Arc<InMemory>,
    inner: Arc<Mutex<Inner>>,
}

impl Stores {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            objects: Arc::default(),
            inner: Arc::new(Mutex::new(Inner {
                moods: BTreeMap::new(),
                mended: BTreeMap::new(),
                writers: BTreeSet::new(),
                rng: ChaCha8Rng::seed_from_u64(!seed),
            })),
        }
    }

    /// Returns the store without faults.
    pub(crate) fn plain(&self) -> checkpoint::Store {
        checkpoint::Store::over(self.objects.clone(), "the store")
    }

    /// Returns the store as this host sees it.
    pub(crate) fn seen_from(&self, host: &str) -> checkpoint::Store {
        let seen = Seen {
            stores: self.clone(),
            host: host.to_owned(),
        };
        checkpoint::Store::over(Arc::new(seen), "the store")
    }

    /// Begins a fault of the store for this host.
    pub(crate) fn spoil(&self, host: &str, mood: Mood) {
        self.inner
            .lock()
            .unwrap()
            .moods
            .insert(host.to_owned(), mood);
    }

    /// Ends the fault of the store for this host.
    pub(crate) fn mend(&self, host: &str, now: Duration) {
        let mut inner = self.inner.lock().unwrap();
        inner.moods.remove(host);
        inner.mended.insert(host.to_owned(), now);
    }

    /// Returns whether a process on this host may end now because of the store.
    pub(crate) fn is_to_blame(&self, host: &str, now: Duration) -> bool {
        let inner = self.inner.lock().unwrap();
        let mended = inner.mended.get(host);
        inner.moods.contains_key(host) || mended.is_some_and(|at| *at + AFTERMATH >= now)
    }

    /// Returns whether this host has written or deleted anything.
    pub(crate) fn has_written(&self, host: &str) -> bool {
        self.inner.lock().unwrap().writers.contains(host)
    }
}

/// The fate of a request.
enum Fate {
    Done,
    /// The request fails, and has not been done.
    Lost(Error),
    /// The request fails, but has been done.
    Unanswered(Error),
    /// The request fails, and its write has been done in part.
    Torn(Error),
}

#[derive(Clone, Debug)]
struct Seen {
    stores: Stores,
    host: String,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store as {} sees it", self.host)
    }
}

fn failed(why: &str) -> Error {
    Error::Generic {
        store: "simulated",
        source: why.into(),
    }
}

impl Seen {
    /// Waits as long as the request takes, and returns its fate.
    async fn request(&self, path: &Path, writes: bool) -> Fate {
        let (mood, wait) = {
            let mut inner = self.stores.inner.lock().unwrap();
            let mood = inner.moods.get(&self.host).copied();
            let wait = inner.rng.random_range(20..3000);
            (mood, Duration::from_millis(wait))
        };
        if mood == Some(Mood::Slow) {
            tokio::time::sleep(wait).await;
        }
        let mut inner = self.stores.inner.lock().unwrap();
        if writes {
            inner.writers.insert(self.host.clone());
        }
        match mood {
            Some(Mood::Refuses) => Fate::Lost(Error::PermissionDenied {
                path: path.to_string(),
                source: "the store refuses".into(),
            }),
            Some(Mood::Full) if writes => Fate::Lost(failed("StorageFull")),
            Some(Mood::Fails) => match inner.rng.random_range(0..12) {
                0..4 => Fate::Done,
                4..6 if writes => Fate::Unanswered(failed("the connection broke")),
                6..8 if writes && is_part(path) => Fate::Torn(failed("the connection broke")),
                _ => Fate::Lost(failed("the store does not answer")),
            },
            _ => Fate::Done,
        }
    }

    /// Does the same as [`request`](Self::request) for a request that changes nothing.
    async fn look(&self, path: &Path) -> Result<()> {
        match self.request(path, false).await {
            Fate::Done => Ok(()),
            Fate::Lost(error) | Fate::Unanswered(error) | Fate::Torn(error) => Err(error),
        }
    }

    /// Leaves the beginning of a part, as a crash in the middle of a write does.
    async fn tear(&self, location: &Path, payload: &PutPayload) {
        let content = Bytes::from(payload.clone());
        let kept = {
            let mut inner = self.stores.inner.lock().unwrap();
            inner.rng.random_range(0..=content.len())
        };
        let torn = self
            .stores
            .objects
            .put(location, content.slice(..kept).into());
        torn.await.unwrap();
    }
}

fn is_part(path: &Path) -> bool {
    let name = path.filename();
    name.is_some_and(|name| name.starts_with("shard-"))
}

#[async_trait]
impl ObjectStore for Seen {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let slow = self.stores.inner.lock().unwrap().moods.get(&self.host) == Some(&Mood::Slow);
        if slow && is_part(location) {
            // A process that is killed before it is written to the end leaves it like this.
            self.tear(location, &payload).await;
        }
        let put = |payload| self.stores.objects.put_opts(location, payload, opts);
        match self.request(location, true).await {
            Fate::Done => put(payload).await,
            Fate::Lost(error) => Err(error),
            Fate::Unanswered(error) => {
                // If the store refuses the write because the file exists, that error is returned.
                put(payload).await?;
                Err(error)
            }
            Fate::Torn(error) => {
                self.tear(location, &payload).await;
                Err(error)
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.stores.objects.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.look(location).await?;
        self.stores.objects.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.look(location).await?;
        self.stores.objects.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: Streamed<Path>) -> Streamed<Path> {
        let seen = self.clone();
        let deleted = locations.then(move |location| {
            let seen = seen.clone();
            async move {
                let location = location?;
                let delete = seen.stores.objects.delete(&location);
                match seen.request(&location, true).await {
                    Fate::Done => delete.await?,
                    Fate::Lost(error) => return Err(error),
                    Fate::Unanswered(error) | Fate::Torn(error) => {
                        delete.await?;
                        return Err(error);
                    }
                }
                Ok(location)
            }
        });
        Box::pin(deleted)
    }

    fn list(&self, prefix: Option<&Path>) -> Streamed<ObjectMeta> {
        self.stores.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.look(prefix.unwrap_or(&Path::default())).await?;
        self.stores.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.stores.objects.copy_opts(from, to, options).await
    }
}
