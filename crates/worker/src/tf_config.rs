//! `TF_CONFIG`: the addresses of a cluster's processes and the place of this one, in the form that launchers for
//! TensorFlow use.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::Deserialize;

/// The name of the environment variable.
pub const VARIABLE: &str = "TF_CONFIG";

const EXAMPLE: &str = r#"{"cluster": {"chief": ["host:2222"], "worker": ["host:2222"], "ps": ["host:2222"]}, "task": {"type": "worker", "index": 0}}"#;

/// The reason why `TF_CONFIG` cannot be used.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("TF_CONFIG cannot be used: {0}; expected something like {EXAMPLE}")]
pub struct TfConfigError(String);

impl TfConfigError {
    /// The variable cannot be used for this reason.
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

/// The variable as it is written. Other fields, such as `environment`, are ignored.
#[derive(Deserialize)]
struct Written {
    #[serde(default)]
    cluster: BTreeMap<String, WrittenAddresses>,
    task: WrittenTask,
}

/// The addresses of the tasks of a kind: all of them in order, or some by their index.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected the addresses of each kind as a list, or as an object by index"
)]
enum WrittenAddresses {
    All(Vec<String>),
    ByIndex(BTreeMap<String, String>),
}

impl WrittenAddresses {
    /// Returns the addresses with their indices, in order.
    fn indexed(&self, kind: &str) -> Result<BTreeMap<usize, Address>, TfConfigError> {
        let texts: Vec<(String, &String)> = match self {
            Self::All(texts) => {
                let texts = texts.iter().enumerate();
                texts
                    .map(|(index, text)| (index.to_string(), text))
                    .collect()
            }
            Self::ByIndex(texts) => texts.iter().map(|(i, text)| (i.clone(), text)).collect(),
        };
        let parsed = texts.into_iter().map(|(index, text)| {
            let number = index.parse().map_err(|_| {
                TfConfigError(format!("cluster.{kind} has {index:?}, which is no index"))
            })?;
            let address = Address::parse(text).ok_or_else(|| {
                TfConfigError(format!(
                    "cluster.{kind}[{index}] is {text:?}, which is not host:port"
                ))
            })?;
            Ok((number, address))
        });
        parsed.collect()
    }
}

/// A number, or its digits as text, as some launchers write it.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number as task.index")]
enum WrittenIndex {
    Number(usize),
    Text(String),
}

impl Default for WrittenIndex {
    fn default() -> Self {
        Self::Number(0)
    }
}

#[derive(Deserialize)]
struct WrittenTask {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    index: WrittenIndex,
}

/// The role of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Runs the coordinator, and a worker. Its worker listens on a port of its own.
    Chief,
    /// A worker with this address.
    Worker(Address),
    /// A parameter server with this address.
    Ps(Address),
    /// Evaluates checkpoints.
    Evaluator,
}

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
}

/// A cluster, and this process's place in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TfConfig {
    /// What this process does.
    pub part: Part,
    /// The name of this process, such as `worker-0`.
    pub identity: String,
    /// The address of the chief, where the coordinator listens.
    pub chief: Address,
    /// The number of workers, the chief's among them.
    pub workers: u32,
    /// The addresses of the chief and of the workers, in this order.
    pub training: Vec<Address>,
    /// The place of this process among `training`; `None` for a server and an evaluator.
    pub index: Option<usize>,
    /// The number of parameter servers.
    pub ps: u32,
}

