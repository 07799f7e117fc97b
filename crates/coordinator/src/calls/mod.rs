//! Calls of members and users.
//!
//! - `service`: the gRPC service; asks the cluster
//! - `at_work`: the job that calls are about, and who may make them; `slot`: its place; `jobs`: calls about the jobs of a long-lived cluster
//! - `steps`: finished steps, of which there are most
//! - `messages`: messages of the service, read and written
//! - `origin`: the origin that a call claims to have
//! - `callers`: the connections of members; `limits`: limits of names in calls

pub(crate) mod at_work;
pub(crate) mod callers;
pub(crate) mod jobs;
pub(crate) mod limits;
pub(crate) mod messages;
mod origin;
pub(crate) mod service;
pub(crate) mod slot;
mod steps;
