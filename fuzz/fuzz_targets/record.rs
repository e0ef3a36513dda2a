//! Headers of records, segments and stores, from any bytes: as they are, and with
//! a sum that is right, so that what it covers is reached.
#![no_main]

use kvtier::format::record::{blocks_of, decode, peek};
use kvtier::format::segment::{SegmentHeader, StoreHeader, sign};

fn check(bytes: &[u8]) {
    let _ = SegmentHeader::decode(bytes);
    let _ = StoreHeader::decode(bytes);
    let Some(record) = decode(bytes) else { return };
    for cell in record.cells() {
        let end = u64::from(cell.block) + blocks_of(cell.stored_bytes);
        assert!(end <= u64::from(record.head.blocks));
        assert_eq!(cell.planes().map(|plane| plane.bytes).sum::<u64>(), cell.stored_bytes);
    }
    assert!(record.layers().count() <= 2048);
    if let Some((name, _)) = record.session() {
        assert_eq!(name.len(), record.head.items as usize);
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    check(input);
    let mut bytes = input.to_vec();
    bytes.resize(input.len().next_multiple_of(4096).clamp(4096, 64 * 4096), 0);
    bytes[..6].copy_from_slice(b"KVTR\x01\0");
    let blocks = (bytes.len() / 4096) as u32;
    bytes[8..12].copy_from_slice(&blocks.to_le_bytes());
    assert_eq!(peek(&bytes), Some(blocks));
    sign(&mut bytes);
    check(&bytes);
});
