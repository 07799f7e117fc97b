//! Messages about rows of tables with one thing wrong each.

use shared_proto::job::Sgd;
use shared_proto::table::hash::{bucket, hash};
use shared_proto::table::{RowOptimizer, Rows, TableSpec, ids_to_bytes};

use super::*;

const BUCKETS: u32 = 2;

fn table(name: &str, dimension: u32) -> TableSpec {
    TableSpec {
        name: name.to_owned(),
        dimension,
        buckets: BUCKETS,
        optimizer: RowOptimizer::Sgd(Sgd {
            learning_rate: 1.0,
            ..Sgd::default()
        }),
        seed: 1,
        ..TableSpec::default()
    }
}

/// A worker with a session, on a job with one variable, table "item" of two values a row, and table "user" of three.
struct Tables {
    cluster: Cluster,
    peer: Peer,
    session: Session,
}

const fn bucket_of_item(index: u32) -> wire::BlockId {
    wire::BlockId { variable: 1, index }
}

const fn bucket_of_user(index: u32) -> wire::BlockId {
    wire::BlockId { variable: 2, index }
}

/// Returns the first ids of a bucket, in the order of their hashes.
fn ids_of(number: u32, count: usize) -> Vec<u64> {
    let ids = (0..).filter(|id| bucket(*id, BUCKETS) == number);
    let mut ids: Vec<u64> = ids.take(count).collect();
    ids.sort_by_key(|id| hash(*id));
    ids
}

fn rows(ids: &[u64], dimension: u32, values: &[f32]) -> wire::Payload {
    Rows::payload(ids, values.to_vec().into(), dimension)
}

impl Tables {
    async fn new() -> Self {
        let cluster = Cluster::start(program(), BOUNDED, 1);
        let mut peer = Peer::join(&cluster.coordinator.address(), "x").await;
        peer.tables = [table("item", 2), table("user", 3)]
            .iter()
            .map(Into::into)
            .collect();
        let map = peer.shard_map(&[variable("w", 4)]).await;
        peer.initialize(&map, 0.0).await;
        let session = peer.open(map.shards[0].server.address().unwrap()).await;
        let mut tables = Self {
            cluster,
            peer,
            session,
        };
        let w = tables.peer.pull(0, &[W]);
        tables.session.weights(w).await;
        tables
    }

    fn push(&mut self, parts: Vec<(wire::BlockId, wire::Payload)>) -> wire::Push {
        let gradient = |(block, payload)| wire::Gradient {
            block: Some(block),
            based_on_version: 0,
            payload: Some(payload),
        };
        wire::Push {
            origin: Some(self.peer.next(0)),
            gradients: parts.into_iter().map(gradient).collect(),
        }
    }

    fn pull(&mut self, block: wire::BlockId, ids: &[u64]) -> wire::Pull {
        let mut pull = self.peer.pull(0, &[block]);
        pull.blocks[0].ids = ids_to_bytes(ids);
        pull
    }

