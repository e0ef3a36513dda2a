//! Random programs over the whole C ABI: each call returns a valid status, nothing leaks, nothing
//! is undefined. `fuzz/` runs the same machine under libFuzzer.

use kvtier_testkit::fixtures::abi as machine;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// The only test of its process: the log sink and the counters are global.
#[test]
fn random_abi_programs_neither_crash_nor_leak() {
    // The prologue opens a runtime, a queue, buffers, a budget, a policy, a trace and a store with
    // a session that has tokens. Without them random programs reach little. Each opcode is followed
    // by as many zeros as it reads; otherwise it would consume the opcodes of the store.
    let mut start = Vec::new();
    for (opcode, arguments) in [(0u8, 6), (30, 8), (31, 11), (32, 8), (40, 15), (34, 7)] {
        start.extend([1, opcode]);
        start.extend(vec![0u8; arguments]);
    }
    start.push(32); // number of tokens
    for opcode in [1u8, 3, 4, 5, 5, 7, 24, 28] {
        start.extend([1, opcode]);
        start.extend([0u8; 6]);
    }
    // Each program starts and joins threads, which takes much longer on a busy machine. The soak
    // runs more programs.
    let most = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let cases = most.unwrap_or(800);
    let config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    let programs = proptest::collection::vec(any::<u8>(), 0..4000);
    TestRunner::new(config)
        .run(&programs, |program| {
            machine::run(&[start.clone(), program].concat());
            Ok(())
        })
        .unwrap();
    // The counts vary with the generated programs. The bounds are far below the lowest counts
    // observed.
    let [submitted, called, replayed, moved, loaded, computed, answered, streamed, copied] =
        machine::reached();
    assert!(submitted > 300 && called > 60, "{submitted} submissions, {called} callbacks");
    assert!(replayed > 10 && moved > 60, "{replayed} replays, {moved} moves");
    assert!(loaded > 10, "{loaded} layers loaded");
    assert!(streamed > 10, "{streamed} units leased");
    assert!(copied > 10, "{copied} device copies compared");
    assert!(computed > 10 && answered > 10, "{computed} computed, {answered} answers");
}
