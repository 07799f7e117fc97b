//! The protocol and the types that all roles of Flambeau share: the lowest floor.
//!
//! - [`wire`]: messages and services made from `proto/`, as generated
//! - [`protocol`]: the version of the protocol, sizes of messages, addresses
//! - [`ids`]: tasks, clocks, versions
//! - [`blocks`]: the blocks of variables, and the shard map
//! - [`payload`]: tensors as bytes; [`values`]: the values of a block, elements or rows
//! - [`hash`]: hashes that are the same on all machines
//! - [`step`]: the values that a training step wants, and the gradients that it makes
//! - [`number`]: floating-point numbers in JSON
//! - [`kernel`]: instructions chosen for the CPU
//! - [`quiet`]: limits on log messages that callers can cause at will
//! - [`staleness`]: the bound on a worker's lead
//! - [`job`]: the job, one TOML file
//! - [`mod@task`]: tasks and boxed futures, which are compiled once
//! - [`table`]: rows of embedding tables
//! - [`mod@planted`]: faults that tests must find
//! - [`refusal`]: refusals of messages and their reasons
//! - [`receipt`]: proofs that a shard holds a worker's gradient
//! - [`view`]: the coordinator's decisions

pub mod blocks;
mod corrected_steps;
pub mod hash;
pub mod ids;
pub mod job;
pub mod kernel;
mod kind;
pub mod number;
pub mod payload;
pub mod planted;
pub mod protocol;
pub mod quiet;
pub mod receipt;
pub mod refusal;
pub mod staleness;
pub mod step;
pub mod table;
pub mod task;
pub mod values;
pub mod view;

/// Messages and services made from `proto/flambeau/v1`, where each field is explained.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod wire {
    tonic::include_proto!("flambeau.v1");
}
