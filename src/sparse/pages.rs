//! Pages of keys and the boxes around them: between which numbers the keys of a page lie, for
//! each head. A query times a key of the page cannot be more than the query times the corner
//! of the box that suits it most.
//!
//! A box is kept as its lower corner and its upper one, as the kernels of `attention` take
//! it. With the negative numbers of a query and then its positive ones, that bound is one
//! product: [`split`], [`product`].
//!
//! Pages of a block are saved with it as bytes, little-endian ([`encode`], [`decode`]):
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | `KVTP` |
//! | 4..6 | version: 1 |
//! | 6 | 0: ranges, 1: centres |
//! | 7 | bytes of a number: 2 (the upper half of a float; the lower is zero) or 4 |
//! | 8..24 | tokens of a page, heads, numbers of a head, tokens known (u32 each) |
//! | 24.. | for each page and head the lower corner and the upper one |

use crate::attention::pages::{scores, scratch};
use crate::attention::rows::MAX_DIM;
use crate::attention::{Level, Rows, Scales};
use crate::base::status::Result;
use crate::fail;
use crate::meta::dtype::Dtype;
use crate::meta::view::{Place, View};
use crate::sparse::numbers::{all_finite, fill, grow, reserve};

const MAGIC: &[u8; 4] = b"KVTP";
const VERSION: u16 = 1;
const HEAD_BYTES: usize = 24;

/// What a box is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// All keys lie in it.
    Range,
    /// Its centre is that of the range; it reaches as far as keys lie from it in the mean.
    Centre,
}

/// The pages of a layer.
#[derive(Clone, Debug)]
pub struct Pages {
    tokens_each: u32,
    heads: u32,
    dim: u32,
    bound: Bound,
    /// For each page and head the lower and the upper corner.
    boxes: Vec<f32>,
    /// How many leading tokens of each page are known.
    filled: Vec<u32>,
    /// Keys of the page that was written last, where boxes need them all.
    open: Vec<f32>,
    open_page: Option<u32>,
    row: Vec<f32>,
}

impl Pages {
    /// No pages yet.
    pub fn new(tokens_each: u32, heads: u32, dim: u32, bound: Bound) -> Pages {
        Pages {
            tokens_each,
            heads,
            dim,
            bound,
            boxes: Vec::new(),
            filled: Vec::new(),
            open: Vec::new(),
            open_page: None,
            row: Vec::new(),
        }
    }

    /// Tokens of a page.
    pub fn tokens_each(&self) -> u32 {
        self.tokens_each
    }

    /// Tokens of a page, heads, numbers of a head, and what a box is.
    pub fn geometry(&self) -> (u32, u32, u32, Bound) {
        (self.tokens_each, self.heads, self.dim, self.bound)
    }

    /// Numbers of a page: two corners for each head.
    pub fn numbers_each(&self) -> usize {
        2 * self.heads as usize * self.dim as usize
    }

    /// How many leading tokens of a page are known.
    pub fn filled(&self, page: u32) -> u32 {
        self.filled.get(page as usize).copied().unwrap_or(0)
    }

    /// The corners of a page, all heads.
    pub fn corners(&self, page: u32) -> &[f32] {
        let each = self.numbers_each();
        let from = page as usize * each;
        self.boxes.get(from..from + each).unwrap_or_default()
    }

    /// What this takes.
    pub fn bytes(&self) -> u64 {
        let numbers = self.boxes.capacity() + self.open.capacity() + self.filled.capacity();
        numbers as u64 * 4
    }

    /// Takes in keys that were checked, from a position on. `anew`: pages that they begin in
    /// are forgotten first; otherwise their boxes grow. On an error nothing has changed.
    pub fn put(&mut self, first: u32, keys: &Rows<'_>, anew: bool) -> Result<()> {
        let each = self.tokens_each;
        let (from, offset) = (first / each, first % each);
        if offset > 0 && self.filled(from) < offset {
            let known = self.filled(from);
            fail!(Invalid, "keys from {first} on, of a page with {known} known tokens");
        }
        let tokens = keys.tokens();
        let pages = (first as usize + tokens as usize).div_ceil(each as usize);
        self.reserve(pages)?;
        for token in 0..tokens {
            let (page, at) = ((first + token) / each, (first + token) % each);
            if at == 0 && anew {
                self.forget(page);
            }
            self.add(page, at, keys, token);
            if at + 1 == each || token + 1 == tokens {
                self.shrink(page);
            }
        }
        Ok(())
    }

    /// Room for so many pages, and whatever else filling them takes.
    fn reserve(&mut self, pages: usize) -> Result<()> {
        let each = self.numbers_each();
        let page = each / 2 * self.tokens_each as usize;
        if self.bound == Bound::Centre {
            grow(&mut self.open, page, 0.0)?;
        }
        grow(&mut self.row, self.dim as usize, 0.0)?;
        let more = pages.saturating_sub(self.filled.len());
        reserve(&mut self.filled, more)?;
        grow(&mut self.boxes, pages * each, 0.0)?;
        grow(&mut self.filled, pages, 0)
    }

