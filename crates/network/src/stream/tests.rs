use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame};
use proptest::prelude::*;
use prost::Message;
use tokio::sync::mpsc;
use tonic::{Code, Status};

use super::incoming::POLLS;
use super::*;
use shared_proto::payload;
use shared_proto::wire::{self, client_message, payload::Values, server_message};

fn push(sizes: &[usize]) -> wire::Push {
    let gradient = |(index, size): (usize, &usize)| wire::Gradient {
        block: Some(wire::BlockId {
            variable: 3,
            index: index as u32,
        }),
        based_on_version: 1 << index,
        payload: (index != 3)
            .then(|| payload::dense(payload::to_bytes(&vec![index as f32; *size]))),
    };
    wire::Push {
        origin: Some(wire::Origin {
            job: "a job".to_owned(),
            sequence: 300,
            ..wire::Origin::default()
        }),
        gradients: sizes.iter().enumerate().map(gradient).collect(),
    }
}

fn weights(sizes: &[usize]) -> wire::Weights {
    let pushed = push(sizes).gradients.into_iter();
    wire::Weights {
        request: 7,
        blocks: pushed
            .map(|gradient| wire::BlockWeights {
                version: Some(wire::BlockVersion {
                    block: gradient.block,
                    epoch: 1,
                    version: gradient.based_on_version,
                }),
                payload: gradient.payload,
            })
            .collect(),
        unchanged: vec![wire::BlockId::default()],
        min_clock: 9,
        waited: 0.5,
        ..wire::Weights::default()
    }
}

/// A body made of these pieces.
struct Chunks(VecDeque<Bytes>);

impl Body for Chunks {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(self.0.pop_front().map(|chunk| Ok(Frame::data(chunk))))
    }
}

/// Reads these bytes, cut into chunks of this size. Returns the messages and the end.
fn read<M: Message + Default>(bytes: &Bytes, chunk: usize) -> (Vec<M>, Result<(), Status>) {
    let chunks = bytes.chunks(chunk.max(1)).map(Bytes::copy_from_slice);
    let mut incoming = Incoming::new(tonic::body::Body::new(Chunks(chunks.collect())));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut messages = Vec::new();
        loop {
            match incoming.message().await {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => return (messages, Ok(())),
                Err(status) => return (messages, Err(status)),
            }
        }
    })
}

/// Returns the data frames in which messages are sent, and the trailers.
fn frames(kind: BodyKind, messages: Vec<Encoded>) -> (Vec<Bytes>, Option<HeaderMap>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (sender, mut body) = body(messages.len().max(1), kind);
        for message in messages {
            sender.send(Ok(message)).await.unwrap();
        }
        drop(sender);
        let (mut frames, mut trailers) = (Vec::new(), None);
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            match frame.unwrap().into_data() {
                Ok(data) => frames.push(data),
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
        }
        (frames, trailers)
    })
}

/// Returns the bytes in which messages are sent.
fn joined(messages: impl IntoIterator<Item = Encoded>) -> Bytes {
    let (frames, trailers) = frames(BodyKind::Request, messages.into_iter().collect());
    assert!(trailers.is_none());
    frames.concat().into()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_is_sent_arrives_however_it_is_cut(
        sizes in prop::collection::vec(prop_oneof![0usize..40, 15_000usize..20_000], 0..5),
        chunk in 1usize..100_000,
    ) {
        let (push, weights) = (push(&sizes), weights(&sizes));
        let up = [client_message::Kind::Push(push), client_message::Kind::Hello(wire::Hello::default())];
        let sent = joined(up.clone().map(Encoded::from));
        let (read_up, end) = read::<wire::ClientMessage>(&sent, chunk);
        prop_assert!(end.is_ok());
        prop_assert_eq!(read_up, up.map(|kind| wire::ClientMessage { kind: Some(kind) }));

        let down = [server_message::Kind::Weights(weights), server_message::Kind::Welcome(wire::Welcome::default())];
        let sent = joined(down.clone().map(Encoded::from));
        let (read_down, end) = read::<wire::ServerMessage>(&sent, chunk);
        prop_assert!(end.is_ok());
        prop_assert_eq!(read_down, down.map(|kind| wire::ServerMessage { kind: Some(kind) }));
    }

    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes: Vec<u8>, chunk in 1usize..64) {
        let _ = read::<wire::ClientMessage>(&bytes.into(), chunk);
    }
}

