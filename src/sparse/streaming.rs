//! `streaming`: the first tokens, which act as attention sinks, and the last (Xiao et al.,
//! ICLR'24).
//!
//! A query sees the sinks and the `recent` positions that end with its own, in the prompt and in
//! decode. In decode, all other tokens may be evicted: after the newest token is appended, `sinks +
//! recent` stay.
//!
//! `rotate` changes no answer: positions are logical either way. The engine reads it
//! ([`Streaming::rotates`]) and rotates keys to their places in the cache, as the paper does.
//! Without `rotate`, keys stay as computed.

use crate::attention::Rows;
use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::sparse::index::{Context, Index, NO_QUERY};
use crate::sparse::index_builder::IndexBuilder;
use crate::sparse::lists::RetainedTokens;
use crate::sparse::numbers::zeros;
use crate::sparse::shape::Shape;
use crate::sparse::{Sparse, Traits, caps, prefill_inputs};

/// Parameters of `streaming`.
pub const PARAMS: &[Param] = &[
    Param::new("sinks", "first tokens that stay").limits_are("0 to the most tokens of a sequence"),
    Param::new("recent", "last tokens that stay, the query's own included")
        .limits_are("1 to the most tokens of a sequence"),
    Param::new(
        "rotate",
        "keys are encoded by their place in the cache, not by their position in the text",
    ),
];

/// Sinks and a window.
#[derive(Clone)]
pub struct Streaming {
    shape: Shape,
    sinks: u32,
    recent: u32,
    rotates: bool,
    /// For each layer: the first position behind the sinks that is still resident.
    oldest: Vec<u32>,
}

impl Streaming {
    /// Reads the parameters of `streaming`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Streaming> {
        let most = 1..=u64::from(shape.max_tokens);
        let mut oldest = Vec::new();
        zeros(&mut oldest, shape.layers as usize)?;
        let sinks = reader.u64("sinks", 4, 0..=u64::from(shape.max_tokens))? as u32;
        oldest.fill(sinks);
        Ok(Streaming {
            shape: *shape,
            sinks,
            recent: reader.u64("recent", 1020, most)? as u32,
            rotates: reader.bool("rotate", false)?,
            oldest,
        })
    }

    /// Whether keys are to be rotated to their places in the cache.
    pub fn rotates(&self) -> bool {
        self.rotates
    }

    /// Start of the window of the token before `end`, and the end of the sinks.
    fn window(&self, end: u32) -> (u32, u32) {
        (end.saturating_sub(self.recent), self.sinks.min(end))
    }

    fn oldest(&mut self, layer: u32) -> Result<&mut u32> {
        self.shape.check_layer(layer)?;
        Ok(self.oldest.get_mut(layer as usize).ok_or(Status::Invalid)?)
    }

    /// Sinks and window of the last token.
    fn tokens(&self, end: u32) -> impl Iterator<Item = u32> {
        let (begin, sinks) = self.window(end);
        (0..sinks).chain(begin.max(sinks)..end)
    }
}

impl Sparse for Streaming {
    fn traits(&self) -> Traits {
        Traits {
            caps: caps::INDEX_PREFILL | caps::INDEX_DECODE | caps::EVICT_DECODE,
            rotates: self.rotates,
            ..Traits::NONE
        }
    }

    fn state_bytes(&self) -> u64 {
        (self.oldest.capacity() * size_of::<u32>()) as u64
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        _keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        self.shape.check_queries(layer, queries)?;
        prefill_inputs::check_context(&self.shape, queries.tokens(), context)?;
        let (begin, sinks) = self.window(context.tokens);
        let mut builder = IndexBuilder::default();
        if begin > sinks && queries.tokens() == 1 {
            builder.blocks(0, 1, NO_QUERY)?;
            builder.list(self.tokens(context.tokens))?;
        } else if begin > sinks {
            builder.lines(NO_QUERY)?;
            builder.list(0..sinks)?;
            builder.list(0..self.recent.min(context.tokens))?;
        }
        *out = builder.into_index();
        Ok(())
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        if context.is_prefill {
            fail!(Unsupported, "streaming evicts in decode only, not in a prompt");
        }
        prefill_inputs::check_context(
            &self.shape,
            context.tokens.saturating_sub(context.first_query),
            context,
        )?;
        let (begin, _) = self.window(context.tokens);
        if begin <= *self.oldest(layer)? {
            return Ok(false);
        }
        out.clear();
        out.heads.push(self.tokens(context.tokens));
        Ok(true)
    }

    fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        let sinks = self.sinks;
        let list = retained.of(0);
        let (Some(first), Some(&last)) = (list.iter().find(|&&at| at >= sinks), list.last()) else {
            fail!(Invalid, "no token behind the {sinks} sinks is retained");
        };
        if last >= self.shape.max_tokens {
            fail!(
                Invalid,
                "position {last} is beyond the limit of {} tokens",
                self.shape.max_tokens
            );
        }
        *self.oldest(layer)? = *first;
        Ok(())
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        // New tokens are appended behind the truncation.
        let sinks = self.sinks;
        self.oldest.iter_mut().for_each(|oldest| *oldest = (*oldest).min(tokens).max(sinks));
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }
}
