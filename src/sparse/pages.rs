//! Pages of keys with their bounding boxes: for each head the range of every dimension of the keys
//! of a page. The product of a query with any key of the page is at most its product with the best
//! corner of the box.
//!
//! A box is stored as its lower and its upper corner, as the kernels of `attention` take it. With
//! the negative numbers of a query followed by its positive ones, that bound is one product:
//! [`split`], [`product`].
//!
//! Pages are saved with their block as bytes, little-endian ([`encode`], [`decode`]):
//!
//! | bytes | contents |
//! |---|---|
//! | 0..4 | `KVTP` |
//! | 4..6 | version: 1 |
//! | 6 | 0: ranges, 1: centres |
//! | 7 | bytes of a number: 2 (the upper half of a float; the lower half is zero) or 4 |
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

/// The kind of box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// All keys lie in the box.
    Range,
    /// The box is centred on the range and reaches the mean distance of keys from the centre.
    Centre,
}

/// The pages of a layer.
#[derive(Clone, Debug)]
pub struct Pages {
    tokens_each: u32,
    heads: u32,
    dim: u32,
    bound: Bound,
    /// For each page and head: lower corner, upper corner.
    boxes: Vec<f32>,
    /// Known leading tokens of each page.
    filled: Vec<u32>,
    /// Keys of the page that was written last, where boxes depend on all of them.
    open: Vec<f32>,
    open_page: Option<u32>,
    row: Vec<f32>,
}

impl Pages {
    /// An empty table.
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

    /// Tokens of a page, heads, numbers of a head, and kind of box.
    pub fn geometry(&self) -> (u32, u32, u32, Bound) {
        (self.tokens_each, self.heads, self.dim, self.bound)
    }

    /// Numbers of a page: two corners for each head.
    pub fn numbers_each(&self) -> usize {
        2 * self.heads as usize * self.dim as usize
    }

    /// Known leading tokens of a page.
    pub fn filled(&self, page: u32) -> u32 {
        self.filled.get(page as usize).copied().unwrap_or(0)
    }

    /// The corners of a page, all heads.
    pub fn corners(&self, page: u32) -> &[f32] {
        let each = self.numbers_each();
        let from = page as usize * each;
        self.boxes.get(from..from + each).unwrap_or_default()
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        let numbers = self.boxes.capacity() + self.open.capacity() + self.filled.capacity();
        numbers as u64 * 4
    }

    /// Adds checked keys from position `first` on. With `anew`, pages that begin in them are
    /// cleared first; otherwise boxes grow. On an error nothing has changed.
    pub fn put(&mut self, first: u32, keys: &Rows<'_>, anew: bool) -> Result<()> {
        let each = self.tokens_each;
        let (from, offset) = (first / each, first % each);
        if offset > 0 && self.filled(from) < offset {
            let known = self.filled(from);
            fail!(
                Invalid,
                "keys start at {first}, inside a page of which only {known} tokens are known"
            );
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

    /// Reserves memory for this many pages, and the working memory to fill them.
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

    /// Shrinks the box of a page to the mean distance of its keys from the centre. A page with
    /// truncated and rewritten keys keeps a box around all of them, until it is complete and
    /// sealed.
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
                // Halved first: the sum of two large numbers may overflow.
                let centre = ends.0 * 0.5 + ends.1 * 0.5;
                let reach = keys.fold(0.0, |sum, &key| sum + (key - centre).abs()) / count as f32;
                (*high, *low) = (centre + reach, centre - reach);
            }
        }
    }

    /// Drops tokens from position `tokens` on. The box of a partly truncated page still covers its
    /// remaining keys, and may be too wide.
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

    /// Whether [`Pages::score`] supports this head size.
    pub fn has_kernel(&self) -> bool {
        self.dim <= MAX_DIM / 2
    }

    /// Upper bounds of the products of queries with keys of consecutive pages: for each query and
    /// query head, pages innermost.
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
        // SAFETY: `boxes` has two corners for each page and head, and is borrowed by the rows.
        let pages = unsafe { Rows::new(view, Dtype::F32, Scales::None) }?;
        grow(memory, scratch(queries), 0.0)?;
        scores(Level::best(), &pages, queries, (from, count), out, memory)
    }

    /// Restores checked pages: `tokens` tokens from the start of a page on, and the corners of
    /// their pages.
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

