//! The whole C ABI under libFuzzer; see docs/testing.md for how to run it.
#![no_main]

#[path = "../../tests/support/abi_machine.rs"]
mod machine;

libfuzzer_sys::fuzz_target!(|program: &[u8]| machine::run(program));
