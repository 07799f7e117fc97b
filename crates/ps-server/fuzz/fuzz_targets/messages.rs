//! Any bytes as a message, and as the body of a session: taken or refused, never a panic, and what is
//! refused changes nothing. `cargo +nightly fuzz run messages` in `crates/ps-server`.

#![no_main]

use bytes::Bytes;
use http_body::Frame;
use http_body_util::StreamBody;
use libfuzzer_sys::fuzz_target;
use prost::Message;
use ps_server::desk::Desk;
use shared_proto::job::Mode;
use shared_proto::stream::Incoming;
use shared_proto::wire::ClientMessage;
use tonic::body::Body;

fn take(desk: &Desk, message: ClientMessage) {
    let before = desk.state();
    if let Err(refusal) = desk.take(message) {
        assert_eq!(desk.state(), before, "{refusal}");
        assert!(!refusal.message.is_empty());
    }
    let finite = |bits: &u32| f32::from_bits(*bits).is_finite();
    // Finite gradients may add up to infinity; one push cannot.
    assert!(desk.state().iter().all(|(version, weights)| *version > 1 || weights.iter().all(finite)));
}

fuzz_target!(|bytes: &[u8]| {
    for mode in [Mode::Async, Mode::Sync] {
        if let Ok(message) = ClientMessage::decode(bytes) {
            let desk = Desk::new(mode);
            take(&desk, message.clone());
            take(&desk, message);
        }
    }
    // The same bytes as they come over HTTP/2, cut into frames.
    let cut = bytes.first().map_or(1, |first| usize::from(*first) + 1);
    let frames: Vec<_> = bytes
        .chunks(cut)
        .map(|chunk| Ok::<_, tonic::Status>(Frame::data(Bytes::copy_from_slice(chunk))))
        .collect();
    let body = Body::new(StreamBody::new(tokio_stream::iter(frames)));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let desk = Desk::default();
        let mut incoming = Incoming::<ClientMessage>::new(body);
        while let Ok(Some(message)) = incoming.message().await {
            take(&desk, message);
        }
    });
});
