//! Sealed objects from any bytes: nothing opens that was not sealed, lengths are what they say.
#![no_main]

use kvtier::tier::remote::name::HASH_BYTES;
use kvtier::tier::remote::Name;
use kvtier::tier::remote::seal::{ENVELOPE_BYTES, MAX_BYTES, Sealer, plain_bytes, sealed_bytes, whole_bytes};
use kvtier::tier::remote::secret::Secret;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let sealer = Sealer::new(&Secret::new(&[7; 32]).expect("a secret")).expect("a sealer");
    let name = Name { tenant: 3, hash: [5; HASH_BYTES] };
    assert_eq!(sealer.open(&name, &mut input.to_vec()), None);
    if let Some(whole) = whole_bytes(input) {
        assert!(input.len() >= ENVELOPE_BYTES && whole <= sealed_bytes(MAX_BYTES));
    }
    // What is sealed opens, and no change of it does.
    let Some((&[at, change], text)) = input.split_first_chunk() else { return };
    let mut object = vec![0; sealed_bytes(text.len() as u64) as usize];
    assert_eq!(plain_bytes(object.len() as u64), Some(text.len() as u64));
    if text.len() <= 256 << 10 {
        object[ENVELOPE_BYTES..][..text.len()].copy_from_slice(text);
    }
    assert!(sealer.seal(&name, [9; 16], &mut object));
    let mut changed = object.clone();
    let at = usize::from(at) * 257 % changed.len();
    changed[at] ^= change;
    assert_eq!(sealer.open(&name, &mut changed).is_some(), change == 0);
    assert_eq!(sealer.open(&name, &mut object), Some(text.len() as u64));
});
