//! Checkpoints of rings, as they lie in the store.

use checkpoint::{Manifest, SavedValues, Store};
use serde_json::Value;
use shared_proto::payload;

use super::values::{SAMPLES, Shape, VISITS, Values};

/// The content of a checkpoint: its values, and the progress of the data that belongs to them.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    pub(crate) number: u64,
    pub(crate) values: Values,
    clock: u64,
    steps: u64,
    samples: u64,
    /// True for each sample of each epoch that is left to train on.
    left: Vec<bool>,
}

impl Saved {
    /// Reads all whole checkpoints of a store, the newest last.
    ///
    /// # Errors
    /// Describes one that cannot be read.
    pub(crate) async fn all(store: &Store, shape: Shape) -> Result<Vec<Self>, String> {
        let newest = store.newest().await.map_err(|error| error.to_string())?;
        let mut all = Vec::new();
        for number in 0..=newest.map_or(0, |manifest| manifest.number) {
            if let Ok(manifest) = store.manifest(number).await {
                all.push(Self::read(store, &manifest, shape).await?);
            }
        }
        Ok(all)
    }

    async fn read(store: &Store, manifest: &Manifest, shape: Shape) -> Result<Self, String> {
        let number = manifest.number;
        let wrong = |what: String| format!("checkpoint {number}: {what}");
        let mut values = Values::initial(shape);
        for file in &manifest.files {
            let blocks = store.read_file(manifest, file).await;
            for block in blocks.map_err(|error| wrong(error.to_string()))? {
                let SavedValues::Dense { weights, slots } = &block.values else {
                    return Err(wrong("it has rows".to_owned()));
                };
                let [weights, slots] = [weights, slots].map(|bytes| {
                    let numbers = payload::elements(bytes).iter();
                    numbers.map(|number| number.get()).collect::<Vec<f32>>()
                });
                let start = block.id.index as usize * manifest.block_elements as usize;
                values.write(block.id.variable as usize, start, &weights, &slots);
                values.updates = block.version.0;
            }
        }
        let left = left(&manifest.progress["ledger"]);
        Ok(Self {
            number,
            values,
            clock: manifest.clock,
            steps: manifest.steps,
            samples: manifest.samples,
            left: left.ok_or_else(|| wrong("its progress cannot be read".to_owned()))?,
        })
    }

    /// Checks that the values are whole, and have the progress that is saved with them.
    ///
    /// # Errors
    /// Describes the difference.
    pub(crate) fn check(&self) -> Result<(), String> {
        let number = self.number;
        let wrong = |what: String| Err(format!("checkpoint {number}: {what}"));
        if let Err(what) = self.values.check(self.clock) {
            return wrong(what);
        }
        let counted = VISITS - self.values.missing();
        if self.steps != self.clock || self.samples != counted as u64 {
            return wrong(format!(
                "{} steps and {} samples are done, the values have {} and {counted}",
                self.steps, self.samples, self.clock
            ));
        }
        let pairs = self.values.samples().zip(&self.left);
        match pairs
            .enumerate()
            .find(|(_, (times, left))| **left == (*times > 0.0))
        {
            Some((sample, (times, _))) => wrong(format!(
                "sample {sample} counts {times} times; according to the progress it should be the other way round"
            )),
            None => Ok(()),
        }
    }
}

/// Returns which samples a ledger at rest has left: those given back, and those from its next position on.
fn left(ledger: &Value) -> Option<Vec<bool>> {
    let place = |epoch: &Value, position: &Value| {
        Some(epoch.as_u64()? as usize * SAMPLES + position.as_u64()? as usize)
    };
    let mut left = vec![false; VISITS];
    let fresh = place(&ledger["epoch"], &ledger["position"])?;
    left.iter_mut().skip(fresh).for_each(|left| *left = true);
    for range in ledger["returned"].as_array()? {
        let [start, end] = [&range[1], &range[2]].map(|position| place(&range[0], position));
        left.get_mut(start?..end?)?.fill(true);
    }
    Some(left)
}
