//! Imports point down, and crates of one floor do not import each other: ARCHITECTURE.md, "Floors".

use std::path::Path;

/// Each crate with those of ours that it may use.
const FLOORS: [(&str, &[&str]); 22] = [
    ("shared-proto", &[]),
    ("fuzz-input", &[]),
    ("storage", &[]),
    ("network", &["shared-proto"]),
    ("checkpoint", &["shared-proto", "storage"]),
    ("daemon", &["shared-proto", "network"]),
    ("optimizer", &["shared-proto"]),
    ("table", &["shared-proto", "optimizer"]),
    ("data", &["shared-proto", "storage"]),
    ("arrow", &["data", "shared-proto"]),
    ("nn", &[]),
    ("gpu", &[]),
    ("ps-client", &["shared-proto", "fuzz-input", "network"]),
    (
        "ps-server",
        &[
            "shared-proto",
            "network",
            "fuzz-input",
            "checkpoint",
            "daemon",
            "optimizer",
            "table",
        ],
    ),
    ("cluster", &["shared-proto", "fuzz-input", "checkpoint"]),
    (
        "coordinator",
        &[
            "shared-proto",
            "network",
            "storage",
            "checkpoint",
            "daemon",
            "cluster",
        ],
    ),
    ("collective", &["shared-proto", "network"]),
    ("model", &["shared-proto", "data", "nn", "table"]),
    (
        "variables",
        &["shared-proto", "optimizer", "gpu", "nn", "model"],
    ),
    (
        "replica",
        &[
            "shared-proto",
            "daemon",
            "data",
            "gpu",
            "nn",
            "table",
            "model",
            "variables",
        ],
    ),
    (
        "worker",
        &[
            "shared-proto",
            "network",
            "collective",
            "optimizer",
            "storage",
            "checkpoint",
            "daemon",
            "data",
            "nn",
            "table",
            "ps-client",
            "model",
            "variables",
            "replica",
        ],
    ),
    (
        "flambeau",
        &[
            "shared-proto",
            "network",
            "collective",
            "checkpoint",
            "daemon",
            "optimizer",
            "ps-client",
            "ps-server",
            "coordinator",
            "nn",
            "model",
            "variables",
            "replica",
            "worker",
        ],
    ),
];

/// candle computes in the crates of the worker, with the layers of `nn`. `flambeau` passes it on to models of users.
const MAY_USE_CANDLE: [&str; 6] = ["nn", "model", "variables", "replica", "worker", "flambeau"];

#[test]
fn imports_point_down() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut found: Vec<String> = std::fs::read_dir(&crates)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort_unstable();
    let mut known: Vec<&str> = FLOORS.iter().map(|(name, _)| *name).collect();
    known.sort_unstable();
    assert_eq!(
        found, known,
        "a crate without a floor, or a floor without its crate"
    );
    for (name, allowed) in FLOORS {
        let manifest = std::fs::read_to_string(crates.join(name).join("Cargo.toml")).unwrap();
        let manifest: toml::Table = toml::from_str(&manifest).unwrap();
        for used in manifest["dependencies"].as_table().unwrap().keys() {
            let ours = known.contains(&used.as_str());
            assert!(
                !ours || allowed.contains(&used.as_str()),
                "{name} must not use {used}"
            );
            let candle = used.starts_with("candle");
            assert!(
                !candle || MAY_USE_CANDLE.contains(&name),
                "{name} must not use {used}"
            );
        }
    }
}

#[test]
fn the_jobs_that_ship_are_valid() {
    for folder in ["deploy/jobs", "examples/jobs"] {
        let jobs = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(folder);
        let mut read = 0;
        for entry in std::fs::read_dir(jobs).unwrap() {
            let path = entry.unwrap().path();
            if path.extension() != Some("toml".as_ref()) {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let job = shared_proto::job::Job::from_toml(&text);
            assert!(job.is_ok(), "{}: {job:?}", path.display());
            read += 1;
        }
        assert!(read > 0, "{folder}");
    }
}
