//! The behaviour of every store: in memory, in a folder, in a bucket.

use std::sync::Arc;

use bytes::Bytes;
use object_store::memory::InMemory;

use super::{block, claim, files, manifest, owners, save, save_files};
use crate::error::CheckpointError;
use crate::format::folder_name;
use crate::manifest::{FileEntry, Manifest};
use crate::part::encode;
use crate::store::{Listed, Store};

const FILE: &str = "shard-0-part-0000.safetensors";

pub(super) fn in_memory() -> Store {
    Store::over(Arc::new(InMemory::new()), "memory")
}

/// The suite; each part has a store of its own, made by `new`.
pub(super) async fn suite(mut new: impl FnMut() -> Store) {
    probes(new()).await;
    round_trip(new()).await;
    lists_and_prunes(new()).await;
    falls_back(new()).await;
    refuses_manifests(new()).await;
    finds_damaged_files(new()).await;
    large_files(new()).await;
    names(new()).await;
    owners::suite(new).await;
}

async fn probes(store: Store) {
    assert!(store.owned_by("8").await.is_err());
    assert_eq!(store.list().await.unwrap(), []);
    assert_eq!(store.newest().await.unwrap(), None);
    let first = store.claim(claim("7", 0), None).await.unwrap();
    store.claim(claim("8", 0), Some(&first)).await.unwrap();
    assert_eq!(store.owned_by("8").await.unwrap().run(), "8");
    assert_eq!(store.clone().list().await.unwrap(), []);
}

async fn round_trip(store: Store) {
    let written = save(&store, 3).await;
    let read = store.manifest(3).await.unwrap();
    assert_eq!(read, written);
    assert_eq!(store.newest().await.unwrap(), Some(written));
    for (entry, (name, blocks)) in read.files.iter().zip(files(2, 3)) {
        assert_eq!(entry.name, name);
        assert_eq!(store.read_file(&read, entry).await.unwrap(), blocks);
    }
    store.verify(&read).await.unwrap();
}

async fn lists_and_prunes(store: Store) {
    for number in [4, 2, 10] {
        save(&store, number).await;
    }
    for unfinished in [1, 5, 11] {
        save_files(&store, unfinished).await;
    }
    let listed = |complete: &[u64], unfinished: &[u64]| {
        let listed = |complete: bool| {
            move |number: &u64| Listed {
                number: *number,
                complete,
            }
        };
        let mut all: Vec<Listed> = complete.iter().map(listed(true)).collect();
        all.extend(unfinished.iter().map(listed(false)));
        all.sort_by_key(|l| l.number);
        all
    };
    assert_eq!(
        store.list().await.unwrap(),
        listed(&[2, 4, 10], &[1, 5, 11])
    );
    assert_eq!(store.newest().await.unwrap().unwrap().number, 10);
    assert_eq!(store.before(10).await.unwrap().unwrap().number, 4);
    assert_eq!(store.before(2).await.unwrap(), None);

    assert_eq!(store.prune(2).await.unwrap(), [1, 2, 5]);
    assert_eq!(store.list().await.unwrap(), listed(&[4, 10], &[11]));
    store
        .verify(&store.manifest(4).await.unwrap())
        .await
        .unwrap();
    let gone = store.manifest(2).await.unwrap_err();
    assert!(matches!(gone, CheckpointError::NotFound(_)), "{gone}");

    assert!(store.is_deleted(2).await && !store.is_deleted(4).await);
    assert_eq!(store.prune(0).await.unwrap(), [4]);
    assert!(store.prune(0).await.unwrap().is_empty());
    assert_eq!(store.list().await.unwrap(), listed(&[10], &[11]));
}

async fn falls_back(store: Store) {
    for number in 1..=5 {
        save(&store, number).await;
    }
    overwrite(&store, 5, "manifest.json", |content| {
        content.truncate(content.len() / 2);
    })
    .await;
    overwrite(&store, 4, FILE, |content| content.truncate(10)).await;
    assert_eq!(store.newest().await.unwrap().unwrap().number, 3);
    assert_eq!(store.before(4).await.unwrap().unwrap().number, 3);

    let damage = store.manifest(5).await.unwrap_err();
    let message = store.advise(5, damage).await.to_string();
    let whole = store.checkpoint_location(3);
    let expected = format!("; checkpoint-000000000003 before it is whole: --restore {whole}");
    assert!(message.ends_with(&expected), "{message}");
    assert!(
        message.contains("manifest.json is damaged: truncated"),
        "{message}"
    );
}

