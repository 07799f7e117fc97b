//! Processes that are told to stop, as by SIGTERM. Servers end once a checkpoint has their shard.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokio_util::sync::CancellationToken;

/// The tokens that tell processes to stop, by host.
#[derive(Clone, Debug, Default)]
pub(crate) struct Drains(Arc<Mutex<BTreeMap<String, CancellationToken>>>);

impl Drains {
    /// Returns the token of a process that starts.
    pub(crate) fn begin(&self, host: &str) -> CancellationToken {
        let token = CancellationToken::new();
        let mut all = self.0.lock().unwrap();
        all.insert(host.to_owned(), token.clone());
        token
    }

    /// Tells the process of a host to stop.
    pub(crate) fn stop(&self, host: &str) {
        if let Some(token) = self.0.lock().unwrap().get(host) {
            token.cancel();
        }
    }

    /// Returns whether the process of a host was told to stop.
    pub(crate) fn is_stopping(&self, host: &str) -> bool {
        let all = self.0.lock().unwrap();
        all.get(host).is_some_and(CancellationToken::is_cancelled)
    }
}
