//! Compares the memory that servers state with what the model needs.

use shared_proto::blocks::PlacedVariable;
use shared_proto::ids::{Role, Task};
use shared_proto::job::{Job, Mode};
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::wire::Dtype;

use super::Cluster;
use super::members::Member;

impl Cluster {
    /// Returns whether a server has memory for a shard. A server that has not stated its memory is assumed to have
    /// enough.
    pub(super) fn has_room_for(&self, server: Task, shard: usize) -> bool {
        let map = self.durable.map();
        let capacity = self.durable.member(server.id).and_then(|m| m.capacity);
        let (Some(map), Some(capacity)) = (map, capacity) else {
            return true;
        };
        let needed = needed(&self.job, &map.variables, map.block_elements);
        needed.get(shard).is_none_or(|needed| *needed <= capacity)
    }

    /// Returns a live server that holds no shard and has memory for this one.
    pub(super) fn spare_for(&self, shard: usize) -> Option<Task> {
        let mut servers = self.durable.live(Role::Ps).map(|m| m.task);
        servers
            .find(|task| self.durable.shard_of(*task).is_none() && self.has_room_for(*task, shard))
    }
}

/// Refuses a placement in which a shard is too large for its server. `servers[i]` is the server of shard `i`.
///
/// # Errors
/// [`Reason::Oversized`].
pub(super) fn check_capacity(
    job: &Job,
    servers: &[&Member],
    placed: &[PlacedVariable],
    block_elements: usize,
) -> Result<(), Refusal> {
    let needed = needed(job, placed, block_elements);
    for (shard, (server, needed)) in servers.iter().zip(needed).enumerate() {
        let Some(capacity) = server.capacity.filter(|capacity| *capacity < needed) else {
            continue;
        };
        return Err(Refusal::new(
            Reason::Oversized,
            format!(
                "shard {shard} of {} needs {} for weights, optimizer state, their copies and staged gradients, but {} has {}: use more servers (cluster.ps), larger ones (--capacity-mebibytes), or a smaller model",
                servers.len(),
                mebibytes(needed),
                server.task,
                mebibytes(capacity)
            ),
        ));
    }
    Ok(())
}

/// Returns, by shard, the number of bytes that its server needs for weights, slots, copies of weights and, in sync
/// mode, a staged gradient of each worker. Tables do not count.
fn needed(job: &Job, placed: &[PlacedVariable], block_elements: usize) -> Vec<u64> {
    let workers = u64::from(job.cluster.workers.unwrap_or(1));
    let staged = match job.strategy.mode {
        Mode::Sync => workers * Dtype::from(job.strategy.wire).size() as u64,
        Mode::Bounded | Mode::Async => 0,
    };
    let mut needed = Vec::new();
    for variable in placed {
        let (name, kind) = (&variable.spec.name, variable.spec.kind);
        let held = (1 + job.slots_of(name, kind) + job.copies_of(name, kind)) * size_of::<f32>();
        let held = held as u64;
        let staged = match kind.takes_updates() {
            true => staged,
            false => 0,
        };
        let mut left = variable.spec.elements();
        for shard in &variable.shards {
            let elements = left.min(block_elements);
            left -= elements;
            let shard = *shard as usize;
            needed.resize(needed.len().max(shard + 1), 0u64);
            needed[shard] =
                needed[shard].saturating_add((elements as u64).saturating_mul(held + staged));
        }
    }
    needed
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
