//! Files that are replaced while a process runs: new handshakes and calls use what is in them.
//!
//! Writers replace files one after the other, and some write them in place. So files are used once two looks in a row
//! have found the same bytes, and once these bytes fit together. Until then the old credentials stay in use.

use std::time::Duration;

use metrics::{counter, gauge};

use super::material::{Contents, Material};
use super::{Security, SecurityError, accept};

/// How often the files are read. Whoever renews certificates waits for all processes, some seconds with this; and
/// Kubernetes needs up to a minute anyway until a process sees a new Secret. Reading four small files costs some
/// microseconds.
const LOOK: Duration = Duration::from_secs(2);

/// How reloading ended, as a label.
const DONE: &str = "done";
const FAILED: &str = "failed";

/// What a look at the files has found: the digest of their bytes, or an error.
type Found = Result<[u8; 32], String>;

/// What is known of the files.
#[derive(Default)]
pub(super) struct Known {
    /// The bytes of which the credentials in use were made.
    in_use: [u8; 32],
    /// What the last look has found, if it differs from that.
    last: Option<Found>,
    /// What could not be used, and was reported.
    reported: Option<Found>,
}

impl Known {
    pub(super) fn using(contents: &Contents) -> Self {
        Self {
            in_use: contents.digest(),
            ..Self::default()
        }
    }

    /// Returns whether to use what was found. With `settle`, it must have been found twice in a row.
    fn is_to_be_used(&mut self, found: &Found, settle: bool) -> bool {
        if *found == Ok(self.in_use) {
            (self.last, self.reported) = (None, None);
            return false;
        }
        let seen = self.last.as_ref() == Some(found);
        self.last = Some(found.clone());
        (seen || !settle) && self.reported.as_ref() != Some(found)
    }

    fn use_now(&mut self, found: Found) {
        if let Ok(digest) = found {
            self.in_use = digest;
        }
        (self.last, self.reported) = (None, None);
    }
}

impl Security {
    /// Follows the files until the future is dropped: what is put into them is used for new connections and calls.
    pub async fn follow_files(self) {
        if !self.has_files() {
            return;
        }
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            looks.tick().await;
            self.look_aside(true).await;
        }
    }

    /// Reads the files at once, because a peer has refused what was in them. Returns whether something else is in
    /// them now, and used.
    pub async fn read_again(&self) -> bool {
        self.has_files() && self.look_aside(false).await
    }

    /// Looks at the files on a thread where that may block.
    async fn look_aside(&self, settle: bool) -> bool {
        let security = self.clone();
        let look = tokio::task::spawn_blocking(move || security.look(settle));
        look.await.unwrap_or(false)
    }

    /// Reads the files, and uses what is new. Returns whether something was.
    fn look(&self, settle: bool) -> bool {
        let files = self.files();
        let contents = Contents::read(files);
        let found = contents.as_ref().map(Contents::digest);
        let found = found.map_err(ToString::to_string);
        let mut known = self.known();
        let used = known.is_to_be_used(&found, settle);
        if used {
            match contents.and_then(|contents| Material::of(&contents, files)) {
                Ok(material) => {
                    known.use_now(found);
                    self.replace(material);
                    return true;
                }
                Err(error) if settle => {
                    known.reported = Some(found);
                    report(&error);
                }
                // Asked for at once, they may be half-written.
                Err(_) => known.last = None,
            }
        }
        let unusable = f64::from(u8::from(known.reported.is_some()));
        gauge!("flambeau_credentials_unusable").set(unusable);
        false
    }

    fn replace(&self, material: Material) {
        let (authorities, tokens) = (material.authorities, material.tokens.len());
        let expires = material.validity.map(|validity| validity.ends);
        self.put(material);
        self.show();
        gauge!("flambeau_credentials_unusable").set(0.0);
        count(DONE, 1);
        tracing::info!(
            authorities,
            tokens,
            expires,
            "certificates or tokens were replaced; new connections and calls use the new ones"
        );
    }

    /// Sets the metrics of the credentials.
    fn show(&self) {
        let material = self.material();
        if let Some(validity) = material.validity {
            gauge!("flambeau_certificate_begins_timestamp_seconds").set(validity.begins as f64);
            gauge!("flambeau_certificate_expires_timestamp_seconds").set(validity.ends as f64);
        }
        gauge!("flambeau_trusted_authorities").set(material.authorities as f64);
        gauge!("flambeau_accepted_tokens").set(material.tokens.len() as f64);
    }

    /// Sets the counters of refusals and of reloads to 0, and the metrics of the credentials: a counter that does not
    /// exist yet has no rate.
    pub fn begin_to_count(&self) {
        accept::begin_to_count();
        if self.has_files() {
            count(DONE, 0);
            count(FAILED, 0);
            gauge!("flambeau_credentials_unusable").set(0.0);
            self.show();
        }
    }
}

fn report(error: &SecurityError) {
    count(FAILED, 1);
    tracing::warn!(
        "the files of certificates and tokens were changed and cannot be used: {error}; going on with the old ones until the files are right"
    );
}

fn count(outcome: &'static str, reloads: u64) {
    counter!("flambeau_credential_reloads_total", "outcome" => outcome).increment(reloads);
}

#[cfg(test)]
mod tests;