/// Adds the negative numbers of a query to the first half of `out`, the positive ones to the
/// second.
pub fn split(query: &[f32], out: &mut [f32]) {
    let (negative, positive) = out.split_at_mut(query.len().min(out.len()));
    for ((negative, positive), &number) in negative.iter_mut().zip(positive).zip(query) {
        *negative += if number < 0.0 { number } else { 0.0 };
        *positive += if number > 0.0 { number } else { 0.0 };
    }
}

/// The dot product of two rows.
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
    // Summed in halves, as processors with wide registers do it.
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

/// Appends the bytes of pages from `page` on that hold `tokens` tokens.
pub fn encode(pages: &Pages, page: u32, tokens: u32, out: &mut Vec<u8>) -> Result<()> {
    let end = page + tokens.div_ceil(pages.tokens_each());
    let numbers = || (page..end).flat_map(|page| pages.corners(page));
    // Corners of ranges are numbers of keys: both fit into the same types.
    let is_narrow = numbers().all(|number| number.to_bits() & 0xFFFF == 0);
    let width = if is_narrow { 2 } else { 4 };
    reserve(out, HEAD_BYTES + (end - page) as usize * pages.numbers_each() * width)?;
    out.extend_from_slice(&header(pages, tokens, width as u8));
    for number in numbers() {
        out.extend_from_slice(number.to_le_bytes().get(4 - width..).unwrap_or_default());
    }
    Ok(())
}

/// Decodes pages of the geometry of `pages`, of at most `most` tokens: the known tokens and the
/// corners.
pub fn decode(pages: &Pages, most: u32, bytes: &[u8]) -> Result<(u32, Vec<f32>)> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
        fail!(Corrupt, "saved pages of {} bytes are too short", bytes.len());
    };
    let [m0, m1, m2, m3, v0, v1, _, width, .., t0, t1, t2, t3] = *head;
    if [m0, m1, m2, m3] != *MAGIC {
        fail!(Corrupt, "the bytes are not saved pages");
    }
    let version = u16::from_le_bytes([v0, v1]);
    if version != VERSION {
        fail!(TooNew, "saved pages have version {version}, this library reads {VERSION}");
    }
    let tokens = u32::from_le_bytes([t0, t1, t2, t3]);
    if *head != header(pages, tokens, width) || !matches!(width, 2 | 4) {
        fail!(Corrupt, "saved pages are of another policy or model");
    }
    if tokens == 0 || tokens > most {
        fail!(Corrupt, "saved pages have {tokens} tokens, a block has 1 to {most}");
    }
    let count = tokens.div_ceil(pages.tokens_each()) as usize * pages.numbers_each();
    if rest.len() != count * usize::from(width) {
        fail!(Corrupt, "{} bytes do not hold {count} numbers", rest.len());
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
        fail!(Corrupt, "saved pages have corners that are not finite or not ordered");
    }
    Ok((tokens, numbers))
}

/// Blocks of a layer by their id and by their index in the sequence.
#[derive(Clone, Debug, Default)]
pub struct BlockMap {
    /// Id and block index, sorted by id.
    places: Vec<(u32, u32)>,
    /// The id at each block index.
    ids: Vec<Option<u32>>,
}

impl BlockMap {
    /// The block index of an id.
    pub fn place(&self, id: u32) -> Option<u32> {
        let at = self.places.binary_search_by_key(&id, |&(id, _)| id).ok()?;
        self.places.get(at).map(|&(_, place)| place)
    }

    /// Reserves memory for a block at an index: the next [`BlockMap::set`] cannot fail.
    pub fn reserve(&mut self, place: u32) -> Result<()> {
        reserve(&mut self.places, 1)?;
        grow(&mut self.ids, place as usize + 1, None)
    }

    /// Puts a block at an index. It leaves its old index, and the old block of the index is
    /// dropped.
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

    /// Drops blocks from an index on.
    pub fn truncate(&mut self, places: u32) {
        if self.ids.len() > places as usize {
            self.places.retain(|&(_, place)| place < places);
            self.ids.truncate(places as usize);
        }
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        8 * (self.places.capacity() + self.ids.capacity()) as u64
    }

    /// Finds blocks, sorted by index. Fails if a block is unknown or named twice.
    pub fn find(&self, layer: u32, ids: &[u32], out: &mut Vec<(u32, u32)>) -> Result<()> {
        out.clear();
        reserve(out, ids.len())?;
        for &id in ids {
            let Some(place) = self.place(id) else {
                fail!(Invalid, "block {id} of layer {layer} is unknown: seal or load it first");
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
    fn a_block_has_one_index_and_an_index_one_block() {
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
