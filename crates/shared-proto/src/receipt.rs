//! Receipts of sync mode. A receipt proves to the coordinator that a shard holds all of a worker's gradient for
//! a step, without a call from each server for each worker and step.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::ids::{Clock, Task};

/// Length of a receipt in bytes.
const LENGTH: usize = 16;

/// The secret key that the coordinator shares with the servers of a job, and not with workers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ReceiptKey(pub [u8; 32]);

impl std::fmt::Debug for ReceiptKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReceiptKey")
    }
}

impl ReceiptKey {
    /// Reads a key from the wire; `None` if it is not 32 bytes long.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Returns the receipt for a worker's whole gradient on a shard, of the step at `clock`: the first 16 bytes of
    /// HMAC-SHA256 (RFC 2104) over shard, role, index, generation and clock.
    pub fn receipt(&self, shard: u32, task: Task, clock: Clock) -> [u8; LENGTH] {
        let mac = self.prepare().mac(shard, task, clock);
        let mac = mac.finalize().into_bytes();
        let mut receipt = [0; LENGTH];
        receipt.copy_from_slice(&mac[..LENGTH]);
        receipt
    }

    /// Prepares the key: does the part of the work that is the same for all receipts.
    pub fn prepare(&self) -> PreparedKey {
        // A key is filled up with zeros to a block of the hash (RFC 2104, section 2).
        let mut block = [0; 64];
        block[..self.0.len()].copy_from_slice(&self.0);
        PreparedKey(Hmac::new(&block.into()))
    }
}

/// A key that verifies many receipts.
pub struct PreparedKey(Hmac<Sha256>);

impl PreparedKey {
    /// Returns whether a receipt is valid, in constant time.
    pub fn verifies(&self, receipt: &[u8], shard: u32, task: Task, clock: Clock) -> bool {
        let mac = self.mac(shard, task, clock);
        receipt.len() == LENGTH && mac.verify_truncated_left(receipt).is_ok()
    }

    fn mac(&self, shard: u32, task: Task, clock: Clock) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(&shard.to_le_bytes());
        mac.update(&(task.id.role as u32).to_le_bytes());
        mac.update(&task.id.index.to_le_bytes());
        mac.update(&task.generation.0.to_le_bytes());
        mac.update(&clock.0.to_le_bytes());
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Generation, TaskId};

    #[test]
    fn a_receipt_is_of_one_shard_worker_life_and_step() {
        let key = ReceiptKey([7; 32]);
        let task = |index, generation| Task {
            id: TaskId::worker(index),
            generation: Generation(generation),
        };
        let receipt = key.receipt(1, task(2, 3), Clock(4));
        assert!(key.prepare().verifies(&receipt, 1, task(2, 3), Clock(4)));
        assert!(!key.prepare().verifies(&receipt, 0, task(2, 3), Clock(4)));
        assert!(!key.prepare().verifies(&receipt, 1, task(1, 3), Clock(4)));
        assert!(!key.prepare().verifies(&receipt, 1, task(2, 2), Clock(4)));
        assert!(!key.prepare().verifies(&receipt, 1, task(2, 3), Clock(5)));
        assert!(
            !key.prepare()
                .verifies(&receipt[..8], 1, task(2, 3), Clock(4))
        );
        assert!(!key.prepare().verifies(&[], 1, task(2, 3), Clock(4)));
        assert!(
            !ReceiptKey([8; 32])
                .prepare()
                .verifies(&receipt, 1, task(2, 3), Clock(4))
        );
    }
}
