//! The queue of a long-lived cluster.

use std::path::{Path, PathBuf};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tests::{Daemon, eventually, free_address};

use super::{Contents, contents, damage, damages, put_back};
use crate::program;

struct Queue {
    folder: tempfile::TempDir,
    address: String,
}

impl Queue {
    fn run(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn files(&self) -> Vec<PathBuf> {
        ["", ".0", ".1"]
            .map(|end| self.run().join(format!("jobs.state{end}")))
            .to_vec()
    }

    /// Starts the coordinator of a queue; its error if it refuses.
    fn start(&self) -> Result<Daemon, String> {
        self.start_in(&self.run())
    }

    fn start_in(&self, run: &Path) -> Result<Daemon, String> {
        let arguments = ["coordinator", "--no-job", "--listen", &self.address];
        let arguments = [&arguments[..], &["--run-dir", run.to_str().unwrap()]].concat();
        let log = self.folder.path().join("log");
        let coordinator = Daemon::try_start(&program(), log, &arguments, &[])?;
        eventually(|| self.command(&["jobs"]).status.success());
        Ok(coordinator)
    }

    fn command(&self, arguments: &[&str]) -> std::process::Output {
        let more = ["--coordinator", self.address.as_str()];
        program().run(&[arguments, &more].concat())
    }

    /// Returns the id, name and state of each job.
    fn jobs(&self) -> Vec<[Value; 3]> {
        let listed = self.command(&["jobs", "--json"]).stdout;
        let listed: Value = serde_json::from_slice(&listed).unwrap();
        let jobs = listed["jobs"].as_array().unwrap().iter();
        jobs.map(|job| ["id", "name", "state"].map(|field| job[field].clone()))
            .collect()
    }

    fn submit(&self, name: &str) {
        let file = self.folder.path().join("job.toml");
        std::fs::write(&file, format!("name = \"{name}\"\nepochs = 1\n")).unwrap();
        let submitted = self.command(&["submit", file.to_str().unwrap()]);
        assert!(submitted.status.success(), "{submitted:?}");
    }
}

#[test]
fn a_damaged_queue_is_refused_or_whole() {
    let folder = tempfile::tempdir().unwrap();
    let queue = Queue {
        folder,
        address: free_address(),
    };
    let mut coordinator = queue.start().unwrap();
    queue.submit("first");
    let older: Contents = contents(&queue.files());
    queue.submit("second");
    queue.submit("third");
    let cancelled = queue.command(&["cancel", "2"]);
    assert!(cancelled.status.success(), "{cancelled:?}");
    let expected = queue.jobs();
    coordinator.kill();
    let confirmed = contents(&queue.files());

    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut refused = 0;
    for _ in 0..damages(12) {
        put_back(&confirmed);
        let (path, older) = &older[rng.random_range(0..older.len())];
        let what = damage(path, older.as_deref(), &mut rng);
        match queue.start() {
            Ok(mut coordinator) => {
                assert_eq!(queue.jobs(), expected, "{what}");
                coordinator.kill();
            }
            Err(error) => {
                refused += 1;
                assert!(error.contains("jobs.state"), "{what}: {error}");
                assert!(error.contains("--run-dir"), "{what}: {error}");
            }
        }
    }
    assert!(refused > 0);

    // A queue without content is not an empty queue.
    for path in queue.files() {
        std::fs::write(path, "").unwrap();
    }
    let error = queue.start().map(drop).unwrap_err();
    assert!(error.contains("jobs.state"), "{error}");

    // The way on: another folder, to which the jobs are submitted again.
    let _coordinator = queue.start_in(&queue.folder.path().join("next")).unwrap();
    queue.submit("again");
    assert_eq!(queue.jobs()[0][1], "again");
}
