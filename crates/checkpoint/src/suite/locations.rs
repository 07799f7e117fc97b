//! The locations that a user may give.

use std::path::Path;

use super::{save, save_files};
use crate::error::CheckpointError;
use crate::location::{load, resolve};
use crate::store::Store;

async fn run(root: &Path) -> (String, Store) {
    let run = root.join("run").to_str().unwrap().to_owned();
    let store = Store::open(&format!("{run}/checkpoints")).unwrap();
    save(&store, 11).await;
    save(&store, 12).await;
    (run, store)
}

#[tokio::test]
async fn a_run_its_checkpoints_or_one_of_them() {
    let root = tempfile::tempdir().unwrap();
    let (run, store) = run(root.path()).await;
    let checkpoints = store.location().to_owned();
    assert_eq!(checkpoints, format!("{run}/checkpoints"));
    for location in [
        run.clone(),
        format!("{run}/"),
        format!("file://{run}"),
        checkpoints.clone(),
        format!("file://{checkpoints}"),
    ] {
        let (found, number) = resolve(&location).await.unwrap();
        assert_eq!((found.location(), number), (checkpoints.as_str(), None));
        let (_, manifest) = load(&location).await.unwrap();
        assert_eq!(manifest.number, 12, "{location}");
    }
    let one = store.checkpoint_location(11);
    for location in [one.clone(), format!("{one}/"), format!("file://{one}")] {
        let (found, number) = resolve(&location).await.unwrap();
        assert_eq!((found.location(), number), (checkpoints.as_str(), Some(11)));
        let (found, manifest) = load(&location).await.unwrap();
        assert_eq!(manifest.number, 11, "{location}");
        found.verify(&manifest).await.unwrap();
    }
}

#[tokio::test]
async fn what_is_not_there_is_said_and_not_made() {
    let root = tempfile::tempdir().unwrap();
    let absent = root.path().join("absent");
    for location in [absent.clone(), absent.join("checkpoint-000000000001")] {
        let error = load(location.to_str().unwrap()).await.unwrap_err();
        let expected = format!(
            "no checkpoints at {}: there is no such folder",
            absent.display()
        );
        assert_eq!(error.to_string(), expected);
    }
    assert!(!absent.exists());

    let empty = root.path().to_str().unwrap();
    let message = load(empty).await.unwrap_err().to_string();
    assert!(
        message.starts_with(&format!("no checkpoints at {empty}: ")),
        "{message}"
    );
    assert!(message.contains("\"checkpoints\"") && message.contains("checkpoint-000000000012"));

    let (run, store) = run(root.path()).await;
    save_files(&store, 13).await;
    let load = async |number| {
        let error = load(&store.checkpoint_location(number)).await.unwrap_err();
        assert!(matches!(error, CheckpointError::NotFound(_)));
        error.to_string()
    };
    let there = "there are checkpoint-000000000011, checkpoint-000000000012";
    assert_eq!(
        load(7).await,
        format!("{run}/checkpoints/checkpoint-000000000007 is not there; {there}")
    );
    assert!(
        load(13)
            .await
            .contains("is unfinished (it has no manifest.json)")
    );
}

#[tokio::test]
async fn for_a_damaged_one_the_one_before_is_offered() {
    let root = tempfile::tempdir().unwrap();
    let (run, store) = run(root.path()).await;
    let (eleven, twelve) = (store.checkpoint_location(11), store.checkpoint_location(12));
    let file = format!("{twelve}/shard-1-part-0000.safetensors");
    std::fs::remove_file(&file).unwrap();
    let message = load(&twelve).await.unwrap_err().to_string();
    assert_eq!(
        message,
        format!(
            "{file} is damaged: it is missing; checkpoint-000000000011 before it is whole: --restore {eleven}"
        )
    );
    assert_eq!(load(&run).await.unwrap().1.number, 11);

    let manifest = format!("{eleven}/manifest.json");
    std::fs::write(&manifest, "{").unwrap();
    let message = load(&eleven).await.unwrap_err().to_string();
    assert!(
        message.starts_with(&format!("{manifest} is damaged: truncated")),
        "{message}"
    );
    assert!(!message.contains("--restore"), "{message}");
    let none = load(&run).await.unwrap_err().to_string();
    assert!(none.starts_with("no whole checkpoint in"), "{none}");
}

#[test]
fn places_that_are_none_are_refused_by_name() {
    let cases = [
        ("", "it is empty"),
        ("gs://bucket/x", "s3://bucket/folder"),
        ("file://host/x", "three slashes"),
        ("file://", "three slashes"),
        ("file:///a%20b", "plain path"),
        ("s3:///x", "bucket is missing"),
        ("s3://bucket/a//b", "empty path segment"),
        ("s3://bucket/../b", "illegal character sequence"),
    ];
    for (location, expected) in cases {
        let error = Store::open(location).unwrap_err();
        assert!(
            matches!(error, CheckpointError::Location { .. }),
            "{error:?}"
        );
        let message = error.to_string();
        let named = message.starts_with(&format!("{location:?} is no place for checkpoints: "));
        assert!(named && message.contains(expected), "{message}");
    }
}

#[test]
fn a_relative_folder_is_made_absolute() {
    let root = tempfile::tempdir_in("target")
        .or_else(|_| tempfile::tempdir_in("."))
        .unwrap();
    let name = root.path().strip_prefix(std::env::current_dir().unwrap());
    let relative = name.unwrap_or(root.path()).join("a");
    let store = Store::open(relative.to_str().unwrap()).unwrap();
    let expected = std::env::current_dir().unwrap().join(&relative);
    assert_eq!(store.location(), expected.to_str().unwrap());
    assert!(expected.is_dir());
}

#[test]
fn a_file_is_no_folder_of_checkpoints() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let location = file.path().to_str().unwrap();
    let message = Store::open(location).unwrap_err().to_string();
    assert!(message.starts_with(location), "{message}");
}