async fn refuses_manifests(store: Store) {
    save(&store, 1).await;
    let read = |what: &'static str| {
        let store = store.clone();
        async move {
            let message = store.manifest(1).await.unwrap_err().to_string();
            let place = store.checkpoint_location(1);
            assert!(
                message.starts_with(&format!("{place}/manifest.json ")),
                "{message}"
            );
            assert!(message.contains(what), "{message}");
        }
    };
    overwrite(&store, 1, "manifest.json", |content| content[40] ^= 1).await;
    read("altered").await;
    overwrite(&store, 1, "manifest.json", Vec::clear).await;
    read("truncated: 0 bytes").await;

    let other = manifest(2, 2, 1).to_bytes().unwrap();
    overwrite(&store, 1, "manifest.json", |content| {
        *content = other.to_vec()
    })
    .await;
    read("it is of checkpoint-000000000002").await;

    let newer = resealed(&manifest(1, 2, 1), "\"format\": 5,", "\"format\": 6,");
    overwrite(&store, 1, "manifest.json", |content| *content = newer).await;
    read("was written by a newer release: format 6, this program reads 5").await;
    // An older checkpoint would lose the training of the newer program.
    let newest = store.newest().await.unwrap_err();
    assert!(matches!(newest, CheckpointError::Newer { format: 6, .. }));

    // A manifest is not written before its files.
    let early = store.write_manifest(manifest(6, 2, 1)).await.unwrap_err();
    assert!(early.to_string().ends_with("it is missing"), "{early}");
    let mut partial = manifest(6, 2, 1);
    partial.files.pop();
    assert!(store.write_manifest(partial).await.is_err());
    assert_eq!(store.list().await.unwrap().len(), 1);
}

/// The file of a changed manifest with the right checksum.
pub(super) fn resealed(manifest: &Manifest, from: &str, to: &str) -> Vec<u8> {
    let text = manifest.to_bytes().unwrap();
    let checksum = Manifest::read(&text, "").unwrap().checksum;
    let text = std::str::from_utf8(&text).unwrap();
    assert!(text.contains(from));
    let empty = text.replace(&checksum, "").replacen(from, to, 1);
    let sum = FileEntry::new("x", &Bytes::from(empty.clone()), []).sha256;
    empty
        .replace("\"checksum\": \"\"", &format!("\"checksum\": \"{sum}\""))
        .into_bytes()
}

async fn finds_damaged_files(store: Store) {
    let manifest = save(&store, 1).await;
    let entry = manifest.files[0].clone();
    let original = encode(&files(2, 1)[0].1);
    let place = format!("{}/{FILE}", store.checkpoint_location(1));
    let read = async |content: Bytes| {
        store.write_file(1, FILE, content).await.unwrap();
        let message = store
            .read_file(&manifest, &entry)
            .await
            .unwrap_err()
            .to_string();
        assert!(
            message.starts_with(&format!("{place} is damaged: ")),
            "{message}"
        );
        message
    };
    let length = original.len();
    let message = read(original.slice(..length - 1)).await;
    assert!(message.ends_with(&format!("truncated: {} of {length} bytes", length - 1)));
    assert!(store.check_present(&manifest).await.is_err());
    let message = read([&original[..], b"x"].concat().into()).await;
    assert!(message.contains("altered"), "{message}");
    let mut flipped = original.to_vec();
    flipped[length - 1] ^= 1;
    let message = read(flipped.into()).await;
    assert!(
        message.ends_with("altered: its checksum is another"),
        "{message}"
    );
    let verified = store.verify(&manifest).await.unwrap_err();
    assert_eq!(verified.to_string(), message);
    store.write_file(1, FILE, original).await.unwrap();
    store.verify(&manifest).await.unwrap();

    let mut absent = manifest.clone();
    absent.files[0].name = "other.safetensors".to_owned();
    let error = store
        .read_file(&absent, &absent.files[0])
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("other.safetensors is damaged: it is missing")
    );
}

/// Files that are larger than one request.
async fn large_files(store: Store) {
    let mut content = vec![0u8; 40 << 20];
    for (i, byte) in content.iter_mut().enumerate() {
        *byte = (i >> 10) as u8;
    }
    let content = Bytes::from(content);
    store.write_file(1, FILE, content.clone()).await.unwrap();
    assert!(store.files.read(&folder_name(1), FILE).await.unwrap() == content);
}

