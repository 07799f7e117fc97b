//! Bounds on a message's size in memory. An empty part has two bytes on the wire and a hundred in memory,
//! so parts are counted before any of them is allocated.

use bytes::Buf;
use prost::encoding::{WireType, decode_key, decode_varint};
use tonic::Status;

use shared_proto::protocol::MAX_MESSAGE_BYTES;

/// The bounds on a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The most bytes on the wire.
    pub bytes: usize,
    /// The most parts. A part is a field of the message, or a field of a message in such a field. Each element of a
    /// repeated field counts.
    pub parts: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            bytes: MAX_MESSAGE_BYTES,
            parts: usize::MAX,
        }
    }
}

/// Checks that a message has at most `most` parts. If a field occurs several times, the parts of all occurrences count,
/// because decoding merges them.
pub(super) fn count_parts(mut message: impl Buf, most: usize) -> Result<(), Status> {
    let mut parts = 0;
    while message.has_remaining() {
        parts += 1;
        let length = next_field(&mut message)?;
        let mut content = (&mut message).take(length);
        while content.has_remaining() && parts <= most {
            let length = next_field(&mut content)?;
            content.advance(length);
            parts += 1;
        }
        if parts > most {
            return Err(Status::out_of_range(format!(
                "it has more than {most} parts, so it names blocks that do not exist"
            )));
        }
    }
    Ok(())
}

/// Reads a field's key, and its length or number. Returns the number of bytes of content that follow.
fn next_field(rest: &mut impl Buf) -> Result<usize, Status> {
    let malformed = |error: prost::DecodeError| Status::internal(error.to_string());
    let (_, kind) = decode_key(rest).map_err(malformed)?;
    let length = match kind {
        WireType::Varint => {
            decode_varint(rest).map_err(malformed)?;
            return Ok(0);
        }
        WireType::SixtyFourBit => 8,
        WireType::ThirtyTwoBit => 4,
        WireType::LengthDelimited => decode_varint(rest).map_err(malformed)?,
        WireType::StartGroup | WireType::EndGroup => {
            return Err(Status::internal(
                "it has a group, which no message here has",
            ));
        }
    };
    let length = usize::try_from(length).ok();
    let length = length.filter(|length| *length <= rest.remaining());
    length.ok_or_else(|| Status::internal("a field is longer than its message"))
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use shared_proto::wire::{self, client_message::Kind};

    fn message(blocks: usize) -> Vec<u8> {
        let pull = wire::Pull {
            origin: Some(wire::Origin::default()),
            blocks: vec![wire::WantedBlock::default(); blocks],
            dtype: 1,
            ..wire::Pull::default()
        };
        let kind = Some(Kind::Pull(pull));
        wire::ClientMessage { kind }.encode_to_vec()
    }

    #[test]
    fn each_part_counts_even_if_it_is_empty() {
        // The pull itself, its origin and its dtype are three more.
        assert!(count_parts(&*message(7), 10).is_ok());
        let error = count_parts(&*message(8), 10).unwrap_err();
        assert_eq!(error.code(), tonic::Code::OutOfRange);
        // Decoding merges a field that comes in several pieces.
        let twice = [message(4), message(4)].concat();
        let joined = wire::ClientMessage::decode(&*twice).unwrap();
        assert!(matches!(joined.kind, Some(Kind::Pull(pull)) if pull.blocks.len() == 8));
        assert!(count_parts(&*twice, 13).is_err() && count_parts(&*twice, 14).is_ok());
    }

    #[test]
    fn numbers_and_payloads_do_not_count_by_their_bytes() {
        let gradient = wire::Gradient {
            payload: Some(shared_proto::payload::dense(vec![0xff; 1 << 16].into())),
            ..wire::Gradient::default()
        };
        let push = Kind::Push(wire::Push {
            gradients: vec![gradient],
            ..wire::Push::default()
        });
        let push = wire::ClientMessage { kind: Some(push) }.encode_to_vec();
        assert!(count_parts(&*push, 2).is_ok());
    }

    #[test]
    fn what_cannot_be_counted_is_no_message() {
        for bytes in [&[0x0a, 5][..], &[0x0b], &[0xff; 11], &[0x0d, 1]] {
            let error = count_parts(bytes, 100).unwrap_err();
            assert_eq!(error.code(), tonic::Code::Internal, "{bytes:?}");
        }
    }
}
