//! Pages of a block as bytes, to be kept with it. Little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | `KVTP` |
//! | 4..6 | version: 1 |
//! | 6 | 0: ranges, 1: centres |
//! | 7 | bytes of a number: 2 (the upper half of a float; the lower is zero) or 4 |
//! | 8..24 | tokens of a page, heads, numbers of a head, tokens known (u32 each) |
//! | 24.. | for each page and head the lower corner and the upper one |

use crate::base::status::Result;
use crate::fail;
use crate::sparse::numbers::all_finite;
use crate::sparse::numbers::room;
use crate::sparse::pages::Pages;

const MAGIC: &[u8; 4] = b"KVTP";
const VERSION: u16 = 1;
const HEAD_BYTES: usize = 24;

fn header(pages: &Pages, tokens: u32, width: u8) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    let (tokens_each, heads, dim, bound) = pages.geometry();
    let [low, high] = VERSION.to_le_bytes();
    head[..8].copy_from_slice(&[b'K', b'V', b'T', b'P', low, high, bound as u8, width]);
    for (to, number) in head[8..].chunks_exact_mut(4).zip([tokens_each, heads, dim, tokens]) {
        to.copy_from_slice(&number.to_le_bytes());
    }
    head
}

/// Adds the bytes of pages from one on that have so many tokens.
pub fn encode(pages: &Pages, page: u32, tokens: u32, out: &mut Vec<u8>) -> Result<()> {
    let end = page + tokens.div_ceil(pages.tokens_each());
    let numbers = || (page..end).flat_map(|page| pages.corners(page));
    // Corners of ranges are keys: what those can be written as, these can too.
    let is_narrow = numbers().all(|number| number.to_bits() & 0xFFFF == 0);
    let width = if is_narrow { 2 } else { 4 };
    room(out, HEAD_BYTES + (end - page) as usize * pages.numbers_each() * width)?;
    out.extend_from_slice(&header(pages, tokens, width as u8));
    for number in numbers() {
        out.extend_from_slice(number.to_le_bytes().get(4 - width..).unwrap_or_default());
    }
    Ok(())
}

/// What was encoded, if these bytes are pages such as `pages` has, of at most so many tokens:
/// the tokens known and the corners.
pub fn decode(pages: &Pages, most: u32, bytes: &[u8]) -> Result<(u32, Vec<f32>)> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
        fail!(Corrupt, "pages of {} bytes are too short", bytes.len());
    };
    let [m0, m1, m2, m3, v0, v1, _, width, .., t0, t1, t2, t3] = *head;
    if [m0, m1, m2, m3] != *MAGIC {
        fail!(Corrupt, "these bytes are no pages");
    }
    let version = u16::from_le_bytes([v0, v1]);
    if version != VERSION {
        fail!(TooNew, "pages of version {version}, this library knows {VERSION}");
    }
    let tokens = u32::from_le_bytes([t0, t1, t2, t3]);
    if *head != header(pages, tokens, width) || !matches!(width, 2 | 4) {
        fail!(Corrupt, "these are pages of another policy or model");
    }
    if tokens == 0 || tokens > most {
        fail!(Corrupt, "pages of {tokens} tokens in a block of {most}");
    }
    let count = tokens.div_ceil(pages.tokens_each()) as usize * pages.numbers_each();
    if rest.len() != count * usize::from(width) {
        fail!(Corrupt, "{} bytes for {count} numbers", rest.len());
    }
    let mut numbers = Vec::new();
    room(&mut numbers, count)?;
    numbers.extend(rest.chunks_exact(usize::from(width)).map(|bytes| {
        let mut whole = [0; 4];
        whole.iter_mut().rev().zip(bytes.iter().rev()).for_each(|(to, &byte)| *to = byte);
        f32::from_le_bytes(whole)
    }));
    let dim = pages.numbers_each() / pages.geometry().1 as usize / 2;
    let is_box = |corners: &[f32]| {
        let (low, high) = corners.split_at(dim);
        high.iter().zip(low).all(|(high, low)| high >= low)
    };
    if !all_finite(&numbers) || !numbers.chunks_exact(2 * dim).all(is_box) {
        fail!(Corrupt, "corners of pages are no corners");
    }
    Ok((tokens, numbers))
}
