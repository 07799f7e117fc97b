//! gRPC messages on an HTTP/2 body, without copies of their payloads.
//!
//! The bytes on the wire are those of any gRPC library. A library gathers each message in a buffer of
//! its own before it decodes or sends it, which costs a pass over every block. This module decodes a message
//! in the memory in which it arrived, and sends it in pieces that share the blocks' own memory.
//!
//! - `encoded`: a message in the form in which it is sent
//! - `outgoing`: the body on which messages are sent
//! - `incoming`: the messages that arrive on a body
//! - `bounds`: bounds on a message's size in memory
//! - `method`: methods with such streams in both directions
//!
//! # The bytes of a message
//!
//! A message is a prefix of five bytes and a protobuf message. A field of a protobuf message is a key, a length if the
//! key says so, and a content. A key is `8 * number + type`; type 0 is a number, type 2 is a length with that many
//! bytes. The push of one gradient, for block 0 of variable 3, with the values 1.0 and -2.0:
//!
//! ```text
//! 00                            the prefix: the message is not compressed,
//! 00 00 00 18                   and has 24 bytes
//! 1a 16                         ClientMessage.push: field 3, 22 bytes
//!   12 14                       Push.gradients: field 2, 20 bytes
//!     0a 02                     Gradient.block: field 1, 2 bytes
//!       08 03                   BlockId.variable: field 1, 3; its index is 0, which is left out
//!     10 07                     Gradient.based_on_version: field 2, 7
//!     1a 0c                     Gradient.payload: field 3, 12 bytes
//!       08 01                   Payload.dtype: field 1, DTYPE_F32
//!       12 08                   Payload.dense: field 2, 8 bytes
//!         00 00 80 3f           1.0
//!         00 00 00 c0           -2.0
//! ```
//!
//! Payloads of 64 KiB and more are pieces of their own. A push of two such gradients is sent in four pieces, of which
//! the second and the fourth are the gradients' own memory:
//!
//! ```text
//! | prefix, keys and lengths | values | keys and lengths | values |
//! ```
//!
//! Each piece becomes a data frame of HTTP/2. The server reads such a frame into one buffer, and the decoded payload is
//! a view of it.

mod bounds;
mod encoded;
mod incoming;
mod method;
mod outgoing;

pub use bounds::Bounds;
pub use encoded::Encoded;
pub use incoming::Incoming;
pub use method::{admit, call, response};
pub use outgoing::{BodyKind, Sender, body};

/// The path of the method `Session` of the service `ParameterServer`.
pub const SESSION_PATH: &str = "/flambeau.v1.ParameterServer/Session";

/// The path of the method `Link` of the service `Collective`.
pub const LINK_PATH: &str = "/flambeau.v1.Collective/Link";

/// The content type of gRPC's requests and responses.
const CONTENT_TYPE: &str = "application/grpc";

/// The size of the prefix of each message: a flag for compression, and the length.
const PREFIX_BYTES: usize = 5;

/// The size below which pieces are copied together: a frame of its own would cost more.
const SMALL_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
