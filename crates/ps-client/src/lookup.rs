//! Reads of rows of tables, for programs that are not members of the job: online inference.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use network::security::{Credentials, Security};
use shared_proto::ids::Role;
use shared_proto::protocol::MAX_MESSAGE_BYTES;
use shared_proto::table::hash::bucket;
use shared_proto::table::{ids_to_bytes, most_looked_up};
use shared_proto::task::boxed;
use shared_proto::wire;
use shared_proto::wire::lookup_client::LookupClient;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// The pause before the servers are asked again which buckets they hold.
const AGAIN: Duration = Duration::from_millis(100);

/// The patience of a read, one year, if the given one is too long for the clock.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// The reason why rows cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LookupError {
    /// No server was named.
    #[error("there is no server to ask; give the addresses at which servers answer lookups")]
    NoServer,
    /// The text is not an address.
    #[error("{address:?} is no address of a server, as in host:port")]
    Address {
        /// The address.
        address: String,
    },
    /// The job has no such table.
    #[error(
        "the job has no table {table:?}; it has {}",
        if tables.is_empty() { "none".to_owned() } else { tables.join(", ") }
    )]
    NoTable {
        /// The table.
        table: String,
        /// The job's tables.
        tables: Vec<String>,
    },
    /// A server refuses the request.
    #[error("the server at {address} refuses: {reason}")]
    Refused {
        /// The server's address.
        address: String,
        /// The server's reason.
        reason: String,
    },
    /// A part of the table has no server, or its server does not answer.
    #[error("not all rows of table {table:?} could be reached within {seconds:.0} s: {reason}")]
    Unreachable {
        /// The table.
        table: String,
        /// The time for which the read was tried, in seconds.
        seconds: f64,
        /// The last failure.
        reason: String,
    },
    /// A server's answer does not fit the request.
    #[error("the answer of the server at {address} does not fit the request: {what}")]
    Answer {
        /// The server's address.
        address: String,
        /// What is wrong.
        what: String,
    },
}

/// Reads rows of tables from running servers. Reading changes nothing on the servers, and creates no rows.
///
/// A `Lookup` asks the servers which of them holds which part of a table, and asks again when parts have moved.
pub struct Lookup {
    servers: Vec<Server>,
    tables: BTreeMap<String, KnownTable>,
    /// The reason why a server did not describe its tables; `None` if all did.
    silent: Option<String>,
    patience: Duration,
}

struct Server {
    address: String,
    client: LookupClient<InterceptedService<Channel, Credentials>>,
}

/// A table, and where its buckets are.
struct KnownTable {
    dimension: usize,
    /// The index of the server that holds each bucket; `None` if no server has reported the bucket.
    servers: Vec<Option<usize>>,
}

/// Rows that were read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FoundRows {
    /// The values, row after row in the order of the ids. An id without a row has the values that a worker would pull:
    /// the initial values of the row if every id gets a row, zeros otherwise.
    pub values: Vec<f32>,
    /// Whether each id has a row.
    pub present: Vec<bool>,
}

/// How often the rows of a table were read and changed on a server. Each bucket counts from the time at which it came
/// to the server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerHeat {
    /// The server's address.
    pub address: String,
    /// The sums of the buckets, and the hottest buckets and ids.
    pub heat: wire::HeatReply,
}

impl Lookup {
    /// Prepares connections to servers at the addresses at which they answer lookups. `patience` is the time for which
    /// a read may wait for rows of a lost server.
    ///
    /// # Errors
    /// If `addresses` is empty, or a text in it is not an address. It is no error if a server does not answer yet.
    pub fn new(
        addresses: &[String],
        security: &Security,
        patience: Duration,
    ) -> Result<Self, LookupError> {
        if addresses.is_empty() {
            return Err(LookupError::NoServer);
        }
        let server = |address: &String| {
            let remote = security.endpoint(address, Role::Ps);
            let remote = remote.map_err(|_| LookupError::Address {
                address: address.clone(),
            })?;
            let client =
                LookupClient::with_interceptor(remote.connect_lazy(), security.credentials());
            Ok(Server {
                address: address.clone(),
                client: client.max_decoding_message_size(2 * MAX_MESSAGE_BYTES),
            })
        };
        Ok(Self {
            servers: addresses.iter().map(server).collect::<Result<_, _>>()?,
            tables: BTreeMap::new(),
            silent: None,
            patience,
        })
    }

