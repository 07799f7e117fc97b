//! Sums over all replicas of a step, during their passes. In each round, each replica sends a vector through
//! [`Others`], and the holder of [`Rounds`] replies with the sum.

use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Error;
use nn::Replicas;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

/// Returns both ends of a replica's rounds.
pub fn rounds() -> (Others, Rounds) {
    // A replica waits for the sum before it asks again.
    let (asking, asked) = mpsc::channel(1);
    let others = Others {
        asking: Mutex::new(Some(asking)),
        made: AtomicU64::new(0),
    };
    (others, Rounds(asked))
}

/// The other replicas of a step. A replica adds up vectors with them while it computes.
#[derive(Debug)]
pub struct Others {
    /// `None` once the replica takes part in no more rounds.
    asking: Mutex<Option<mpsc::Sender<Round>>>,
    made: AtomicU64,
}

/// A vector of a replica for a sum over all replicas.
#[derive(Debug)]
pub struct Round {
    /// The vector.
    pub values: Vec<f64>,
    /// Takes the sum, which has the length of `values`. If this is dropped without a sum, the replica's pass fails.
    pub sum: oneshot::Sender<Vec<f64>>,
}

/// The rounds of a replica, for the code that adds up. If this is dropped, the replica's pass fails in its next round.
#[derive(Debug)]
pub struct Rounds(mpsc::Receiver<Round>);

impl Rounds {
    /// Waits for the next round. Returns `None` once the replica takes part in no more rounds.
    pub async fn next(&mut self) -> Option<Round> {
        self.0.recv().await
    }
}

impl Others {
    /// Tells the other replicas that this one takes part in no more rounds.
    pub(super) fn leave(&self) {
        *self.asking.lock() = None;
    }

    /// Returns a guard that calls [`Self::leave`] when it is dropped, after a panic too.
    pub(super) fn leaving(&self) -> Leaving<'_> {
        Leaving(self)
    }

    /// Returns the number of rounds so far.
    pub(super) fn rounds(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// Begins a round: returns the channel to which the round must be sent, the round, and the receiver of its sum.
    /// Returns `None` after [`Self::leave`].
    fn round(
        &self,
        values: Vec<f64>,
    ) -> Option<(mpsc::Sender<Round>, Round, oneshot::Receiver<Vec<f64>>)> {
        self.made.fetch_add(1, Ordering::Relaxed);
        let (sum, answer) = oneshot::channel();
        let asking = self.asking.lock().clone()?;
        Some((asking, Round { values, sum }, answer))
    }

    /// Returns the sum of a vector and those of the other replicas; `None` if the other replicas are gone.
    pub async fn sum(&self, values: Vec<f64>) -> Option<Vec<f64>> {
        let (asking, round, answer) = self.round(values)?;
        asking.send(round).await.ok()?;
        answer.await.ok()
    }
}

/// Calls [`Others::leave`] when it is dropped.
pub(super) struct Leaving<'a>(&'a Others);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Replicas for Others {
    fn add_up(&self, values: &mut [f64]) -> candle_core::Result<()> {
        let ask = || {
            let (asking, round, answer) = self.round(values.to_vec())?;
            asking.blocking_send(round).ok()?;
            answer.blocking_recv().ok()
        };
        let sum = ask().ok_or_else(gone)?;
        if sum.len() != values.len() {
            return Err(differs(values.len(), sum.len()));
        }
        values.copy_from_slice(&sum);
        Ok(())
    }
}

fn gone() -> Error {
    Error::msg("the other replicas of the step are gone")
}

fn differs(own: usize, other: usize) -> Error {
    Error::msg(format!(
        "replicas add up vectors of {own} and of {other} numbers; each must call the same layers in the same order, whatever its samples are"
    ))
}

