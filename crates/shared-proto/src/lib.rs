//! What all roles of Flambeau speak: the floor on which everything stands.
//!
//! - [`wire`]: messages and services made from `proto/`, as generated
//! - [`ids`]: who and when: tasks, clocks, versions
//! - [`blocks`]: how variables are cut into blocks, and the shard map
//! - [`payload`]: tensors as bytes
//! - [`number`]: floating-point numbers in JSON
//! - [`kernel`]: instructions chosen for the CPU
//! - [`staleness`]: how far a worker may lead
//! - [`job`]: what is trained, one TOML file
//! - [`refusal`]: why a message is turned away, on the wire and off it
//! - [`view`]: what the coordinator has decided
//! - [`connections`]: how many a port takes, of whom, and for how long
//! - [`security`]: certificates and the job's token
//! - [`stream`]: messages on an HTTP/2 body, without copies of what they carry
//! - [`transport`]: how both ends set up gRPC

pub mod blocks;
pub mod connections;
pub mod ids;
pub mod job;
pub mod kernel;
pub mod number;
pub mod payload;
pub mod receipt;
pub mod refusal;
pub mod security;
pub mod staleness;
pub mod stream;
pub mod transport;
pub mod view;

/// Messages and services made from `proto/flambeau/v1`, where each field is explained.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod wire {
    tonic::include_proto!("flambeau.v1");
}
