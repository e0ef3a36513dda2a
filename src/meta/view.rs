//! Views: address and strides of one plane of the KV cache in an engine's memory. Nothing here
//! reads that memory.
//!
//! The store keeps a plane in *canonical* order: tokens, then heads, then the bytes of a head,
//! without gaps. A view maps `[tokens, heads, dim]`, `[heads, tokens, dim]`, interleaved K and V,
//! padded rows, and pages of those to that order. Other orders are possible, too: a view with
//! tokens innermost has "heads" of one number each.

use crate::base::status::Result;
use crate::fail;

/// Most heads of a view; a transposed view has one for every number.
pub const MAX_HEADS: u32 = 1 << 20;
/// Most bytes of a plane.
pub const MAX_PLANE_BYTES: u64 = 1 << 40;

/// Addresses of the tokens of a view.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// One address; tokens follow at their stride.
    At(u64),
    /// Pages of equal size.
    Pages {
        /// Address of each page.
        addresses: &'a [u64],
        /// Tokens in a page.
        page_tokens: u32,
        /// Added to each address, so that one table serves K, V and all layers.
        shift_bytes: i64,
    },
}

/// One plane in an engine's memory. The bytes of a token and head are contiguous. Tokens and heads
/// have constant strides; that of tokens holds within a page.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Addresses.
    pub place: Place<'a>,
    /// Tokens of the view.
    pub tokens: u32,
    /// Heads of a token.
    pub heads: u32,
    /// Bytes of one head of a token.
    pub run_bytes: u64,
    /// Distance of tokens.
    pub token_stride_bytes: u64,
    /// Distance of heads.
    pub head_stride_bytes: u64,
}

/// Use of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The view is read.
    Source,
    /// The view is written.
    Target,
}

/// A checked range of tokens of a view: no address arithmetic overflows. The caller guarantees that
/// the memory exists.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    view: View<'a>,
    first: u32,
    tokens: u32,
}

/// Bytes that are contiguous in canonical order, and `count` runs at constant distance in the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strip {
    /// Offset in canonical order, from the start of the span.
    pub at: u64,
    /// Address of its first run.
    pub address: u64,
    /// Number of runs.
    pub count: u64,
    /// Distance of runs.
    pub stride_bytes: u64,
    /// Bytes of a run.
    pub run_bytes: u64,
}

impl Strip {
    /// Bytes of the strip.
    pub fn bytes(&self) -> u64 {
        self.count * self.run_bytes
    }
}

