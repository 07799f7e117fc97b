//! GPUs that add up vectors among themselves, as with NVIDIA's NCCL. If the network between them fails, their sums fail. If a member dies before a
//! sum is done, the sums of some others fail, and those of the rest do not end until they are cancelled.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use replica::{GroupError, ReplicaError};
use tokio::time::sleep;

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The longest time that a sum takes.
const SUM: Duration = Duration::from_millis(40);

/// The network between the GPUs of a group fails in this sum, if it does.
const FAILS_IN: u64 = 5;

/// The gradient of a replica, by variable.
type Gradient = Vec<Vec<f32>>;

/// The GPUs of a world.
#[derive(Clone)]
pub(crate) struct Gpus {
    seed: u64,
    groups: Arc<Mutex<Vec<Group>>>,
}

#[derive(Clone, Default)]
struct Group(Arc<Mutex<Members>>);

#[derive(Default)]
struct Members {
    joined: usize,
    /// The gradients of each sum, by rank.
    sums: BTreeMap<u64, BTreeMap<usize, Gradient>>,
    /// True if a member has died or left.
    broken: bool,
    /// True if the network between the members has failed.
    cut: bool,
}

impl Gpus {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            seed,
            groups: Arc::default(),
        }
    }

    pub(crate) fn new_group(&self) -> Bytes {
        let mut groups = self.groups.lock().unwrap();
        groups.push(Group::default());
        Bytes::copy_from_slice(&groups.len().to_le_bytes())
    }

    /// Joins a group. Returns once all have joined.
    pub(crate) async fn join(
        &self,
        id: &[u8],
        rank: usize,
        ranks: usize,
    ) -> Result<Membership, GroupError> {
        let number = usize::from_le_bytes(id.try_into().expect("an id"));
        let group = self.groups.lock().unwrap()[number - 1].clone();
        group.0.lock().unwrap().joined += 1;
        let member = Membership {
            number,
            group,
            rank,
            ranks,
            seed: self.seed,
            sums: 0,
        };
        member.wait(|members| members.joined == ranks).await?;
        Ok(member)
    }
}

/// The membership of a GPU in a group.
pub(crate) struct Membership {
    number: usize,
    group: Group,
    rank: usize,
    ranks: usize,
    seed: u64,
    /// The number of sums.
    sums: u64,
}

impl Membership {
    /// Returns the sum of the gradients of all members.
    pub(crate) async fn add_up(&mut self, own: Gradient) -> Result<Gradient, GroupError> {
        self.sums += 1;
        let (number, ranks) = (self.sums, self.ranks);
        let add = |members: &mut Members| {
            let sum = members.sums.entry(number).or_default();
            sum.insert(self.rank, own);
            members.sums.retain(|sum, _| *sum + 1 >= number);
            members.cut |= number == FAILS_IN && self.network_fails();
        };
        add(&mut self.group.0.lock().unwrap());
        let all = |members: &Members| members.sums[&number].len() == ranks;
        self.wait(all).await?;
        sleep(SUM.mul_f64(self.chance() as f64 / u64::MAX as f64)).await;
        self.wait(all).await?;
        let members = self.group.0.lock().unwrap();
        let mut parts = members.sums[&number].values();
        let mut sum = parts.next().expect("its own").clone();
        for part in parts {
            let pairs = sum.iter_mut().flatten().zip(part.iter().flatten());
            pairs.for_each(|(sum, part)| *sum += part);
        }
        Ok(sum)
    }

    /// Waits for the other members. Fails, or never returns, if the group is broken.
    async fn wait(&self, done: impl Fn(&Members) -> bool) -> Result<(), GroupError> {
        loop {
            let fails = {
                let members = self.group.0.lock().unwrap();
                if !members.broken && !members.cut && done(&members) {
                    return Ok(());
                }
                members.cut || members.broken && self.chance().is_multiple_of(2)
            };
            if fails {
                let failed = "the sum of the GPUs has failed";
                return Err(GroupError::Peer(ReplicaError::Devices(failed.to_owned())));
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns whether the network of the group fails, as that of a quarter of the groups does.
    fn network_fails(&self) -> bool {
        hash((self.seed, self.number)).is_multiple_of(4)
    }

    /// Returns a number that depends on the world, the group, the member and the sum.
    fn chance(&self) -> u64 {
        hash((self.seed, self.number, self.rank, self.sums))
    }
}

fn hash(of: impl Hash) -> u64 {
    let mut hash = DefaultHasher::new();
    of.hash(&mut hash);
    hash.finish()
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.group.0.lock().unwrap().broken = true;
    }
}
