//! Parameters that eviction policies share: how many tokens stay, and which are protected.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::{Error, Result, Status};
use crate::sparse::token_scores::TokenScores;
use crate::sparse::{Context, RetainedTokens, caps};

/// The parameter `budget` of [`TokenBudget`].
pub const BUDGET: Param = Param::new("budget", "tokens that stay, for each list");
/// The parameter `ratio` of [`TokenBudget`].
pub const RATIO: Param =
    Param::new("ratio", "instead of `budget`: share that is evicted, once, after the prompt")
        .default_is("none");
/// The parameter `sink` of [`Retention`].
pub const SINK: Param = Param::new("sink", "first tokens that always stay");
/// The parameter `recent` of [`Retention`].
pub const RECENT: Param = Param::new("recent", "newest tokens that always stay");

/// Reads a parameter that counts tokens or blocks: `least` to `u32::MAX`.
pub fn count(reader: &mut Reader, key: &'static str, default: u64, least: u64) -> Result<u32> {
    Ok(reader.u64(key, default, least..=u64::from(u32::MAX))? as u32)
}

/// An error for parameters that contradict each other or the model.
pub fn conflict(text: impl Into<String>) -> Error {
    Error::new(Status::Spec, text)
}

/// Number of tokens to retain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TokenBudget {
    /// At most this many.
    Tokens(u32),
    /// All but this share; evicted once, after the prompt.
    Ratio(f64),
}

impl TokenBudget {
    /// Reads `budget` or, if present, `ratio`.
    pub fn read(reader: &mut Reader, default: u64) -> Result<TokenBudget> {
        let tokens = reader.u64("budget", default, 1..=u64::from(u32::MAX))? as u32;
        let ratio = reader.f64("ratio", -1.0, 0.0..=1.0)?;
        Ok(if ratio >= 0.0 { TokenBudget::Ratio(ratio) } else { TokenBudget::Tokens(tokens) })
    }

    /// Number of `tokens` tokens to retain.
    pub fn of(&self, tokens: usize) -> usize {
        match *self {
            TokenBudget::Tokens(most) => (most as usize).min(tokens),
            // A share below 1 leaves at least one token.
            TokenBudget::Ratio(ratio) => {
                let least = usize::from(ratio < 1.0).min(tokens);
                (self.exact(tokens, ratio) as usize).max(least)
            }
        }
    }

    /// The same before rounding down.
    pub fn unrounded(&self, tokens: usize) -> f64 {
        match *self {
            TokenBudget::Tokens(most) => f64::from(most),
            TokenBudget::Ratio(ratio) => self.exact(tokens, ratio),
        }
    }

    fn exact(&self, tokens: usize, ratio: f64) -> f64 {
        tokens as f64 * (1.0 - ratio)
    }

    /// Whether tokens may be evicted in decode.
    pub fn is_for_decode(&self) -> bool {
        matches!(self, TokenBudget::Tokens(_))
    }
}

/// Rule for evicting tokens of a list by their scores: all beyond the budget may be evicted, except
/// the first `sink` and the newest `recent` ones.
#[derive(Clone, Copy, Debug)]
pub struct Retention {
    cap: TokenBudget,
    sink: usize,
    recent: usize,
}

impl Retention {
    /// Reads `budget` or `ratio`, and protects this many tokens at both ends.
    pub fn with(reader: &mut Reader, sink: usize, recent: usize) -> Result<Retention> {
        Ok(Retention { cap: TokenBudget::read(reader, 1024)?, sink, recent })
    }

    /// Reads `budget`, `ratio`, `sink` and `recent`.
    pub fn read(reader: &mut Reader) -> Result<Retention> {
        let cap = TokenBudget::read(reader, 1024)?;
        let sink = count(reader, "sink", 0, 0)? as usize;
        Ok(Retention { cap, sink, recent: count(reader, "recent", 0, 0)? as usize })
    }

    /// Capabilities with this budget. A share evicts after the prompt only.
    pub fn caps(&self) -> u32 {
        caps::EVICT_PREFILL | if self.cap.is_for_decode() { caps::EVICT_DECODE } else { 0 }
    }

    /// Whether a list of a layer has more tokens than may stay.
    pub fn is_due(
        &self,
        scores_of_retained: &TokenScores,
        layer: u32,
        context: &Context,
    ) -> Result<bool> {
        let mut lists = scores_of_retained.layer(layer)?.lists.iter();
        let is_time = context.is_prefill || self.cap.is_for_decode();
        Ok(is_time && lists.any(|list| list.positions.len() > self.cap.of(list.positions.len())))
    }

    /// Puts the tokens that stay into `out`. Returns false if none is evicted.
    pub fn plan(
        &self,
        scores_of_retained: &mut TokenScores,
        layer: u32,
        context: &Context,
        out: &mut RetainedTokens,
    ) -> Result<bool> {
        let cap = self.cap;
        Ok(self.is_due(scores_of_retained, layer, context)?
            && scores_of_retained.plan(
                layer,
                (self.sink, self.recent),
                |count, _| count - cap.of(count),
                out,
            )?)
    }
}
