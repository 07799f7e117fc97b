//! Some rows of a bucket, as they travel.

use bytes::Bytes;

use super::TableSpec;
use super::hash::{bucket_of_hash, hash};
use crate::payload::Elements;
use crate::protocol::MAX_MESSAGE_BYTES;
use crate::refusal::{Reason, Refusal};
use crate::wire;

/// Some rows of a table's bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The ids, in ascending order of their hash.
    pub ids: Vec<u64>,
    /// The elements, row after row.
    pub values: Elements,
}

impl Rows {
    /// Reads the payload of a bucket.
    ///
    /// # Errors
    /// [`Reason::WrongShape`] if the number of elements is not the number of ids times the dimension,
    /// [`Reason::WrongDtype`], [`Reason::Malformed`], or those of [`read_ids`]. The message lacks its subject; the
    /// caller puts the name of the bucket before it.
    pub fn read(
        payload: Option<&wire::Payload>,
        spec: &TableSpec,
        bucket: u32,
    ) -> Result<Self, Refusal> {
        let rows = rows_of(payload, spec)?;
        let ids = read_ids(&rows.ids, spec, bucket)?;
        let values = values_of(payload, rows, ids.len())?;
        Ok(Self { ids, values })
    }

    /// Reads the elements of a bucket from the answer to a pull of `count` rows.
    ///
    /// # Errors
    /// As [`Self::read`], except those of ids, which an answer does not have.
    pub fn read_answer(
        payload: Option<&wire::Payload>,
        spec: &TableSpec,
        count: usize,
    ) -> Result<Elements, Refusal> {
        let rows = rows_of(payload, spec)?;
        values_of(payload, rows, count)
    }

    /// Returns rows as a payload. In the answer to a pull, `ids` is empty.
    pub fn payload(ids: &[u64], values: Elements, dimension: u32) -> wire::Payload {
        let (dtype, values) = values.into_parts();
        wire::Payload {
            dtype: dtype.into(),
            values: Some(wire::payload::Values::Rows(wire::Rows {
                ids: ids_to_bytes(ids),
                dimension,
                values,
            })),
        }
    }
}

/// Returns the maximum number of ids in a lookup in a table of this dimension: the number of rows whose values fit into
/// a message, at most 65,536.
pub fn most_looked_up(dimension: u32) -> usize {
    let row = dimension as usize * size_of::<f32>();
    (MAX_MESSAGE_BYTES / row.max(1)).clamp(1, 1 << 16)
}

/// Returns ids as bytes for the wire.
pub fn ids_to_bytes(ids: &[u64]) -> Bytes {
    if cfg!(target_endian = "little") {
        Bytes::copy_from_slice(bytemuck::cast_slice(ids))
    } else {
        ids.iter().flat_map(|id| id.to_le_bytes()).collect()
    }
}

/// Returns the ids in little-endian bytes.
pub fn ids_of_bytes(bytes: &[u8]) -> Vec<u64> {
    let (ids, _) = bytes.as_chunks::<8>();
    ids.iter().map(|id| u64::from_le_bytes(*id)).collect()
}

/// Reads ids of a bucket.
///
/// # Errors
/// [`Reason::WrongIds`] if they are not in the order of their hashes, come twice, or belong to another bucket;
/// [`Reason::Malformed`] if the bytes are no whole number of ids.
pub fn read_ids(bytes: &[u8], spec: &TableSpec, bucket: u32) -> Result<Vec<u64>, Refusal> {
    let (chunks, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        let what = format!("has {} bytes of ids; an id has 8", bytes.len());
        return Err(Refusal::new(Reason::Malformed, what));
    }
    let ids: Vec<u64> = chunks.iter().map(|id| u64::from_le_bytes(*id)).collect();
    // The hash is a bijection, so ids with ascending hashes differ.
    let mut before = None;
    for id in &ids {
        let hash = hash(*id);
        if before.is_some_and(|before| before >= hash) {
            let what = format!(
                "has id {id} twice, or out of order; send each id once, in ascending order of the hash"
            );
            return Err(Refusal::new(Reason::WrongIds, what));
        }
        before = Some(hash);
        let its = bucket_of_hash(hash, spec.buckets);
        if its != bucket {
            let what = format!(
                "has id {id}, which belongs to bucket {its} of {} and not to {bucket}",
                spec.buckets
            );
            return Err(Refusal::new(Reason::WrongIds, what));
        }
    }
    Ok(ids)
}

