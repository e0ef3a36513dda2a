//! What a node of a cluster says of slots, from any bytes: whoever has a slot is a node that was
//! named, and whoever follows, too.
#![no_main]

use kvtier::tier::remote::redis::resp::{Reader, Reply, Value, Want};
use kvtier::tier::remote::redis::slots::{MAX_NODES, MAX_REPLY_BYTES, SLOTS, SlotMap};
use kvtier::tier::remote::redis::url::Address;

fn check(value: &Value) {
    let here = Address { host: "here".into(), port: 1 };
    let Some(slots) = SlotMap::read(value, &here) else { return };
    let count = slots.nodes.len();
    assert!((1..=MAX_NODES).contains(&count));
    assert!(slots.nodes.iter().all(|node| !node.host.is_empty() && node.port > 0));
    for slot in 0..SLOTS {
        assert!(slots.node_of(slot).is_none_or(|node| node < count));
    }
    assert_eq!(slots.node_of(SLOTS), None);
    for node in 0..count {
        let followers = slots.followers_of(node);
        assert!(followers.iter().all(|&follower| usize::from(follower) < count));
    }
}

/// Runs of slots by the bytes alone, so that most of them are read.
fn made(input: &[u8]) -> Value {
    let run = |bytes: &[u8]| {
        let number = |at: usize| i64::from(bytes[at]) << 8 | i64::from(bytes[at + 1]);
        let node = |at: usize| {
            let host = match bytes[at] % 4 {
                0 => Value::Nil,
                1 => Value::Text(Vec::new()),
                2 => Value::Text(vec![b'a' + bytes[at] % 26]),
                _ => Value::Text(vec![bytes[at]]),
            };
            Value::List(vec![host, Value::Number(number(at + 1))])
        };
        let numbers = [Value::Number(number(0)), Value::Number(number(2))];
        Value::List(numbers.into_iter().chain([node(4), node(7)]).collect())
    };
    Value::List(input.chunks_exact(10).map(run).collect())
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    check(&made(input));
    let mut reader = Reader::default();
    let mut left = input;
    while !left.is_empty() {
        let spare = reader.spare();
        let count = spare.len().min(left.len());
        spare[..count].copy_from_slice(&left[..count]);
        reader.filled(count);
        left = &left[count..];
        match reader.next(Want::Value(MAX_REPLY_BYTES)) {
            Ok(Some(Reply::Value(value))) => return check(&value),
            Ok(_) => {}
            Err(_) => return,
        }
    }
});
