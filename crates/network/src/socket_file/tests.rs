use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use tokio::io::{AsyncReadExt, AsyncWriteExt, split};
use tokio::net::UnixListener;
use tokio::time::timeout;

use super::memory::RING_BYTES;
use super::*;

/// The bytes of the memory of a connection.
const MEMORY_BYTES: u64 = 2 * (4096 + RING_BYTES as u64);

/// Returns a socket file, and the listener there.
fn listen() -> (tempfile::TempDir, PathBuf, UnixListener) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    (dir, path, listener)
}

/// Returns both ends of a connection.
async fn pair() -> (SocketFileStream, SocketFileStream) {
    let (_dir, path, listener) = listen();
    let caller = SocketFileStream::connect(&path).await.unwrap();
    assert!(matches!(caller.state, State::Shared(_)));
    let (callee, _) = listener.accept().await.unwrap();
    (caller, SocketFileStream::accepted(callee))
}

/// Returns bytes that differ from those around them.
fn bytes(count: usize, seed: usize) -> Vec<u8> {
    (0..count)
        .map(|n| (((n + seed) * 2_654_435_761) >> 7) as u8)
        .collect()
}

/// Writes bytes in pieces of changing sizes.
async fn write(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8], sizes: &[usize]) {
    let mut rest = bytes;
    for size in sizes.iter().cycle() {
        let (now, later) = rest.split_at(rest.len().min(*size));
        stream.write_all(now).await.unwrap();
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
}

/// Reads so many bytes in pieces of changing sizes.
async fn read(stream: &mut (impl AsyncRead + Unpin), count: usize, sizes: &[usize]) -> Vec<u8> {
    let mut all = Vec::with_capacity(count);
    for size in sizes.iter().cycle() {
        let mut piece = vec![0; (*size).min(count - all.len())];
        let read = stream.read(&mut piece).await.unwrap();
        all.extend_from_slice(&piece[..read]);
        if all.len() == count || read == 0 {
            break;
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn bytes_arrive_unchanged_in_both_directions_at_once() {
    const COUNT: usize = 40 * RING_BYTES + 12_345;
    let (caller, callee) = pair().await;
    // Readers and writers of a side are different tasks, which must not take each other's wake-ups.
    let tasks = [(caller, 1, 2), (callee, 2, 1)].map(|(stream, own, theirs)| {
        let (mut reader, mut writer) = split(stream);
        let write = tokio::spawn(async move {
            write(
                &mut writer,
                &bytes(COUNT, own),
                &[70_001, 9, 2 * RING_BYTES, 1000],
            )
            .await;
            writer
        });
        let read = tokio::spawn(async move {
            let arrived = read(&mut reader, COUNT, &[5, 300_000, 4096, RING_BYTES]).await;
            assert!(arrived == bytes(COUNT, theirs));
            reader
        });
        async move { (write.await.unwrap(), read.await.unwrap()) }
    });
    let [caller, callee] = tasks;
    let ended = timeout(Duration::from_secs(60), async {
        tokio::join!(caller, callee)
    });
    ended.await.expect("no wake-up is lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wake_up_is_lost() {
    const ROUNDS: usize = 3000;
    let (mut caller, mut callee) = pair().await;
    let burst = |round: usize| round * 7 % 50 + 1;
    let answering = tokio::spawn(async move {
        for round in 0..ROUNDS {
            for _ in 0..burst(round) {
                callee.read_u8().await.unwrap();
            }
            // Full rings make the writer wait.
            callee.write_all(&[1; 3 * RING_BYTES / 2]).await.unwrap();
        }
        callee
    });
    let asking = async {
        let mut answer = vec![0; 1 << 14];
        for round in 0..ROUNDS {
            for _ in 0..burst(round) {
                caller.write_u8(7).await.unwrap();
            }
            let mut rest = 3 * RING_BYTES / 2;
            while rest > 0 {
                let most = rest.min(answer.len());
                rest -= caller.read(&mut answer[..most]).await.unwrap();
            }
        }
    };
    timeout(Duration::from_secs(60), asking)
        .await
        .expect("no wake-up is lost");
    answering.await.unwrap();
}

#[tokio::test]
async fn what_was_written_before_the_end_is_read() {
    for is_shut_down in [true, false] {
        let (mut caller, mut callee) = pair().await;
        caller.write_all(&bytes(100_000, 0)).await.unwrap();
        if is_shut_down {
            caller.shutdown().await.unwrap();
            // The other direction is still open.
            callee.write_all(b"late").await.unwrap();
            let mut late = [0; 4];
            caller.read_exact(&mut late).await.unwrap();
            assert_eq!(&late, b"late");
        }
        drop(caller);
        let mut arrived = Vec::new();
        callee.read_to_end(&mut arrived).await.unwrap();
        assert!(arrived == bytes(100_000, 0));
    }
}

#[tokio::test]
async fn a_side_that_waits_notices_the_end() {
    let (mut caller, mut callee) = pair().await;
    callee.write_all(b"hello").await.unwrap();
    let full = bytes(2 * RING_BYTES, 0);
    let writing = callee.write_all(&full);
    let (written, ()) = tokio::join!(writing, async {
        caller.read_exact(&mut [0; 5]).await.unwrap();
        drop(caller);
    });
    assert_eq!(written.unwrap_err().kind(), io::ErrorKind::BrokenPipe);

    let (mut caller, callee) = pair().await;
    let (read, ()) = tokio::join!(caller.read_u8(), async { drop(callee) });
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[tokio::test]
async fn the_callee_may_write_first() {
    let (_dir, path, listener) = listen();
    let mut plain = UnixStream::connect(&path).await.unwrap();
    let mut callee = SocketFileStream::accepted(listener.accept().await.unwrap().0);
    let first = callee.write_all(b"first");
    let (written, ()) = tokio::join!(first, async {
        // It does not know yet which way its bytes take.
        let early = timeout(Duration::from_millis(50), plain.read_u8()).await;
        assert!(early.is_err());
        plain.write_all(b"?").await.unwrap();
    });
    written.unwrap();
    let mut first = [0; 5];
    plain.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"first");
}

#[tokio::test]
async fn bytes_of_a_caller_without_memory_go_through_the_socket() {
    for first in [1, 3, OFFER.len(), 5000] {
        let (_dir, path, listener) = listen();
        let mut plain = UnixStream::connect(&path).await.unwrap();
        let mut callee = SocketFileStream::accepted(listener.accept().await.unwrap().0);
        plain.write_all(&bytes(first, 7)).await.unwrap();
        assert!(read(&mut callee, first, &[1, 2, 7]).await == bytes(first, 7));
        plain.write_all(b"more").await.unwrap();
        assert_eq!(read(&mut callee, 4, &[4]).await, b"more");
        callee.write_all(b"answer").await.unwrap();
        assert_eq!(read(&mut plain, 6, &[6]).await, b"answer");
        assert!(matches!(callee.state, State::Socket(_)));
        drop(plain);
        assert_eq!(callee.read(&mut [0; 9]).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn memory_that_does_not_arrive_is_an_error() {
    let (_dir, path, listener) = listen();
    let mut plain = UnixStream::connect(&path).await.unwrap();
    let mut callee = SocketFileStream::accepted(listener.accept().await.unwrap().0);
    plain.write_all(&OFFER).await.unwrap();
    let error = callee.read(&mut [0; 9]).await.unwrap_err();
    assert!(error.to_string().contains("did not arrive"), "{error}");
}

#[tokio::test]
async fn a_flood_of_wake_ups_ends_the_connection() {
    for is_reading in [true, false] {
        let (mut caller, mut callee) = pair().await;
        callee.write_all(&[7; RING_BYTES]).await.unwrap();
        caller.socket.write_all(&[0; 10_000]).await.unwrap();
        let error = match is_reading {
            true => callee.read(&mut [0; 9]).await.unwrap_err(),
            false => callee.write(&[7]).await.unwrap_err(),
        };
        assert!(error.to_string().contains("shares memory"), "{error}");
    }
}

#[tokio::test]
async fn memory_of_another_kind_is_refused() {
    let created = |bytes: u64, seals: SealFlags| {
        let file = File::from(memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(bytes).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    };
    let allocated = |bytes: u64, seals: SealFlags| {
        let mut file = created(bytes, SealFlags::empty());
        file.write_all(&vec![0; bytes as usize]).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    };
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    let on_disk = tempfile::tempfile().unwrap();
    on_disk.set_len(MEMORY_BYTES).unwrap();
    let files = [
        allocated(MEMORY_BYTES, SealFlags::GROW),
        allocated(MEMORY_BYTES, SealFlags::SHRINK),
        allocated(MEMORY_BYTES - 1, sealed),
        allocated(MEMORY_BYTES + 4096, sealed),
        created(MEMORY_BYTES, sealed),
        on_disk,
    ];
    for file in files {
        let (_dir, path, listener) = listen();
        let plain = UnixStream::connect(&path).await.unwrap();
        let mut callee = SocketFileStream::accepted(listener.accept().await.unwrap().0);
        pass(&plain, &file).await.unwrap();
        let error = callee.read(&mut [0; 9]).await.unwrap_err();
        assert!(error.to_string().contains("unknown kind"), "{error}");
    }
    // Memory of the right kind is taken.
    let (_dir, path, listener) = listen();
    let plain = UnixStream::connect(&path).await.unwrap();
    let mut callee = SocketFileStream::accepted(listener.accept().await.unwrap().0);
    pass(&plain, &allocated(MEMORY_BYTES, sealed))
        .await
        .unwrap();
    callee.write_all(b"there").await.unwrap();
    assert!(matches!(callee.state, State::Shared(_)));
}

#[tokio::test]
async fn a_reader_that_waits_is_woken_once() {
    let (mut caller, mut callee) = pair().await;
    let waiting = timeout(Duration::from_millis(20), callee.read_u8()).await;
    assert!(waiting.is_err());
    for byte in 0..100 {
        caller.write_u8(byte).await.unwrap();
    }
    callee.socket.readable().await.unwrap();
    assert_eq!(callee.socket.try_read(&mut [0; 64]).unwrap(), 1);
    let arrived = read(&mut callee, 100, &[100]).await;
    assert!(arrived.into_iter().eq(0..100));
}
