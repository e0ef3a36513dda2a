//! `h2o`: retains the tokens that got the most attention so far, beside the first and the newest
//! ones (Zhang et al., NeurIPS'23).
//!
//! With `form=block` at most `budget / block` blocks in between stay (at least one). The most that
//! ever stays is `sink + budget + recent + evict_every - 1`, with each of the first three and the
//! last rounded up to blocks, plus one block.
//!
//! The policy needs the attention of all queries to each key, at every step. Retained tokens keep
//! their sums; a new sequence begins with `reset`. The caller adds tokens that must not be evicted
//! (shared, pinned) to the lists before it confirms the eviction.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::sparse::eviction::{conflict, count};
use crate::sparse::numbers::reserve;
use crate::sparse::ranks::Ranks;
use crate::sparse::token_scores::{TokenList, TokenScores, sum_rows};
use crate::sparse::{
    ALL_QUERIES, Context, Granularity, Kind, RetainedTokens, Scope, Shape, Sparse, Traits, caps,
    needs,
};

/// Parameters of `h2o`.
pub const PARAMS: &[Param] = &[
    Param::new("sink", "first tokens that stay"),
    Param::new("recent", "newest tokens that stay"),
    Param::new("budget", "tokens between them that stay"),
    Param::new(
        "heads",
        "`each`: every head of keys retains tokens of its own, by the attention of its group of \
         query heads. `all`: one list a layer, by the attention of all heads. MLA latents have one \
         row for all heads, so they accept `all` only",
    )
    .default_is("`each`; with MLA latents `all`"),
    Param::new(
        "evict_every",
        "evict when this many tokens are too many; at most `sink + budget + recent + evict_every - \
         1` tokens stay",
    ),
    Param::new(
        "form",
        "`block`: evict whole blocks, by the sum of their scores; incomplete blocks and those with \
         a first or newest token stay",
    ),
];

/// Heavy hitters.
#[derive(Clone, Debug)]
pub struct H2o {
    shape: Shape,
    retained: TokenScores,
    sink: usize,
    recent: usize,
    budget: usize,
    slack: usize,
    is_each: bool,
    is_block: bool,
    blocks: BlockScratch,
}

/// Working memory for the choice of blocks.
#[derive(Clone, Debug, Default)]
struct BlockScratch {
    ranks: Ranks,
    /// Start of each evictable block in a list, and the end of the last.
    starts: Vec<u32>,
    scores: Vec<f32>,
    victims: Vec<u32>,
}

impl H2o {
    /// Reads the parameters of `h2o`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<H2o> {
        shape.check()?;
        let heads = reader.choice("heads", &["each", "all"])?;
        if heads == Some(0) && shape.kind == Kind::Latent {
            return Err(conflict("latent rows serve all heads: heads=each is impossible, use all"));
        }
        let is_each = heads != Some(1) && shape.kind == Kind::Split;
        let lists = if is_each { shape.key_heads } else { 1 };
        Ok(H2o {
            shape: *shape,
            retained: TokenScores::new(shape.layers, lists, shape.max_tokens)?,
            sink: count(reader, "sink", 4, 0)? as usize,
            recent: count(reader, "recent", 256, 0)? as usize,
            budget: count(reader, "budget", 1024, 1)? as usize,
            slack: count(reader, "evict_every", 1, 1)? as usize - 1,
            is_each,
            is_block: reader.choice("form", &["token", "block"])? == Some(1),
            blocks: BlockScratch::default(),
        })
    }

    fn plan_blocks(&mut self, layer: u32, out: &mut RetainedTokens) -> Result<bool> {
        let each = self.shape.block_tokens;
        let most = (self.budget / each as usize).max(1);
        let (sink, recent, slack) = (self.sink, self.recent, self.slack);
        let layer = self.retained.layer(layer)?;
        let lists = &layer.lists;
        let blocks = &mut self.blocks;
        let mut any = false;
        for list in lists {
            blocks.find(list, each, layer.next, (sink, recent))?;
            let count = blocks.scores.len();
            any |= count > most && (count - most) * each as usize > slack;
        }
        if !any {
            return Ok(false);
        }
        out.begin(lists.len(), layer.tokens())?;
        for list in lists {
            blocks.find(list, each, layer.next, (sink, recent))?;
            let leave = blocks.scores.len().saturating_sub(most);
            let BlockScratch { ranks, starts, scores, victims } = blocks;
            victims.clear();
            ranks.bottom(scores, leave, victims)?;
            let mut from = 0;
            let mut stays = Vec::new();
            reserve(&mut stays, list.positions.len())?;
            for &at in victims.iter() {
                let mut protected = starts.iter().skip(at as usize).map(|&end| end as usize);
                let (Some(begin), Some(end)) = (protected.next(), protected.next()) else { break };
                stays.extend_from_slice(list.positions.get(from..begin).unwrap_or_default());
                from = end;
            }
            stays.extend_from_slice(list.positions.get(from..).unwrap_or_default());
            out.heads.push(stays);
        }
        Ok(true)
    }
}