impl<'a> View<'a> {
    /// A view of tokens in canonical order.
    pub fn canonical(address: u64, tokens: u32, token_bytes: u64) -> View<'static> {
        View {
            place: Place::At(address),
            tokens,
            heads: 1,
            run_bytes: token_bytes,
            token_stride_bytes: token_bytes,
            head_stride_bytes: token_bytes,
        }
    }

    /// Bytes of a token, all heads.
    pub fn token_bytes(&self) -> u64 {
        u64::from(self.heads).saturating_mul(self.run_bytes)
    }

    /// Checks `tokens` tokens from `first` on.
    ///
    /// Tokens and heads of a target must not overlap. Within a page this is checked: the outer
    /// stride must pass all inner ones, as in every tensor. Of pages only repetitions in a row are
    /// rejected.
    pub fn span(&self, first: u32, tokens: u32, side: Side) -> Result<Span<'a>> {
        self.check_sizes(first, tokens)?;
        match self.place {
            Place::At(address) => {
                // Tokens before the first are not touched, but their strides count.
                let reach = self.reach(u64::from(first) + u64::from(tokens))?;
                check_address(Some(address), reach)?;
                self.check_strides(tokens, side)?;
            }
            Place::Pages { addresses, page_tokens, shift_bytes } => {
                let room = addresses.len() as u64 * u64::from(page_tokens);
                if page_tokens == 0 || u64::from(self.tokens) > room {
                    fail!(Invalid, "a view of {} tokens, but its pages hold {room}", self.tokens);
                }
                let reach = self.reach(u64::from(page_tokens))?;
                self.check_strides(tokens.min(page_tokens), side)?;
                let end = first + tokens;
                let used = (first / page_tokens) as usize..end.div_ceil(page_tokens) as usize;
                let pages = addresses.get(used).unwrap_or_default();
                for &page in pages {
                    check_address(page.checked_add_signed(shift_bytes), reach)?;
                }
                let twice = pages.iter().zip(pages.iter().skip(1)).any(|(a, b)| a == b);
                if side == Side::Target && twice {
                    fail!(Invalid, "a target has the same page twice in a row");
                }
            }
        }
        Ok(Span { view: *self, first, tokens })
    }

    fn check_sizes(&self, first: u32, tokens: u32) -> Result<()> {
        let end = first.checked_add(tokens);
        if tokens == 0 || end.is_none_or(|end| end > self.tokens) {
            let has = self.tokens;
            fail!(
                Invalid,
                "{tokens} tokens from row {first} on were requested of a view of {has} tokens: its \
                 `tokens` says how many rows the engine's tensor has"
            );
        }
        if self.heads == 0 || self.heads > MAX_HEADS || self.run_bytes == 0 {
            fail!(
                Invalid,
                "a view of {} heads of {} bytes: 1 to {MAX_HEADS} heads of at least 1 byte are accepted",
                self.heads,
                self.run_bytes
            );
        }
        let bytes = self.token_bytes().checked_mul(u64::from(tokens));
        if bytes.is_none_or(|bytes| bytes > MAX_PLANE_BYTES) {
            fail!(Limit, "a plane exceeds the limit of {MAX_PLANE_BYTES} bytes");
        }
        Ok(())
    }

    /// Distance from the start of the first of `tokens` tokens to the end of the last.
    fn reach(&self, tokens: u64) -> Result<u64> {
        let to_token = (tokens - 1).checked_mul(self.token_stride_bytes);
        let to_head = u64::from(self.heads - 1).checked_mul(self.head_stride_bytes);
        let reach = to_token
            .zip(to_head)
            .and_then(|(a, b)| a.checked_add(b))
            .and_then(|sum| sum.checked_add(self.run_bytes))
            .filter(|&reach| i64::try_from(reach).is_ok());
        match reach {
            Some(reach) => Ok(reach),
            None => fail!(Invalid, "the strides of a view exceed the address space"),
        }
    }

    /// Checks that the runs of a target do not overlap.
    fn check_strides(&self, tokens: u32, side: Side) -> Result<()> {
        if side == Side::Source {
            return Ok(());
        }
        let tokens = (u64::from(tokens), self.token_stride_bytes);
        let heads = (u64::from(self.heads), self.head_stride_bytes);
        let alone = |(n, _): (u64, u64)| n == 1;
        let (inner, outer) = if alone(tokens) || (!alone(heads) && heads.1 <= tokens.1) {
            (heads, tokens)
        } else {
            (tokens, heads)
        };
        // Cannot overflow: `reach` computed more.
        let past_inner = (inner.0 - 1) * inner.1 + self.run_bytes;
        if (inner.0 > 1 && inner.1 < self.run_bytes) || (outer.0 > 1 && outer.1 < past_inner) {
            fail!(
                Invalid,
                "a target of {} bytes for each head with strides of {} and {} overlaps itself",
                self.run_bytes,
                self.token_stride_bytes,
                self.head_stride_bytes
            );
        }
        Ok(())
    }

    /// The address of a token, and the number of tokens that follow at the token stride.
    fn locate(&self, token: u32, end: u32) -> (u64, u32) {
        let (addresses, page_tokens, shift) = match self.place {
            Place::At(address) => {
                return (address + u64::from(token) * self.token_stride_bytes, end - token);
            }
            Place::Pages { addresses, page_tokens, shift_bytes } => {
                (addresses, page_tokens, shift_bytes)
            }
        };
        let (mut page, within) = ((token / page_tokens) as usize, token % page_tokens);
        let start_of = |page: usize| addresses.get(page).copied().unwrap_or(0);
        let address =
            start_of(page).wrapping_add_signed(shift) + u64::from(within) * self.token_stride_bytes;
        let mut found = (page_tokens - within).min(end - token);
        // Adjacent pages are merged.
        let page_bytes = u64::from(page_tokens).checked_mul(self.token_stride_bytes);
        let after = |page| page_bytes.and_then(|bytes| start_of(page).checked_add(bytes));
        while found < end - token && after(page) == Some(start_of(page + 1)) {
            page += 1;
            found += page_tokens.min(end - token - found);
        }
        (address, found)
    }
}

