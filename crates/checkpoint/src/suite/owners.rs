//! Several runs at one location: in memory, in a folder, in a bucket.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use super::{claim, files, manifest};
use crate::error::CheckpointError;
use crate::manifest::{FileEntry, Manifest};
use crate::part::encode;
use crate::store::{Listed, Store};

/// The tests that need no clock. Each has a store of its own, made by `new`.
pub(super) async fn suite(mut new: impl FnMut() -> Store) {
    claims(new()).await;
    manifests_are_never_replaced(new()).await;
    each_deletes_its_own(new()).await;
}

/// The tests that watch another run for some time. Each has a store of its own, made by `new`.
pub(super) async fn suite_with_time(mut new: impl FnMut() -> Store) {
    a_live_owner_is_found(new()).await;
    of_many_one_claims(new()).await;
}

async fn owner(store: &Store) -> (String, u64) {
    let owner = store.owner().await.unwrap().unwrap();
    (owner.run, owner.term)
}

async fn claims(store: Store) {
    assert_eq!(store.owner().await.unwrap(), None);
    let brief = Duration::from_millis(1);
    assert_eq!(store.watch_owner("a", brief).await.unwrap(), None);
    let a = store.claim(claim("a", 0), None).await.unwrap();
    assert_eq!(owner(&store).await, ("a".to_owned(), 1));

    // Another run looked before the claim was made.
    let late = store.claim(claim("b", 0), None).await.unwrap_err();
    assert!(matches!(late, CheckpointError::Taken { .. }), "{late}");
    let said = late.to_string();
    for part in [
        store.location(),
        "run a of job \"digits\"",
        "2026-09-21 14:13:20 UTC",
        "alpha (127.0.0.1:7070)",
    ] {
        assert!(said.contains(part), "{part:?} is not in {said:?}");
    }
    assert_eq!(store.owner().await.unwrap(), Some(a.clone()));

    // The same run, started again, takes over at once and supersedes its earlier process.
    let before = store.watch_owner("a", Duration::MAX).await.unwrap();
    let again = store.claim(claim("a", 0), before.as_ref()).await.unwrap();
    assert_eq!(again.term, 2);
    assert_ne!(store.owner().await.unwrap(), Some(a.clone()));

    // After a clean end the location is free at once.
    store.release(&again).await.unwrap();
    let before = store.watch_owner("b", Duration::MAX).await.unwrap();
    assert_eq!(before.as_ref(), Some(&again));
    let b = store.claim(claim("b", 0), before.as_ref()).await.unwrap();
    assert_eq!(owner(&store).await, ("b".to_owned(), 3));
    // A claim below another's does not count.
    assert!(!store.try_claim(&a).await.unwrap());
    assert_eq!(store.owner().await.unwrap(), Some(b));
    assert!(store.owned_by("a").await.is_err() && store.owned_by("b").await.is_ok());
}

/// The files of a checkpoint, under the names that a run's parts have.
async fn save_files(store: &Store, number: u64) -> Vec<FileEntry> {
    let mut entries = Vec::new();
    for (shard, (_, blocks)) in (0..).zip(files(2, number)) {
        let (name, content) = (store.part_name(shard, 0), encode(&blocks));
        let ids: Vec<_> = blocks.iter().map(|block| block.id).collect();
        entries.push(FileEntry::new(&name, &content, ids));
        store.write_file(number, &name, content).await.unwrap();
    }
    entries
}

async fn save(store: &Store, number: u64) -> Result<Manifest, CheckpointError> {
    let manifest = Manifest {
        run: store.run().to_owned(),
        files: save_files(store, number).await,
        ..manifest(number, 2, number)
    };
    store.write_manifest(manifest).await
}

async fn manifests_are_never_replaced(store: Store) {
    let (a, b) = (store.clone().of_run("a"), store.of_run("b"));
    let written = save(&a, 7).await.unwrap();
    let refused = save(&b, 7).await.unwrap_err();
    assert!(matches!(refused, CheckpointError::Exists(_)), "{refused}");
    // Neither its manifest nor its parts are touched.
    assert_eq!(a.manifest(7).await.unwrap(), written);
    a.verify(&written).await.unwrap();
    // A retried request does not count as another writer.
    assert_eq!(save(&a, 7).await.unwrap(), written);
}

