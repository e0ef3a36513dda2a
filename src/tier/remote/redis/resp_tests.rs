use proptest::prelude::*;

use super::*;

/// All values, when bytes arrive in steps; bodies as strings.
fn read(bytes: &[u8], expected: Want, step: usize) -> Result<Vec<Value>, Malformed> {
    let (mut reader, mut replies, mut body) = (Reader::default(), Vec::new(), Vec::new());
    let mut rest = bytes;
    loop {
        while let Some(reply) = reader.next(expected)? {
            match reply {
                Reply::Value(value) => replies.push(value),
                Reply::Body(_) => {}
                Reply::End => replies.push(Value::Text(std::mem::take(&mut body))),
            }
            body.extend_from_slice(reader.take(u64::MAX));
        }
        body.extend_from_slice(reader.take(u64::MAX));
        let Some(Reply::End) = reader.next(expected)? else {
            if rest.is_empty() {
                return Ok(replies);
            }
            let spare = reader.spare();
            assert!(!spare.is_empty());
            let count = step.min(rest.len()).min(spare.len());
            spare[..count].copy_from_slice(&rest[..count]);
            reader.filled(count);
            assert!(reader.buffer.len() <= MAX_LINE_BYTES + BUFFER_BYTES);
            rest = &rest[count..];
            continue;
        };
        replies.push(Value::Text(std::mem::take(&mut body)));
    }
}

fn all(bytes: &[u8], expected: Want) -> Result<Vec<Value>, Malformed> {
    let whole = read(bytes, expected, bytes.len().max(1));
    for step in [1, 2, 3, 5, 17] {
        assert_eq!(read(bytes, expected, step), whole, "in steps of {step}");
    }
    whole
}

fn text(text: &str) -> Value {
    Value::Text(text.into())
}

#[test]
fn every_kind_of_value_is_decoded() {
    let most = Want::Value(1 << 20);
    let replies = b"+OK\r\n-ERR no\r\n:-12\r\n$5\r\nhel\r\n\r\n$-1\r\n*-1\r\n_\r\n#t\r\n#f\r\n,1.5\r\n(123\r\n\
        !3\r\nbad\r\n=5\r\ntxt:x\r\n*2\r\n:1\r\n*1\r\n+a\r\n~1\r\n:2\r\n%1\r\n+k\r\n:3\r\n*0\r\n$0\r\n\r\n";
    let list = |values: &[Value]| Value::List(values.to_vec());
    let expected = [
        text("OK"),
        Value::Error(b"ERR no".to_vec()),
        Value::Number(-12),
        text("hel\r\n"),
        Value::Nil,
        Value::Nil,
        Value::Nil,
        Value::Number(1),
        Value::Number(0),
        text("1.5"),
        text("123"),
        Value::Error(b"bad".to_vec()),
        text("txt:x"),
        list(&[Value::Number(1), list(&[text("a")])]),
        list(&[Value::Number(2)]),
        list(&[text("k"), Value::Number(3)]),
        list(&[]),
        text(""),
    ];
    assert_eq!(all(replies, most).unwrap(), expected);
    assert_eq!(expected[15].under(b"k"), Some(&Value::Number(3)));
    assert_eq!(expected[15].under(b"x"), None);
}

#[test]
fn pushes_and_attributes_are_skipped() {
    let replies = b">3\r\n+message\r\n$1\r\nx\r\n*2\r\n:1\r\n:2\r\n:7\r\n|1\r\n+ttl\r\n:9\r\n:8\r\n>0\r\n:9\r\n";
    for expected in [Want::Word, Want::Value(100), Want::Body(9)] {
        let got = all(replies, expected).unwrap();
        assert_eq!(got, [Value::Number(7), Value::Number(8), Value::Number(9)]);
    }
    let inside = b"*2\r\n|1\r\n+a\r\n*1\r\n:5\r\n:1\r\n:2\r\n";
    let got = all(inside, Want::Value(10_000)).unwrap();
    assert_eq!(got, [Value::List(vec![Value::Number(1), Value::Number(2)])]);
}

#[test]
fn bodies_are_left_to_the_caller() {
    let replies = b"$4\r\nab\r\n\r\n$0\r\n\r\n$-1\r\n-ERR no\r\n";
    let expected = [text("ab\r\n"), text(""), Value::Nil, Value::Error(b"ERR no".to_vec())];
    assert_eq!(all(replies, Want::Body(4)).unwrap(), expected);
    assert!(all(replies, Want::Body(3)).is_err());
    assert!(all(b"$4\r\nabcdefgh\r\n", Want::Body(4)).is_err());
    // Bytes that go past the reader.
    let mut reader = Reader::default();
    reader.spare()[..8].copy_from_slice(b"$9\r\nabc\r");
    reader.filled(7);
    assert_eq!(reader.next(Want::Body(9)), Ok(Some(Reply::Body(9))));
    assert_eq!(reader.take(2), b"ab");
    assert_eq!(reader.take(9), b"c");
    assert_eq!((reader.body_left(), reader.next(Want::Word)), (6, Ok(None)));
    reader.passed(6);
    reader.spare()[..2].copy_from_slice(b"\r\n");
    reader.filled(2);
    assert!(!reader.is_idle());
    assert_eq!(reader.next(Want::Word), Ok(Some(Reply::End)));
    assert!(reader.is_idle());
}

