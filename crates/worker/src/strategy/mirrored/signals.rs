//! The signals between rank 0 of a ring and the other members about the step that is open.

use collective::Rank;

use super::open_step::Answer;
use super::ring::{Lost, Ring};

impl Ring {
    /// Sends rank 0 an answer.
    pub(super) async fn answer(&self, answer: Answer) -> Result<(), Lost> {
        self.play(self.group.send_signal(0, answer as u8)).await
    }

    /// Waits for a signal of a rank, and reads it.
    pub(super) async fn signal_of<T>(
        &self,
        rank: Rank,
        read: impl Fn(u8) -> Option<T>,
    ) -> Result<T, Lost> {
        let signal = self.play(self.group.receive_signal(rank)).await?;
        read(signal).ok_or_else(|| {
            let why = format!(
                "it sends the signal {signal}, which is not due; do all workers have the same job?"
            );
            Lost::Member(self.members[rank], why)
        })
    }
}
