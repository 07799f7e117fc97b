//! Checkpoints of rings, as they lie in the store.

use std::collections::BTreeMap;

use bytes::Bytes;
use checkpoint::{Manifest, NewestFirst, Piece, SavedValues, Store};
use serde_json::Value;
use shared_proto::payload;
use shared_proto::table::{SavedRows, ids_of_bytes};

use super::plan::Plan;
use super::rows;
use super::values::{SAMPLES, VISITS, Values};

/// The content of a checkpoint: its values, and the progress of the data that belongs to them.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    pub(crate) number: u64,
    pub(crate) values: Values,
    /// The rows of a world with servers.
    rows: BTreeMap<u64, f32>,
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
    pub(crate) async fn all(store: &Store, plan: &Plan) -> Result<Vec<Self>, String> {
        let newest = store.newest().await.map_err(|error| error.to_string())?;
        let mut all = Vec::new();
        for number in 0..=newest.map_or(0, |manifest| manifest.number) {
            if let Ok(manifest) = store.manifest(number).await {
                all.push(Self::read(store, &manifest, plan).await?);
            }
        }
        Ok(all)
    }

    async fn read(store: &Store, manifest: &Manifest, plan: &Plan) -> Result<Self, String> {
        let number = manifest.number;
        let wrong = |what: String| format!("checkpoint {number}: {what}");
        let mut values = Values::initial(plan.shape);
        let mut rows = BTreeMap::new();
        let mut reading = NewestFirst::default();
        for file in NewestFirst::files(manifest) {
            let blocks = store.read_file(manifest, file).await;
            for block in blocks.map_err(|error| wrong(error.to_string()))? {
                match reading.take(manifest, file, block).map_err(wrong)? {
                    Some(Piece::Newest(block)) => match &block.values {
                        SavedValues::Dense { weights, slots } => {
                            let start = block.id.index as usize * manifest.block_elements as usize;
                            let [weights, slots] = [weights, slots].map(numbers);
                            values.write(block.id.variable as usize, start, &weights, &slots);
                            values.updates = block.version.0;
                        }
                        SavedValues::Rows(of) => add(&mut rows, of).map_err(wrong)?,
                    },
                    Some(Piece::Older(_, of)) => add(&mut rows, &of).map_err(wrong)?,
                    None => {}
                }
            }
        }
        reading.finish(manifest).map_err(wrong)?;
        let left = left(&manifest.progress["ledger"]);
        Ok(Self {
            number,
            values,
            rows,
            clock: manifest.clock,
            steps: manifest.steps,
            samples: manifest.samples,
            left: left.ok_or_else(|| wrong("its progress cannot be read".to_owned()))?,
        })
    }

    /// Checks that the values are whole, and have the progress that is saved with them. In a world with a backup worker, some samples that are
    /// done may not count.
    ///
    /// # Errors
    /// Describes the difference.
    pub(crate) fn check(&self, plan: &Plan) -> Result<(), String> {
        let number = self.number;
        let wrong = |what: String| Err(format!("checkpoint {number}: {what}"));
        if let Err(what) = self.values.check(self.clock) {
            return wrong(what);
        }
        if plan.servers
            && let Err(what) = rows::check(&self.rows, &self.values)
        {
            return wrong(what);
        }
        let (counted, samples) = (VISITS - self.values.missing(), self.samples as usize);
        let right = counted..=counted + plan.may_lack(self.samples, self.clock);
        if self.steps != self.clock || !right.contains(&samples) {
            return wrong(format!(
                "{} steps and {} samples are done, the values have {} and {counted}",
                self.steps, self.samples, self.clock
            ));
        }
        let pairs = self.values.samples().zip(&self.left);
        let is_wrong = |(times, left): (f32, bool)| match plan.backups {
            true => left && times > 0.0,
            false => left == (times > 0.0),
        };
        match pairs
            .enumerate()
            .find(|(_, (times, left))| is_wrong((*times, **left)))
        {
            Some((sample, (times, _))) => wrong(format!(
                "sample {sample} counts {times} times; according to the progress it should be the other way round"
            )),
            None => Ok(()),
        }
    }
}

fn numbers(bytes: &Bytes) -> Vec<f32> {
    let numbers = payload::elements(bytes).iter();
    numbers.map(|number| number.get()).collect()
}

/// Adds the rows of a file to those of others, which must be of other ids.
fn add(rows: &mut BTreeMap<u64, f32>, of: &SavedRows) -> Result<(), String> {
    for (id, value) in ids_of_bytes(&of.ids).into_iter().zip(numbers(&of.numbers)) {
        if rows.insert(id, value).is_some() {
            return Err(format!("row {id} is there twice"));
        }
    }
    Ok(())
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