    fn forget(&mut self, page: u32) {
        if let Some(filled) = self.filled.get_mut(page as usize) {
            *filled = 0;
        }
        if self.open_page == Some(page) {
            self.open_page = None;
        }
    }

    fn add(&mut self, page: u32, at: u32, keys: &Rows<'_>, token: u32) {
        let dim = self.dim as usize;
        let Some(filled) = self.filled.get_mut(page as usize) else { return };
        let is_first = *filled == 0;
        *filled = (*filled).max(at + 1);
        if at == 0 && is_first {
            self.open_page = Some(page);
        }
        let from = page as usize * 2 * dim * self.heads as usize;
        let boxes = self.boxes.get_mut(from..).unwrap_or_default();
        for (head, corners) in (0..self.heads).zip(boxes.chunks_exact_mut(2 * dim)) {
            fill(keys, token, head, &mut self.row);
            let (low, high) = corners.split_at_mut(dim);
            if is_first {
                high.copy_from_slice(&self.row);
                low.copy_from_slice(&self.row);
            }
            for ((high, low), &key) in high.iter_mut().zip(low).zip(&self.row) {
                *high = if key > *high { key } else { *high };
                *low = if key < *low { key } else { *low };
            }
            if self.open_page == Some(page) {
                let to = (at as usize * self.heads as usize + head as usize) * dim;
                if let Some(open) = self.open.get_mut(to..to + dim) {
                    open.copy_from_slice(&self.row);
                }
            }
        }
    }

    /// Makes the box of a page reach as far as its keys lie from its centre in the mean. A
    /// page of which keys were taken back, and others written, keeps a box around them all
    /// until it is complete and sealed.
    fn shrink(&mut self, page: u32) {
        let (dim, heads) = (self.dim as usize, self.heads as usize);
        let count = self.filled(page) as usize;
        let from = page as usize * self.numbers_each();
        if self.bound != Bound::Centre || self.open_page != Some(page) || count == 0 {
            return;
        }
        let boxes = self.boxes.get_mut(from..).unwrap_or_default();
        for (head, corners) in boxes.chunks_exact_mut(2 * dim).take(heads).enumerate() {
            let (low, high) = corners.split_at_mut(dim);
            for (at, (high, low)) in high.iter_mut().zip(low).enumerate() {
                let keys = self.open.iter().skip(head * dim + at).step_by(heads * dim).take(count);
                let ends = keys.clone().fold((f32::INFINITY, f32::NEG_INFINITY), |ends, &key| {
                    (
                        if key < ends.0 { key } else { ends.0 },
                        if key > ends.1 { key } else { ends.1 },
                    )
                });
                // Halves first: the sum of two large numbers may be too large.
                let centre = ends.0 * 0.5 + ends.1 * 0.5;
                let reach = keys.fold(0.0, |sum, &key| sum + (key - centre).abs()) / count as f32;
                (*high, *low) = (centre + reach, centre - reach);
            }
        }
    }

    /// Tokens from a position on are no more. The box of a page of which some are left still
    /// is around all of them, and around what was there.
    pub fn truncate(&mut self, tokens: u32) {
        let (page, left) = (tokens / self.tokens_each, tokens % self.tokens_each);
        if let Some(filled) = self.filled.get_mut(page as usize) {
            *filled = left.min(*filled);
        }
        let pages = page as usize + usize::from(left > 0);
        self.filled.truncate(pages);
        self.boxes.truncate(pages * self.numbers_each());
        if self.open_page.is_some_and(|open| self.filled(open) == 0) {
            self.open_page = None;
        }
        self.shrink(page);
    }

    /// Whether [`Pages::score`] can be asked.
    pub fn has_kernel(&self) -> bool {
        self.dim <= MAX_DIM / 2
    }

    /// The bounds of the products of queries with keys of pages that come one after the
    /// other: for each query and query head, innermost a page.
    pub fn score(
        &self,
        queries: &Rows<'_>,
        (from, count): (u32, u32),
        out: &mut [f32],
        memory: &mut Vec<f32>,
    ) -> Result<()> {
        let run_bytes = 8 * u64::from(self.dim);
        let view = View {
            place: Place::At(self.boxes.as_ptr() as u64),
            tokens: self.filled.len() as u32,
            heads: self.heads,
            run_bytes,
            token_stride_bytes: run_bytes * u64::from(self.heads),
            head_stride_bytes: run_bytes,
        };
        // SAFETY: `boxes` has two corners for each page and head, and is borrowed as long.
        let pages = unsafe { Rows::new(view, Dtype::F32, Scales::None) }?;
        grow(memory, scratch(&pages, queries), 0.0)?;
        scores(Level::best(), &pages, queries, (from, count), out, memory)
    }

    /// Puts in pages as they were saved: so many tokens from the start of a page on, and the
    /// corners of their pages. They were checked.
    pub fn restore(&mut self, page: u32, tokens: u32, corners: &[f32]) -> Result<()> {
        let pages = tokens.div_ceil(self.tokens_each);
        self.reserve(page as usize + pages as usize)?;
        let from = page as usize * self.numbers_each();
        if let Some(boxes) = self.boxes.get_mut(from..from + corners.len()) {
            boxes.copy_from_slice(corners);
        }
        for at in 0..pages {
            self.forget(page + at);
            let known = (tokens - at * self.tokens_each).min(self.tokens_each);
            if let Some(filled) = self.filled.get_mut((page + at) as usize) {
                *filled = known;
            }
        }
        Ok(())
    }
}

