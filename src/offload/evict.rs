//! Eviction of tokens of a layer by a policy. Evicted tokens are lists of positions; no data is
//! moved.

use std::ops::Range;

use crate::attention::Rows;
use crate::base::status::Result;
use crate::fail;
use crate::offload::Offload;
use crate::sparse::lists::Lists;
use crate::sparse::{Context, RetainedTokens, Sparse, caps, needs};

impl Offload {
    /// Reports the sums of attention for each key to the policies that need them; see
    /// [`crate::sparse::Sparse::observe`].
    pub fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        self.layer(layer)?;
        let needs_sums =
            |policy: &&mut Box<dyn Sparse>| policy.traits().needs & needs::COLUMN_SUMS != 0;
        for policy in self.policies.all().filter(needs_sums) {
            policy.observe(layer, queries, sums, tokens)?;
        }
        Ok(())
    }

    /// Appends rows of keys that an indexer beside the attention computes, for policies that have
    /// rows of their own. `first`: position of the first token.
    pub fn append_keys(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        self.layer(layer)?;
        let shape = self.geometry.shape;
        for policy in self.policies.all().filter(|policy| policy.traits().rows.is_some()) {
            let (heads, dim) = policy.traits().key_rows(&shape);
            shape.check_rows("keys", layer, keys, heads, dim)?;
            policy.append(layer, first, keys)?;
        }
        Ok(())
    }

    /// Passes scores of blocks, or weights, for the next load of a layer to the policy.
    pub fn score(&mut self, layer: u32, is_prefill: bool, scores: &[f32]) -> Result<()> {
        self.layer(layer)?;
        match self.policies.of(is_prefill) {
            Some(policy) => policy.score(layer, scores),
            None => {
                fail!(Unsupported, "no policy accepts scores: open the offload with one that does")
            }
        }
    }

    /// Lets policies evict tokens of a layer. Returns whether tokens were evicted. Blocks without
    /// retained tokens are not loaded any more; kernels use [`Offload::retained`] as a mask.
    pub fn evict(&mut self, layer: u32, context: &Context) -> Result<bool> {
        let cap = if context.is_prefill { caps::EVICT_PREFILL } else { caps::EVICT_DECODE };
        let all = self.layer(layer)?.tokens();
        // The memory of an earlier answer is reused.
        let mut answer = std::mem::take(&mut self.spare);
        answer.clear();
        let evicted = self.evict_with_policy(layer, context, cap, &mut answer);
        if let Ok(true) = evicted {
            let state = &mut self.layers[layer as usize];
            let lists = answer.heads.len() as u64;
            let before = match &state.retained {
                Some(retained) => (0..answer.heads.len())
                    .map(|at| TokensLeft::new(retained, all).count(at) as u64)
                    .sum(),
                None => lists * u64::from(all),
            };
            let after = answer.heads.items.len() as u64;
            self.stats.evicted_tokens += before.saturating_sub(after);
            let retained = state.retained.get_or_insert_default();
            std::mem::swap(&mut retained.lists, &mut answer.heads);
            retained.since = all;
        }
        self.spare = answer;
        evicted
    }

    /// Calls the policy that evicts, checks its answer, and reports it to all policies.
    fn evict_with_policy(
        &mut self,
        layer: u32,
        context: &Context,
        cap: u32,
        retained: &mut RetainedTokens,
    ) -> Result<bool> {
        let all = self.layer(layer)?.tokens();
        let mut evicts = false;
        for policy in self.policies.all().filter(|policy| policy.traits().caps & cap != 0) {
            if evicts {
                fail!(Unsupported, "two policies evict tokens in one sequence");
            }
            evicts = policy.evict(layer, context, retained)?;
        }
        if !evicts {
            return Ok(false);
        }
        let heads = self.geometry.shape.key_heads as usize;
        let lists = retained.heads.len();
        let is_sound = |list: &[u32]| {
            list.is_sorted_by(|a, b| a < b) && list.last().is_none_or(|&last| last < all)
        };
        if ![1, heads, self.geometry.shape.query_heads as usize].contains(&lists)
            || !(0..lists).all(|at| is_sound(retained.heads.get(at)))
        {
            fail!(Invalid, "a policy retains tokens that do not exist, or repeats some");
        }
        for policy in self.policies.all() {
            policy.evicted(layer, retained)?;
        }
        Ok(true)
    }

    /// The retained tokens of a layer; none = all.
    pub fn retained(&self, layer: u32) -> Result<Option<TokensLeft<'_>>> {
        let state = self.layer(layer)?;
        Ok(state.retained.as_ref().map(|retained| TokensLeft::new(retained, state.tokens())))
    }

    /// Drops blocks of which no head retains a token.
    pub(super) fn drop_empty_blocks(&self, layer: u32, blocks: &mut Vec<u32>) {
        let state = self.layers.get(layer as usize);
        let Some(retained) = state.and_then(|state| state.retained.as_ref()) else { return };
        let block = self.geometry.shape.block_tokens;
        blocks.retain(|&id| retained.has_any(&(id * block..(id + 1) * block)));
    }
}

