//! Files that Flambeau has written: decoded or refused.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    checkpoint::fuzzing::decode(bytes);
    cluster::fuzzing::decode(bytes);
});
