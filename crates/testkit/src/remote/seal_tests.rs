use kvtier::base::clock::Clock;
use kvtier::tier::remote::name::{HASH_BYTES, Name};
use kvtier::tier::remote::seal::*;
use kvtier::tier::remote::secret::Secret;
use kvtier::tier::remote::{Client, Remote};
use proptest::prelude::*;

use crate::remote::conformance::{Opts, conform};
use crate::remote::simulated::{Fault, Plan, Simulated};
use kvtier::tier::remote::{Gets, Puts, Queries, RemoteError};

type Outcome<T> = std::result::Result<T, RemoteError>;

const LONG: u64 = u64::MAX / 2;
const FRAME: u64 = FRAME_BYTES as u64;

fn secret(first: u8) -> Secret {
    Secret::new(&[first; 32]).unwrap()
}

fn sealer(first: u8) -> Sealer {
    Sealer::new(&secret(first)).unwrap()
}

fn name(number: u8) -> Name {
    Name { tenant: 0, hash: [number; HASH_BYTES] }
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + (at >> 8) * 13 + 5) as u8).collect()
}

/// Builds and seals an object by hand.
fn sealed(sealer: &Sealer, name: &Name, random: [u8; RANDOM_BYTES], plain: &[u8]) -> Vec<u8> {
    let mut object = vec![0; ENVELOPE_BYTES];
    for frame in plain.chunks(FRAME_BYTES) {
        object.extend_from_slice(frame);
        object.extend_from_slice(&[0; TAG_BYTES]);
    }
    if plain.is_empty() {
        object.extend_from_slice(&[0; TAG_BYTES]);
    }
    assert!(sealer.seal(name, random, &mut object));
    object
}

fn opened(sealer: &Sealer, name: &Name, object: &[u8]) -> Option<Vec<u8>> {
    let mut object = object.to_vec();
    let bytes = sealer.open(name, &mut object)?;
    let frames = object[ENVELOPE_BYTES..].chunks(FRAME_BYTES + TAG_BYTES);
    let plain = frames.flat_map(|frame| &frame[..frame.len() - TAG_BYTES]).copied();
    let plain: Vec<u8> = plain.collect();
    assert_eq!(plain.len() as u64, bytes);
    Some(plain)
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits: Vec<char> = hex.chars().collect();
    digits
        .chunks(2)
        .map(|two| u8::from_str_radix(&two.iter().collect::<String>(), 16).unwrap())
        .collect()
}

/// Test vectors of ffi-tests/oracles/seal.py, an independent implementation.
#[test]
fn test_vectors_of_another_implementation_match() {
    let text = include_str!("../../../../tests/data/seal.txt");
    let lines: Vec<&str> = text.lines().collect();
    let mut cases = 0;
    for case in lines.chunks(8) {
        let value = |at: usize, word: &str| case[at].strip_prefix(word).expect(word).trim();
        let sealer = Sealer::new(&Secret::new(&bytes_of(value(1, "secret"))).unwrap()).unwrap();
        let plain = content(value(0, "bytes").parse().unwrap());
        let random = bytes_of(value(2, "random")).try_into().unwrap();
        let hash = bytes_of(value(4, "name")).try_into().unwrap();
        let name = Name { tenant: value(3, "tenant").parse().unwrap(), hash };
        let object = sealed(&sealer, &name, random, &plain);
        assert_eq!(object[..ENVELOPE_BYTES], bytes_of(value(5, "envelope")));
        let frames = object[ENVELOPE_BYTES..].chunks(FRAME_BYTES + TAG_BYTES);
        let tags: Vec<_> = frames.map(|frame| frame[frame.len() - TAG_BYTES..].to_vec()).collect();
        assert_eq!(tags, value(6, "tags").split(',').map(bytes_of).collect::<Vec<_>>());
        assert_eq!(object[object.len() - 48..], bytes_of(value(7, "end")));
        assert_eq!(opened(&sealer, &name, &object), Some(plain));
        cases += 1;
    }
    assert_eq!(cases, 9);
}

