//! The calls of readers.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Instant;

use metrics::{Counter, Histogram, counter, histogram};
use network::security::Security;
use shared_proto::blocks::{BlockId, PlacedTable};
use shared_proto::payload;
use shared_proto::table::hash::{bucket_of_hash, hash};
use shared_proto::table::{ids_of_bytes, most_looked_up};
use shared_proto::wire;
use shared_proto::wire::lookup_server::Lookup;
use tonic::{Request, Response, Status};

use super::Pace;
use crate::shard::Shard;
use crate::shard::store::Store;

/// The most rows that are read under a bucket's lock at a time. Updates of the bucket wait for the lock.
const AT_A_TIME: usize = 256;

/// The most buckets in an answer about heat, and the most ids.
const MOST_HOT: u32 = 10_000;

/// The shard that lookups read, and the security settings of the service.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) shard: Arc<Shard>,
    pub(crate) security: Security,
}

/// The service `flambeau.v1.Lookup`.
#[derive(Clone)]
pub(super) struct Lookups(Arc<Inner>);

struct Inner {
    served: Served,
    pace: Pace,
    requests: Counter,
    rows: Counter,
    seconds: Histogram,
}

impl Lookups {
    pub(super) fn new(served: Served, pace: Pace) -> Self {
        Self(Arc::new(Inner {
            served,
            pace,
            requests: counter!("flambeau_ps_lookups_total"),
            rows: counter!("flambeau_ps_lookup_rows_total"),
            seconds: histogram!("flambeau_ps_lookup_seconds"),
        }))
    }

    pub(super) fn security(&self) -> &Security {
        &self.0.served.security
    }

    /// Returns the shard's blocks, if the server may answer for them.
    fn store(&self) -> Result<Arc<Store>, Status> {
        let followed = self.0.served.shard.followed();
        let gone = followed.closed || followed.lease.is_over();
        followed.store.filter(|_| !gone).ok_or_else(|| {
            Status::unavailable(
                "this server holds no shard at the moment; ask all servers again which buckets they hold",
            )
        })
    }

    /// Reads the rows of a request.
    fn read(&self, request: &wire::LookupRequest) -> Result<wire::LookupReply, Status> {
        let store = self.store()?;
        let (number, table) = find(&store, &request.table)?;
        let ids = read_ids(&request.ids, table)?;
        self.0.requests.increment(1);
        self.0.rows.increment(ids.len() as u64);
        // The ids of a bucket are neighbours in the order of their hashes.
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.sort_unstable_by_key(|place| hash(ids[*place as usize]));
        let bucket = |place: &u32| bucket_of_hash(hash(ids[*place as usize]), table.spec.buckets);
        let dimension = table.spec.dimension as usize;
        let mut all = vec![0.0; ids.len() * dimension];
        let mut presence = vec![wire::Presence::Elsewhere as u8; ids.len()];
        let (mut of_bucket, mut values, mut present) = (Vec::new(), Vec::new(), Vec::new());
        let of_buckets = order.chunk_by(|a, b| bucket(a) == bucket(b));
        for places in of_buckets.flat_map(|places| places.chunks(AT_A_TIME)) {
            let id = BlockId {
                variable: number,
                index: bucket(&places[0]),
            };
            let Some(block) = store.blocks.by_id.get(&id) else {
                continue;
            };
            of_bucket.clear();
            of_bucket.extend(places.iter().map(|place| ids[*place as usize]));
            values.clear();
            present.clear();
            let read = block.lock().look_up(&of_bucket, &mut values, &mut present);
            drop(block);
            read.map_err(|lost| {
                let shard = &self.0.served.shard;
                Status::unavailable(shard.lose(&store.map.describe(id), lost).message)
            })?;
            let rows = values.chunks_exact(dimension).zip(&present);
            for (place, (row, is_there)) in places.iter().zip(rows) {
                let place = *place as usize;
                all[place * dimension..][..dimension].copy_from_slice(row);
                presence[place] = match is_there {
                    true => wire::Presence::Present as u8,
                    false => wire::Presence::Absent as u8,
                };
            }
        }
        Ok(wire::LookupReply {
            values: payload::share(&all.into()),
            presence: presence.into(),
        })
    }

