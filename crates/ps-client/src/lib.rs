//! Splits variables by shard; pulls, pushes, sends again.