// Retained tokens: those of the policy's last answer, and all later ones.

/// Retained tokens of a layer. Later tokens are not listed, so that a put costs nothing here,
/// however long the sequence is.
#[derive(Debug, Default)]
pub(super) struct Retained {
    /// Retained positions, for each head or for all heads.
    pub lists: Lists,
    /// All tokens from this position on are retained.
    pub since: u32,
}

impl Retained {
    /// Drops positions from `tokens` on. Allocates nothing.
    pub fn cut(&mut self, tokens: u32) {
        if tokens >= self.since {
            return;
        }
        self.since = tokens;
        let Lists { starts, items } = &mut self.lists;
        let (mut from, mut to) = (0, 0);
        for start in starts.iter_mut().skip(1) {
            let end = *start as usize;
            let list = items.get(from..end).unwrap_or_default();
            let left = list.partition_point(|&at| at < tokens);
            items.copy_within(from..from + left, to);
            (from, to) = (end, to + left);
            *start = to as u32;
        }
        items.truncate(to);
    }

    /// Whether a list has a token in a range of existing positions.
    pub fn has_any(&self, range: &Range<u32>) -> bool {
        let has = |list: &[u32]| {
            let from = list.partition_point(|&at| at < range.start);
            list.get(from).is_some_and(|&at| at < range.end)
        };
        range.end > self.since || (0..self.lists.len()).any(|at| has(self.lists.get(at)))
    }

    /// A copy; none if there is no memory for it.
    pub fn try_clone(&self) -> Option<Retained> {
        let mut lists = Lists::default();
        lists.starts.try_reserve_exact(self.lists.starts.len()).ok()?;
        lists.items.try_reserve_exact(self.lists.items.len()).ok()?;
        lists.starts.extend_from_slice(&self.lists.starts);
        lists.items.extend_from_slice(&self.lists.items);
        Some(Retained { lists, since: self.since })
    }
}

/// The retained tokens of a layer.
#[derive(Clone, Debug)]
pub struct TokensLeft<'a> {
    lists: &'a Lists,
    new: Range<u32>,
}

impl<'a> TokensLeft<'a> {
    pub(super) fn new(retained: &'a Retained, tokens: u32) -> TokensLeft<'a> {
        TokensLeft { lists: &retained.lists, new: retained.since..tokens.max(retained.since) }
    }

    /// Number of lists: one for each key head or query head, or one for all.
    pub fn lists(&self) -> usize {
        self.lists.len()
    }

    /// A list: the policy's positions, ascending, and the range of later positions.
    pub fn list(&self, at: usize) -> (&'a [u32], Range<u32>) {
        (self.lists.get(at), self.new.clone())
    }

    /// Number of tokens in a list.
    pub fn count(&self, at: usize) -> usize {
        self.lists.get(at).len() + self.new.len()
    }

    /// The positions of a list, ascending.
    pub fn positions(&self, at: usize) -> impl Iterator<Item = u32> + 'a {
        let (old, new) = self.list(at);
        old.iter().copied().chain(new)
    }

    /// Whether a list has a position.
    pub fn has(&self, at: usize, position: u32) -> bool {
        self.new.contains(&position) || self.lists.get(at).binary_search(&position).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retained(lists: &[&[u32]], since: u32) -> Retained {
        let mut retained = Retained { since, ..Retained::default() };
        lists.iter().for_each(|list| retained.lists.push(list.iter().copied()));
        retained
    }

    #[test]
    fn truncated_lists_equal_filtered_positions() {
        let lists: [&[u32]; 3] = [&[0, 4, 5, 9], &[], &[1, 2, 3, 8]];
        for tokens in 0..16 {
            let mut some = retained(&lists, 10);
            some.cut(tokens);
            let left = TokensLeft::new(&some, tokens.min(14));
            assert_eq!(left.lists(), 3);
            for (at, list) in lists.iter().enumerate() {
                let all = list.iter().copied().chain(10..14);
                let right: Vec<u32> = all.filter(|&position| position < tokens).collect();
                assert_eq!(left.positions(at).collect::<Vec<u32>>(), right, "{at} of {tokens}");
                assert_eq!(left.count(at), right.len());
                assert!((0..16).all(|p| left.has(at, p) == right.contains(&p)));
            }
            for (from, to) in [(0, 1), (4, 6), (6, 8), (8, 12), (12, 14)] {
                let has = (from..to).any(|p| lists.iter().any(|l| l.contains(&p) && p < tokens));
                let is_new = tokens > 10 && to > 10;
                if to <= tokens.min(14) {
                    assert_eq!(some.has_any(&(from..to)), has || is_new, "{from}..{to}");
                }
            }
        }
    }
}
