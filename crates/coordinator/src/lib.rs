//! Membership and leases, shard map, data splits, job state.
