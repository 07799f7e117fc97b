//! Calls of members and users.
//!
//! - `service`: the gRPC service; asks the cluster
//! - `current_job`: the current job and the checks of its callers; `slot`: holds the current job
//! - `jobs`: calls about the jobs of a long-lived cluster
//! - `steps`: the most frequent calls: work is leased, finished steps are reported
//! - `origin`: the origin that a call claims to have
//! - `callers`: the connections of members
//! - `waiting`: the members that wait for the next job

pub(crate) mod callers;
pub(crate) mod current_job;
pub(crate) mod jobs;
mod origin;
pub(crate) mod service;
pub(crate) mod slot;
mod steps;
pub(crate) mod waiting;
