//! Headers of GGUF files from any bytes: what is taken is sound, and so are its units.
#![no_main]

use kvtier::stream::model::{File, Model, Stop, gguf};
use kvtier::stream::units::Units;

fn check(head: &[u8], file_bytes: u64) {
    let file = File { path: "fuzz".into(), bytes: file_bytes };
    match Model::of_gguf(file, head) {
        Ok(model) => {
            for pair in model.tensors.windows(2) {
                assert!(pair[0].offset + pair[0].bytes <= pair[1].offset || pair[1].bytes == 0);
            }
            assert!(model.tensors.iter().all(|t| t.offset + t.bytes <= file_bytes));
            if let Ok(units) = Units::of(&model) {
                let bytes: u64 = units.units.iter().map(|unit| unit.bytes).sum();
                assert_eq!(bytes, model.bytes());
            }
        }
        Err(Stop::More(needed)) => assert!(needed > head.len() as u64 && needed <= file_bytes),
        Err(Stop::Bad(error)) => assert!(!error.message().is_empty()),
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    // The first bytes say how long the file is: as long as what is there, or longer.
    let Some((more, head)) = input.split_first_chunk() else { return };
    let more = u64::from(u32::from_le_bytes(*more));
    check(head, head.len() as u64);
    check(head, head.len() as u64 + more);
    let mut sound = gguf::MAGIC.to_vec();
    sound.extend(3u32.to_le_bytes());
    sound.extend(head);
    check(&sound, sound.len() as u64 + more);
});