fn check_address(address: Option<u64>, reach: u64) -> Result<()> {
    match address {
        Some(address) if address != 0 && address.checked_add(reach).is_some() => Ok(()),
        Some(0) => fail!(Invalid, "the address of a view is 0"),
        _ => fail!(Invalid, "{reach} bytes of a view exceed the address space"),
    }
}

impl<'a> Span<'a> {
    /// Tokens of the span.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Bytes of the span in canonical order.
    pub fn bytes(&self) -> u64 {
        self.view.token_bytes() * u64::from(self.tokens)
    }

    /// The power of two that divides all its addresses and runs.
    pub fn align_bytes(&self) -> u64 {
        let strips = self.strips();
        let bits = strips.fold(0, |bits, strip| {
            let stride = if strip.count > 1 { strip.stride_bytes } else { 0 };
            bits | strip.address | stride | strip.run_bytes
        });
        1 << bits.trailing_zeros()
    }

    /// Its bytes in canonical order, in as few strips as possible: a span without gaps is one run.
    pub fn strips(&self) -> Strips<'a> {
        let end = self.first + self.tokens;
        let empty = Strip { at: 0, address: 0, count: 0, stride_bytes: 0, run_bytes: 1 };
        Strips {
            view: self.view,
            token: self.first,
            end,
            address: 0,
            ready: 0,
            strip: empty,
            cut: 0,
        }
    }
}

/// Iterates over the strips of a span.
#[derive(Clone)]
pub struct Strips<'a> {
    view: View<'a>,
    /// The first token that is in no strip yet.
    token: u32,
    end: u32,
    /// Its address, and the number of tokens from it on at the token stride.
    address: u64,
    ready: u32,
    /// The rest of the last strip, and the bytes of its first run that were returned.
    strip: Strip,
    cut: u64,
}

impl Strips<'_> {
    /// The next strip, or the part of it that fits into `most` bytes, to fill a block. None for 0
    /// bytes.
    #[inline]
    pub fn up_to(&mut self, most: u64) -> Option<Strip> {
        if most == 0 || (self.strip.count == 0 && !self.refill()) {
            return None;
        }
        let strip = self.strip;
        if self.cut == 0 && strip.bytes() <= most {
            self.strip.at += strip.bytes();
            self.strip.count = 0;
            return Some(strip);
        }
        Some(self.part(most))
    }

    /// Cuts a strip that is longer than `most`, or whose first run was cut.
    fn part(&mut self, most: u64) -> Strip {
        let strip = self.strip;
        let rest = strip.run_bytes - self.cut;
        let part = if self.cut == 0 && strip.run_bytes <= most {
            let count = (most / strip.run_bytes).min(strip.count);
            Strip { count, ..strip }
        } else {
            let address = strip.address + self.cut;
            Strip { address, count: 1, run_bytes: rest.min(most), ..strip }
        };
        self.strip.at += part.bytes();
        if part.run_bytes < rest {
            self.cut += part.run_bytes;
        } else {
            self.cut = 0;
            self.strip.count -= part.count;
            // The address behind the last run may not exist.
            let step = part.count.wrapping_mul(strip.stride_bytes);
            self.strip.address = strip.address.wrapping_add(step);
        }
        part
    }

    /// Prepares the next strip.
    fn refill(&mut self) -> bool {
        if self.token == self.end {
            return false;
        }
        let view = &self.view;
        if self.ready == 0 {
            (self.address, self.ready) = view.locate(self.token, self.end);
        }
        let (heads, stride) = (u64::from(view.heads), view.head_stride_bytes);
        let (tokens, token_stride) = (u64::from(self.ready), view.token_stride_bytes);
        let at = self.strip.at;
        let strip = |count, stride_bytes, run_bytes| {
            let strip = Strip { at, address: self.address, count, stride_bytes, run_bytes };
            if count > 1 && stride_bytes == run_bytes {
                return Strip { count: 1, run_bytes: count * run_bytes, ..strip };
            }
            strip
        };
        let taken = if heads == 1 || stride == view.run_bytes {
            self.strip = strip(tokens, token_stride, heads * view.run_bytes);
            self.ready
        } else if tokens == 1 || heads.checked_mul(stride) == Some(token_stride) {
            self.strip = strip(tokens * heads, stride, view.run_bytes);
            self.ready
        } else {
            self.strip = strip(heads, stride, view.run_bytes);
            1
        };
        self.token += taken;
        self.ready -= taken;
        self.address = self.address.wrapping_add(u64::from(taken).wrapping_mul(token_stride));
        true
    }
}