/// Returns the rows in a payload, if they have the table's dimension.
fn rows_of<'a>(
    payload: Option<&'a wire::Payload>,
    spec: &TableSpec,
) -> Result<&'a wire::Rows, Refusal> {
    let payload = payload.ok_or_else(|| Refusal::new(Reason::Malformed, "has no payload"))?;
    match &payload.values {
        Some(wire::payload::Values::Rows(rows)) if rows.dimension == spec.dimension => Ok(rows),
        Some(wire::payload::Values::Rows(rows)) => Err(Refusal::new(
            Reason::WrongShape,
            format!(
                "has rows of dimension {}, but {spec} was expected",
                rows.dimension
            ),
        )),
        Some(wire::payload::Values::Dense(_)) => Err(Refusal::new(
            Reason::WrongDtype,
            "holds dense values, but a table has rows; send `rows`",
        )),
        None => Err(Refusal::new(
            Reason::Malformed,
            "has a payload without values",
        )),
    }
}

/// Returns the elements of `count` rows.
fn values_of(
    payload: Option<&wire::Payload>,
    rows: &wire::Rows,
    count: usize,
) -> Result<Elements, Refusal> {
    let dtype = payload.map_or(0, |payload| payload.dtype);
    let expected = count * rows.dimension as usize;
    Elements::read_bytes(dtype, &rows.values, expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::payload::{Dtype, to_bytes};
    use crate::table::hash::bucket;

    fn spec() -> TableSpec {
        TableSpec {
            name: "item".to_owned(),
            dimension: 2,
            buckets: 4,
            ..TableSpec::default()
        }
    }

    /// Returns ids of a bucket, in the order of their hashes.
    fn ids_of(number: u32) -> Vec<u64> {
        let mut ids: Vec<u64> = (0..40).filter(|id| bucket(*id, 4) == number).collect();
        ids.sort_by_key(|id| hash(*id));
        ids
    }

    fn payload(ids: &[u64], values: usize) -> wire::Payload {
        let values = Elements::new(to_bytes(&vec![1.5; values]), Dtype::F32);
        Rows::payload(ids, values, 2)
    }

    #[test]
    fn rows_survive_the_wire() {
        let ids = ids_of(1);
        let sent = payload(&ids, 2 * ids.len());
        let read = Rows::read(Some(&sent), &spec(), 1).unwrap();
        assert_eq!(read.ids, ids);
        assert_eq!(read.values.to_vec(), vec![1.5; 2 * ids.len()]);
        let none = Rows::read(Some(&payload(&[], 0)), &spec(), 3).unwrap();
        assert!(none.ids.is_empty() && none.values.is_empty());
    }

    #[test]
    fn wrong_rows_are_refused_by_name() {
        let ids = ids_of(1);
        let twice = [ids[0], ids[0]];
        let backwards = [ids[1], ids[0]];
        let foreign = ids_of(2);
        let wide = TableSpec {
            dimension: 3,
            ..spec()
        };
        let odd = wire::Payload {
            values: Some(wire::payload::Values::Rows(wire::Rows {
                ids: Bytes::from_static(&[1, 2, 3]),
                dimension: 2,
                values: Bytes::new(),
            })),
            ..payload(&[], 0)
        };
        let dense = crate::payload::dense(to_bytes(&[1.0; 2]));
        let foreign_id = format!("id {}, which belongs to bucket 2 of 4", foreign[0]);
        for (sent, of, reason, said) in [
            (payload(&twice, 4), spec(), Reason::WrongIds, "twice"),
            (
                payload(&backwards, 4),
                spec(),
                Reason::WrongIds,
                "out of order",
            ),
            (
                payload(&foreign[..1], 2),
                spec(),
                Reason::WrongIds,
                foreign_id.as_str(),
            ),
            (
                payload(&ids[..2], 5),
                spec(),
                Reason::WrongShape,
                "20 bytes",
            ),
            (
                payload(&ids[..2], 4),
                wide,
                Reason::WrongShape,
                "dimension 2",
            ),
            (odd, spec(), Reason::Malformed, "3 bytes of ids"),
            (dense, spec(), Reason::WrongDtype, "dense"),
        ] {
            let refused = Rows::read(Some(&sent), &of, 1).unwrap_err();
            assert_eq!(refused.reason, reason, "{refused}");
            assert!(refused.message.contains(said), "{refused}");
        }
        assert_eq!(
            Rows::read(None, &spec(), 1).unwrap_err().reason,
            Reason::Malformed
        );
    }
}
