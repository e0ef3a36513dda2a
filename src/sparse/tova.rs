//! `tova`: the token that the newest query looks at least goes (Oren et al., EMNLP'24).
//!
//! | parameter | default | meaning |
//! |---|---|---|
//! | `budget` | 1024 | tokens that stay |
//! | `ratio` | none | instead: this share goes, once, when the prompt has been computed |
//! | `newest` | kept | `free`: the newest token must earn its place too, as first published |
//!
//! The attention of the last query, averaged over all heads, decides for a whole layer; what
//! it was before does not count. It has to be told the attention of one query at a time: of
//! the last one of the prompt, then of each. Tokens that nobody looked at yet stay.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::kept::{Cap, Kept, check_sums};
use crate::sparse::{Context, Keep, Shape, Sparse, Traits, caps, needs};

/// What the newest query looks at.
#[derive(Clone, Debug)]
pub struct Tova {
    shape: Shape,
    kept: Kept,
    cap: Cap,
    newest: usize,
}

impl Tova {
    /// Reads `tova` with its parameters.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Tova> {
        shape.check()?;
        Ok(Tova {
            shape: *shape,
            kept: Kept::new(shape.layers, 1, shape.max_tokens)?,
            cap: Cap::read(reader, 1024)?,
            newest: usize::from(reader.choice("newest", &["kept", "free"])? != Some(1)),
        })
    }
}

impl Sparse for Tova {
    fn traits(&self) -> Traits {
        Traits {
            caps: caps::EVICT_PREFILL
                | if self.cap.is_for_decode() { caps::EVICT_DECODE } else { 0 },
            needs: needs::COLUMN_SUMS,
            sum_queries: 1,
            ..Traits::NONE
        }
    }

    fn state_bytes(&self) -> u64 {
        self.kept.bytes()
    }

    fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        let count = tokens as usize;
        let is_whole = sums.len() == count || sums.len() == count * self.shape.query_heads as usize;
        if queries != 1 || count == 0 || !is_whole {
            let n = sums.len();
            fail!(
                Invalid,
                "{n} sums of the attention of {queries} queries, tova takes one query's"
            );
        }
        let next = self.kept.next_of(layer, tokens)?;
        check_sums(sums)?;
        self.kept.extend(layer, next, 0.0)?;
        for list in self.kept.lists(layer) {
            list.scores.fill(0.0);
            for row in sums.chunks_exact(count) {
                list.scores.iter_mut().zip(row).for_each(|(score, sum)| *score += sum);
            }
        }
        Ok(())
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut Keep) -> Result<bool> {
        self.kept.extend(layer, context.tokens, f32::INFINITY)?;
        if !context.is_prefill && !self.cap.is_for_decode() {
            return Ok(false);
        }
        let cap = self.cap;
        self.kept.plan(layer, (0, self.newest), |count, _| count - cap.of(count), out)
    }

    fn evicted(&mut self, layer: u32, kept: &Keep) -> Result<()> {
        self.kept.evicted(layer, kept)
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        self.kept.truncate(tokens);
        Ok(())
    }

    fn reset(&mut self) {
        self.kept.truncate(0);
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }
}