impl BlockScratch {
    /// Finds the evictable blocks of a list, with their scores.
    fn find(
        &mut self,
        list: &TokenList,
        each: u32,
        next: u32,
        protected: (usize, usize),
    ) -> Result<()> {
        let positions = &list.positions;
        let count = positions.len();
        let block = |at: usize| positions.get(at).map_or(0, |position| position / each);
        self.starts.clear();
        self.scores.clear();
        let (first, last) = (protected.0.min(count), count.saturating_sub(protected.1));
        // The first block without a first token, and the last without a newest one.
        let from = match first {
            0 => 0,
            _ => positions.partition_point(|position| position / each <= block(first - 1)),
        };
        let to = match last < count {
            true => positions.partition_point(|position| position / each < block(last)),
            false => positions.partition_point(|position| position / each < next / each),
        };
        let mut at = from;
        reserve(&mut self.starts, count / each as usize + 2)?;
        while at < to {
            let end = at + positions.iter().skip(at).take_while(|p| *p / each == block(at)).count();
            let scores = list.scores.get(at..end).unwrap_or_default();
            reserve(&mut self.scores, 1)?;
            reserve(&mut self.starts, 2)?;
            self.starts.push(at as u32);
            self.scores.push(scores.iter().sum());
            at = end;
        }
        self.starts.push(at as u32);
        Ok(())
    }
}

impl Sparse for H2o {
    fn traits(&self) -> Traits {
        Traits {
            caps: caps::EVICT_PREFILL | caps::EVICT_DECODE,
            needs: needs::COLUMN_SUMS,
            scope: if self.is_each { Scope::KeyHead } else { Scope::Layer },
            granularity: if self.is_block { Granularity::Block } else { Granularity::Token },
            sum_queries: ALL_QUERIES,
            ..Traits::NONE
        }
    }

    fn state_bytes(&self) -> u64 {
        self.retained.bytes()
    }

    fn observe(&mut self, layer: u32, _queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        let allows_one = !self.is_each || self.shape.key_heads == 1;
        let rows = sum_rows(&self.shape, sums, tokens, allows_one)?;
        self.retained.add_sums(layer, (rows, tokens), sums, false)
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        // Tokens without attention so far are the newest ones.
        self.retained.extend(layer, context.tokens, 0.0)?;
        if self.is_block {
            return self.plan_blocks(layer, out);
        }
        let (budget, slack) = (self.budget, self.slack);
        let leave = |_, between: usize| match between.checked_sub(budget) {
            Some(more) if more > slack => more,
            _ => 0,
        };
        self.retained.plan(layer, (self.sink, self.recent), leave, out)
    }

    fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        self.retained.evicted(layer, retained)
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        self.retained.truncate(tokens);
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }
}