/// The negative numbers of a query and then its positive ones, zeros in the other places;
/// added to what is there.
pub fn split(query: &[f32], out: &mut [f32]) {
    let (negative, positive) = out.split_at_mut(query.len().min(out.len()));
    for ((negative, positive), &number) in negative.iter_mut().zip(positive).zip(query) {
        *negative += if number < 0.0 { number } else { 0.0 };
        *positive += if number > 0.0 { number } else { 0.0 };
    }
}

/// The sum of the products of two rows.
pub fn product(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0f32; LANES];
    let (wide_a, wide_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = wide_a.remainder().iter().zip(wide_b.remainder());
    let rest: f32 = rest.map(|(a, b)| a * b).sum();
    for (a, b) in wide_a.zip(wide_b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    // In halves, as processors with wide registers do it.
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = sums.split_at_mut(width);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
        width /= 2;
    }
    sums.first().copied().unwrap_or_default() + rest
}

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
    reserve(out, HEAD_BYTES + (end - page) as usize * pages.numbers_each() * width)?;
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
    reserve(&mut numbers, count)?;
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

/// Blocks of a layer by their ids and by where they lie.
#[derive(Clone, Debug, Default)]
pub struct BlockMap {
    /// Id and place, by id.
    places: Vec<(u32, u32)>,
    /// The id at each place.
    ids: Vec<Option<u32>>,
}

impl BlockMap {
    /// The place of a block: how many blocks of tokens lie before it.
    pub fn place(&self, id: u32) -> Option<u32> {
        let at = self.places.binary_search_by_key(&id, |&(id, _)| id).ok()?;
        self.places.get(at).map(|&(_, place)| place)
    }

    /// Room for one more, at a place: what comes then cannot fail.
    pub fn reserve(&mut self, place: u32) -> Result<()> {
        reserve(&mut self.places, 1)?;
        grow(&mut self.ids, place as usize + 1, None)
    }

    /// A block is at a place now, and nowhere else, and no other is there.
    pub fn set(&mut self, id: u32, place: u32) {
        if self.place(id) == Some(place) {
            return;
        }
        if let Some(old) = self.place(id) {
            self.clear(old);
        }
        self.clear(place);
        let at = self.places.partition_point(|&(other, _)| other < id);
        self.places.insert(at, (id, place));
        if let Some(to) = self.ids.get_mut(place as usize) {
            *to = Some(id);
        }
    }

    fn clear(&mut self, place: u32) {
        let Some(id) = self.ids.get_mut(place as usize).and_then(Option::take) else { return };
        self.places.retain(|&(other, _)| other != id);
    }

    /// Blocks from a place on are no more.
    pub fn truncate(&mut self, places: u32) {
        if self.ids.len() > places as usize {
            self.places.retain(|&(_, place)| place < places);
            self.ids.truncate(places as usize);
        }
    }

    /// What this takes.
    pub fn bytes(&self) -> u64 {
        8 * (self.places.capacity() + self.ids.capacity()) as u64
    }

    /// Blocks with their places, in the order of those; an error if one is unknown or named
    /// twice.
    pub fn find(&self, layer: u32, ids: &[u32], out: &mut Vec<(u32, u32)>) -> Result<()> {
        out.clear();
        reserve(out, ids.len())?;
        for &id in ids {
            let Some(place) = self.place(id) else {
                fail!(Invalid, "block {id} of layer {layer} is not known");
            };
            out.push((id, place));
        }
        out.sort_unstable_by_key(|&(_, place)| place);
        match out.windows(2).find(|two| two.first() == two.last()) {
            Some(two) => {
                let id = two.first().map_or(0, |&(id, _)| id);
                fail!(Invalid, "block {id} is named twice")
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_in_one_place_and_a_place_has_one_block() {
        let mut blocks = BlockMap::default();
        for (id, place) in [(7, 0), (3, 1), (9, 2), (7, 3), (4, 1)] {
            blocks.reserve(place).expect("memory");
            blocks.set(id, place);
        }
        let at = |blocks: &BlockMap| [3, 4, 7, 9].map(|id| blocks.place(id));
        assert_eq!(at(&blocks), [None, Some(1), Some(3), Some(2)]);
        let mut found = Vec::new();
        blocks.find(0, &[9, 4], &mut found).expect("known");
        assert_eq!(found, [(4, 1), (9, 2)]);
        blocks.find(0, &[7, 4], &mut found).expect("known");
        assert_eq!(found, [(4, 1), (7, 3)]);
        assert!(blocks.find(0, &[9, 9], &mut found).is_err());
        assert!(blocks.find(0, &[9, 3], &mut found).is_err());
        blocks.truncate(2);
        assert_eq!(at(&blocks), [None, Some(1), None, None]);
    }
}
