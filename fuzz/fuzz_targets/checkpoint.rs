//! Checkpoints from any bytes: as they are, and with sums that are right.
#![no_main]

use kvtier::format::checkpoint::{FRAME_BYTES, Header, Item, MAX_PLACES, items};
use kvtier::format::segment::sign;

fn check(frame: &[u8], header: &Header) {
    let Some(all) = items(frame, header, 0) else { return };
    let mut seen = 0;
    for item in all {
        seen += 1;
        if let Some(Item::Chunk(_, places)) = item {
            assert!(places.iter().len() <= FRAME_BYTES / 32);
            assert!(places.iter().map(|place| u64::from(place.layer)).sum::<u64>() < u64::MAX);
        }
    }
    assert!(seen <= FRAME_BYTES / 8 && MAX_PLACES > 0);
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = Header::decode(input);
    let header = Header { store: [0; 16], number: 0, next_record: 1, next_segment: 1, frames: 1 };
    check(input, &header);
    let mut frame = vec![0; FRAME_BYTES];
    let used = input.len().min(FRAME_BYTES - 40);
    frame[32..32 + used].copy_from_slice(&input[..used]);
    frame[..4].copy_from_slice(b"KVTF");
    frame[24..28].copy_from_slice(&(32 + used as u32).to_le_bytes());
    sign(&mut frame);
    check(&frame, &header);
});
