//! A long-lived cluster: jobs that are submitted to it, one after the other on the same processes.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tests::{Cluster, Daemon, eventually};

use crate::page::status_of;
use crate::program;

mod day;
mod disks;
mod refusals;

/// The sizes of the cluster, for jobs that give none.
const SIZES: &str = "[cluster]\nps = 2\nworkers = 3\n";

/// Data and checkpoints of these jobs are in folders of the tests.
const ANYWHERE: [&str; 2] = ["--allow-location", "/"];

/// Starts a long-lived cluster without a job: a coordinator, two servers and three workers.
fn start(env: &[(&str, &str)]) -> Cluster {
    let mut cluster = Cluster::start_coordinator_with(
        program(),
        SIZES,
        0,
        &["--no-job", ANYWHERE[0], ANYWHERE[1]],
    );
    for name in ["ps-0", "ps-1"] {
        let server = cluster.member("ps-server", name, &[], &[]);
        cluster.ps.push(server);
    }
    for name in ["a", "b", "c"] {
        let worker = cluster.member("worker", name, &ANYWHERE, env);
        cluster.workers.push(worker);
    }
    cluster
}

/// Returns a job of digits in sync mode, whose result does not depend on timing.
fn digits(name: &str, model: &str, epochs: u32) -> String {
    format!(
        "name = \"{name}\"\nepochs = {epochs}\n[model]\nname = \"{model}\"\n[strategy]\nmode = \"sync\"\n{SIZES}"
    )
}

/// Returns a job of a table of points in sync mode.
fn points(data: &Path) -> String {
    format!(
        "name = \"points\"\nepochs = 3\n[data]\nkind = \"csv\"\ndir = \"{}\"\nlabel = \"colour\"\n[model]\nname = \"softmax\"\n[strategy]\nmode = \"sync\"\n{SIZES}",
        data.display()
    )
}

/// Writes a table of 400 points.
fn points_data() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut text = "x,y,colour\n".to_owned();
    for i in 0..400 {
        let colour = if i % 20 > i / 20 { "red" } else { "blue" };
        text += &format!("{},{},{colour}\n", i % 20, i / 20);
    }
    std::fs::write(dir.path().join("train.csv"), text).unwrap();
    dir
}

/// Submits a job. Returns its id.
fn submit(cluster: &Cluster, job: &str) -> u64 {
    submit_to(&cluster.coordinator.address(), job, &[])["id"]
        .as_u64()
        .unwrap()
}

/// Submits a job with more arguments, and returns what `--json` prints.
fn submit_to(coordinator: &str, job: &str, more: &[&str]) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("job.toml");
    std::fs::write(&file, job).unwrap();
    let mut arguments = vec!["submit", file.to_str().unwrap(), "--json"];
    arguments.extend(["--coordinator", coordinator]);
    arguments.extend(more);
    let output = program().run(&arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"))
}

/// Runs a command about jobs, and returns its output.
fn about_jobs(cluster: &Cluster, arguments: &[&str]) -> std::process::Output {
    let address = cluster.coordinator.address();
    let mut all = arguments.to_vec();
    all.extend(["--coordinator", &address]);
    program().run(&all)
}

