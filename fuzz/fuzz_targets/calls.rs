//! Calls to the coordinator: taken or refused.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cluster::fuzzing::calls(bytes));
