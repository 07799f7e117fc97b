//! Messages in the form in which they are sent. The length of each field precedes its content, so the lengths are
//! computed from the inside to the outside, and the bytes are written from the outside to the inside.

use std::collections::VecDeque;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};

use super::SMALL_BYTES;
use shared_proto::wire::{self, client_message, link_message, payload::Values, server_message};

/// A message in the form in which it is sent. Clones share their memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded(VecDeque<Bytes>);

impl Encoded {
    /// Encodes a message without large payloads.
    fn small(message: &impl Message) -> Self {
        let mut pieces = Pieces::default();
        begin_message(message.encoded_len(), &mut pieces.open);
        message.encode_raw(&mut pieces.open);
        pieces.finish()
    }

    /// Returns the bytes of the message, in pieces.
    pub(super) fn into_pieces(self) -> VecDeque<Bytes> {
        self.0
    }
}

impl From<client_message::Kind> for Encoded {
    fn from(kind: client_message::Kind) -> Self {
        const PUSH: Tags = Tags {
            kind: 3,
            parts: 2,
            payload: 3,
        };
        match kind {
            client_message::Kind::Push(mut push) => {
                let parts = std::mem::take(&mut push.gradients).into_iter();
                let parts = parts.map(|mut part| Part::new(part.payload.take(), part));
                PUSH.encode(&push, parts.collect())
            }
            kind => Self::small(&wire::ClientMessage { kind: Some(kind) }),
        }
    }
}

impl From<server_message::Kind> for Encoded {
    fn from(kind: server_message::Kind) -> Self {
        const WEIGHTS: Tags = Tags {
            kind: 3,
            parts: 2,
            payload: 2,
        };
        match kind {
            server_message::Kind::Weights(mut weights) => {
                let parts = std::mem::take(&mut weights.blocks).into_iter();
                let parts = parts.map(|mut part| Part::new(part.payload.take(), part));
                WEIGHTS.encode(&weights, parts.collect())
            }
            kind => Self::small(&wire::ServerMessage { kind: Some(kind) }),
        }
    }
}

impl From<link_message::Kind> for Encoded {
    fn from(kind: link_message::Kind) -> Self {
        const PIECE: u32 = 2;
        match kind {
            link_message::Kind::Piece(values) => {
                let mut pieces = Pieces::default();
                begin_message(field_length(PIECE, values.len()), &mut pieces.open);
                begin_field(PIECE, values.len(), &mut pieces.open);
                pieces.share(values);
                pieces.finish()
            }
            kind => Self::small(&wire::LinkMessage { kind: Some(kind) }),
        }
    }
}

/// The field numbers on the way from a message to its payloads.
struct Tags {
    /// The number of the oneof's case.
    kind: u32,
    /// The number of the repeated parts in it.
    parts: u32,
    /// The number of the payload in a part.
    payload: u32,
}

/// The field number of the dense values in a payload.
const DENSE: u32 = 2;

impl Tags {
    /// Encodes a message of this kind. `rest` is the message without its parts.
    fn encode<P: Message>(&self, rest: &impl Message, parts: Vec<Part<P>>) -> Encoded {
        let part_length = |part: &Part<P>| part.length(self.payload);
        let part_fields = parts
            .iter()
            .map(|p| field_length(self.parts, part_length(p)));
        let length = rest.encoded_len() + part_fields.sum::<usize>();

        let mut pieces = Pieces::default();
        begin_message(field_length(self.kind, length), &mut pieces.open);
        begin_field(self.kind, length, &mut pieces.open);
        rest.encode_raw(&mut pieces.open);
        for part in parts {
            begin_field(self.parts, part_length(&part), &mut pieces.open);
            part.write(self.payload, &mut pieces);
        }
        pieces.finish()
    }
}

/// A part of a message: a gradient, or the weights of a block.
struct Part<P> {
    /// The part without its payload.
    rest: P,
    /// The payload without its dense values.
    payload: Option<wire::Payload>,
    /// The dense values of the payload.
    dense: Option<Bytes>,
}

impl<P: Message> Part<P> {
    fn new(mut payload: Option<wire::Payload>, rest: P) -> Self {
        let mut dense = None;
        if let Some(payload) = &mut payload {
            match payload.values.take() {
                Some(Values::Dense(values)) => dense = Some(values),
                others => payload.values = others,
            }
        }
        Self {
            rest,
            payload,
            dense,
        }
    }

    /// Returns the length of the payload; `None` if there is no payload.
    fn payload_length(&self) -> Option<usize> {
        let dense = self.dense.as_ref();
        let dense = dense.map_or(0, |values| field_length(DENSE, values.len()));
        Some(self.payload.as_ref()?.encoded_len() + dense)
    }

    /// Returns the length of the part, in which the payload has the field number `tag`.
    fn length(&self, tag: u32) -> usize {
        let payload = self.payload_length();
        self.rest.encoded_len() + payload.map_or(0, |length| field_length(tag, length))
    }

    fn write(self, tag: u32, pieces: &mut Pieces) {
        let length = self.payload_length();
        self.rest.encode_raw(&mut pieces.open);
        if let Some((payload, length)) = self.payload.zip(length) {
            begin_field(tag, length, &mut pieces.open);
            payload.encode_raw(&mut pieces.open);
        }
        if let Some(values) = self.dense {
            begin_field(DENSE, values.len(), &mut pieces.open);
            pieces.share(values);
        }
    }
}

/// Builds an [`Encoded`] from bytes to be copied and payloads to be shared.
#[derive(Default)]
struct Pieces {
    done: VecDeque<Bytes>,
    /// The bytes copied since the last shared payload.
    open: BytesMut,
}

impl Pieces {
    /// Adds a payload, and shares its memory if it is large.
    fn share(&mut self, payload: Bytes) {
        if payload.len() < SMALL_BYTES {
            return self.open.put_slice(&payload);
        }
        self.done.push_back(self.open.split().freeze());
        self.done.push_back(payload);
    }

    fn finish(mut self) -> Encoded {
        if !self.open.is_empty() {
            self.done.push_back(self.open.freeze());
        }
        Encoded(self.done)
    }
}

/// Writes the prefix of a message of this length.
fn begin_message(length: usize, buffer: &mut BytesMut) {
    const NOT_COMPRESSED: u8 = 0;
    buffer.put_u8(NOT_COMPRESSED);
    // A message has 2 MiB at the most.
    buffer.put_u32(length as u32);
}

/// Writes the key and the length of a field. Its content follows.
fn begin_field(tag: u32, length: usize, buffer: &mut BytesMut) {
    encode_key(tag, WireType::LengthDelimited, buffer);
    encode_varint(length as u64, buffer);
}

/// Returns the length of a field with content of this length.
fn field_length(tag: u32, content: usize) -> usize {
    key_len(tag) + encoded_len_varint(content as u64) + content
}