/// Returns all jobs, in the order of their ids.
fn jobs(cluster: &Cluster) -> Vec<Value> {
    let output = about_jobs(cluster, &["jobs", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap();
    listed["jobs"].as_array().unwrap().clone()
}

fn job(cluster: &Cluster, id: u64) -> Value {
    let all = jobs(cluster);
    let of_id = all.into_iter().find(|job| job["id"] == id);
    of_id.unwrap_or_else(|| panic!("there is no job {id}"))
}

/// Waits until a job has ended, and returns it.
fn ended(cluster: &Cluster, id: u64) -> Value {
    let mut last = Value::Null;
    eventually(|| {
        last = job(cluster, id);
        ["done", "failed", "cancelled"].contains(&last["state"].as_str().unwrap())
    });
    last
}

/// Returns the digest of the model that a cluster of its own trains.
fn alone(job: &str) -> String {
    let mut cluster = Cluster::start(program(), job, 2);
    for _ in 0..3 {
        cluster.add_worker(&[]);
    }
    let (summary, _dir) = cluster.finish();
    let digest = summary["model_sha256"].as_str().unwrap().to_owned();
    assert!(!digest.is_empty(), "{summary}");
    digest
}

/// Checks that a job is done with the same weights as on a cluster of its own, and that these are in its folder.
fn assert_same(done: &Value, as_alone: &str) {
    assert_eq!(done["state"], "done", "{done}");
    assert_eq!(done["model_sha256"], as_alone, "{done}");
    let folder = Path::new(done["run_dir"].as_str().unwrap());
    for file in [
        "model.safetensors",
        "summary.json",
        "job.toml",
        "checkpoints",
    ] {
        assert!(folder.join(file).exists(), "{file} of {done}");
    }
}

/// Returns the number of open files of a process, and its resident memory in MiB.
fn held(process: u32) -> (usize, u64) {
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes: u64 = resident
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    (files.count(), kibibytes >> 10)
}

fn everybody(cluster: &Cluster) -> Vec<&Daemon> {
    let members = cluster.ps.iter().chain(&cluster.workers);
    members.chain([&cluster.coordinator]).collect()
}

/// Ends a cluster that waits for jobs, in good order.
fn end(mut cluster: Cluster) {
    let members = cluster.ps.iter_mut().chain(&mut cluster.workers);
    for daemon in members.chain([&mut cluster.coordinator]) {
        daemon.terminate();
        assert!(daemon.wait().success(), "{}", daemon.log());
    }
}

#[test]
fn jobs_follow_each_other_on_the_same_processes() {
    let data = points_data();
    let mirrored = digits("mirrored", "softmax", 4)
        .replace("mode = \"sync\"", "name = \"multi-worker-mirrored\"")
        .replace("ps = 2\n", "");
    let (plain, table) = (digits("plain", "mlp", 3), points(data.path()));
    let as_alone = [&plain, &table, &mirrored].map(|job| alone(job));

    let cluster = start(&[]);
    let first = ended(&cluster, submit(&cluster, &plain));
    assert_same(&first, &as_alone[0]);
    assert_same(&ended(&cluster, submit(&cluster, &mirrored)), &as_alone[2]);
    // The processes have done a job of each kind. From here on they must not grow.
    let before: Vec<_> = everybody(&cluster)
        .iter()
        .map(|d| held(d.process()))
        .collect();

    let too_fast =
        digits("too-fast", "mlp", 3) + "[optimizer]\nname = \"sgd\"\nlearning_rate = 1e38\n";
    let no_model = digits("no-model", "no-such-model", 3).replace(
        "workers = 3",
        "workers = 3\nlease_seconds = 2.0\nstall_seconds = 3.0",
    );
    let endless = digits("endless", "mlp", 1_000_000);
    let submitted = [
        &table, &too_fast, &no_model, &endless, &plain, &mirrored, &plain,
    ];
    let ids: Vec<u64> = submitted.iter().map(|job| submit(&cluster, job)).collect();
    let [
        of_table,
        of_fast,
        of_model,
        of_endless,
        of_queued,
        of_mirrored,
        of_last,
    ] = ids[..]
    else {
        panic!("{ids:?}");
    };
    assert!(ids.is_sorted());
    // One that waits is not begun at all.
    assert!(
        about_jobs(&cluster, &["cancel", &of_queued.to_string()])
            .status
            .success()
    );
    assert_eq!(job(&cluster, of_queued)["state"], "cancelled");
    // One that runs ends early, with a model.
    eventually(|| job(&cluster, of_endless)["samples"].as_u64() > Some(2000));
    // A call that is made again, as when its answer is lost, changes nothing.
    for _ in 0..2 {
        assert!(
            about_jobs(&cluster, &["cancel", &of_endless.to_string()])
                .status
                .success()
        );
    }

    assert_same(&ended(&cluster, of_table), &as_alone[1]);
    let fast = ended(&cluster, of_fast);
    assert_eq!(fast["state"], "failed", "{fast}");
    assert!(fast["error"].as_str().unwrap().contains("NaN"), "{fast}");
    let model = ended(&cluster, of_model);
    assert_eq!(model["state"], "failed", "{model}");
    assert!(
        model["error"].as_str().unwrap().contains("no-such-model"),
        "{model}"
    );
    let endless = ended(&cluster, of_endless);
    assert_eq!(endless["state"], "cancelled", "{endless}");
    assert!(
        !endless["model_sha256"].as_str().unwrap().is_empty(),
        "{endless}"
    );
    assert_same(&ended(&cluster, of_mirrored), &as_alone[2]);
    assert_same(&ended(&cluster, of_last), &as_alone[0]);
    let queued = job(&cluster, of_queued);
    assert_eq!(
        (&queued["state"], &queued["began"]),
        (&"cancelled".into(), &Value::Null)
    );

    for (daemon, (files, memory)) in everybody(&cluster).into_iter().zip(before) {
        // The streams of a ring may be open or closed, but none stays for each job.
        eventually(|| held(daemon.process()).0 <= files + 6);
        let now = held(daemon.process()).1;
        assert!(
            now <= memory + 40,
            "{memory} MiB after one job, {now} after all: {}",
            daemon.log()
        );
    }
    end(cluster);
}

#[test]
fn the_queue_outlives_a_coordinator_that_is_killed() {
    let data = points_data();
    let (plain, table) = (digits("plain", "mlp", 40), points(data.path()));
    let as_alone = [&plain, &table].map(|job| alone(job));
    let mut cluster = start(&[]);
    let ids = [&plain, &table, &plain, &table].map(|job| submit(&cluster, job));
    // In the middle of the first job, and then wherever it is.
    eventually(|| job(&cluster, ids[0])["samples"].as_u64() > Some(3000));
    for pause in [0, 400, 900, 1700] {
        std::thread::sleep(Duration::from_millis(pause));
        cluster.coordinator.kill();
        cluster.restart_coordinator_with(&["--no-job"]);
        assert_eq!(jobs(&cluster).len(), 4);
    }
    for (index, id) in ids.into_iter().enumerate() {
        let done = ended(&cluster, id);
        assert_same(&done, &as_alone[index % 2]);
        let folder = Path::new(done["run_dir"].as_str().unwrap());
        let metrics = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
        let began = metrics.matches("\"event\":\"began\"").count();
        assert!(began <= 1, "job {id} was begun {began} times: {metrics}");
    }
    // With an empty queue, it begins nothing again.
    cluster.coordinator.kill();
    cluster.restart_coordinator_with(&["--no-job"]);
    let after = jobs(&cluster);
    assert!(after.iter().all(|job| job["state"] == "done"), "{after:?}");
    // A job that is submitted while the coordinator is away arrives once it is back, and arrives once.
    let address = cluster.coordinator.address();
    cluster.coordinator.kill();
    let waiting = {
        let (address, table) = (address.clone(), table.clone());
        std::thread::spawn(move || submit_to(&address, &table, &["--patience-seconds", "60"]))
    };
    std::thread::sleep(Duration::from_secs(1));
    cluster.restart_coordinator_with(&["--no-job"]);
    let id = waiting.join().unwrap()["id"].as_u64().unwrap();
    assert_eq!(jobs(&cluster).len(), 5);
    assert_same(&ended(&cluster, id), &as_alone[1]);
    end(cluster);
}

/// A cancelled job does not wait until another run's claim to its checkpoints is proven dead.
#[test]
fn a_job_that_is_cancelled_while_it_is_begun_ends_at_once() {
    let mut first = Cluster::start(program(), &digits("first", "softmax", 1_000_000), 2);
    for _ in 0..3 {
        first.add_worker(&[]);
    }
    let location = first.run_dir().join("checkpoints");
    eventually(|| location.exists());

    let cluster = start(&[]);
    let taken = format!(
        "{}[checkpoint]\nlocation = \"{}\"\n",
        digits("taken", "softmax", 1),
        location.display()
    );
    let id = submit(&cluster, &taken);
    eventually(|| job(&cluster, id)["state"] == "running");
    assert!(
        about_jobs(&cluster, &["cancel", &id.to_string()])
            .status
            .success()
    );
    let cancelled = ended(&cluster, id);
    assert_eq!(cancelled["state"], "cancelled", "{cancelled}");
    let error = cancelled["error"].as_str().unwrap();
    assert!(
        error.contains("while the coordinator began it"),
        "{cancelled}"
    );
    let next = submit(&cluster, &digits("next", "softmax", 1));
    assert_eq!(ended(&cluster, next)["state"], "done");
    end(cluster);
}

/// A job that is to end in good order does so although the coordinator is killed: it has a model and a last checkpoint.
#[test]
fn a_job_that_is_cancelled_before_its_coordinator_is_killed_saves_its_model() {
    let mut cluster = start(&[]);
    let id = submit(&cluster, &digits("endless", "mlp", 1_000_000));
    eventually(|| job(&cluster, id)["samples"].as_u64() > Some(2000));
    let cancelled = about_jobs(&cluster, &["cancel", &id.to_string()]);
    assert!(cancelled.status.success());
    cluster.coordinator.kill();
    cluster.restart_coordinator_with(&["--no-job"]);
    let job = ended(&cluster, id);
    assert_eq!(job["state"], "cancelled", "{job}");
    assert!(!job["model_sha256"].as_str().unwrap().is_empty(), "{job}");
    let folder = Path::new(job["run_dir"].as_str().unwrap());
    assert!(folder.join("model.safetensors").exists(), "{job}");
    end(cluster);
}

#[test]
fn the_page_shows_the_job_at_work() {
    let more = ["--no-job", "--http", "127.0.0.1:0"];
    let mut cluster = Cluster::start_coordinator_with(program(), SIZES, 0, &more);
    let address = cluster.coordinator.ready.page.unwrap();
    let shown = || status_of(address);
    assert_eq!(shown()["status"], Value::Null, "there is no job yet");
    for name in ["ps-0", "ps-1"] {
        let server = cluster.member("ps-server", name, &[], &[]);
        cluster.ps.push(server);
    }
    for name in ["a", "b", "c"] {
        let worker = cluster.member("worker", name, &[], &[]);
        cluster.workers.push(worker);
    }
    for name in ["first", "second"] {
        let id = submit(&cluster, &digits(name, "softmax", 2));
        assert_eq!(ended(&cluster, id)["state"], "done");
        let state = shown();
        assert_eq!(state["status"]["job"], name);
        let evaluations = state["history"]["evaluations"].as_array().unwrap();
        assert_eq!(evaluations.len(), 2, "{state}");
        let folder = format!("{name}-{id}");
        assert!(state["run_dir"].as_str().unwrap().ends_with(&folder));
    }
    end(cluster);
}
