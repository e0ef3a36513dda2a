//! What servers of S3 say, from any bytes: heads, bodies in chunks, errors. Where it comes in two
//! pieces it means the same.
#![no_main]

use kvtier::tier::remote::fault::Malformed;
use kvtier::tier::remote::s3::http::{Body, Chunks, Head, MAX_HEAD_BYTES};
use kvtier::tier::remote::s3::xml::Said;

/// A body out of its chunks, and how many bytes were taken; `cut` = where the second piece begins.
fn unchunk(bytes: &[u8], cut: usize) -> Result<(Vec<u8>, usize, bool), Malformed> {
    let (mut chunks, mut body) = (Chunks::default(), Vec::new());
    let (first, second) = bytes.split_at(cut);
    let mut add = |piece: &[u8]| {
        body.extend_from_slice(piece);
        Ok(())
    };
    let mut taken = chunks.take(first, &mut add)?;
    if taken == first.len() {
        taken += chunks.take(second, &mut add)?;
    }
    Ok((body, taken, chunks.is_done()))
}

fn check(bytes: &[u8], cut: usize) {
    match Head::read(bytes) {
        Ok(Some((head, end))) => {
            assert!(end <= bytes.len() && end <= MAX_HEAD_BYTES);
            assert!((100..600).contains(&head.status));
            assert!(head.length.is_none() || head.body != Body::Chunks);
            assert_eq!(Head::read(&bytes[..end]), Ok(Some((head, end))));
            // What is not whole is no head, and was no nonsense either.
            assert_eq!(Head::read(&bytes[..cut.min(end - 1)]), Ok(None));
        }
        Ok(None) => assert!(bytes.len() < MAX_HEAD_BYTES),
        Err(Malformed(words)) => assert!(!words.is_empty()),
    }
    let whole = unchunk(bytes, 0);
    assert_eq!(unchunk(bytes, cut).is_ok(), whole.is_ok());
    if let Ok((body, taken, is_done)) = whole {
        assert!(body.len() <= taken && (is_done || taken == bytes.len()));
        assert_eq!(unchunk(bytes, cut), Ok((body, taken, is_done)));
    }
    if let Some(said) = Said::read(bytes) {
        let all = [&said.code, &said.message, &said.region, &said.endpoint];
        assert!(all.iter().all(|text| text.len() < 400 && !text.contains(char::is_control)));
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((cut, bytes)) = input.split_first_chunk() else { return };
    let cut = |length: usize| usize::from(u16::from_le_bytes(*cut)) % (length + 1);
    check(bytes, cut(bytes.len()));
    let head = [b"HTTP/1.1 206 P\r\n", bytes, b"\r\n\r\n"].concat();
    check(&head, cut(head.len()));
    let error = [b"<Error><Code>", bytes, b"</Code></Error>"].concat();
    check(&error, cut(error.len()));
});
