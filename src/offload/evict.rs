//! Which tokens of a layer a policy has left: lists, and nothing is moved.

use crate::attention::Rows;
use crate::base::status::Result;
use crate::fail;
use crate::offload::Offload;
use crate::offload::kept::Left;
use crate::sparse::{Context, RetainedTokens, Sparse, caps, needs};

impl Offload {
    /// What each key got of the attention of some queries: policies that want to know it are
    /// told. As [`crate::sparse::Sparse::observe`].
    pub fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        self.layer(layer)?;
        let wants = |policy: &&mut Box<dyn Sparse>| policy.traits().needs & needs::COLUMN_SUMS != 0;
        for policy in self.policies.all().filter(wants) {
            policy.observe(layer, queries, sums, tokens)?;
        }
        Ok(())
    }

    /// Rows of a policy that has its own, of tokens from a position on: what an indexer beside
    /// the attention keeps.
    pub fn tell_keys(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        self.layer(layer)?;
        let shape = self.geometry.shape;
        for policy in self.policies.all().filter(|policy| policy.traits().rows.is_some()) {
            let (heads, dim) = policy.traits().key_rows(&shape);
            shape.check_rows("keys", layer, keys, heads, dim)?;
            policy.append(layer, first, keys)?;
        }
        Ok(())
    }

    /// Numbers of the engine's for the next load of a layer: scores of blocks, or weights.
    pub fn score(&mut self, layer: u32, is_prefill: bool, scores: &[f32]) -> Result<()> {
        self.layer(layer)?;
        match self.policies.of(is_prefill) {
            Some(policy) => policy.score(layer, scores),
            None => fail!(Unsupported, "there is no policy that wants scores"),
        }
    }

    /// Has policies evict tokens of a layer, if some have to go; whether some went. Blocks of
    /// which nothing is left are not loaded any more; kernels see what is left by
    /// [`Offload::kept`].
    pub fn evict(&mut self, layer: u32, context: &Context) -> Result<bool> {
        let cap = if context.is_prefill { caps::EVICT_PREFILL } else { caps::EVICT_DECODE };
        let all = self.layer(layer)?.tokens();
        // The memory of an answer before serves this one.
        let mut keep = std::mem::take(&mut self.spare);
        keep.clear();
        let evicted = self.ask_to_evict(layer, context, cap, &mut keep);
        if let Ok(true) = evicted {
            let one = &mut self.layers[layer as usize];
            let lists = keep.heads.len() as u64;
            let before = match &one.kept {
                Some(kept) => {
                    (0..keep.heads.len()).map(|at| Left::new(kept, all).count(at) as u64).sum()
                }
                None => lists * u64::from(all),
            };
            let after = keep.heads.items.len() as u64;
            self.stats.evicted_tokens += before.saturating_sub(after);
            let kept = one.kept.get_or_insert_default();
            std::mem::swap(&mut kept.lists, &mut keep.heads);
            kept.since = all;
        }
        self.spare = keep;
        evicted
    }

    /// Asks the policy that evicts, checks its answer, and tells policies of it.
    fn ask_to_evict(
        &mut self,
        layer: u32,
        context: &Context,
        cap: u32,
        keep: &mut RetainedTokens,
    ) -> Result<bool> {
        let all = self.layer(layer)?.tokens();
        let mut evicts = false;
        for policy in self.policies.all().filter(|policy| policy.traits().caps & cap != 0) {
            if evicts {
                fail!(Unsupported, "two policies evict tokens in one sequence");
            }
            evicts = policy.evict(layer, context, keep)?;
        }
        if !evicts {
            return Ok(false);
        }
        let heads = self.geometry.shape.key_heads as usize;
        let lists = keep.heads.len();
        let is_sound = |list: &[u32]| {
            list.is_sorted_by(|a, b| a < b) && list.last().is_none_or(|&last| last < all)
        };
        if ![1, heads, self.geometry.shape.query_heads as usize].contains(&lists)
            || !(0..lists).all(|at| is_sound(keep.heads.get(at)))
        {
            fail!(Invalid, "a policy keeps tokens that are not there, or twice");
        }
        for policy in self.policies.all() {
            policy.evicted(layer, keep)?;
        }
        Ok(true)
    }

    /// Which tokens of a layer are left; none = all.
    pub fn kept(&self, layer: u32) -> Result<Option<Left<'_>>> {
        let one = self.layer(layer)?;
        Ok(one.kept.as_ref().map(|kept| Left::new(kept, one.tokens())))
    }

    /// Leaves out blocks of which no head keeps anything.
    pub(super) fn drop_emptied(&self, layer: u32, blocks: &mut Vec<u32>) {
        let one = self.layers.get(layer as usize);
        let Some(kept) = one.and_then(|one| one.kept.as_ref()) else { return };
        let block = self.geometry.shape.block_tokens;
        blocks.retain(|&id| kept.has_any(&(id * block..(id + 1) * block)));
    }
}
