//! Objects of a remote, from any bytes: as they are, and with the head that is expected and a sum
//! that is right, so that what they cover is reached.
#![no_main]

use kvtier::base::checksum::checksum;
use kvtier::format::codec::Codec;
use kvtier::format::keys::{Fingerprint, Key};
use kvtier::format::record::{Chunk, HEAD_BYTES, decode};
use kvtier::format::segment::sign;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::layout::{Group, Layout};
use kvtier::tier::remote::object::{Object, Place, Verdict};
use kvtier::tier::remote::shape::Shape;

/// Of four cells with six planes.
const BODY_BYTES: usize = 4 * 32 + 6 * 24;

fn chunk() -> Chunk {
    Chunk {
        namespace: Key([1; 32]),
        parent: Key([2; 32]),
        key: Key([3; 32]),
        fingerprint: Fingerprint([4; 32]),
        position: 5,
        valid_tokens: 16,
    }
}

fn check(it: &Object<'_>, shape: &Shape, bytes: &[u8]) {
    let mut found = Vec::new();
    if it.verify_whole(bytes, bytes.len() as u64, &mut found).is_ok() {
        let record = decode(bytes).expect("it was verified");
        assert_eq!(found.len(), shape.cells(0).len());
        for (found, cell) in found.iter().zip(record.cells()) {
            let Some(found) = found else { continue };
            assert_eq!(found.planes().len(), cell.planes().len());
            for (range, plane) in found.planes().iter().zip(cell.planes()) {
                assert_eq!(checksum(&bytes[range.clone()]), plane.sum);
            }
        }
    }
    // As if its planes had come to places of their own.
    let mut memory: Vec<Vec<u8>> = Vec::new();
    let mut places = Vec::new();
    for cell in shape.cells(0) {
        let mut place = Place::NOWHERE;
        for (&(_, length), address) in cell.planes().iter().zip(&mut place.planes) {
            let mut plane = vec![0; length as usize];
            *address = plane.as_mut_ptr();
            memory.push(plane);
        }
        places.push(place);
    }
    let header = &bytes[..bytes.len().min(it.header_bytes())];
    let mut verdicts = Vec::new();
    // SAFETY: the places are in the memory, which nobody writes.
    if unsafe { it.verify(header, it.bytes(), &places, &mut verdicts) }.is_ok() {
        assert_eq!(verdicts.len(), places.len());
        assert!(!verdicts.contains(&Verdict::Unwanted));
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let near = Group::gqa([0, 2], 2, 16, Dtype::F32).expect("a group");
    let latent = Group::mla_latent([1], 700, Dtype::Bytes).expect("a group");
    let state = Group::state([3], 5000, Dtype::Bytes);
    let layout = Layout::new(16, vec![near, latent, state]).expect("a layout");
    let shape = Shape::new(&layout, 1 << 20).expect("a shape");
    for codec in [Codec::None, Codec::Lz4] {
        let it = Object::new(&shape, 0, chunk(), codec).expect("an object");
        check(&it, &shape, input);
        // The head is the expected one; the input is the body, and what follows the header.
        let blocks = (input.len().saturating_sub(BODY_BYTES) / 4096).min(64) as u32 + 1;
        let mut bytes = vec![0; blocks as usize * 4096];
        bytes[..8].copy_from_slice(b"KVTR\x01\0\x01\0");
        bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
        bytes[12..16].copy_from_slice(&blocks.to_le_bytes());
        bytes[44..48].copy_from_slice(&4u32.to_le_bytes());
        for (at, byte) in [(64, 1), (96, 2), (128, 3), (160, 4)] {
            bytes[at..at + 32].fill(byte);
        }
        bytes[192] = 5;
        bytes[196] = 16;
        bytes[200..204].copy_from_slice(&(BODY_BYTES as u32).to_le_bytes());
        let body = input.len().min(BODY_BYTES);
        bytes[HEAD_BYTES..HEAD_BYTES + body].copy_from_slice(&input[..body]);
        let rest = input[body..].len().min(bytes.len() - 4096);
        bytes[4096..4096 + rest].copy_from_slice(&input[body..body + rest]);
        sign(&mut bytes[..4096]);
        check(&it, &shape, &bytes);
    }
});