    /// Returns the values of rows, and the version of their bucket.
    async fn rows(&mut self, block: wire::BlockId, ids: &[u64]) -> (Vec<f32>, u64) {
        let pull = self.pull(block, ids);
        let answer = self.session.ask(Kind::Pull(pull)).await;
        let Answer::Weights(weights) = answer else {
            panic!("{answer:?}")
        };
        let [block] = &weights.blocks[..] else {
            panic!("{weights:?}")
        };
        let payload = block.payload.as_ref().unwrap();
        let Some(wire::payload::Values::Rows(rows)) = &payload.values else {
            panic!("{payload:?}")
        };
        let values = payload::elements(&rows.values);
        (
            values.iter().map(|v| v.get()).collect(),
            block.version.unwrap().version,
        )
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_rows_are_refused_by_name_and_change_nothing() {
    let mut tables = Tables::new().await;
    let (one, other) = (ids_of(0, 10_000), ids_of(1, 2));
    let two = [one[0], one[1]];
    let good = (bucket_of_item(0), rows(&two, 2, &[1.0; 4]));
    let mut with_nan = vec![1.0; 20_000];
    with_nan[12_345] = f32::NAN;
    let beyond = wire::BlockId {
        variable: 1,
        index: BUCKETS,
    };
    let dense = payload::dense(payload::to_bytes(&[1.0; 4]));
    let cut = wire::Payload {
        values: Some(wire::payload::Values::Rows(wire::Rows {
            ids: ids_to_bytes(&two).slice(..15),
            dimension: 2,
            values: payload::to_bytes(&[1.0; 4]),
        })),
        ..good.1.clone()
    };
    let cases = [
        (
            (bucket_of_item(0), rows(&two, 3, &[1.0; 6])),
            Reason::WrongShape,
            "dimension 3",
        ),
        (
            (bucket_of_item(0), rows(&two, 2, &[1.0; 3])),
            Reason::WrongShape,
            "12 bytes",
        ),
        (
            (bucket_of_item(0), rows(&one, 2, &with_nan)),
            Reason::NonFinite,
            "table \"item\" holds NaN",
        ),
        (
            (bucket_of_item(0), rows(&[one[0]; 2], 2, &[1.0; 4])),
            Reason::WrongIds,
            "twice",
        ),
        (
            (bucket_of_item(0), rows(&[one[1], one[0]], 2, &[1.0; 4])),
            Reason::WrongIds,
            "out of order",
        ),
        (
            (bucket_of_item(0), rows(&other, 2, &[1.0; 4])),
            Reason::WrongIds,
            "belongs to bucket 1",
        ),
        (
            (bucket_of_user(0), rows(&two, 2, &[1.0; 4])),
            Reason::WrongShape,
            "table \"user\" of dimension 3",
        ),
        (
            (beyond, rows(&two, 2, &[1.0; 4])),
            Reason::UnknownBlock,
            "no bucket 2",
        ),
        (
            (
                wire::BlockId {
                    variable: 3,
                    index: 0,
                },
                rows(&two, 2, &[1.0; 4]),
            ),
            Reason::UnknownVariable,
            "number 3",
        ),
        (
            (bucket_of_item(0), dense),
            Reason::WrongDtype,
            "send `rows`",
        ),
        (
            (bucket_of_item(0), cut),
            Reason::Malformed,
            "15 bytes of ids",
        ),
        (
            (W, rows(&two, 2, &[1.0; 4])),
            Reason::WrongDtype,
            "holds rows",
        ),
    ];
    for (part, reason, named) in cases {
        let alone = tables.push(vec![part.clone()]);
        // Its valid parts must not be applied either.
        let beside = tables.push(vec![(bucket_of_item(1), rows(&other, 2, &[1.0; 4])), part]);
        for push in [alone, beside] {
            let (found, message) = tables.session.refused(Kind::Push(push)).await;
            assert_eq!(found, reason, "{message}");
            assert!(message.contains(named), "{message}");
        }
    }
    // A message has no room for these ids, or for their rows.
    let many = ids_of(0, 180_000);
    for (pull, reason, named) in [
        (
            tables.pull(bucket_of_item(0), &[one[1], one[0]]),
            Reason::WrongIds,
            "out of order",
        ),
        (
            tables.pull(bucket_of_item(1), &two),
            Reason::WrongIds,
            "bucket 0 of 2",
        ),
        (
            tables.pull(beyond, &two),
            Reason::UnknownBlock,
            "no bucket 2",
        ),
        (
            tables.pull(bucket_of_user(0), &many),
            Reason::Oversized,
            "fewer blocks or rows",
        ),
    ] {
        let (found, message) = tables.session.refused(Kind::Pull(pull)).await;
        assert_eq!(found, reason, "{message}");
        assert!(message.contains(named), "{message}");
    }
    let metrics = tables.cluster.ps[0].http("/metrics");
    assert!(
        metrics.contains("flambeau_ps_table_rows{table=\"item\"} 0"),
        "{metrics}"
    );

    // What was not wrong still counts, once.
    let push = tables.push(vec![good]);
    for _ in 0..2 {
        let answer = tables.session.ask(Kind::Push(push.clone())).await;
        assert!(matches!(answer, Answer::Acknowledged(_)), "{answer:?}");
    }
    assert_eq!(
        tables.rows(bucket_of_item(0), &two).await,
        (vec![-1.0; 4], 1)
    );
    // A pull creates no row.
    assert_eq!(
        tables.rows(bucket_of_item(1), &other).await,
        (vec![0.0; 4], 0)
    );
    let metrics = tables.cluster.ps[0].http("/metrics");
    assert!(
        metrics.contains("flambeau_ps_table_rows{table=\"item\"} 2"),
        "{metrics}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_that_cannot_be_are_refused() {
    let cluster = Cluster::start(program(), BOUNDED, 1);
    let mut peer = Peer::join(&cluster.coordinator.address(), "x").await;
    let one = table("item", 2);
    let named = |name: &str| TableSpec {
        name: name.to_owned(),
        ..one.clone()
    };
    let without_buckets = TableSpec {
        buckets: 0,
        ..one.clone()
    };
    for (specs, said) in [
        (vec![without_buckets], "number of buckets is 0"),
        (vec![named("b"), named("a")], "sorted by name"),
        (vec![named("a"), named("a")], "sorted by name"),
        (vec![named("w")], "names a variable and a table"),
    ] {
        peer.tables = specs.iter().map(Into::into).collect();
        let refused = peer.register_variables(vec![variable("w", 4)]).await;
        let refused = refused.unwrap_err();
        assert!(refused.message().contains(said), "{refused}");
    }
    peer.tables = vec![wire::Table {
        spec: "no settings".to_owned(),
    }];
    let refused = peer.register_variables(vec![variable("w", 4)]).await;
    let refused = refused.unwrap_err();
    assert!(refused.message().contains("cannot be read"), "{refused}");

    // Another worker must have the same tables.
    peer.tables = vec![(&one).into()];
    peer.shard_map(&[variable("w", 4)]).await;
    let mut other = Peer::join(&cluster.coordinator.address(), "y").await;
    other.tables = vec![(&table("item", 3)).into()];
    let differs = other.register_variables(vec![variable("w", 4)]).await;
    let differs = differs.unwrap_err();
    assert!(differs.message().contains("table \"item\""), "{differs}");
}