#[test]
fn sealed_and_plain_lengths_are_inverse() {
    let edges = [0, 1, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME, 3 * FRAME + 7, MAX_BYTES];
    let mut last = 0;
    for plain in edges {
        let sealed = sealed_bytes(plain);
        assert_eq!(plain_bytes(sealed), Some(plain));
        assert!(sealed > last);
        last = sealed;
    }
    assert_eq!(sealed_bytes(0), 80);
    let full = sealed_bytes(FRAME);
    for none in [0, 1, 63, 64, 79, full + 1, full + 16] {
        assert_eq!(plain_bytes(none), None, "{none}");
    }
    // Sealed lengths one byte apart never have the same plain length.
    for plain in (0..2 * FRAME + 5).step_by(977) {
        assert_eq!(plain_bytes(sealed_bytes(plain)), Some(plain));
    }
    assert_eq!(place_of(0, 5), 64..69);
    assert_eq!(place_of(FRAME - 2, 9), 64 + FRAME_BYTES - 2..64 + FRAME_BYTES);
    assert_eq!(place_of(FRAME, 9), 64 + FRAME_BYTES + 16..64 + FRAME_BYTES + 25);
}

#[test]
fn any_changed_bit_is_detected() {
    let sealer = sealer(1);
    let object = sealed(&sealer, &name(1), [7; 16], &content(40));
    for at in 0..object.len() {
        for bit in 0..8 {
            let mut changed = object.clone();
            changed[at] ^= 1 << bit;
            assert_eq!(opened(&sealer, &name(1), &changed), None, "byte {at}, bit {bit}");
        }
    }
    for bytes in 0..object.len() {
        assert_eq!(opened(&sealer, &name(1), &object[..bytes]), None, "{bytes} bytes of it");
    }
    assert_eq!(opened(&sealer, &name(1), &[&object[..], &[0]].concat()), None);
}

#[test]
fn an_object_is_bound_to_its_name_and_secret() {
    let object = sealed(&sealer(1), &name(1), [7; 16], &content(5000));
    assert!(opened(&sealer(1), &name(1), &object).is_some());
    assert_eq!(opened(&sealer(2), &name(1), &object), None);
    assert_eq!(opened(&sealer(1), &name(2), &object), None);
    assert_eq!(opened(&sealer(1), &Name { tenant: 1, ..name(1) }, &object), None);
    // A secret that is the prefix of another one is a different secret.
    let longer = Sealer::new(&Secret::new(&[1; 33]).unwrap()).unwrap();
    assert_eq!(opened(&longer, &name(1), &object), None);
    assert!(Sealer::new(&Secret::new(&[1; 31]).unwrap()).is_err());
    // The ciphertext shows no plaintext, and differs for equal content.
    let other = sealed(&sealer(1), &name(1), [8; 16], &content(5000));
    assert!(object[64..].iter().zip(&other[64..]).filter(|(a, b)| a == b).count() < 200);
    let plain = content(5000);
    assert!(!object.windows(8).any(|window| plain.windows(8).any(|text| text == window)));
}

