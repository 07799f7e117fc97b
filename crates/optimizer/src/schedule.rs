//! Learning-rate schedules: a factor that depends on the number of updates of a block.

use shared_proto::job::{Schedule, ScheduleKind};

/// Returns the factor of the update that follows `done` updates. `total` is the number of updates that the job expects.
/// A cosine without an end in its settings ends there.
///
/// Warm-up is linear (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2); the cosine is that of
/// Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts.
pub fn factor(schedule: &Schedule, done: u64, total: u64) -> f32 {
    let warmup = schedule.warmup_steps;
    if done < warmup {
        return ((done + 1) as f64 / warmup as f64) as f32;
    }
    let done = done - warmup;
    match schedule.kind {
        ScheduleKind::Constant => 1.0,
        ScheduleKind::Step => {
            let cuts = done / schedule.step_every;
            f64::from(schedule.step_factor).powf(cuts as f64) as f32
        }
        ScheduleKind::Cosine => {
            let total = schedule.total_steps.unwrap_or(total);
            let length = total.saturating_sub(warmup).max(1);
            let way = (done as f64 / length as f64).min(1.0);
            let floor = f64::from(schedule.floor);
            let cosine = (1.0 + (std::f64::consts::PI * way).cos()) / 2.0;
            (floor + (1.0 - floor) * cosine) as f32
        }
    }
}