impl Iterator for Strips<'_> {
    type Item = Strip;

    fn next(&mut self) -> Option<Strip> {
        self.up_to(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use proptest::prelude::*;

    fn pages(addresses: &[u64], page_tokens: u32) -> Place<'_> {
        Place::Pages { addresses, page_tokens, shift_bytes: 0 }
    }

    fn view(place: Place<'_>, tokens: u32, heads: u32, run: u64, ts: u64, hs: u64) -> View<'_> {
        View { place, tokens, heads, run_bytes: run, token_stride_bytes: ts, head_stride_bytes: hs }
    }

    /// The address of every byte, by definition.
    fn plain(view: &View, first: u32, tokens: u32) -> Vec<u64> {
        let mut out = Vec::new();
        for token in first..first + tokens {
            let start = match view.place {
                Place::At(address) => address + u64::from(token) * view.token_stride_bytes,
                Place::Pages { addresses, page_tokens, shift_bytes } => {
                    let page = addresses[(token / page_tokens) as usize];
                    page.wrapping_add_signed(shift_bytes)
                        + u64::from(token % page_tokens) * view.token_stride_bytes
                }
            };
            for head in 0..u64::from(view.heads) {
                let run = start + head * view.head_stride_bytes;
                out.extend((0..view.run_bytes).map(|byte| run + byte));
            }
        }
        out
    }

    fn expand(strips: impl Iterator<Item = Strip>) -> Vec<u64> {
        let mut out = Vec::new();
        for strip in strips {
            assert_eq!(strip.at, out.len() as u64, "in canonical order, without gaps");
            assert!(strip.count > 0 && strip.run_bytes > 0);
            for run in 0..strip.count {
                let start = strip.address + run * strip.stride_bytes;
                out.extend((0..strip.run_bytes).map(|byte| start + byte));
            }
        }
        out
    }

    proptest! {
        #[test]
        fn strips_agree_with_the_definition(
            tokens in 1u32..40, heads in 1u32..6, run in 1u64..9, pad in 0u64..4,
            order in 0..4, page_tokens in 1u32..12, shuffle in any::<u64>(),
            paged in any::<bool>(), from in 0u32..40, n in 1u32..40, most in 1u64..70,
        ) {
            let rows = if paged { page_tokens } else { tokens };
            let (ts, hs) = match order {
                0 => (u64::from(heads) * run, run),
                1 => (u64::from(heads) * (run + pad) + pad, run + pad),
                2 => (run, u64::from(rows) * run),
                _ => (u64::from(heads) * (run + pad), run + pad),
            };
            let room = u64::from(rows) * ts + u64::from(heads) * hs + run;
            let neat = u64::from(page_tokens) * ts;
            let table: Vec<u64> = (0..u64::from(tokens.div_ceil(page_tokens))).map(|i| {
                let distant = 1_000_000 * (1 + (shuffle >> (i % 60)) % 3) + i * room;
                if shuffle >> (i % 50) & 1 == 0 { 5_000 + i * neat } else { distant }
            }).collect();
            let place = if paged {
                Place::Pages { addresses: &table, page_tokens, shift_bytes: -7 }
            } else {
                Place::At(77)
            };
            let view = view(place, tokens, heads, run, ts, hs);
            let first = from % tokens;
            let n = n.min(tokens - first);
            let span = view.span(first, n, Side::Source).unwrap();
            let want = plain(&view, first, n);
            prop_assert_eq!(span.bytes(), want.len() as u64);
            prop_assert_eq!(&expand(span.strips()), &want);
            let mut strips = span.strips();
            let pieces = std::iter::from_fn(|| {
                let piece = strips.up_to(most)?;
                assert!(piece.bytes() <= most);
                Some(piece)
            });
            prop_assert_eq!(&expand(pieces), &want);
            // Blocks are filled completely, whatever the runs are.
            let mut strips = span.strips();
            for block in want.chunks(most as usize) {
                let mut left = block.len() as u64;
                while left > 0 {
                    left -= strips.up_to(left).unwrap().bytes();
                }
            }
            prop_assert!(strips.up_to(most).is_none());
            let align = span.align_bytes();
            prop_assert!(align.is_power_of_two() && span.strips().all(|s| s.address % align == 0));
        }

        #[test]
        fn a_target_that_passes_writes_no_byte_twice(
            tokens in 1u32..9, heads in 1u32..9, run in 1u64..9, ts in 0u64..90, hs in 0u64..90,
        ) {
            let view = view(Place::At(1), tokens, heads, run, ts, hs);
            if view.span(0, tokens, Side::Target).is_ok() {
                let mut all = plain(&view, 0, tokens);
                all.sort_unstable();
                all.dedup();
                prop_assert_eq!(all.len() as u64, view.token_bytes() * u64::from(tokens));
            }
        }

        #[test]
        fn arbitrary_views_never_overflow(
            at in any::<u64>(), tokens in any::<u32>(), heads in any::<u32>(),
            run in any::<u64>(), ts in any::<u64>(), hs in any::<u64>(),
            small in 0u32..64, first in any::<u32>(), n in any::<u32>(), shift in any::<i64>(),
        ) {
            let table = [at, at.wrapping_add(ts), hs];
            let place = Place::Pages { addresses: &table, page_tokens: small % 5, shift_bytes: shift };
            for place in [Place::At(at), place] {
                for (t, h, r) in [(tokens, heads, run), (small, small + 1, run >> (small % 64))] {
                    let view = view(place, t, h, r, ts, hs);
                    for (first, n) in [(first, n), (first % 8, n % 8)] {
                        for side in [Side::Source, Side::Target] {
                            if let Ok(span) = view.span(first, n, side) {
                                let sum: u64 = span.strips().take(1000).map(|s| s.bytes()).sum();
                                prop_assert!(sum <= span.bytes());
                            }
                        }
                    }
                }
            }
        }
    }

    fn strips(view: &View, first: u32, tokens: u32) -> Vec<Strip> {
        view.span(first, tokens, Side::Target).expect("sound").strips().collect()
    }

    #[test]
    fn contiguous_bytes_are_one_run() {
        let one = |address, bytes| {
            vec![Strip { at: 0, address, count: 1, stride_bytes: bytes, run_bytes: bytes }]
        };
        let same = |found: Vec<Strip>, want: Vec<Strip>| {
            let key = |s: &Strip| (s.at, s.address, s.count, s.run_bytes);
            assert_eq!(
                found.iter().map(key).collect::<Vec<_>>(),
                want.iter().map(key).collect::<Vec<_>>()
            );
        };
        same(strips(&View::canonical(64, 16, 100), 2, 5), one(264, 500));
        let neat = view(Place::At(64), 16, 4, 8, 32, 8);
        same(strips(&neat, 0, 16), one(64, 512));
        let table = [1000, 1000 + 4 * 32, 1000 + 8 * 32];
        same(strips(&view(pages(&table, 4), 12, 4, 8, 32, 8), 1, 10), one(1032, 320));
        // One head of [heads, tokens, dim], and one token of it.
        same(strips(&view(Place::At(64), 16, 1, 8, 8, 128), 0, 16), one(64, 128));
        let token = strips(&view(Place::At(64), 16, 3, 8, 8, 128), 7, 1);
        assert_eq!(
            token,
            [Strip { at: 0, address: 120, count: 3, stride_bytes: 128, run_bytes: 8 }]
        );
        // Padded rows over adjacent pages: one strip.
        let table = [1000, 1000 + 4 * 40];
        let padded = strips(&view(pages(&table, 4), 8, 4, 8, 40, 8), 0, 8);
        let want = Strip { at: 0, address: 1000, count: 8, stride_bytes: 40, run_bytes: 32 };
        assert_eq!(padded, [want]);
        // K and V interleaved by head: all of K is one strip.
        let k = strips(&view(Place::At(64), 5, 4, 8, 64, 16), 0, 5);
        let want = Strip { at: 0, address: 64, count: 20, stride_bytes: 16, run_bytes: 8 };
        assert_eq!(k, [want]);
    }

    #[test]
    fn invalid_views_are_rejected() {
        let good = view(Place::At(64), 16, 4, 8, 32, 8);
        let status = |view: View, first, n, side| {
            view.span(first, n, side).map(|_| ()).map_err(|e| e.status())
        };
        let (source, target) = (Side::Source, Side::Target);
        assert_eq!(status(good, 0, 16, target), Ok(()));
        assert_eq!(status(good, 0, 0, source), Err(Status::Invalid));
        assert_eq!(status(good, 1, 16, source), Err(Status::Invalid));
        assert_eq!(status(good, u32::MAX, 2, source), Err(Status::Invalid));
        let zero = View { token_stride_bytes: 0, ..good };
        assert_eq!(status(zero, 0, 16, source), Ok(()), "a source may repeat itself");
        assert_eq!(status(zero, 0, 16, target), Err(Status::Invalid));
        assert_eq!(
            status(View { head_stride_bytes: 0, ..good }, 0, 1, target),
            Err(Status::Invalid)
        );
        assert_eq!(status(View { heads: 0, ..good }, 0, 1, source), Err(Status::Invalid));
        assert_eq!(
            status(View { place: Place::At(0), ..good }, 0, 1, source),
            Err(Status::Invalid)
        );
        let top = Place::At(u64::MAX - 100);
        assert_eq!(status(View { place: top, ..good }, 0, 16, source), Err(Status::Invalid));
        let huge = View { run_bytes: 1 << 39, ..good };
        assert_eq!(status(huge, 0, 1, source), Err(Status::Limit));
        let table = [1000, 0, 2000];
        let paged = View { place: pages(&table, 4), tokens: 12, ..good };
        assert_eq!(status(paged, 0, 4, target), Ok(()), "only the pages that are used count");
        assert_eq!(status(paged, 0, 5, target), Err(Status::Invalid));
        assert_eq!(status(View { tokens: 13, ..paged }, 0, 1, source), Err(Status::Invalid));
        assert_eq!(
            status(View { place: pages(&table, 0), ..paged }, 0, 1, source),
            Err(Status::Invalid)
        );
        let twice = View { place: pages(&[1000, 1000], 4), tokens: 8, ..good };
        assert_eq!(
            (status(twice, 0, 8, source), status(twice, 0, 8, target)),
            (Ok(()), Err(Status::Invalid))
        );
    }
}
