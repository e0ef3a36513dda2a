use super::*;
use crate::base::random::Random;
use crate::format::codec::Shape as PlaneShape;
use crate::format::codec::int8::Scales;
use crate::format::keys::{Fingerprint, Key};
use crate::format::segment::sign;
use crate::meta::dtype::Dtype;
use crate::meta::layout::{Group, Layout};
use proptest::prelude::*;

const NAME: Name = Name { tenant: 0, hash: [7; 20] };
const LZ4: PlaneShape = PlaneShape { dtype: Dtype::Bytes, row_bytes: 1, scales: Scales::Token };

fn chunk(tokens: u32) -> Chunk {
    Chunk {
        namespace: Key([1; 32]),
        parent: Key([2; 32]),
        key: Key([3; 32]),
        fingerprint: Fingerprint([4; 32]),
        position: 9,
        valid_tokens: tokens,
    }
}

/// Uneven groups, one of them without V, and states.
fn shapes() -> impl Strategy<Value = Shape> {
    let group = prop_oneof![
        (1u64..400).prop_map(|bytes| (bytes, bytes, 0)),
        (1u64..600).prop_map(|bytes| (bytes, 0, 0)),
        (1u64..300, 1u64..300).prop_map(|(k, v)| (k, v, 0)),
        (1u64..9000).prop_map(|bytes| (0, 0, bytes)),
    ];
    let groups = prop::collection::vec(group, 1..4);
    let of = prop::collection::vec(0usize..4, 1..12);
    let object_bytes = prop_oneof![Just(4096u64), Just(16 << 10), Just(1 << 20)];
    (groups, of, 1u32..40, object_bytes).prop_map(|(groups, of, tokens, object_bytes)| {
        let mut all: Vec<Group> = groups
            .iter()
            .map(|&(k, v, state)| match state {
                0 => Group { v_bytes: v, ..Group::mla_latent([], k as u32, Dtype::Bytes).unwrap() },
                state => Group::state([], state, Dtype::Bytes),
            })
            .collect();
        for (layer, of) in of.iter().enumerate() {
            let at = of % all.len();
            all[at].layers.push(layer as u16);
        }
        all.retain(|group| !group.layers.is_empty());
        Shape::new(&Layout::new(tokens, all).unwrap(), object_bytes).unwrap()
    })
}

/// The planes of an object's cells.
type Content = Vec<Vec<Vec<u8>>>;

fn content(shape: &Shape, object: usize, seed: u64) -> Content {
    let mut random = Random::new(seed);
    let cell = |cell: &CellShape| {
        let planes = cell.planes().iter();
        planes.map(|&(_, bytes)| (0..bytes).map(|_| random.draw() as u8 & 3).collect()).collect()
    };
    shape.cells(object).iter().map(cell).collect()
}

/// The bytes of an object; `coded` selects the encoded cells.
fn encode(it: &Object<'_>, content: &Content, coded: impl Fn(usize) -> bool) -> Vec<u8> {
    let mut codes = Vec::new();
    for (at, planes) in content.iter().enumerate() {
        let plane = |bytes| cell::Plane { shape: LZ4, bytes };
        let raw: Vec<_> = planes.iter().map(|bytes| plane(bytes.as_slice())).collect();
        let room = planes.iter().map(|p| cell::room(Codec::Lz4, &LZ4, p.len())).sum();
        let (mut out, mut lengths) = (vec![0; room], vec![0; planes.len()]);
        let lost = cell::encode(Codec::Lz4, &raw, &mut out, &mut lengths);
        codes.push(lost.filter(|_| coded(at)).map(|_| (out, lengths)));
    }
    let mut planes: Vec<(Codec, Vec<PlaneSource>)> = Vec::new();
    for (raw, code) in content.iter().zip(&codes) {
        let plane = |bytes: &[u8]| {
            let (address, bytes) = (bytes.as_ptr(), bytes.len() as u64);
            PlaneSource { address, bytes, sum: None }
        };
        planes.push(match code {
            None => (Codec::None, raw.iter().map(|bytes| plane(bytes)).collect()),
            Some((out, lengths)) => {
                let mut rest = out.as_slice();
                let next = |&bytes: &usize| {
                    let (now, after) = rest.split_at(bytes);
                    rest = after;
                    plane(now)
                };
                (Codec::Lz4, lengths.iter().map(next).collect())
            }
        });
    }
    let cells: Vec<CellSource<'_>> =
        planes.iter().map(|(codec, planes)| CellSource { codec: *codec, planes }).collect();
    let (mut header, mut puts) = (vec![0xFF; it.header_bytes()], Puts::default());
    // SAFETY: planes and header live on.
    let bytes = unsafe { it.put(NAME, &cells, &mut header, &mut puts) }.unwrap();
    let mut all = Vec::new();
    for part in puts.parts_of(0) {
        // SAFETY: as above.
        all.extend(unsafe { std::slice::from_raw_parts(part.address, part.bytes as usize) });
    }
    assert_eq!((puts.bytes_of(0), all.len() as u64), (bytes, bytes));
    all
}