/// Adds up the vectors of `replicas`, in the order of the list, round by round, until all have ended their passes. A
/// replica that has ended its pass adds nothing. Each sum is then added to the vectors of `others`, and all replicas
/// get the total.
///
/// # Errors
/// If the vectors of a round have different lengths, or if the others are gone.
pub(super) async fn meet(mut replicas: Vec<Rounds>, others: &Others) -> candle_core::Result<()> {
    loop {
        let (mut sum, mut waiting) = (Vec::new(), Vec::new());
        for replica in &mut replicas {
            let Some(round) = replica.next().await else {
                continue;
            };
            add(&mut sum, round.values)?;
            waiting.push(round.sum);
        }
        if waiting.is_empty() {
            others.leave();
            return Ok(());
        }
        let sum = others.sum(sum).await.ok_or_else(gone)?;
        for replica in waiting {
            // One that is gone does not need the sum.
            let _ = replica.send(sum.clone());
        }
    }
}

/// Adds a vector to a sum, which is empty at first.
fn add(sum: &mut Vec<f64>, values: Vec<f64>) -> candle_core::Result<()> {
    if sum.is_empty() {
        *sum = values;
    } else if sum.len() == values.len() {
        let pairs = sum.iter_mut().zip(values);
        pairs.for_each(|(sum, value)| *sum += value);
    } else {
        return Err(differs(sum.len(), values.len()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Lets replicas make rounds with these vectors, each on a thread of its own.
    async fn meeting(
        vectors: Vec<Vec<Vec<f64>>>,
        others: &Others,
    ) -> (candle_core::Result<()>, Vec<candle_core::Result<Vec<f64>>>) {
        let (mut ends, mut threads) = (Vec::new(), Vec::new());
        for rounds_of_one in vectors {
            let (asking, end) = rounds();
            ends.push(end);
            threads.push(tokio::task::spawn_blocking(move || {
                let asking = Arc::new(asking);
                let mut last = Vec::new();
                for values in rounds_of_one {
                    last = values;
                    asking.add_up(&mut last)?;
                }
                Ok(last)
            }));
        }
        let met = meet(ends, others).await;
        let mut sums = Vec::new();
        for thread in threads {
            sums.push(thread.await.unwrap());
        }
        (met, sums)
    }

    /// Other replicas that add 100 to each number.
    fn hundred() -> Others {
        let (others, mut asked) = rounds();
        tokio::spawn(async move {
            while let Some(Round { mut values, sum }) = asked.next().await {
                values.iter_mut().for_each(|value| *value += 100.0);
                sum.send(values).unwrap();
            }
        });
        others
    }

    #[tokio::test]
    async fn replicas_meet_until_the_last_has_ended() {
        let others = hundred();
        let vectors = vec![
            vec![vec![1.0, 2.0], vec![3.0]],
            vec![vec![10.0, 20.0]],
            vec![],
        ];
        let (met, sums) = meeting(vectors, &others).await;
        met.unwrap();
        let sums: Vec<_> = sums.into_iter().map(Result::unwrap).collect();
        assert_eq!(sums, [vec![103.0], vec![111.0, 122.0], vec![]]);
        assert_eq!(others.rounds(), 2);
        let left = others.sum(vec![1.0]).await;
        assert_eq!(left, None, "they have left the rounds");
    }

    #[tokio::test]
    async fn a_round_ends_if_the_others_are_gone_or_differ() {
        let (others, gone) = rounds();
        drop(gone);
        let one = vec![vec![vec![1.0]], vec![vec![2.0]]];
        let (met, sums) = meeting(one, &others).await;
        assert!(met.unwrap_err().to_string().contains("are gone"));
        assert!(sums.iter().all(Result::is_err));

        let differ = vec![vec![vec![1.0]], vec![vec![2.0, 3.0]]];
        let (met, sums) = meeting(differ, &hundred()).await;
        let error = met.unwrap_err().to_string();
        assert!(error.contains("of 1 and of 2 numbers"), "{error}");
        assert!(sums.iter().all(Result::is_err));
    }
}
