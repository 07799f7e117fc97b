//! Reload of credentials when their files are replaced while a process runs. New handshakes and calls use the new ones.
//!
//! Writers replace files one after the other, and some write them in place. So files are used only if two reads in a
//! row return the same bytes, and if these bytes fit together. Until then the old credentials stay in use.

use std::path::PathBuf;
use std::time::Duration;

use metrics::{counter, gauge};

use super::material::{Contents, Material};
use super::{Security, SecurityError, accept};

/// The time between two reads of the files. With this value, all processes use a renewed certificate within a few
/// seconds. On Kubernetes, a new Secret takes up to a minute to reach a process anyway. A read of four small files
/// takes some microseconds.
const LOOK: Duration = Duration::from_secs(2);

/// The outcomes of a reload, as labels.
const DONE: &str = "done";
const FAILED: &str = "failed";

/// The result of reading the files: the digest of their bytes, or an error.
type Found = Result<[u8; 32], String>;

/// The newest results of reading the files.
#[derive(Default)]
pub(super) struct Known {
    /// The digest of the bytes that are in use.
    in_use: [u8; 32],
    /// The last result, if it differs from `in_use`.
    last: Option<Found>,
    /// The result that was logged because it could not be used.
    reported: Option<Found>,
}

impl Known {
    pub(super) fn using(contents: &Contents) -> Self {
        Self {
            in_use: contents.digest(),
            ..Self::default()
        }
    }

    /// Returns whether to use a result. With `twice`, it must have been found twice in a row.
    fn is_to_be_used(&mut self, found: &Found, twice: bool) -> bool {
        if *found == Ok(self.in_use) {
            (self.last, self.reported) = (None, None);
            return false;
        }
        let seen = self.last.as_ref() == Some(found);
        self.last = Some(found.clone());
        seen || !twice
    }

    fn use_now(&mut self, found: Found) {
        if let Ok(digest) = found {
            self.in_use = digest;
        }
        (self.last, self.reported) = (None, None);
    }
}

impl Security {
    /// Follows the files until the future is dropped. New connections and calls use their newest contents.
    pub async fn follow_files(self) {
        if !self.has_files_to_follow() {
            return;
        }
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            looks.tick().await;
            self.look_aside(true).await;
        }
    }

    /// Reads the files at once, because a peer has refused the credentials. Returns whether the files have new
    /// credentials, which are then in use.
    pub async fn read_again(&self) -> bool {
        self.has_files_to_follow() && self.look_aside(false).await
    }

    /// Returns whether there are files, and all of them can be read more than once. A pipe cannot.
    fn has_files_to_follow(&self) -> bool {
        let files = self.files();
        let paths = [
            &files.authority,
            &files.certificate,
            &files.key,
            &files.token,
        ];
        let mut paths = paths.into_iter().flatten();
        // A file that is missing at present may come back.
        let is_pipe = |path: &PathBuf| path.metadata().is_ok_and(|file| !file.is_file());
        self.has_files() && !paths.any(is_pipe)
    }

    /// Reads the files on a thread where that may block.
    async fn look_aside(&self, twice: bool) -> bool {
        let security = self.clone();
        let look = tokio::task::spawn_blocking(move || security.look(twice));
        look.await.unwrap_or_else(|error| {
            count(FAILED, 1);
            tracing::error!("reading the files of certificates and tokens has failed: {error}");
            false
        })
    }

    /// Reads the files, and uses their contents if they are new and valid. Returns whether they were.
    fn look(&self, twice: bool) -> bool {
        let files = self.files();
        // Locked before the files are read, so that an older look does not undo a newer one.
        let mut known = self.known();
        let contents = Contents::read(files);
        let found = contents.as_ref().map(Contents::digest);
        let found = found.map_err(ToString::to_string);
        let used = known.is_to_be_used(&found, twice);
        if used {
            let old = self.material();
            let usable = |material: Material| {
                material.check_instead_of(&old, files)?;
                Ok(material)
            };
            let material = contents.and_then(|contents| Material::new(&contents, files));
            match material.and_then(usable) {
                Ok(material) => {
                    known.use_now(found);
                    self.replace(material);
                    return true;
                }
                // Tried again at each look: a certificate may become valid later.
                Err(error) if twice => {
                    if known.reported.as_ref() != Some(&found) {
                        report(&error);
                    }
                    known.reported = Some(found);
                }
                // The files may be half-written, because they were read at once.
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

    /// Sets the counters of refusals and of reloads to 0, because a counter that does not exist yet has no rate. Sets
    /// the metrics of the credentials.
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
