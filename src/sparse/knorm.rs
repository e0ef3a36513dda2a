//! `knorm`: evicts the tokens with the longest keys (Devoto et al., EMNLP'24).
//!
//! Only keys decide, so blocks of keys may arrive when they are moved away. The norms of its keys
//! are saved with a block, while none of its tokens is evicted; little-endian:
//!
//! | bytes | contents |
//! |---|---|
//! | 0..4 | `KVTN` |
//! | 4..6 | version: 1 |
//! | 6..8 | zero |
//! | 8..16 | heads, tokens (u32 each) |
//! | 16.. | for each head and token the norm (f32) |
//!
//! Blocks are loaded in the order of tokens, behind the known ones.

use crate::attention::Rows;
use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::eviction::{self, Retention};
use crate::sparse::numbers::{check_rows, fill, grow, norm, reserve};
use crate::sparse::pages::BlockMap;
use crate::sparse::token_scores::TokenScores;
use crate::sparse::{Context, RetainedTokens, Scope, Shape, Sparse, Traits, needs};

/// Parameters of `knorm`.
pub const PARAMS: &[Param] = &[eviction::BUDGET, eviction::RATIO, eviction::SINK, eviction::RECENT];

const MAGIC: [u8; 8] = *b"KVTN\x01\0\0\0";
const HEAD_BYTES: usize = 16;

/// Norms of keys.
#[derive(Clone, Debug)]
pub struct Knorm {
    shape: Shape,
    retained: TokenScores,
    retention: Retention,
    row: Vec<f32>,
    /// Positions of blocks, in each layer.
    blocks: Vec<BlockMap>,
}

impl Knorm {
    /// Reads the parameters of `knorm`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Knorm> {
        shape.check()?;
        let (mut row, mut blocks) = (Vec::new(), Vec::new());
        grow(&mut row, shape.key_dim as usize, 0.0)?;
        grow(&mut blocks, shape.layers as usize, BlockMap::default())?;
        Ok(Knorm {
            shape: *shape,
            retained: TokenScores::new(shape.layers, shape.key_heads, shape.max_tokens)?,
            retention: Retention::read(reader)?,
            row,
            blocks,
        })
    }

    /// Records the block that begins at `first`, if a block can begin there.
    fn place_block(&mut self, layer: u32, id: u32, first: u32) -> Result<()> {
        let each = self.shape.block_tokens;
        if let Some(blocks) = self.blocks.get_mut(layer as usize).filter(|_| first % each == 0) {
            blocks.reserve(first / each)?;
            blocks.set(id, first / each);
        }
        Ok(())
    }
}

impl Sparse for Knorm {
    fn traits(&self) -> Traits {
        Traits {
            caps: self.retention.caps(),
            needs: needs::KEYS,
            scope: Scope::KeyHead,
            ..Traits::NONE
        }
    }

    fn state_bytes(&self) -> u64 {
        self.retained.bytes() + self.blocks.iter().map(BlockMap::bytes).sum::<u64>()
    }

    fn append(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        self.shape.check_keys(layer, keys)?;
        self.retained.check_next(layer, first)?;
        check_rows("keys", keys)?;
        self.retained.extend(layer, first.saturating_add(keys.tokens()), 0.0)?;
        let row = &mut self.row;
        for (head, list) in (0..).zip(self.retained.lists(layer)) {
            let from = list.scores.len() - keys.tokens() as usize;
            for (token, score) in (0..).zip(list.scores.iter_mut().skip(from)) {
                fill(keys, token, head, row);
                // The longest key gets the lowest score.
                *score = -(norm(row) as f32);
            }
        }
        Ok(())
    }

    fn seal(&mut self, layer: u32, id: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        // Appended keys are known; a block appended as a whole is not.
        if self.retained.layer(layer)?.next <= first {
            self.append(layer, first, keys)?;
        }
        self.place_block(layer, id, first)
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        self.retention.plan(&mut self.retained, layer, context, out)
    }

    fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        self.retained.evicted(layer, retained)
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        self.retained.truncate(tokens);
        let whole = tokens.div_ceil(self.shape.block_tokens);
        self.blocks.iter_mut().for_each(|blocks| blocks.truncate(whole));
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }

    fn save(&self, layer: u32, id: u32, out: &mut Vec<u8>) -> Result<()> {
        let known = self.retained.layer(layer)?;
        let Some(place) = self.blocks.get(layer as usize).and_then(|blocks| blocks.place(id))
        else {
            fail!(NotFound, "block {id} of layer {layer} is unknown: seal or load it first");
        };
        let first = place * self.shape.block_tokens;
        let tokens = known.next.saturating_sub(first).min(self.shape.block_tokens);
        let bytes = HEAD_BYTES + 4 * known.lists.len() * tokens as usize;
        let begin = out.len();
        reserve(out, bytes)?;
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&(known.lists.len() as u32).to_le_bytes());
        out.extend_from_slice(&tokens.to_le_bytes());
        for list in &known.lists {
            let from = list.positions.partition_point(|&position| position < first);
            let scores = list.scores.iter().skip(from);
            let retained_scores = list.positions.iter().skip(from).zip(scores);
            let retained_scores =
                retained_scores.take_while(|(position, _)| **position < first + tokens);
            retained_scores.for_each(|(_, score)| out.extend_from_slice(&(-score).to_le_bytes()));
        }
        if out.len() - begin != bytes {
            out.truncate(begin);
            fail!(NotFound, "tokens of block {id} of layer {layer} were evicted");
        }
        Ok(())
    }

    fn load(&mut self, layer: u32, id: u32, first: u32, bytes: &[u8]) -> Result<()> {
        let next = self.retained.layer(layer)?.next;
        let lists = self.retained.lists(layer).len();
        let tokens = bytes.get(12..HEAD_BYTES).map_or(0, |tokens| {
            tokens.iter().rev().fold(0u32, |all, &byte| all << 8 | u32::from(byte))
        });
        let (head, lengths) = bytes.split_at_checked(HEAD_BYTES).unwrap_or_default();
        let mut right = [0; HEAD_BYTES];
        right[..8].copy_from_slice(&MAGIC);
        right[8..12].copy_from_slice(&(lists as u32).to_le_bytes());
        right[12..].copy_from_slice(&tokens.to_le_bytes());
        let is_size = lengths.len() as u64 == 4 * lists as u64 * u64::from(tokens);
        let is_block = (1..=self.shape.block_tokens).contains(&tokens);
        let numbers = || lengths.as_chunks::<4>().0.iter().map(|&four| f32::from_le_bytes(four));
        if head != right || !is_size || !is_block || !numbers().all(|length| length >= 0.0) {
            fail!(Corrupt, "the saved norms of block {id} are damaged or of another model");
        }
        if first != next {
            fail!(Invalid, "block {id} starts at position {first}, the layer continues at {next}");
        }
        self.retained.extend(layer, first.saturating_add(tokens), 0.0)?;
        let all: &mut [_] = self.retained.lists(layer);
        let mut numbers = numbers();
        for list in all {
            let from = list.scores.len().saturating_sub(tokens as usize);
            let scores = list.scores.iter_mut().skip(from);
            scores.zip(&mut numbers).for_each(|(score, length)| *score = -length);
        }
        self.place_block(layer, id, first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::spec::Spec;
    use crate::sparse::Kind;
    use crate::sparse::numbers::testing::rows;
    use crate::sparse::registry::make;

    fn policy() -> Box<dyn Sparse> {
        let shape = Shape {
            layers: 2,
            query_heads: 2,
            key_heads: 2,
            key_dim: 3,
            value_dim: 3,
            scale: 0.0,
            kind: Kind::Split,
            block_tokens: 4,
            max_tokens: 64,
        };
        make(&Spec::parse("knorm(budget=5)").expect("sound"), &shape).expect("sound")
    }

    fn numbers(tokens: usize) -> Vec<f32> {
        (0..tokens * 6).map(|at| ((at * 37) % 101) as f32 - 50.0).collect()
    }

    fn left(policy: &mut dyn Sparse, layer: u32) -> Option<RetainedTokens> {
        let context = Context { is_prefill: true, tokens: 12, ..Context::default() };
        let mut retained_tokens = RetainedTokens::default();
        policy
            .evict(layer, &context, &mut retained_tokens)
            .expect("sound")
            .then_some(retained_tokens)
    }

    #[test]
    fn loaded_norms_give_the_same_evictions_as_keys() {
        let (all, mut original, mut restored) = (numbers(12), policy(), policy());
        // Blocks have the caller's ids; the last one grows token by token.
        for (id, block) in (0u32..).zip(all.chunks(24)) {
            let keys = rows(block, 2, 3);
            for layer in 0..2 {
                if id == 2 {
                    original.append(layer, 8, &keys).expect("sound");
                }
                original.seal(layer, 100 - id, id * 4, &keys).expect("sound");
            }
        }
        for layer in 0..2 {
            for id in 0..3 {
                let mut bytes = vec![9];
                original.save(layer, 100 - id, &mut bytes).expect("known");
                assert_eq!(bytes.len(), 1 + 16 + 2 * 4 * 4);
                restored.load(layer, id, id * 4, &bytes[1..]).expect("they are its own");
            }
        }
        for layer in 0..2 {
            let retained_tokens = left(&mut *original, layer).expect("more than five");
            assert_eq!(Some(&retained_tokens), left(&mut *restored, layer).as_ref());
            assert_eq!(retained_tokens.heads.len(), 2);
            original.evicted(layer, &retained_tokens).expect("its own");
            // A block that lost a token cannot be saved.
            let is_evicted = |id| original.save(layer, id, &mut Vec::new()).is_err();
            assert!([100, 99, 98].into_iter().any(is_evicted));
        }
        restored.truncate(8).expect("shorter");
        assert!(restored.save(0, 2, &mut Vec::new()).is_err());
        restored.save(0, 1, &mut Vec::new()).expect("still there");
    }

    #[test]
    fn foreign_bytes_are_rejected_and_change_nothing() {
        let (all, mut original) = (numbers(4), policy());
        original.seal(0, 0, 0, &rows(&all, 2, 3)).expect("sound");
        let mut right = Vec::new();
        original.save(0, 0, &mut right).expect("known");
        let mut restored = policy();
        for at in 0..16 {
            let mut bad = right.clone();
            bad[at] ^= 0x41;
            assert!(restored.load(0, 0, 0, &bad).is_err(), "byte {at}");
        }
        for length in [f32::NAN, -1.0] {
            let mut bad = right.clone();
            bad[20..24].copy_from_slice(&length.to_le_bytes());
            assert!(restored.load(0, 0, 0, &bad).is_err(), "{length}");
        }
        for end in 0..right.len() {
            assert!(restored.load(0, 0, 0, &right[..end]).is_err(), "{end} bytes");
        }
        assert!(restored.load(0, 1, 4, &right).is_err(), "there is one before it");
        assert!(
            restored.load(2, 0, 0, &right).is_err() && restored.load(0, 0, 64, &right).is_err()
        );
        restored.load(0, 0, 0, &right).expect("its own");
        assert!(restored.load(0, 0, 0, &right).is_err(), "twice");
    }
}
