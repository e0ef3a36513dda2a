//! The checked input of a kernel.

use crate::attention::element::read;
use crate::attention::keys::{Heads, Keys};
use crate::attention::lanes::portable::Portable;
use crate::attention::rows::{MAX_DIM, Rows, Scales};
use crate::base::status::Result;
use crate::fail;
use crate::meta::view::Place;

/// Most tokens of queries, and of keys.
pub const MAX_TOKENS: u32 = 1 << 30;

/// Queries, keys and values. Keys are at `first_key` and the positions after it, queries at
/// `first_query` and those after it. Queries see keys up to their own position, and are computed
/// with the keys that are present.
///
/// Keys may come in pieces, each with its first position; [`merge()`](super::merge()) merges the
/// results of all pieces. A query before a piece sees nothing of it.
#[derive(Clone, Copy, Debug)]
pub struct Problem<'a> {
    /// `[S, query heads, D]`
    pub queries: Rows<'a>,
    /// `[N, key heads, D]`
    pub keys: Rows<'a>,
    /// `[N, key heads, Dv]`. If they are the first numbers of the keys (a latent row) in the same
    /// memory, they are read once.
    pub values: Rows<'a>,
    /// Position of the first key; 0 if the keys before it are no piece of their own.
    pub first_key: u32,
    /// Position of the first query.
    pub first_query: u32,
    /// Factor of the products of queries and keys; 0 = 1 / sqrt(D).
    pub scale: f32,
    /// The keys that queries are computed with: positions, whatever piece is present.
    pub select: Keys<'a>,
}

impl Problem<'_> {
    /// Checks all sizes and the index. Does not check that numbers are finite: [`check_finite`].
    pub fn check(&self) -> Result<()> {
        let (q, k, v) = (&self.queries, &self.keys, &self.values);
        if q.dim() != k.dim() {
            fail!(
                Invalid,
                "queries have {} numbers a head, keys {}: they must be equal",
                q.dim(),
                k.dim()
            );
        }
        if (k.heads(), k.tokens()) != (v.heads(), v.tokens()) {
            let (heads, tokens) = (v.heads(), v.tokens());
            let (h, t) = (k.heads(), k.tokens());
            fail!(
                Invalid,
                "{t} keys of {h} heads, but {tokens} values of {heads}: they must be equal"
            );
        }
        if k.heads() == 0 || q.heads() == 0 || q.heads() % k.heads() != 0 {
            fail!(
                Invalid,
                "{} query heads must be a multiple of {} heads of keys",
                q.heads(),
                k.heads()
            );
        }
        let end = |first: u32, tokens: u32| u64::from(first) + u64::from(tokens);
        let ends = (end(self.first_query, q.tokens()), end(self.first_key, k.tokens()));
        if ends.0.max(ends.1) > u64::from(MAX_TOKENS) {
            fail!(
                Limit,
                "queries end at {}, keys at {}, the limit is {MAX_TOKENS}",
                ends.0,
                ends.1
            );
        }
        if u64::from(q.tokens()) * u64::from(q.heads()) > u64::from(u32::MAX) {
            fail!(Limit, "{} queries of {} heads exceed 2^32 - 1 rows", q.tokens(), q.heads());
        }
        if !(self.scale.is_finite() && self.scale >= 0.0) {
            fail!(Invalid, "scale is {}, it must be finite and at least 0", self.scale);
        }
        self.select.check(self.heads(), self.first_query, q.tokens())
    }

    /// Head counts.
    pub fn heads(&self) -> Heads {
        Heads { queries: self.queries.heads(), keys: self.keys.heads() }
    }

    /// The head of keys of a query head.
    pub fn key_head(&self, head: u32) -> u32 {
        head / (self.queries.heads() / self.keys.heads())
    }

    /// Number of keys, from the first present one, that a query can see.
    pub fn visible_keys(&self, query: u32) -> u32 {
        let behind = self.first_query + query + 1;
        behind.saturating_sub(self.first_key).min(self.keys.tokens())
    }

    /// Factor of products whose powers of two are taken.
    pub fn binary_scale(&self) -> f32 {
        let scale = if self.scale > 0.0 {
            f64::from(self.scale)
        } else {
            1.0 / f64::from(self.keys.dim()).sqrt()
        };
        (scale * std::f64::consts::LOG2_E) as f32
    }

    /// Whether values are the first numbers of keys.
    pub fn is_latent(&self) -> bool {
        let (k, v) = (self.keys.view(), self.values.view());
        let is_same_place = match (k.place, v.place) {
            (Place::At(k), Place::At(v)) => k == v,
            (
                Place::Pages { addresses, page_tokens, shift_bytes },
                Place::Pages { addresses: of, page_tokens: tokens, shift_bytes: shift },
            ) => addresses == of && (page_tokens, shift_bytes) == (tokens, shift),
            _ => false,
        };
        let is_plain = |rows: &Rows<'_>| matches!(rows.scales(), Scales::None);
        is_same_place
            && self.keys.dtype() == self.values.dtype()
            && self.keys.dim() >= self.values.dim()
            && (k.token_stride_bytes, k.head_stride_bytes)
                == (v.token_stride_bytes, v.head_stride_bytes)
            && is_plain(&self.keys)
            && is_plain(&self.values)
    }
}

/// Checks that all numbers of rows are finite, scales included. Kernels handle others without
/// faults, but their results mean nothing.
pub fn check_finite(name: &str, rows: &Rows<'_>) -> Result<()> {
    let mut row = [0.0_f32; MAX_DIM as usize];
    for token in 0..rows.tokens() {
        for head in 0..rows.heads() {
            // SAFETY: the row exists and is no longer than MAX_DIM.
            unsafe { read::<Portable>(rows, head, &[token], row.as_mut_ptr()) };
            let sound =
                row.iter().take(rows.dim() as usize).fold(true, |all, x| all & x.is_finite());
            if !sound {
                fail!(Invalid, "{name} of token {token}, head {head} are not finite numbers");
            }
        }
    }
    Ok(())
}

/// Checks the index of a work item, and that scratch is large enough.
pub fn check_item(name: &str, at: u32, of: u32, memory: &[f32], scratch: usize) -> Result<()> {
    if at >= of {
        fail!(Invalid, "{name} {at} does not exist, there are {of}");
    }
    if memory.len() < scratch {
        fail!(TooSmall, "scratch has {} numbers, {scratch} are needed", memory.len());
    }
    Ok(())
}