    /// Returns the number of values in a row of a table.
    ///
    /// # Errors
    /// If the servers have no such table, or do not answer.
    #[boxed]
    pub async fn dimension(&mut self, table: &str) -> Result<usize, LookupError> {
        if !self.tables.contains_key(table) {
            self.rows(table, &[]).await?;
        }
        Ok(self.tables.get(table).map_or(0, |table| table.dimension))
    }

    /// Reads the rows of ids, which may come in any order and more than once.
    ///
    /// # Errors
    /// If the servers have no such table, or rows cannot be reached within the patience.
    #[boxed]
    pub async fn rows(&mut self, table: &str, ids: &[u64]) -> Result<FoundRows, LookupError> {
        let now = Instant::now();
        let deadline = now.checked_add(self.patience).unwrap_or(now + LONGEST);
        let mut reason = "no answer has come".to_owned();
        loop {
            match timeout_at(deadline, self.attempt(table, ids)).await {
                Ok(Ok(rows)) => return Ok(rows),
                Ok(Err(Failure::Passing(why))) => reason = why,
                Ok(Err(Failure::Lasting(error))) => {
                    self.tables.clear();
                    return Err(error);
                }
                Err(_) => {}
            }
            // The servers are asked again where the rows are.
            self.tables.clear();
            if Instant::now() + AGAIN >= deadline {
                return Err(LookupError::Unreachable {
                    table: table.to_owned(),
                    seconds: self.patience.as_secs_f64(),
                    reason,
                });
            }
            sleep(AGAIN).await;
        }
    }

    /// Returns how often the rows of a table were read and changed on each server, with at most `most` buckets and
    /// `most` ids for each server.
    ///
    /// # Errors
    /// If the servers have no such table, or one of them does not answer.
    #[boxed]
    pub async fn heat(&mut self, table: &str, most: u32) -> Result<Vec<ServerHeat>, LookupError> {
        self.dimension(table).await?;
        let heat = self.servers.iter().map(|server| server.heat(table, most));
        let failure = match timeout(self.patience, try_join_all(heat)).await {
            Ok(Ok(heat)) => return Ok(heat),
            Ok(Err(failure)) => failure,
            Err(_) => Failure::Passing("not all servers have answered".to_owned()),
        };
        Err(match failure {
            Failure::Lasting(error) => error,
            Failure::Passing(reason) => LookupError::Unreachable {
                table: table.to_owned(),
                seconds: self.patience.as_secs_f64(),
                reason,
            },
        })
    }

    /// Reads the rows of ids once.
    async fn attempt(&mut self, table: &str, ids: &[u64]) -> Result<FoundRows, Failure> {
        if !self.tables.contains_key(table) {
            self.describe().await?;
        }
        let Some(known) = self.tables.get(table) else {
            return Err(Failure::Lasting(LookupError::NoTable {
                table: table.to_owned(),
                tables: self.tables.keys().cloned().collect(),
            }));
        };
        let dimension = known.dimension;
        let mut places = vec![Vec::new(); self.servers.len()];
        for (place, id) in ids.iter().enumerate() {
            let bucket = bucket(*id, known.servers.len() as u32);
            match known.servers[bucket as usize] {
                Some(server) => places[server].push(place),
                None => {
                    let silent = self
                        .silent
                        .as_deref()
                        .unwrap_or("all servers have answered");
                    let reason = format!("no server holds bucket {bucket}; {silent}");
                    return Err(Failure::Passing(reason));
                }
            }
        }
        let most = most_looked_up(dimension as u32);
        let requests = self
            .servers
            .iter()
            .zip(&places)
            .flat_map(|(server, places)| {
                let parts = places.chunks(most);
                parts.map(move |places| server.get(table, dimension, ids, places))
            });
        let mut found = FoundRows {
            values: vec![0.0; ids.len() * dimension],
            present: vec![false; ids.len()],
        };
        for (places, values, presence) in try_join_all(requests).await? {
            let rows = values.chunks(dimension).zip(presence);
            for (place, (row, presence)) in places.iter().zip(rows) {
                if presence == wire::Presence::Elsewhere as u8 {
                    let moved = "some rows have moved to another server";
                    return Err(Failure::Passing(moved.to_owned()));
                }
                found.values[place * dimension..][..dimension].copy_from_slice(row);
                found.present[*place] = presence == wire::Presence::Present as u8;
            }
        }
        Ok(found)
    }

