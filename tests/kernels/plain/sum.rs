//! Checksums.

use kvtier::base::checksum::checksum;
use kvtier::device::call::{Call, Kind};
use proptest::prelude::*;

use super::{Chance, at, run, to};

/// Sums of ranges of `bytes`, each (where it begins, how long it is).
fn sums(bytes: &[u8], ranges: &[(usize, usize)], room: usize) -> Vec<u64> {
    let table: Vec<[u64; 2]> =
        ranges.iter().map(|&(from, len)| [at(&bytes[from..from + len]), len as u64]).collect();
    let (mut out, mut scratch) = (vec![0xDB_u64; ranges.len()], vec![0_u64; room]);
    run(&Call {
        kind: Kind::Sum as u32,
        table: at(&table),
        count: ranges.len() as u32,
        out: to(&mut out),
        scratch: to(&mut scratch),
        scratch_bytes: 8 * room as u64,
        ..Call::default()
    });
    out
}

fn room(ranges: &[(usize, usize)]) -> usize {
    ranges.len() + 1 + ranges.iter().map(|(_, len)| len.div_ceil(4096)).sum::<usize>()
}

fn check(bytes: &[u8], ranges: &[(usize, usize)]) {
    let got = sums(bytes, ranges, room(ranges));
    for (&(from, len), sum) in ranges.iter().zip(got) {
        assert_eq!(sum, checksum(&bytes[from..from + len]), "{len} bytes from {from} on");
    }
}

#[test]
fn checksums_of_every_length_and_block_boundary() {
    let bytes = Chance::new(1).bytes(2_000_000);
    let around = |n: usize| n - 1..n + 2;
    let lengths =
        (0..600).chain(around(1024)).chain(around(2048)).chain(around(4096)).chain(around(8192));
    // Counts of block sums, each of another kind: 2, 16, 17, 30, 31, 128, 129, 400.
    let many = [2, 16, 17, 30, 31, 128, 129, 400].map(|blocks| blocks * 4096 - 5);
    let ranges: Vec<(usize, usize)> =
        lengths.chain(many).enumerate().map(|(i, len)| (i % 37, len)).collect();
    check(&bytes, &ranges);
    check(&bytes, &[(0, 0)]);
    check(&bytes, &[(3, 1_900_000)]);
}

#[test]
fn ranges_beyond_scratch_have_no_checksum() {
    let bytes = vec![1; 100_000];
    let ranges = [(0, 50_000), (7, 60_000)];
    assert_eq!(sums(&bytes, &ranges, room(&ranges) - 1), [0, 0]);
    assert!(sums(&bytes, &ranges, room(&ranges)).iter().all(|&sum| sum != 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn checksums_of_random_ranges(
        ranges in prop::collection::vec((0_usize..200, prop_oneof![0_usize..9000, 0_usize..90_000]), 1..40),
        seed in any::<u64>(),
    ) {
        check(&Chance::new(seed).bytes(100_000), &ranges);
    }
}
