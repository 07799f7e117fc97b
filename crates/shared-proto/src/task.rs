//! Futures behind pointers, so that each is compiled once.
//!
//! Rust compiles the body of an `async fn` in each crate that polls its future, and tokio's code for tasks anew for each type of
//! future. With hyper and tonic inside, this was a third of the build. A public `async fn` that other crates
//! call therefore returns a boxed future (`#[boxed]`), and tasks are spawned and runtimes are driven by the functions of this module.
//! docs/design/build-time.md has the figures.

use std::pin::{Pin, pin};

use futures_util::future::BoxFuture;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Makes an `async fn` return a boxed future. This costs an allocation and an indirect call, and the crates that poll
/// the future do not compile it again.
pub use async_recursion::async_recursion as boxed;

/// Spawns a task on the current runtime.
///
/// # Panics
/// Outside of a runtime.
pub fn spawn(task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    spawn_boxed(Box::pin(task))
}

/// Spawns a task on the current runtime. The task ends when `stop` is cancelled.
///
/// # Panics
/// Outside of a runtime.
pub fn spawn_until(
    stop: CancellationToken,
    task: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<()> {
    let task: BoxFuture<'static, ()> = Box::pin(task);
    spawn_boxed(Box::pin(async move {
        stop.run_until_cancelled(task).await;
    }))
}

fn spawn_boxed(task: BoxFuture<'static, ()>) -> JoinHandle<()> {
    tokio::spawn(task)
}

/// Spawns a task with a result on the current runtime.
///
/// # Panics
/// Outside of a runtime.
pub fn spawn_with_result<T: Send + 'static>(
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let task: BoxFuture<'static, T> = Box::pin(task);
    tokio::spawn(task)
}

/// Runs a future to its end on a runtime, on this thread.
pub fn block_on<T>(runtime: &Runtime, future: impl Future<Output = T>) -> T {
    let mut result = None;
    drive(runtime, pin!(async { result = Some(future.await) }));
    match result {
        Some(result) => result,
        None => unreachable!("the future has ended"),
    }
}

fn drive(runtime: &Runtime, future: Pin<&mut dyn Future<Output = ()>>) {
    runtime.block_on(future);
}