#[test]
fn the_documented_bytes_are_those_of_the_message() {
    let text = include_str!("../stream.rs");
    let example = text.split("```text").nth(1).unwrap();
    let example = example.split("```").next().unwrap();
    let bytes_of = |line: &'static str| {
        let words = line.trim_start_matches("//!").split_whitespace();
        words.map_while(|word| match word.len() {
            2 => u8::from_str_radix(word, 16).ok(),
            _ => None,
        })
    };
    let documented: Vec<u8> = example.lines().flat_map(bytes_of).collect();
    let push = client_message::Kind::Push(wire::Push {
        origin: None,
        gradients: vec![wire::Gradient {
            block: Some(wire::BlockId {
                variable: 3,
                index: 0,
            }),
            based_on_version: 7,
            payload: Some(payload::dense(payload::to_bytes(&[1.0, -2.0]))),
        }],
    });
    assert_eq!(joined([Encoded::from(push.clone())]), documented);
    let (read, end) = read::<wire::ClientMessage>(&documented.into(), 1);
    assert!(end.is_ok());
    assert_eq!(read, [wire::ClientMessage { kind: Some(push) }]);
}

#[test]
fn large_payloads_are_pieces_of_their_own() {
    let push = client_message::Kind::Push(push(&[20_000, 20_000]));
    let pieces = Encoded::from(push).into_pieces();
    let sizes: Vec<usize> = pieces.iter().map(Bytes::len).collect();
    assert!(
        matches!(sizes[..], [_, 80_000, _, 80_000]),
        "the documentation draws four pieces: {sizes:?}"
    );
}

#[test]
fn a_push_is_what_any_library_would_send() {
    let push = client_message::Kind::Push(push(&[5, 20_000, 7, 100_000]));
    let message = wire::ClientMessage {
        kind: Some(push.clone()),
    };
    let sent = joined([Encoded::from(push)]);
    assert_eq!(sent[PREFIX_BYTES..], message.encode_to_vec());
}

#[test]
fn small_messages_share_a_frame_and_take_no_more_room_than_they_need() {
    let welcome = || Encoded::from(server_message::Kind::Welcome(wire::Welcome::default()));
    let large = Encoded::from(server_message::Kind::Weights(weights(&[100_000])));
    let (data, trailers) = frames(
        BodyKind::Response,
        vec![welcome(), welcome(), large, welcome()],
    );
    let sizes: Vec<usize> = data.iter().map(Bytes::len).collect();
    assert!(matches!(sizes[..], [_, 400_000, _]), "{sizes:?}");
    let first = data[0].clone();
    drop(data);
    assert!(
        first
            .try_into_mut()
            .is_ok_and(|first| first.capacity() < 1024)
    );
    let status = Status::from_header_map(&trailers.unwrap()).unwrap();
    assert_eq!(status.code(), Code::Ok);
}

#[test]
fn large_payloads_are_not_copied() {
    let push = push(&[100_000]);
    let payload = push.gradients[0].payload.clone().unwrap();
    let Some(Values::Dense(values)) = payload.values else {
        panic!("no values")
    };
    let pieces = Encoded::from(client_message::Kind::Push(push)).into_pieces();
    assert!(pieces.iter().any(|p| p.as_ptr() == values.as_ptr()));

    // A message that comes as it was sent is not copied on the way in either.
    let mut incoming = Incoming::<wire::ClientMessage>::new(tonic::body::Body::new(Chunks(pieces)));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let message = runtime.block_on(incoming.message()).unwrap().unwrap();
    let Some(client_message::Kind::Push(mut push)) = message.kind else {
        panic!("no push")
    };
    let payload = push.gradients.remove(0).payload.unwrap();
    let Some(Values::Dense(read)) = payload.values else {
        panic!("no values")
    };
    assert_eq!(read.as_ptr(), values.as_ptr());
}

#[test]
fn what_is_no_message_is_named() {
    let of = |bytes: &[u8]| {
        let (messages, end) = read::<wire::ClientMessage>(&Bytes::copy_from_slice(bytes), 100);
        assert!(messages.is_empty());
        end.unwrap_err()
    };
    assert_eq!(of(&[0, 255, 255, 255, 255]).code(), Code::OutOfRange);
    assert_eq!(of(&[1, 0, 0, 0, 0]).code(), Code::Internal);
    assert_eq!(
        of(&[0, 0, 0]).message(),
        "the stream ended within a message"
    );
    assert_eq!(of(&[0, 0, 0, 0, 2, 7]).code(), Code::Internal);
    assert_eq!(of(&[0, 0, 0, 0, 2, 7, 7]).code(), Code::Internal);
}

