//! Headers of safetensors files, indexes of shards and configurations from any bytes: what
//! is taken is sound, and so are its units.
#![no_main]

use kvtier::stream::model::{File, Model, config, safetensors, shards};
use kvtier::stream::units::Units;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = config::parse(input);
    if let Ok((names, map)) = shards::parse(input) {
        assert!(map.iter().all(|(_, file)| (*file as usize) < names.len()));
        assert!(names.iter().all(|name| !name.contains('/')));
    }
    if let Some(start) = input.first_chunk() {
        if let Ok(bytes) = safetensors::head_bytes(*start, input.len() as u64) {
            assert!(bytes + 8 <= input.len() as u64);
        }
    }
    // A file that ends where its tensors do, if there is such a length.
    let Some((data, head)) = input.split_first_chunk() else { return };
    let bytes = 8 + head.len() as u64 + u64::from(u16::from_le_bytes(*data));
    let file = File { path: "fuzz".into(), bytes };
    let Ok(model) = Model::of_safetensors(file, head) else { return };
    assert_eq!(model.bytes() + 8 + head.len() as u64, bytes);
    if let Ok(units) = Units::of(&model) {
        let bytes: u64 = units.units.iter().map(|unit| unit.bytes).sum();
        assert_eq!(bytes, model.bytes());
    }
});
