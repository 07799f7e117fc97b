//! Messages to a shard: taken or refused.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ps_server::fuzzing::messages(bytes));
