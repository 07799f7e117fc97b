//! The stored form of values that JSON cannot hold as they are, or that mean nothing to the next process.

use serde::{Deserialize, Serialize};
use shared_proto::receipt::ReceiptKey;

/// The stored form of a [`ReceiptKey`].
#[derive(Serialize, Deserialize)]
#[serde(remote = "ReceiptKey")]
pub(super) struct Key([u8; 32]);

/// Enumerations of the wire, as numbers.
pub(super) mod enumeration {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<T, S>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
    where
        T: Copy + Into<i32>,
        S: Serializer,
    {
        serializer.serialize_i32((*value).into())
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: TryFrom<i32>,
        D: Deserializer<'de>,
    {
        let number = i32::deserialize(deserializer)?;
        T::try_from(number).map_err(|_| D::Error::custom(format!("there is no value {number}")))
    }
}

/// Members as a list, because the keys of JSON objects are strings.
pub(super) mod members {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serializer};
    use shared_proto::ids::TaskId;

    use crate::members::Member;

    type Members = BTreeMap<TaskId, Member>;

    pub(crate) fn serialize<S: Serializer>(
        members: &Members,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(members.values())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Members, D::Error> {
        let members = Vec::<Member>::deserialize(deserializer)?;
        Ok(members.into_iter().map(|m| (m.task.id, m)).collect())
    }
}

/// Values by task as a list of pairs.
pub(super) mod by_task {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use shared_proto::ids::TaskId;

    pub(crate) fn serialize<V: Serialize, S: Serializer>(
        values: &BTreeMap<TaskId, V>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values)
    }

    pub(crate) fn deserialize<'de, V: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<TaskId, V>, D::Error> {
        let values = Vec::<(TaskId, V)>::deserialize(deserializer)?;
        Ok(values.into_iter().collect())
    }
}

/// Tasks with a deadline, as a list of the tasks. The next process sets deadlines of its own.
pub(super) mod tasks {
    use std::collections::BTreeMap;
    use std::time::Instant;

    use serde::{Deserialize, Deserializer, Serializer};
    use shared_proto::ids::TaskId;

    pub(crate) fn serialize<S: Serializer>(
        deadlines: &BTreeMap<TaskId, Instant>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(deadlines.keys())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<TaskId, Instant>, D::Error> {
        let tasks = Vec::<TaskId>::deserialize(deserializer)?;
        let now = Instant::now();
        Ok(tasks.into_iter().map(|task| (task, now)).collect())
    }
}
