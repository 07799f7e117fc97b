//! The clusters of this machine, which `flambeau status` finds without an address.

use std::time::Duration;

use comfy_table::{Table, presets};
use daemon::clusters::{self, RunningCluster};
use daemon::membership::Coordinator;
use network::security::Security;
use serde_json::{Value, json};
use shared_proto::wire;

use super::{fetch, harmless, phase};
use crate::error::CommandError;

/// The address of the coordinator that is called if none is registered. A coordinator in a container is not registered.
pub(super) const USUAL: &str = "127.0.0.1:7070";

/// The longest wait for each of several coordinators.
const PATIENCE: Duration = Duration::from_secs(1);

/// Returns the registered clusters of this user.
pub(super) fn find() -> Result<Vec<RunningCluster>, CommandError> {
    let folder = clusters::folder();
    clusters::find(&folder).map_err(CommandError::file(folder))
}

/// Returns the address of the coordinator of this user's only cluster, or the usual address if no cluster is
/// registered.
pub(crate) fn coordinator() -> Result<String, CommandError> {
    match find()?.as_slice() {
        [] => Ok(USUAL.to_owned()),
        [cluster] => Ok(cluster.reachable_at().to_string()),
        several => {
            let addresses = several
                .iter()
                .map(|cluster| cluster.reachable_at().to_string());
            let addresses: Vec<String> = addresses.collect();
            Err(CommandError::SeveralClusters(addresses.join(", ")))
        }
    }
}

/// Returns the error if no cluster is registered and the usual coordinator does not answer either.
pub(super) fn none_found() -> CommandError {
    CommandError::NoCluster {
        folder: clusters::folder(),
        usual: USUAL,
    }
}

/// A cluster, and its status or the reason why there is none.
pub(super) struct Found {
    cluster: RunningCluster,
    status: Result<wire::Status, String>,
}

/// Asks each cluster for its status.
pub(super) async fn ask_all(clusters: Vec<RunningCluster>, security: &Security) -> Vec<Found> {
    let mut found = Vec::new();
    for cluster in clusters {
        let status = ask(&cluster, security).await;
        found.push(Found {
            status: status.map_err(|error| error.to_string()),
            cluster,
        });
    }
    found
}

async fn ask(cluster: &RunningCluster, security: &Security) -> Result<wire::Status, CommandError> {
    let address = cluster.reachable_at().to_string();
    fetch(&Coordinator::at(&address, PATIENCE, security.clone())?).await
}

/// Describes the place of a cluster on one line.
pub(super) fn place(cluster: &RunningCluster) -> String {
    let page = cluster.page.as_ref();
    let page = page.map_or(String::new(), |page| format!(", page {}", harmless(page)));
    format!(
        "coordinator {} (process {}), run directory {}{page}\n",
        cluster.reachable_at(),
        cluster.process,
        harmless(&cluster.run_dir.display().to_string()),
    )
}

/// Returns several clusters as one JSON object.
pub(super) fn json(found: &[Found]) -> Value {
    let one = |found: &Found| {
        let (cluster, status) = (&found.cluster, found.status.as_ref());
        json!({
            "coordinator": cluster.reachable_at(),
            "process": cluster.process,
            "run_dir": cluster.run_dir,
            "page": cluster.page,
            "seconds": cluster.age(),
            "encrypted": cluster.encrypted,
            "token": cluster.token,
            "job": status.ok().map(|status| &status.job),
            "phase": status.ok().map(phase),
            "samples": status.ok().map(|status| status.samples),
            "total_samples": status.ok().map(|status| status.total_samples),
            "error": status.err(),
        })
    };
    json!({ "clusters": found.iter().map(one).collect::<Vec<_>>() })
}

/// Returns several clusters as a table, and how to see one of them.
pub(super) fn table(found: &[Found]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "coordinator",
        "job",
        "phase",
        "done",
        "since",
        "run directory",
    ]);
    let mut reasons = String::new();
    for Found { cluster, status } in found {
        let address = cluster.reachable_at().to_string();
        let status = status.as_ref();
        if let Err(error) = status {
            reasons += &format!("{address}: {}\n", harmless(error));
        }
        let status = status.ok();
        table.add_row([
            address,
            status.map_or("?".into(), |status| harmless(&status.job).into_owned()),
            status.map_or("?", phase).to_owned(),
            status.map_or(String::new(), done),
            format!("{} s", cluster.age()),
            harmless(&cluster.run_dir.display().to_string()).into_owned(),
        ]);
    }
    format!(
        "{}\n{reasons}several clusters run here; choose one with --coordinator\n",
        table.trim_fmt()
    )
}

fn done(status: &wire::Status) -> String {
    let share = status.samples as f64 / status.total_samples.max(1) as f64;
    format!("{:.0} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(port: u16, status: Result<wire::Status, String>) -> Found {
        let cluster = RunningCluster {
            coordinator: ([0, 0, 0, 0], port).into(),
            run_dir: format!("/runs/{port}").into(),
            page: None,
            encrypted: false,
            token: status.is_err(),
            process: 1,
            since: clusters::now(),
        };
        Found { cluster, status }
    }

    #[test]
    fn several_clusters_are_listed_and_those_without_an_answer_say_why() {
        let training = wire::Status {
            job: "digits".to_owned(),
            samples: 50,
            total_samples: 200,
            ..wire::Status::default()
        };
        let found = [
            found(1, Ok(training)),
            found(2, Err("the job's token is missing".to_owned())),
        ];
        let text = table(&found);
        let row = |start: &str| text.lines().find(|line| line.contains(start)).unwrap();
        let first = row("127.0.0.1:1 ");
        assert!(
            first.contains("digits") && first.contains("25 %"),
            "{first}"
        );
        assert!(row("127.0.0.1:2 ").contains('?'), "{text}");
        assert!(
            text.contains("127.0.0.1:2: the job's token is missing"),
            "{text}"
        );
        let json = json(&found);
        assert_eq!(json["clusters"][0]["job"], "digits");
        assert!(json["clusters"][1]["job"].is_null());
        assert_eq!(json["clusters"][1]["error"], "the job's token is missing");
    }
}
