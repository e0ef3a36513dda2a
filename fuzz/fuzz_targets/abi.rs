//! The whole C ABI under libFuzzer; see docs/internals/testing.md for how to run it.
#![no_main]

libfuzzer_sys::fuzz_target!(|program: &[u8]| kvtier_testkit::fixtures::abi::run(program));
