//! Random eviction: the baseline that every policy must beat.

use kvtier::attention::Rows;
use kvtier::base::status::Result;
use kvtier::sparse::{Context, RetainedTokens, Scope, Shape, Sparse, Traits, caps, needs};

use super::numbers::Random;

/// Keeps the `recent` last tokens and random older ones, `budget` in all, separately for each key
/// head.
#[derive(Clone)]
pub struct RandomEviction {
    seed: u64,
    budget: usize,
    recent: usize,
    heads: u32,
    /// Present positions, for each layer and head.
    lists: Vec<Vec<u32>>,
}

impl RandomEviction {
    /// A policy for one sequence, with a seed for the choice.
    pub fn new(shape: &Shape, budget: usize, recent: usize, seed: u64) -> RandomEviction {
        let lists = vec![Vec::new(); (shape.layers * shape.key_heads) as usize];
        RandomEviction { seed, budget, recent, heads: shape.key_heads, lists }
    }

    fn of(&mut self, layer: u32) -> &mut [Vec<u32>] {
        let heads = self.heads as usize;
        &mut self.lists[layer as usize * heads..][..heads]
    }
}

impl Sparse for RandomEviction {
    fn traits(&self) -> Traits {
        Traits {
            caps: caps::EVICT_PREFILL | caps::EVICT_DECODE,
            needs: needs::KEYS,
            scope: Scope::KeyHead,
            ..Traits::NONE
        }
    }

    fn append(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        for list in self.of(layer) {
            list.extend(first..first + keys.tokens());
        }
        Ok(())
    }

    fn evict(&mut self, layer: u32, _context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        let (seed, budget, recent) = (self.seed, self.budget, self.recent);
        if self.of(layer)[0].len() <= budget {
            return Ok(false);
        }
        out.clear();
        for (head, list) in (0..).zip(self.of(layer)) {
            let (old, new) = list.split_at(list.len() - recent);
            let mut stays = old.to_vec();
            let seed = seed + u64::from(layer) * 1000 + head;
            Random::new(seed + new[0] as u64 * 77).shuffle(&mut stays);
            stays.truncate(budget - recent);
            stays.sort_unstable();
            out.heads.push(stays.into_iter().chain(new.iter().copied()));
        }
        Ok(true)
    }

    fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        for (head, list) in (0..).zip(self.of(layer)) {
            *list = retained.of(head).to_vec();
        }
        Ok(())
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        self.lists.iter_mut().for_each(|list| list.retain(|&at| at < tokens));
        Ok(())
    }

    fn reset(&mut self) {
        self.lists.iter_mut().for_each(Vec::clear);
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }
}
