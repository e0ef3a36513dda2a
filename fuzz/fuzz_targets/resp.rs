//! What a Redis server says, from any bytes in any pieces: no answer has more than was asked for,
//! and the pieces make no difference.
#![no_main]

use kvtier::tier::remote::fault::Malformed;
use kvtier::tier::remote::redis::resp::{Reader, Reply, Value, Want};
use kvtier::tier::remote::redis::slots::SlotMap;
use kvtier::tier::remote::redis::url::Address;

const MOST: usize = 4096;
const WANTS: [Want; 3] = [Want::Word, Want::Value(MOST), Want::Body(300)];

/// What comes of it: values, and the bytes of objects.
fn read(input: &[u8], piece: usize, wants: usize) -> (Vec<Value>, Vec<u8>, Option<Malformed>) {
    let (mut values, mut bodies) = (Vec::new(), Vec::new());
    let mut reader = Reader::default();
    let mut left = input;
    let mut answers = wants;
    loop {
        bodies.extend_from_slice(reader.take(u64::MAX));
        match reader.next(WANTS[answers % WANTS.len()]) {
            Ok(Some(Reply::Value(value))) => {
                values.push(value);
                answers += 1;
            }
            Ok(Some(Reply::Body(bytes))) => assert!(bytes <= 300),
            Ok(Some(Reply::End)) => answers += 1,
            Err(nonsense) => return (values, bodies, Some(nonsense)),
            Ok(None) if left.is_empty() => return (values, bodies, None),
            Ok(None) => {
                let spare = reader.spare();
                let count = spare.len().min(left.len()).min(piece);
                assert!(count > 0, "no room for more");
                spare[..count].copy_from_slice(&left[..count]);
                reader.filled(count);
                left = &left[count..];
            }
        }
    }
}

fn depth(value: &Value) -> usize {
    value.list().map_or(0, |values| 1 + values.iter().map(depth).max().unwrap_or(0))
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&[wants, piece], input)) = input.split_first_chunk() else { return };
    let (wants, piece) = (usize::from(wants), usize::from(piece) + 1);
    let whole = read(input, usize::MAX, wants);
    assert_eq!(whole, read(input, piece, wants));
    let here = Address { host: "here".into(), port: 1 };
    for value in &whole.0 {
        assert!(depth(value) <= 8);
        // Answers about slots are what else is read of values.
        drop(SlotMap::read(value, &here));
    }
});