    /// Returns how often the rows of a table were read and changed.
    fn heat(&self, request: &wire::HeatRequest) -> Result<wire::HeatReply, Status> {
        let store = self.store()?;
        let (number, table) = find(&store, &request.table)?;
        if request.most > MOST_HOT {
            return Err(Status::invalid_argument(format!(
                "{} buckets and ids are asked for; an answer has at most {MOST_HOT}",
                request.most
            )));
        }
        let most = request.most as usize;
        let mut reply = wire::HeatReply::default();
        for id in store.buckets(number, table) {
            let Some(block) = store.blocks.by_id.get(&id) else {
                continue;
            };
            let block = block.lock();
            let (Some(heat), Some(counts)) = (block.heat(), block.row_counts()) else {
                continue;
            };
            reply.read_rows += heat.read;
            reply.updated_rows += heat.updated;
            reply.buckets.push(wire::BucketHeat {
                bucket: id.index,
                rows: counts.rows,
                read_rows: heat.read,
                updated_rows: heat.updated,
            });
            let hottest = heat.hottest();
            drop(block);
            reply.ids.extend(hottest.into_iter().map(|hot| wire::HotId {
                id: hot.id,
                updates: hot.updates,
                error: hot.error,
            }));
            if reply.ids.len() > 2 * most {
                keep_hottest(&mut reply.ids, most, |hot| hot.updates);
            }
        }
        keep_hottest(&mut reply.ids, most, |hot| hot.updates);
        keep_hottest(&mut reply.buckets, most, |bucket| {
            bucket.read_rows + bucket.updated_rows
        });
        Ok(reply)
    }
}

/// Sorts a list by heat, the hottest entry first, and keeps only the first `most` entries.
fn keep_hottest<T>(list: &mut Vec<T>, most: usize, heat: impl Fn(&T) -> u64) {
    list.sort_by_key(|entry| Reverse(heat(entry)));
    list.truncate(most);
}

/// Returns the table with this name, and its number in the shard map.
fn find<'a>(store: &'a Store, name: &str) -> Result<(u32, &'a PlacedTable), Status> {
    let mut tables = store.map.tables.iter().enumerate();
    let found = tables.find(|(_, table)| table.spec.name == name);
    let found = found.map(|(number, table)| (store.map.number_of_table(number), table));
    found.ok_or_else(|| {
        let tables = store.map.tables.iter();
        let names: Vec<&str> = tables.map(|table| table.spec.name.as_str()).collect();
        let there = match names.is_empty() {
            true => "it has none".to_owned(),
            false => format!("it has {}", names.join(", ")),
        };
        Status::not_found(format!("the job has no table {name:?}; {there}"))
    })
}

/// Reads the ids of a request.
fn read_ids(bytes: &[u8], table: &PlacedTable) -> Result<Vec<u64>, Status> {
    let id = size_of::<u64>();
    if !bytes.len().is_multiple_of(id) {
        return Err(Status::invalid_argument(format!(
            "there are {} bytes of ids; an id has {id}",
            bytes.len()
        )));
    }
    let most = most_looked_up(table.spec.dimension);
    let count = bytes.len() / id;
    if count > most {
        return Err(Status::invalid_argument(format!(
            "{count} rows are asked for at a time; at most {most} of this table fit into an answer"
        )));
    }
    Ok(ids_of_bytes(bytes))
}

#[tonic::async_trait]
impl Lookup for Lookups {
    async fn describe(
        &self,
        _: Request<wire::DescribeRequest>,
    ) -> Result<Response<wire::DescribeReply>, Status> {
        self.0.pace.turn().await;
        let store = self.store()?;
        let table = |(number, table): (usize, &PlacedTable)| {
            let number = store.map.number_of_table(number);
            let held = store.buckets(number, table).map(|id| id.index).collect();
            wire::ServedTable {
                name: table.spec.name.clone(),
                dimension: table.spec.dimension,
                buckets: table.spec.buckets,
                held,
            }
        };
        Ok(Response::new(wire::DescribeReply {
            job: self.0.served.shard.job.name.clone(),
            tables: store.map.tables.iter().enumerate().map(table).collect(),
        }))
    }

    async fn get(
        &self,
        request: Request<wire::LookupRequest>,
    ) -> Result<Response<wire::LookupReply>, Status> {
        let began = Instant::now();
        self.0.pace.turn().await;
        let reply = self.read(request.get_ref())?;
        self.0.seconds.record(began.elapsed());
        Ok(Response::new(reply))
    }

    async fn get_heat(
        &self,
        request: Request<wire::HeatRequest>,
    ) -> Result<Response<wire::HeatReply>, Status> {
        self.0.pace.turn().await;
        self.heat(request.get_ref()).map(Response::new)
    }
}
