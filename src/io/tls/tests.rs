use super::*;

#[test]
fn bytes_beyond_the_pieces_are_kept() {
    let mut memory = [0u8; 10];
    let start = memory.as_mut_ptr();
    let mut pieces = [(start, 3), (start, 0), (start.wrapping_add(4), 2)].into_iter();
    let mut rest = Vec::new();
    let mut sink =
        Sink { pieces: &mut pieces, at: (std::ptr::null_mut(), 0), placed: 0, rest: &mut rest };
    // SAFETY: the pieces are in the memory.
    unsafe {
        sink.put(b"ab");
        sink.put(b"");
        sink.put(b"cdefg");
        sink.put(b"h");
    }
    assert_eq!(sink.placed, 5);
    assert_eq!((&memory, &rest[..]), (b"abc\0de\0\0\0\0", &b"fgh"[..]));
}

#[test]
fn buffers_grow_to_the_required_size() {
    let mut buffer = b"abc".to_vec();
    let fill = |most: usize| {
        move |room: &mut [u8]| {
            if room.len() < most {
                return Err(Some(InsufficientSizeError { required_size: most }));
            }
            room[..most].fill(7);
            Ok(most)
        }
    };
    grow(&mut buffer, fill(2)).unwrap();
    grow(&mut buffer, fill(100_000)).unwrap();
    assert_eq!((buffer.len(), &buffer[..4]), (100_005, &b"abc\x07"[..]));
    assert!(grow(&mut buffer, |_| Err(None)).is_err());
    assert_eq!(buffer.len(), 100_005);
}