/// The verdict on a cell, and its planes.
type Judged = (Verdict, Vec<Vec<u8>>);

/// Fetches an object as a remote would deliver it; returns the planes and the verdict of every
/// cell.
fn fetch(
    it: &Object<'_>,
    object: &[u8],
    wanted: impl Fn(usize) -> bool,
) -> Result<Vec<Judged>, RemoteError> {
    let mut cells: Vec<Vec<Vec<u8>>> = Vec::new();
    let mut places = Vec::new();
    for (at, shape) in it.cells.iter().enumerate() {
        let mut place = Place::NOWHERE;
        let planes = shape.planes().iter().map(|&(_, bytes)| vec![0xCC; bytes as usize]);
        let mut planes: Vec<Vec<u8>> = planes.collect();
        if wanted(at) {
            place.planes.iter_mut().zip(&mut planes).for_each(|(to, p)| *to = p.as_mut_ptr());
        }
        cells.push(planes);
        places.push(place);
    }
    let (mut header, mut sink) = (vec![0; it.header_bytes()], vec![0; 5000]);
    let sink = Sink { address: sink.as_mut_ptr(), bytes: 5000 };
    let mut gets = Gets::default();
    it.get(NAME, header.as_mut_ptr(), &places, sink, &mut gets).unwrap();
    assert_eq!(gets.room_of(0), it.bytes() + 1);
    let mut rest = object;
    for part in gets.parts_of(0) {
        let (now, after) = rest.split_at((part.bytes as usize).min(rest.len()));
        // SAFETY: memory from above, as long as the part says.
        unsafe { part.address.copy_from(now.as_ptr(), now.len()) };
        rest = after;
    }
    let mut verdicts = Vec::new();
    let arrived_bytes = (object.len() - rest.len()) as u64;
    // SAFETY: nothing writes the planes.
    unsafe { it.verify(&header, arrived_bytes, &places, &mut verdicts) }?;
    assert_eq!(verdicts.len(), cells.len());
    Ok(verdicts.into_iter().zip(cells).collect())
}

/// The same for an object that is fetched as a whole: its cells, decoded.
fn fetch_whole(it: &Object<'_>, object: &[u8]) -> Result<Vec<Option<Vec<Vec<u8>>>>, RemoteError> {
    let mut staging = vec![0xCC; it.bytes() as usize];
    let mut one = [0; 1];
    let mut gets = Gets::default();
    let sink = Sink { address: one.as_mut_ptr(), bytes: 1 };
    it.get_whole(NAME, staging.as_mut_ptr(), sink, &mut gets);
    let arrived_bytes = object.len().min(gets.room_of(0) as usize);
    let kept = arrived_bytes.min(staging.len());
    staging[..kept].copy_from_slice(&object[..kept]);
    let mut found = Vec::new();
    it.verify_whole(&staging, arrived_bytes as u64, &mut found)?;
    let cells = found.into_iter().zip(it.cells).map(|(found, shape)| {
        let found = found?;
        let mut planes = Vec::new();
        for (range, &(_, bytes)) in found.planes().iter().zip(shape.planes()) {
            let stored = &staging[range.clone()];
            planes.push(match found.codec {
                Codec::None => stored.to_vec(),
                codec => {
                    let mut raw = vec![0; bytes as usize];
                    cell::decode(codec, &LZ4, stored, &mut raw).ok()?;
                    raw
                }
            });
        }
        Some(planes)
    });
    Ok(cells.collect())
}