#[test]
fn every_length_has_a_limit() {
    let value = Want::Value(1 << 20);
    let long = |kind: &str, bytes: usize| [kind.as_bytes(), &vec![b'x'; bytes], b"\r\n"].concat();
    assert!(all(&long("+", MAX_LINE_BYTES - 2), value).is_ok());
    assert!(all(&long("+", MAX_LINE_BYTES), value).is_err());
    assert!(read(&vec![b'x'; MAX_LINE_BYTES + 1], value, 1000).is_err());
    assert!(all("*1\r\n".repeat(MAX_DEPTH).as_bytes(), value).is_ok());
    assert!(all("*1\r\n".repeat(MAX_DEPTH + 1).as_bytes(), value).is_err());
    for bad in [
        "*65537\r\n",
        "%32769\r\n",
        ">65537\r\n",
        "%9223372036854775807\r\n",
        "$1048577\r\n",
        "$9223372036854775807\r\n",
        "$9223372036854775808\r\n",
        "$-2\r\n",
        "*-2\r\n",
        "$?\r\n",
        "$x\r\n",
        "$\r\n",
        ":\r\n",
        ":1 \r\n",
        "?\r\n",
        "\r\n",
        "\n",
        "+a\n",
        "$3\r\nabcd\r\n",
        "*1\r\n>1\r\n",
    ] {
        assert!(all(bad.as_bytes(), value).is_err(), "{bad:?}");
    }
    for bad in ["$2\r\nab\r\n", "*1\r\n:1\r\n", "*0\r\n", "%0\r\n", "=2\r\nab\r\n"] {
        assert!(all(bad.as_bytes(), Want::Word).is_err(), "{bad:?}");
    }
    // As many small values as an array may have: more than the byte limit allows.
    let many = format!("*{MAX_LIST}\r\n{}", ":1\r\n".repeat(MAX_LIST));
    assert!(read(many.as_bytes(), Want::Value(16 << 20), 9999).is_ok());
    assert!(read(many.as_bytes(), value, 9999).is_err());
    assert!(read(many.replace('*', ">").as_bytes(), Want::Word, 9999).is_err());
}

/// A valid reply.
fn replies() -> impl Strategy<Value = Vec<u8>> {
    let word = "[a-zA-Z0-9 ]{0,20}";
    let leaf = prop_oneof![
        word.prop_map(|w| format!("+{w}\r\n").into_bytes()),
        word.prop_map(|w| format!("-{w}\r\n").into_bytes()),
        any::<i64>().prop_map(|n| format!(":{n}\r\n").into_bytes()),
        Just(b"_\r\n".to_vec()),
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(|bytes| {
            [format!("${}\r\n", bytes.len()).as_bytes(), &bytes, b"\r\n"].concat()
        }),
    ];
    leaf.prop_recursive(3, 20, 5, |inner| {
        (proptest::collection::vec(inner, 0..5), prop_oneof![Just('*'), Just('~'), Just('>')])
            .prop_map(|(values, kind)| {
                [format!("{kind}{}\r\n", values.len()).into_bytes(), values.concat()].concat()
            })
    })
}

proptest! {
    #[test]
    fn decoding_does_not_depend_on_the_split_of_bytes(
        bytes in proptest::collection::vec(replies(), 0..6), step in 1..64usize, cut in 0..400usize,
    ) {
        let bytes = bytes.concat();
        let bytes = &bytes[..cut.min(bytes.len())];
        for expected in [Want::Word, Want::Value(4096), Want::Body(16)] {
            prop_assert_eq!(read(bytes, expected, step), read(bytes, expected, bytes.len().max(1)));
        }
    }

    #[test]
    fn no_input_panics(
        parts in proptest::collection::vec(prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..30),
            "[-+:$*%~>|=!_#,(][-0-9]{0,4}".prop_map(|s| [s.as_bytes(), b"\r\n"].concat()),
            replies(),
        ], 0..20),
        step in 1..64usize,
    ) {
        let bytes = parts.concat();
        for expected in [Want::Word, Want::Value(4096), Want::Body(16)] {
            prop_assert_eq!(read(&bytes, expected, step), read(&bytes, expected, bytes.len().max(1)));
        }
    }
}
