//! Checked inputs of an index over a prompt, and what prefill policies share.

use crate::attention::Rows;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::sparse::index::{Context, Index, NO_QUERY};
use crate::sparse::index_builder::IndexBuilder;
use crate::sparse::numbers;
use crate::sparse::shape::Shape;

/// Queries, and all keys up to the last of them.
#[derive(Clone, Copy)]
pub struct PrefillInputs<'a> {
    /// The queries.
    pub queries: &'a Rows<'a>,
    /// All keys of the sequence, from its first token to that of the last query.
    pub keys: &'a Rows<'a>,
    /// Position of the first query.
    pub first: u32,
    /// Tokens of the sequence.
    pub tokens: u32,
    /// Factor of products.
    pub scale: f32,
    group: u32,
}

/// Checks that the queries are the last tokens of the sequence. Policies that use positions only
/// need no keys, which may have been evicted.
pub fn check_context(shape: &Shape, count: u32, context: &Context) -> Result<()> {
    let end = context.first_query.checked_add(count);
    if end != Some(context.tokens) || context.tokens > shape.max_tokens {
        let (first, tokens, most) = (context.first_query, context.tokens, shape.max_tokens);
        fail!(
            Invalid,
            "{count} queries from {first} on must end a sequence of {tokens} tokens, at most {most}"
        );
    }
    Ok(())
}

/// Fails with `Unsupported` outside of a prompt.
pub fn only_prefill(name: &str, context: &Context) -> Result<()> {
    if !context.is_prefill {
        fail!(Unsupported, "{name} selects keys in prompts only, not in decode");
    }
    Ok(())
}

/// An index of rows of `block` queries by blocks of as many keys; `add` adds the lists head by
/// head.
pub fn each_head(
    inputs: &PrefillInputs<'_>,
    block: u32,
    mut add: impl FnMut(u32, &mut IndexBuilder) -> Result<()>,
) -> Result<Index> {
    let mut builder = IndexBuilder::default();
    for head in 0..inputs.heads() {
        builder.blocks(block, block, NO_QUERY)?;
        add(head, &mut builder)?;
    }
    Ok(builder.into_index())
}

/// The error for numbers that are not finite.
pub fn not_finite(name: &str) -> Error {
    Error::new(Status::Invalid, format!("{name} are not all finite"))
}

impl<'a> PrefillInputs<'a> {
    /// Checks that rows match the shape, and that the keys are those of all tokens.
    pub fn check(
        shape: &Shape,
        layer: u32,
        queries: &'a Rows<'a>,
        keys: Option<&'a Rows<'a>>,
        context: &Context,
    ) -> Result<PrefillInputs<'a>> {
        let Some(keys) = keys else {
            fail!(Invalid, "this policy needs all keys (KVT_NEEDS_ALL_KEYS), but none were passed");
        };
        shape.check_queries(layer, queries)?;
        shape.check_keys(layer, keys)?;
        check_context(shape, queries.tokens(), context)?;
        if keys.tokens() != context.tokens {
            fail!(Invalid, "{} keys were passed for {} tokens", keys.tokens(), context.tokens);
        }
        Ok(PrefillInputs {
            queries,
            keys,
            first: context.first_query,
            tokens: context.tokens,
            scale: shape.softmax_scale(),
            group: shape.group(),
        })
    }

    /// Number of queries.
    pub fn count(&self) -> u32 {
        self.queries.tokens()
    }

    /// Query heads.
    pub fn heads(&self) -> u32 {
        self.queries.heads()
    }

    /// Numbers of a head.
    pub fn dim(&self) -> usize {
        self.queries.dim() as usize
    }

    /// The head of keys of a query head.
    pub fn key_head(&self, head: u32) -> u32 {
        head / self.group
    }

    /// Reads queries of a head from `from` on, as many as fit into `out`. Rows beyond the last
    /// query become zero.
    pub fn read_queries(&self, head: u32, from: u32, out: &mut [f32]) -> Result<()> {
        read(self.queries, "queries", head, from, out)
    }

    /// The same for the keys of a query head.
    pub fn read_keys(&self, head: u32, from: u32, out: &mut [f32]) -> Result<()> {
        read(self.keys, "keys", self.key_head(head), from, out)
    }
}

fn read(rows: &Rows<'_>, name: &str, head: u32, from: u32, out: &mut [f32]) -> Result<()> {
    for (token, row) in (from..).zip(out.chunks_exact_mut(rows.dim() as usize)) {
        if token >= rows.tokens() {
            row.fill(0.0);
        } else if !numbers::read(rows, token, head, row) {
            return Err(not_finite(name));
        }
    }
    Ok(())
}