async fn names(store: Store) {
    for name in ["../x", "manifest.json", "", "a/b"] {
        let error = store.write_file(1, name, Bytes::new()).await.unwrap_err();
        assert!(matches!(error, CheckpointError::Location { .. }), "{error}");
    }
    assert_eq!(store.list().await.unwrap(), []);
}

/// Changes a file by the store's own means, without its checks.
async fn overwrite(store: &Store, number: u64, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let folder = folder_name(number);
    let mut content = store.files.read(&folder, name).await.unwrap().to_vec();
    change(&mut content);
    store
        .files
        .write(&folder, name, content.into())
        .await
        .unwrap();
}

#[test]
fn in_memory_it_needs_no_threads() {
    // Anything that needs the runtime's threads or clock panics without them.
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let mut suite = std::pin::pin!(suite(in_memory));
    for _ in 0..10_000 {
        if suite.as_mut().poll(&mut context).is_ready() {
            return;
        }
    }
    panic!("it waits for something");
}

#[tokio::test]
async fn in_a_folder() {
    let root = tempfile::tempdir().unwrap();
    let mut number = 0;
    suite(|| {
        number += 1;
        let folder = root
            .path()
            .join(format!("run with space #{number}/checkpoints"));
        let location = folder.to_str().unwrap();
        let store = Store::open(location).unwrap();
        assert_eq!(store.location(), location);
        store
    })
    .await;
    owners::suite_with_time(|| {
        number += 1;
        let folder = root.path().join(number.to_string());
        Store::open(folder.to_str().unwrap()).unwrap()
    })
    .await;
    partial_files(root.path());
}

#[tokio::test]
async fn in_a_folder_by_its_url() {
    let root = tempfile::tempdir().unwrap();
    let mut number = 0;
    suite(|| {
        number += 1;
        let folder = root.path().join(number.to_string());
        let store = Store::open(&format!("file://{}", folder.display())).unwrap();
        assert_eq!(store.location(), folder.to_str().unwrap());
        store
    })
    .await;
    partial_files(root.path());
}

/// Checks that no file is left under a temporary name.
fn partial_files(folder: &std::path::Path) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            partial_files(&path);
        } else {
            assert!(!path.to_string_lossy().contains("partial"), "{path:?}");
        }
    }
}

#[tokio::test]
async fn every_truncation_and_every_altered_byte_of_a_file_is_found() {
    let store = in_memory();
    let manifest = save(&store, 1).await;
    let entry = &manifest.files[1];
    let original = encode(&files(2, 1)[1].1);
    for end in 0..original.len() {
        let cut = original.slice(..end);
        store.write_file(1, &entry.name, cut).await.unwrap();
        let error = store.read_file(&manifest, entry).await.unwrap_err();
        let expected = format!("truncated: {end} of {} bytes", original.len());
        assert!(error.to_string().ends_with(&expected), "{error}");
    }
    for place in 0..original.len() {
        let mut altered = original.to_vec();
        altered[place] ^= 0x40;
        store
            .write_file(1, &entry.name, altered.into())
            .await
            .unwrap();
        let error = store.read_file(&manifest, entry).await.unwrap_err();
        assert!(error.is_damaged(), "{place}: {error}");
    }
}

#[tokio::test]
async fn a_files_blocks_are_those_that_the_manifest_names() {
    let store = in_memory();
    let manifest = save(&store, 1).await;
    let read = async |blocks: &[crate::SavedBlock]| {
        let content = encode(blocks);
        let mut entry = FileEntry::new(FILE, &content, []);
        entry.blocks = manifest.files[0].blocks.clone();
        store.write_file(1, FILE, content).await.unwrap();
        let error = store.read_file(&manifest, &entry).await.unwrap_err();
        error.to_string()
    };
    let good = files(2, 1).remove(0).1;
    let message = read(&good[1..]).await;
    assert!(
        message.ends_with("its blocks are not those that the manifest names"),
        "{message}"
    );
    let mut short = good.clone();
    short[2] = block(1, 2, 1, 2, 1);
    let message = read(&short).await;
    assert!(message.ends_with("block 2 of variable 1 has 4 bytes of weights; 8 were expected"));
    let without: Vec<_> = files(0, 1).remove(0).1;
    let message = read(&without).await;
    assert!(message.ends_with("block 0 of variable 0 has 0 bytes of slots; 24 were expected"));
}
