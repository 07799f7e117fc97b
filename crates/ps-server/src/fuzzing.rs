//! The driver of the fuzz target `messages`: workers send messages to a shard, while a coordinator commits steps,
//! moves the shard and takes it back to a checkpoint.
//!
//! - `events`: the input
//! - `map`: the shard map
//! - `desk`: a shard without sessions, and its invariants

mod desk;
mod events;
mod map;

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use arbitrary::Unstructured;
use bytes::Bytes;
use fuzz_input::events;
use http_body::Frame;
use http_body_util::StreamBody;
use network::stream::Incoming;
use shared_proto::wire::ClientMessage;
use tonic::body::Body;

use crate::serving::limits;
use desk::Desk;

/// The most events of an input.
const MOST_EVENTS: usize = 200;

/// Plays the events that the bytes encode, then handles the same bytes as the body of a session.
pub fn messages(bytes: &[u8]) {
    let mut input = Unstructured::new(bytes);
    if let Ok(setting) = input.arbitrary() {
        let mut desk = Desk::new(&setting);
        for event in events(&mut input, MOST_EVENTS) {
            desk.play(event);
        }
    }
    session(bytes);
}

/// Handles bytes as the body of an HTTP/2 request, cut into frames. The first byte determines the size of the frames.
/// Returns the number of messages that the shard has taken.
fn session(bytes: &[u8]) -> usize {
    let cut = bytes.first().map_or(1, |first| usize::from(*first) + 1);
    let frames: Vec<_> = bytes
        .chunks(cut)
        .map(|chunk| Ok::<_, tonic::Status>(Frame::data(Bytes::copy_from_slice(chunk))))
        .collect();
    let mut desk = Desk::new(&events::Setting::default());
    let mut incoming =
        Incoming::<ClientMessage>::new(Body::new(StreamBody::new(tokio_stream::iter(frames))));
    incoming.bound(limits::of_messages(desk.store().as_ref()));
    let mut all = pin!(async {
        let mut taken = 0;
        while let Ok(Some(message)) = incoming.message().await {
            taken += usize::from(desk.offer(message, true));
        }
        taken
    });
    // All bytes are there, so it waits for nothing.
    loop {
        if let Poll::Ready(taken) = all.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return taken;
        }
    }
}

#[cfg(test)]
mod tests {
    use fuzz_input::replay;

    #[test]
    fn the_corpus_does_no_harm() {
        let mut taken = std::cell::Cell::new(0);
        replay("messages", |bytes| {
            super::messages(bytes);
            taken.set(taken.get() + super::session(bytes));
        });
        assert!(
            *taken.get_mut() > 3,
            "the corpus has no message that is good"
        );
    }
}
