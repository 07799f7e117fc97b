//! Files of data: read or refused.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    data::fuzzing::tables(bytes);
});
