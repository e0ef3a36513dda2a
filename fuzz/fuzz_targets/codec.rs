//! Coded planes and cells from any bytes: what is read back is what was written, and
//! nothing that a file says reaches beyond what there is.
#![no_main]

use kvtier::format::codec::cell::{self, HEAD_BYTES};
use kvtier::format::codec::int8::Scales;
use kvtier::format::codec::{Codec, Shape, decode, encode, room};
use kvtier::meta::dtype::Dtype;

const DTYPES: [Dtype; 5] = [Dtype::Bytes, Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8];

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&[how, kind, row, long, ..], bytes)) = input.split_at_checked(4) else { return };
    let codec = Codec::ALL[usize::from(how) % 3];
    let scales = if how & 128 == 0 { Scales::Channel } else { Scales::Token };
    let shape = Shape { dtype: DTYPES[usize::from(kind) % 5], row_bytes: row.into(), scales };
    // What a file says of a plane that was so long.
    let mut out = vec![0; usize::from(long) * 64];
    let _ = decode(codec, &shape, bytes, &mut out);
    // A plane of these bytes.
    let mut coded = vec![0; room(codec, &shape, bytes.len())];
    let Some((used, _)) = encode(codec, &shape, bytes, &mut coded) else {
        panic!("there was room");
    };
    assert!(used <= bytes.len());
    let mut back = vec![0; bytes.len()];
    decode(codec, &shape, &coded[..used], &mut back).expect("its own code");
    assert!(codec.is_lossy() || back == bytes);
    // A cell that says where its planes are.
    let (mut all, planes) = (0, usize::from(kind % 7));
    let found = cell::find(bytes, |_, stored| all += stored, planes);
    assert!(all <= bytes.len() as u64 && (!found || all >= (planes * HEAD_BYTES) as u64));
});