async fn each_deletes_its_own(store: Store) {
    let (a, b) = (store.clone().of_run("a"), store.clone().of_run("b"));
    // Checkpoints of an earlier release, without a run.
    super::save(&store, 1).await;
    super::save_files(&store, 2).await;
    for number in 3..6 {
        save(&a, number).await.unwrap();
    }
    save_files(&a, 6).await;
    for number in 7..10 {
        save(&b, number).await.unwrap();
    }
    save_files(&b, 10).await;
    assert_eq!(b.prune(1).await.unwrap(), [7, 8]);
    assert!(b.sweep(|number| number < 10).await.unwrap().is_empty());
    assert_eq!(b.sweep(|number| number < 11).await.unwrap(), [10]);
    let left: Vec<u64> = numbers(&store.list().await.unwrap());
    assert_eq!(left, [1, 2, 3, 4, 5, 6, 9]);
    assert_eq!(a.sweep(|_| true).await.unwrap(), [6]);
    assert_eq!(a.prune(2).await.unwrap(), [3]);
    assert_eq!(numbers(&store.list().await.unwrap()), [1, 2, 4, 5, 9]);
    for (run, number) in [(&store, 1), (&a, 4), (&a, 5), (&b, 9)] {
        let manifest = run.manifest(number).await.unwrap();
        run.verify(&manifest).await.unwrap();
    }
    // A server deletes its own parts.
    save_files(&b, 11).await;
    for shard in 0..2 {
        let name = b.part_name(shard, 0);
        b.remove_file(11, &name).await.unwrap();
        b.remove_file(11, &name).await.unwrap();
    }
    assert_eq!(numbers(&store.list().await.unwrap()), [1, 2, 4, 5, 9]);
    let of_a = |manifest: &Manifest| manifest.run == "a";
    assert_eq!(b.before_of(9, &of_a).await.unwrap().unwrap().number, 5);
    assert_eq!(b.before(9).await.unwrap().unwrap().number, 5);
}

fn numbers(listed: &[Listed]) -> Vec<u64> {
    listed.iter().map(|listed| listed.number).collect()
}

async fn a_live_owner_is_found(store: Store) {
    let a = store.claim(claim("a", 0), None).await.unwrap();
    // The owner raises its counter often enough for a slow machine.
    let (other, own) = (store.clone(), a.clone());
    let dead = Arc::new(AtomicBool::new(false));
    let died = Arc::clone(&dead);
    let beating = tokio::spawn(async move {
        for beat in 2.. {
            if died.load(Relaxed) {
                return;
            }
            other.beat(&own, beat).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let lives = store.watch_owner("b", Duration::from_secs(600)).await;
    let lives = lives.unwrap_err();
    assert!(matches!(lives, CheckpointError::Taken { .. }), "{lives}");
    assert_eq!(store.owner().await.unwrap(), Some(a.clone()));
    // An aborted task could leave a write behind that ends later.
    dead.store(true, Relaxed);
    beating.await.unwrap();

    // The owner has died. Only the standing counter shows it.
    let brief = Duration::from_millis(700);
    let before = store.watch_owner("b", brief).await.unwrap();
    let b = store.claim(claim("b", 0), before.as_ref()).await.unwrap();
    assert_eq!(owner(&store).await, ("b".to_owned(), 2));
    // The owner was only paused. Its counter has no effect any more, and it finds the other claim.
    store.beat(&a, 99).await.unwrap();
    assert_eq!(store.owner().await.unwrap(), Some(b));
}

async fn of_many_one_claims(store: Store) {
    let claims = (0..8).map(|run| {
        let store = store.clone();
        tokio::spawn(async move { store.claim(claim(&run.to_string(), 0), None).await })
    });
    let mut won = Vec::new();
    for claimed in claims.collect::<Vec<_>>() {
        match claimed.await.unwrap() {
            Ok(claim) => won.push(claim),
            Err(error) => {
                assert!(matches!(error, CheckpointError::Taken { .. }), "{error}");
            }
        }
    }
    assert_eq!(won.len(), 1, "{won:?}");
    assert_eq!(store.owner().await.unwrap().as_ref(), won.first());
}
