//! A whole state is replaced by an older copy, no checkpoint has been written since, and the servers live. They have followed what the
//! copy lacks.

use tests::{Cluster, eventually};

use super::{contents, put_back};
use crate::program;

#[test]
fn living_servers_tell_that_a_state_is_an_older_copy() {
    for mode in ["sync", "async"] {
        let job = format!(
            r#"
epochs = 100000
[model]
name = "odd"
[strategy]
mode = "{mode}"
[cluster]
ps = 2
workers = 1
lease_seconds = 10.0
[checkpoint]
every_steps = 1000000
"#
        );
        let mut cluster = Cluster::start(program(), &job, 2);
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "2")]);
        let steps = |cluster: &Cluster| cluster.status()["steps"].as_u64().unwrap_or(0);
        eventually(|| steps(&cluster) > 30);
        let run = cluster.run_dir();
        let files = ["", ".0", ".1"].map(|end| run.join(format!("coordinator.state{end}")));
        let older = contents(&files);
        // Another worker joins, so the servers follow another view.
        cluster.add_worker(&[("TEST_STEP_MILLISECONDS", "2")]);
        eventually(|| cluster.status()["tasks"].as_array().unwrap().len() == 4);
        let before = steps(&cluster);
        eventually(|| steps(&cluster) > before + 500);
        cluster.coordinator.kill();
        put_back(&older);
        cluster.restart_coordinator();
        let status = cluster.coordinator.wait();
        let said = cluster.coordinator.log();
        assert!(!status.success(), "{mode}: {said}");
        assert!(
            said.contains("an older copy of its state"),
            "{mode}: {said}"
        );
    }
}
