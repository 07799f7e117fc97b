//! The time that workers spend in each part of a step.

use serde_tuple::{Deserialize_tuple, Serialize_tuple};
use shared_proto::wire;

/// The seconds spent in each part of a step.
#[derive(Clone, Copy, Debug, Default, Serialize_tuple, Deserialize_tuple)]
pub(super) struct Times {
    #[serde(with = "shared_proto::number")]
    pub(super) pull: f64,
    #[serde(with = "shared_proto::number")]
    pub(super) compute: f64,
    #[serde(with = "shared_proto::number")]
    pub(super) push: f64,
    #[serde(with = "shared_proto::number")]
    pub(super) wait: f64,
}

impl Times {
    pub(super) fn add(&mut self, more: &Self) {
        self.pull += more.pull;
        self.compute += more.compute;
        self.push += more.push;
        self.wait += more.wait;
    }
}

impl From<&wire::StepTimes> for Times {
    fn from(times: &wire::StepTimes) -> Self {
        Self {
            pull: times.pull,
            compute: times.compute,
            push: times.push,
            wait: times.wait,
        }
    }
}

impl From<Times> for wire::StepTimes {
    fn from(times: Times) -> Self {
        Self {
            pull: times.pull,
            compute: times.compute,
            push: times.push,
            wait: times.wait,
        }
    }
}
