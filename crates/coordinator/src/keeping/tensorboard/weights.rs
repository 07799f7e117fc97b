//! Histograms of the weights in a checkpoint.

use std::collections::BTreeMap;

use checkpoint::{CheckpointError, FileEntry, Manifest, SavedBlock, Store};
use daemon::Offload;
use shared_proto::payload;

use super::format::{Event, Value};
use super::histogram::Histogram;

/// The number of bytes up to which all dense files of a checkpoint are read. Of a larger checkpoint, only every second
/// file is read, or every third, and so on.
const MOST_BYTES: u64 = 256 << 20;

/// Reads a checkpoint, and returns the histograms of its dense variables as a record.
///
/// # Errors
/// If the checkpoint cannot be read, for example because it was deleted meanwhile.
pub(super) async fn histograms(store: &Store, number: u64) -> Result<Event, CheckpointError> {
    let manifest = store.manifest(number).await?;
    let mut variables = BTreeMap::<u32, Histogram>::new();
    for file in sample(&manifest) {
        let blocks = store.read_file(&manifest, file).await?;
        let count = move || {
            for block in &blocks {
                add(&mut variables, block);
            }
            variables
        };
        variables = Offload::Threads.run(count).await;
    }
    let names = |number: u32| manifest.variables.get(number as usize);
    let values = variables.iter().filter_map(|(number, histogram)| {
        let tag = format!("weights/{}", names(*number)?.name);
        Some(Value::histogram(tag, histogram.to_proto()?))
    });
    let step = manifest.steps;
    Ok(Event::of_values(super::wall_time(), step, values.collect()))
}

/// Returns the files with blocks of dense variables, or only every n-th of them if they are larger than `MOST_BYTES`
/// together.
fn sample(manifest: &Manifest) -> impl Iterator<Item = &FileEntry> {
    let dense = |file: &&FileEntry| {
        let mut blocks = file.blocks.iter();
        blocks.any(|range| !manifest.is_table(range.variable))
    };
    let bytes: u64 = manifest.files.iter().filter(dense).map(|f| f.bytes).sum();
    let every = bytes.div_ceil(MOST_BYTES).max(1);
    manifest
        .files
        .iter()
        .filter(dense)
        .step_by(every.try_into().unwrap_or(usize::MAX))
}

fn add(variables: &mut BTreeMap<u32, Histogram>, block: &SavedBlock) {
    if let Some(weights) = block.values.weights() {
        let histogram = variables.entry(block.id.variable).or_default();
        histogram.add(payload::elements(weights).iter().map(|number| number.get()));
    }
}
