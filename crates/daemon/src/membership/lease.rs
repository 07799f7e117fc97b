//! The lease of a member, and the heartbeats that keep it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use shared_proto::ids::Epoch;
use shared_proto::planted;
use shared_proto::view::JobPhase;
use shared_proto::wire;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Coordinator, MembershipError, Sender, Standing};

/// The number of heartbeats in one lease.
const HEARTBEATS_PER_LEASE: u32 = 3;

/// The shortest time limit of a heartbeat, unless the period is shorter: the coordinator may be writing its state to
/// disk.
const SHORTEST_CALL: Duration = Duration::from_millis(500);

/// The pause after a heartbeat without an answer is the usual pause divided by this.
const SOONER: u32 = 8;

/// The margin of a lease is its length divided by this. A process treats the lease as over when less than the margin is
/// left.
const LEASE_MARGIN: u32 = 10;

/// The time for which a process may count on being a member, by its own clock. It ends a little before the coordinator
/// gives the process up, because the lease counts from the time at which a heartbeat was sent, not from its arrival.
#[derive(Clone, Debug)]
pub struct Lease(Option<Arc<Term>>);

#[derive(Debug)]
struct Term {
    began: Instant,
    length: Duration,
    /// The end, in microseconds after `began`.
    ends: AtomicU64,
}

impl Term {
    /// Returns the time from a renewal to the end: the length less a margin, because the clocks of two machines do not run equally fast.
    fn lasts(&self) -> Duration {
        self.length - self.length / LEASE_MARGIN
    }
}

impl Default for Lease {
    /// Returns a lease that never ends.
    fn default() -> Self {
        Self(None)
    }
}

impl Lease {
    /// Returns a lease of this length that a call sent at `sent` has renewed.
    pub fn new(length: Duration, sent: Instant) -> Self {
        let lease = Self(Some(Arc::new(Term {
            began: sent,
            length,
            ends: AtomicU64::new(0),
        })));
        lease.renew(sent);
        lease
    }

    /// Returns whether the coordinator may have given this process up.
    pub fn is_over(&self) -> bool {
        let Some(term) = &self.0 else { return false };
        if planted!(NeverReplaced) {
            return false;
        }
        let ends = Duration::from_micros(term.ends.load(Relaxed));
        Instant::now() >= term.began + ends
    }

    pub(super) fn renew(&self, sent: Instant) {
        if let Some(term) = &self.0 {
            let ends = sent.saturating_duration_since(term.began) + term.lasts();
            term.ends.fetch_max(ends.as_micros() as u64, Relaxed);
        }
    }

    /// Returns the time at which the newest renewing call was sent. Returns `None` for a lease that never ends.
    fn renewed(&self) -> Option<Instant> {
        let term = self.0.as_ref()?;
        let ends = Duration::from_micros(term.ends.load(Relaxed));
        Some(term.began + ends.saturating_sub(term.lasts()))
    }

    /// Returns the length that the coordinator has set; [`Duration::MAX`] for a lease that never ends.
    pub fn length(&self) -> Duration {
        self.0.as_ref().map_or(Duration::MAX, |term| term.length)
    }
}

/// Keeps a lease, until the coordinator refuses or is silent for too long. Sends no heartbeats while other calls renew the lease in time.
pub(super) async fn heartbeats(
    coordinator: Coordinator,
    sender: Sender,
    lease: Lease,
    tell: watch::Sender<Standing>,
) {
    let period = lease.length() / HEARTBEATS_PER_LEASE;
    let within = (period / 2).max(SHORTEST_CALL).min(period);
    let mut last = Instant::now();
    let mut pause = period;
    loop {
        tokio::time::sleep(pause).await;
        if let Some(renewed) = lease.renewed().filter(|renewed| *renewed > last) {
            last = renewed;
            pause = period.saturating_sub(renewed.elapsed());
            if !pause.is_zero() {
                continue;
            }
        }
        pause = period / SOONER;
        let sent = Instant::now();
        let mut client = coordinator.client.clone();
        let beat = client.heartbeat(wire::HeartbeatRequest {
            origin: Some(sender.next_origin_here().into()),
        });
        match tokio::time::timeout(within, beat).await {
            Ok(Ok(reply)) => {
                last = Instant::now();
                pause = period;
                lease.renew(sent);
                let reply = reply.into_inner();
                sender.heard(Epoch(reply.epoch));
                if reply.phase() == JobPhase::Failed {
                    tell.send_replace(Standing::Failed(reply.error));
                }
            }
            Ok(Err(status)) if !coordinator.may_pass(&status) => {
                tell.send_replace(Standing::Lost(Arc::new(MembershipError::new(&status))));
                return;
            }
            _ if last.elapsed() > coordinator.patience => {
                let silence = MembershipError::Unreachable {
                    address: coordinator.address.clone(),
                    patience: coordinator.patience,
                    reason: "heartbeats are not answered".to_owned(),
                };
                tell.send_replace(Standing::Lost(Arc::new(silence)));
                return;
            }
            _ => tracing::debug!("a heartbeat was not answered"),
        }
    }
}

#[cfg(test)]
mod tests {
    use network::security::Security;
    use shared_proto::ids::{Generation, RunNumber, Task, TaskId};
    use shared_proto::job::Job;

    use super::*;

    /// No process listens at the coordinator's address, so each heartbeat fails.
    #[tokio::test(start_paused = true)]
    async fn no_heartbeats_are_sent_while_other_calls_renew_the_lease() {
        const LENGTH: Duration = Duration::from_secs(3);
        let coordinator =
            Coordinator::at("127.0.0.1:9", Duration::ZERO, Security::default()).unwrap();
        let id = TaskId::worker(0);
        let generation = Generation(1);
        let sender = Sender::new(&Job::default(), RunNumber(1), Task { id, generation });
        let lease = Lease::new(LENGTH, Instant::now());
        let (tell, standing) = watch::channel(Standing::Member);
        tokio::spawn(heartbeats(coordinator, sender, lease.clone(), tell));
        let is_member = || matches!(*standing.borrow(), Standing::Member);
        for _ in 0..50 {
            tokio::time::sleep(LENGTH / 10).await;
            lease.renew(Instant::now());
            assert!(is_member());
        }
        let renewed = Instant::now();
        while is_member() {
            tokio::time::sleep(LENGTH / 100).await;
        }
        // The first heartbeat is due after a third of the lease.
        let elapsed = renewed.elapsed();
        assert!(elapsed >= LENGTH / 3 && elapsed < LENGTH / 2, "{elapsed:?}");
    }
}