#[test]
fn moved_frames_are_detected() {
    let sealer = sealer(1);
    let whole = FRAME_BYTES + TAG_BYTES;
    let plain = content(3 * FRAME_BYTES);
    let object = sealed(&sealer, &name(1), [7; 16], &plain);
    assert_eq!(opened(&sealer, &name(1), &object), Some(plain.clone()));
    let frame = |object: &[u8], at: usize| object[64 + at * whole..][..whole].to_vec();
    let of = |object: &[u8], order: &[usize], plain: u64| {
        let mut envelope = object[..64].to_vec();
        envelope[24..32].copy_from_slice(&plain.to_le_bytes());
        let frames = order.iter().flat_map(|&at| frame(object, at));
        envelope.into_iter().chain(frames).collect::<Vec<u8>>()
    };
    for order in [&[1, 0, 2][..], &[0, 2, 1], &[2, 1, 0], &[0, 0, 2], &[0, 1], &[0, 1, 2, 2], &[2]]
    {
        for plain in [3 * FRAME, order.len() as u64 * FRAME] {
            assert_eq!(opened(&sealer, &name(1), &of(&object, order, plain)), None, "{order:?}");
        }
    }
    // Frames of another object of the same name.
    let other = sealed(&sealer, &name(1), [8; 16], &plain);
    let mixed = [&object[..64 + whole], &other[64 + whole..]].concat();
    assert_eq!(opened(&sealer, &name(1), &mixed), None);
    // Some bits of a long object.
    for at in (0..object.len()).step_by(9973).chain([64 + whole - 1, 64 + whole, object.len() - 1])
    {
        let mut changed = object.clone();
        changed[at] ^= 0x10;
        assert_eq!(opened(&sealer, &name(1), &changed), None, "byte {at}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn sealed_objects_open(
        bytes in prop_oneof![0usize..300, 262_000usize..262_300, 0usize..700_000],
        random in any::<[u8; 16]>(),
        tenant in any::<u64>(),
        number in any::<u8>(),
        at in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let (sealer, name) = (sealer(9), Name { tenant, ..name(number) });
        let mut object = sealed(&sealer, &name, random, &content(bytes));
        prop_assert_eq!(object.len() as u64, sealed_bytes(bytes as u64));
        prop_assert_eq!(whole_bytes(&object[..64]), Some(object.len() as u64));
        prop_assert_eq!(opened(&sealer, &name, &object), Some(content(bytes)));
        let at = at.index(object.len());
        object[at] ^= 1 << bit;
        prop_assert_eq!(opened(&sealer, &name, &object), None);
    }

    #[test]
    fn random_bytes_do_not_open(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert_eq!(opened(&sealer(9), &name(1), &bytes), None);
    }
}

fn remote(plan: Plan) -> (Simulated, Sealed, Clock) {
    let clock = Clock::manual(1);
    let inner = Simulated::new(5, plan, clock.clone());
    let sealed = Sealed::new(Box::new(inner.clone()), &secret(3)).unwrap();
    (inner, sealed, clock)
}

#[test]
fn a_sealed_remote_conforms() {
    for most in [300_000, 4 << 20] {
        let mut plan = Plan::default();
        plan.caps.max_bytes = most;
        let (inner, sealed, clock) = remote(plan);
        assert!(sealed_bytes(sealed.caps().max_bytes) <= most);
        assert!(sealed_bytes(sealed.caps().max_bytes + 18) > most);
        let opts = Opts { clock, patience_ns: LONG, ..Opts::default() };
        let passed = conform(&sealed, &opts).unwrap();
        assert_eq!((passed.len(), inner.names().len()), (12, 0));
    }
}

fn put(client: &mut dyn Client, name: Name, content: &[u8]) -> Outcome<bool> {
    let mut puts = Puts::default();
    puts.object(name);
    puts.part(content.as_ptr(), content.len() as u64);
    // SAFETY: the content lives.
    unsafe { client.put(&mut puts, LONG) };
    puts.items[0].result
}

fn get(client: &mut dyn Client, name: Name, offset: u64, room: usize) -> Outcome<Vec<u8>> {
    let mut memory = vec![0xAA; room];
    let mut gets = Gets::default();
    gets.object(name, offset);
    let (first, rest) = memory.split_at_mut(room / 3);
    gets.part(first.as_mut_ptr(), first.len() as u64);
    gets.part(rest.as_mut_ptr(), rest.len() as u64);
    // SAFETY: the memory lives, and nothing else has it.
    unsafe { client.get(&mut gets, LONG) };
    let result = gets.items[0].result;
    if result.is_err() {
        assert!(memory.iter().all(|&byte| byte == 0xAA), "returned before it was verified");
    }
    result.map(|bytes| memory[..bytes as usize].to_vec())
}

#[test]
fn stored_objects_are_encrypted_and_tamper_evident() {
    let (inner, sealed, _) = remote(Plan::default());
    let mut client = sealed.client();
    assert!(client.greet(LONG).unwrap().words.contains("sealed"));
    let plain = content(600_000);
    assert_eq!(put(&mut *client, name(1), &plain), Ok(false));
    assert_eq!(put(&mut *client, name(1), &plain), Ok(true));
    assert_eq!(put(&mut *client, name(2), &plain), Ok(false));
    let object = inner.object(&name(1)).unwrap();
    assert_eq!(object.len() as u64, sealed_bytes(600_000));
    assert!(!object.windows(16).any(|window| window == &plain[..16]));
    for (offset, room) in [(0, 600_000), (0, 10), (5, 300_000), (262_100, 100), (599_999, 50)] {
        let end = (offset + room).min(600_000);
        let got = get(&mut *client, name(1), offset as u64, room);
        assert_eq!(got.as_deref(), Ok(&plain[offset..end]), "{offset} + {room}");
    }
    assert_eq!(get(&mut *client, name(1), 600_000, 5), Ok(Vec::new()));
    assert_eq!(get(&mut *client, name(1), u64::MAX, 5), Ok(Vec::new()));
    assert_eq!(get(&mut *client, name(3), 0, 5), Err(RemoteError::Absent));
    // The remote's owner replaces the object, or changes it.
    inner.plant(name(1), inner.object(&name(2)).unwrap());
    assert_eq!(get(&mut *client, name(1), 0, 600_000), Err(RemoteError::Damaged));
    let mut claims = object.clone();
    claims[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
    for bad in [object[..300].to_vec(), plain[..80].to_vec(), vec![0; 7], claims] {
        inner.plant(name(1), bad);
        for room in [3, 100, 600_000] {
            assert_eq!(get(&mut *client, name(1), 0, room), Err(RemoteError::Damaged));
        }
    }
    let mut queries = Queries::default();
    queries.name(name(2));
    client.lookup(&mut queries, LONG);
    assert_eq!(queries.items[0].result, Ok(600_000));
}

#[test]
fn damage_by_the_remote_is_detected() {
    for fault in [Fault::Flip, Fault::Truncate, Fault::Reorder] {
        let (inner, sealed, _) = remote(Plan::default().often(fault, 500_000));
        let mut client = sealed.client();
        let mut caught = 0;
        for round in 0..40u8 {
            // Two in a batch, so that they can be swapped.
            let mut puts = Puts::default();
            let (a, b) = (content(3000), vec![round; 4000]);
            for (number, bytes) in [(2 * round, &a), (2 * round + 1, &b)] {
                puts.object(name(number));
                puts.part(bytes.as_ptr(), bytes.len() as u64);
            }
            // SAFETY: both buffers live.
            unsafe { client.put(&mut puts, LONG) };
            let mut memory = [vec![0; 4000], vec![0; 4000]];
            let mut gets = Gets::default();
            for (number, memory) in (2 * round..).zip(&mut memory) {
                gets.object(name(number), 0);
                gets.part(memory.as_mut_ptr(), 4000);
            }
            // SAFETY: the memory lives, and nothing else has it.
            unsafe { client.get(&mut gets, LONG) };
            for ((get, memory), expected) in gets.items.iter().zip(&memory).zip([&a, &b]) {
                match get.result {
                    Ok(bytes) => assert!(memory[..bytes as usize] == expected[..], "{fault:?}"),
                    Err(error) => caught += u32::from(error == RemoteError::Damaged),
                }
            }
        }
        assert!(caught > 0 && inner.struck(fault) > 0, "{fault:?}");
    }
}
