//! `tova`: evicts the token with the least attention of the newest query (Oren et al., EMNLP'24).
//!
//! The attention of the last query, averaged over all heads, decides for a whole layer; earlier
//! attention does not count. The policy takes the sums of one query at a time: of the last query of
//! the prompt, then of each. Tokens without attention so far stay.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::eviction::{self, Retention};
use crate::sparse::token_scores::{TokenScores, sum_rows};
use crate::sparse::{Context, RetainedTokens, Shape, Sparse, Traits, needs};

/// Parameters of `tova`.
pub const PARAMS: &[Param] = &[
    eviction::BUDGET,
    eviction::RATIO,
    Param::new(
        "newest",
        "`kept`: the newest token stays. `free`: it may be evicted too, as first published",
    ),
];

/// Attention of the newest query.
#[derive(Clone, Debug)]
pub struct Tova {
    shape: Shape,
    retained: TokenScores,
    retention: Retention,
}

impl Tova {
    /// Reads the parameters of `tova`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Tova> {
        shape.check()?;
        let newest = usize::from(reader.choice("newest", &["kept", "free"])? != Some(1));
        Ok(Tova {
            shape: *shape,
            retained: TokenScores::new(shape.layers, 1, shape.max_tokens)?,
            retention: Retention::with(reader, 0, newest)?,
        })
    }
}

impl Sparse for Tova {
    fn traits(&self) -> Traits {
        Traits {
            caps: self.retention.caps(),
            needs: needs::COLUMN_SUMS,
            sum_queries: 1,
            ..Traits::NONE
        }
    }

    fn state_bytes(&self) -> u64 {
        self.retained.bytes()
    }

    fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        if queries != 1 {
            fail!(Invalid, "sums of {queries} queries, tova takes the sums of one query at a time");
        }
        let rows = sum_rows(&self.shape, sums, tokens, true)?;
        self.retained.add_sums(layer, (rows, tokens), sums, true)
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        self.retained.extend(layer, context.tokens, f32::INFINITY)?;
        self.retention.plan(&mut self.retained, layer, context, out)
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