    /// Asks all servers which buckets they hold. A server that does not answer counts as holding none.
    async fn describe(&mut self) -> Result<(), Failure> {
        let described = join_all(self.servers.iter().map(Server::describe)).await;
        let mut tables = BTreeMap::<String, KnownTable>::new();
        let (mut silent, mut answers) = (None, 0);
        for (number, (server, described)) in self.servers.iter().zip(described).enumerate() {
            let described = match described {
                Ok(described) => described,
                Err(Failure::Passing(reason)) => {
                    silent = Some(reason);
                    continue;
                }
                Err(lasting) => return Err(lasting),
            };
            answers += 1;
            for table in described.tables {
                let (dimension, buckets) = (table.dimension as usize, table.buckets as usize);
                if !(1..=1 << 16).contains(&dimension) || !(1..=1 << 20).contains(&buckets) {
                    return Err(server.misfit(format!(
                        "its table {:?} has {buckets} buckets of dimension {dimension}",
                        table.name
                    )));
                }
                let known = tables.entry(table.name).or_insert_with(|| KnownTable {
                    dimension,
                    servers: vec![None; buckets],
                });
                if (known.dimension, known.servers.len()) != (dimension, buckets) {
                    return Err(server.misfit("its tables are not those of the others".to_owned()));
                }
                for bucket in table.held {
                    if let Some(place) = known.servers.get_mut(bucket as usize) {
                        *place = Some(number);
                    }
                }
            }
        }
        match silent {
            Some(reason) if answers == 0 => Err(Failure::Passing(reason)),
            silent => {
                (self.tables, self.silent) = (tables, silent);
                Ok(())
            }
        }
    }
}

/// The reason why a server has not answered.
enum Failure {
    /// The server may answer later, or another server may answer instead.
    Passing(String),
    Lasting(LookupError),
}

impl Server {
    async fn describe(&self) -> Result<wire::DescribeReply, Failure> {
        let mut client = self.client.clone();
        let described = client.describe(wire::DescribeRequest {}).await;
        Ok(described
            .map_err(|status| self.failure(&status))?
            .into_inner())
    }

    /// Reads the rows of the ids at the indices `places`. Returns the places, their values, and their presences.
    async fn get<'a>(
        &self,
        table: &str,
        dimension: usize,
        ids: &[u64],
        places: &'a [usize],
    ) -> Result<(&'a [usize], Vec<f32>, Vec<u8>), Failure> {
        let ids: Vec<u64> = places.iter().map(|place| ids[*place]).collect();
        let request = wire::LookupRequest {
            table: table.to_owned(),
            ids: ids_to_bytes(&ids),
        };
        let mut client = self.client.clone();
        let reply = client.get(request).await;
        let reply = reply.map_err(|status| self.failure(&status))?.into_inner();
        let values = reply.values.len() == places.len() * dimension * size_of::<f32>();
        if !values || reply.presence.len() != places.len() {
            let what = format!(
                "{} bytes of values and {} of presence for {} rows of dimension {dimension}",
                reply.values.len(),
                reply.presence.len(),
                places.len()
            );
            return Err(self.misfit(what));
        }
        let (values, _) = reply.values.as_chunks::<4>();
        let values = values.iter().map(|value| f32::from_le_bytes(*value));
        Ok((places, values.collect(), reply.presence.to_vec()))
    }

    async fn heat(&self, table: &str, most: u32) -> Result<ServerHeat, Failure> {
        let request = wire::HeatRequest {
            table: table.to_owned(),
            most,
        };
        let heat = self.client.clone().get_heat(request).await;
        Ok(ServerHeat {
            address: self.address.clone(),
            heat: heat.map_err(|status| self.failure(&status))?.into_inner(),
        })
    }

    fn failure(&self, status: &Status) -> Failure {
        let reason = status.message().to_owned();
        match status.code() {
            Code::NotFound
            | Code::InvalidArgument
            | Code::Unauthenticated
            | Code::PermissionDenied
            | Code::Unimplemented => Failure::Lasting(LookupError::Refused {
                address: self.address.clone(),
                reason,
            }),
            _ => Failure::Passing(format!("the server at {}: {reason}", self.address)),
        }
    }

    fn misfit(&self, what: String) -> Failure {
        Failure::Lasting(LookupError::Answer {
            address: self.address.clone(),
            what,
        })
    }
}
