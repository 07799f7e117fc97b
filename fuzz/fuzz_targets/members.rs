//! Bytes that members read from servers and from the coordinator: taken or refused.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ps_client::fuzzing::members(bytes));