#[test]
fn a_body_ends_with_its_status() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (sender, body) = body(1, BodyKind::Response);
        let hello = server_message::Kind::Welcome(wire::Welcome::default());
        sender.send(Ok(hello.into())).await.unwrap();
        let mut incoming = Incoming::<wire::ServerMessage>::new(body);
        assert!(incoming.message().await.unwrap().is_some());
        sender.send(Err(Status::aborted("over"))).await.unwrap();
        let end = incoming.message().await.unwrap_err();
        assert_eq!((end.code(), end.message()), (Code::Aborted, "over"));
    });
}

/// A body that counts the times that it is polled for a frame.
struct Asked {
    frames: mpsc::Receiver<Bytes>,
    times: Arc<AtomicUsize>,
}

impl Body for Asked {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.times.fetch_add(1, Ordering::Relaxed);
        let frame = ready!(self.frames.poll_recv(context));
        Poll::Ready(frame.map(|data| Ok(Frame::data(data))))
    }
}

/// Nothing comes, and each poll takes longer than on a core without other threads.
#[tokio::test]
async fn a_reader_sleeps_at_once_where_another_thread_wants_the_core() {
    struct Slow(Arc<AtomicUsize>);

    impl Body for Slow {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_micros(100));
            Poll::Pending
        }
    }

    let times = Arc::<AtomicUsize>::default();
    let body = tonic::body::Body::new(Slow(Arc::clone(&times)));
    let mut incoming = Incoming::<wire::ServerMessage>::new(body);
    let given_up = tokio::time::timeout(Duration::from_millis(1), incoming.message()).await;
    assert!(given_up.is_err());
    let polls = times.load(Ordering::Relaxed);
    assert!(polls < POLLS / 10, "{polls}");
}

#[tokio::test(start_paused = true)]
async fn a_reader_looks_again_and_again_only_where_waits_are_short() {
    const LONG: Duration = Duration::from_millis(1);
    // One poll finds nothing, one precedes the sleep, and one follows it.
    const SLEEPS_AT_ONCE: usize = 3;
    const SLEEPS_IN_THE_END: usize = POLLS + 2;

    let times = Arc::<AtomicUsize>::default();
    let (sender, frames) = mpsc::channel(1);
    let body = Asked {
        frames,
        times: Arc::clone(&times),
    };
    let mut incoming = Incoming::<wire::ServerMessage>::new(tonic::body::Body::new(body));
    let message = Encoded::from(server_message::Kind::Welcome(wire::Welcome::default()));
    let message = message.into_pieces();
    // Returns the number of polls until the next message, which comes after this time.
    let asked = async |incoming: &mut Incoming<wire::ServerMessage>, wait: Duration| {
        let (sender, message) = (sender.clone(), message[0].clone());
        tokio::spawn(async move {
            for _ in 0..SLEEPS_AT_ONCE {
                tokio::task::yield_now().await;
            }
            tokio::time::sleep(wait).await;
            sender.send(message).await.unwrap();
        });
        let before = times.load(Ordering::Relaxed);
        incoming.message().await.unwrap().unwrap();
        times.load(Ordering::Relaxed) - before
    };

    assert_eq!(asked(&mut incoming, LONG).await, SLEEPS_IN_THE_END);
    assert_eq!(asked(&mut incoming, LONG).await, SLEEPS_AT_ONCE);
    assert_eq!(asked(&mut incoming, Duration::ZERO).await, SLEEPS_AT_ONCE);
    assert!(asked(&mut incoming, Duration::ZERO).await < POLLS);
    assert_eq!(asked(&mut incoming, LONG).await, SLEEPS_IN_THE_END);
    // A wait that is given up was long.
    assert_eq!(asked(&mut incoming, Duration::ZERO).await, SLEEPS_AT_ONCE);
    let given_up = tokio::time::timeout(LONG, incoming.message()).await;
    assert!(given_up.is_err());
    assert_eq!(asked(&mut incoming, LONG).await, SLEEPS_AT_ONCE);
}