/// Whether a corrupted object is detected in every cell that differs.
fn caught(it: &Object<'_>, bad: &[u8], content: &Content) -> Result<bool, TestCaseError> {
    let mut all_right = true;
    if it.codec == Codec::None {
        match fetch(it, bad, |_| true) {
            Err(error) => {
                prop_assert_eq!(error, RemoteError::Damaged);
                all_right = false;
            }
            Ok(cells) => {
                for ((verdict, planes), wanted) in cells.iter().zip(content) {
                    prop_assert!(*verdict != Verdict::Sound || planes == wanted);
                    all_right &= *verdict == Verdict::Sound;
                }
            }
        }
    }
    match fetch_whole(it, bad) {
        Err(error) => {
            prop_assert_eq!(error, RemoteError::Damaged);
            prop_assert!(it.codec != Codec::None || !all_right);
            all_right = false;
        }
        Ok(cells) => {
            let mut whole_right = true;
            for (planes, wanted) in cells.iter().zip(content) {
                prop_assert!(planes.as_ref().is_none_or(|planes| planes == wanted));
                whole_right &= planes.is_some();
            }
            prop_assert!(it.codec != Codec::None || whole_right == all_right);
            all_right = whole_right;
        }
    }
    Ok(!all_right)
}

/// Whether a byte is padding.
fn is_pad(it: &Object<'_>, object: &[u8], at: usize) -> bool {
    let record = decode(object).unwrap();
    at >= it.header_bytes()
        && record.cells().all(|cell| {
            let start = cell.block as usize * BLOCK_BYTES;
            !(start..start + cell.stored_bytes as usize).contains(&at)
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn objects_round_trip(
        shape in shapes(), seed in any::<u64>(), pick in any::<u64>(), lz4 in any::<bool>(),
    ) {
        let codec = if lz4 { Codec::Lz4 } else { Codec::None };
        for object in 0..shape.objects() {
            let it = Object::new(&shape, object, chunk(shape.chunk_tokens()), codec).unwrap();
            let content = content(&shape, object, seed);
            let is_coded = |at: usize| lz4 && pick >> (at % 64) & 1 == 1;
            let bytes = encode(&it, &content, is_coded);
            prop_assert!(bytes.len() as u64 <= it.bytes());
            prop_assert!(lz4 || bytes.len() as u64 == it.bytes());
            let whole = fetch_whole(&it, &bytes).unwrap();
            let wanted: Vec<_> = content.iter().cloned().map(Some).collect();
            prop_assert!(whole == wanted);
            if !lz4 {
                let wanted = |at: usize| pick >> (at % 64) & 1 == 1;
                for (at, (verdict, planes)) in fetch(&it, &bytes, wanted).unwrap().iter().enumerate() {
                    if wanted(at) {
                        prop_assert_eq!(*verdict, Verdict::Sound);
                        prop_assert!(*planes == content[at]);
                    } else {
                        prop_assert_eq!(*verdict, Verdict::Unwanted);
                        prop_assert!(planes.iter().flatten().all(|&byte| byte == 0xCC));
                    }
                }
                // The same cells are the same bytes.
                prop_assert!(bytes == encode(&it, &content, |_| false));
            }
        }
    }

    #[test]
    fn damaged_objects_are_detected(
        shape in shapes(),
        seed in any::<u64>(),
        lz4 in any::<bool>(),
        bits in prop::collection::vec(any::<usize>(), 24),
        cuts in prop::collection::vec(any::<usize>(), 6),
    ) {
        let codec = if lz4 { Codec::Lz4 } else { Codec::None };
        let object = seed as usize % shape.objects();
        let it = Object::new(&shape, object, chunk(shape.chunk_tokens()), codec).unwrap();
        let content = content(&shape, object, seed);
        let good = encode(&it, &content, |_| lz4);
        prop_assert!(!caught(&it, &good, &content)?);
        for bit in bits {
            let mut bad = good.clone();
            // Half of the bits are in the header, which is short compared with the rest.
            let end = if bit % 2 == 0 { it.header_bytes() } else { good.len() };
            let at = (bit >> 4) % end;
            bad[at] ^= if bit & 8 == 0 { 1 << (bit >> 1 & 3) } else { 0xFF };
            prop_assert_eq!(caught(&it, &bad, &content)?, !is_pad(&it, &good, at), "byte {}", at);
        }
        for cut in cuts {
            prop_assert!(caught(&it, &good[..cut % good.len()], &content)?);
            let mut long = good.clone();
            long.resize(good.len() + 1 + cut % 9000, 0);
            prop_assert!(caught(&it, &long, &content)?);
        }
    }

    #[test]
    fn another_object_is_rejected(shape in shapes(), seed in any::<u64>()) {
        let tokens = shape.chunk_tokens();
        let object = seed as usize % shape.objects();
        let it = Object::new(&shape, object, chunk(tokens), Codec::None).unwrap();
        let content = content(&shape, object, seed);
        let mut others = Vec::new();
        for change in 0..5 {
            let mut other = chunk(tokens);
            match change {
                0 => other.namespace = Key([9; 32]),
                1 => other.parent = Key([9; 32]),
                2 => other.key = Key([9; 32]),
                3 => other.fingerprint = Fingerprint([9; 32]),
                _ => other.position = 8,
            }
            let other = Object::new(&shape, object, other, Codec::None).unwrap();
            others.push(encode(&other, &content, |_| false));
        }
        for at in (0..shape.objects()).filter(|&at| at != object) {
            let other = Object::new(&shape, at, chunk(tokens), Codec::None).unwrap();
            others.push(encode(&other, &self::content(&shape, at, seed), |_| false));
        }
        for other in others {
            prop_assert_eq!(fetch(&it, &other, |_| true).err(), Some(RemoteError::Damaged));
            prop_assert_eq!(fetch_whole(&it, &other).err(), Some(RemoteError::Damaged));
        }
    }

    #[test]
    fn a_forged_header_with_a_valid_checksum_is_rejected(
        shape in shapes(), seed in any::<u64>(), at in 0usize..600, byte in 1u8..=255,
    ) {
        for codec in [Codec::None, Codec::Lz4] {
            let it = Object::new(&shape, 0, chunk(shape.chunk_tokens()), codec).unwrap();
            let content = content(&shape, 0, seed);
            let mut bad = encode(&it, &content, |_| codec == Codec::Lz4);
            let body = HEAD + it.cells.len() * CELL_BYTES + it.planes * PLANE_BYTES;
            let at = at % body;
            bad[at] ^= byte;
            sign(&mut bad[..it.header_bytes()]);
            let caught = caught(&it, &bad, &content)?;
            // Two fields, and the bytes after a cell's place, are reserved and 0.
            prop_assert!(caught || is_reserved(&it, at), "byte {}", at);
        }
    }
}

const HEAD: usize = crate::format::record::HEAD_BYTES;

fn is_reserved(it: &Object<'_>, at: usize) -> bool {
    let mut start = HEAD;
    for shape in it.cells {
        if (start + 12..start + 16).contains(&at) {
            return true;
        }
        start += CELL_BYTES + shape.planes().len() * PLANE_BYTES;
    }
    (204..208).contains(&at)
}

#[test]
fn every_flipped_bit_and_every_truncation_is_detected() {
    let group = Group::gqa([0, 1], 1, 64, Dtype::F32).unwrap();
    let shape = Shape::new(&Layout::new(4, vec![group]).unwrap(), 1 << 20).unwrap();
    let it = Object::new(&shape, 0, chunk(4), Codec::None).unwrap();
    let content = content(&shape, 0, 11);
    let good = encode(&it, &content, |_| false);
    assert_eq!(good.len(), 3 * BLOCK_BYTES);
    let mut bad = good.clone();
    for bit in 0..good.len() * 8 {
        bad[bit / 8] ^= 1 << (bit % 8);
        let is_pad = is_pad(&it, &good, bit / 8);
        let cells = fetch(&it, &bad, |_| true);
        let sound =
            |cells: &[(Verdict, _)]| cells.iter().filter(|cell| cell.0 == Verdict::Sound).count();
        match cells {
            Err(_) => assert!(bit / 8 < BLOCK_BYTES, "bit {bit}"),
            // A damaged cell does not affect the other one.
            Ok(cells) => assert_eq!(sound(&cells), if is_pad { 2 } else { 1 }, "bit {bit}"),
        }
        bad[bit / 8] ^= 1 << (bit % 8);
    }
    for bytes in 0..good.len() {
        assert!(fetch(&it, &good[..bytes], |_| true).is_err(), "{bytes}");
        assert!(fetch_whole(&it, &good[..bytes]).is_err(), "{bytes}");
    }
}

#[test]
fn cells_that_do_not_match_the_layout_are_rejected() {
    let group = Group::mla_latent([0, 1], 64, Dtype::Bytes).unwrap();
    let shape = Shape::new(&Layout::new(4, vec![group]).unwrap(), 1 << 20).unwrap();
    for tokens in [0, 3, 5] {
        assert!(Object::new(&shape, 0, chunk(tokens), Codec::None).is_err(), "{tokens}");
    }
    assert!(Object::new(&shape, 1, chunk(4), Codec::None).is_err());
    let it = Object::new(&shape, 0, chunk(4), Codec::None).unwrap();
    let bytes = [5u8; 256];
    let plane = |length| PlaneSource { address: bytes.as_ptr(), bytes: length, sum: None };
    let put = |cells: &[CellSource<'_>], header_bytes: usize| {
        let (mut header, mut puts) = (vec![0; header_bytes], Puts::default());
        // SAFETY: no plane is longer than the bytes.
        let done = unsafe { it.put(NAME, cells, &mut header, &mut puts) };
        assert_eq!(puts.items.len(), usize::from(done.is_ok()));
        done.is_ok()
    };
    let cell = |planes| CellSource { codec: Codec::None, planes };
    let (right, short, two) = ([plane(256)], [plane(255)], [plane(128), plane(128)]);
    let null = [PlaneSource { address: std::ptr::null(), ..plane(256) }];
    assert!(put(&[cell(&right), cell(&right)], 4096));
    assert!(!put(&[cell(&right)], 4096) && !put(&[cell(&right), cell(&right)], 8192));
    for wrong in [&short[..], &two, &null, &[]] {
        assert!(!put(&[cell(&right), cell(wrong)], 4096));
    }
    let coded = CellSource { codec: Codec::Lz4, planes: &short };
    assert!(!put(&[cell(&right), coded], 4096));
    let mut gets = Gets::default();
    let sink = Sink { address: std::ptr::null_mut(), bytes: 4095 };
    let nowhere = [Place::NOWHERE; 2];
    let header = std::ptr::null_mut();
    assert!(it.get(NAME, header, &nowhere, sink, &mut gets).is_err());
    let sink = Sink { bytes: 4096, ..sink };
    assert!(it.get(NAME, header, &nowhere[..1], sink, &mut gets).is_err());
    let lz4 = Object::new(&shape, 0, chunk(4), Codec::Lz4).unwrap();
    assert!(lz4.get(NAME, header, &nowhere, sink, &mut gets).is_err());
    assert_eq!(gets.items.len(), 0);
}