impl Address {
    /// Reads an address; `None` if the text is not host:port.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port > 0)?;
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let valid = !bare.is_empty() && !bare.contains(|c: char| c.is_whitespace() || c == '/');
        valid.then(|| Self {
            host: host.to_owned(),
            port,
        })
    }

    /// Returns the address to listen on: this address if it is loopback, otherwise all interfaces, because a name may
    /// resolve to an address that the host does not have itself.
    pub fn to_listen_on(&self) -> SocketAddr {
        let bare = self.host.trim_start_matches('[').trim_end_matches(']');
        let ip = match bare {
            "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            literal => literal.parse().ok(),
        };
        let all = match ip {
            Some(IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        };
        SocketAddr::new(ip.filter(IpAddr::is_loopback).unwrap_or(all), self.port)
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl TfConfig {
    /// Reads the variable from this process's environment.
    ///
    /// # Errors
    /// If the variable is not set, or makes no sense.
    pub fn of_environment() -> Result<Self, TfConfigError> {
        match std::env::var(VARIABLE) {
            Ok(text) => Self::parse(&text),
            Err(error) => Err(TfConfigError(format!("{error}"))),
        }
    }

    /// Parses the value of `TF_CONFIG`.
    ///
    /// # Errors
    /// If it does not describe a cluster and a task in it.
    pub fn parse(text: &str) -> Result<Self, TfConfigError> {
        let wrong = |what: String| TfConfigError(what);
        let written: Written = serde_json::from_str(text).map_err(|error| {
            wrong(format!(
                "it is not the JSON of a cluster and a task: {error}"
            ))
        })?;
        let mut addresses = BTreeMap::new();
        for (kind, texts) in &written.cluster {
            if !["chief", "master", "worker", "ps", "evaluator"].contains(&kind.as_str()) {
                return Err(wrong(format!(
                    "cluster has {kind:?}; it may have chief (or master), worker, ps and evaluator"
                )));
            }
            addresses.insert(kind.as_str(), texts.indexed(kind)?);
        }
        let of = |kind: &str| -> Vec<Address> {
            let of_kind = addresses.get(kind).into_iter();
            of_kind.flat_map(BTreeMap::values).cloned().collect()
        };
        let at = |kind: &str, index: usize| addresses.get(kind)?.get(&index).cloned();
        let first = Vec::from_iter(at("worker", 0));
        let chief = chief(&of("chief"), &of("master"), &first)?;
        let apart = of("chief").len() + of("master").len();
        let WrittenTask { kind, index } = written.task;
        let index = match index {
            WrittenIndex::Number(index) => index,
            WrittenIndex::Text(text) => text
                .parse()
                .map_err(|_| wrong(format!("task.index is {text:?}, which is no index")))?,
        };
        let mine = at(&kind, index);
        let missing = || {
            wrong(format!(
                "task is {kind} {index}, but cluster.{kind} has {} addresses, and none for it",
                of(&kind).len()
            ))
        };
        let part = match kind.as_str() {
            "chief" | "master" => mine.map(|_| Part::Chief).ok_or_else(missing)?,
            // Without a chief, the first worker is it.
            "worker" if apart == 0 && index == 0 => Part::Chief,
            "worker" => Part::Worker(mine.ok_or_else(missing)?),
            "ps" => Part::Ps(mine.ok_or_else(missing)?),
            // Launchers leave it out of the cluster, because no other process calls it.
            "evaluator" => Part::Evaluator,
            other => {
                return Err(wrong(format!(
                    "task.type is {other:?}; expected chief, master, worker, ps or evaluator"
                )));
            }
        };
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let training = [of("chief"), of("master"), of("worker")].concat();
        let place = match kind.as_str() {
            "chief" | "master" => Some(index),
            "worker" => {
                let workers = addresses.get("worker").into_iter();
                let mut indices = workers.flat_map(BTreeMap::keys);
                indices
                    .position(|known| *known == index)
                    .map(|place| apart + place)
            }
            _ => None,
        };
        Ok(Self {
            part,
            identity: format!("{kind}-{index}"),
            chief,
            workers: count(training.len()),
            training,
            index: place,
            ps: count(of("ps").len()),
        })
    }
}

/// Returns the address of the chief: one chief or master, or else the first worker.
fn chief(
    chiefs: &[Address],
    masters: &[Address],
    first_worker: &[Address],
) -> Result<Address, TfConfigError> {
    match (chiefs, masters, first_worker) {
        ([chief], [], _) | ([], [chief], _) | ([], [], [chief, ..]) => Ok(chief.clone()),
        ([], [], []) => Err(TfConfigError(
            "cluster has neither a chief nor a worker 0, and the chief runs the coordinator"
                .to_owned(),
        )),
        _ => Err(TfConfigError(format!(
            "cluster has {} chiefs and {} masters; it may have one of both together",
            chiefs.len(),
            masters.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(cluster: &str, task: &str) -> Result<TfConfig, TfConfigError> {
        TfConfig::parse(&format!(
            r#"{{"cluster": {cluster}, "task": {task}, "environment": "cloud"}}"#
        ))
    }

    #[test]
    fn each_task_finds_its_place() {
        let cluster = r#"{"chief": ["c:1"], "worker": ["w0:2", "w1:3"], "ps": ["127.0.0.1:4"]}"#;
        let task = |task: &str| of(cluster, task).unwrap();
        let chief = task(r#"{"type": "chief", "index": 0}"#);
        assert_eq!((chief.part, chief.workers, chief.ps), (Part::Chief, 3, 1));
        assert_eq!(chief.chief.to_string(), "c:1");
        assert_eq!(chief.chief.to_listen_on().to_string(), "0.0.0.0:1");
        let worker = task(r#"{"type": "worker", "index": 1}"#);
        assert_eq!(worker.identity, "worker-1");
        let training: Vec<String> = worker.training.iter().map(Address::to_string).collect();
        assert_eq!(training, ["c:1", "w0:2", "w1:3"]);
        assert_eq!((chief.index, worker.index), (Some(0), Some(2)));
        assert!(matches!(worker.part, Part::Worker(address) if address.to_string() == "w1:3"));
        let ps = task(r#"{"type": "ps", "index": 0}"#);
        assert_eq!(ps.index, None);
        assert!(
            matches!(ps.part, Part::Ps(address) if address.to_listen_on().to_string() == "127.0.0.1:4")
        );
        assert_eq!(
            task(r#"{"type": "evaluator", "index": 0}"#).part,
            Part::Evaluator
        );
    }

    #[test]
    fn addresses_are_listened_on_in_their_family() {
        for (address, listened) in [
            ("localhost:1", "127.0.0.1:1"),
            ("127.0.0.9:1", "127.0.0.9:1"),
            ("10.0.0.1:1", "0.0.0.0:1"),
            ("alpha:1", "0.0.0.0:1"),
            ("[::1]:1", "[::1]:1"),
            ("[fd00::1]:1", "[::]:1"),
        ] {
            let address = Address::parse(address).unwrap();
            assert_eq!(address.to_listen_on().to_string(), listened);
        }
    }

    #[test]
    fn without_a_chief_the_first_worker_is_it() {
        let cluster = r#"{"worker": ["w0:2", "w1:3"]}"#;
        let first = of(cluster, r#"{"type": "worker", "index": 0}"#).unwrap();
        assert_eq!((first.part, first.workers), (Part::Chief, 2));
        let second = of(cluster, r#"{"type": "worker", "index": 1}"#).unwrap();
        assert_eq!(second.chief.to_string(), "w0:2");
        assert!(matches!(second.part, Part::Worker(_)));
    }

    #[test]
    fn an_index_may_be_text_and_workers_may_be_given_by_index() {
        let cluster = r#"{"chief": ["c:1"], "worker": {"3": "w3:2", "10": "w10:2"}}"#;
        let worker = of(cluster, r#"{"type": "worker", "index": "10"}"#).unwrap();
        assert!(matches!(&worker.part, Part::Worker(address) if address.to_string() == "w10:2"));
        assert_eq!((worker.index, worker.workers), (Some(2), 3));
        assert_eq!(worker.identity, "worker-10");
        let alone = r#"{"worker": {"0": "w0:2"}}"#;
        let chief = of(alone, r#"{"type": "worker", "index": "0"}"#).unwrap();
        assert_eq!((chief.part, chief.workers), (Part::Chief, 1));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_place() {
        let cluster = r#"{"chief": ["c:1"], "worker": ["w0:2"]}"#;
        for (cluster, task, named) in [
            (cluster, r#"{"type": "worker", "index": 1}"#, "worker 1"),
            (cluster, r#"{"type": "ps", "index": 0}"#, "cluster.ps has 0"),
            (cluster, r#"{"type": "boss", "index": 0}"#, "boss"),
            (cluster, r#"{"index": 0}"#, "type"),
            (cluster, r#"{"type": "worker", "index": -1}"#, "index"),
            (
                r#"{"worker": ["w0"]}"#,
                r#"{"type": "worker"}"#,
                "worker[0]",
            ),
            (
                r#"{"worker": ["w0:0"]}"#,
                r#"{"type": "worker"}"#,
                "worker[0]",
            ),
            (
                r#"{"worker": ["w0:99999"]}"#,
                r#"{"type": "worker"}"#,
                "worker[0]",
            ),
            (r#"{"worker": "w0:2"}"#, r#"{"type": "worker"}"#, "JSON"),
            (cluster, r#"{"type": "worker", "index": "one"}"#, "no index"),
            (
                r#"{"chief": ["c:1"], "worker": {"x": "w0:2"}}"#,
                r#"{"type": "chief"}"#,
                "no index",
            ),
            // Worker 0 would be the chief.
            (
                r#"{"worker": {"1": "w1:2"}}"#,
                r#"{"type": "worker", "index": 1}"#,
                "neither",
            ),
            (r#"{"gpu": ["w0:2"]}"#, r#"{"type": "worker"}"#, "gpu"),
            (r#"{"ps": ["w0:2"]}"#, r#"{"type": "ps"}"#, "neither"),
            (
                r#"{"chief": ["a:1"], "master": ["b:1"]}"#,
                r#"{"type": "chief"}"#,
                "masters",
            ),
        ] {
            let refused = of(cluster, task).unwrap_err().to_string();
            assert!(refused.contains(named), "{refused}");
        }
        for text in ["", "{", "[]", "{\"task\": 5}"] {
            let refused = TfConfig::parse(text).unwrap_err().to_string();
            assert!(refused.contains("TF_CONFIG cannot be used"), "{refused}");
        }
    }
}
