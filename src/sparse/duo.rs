//! `duo`: some heads of keys retain all tokens, the others the first and the newest (Xiao et al.,
//! ICLR'25). Training has found which: a number for each layer and head.
//!
//! Between equal numbers the earlier head retains all. Of n heads `n - ceil(sparsity * (n - 1))`
//! retain all; none at 1.

use std::path::Path;

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::fail;
use crate::io::source::Source;
use crate::sparse::eviction::{conflict, count};
use crate::sparse::numbers::{check, grow, reserve};
use crate::sparse::ranks::Ranks;
use crate::sparse::{Context, RetainedTokens, Scope, Shape, Sparse, Traits, caps};

/// Parameters of `duo`.
pub const PARAMS: &[Param] = &[
    Param::new(
        "alpha",
        "a number for each head of keys, layer after layer: `\"0.9 0.1; 0.2 0.8\"`; required, \
         unless `file` is given",
    ),
    Param::new("file", "instead of `alpha`: a text file of the numbers, one line a layer"),
    Param::new("sparsity", "heads with numbers from this quantile on retain all tokens"),
    Param::new("sink", "first tokens that the other heads retain"),
    Param::new("recent", "newest tokens that the other heads retain"),
    Param::new("evict_every", "the other heads evict when this many tokens exceed `sink + recent`"),
];

/// Largest text of numbers, in bytes.
const MAX_TEXT_BYTES: usize = 16 << 20;

/// Heads that retain all tokens, and streaming heads.
#[derive(Clone, Debug)]
pub struct Duo {
    shape: Shape,
    /// For each layer and head of keys: whether the head retains all.
    is_full: Vec<bool>,
    sink: u32,
    recent: u32,
    slack: u32,
    /// For each layer: the first token behind the sink that streaming heads still have.
    from: Vec<u32>,
}

/// Parses numbers that are separated by spaces, commas, semicolons or line breaks.
fn numbers(text: &str, most: usize) -> Result<Vec<f32>> {
    let mut out = Vec::new();
    let is_gap = |c: char| c.is_ascii_whitespace() || matches!(c, ',' | ';');
    for word in text.split(is_gap).filter(|word| !word.is_empty()) {
        let Ok(number) = word.parse::<f32>() else {
            return Err(conflict(format!("'{word}' is not a number")));
        };
        reserve(&mut out, 1)?;
        out.push(number);
        if out.len() > most {
            return Err(conflict(format!("more numbers than the {most} heads of keys")));
        }
    }
    Ok(out)
}

impl Duo {
    /// Reads the parameters of `duo`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Duo> {
        shape.check()?;
        let heads = shape.layers as usize * shape.key_heads as usize;
        let alpha = match (reader.text("alpha")?, reader.text("file")?) {
            (Some(text), None) => numbers(text, heads)?,
            (None, Some(path)) => {
                let bytes = Source::open(Path::new(path))?.rest(MAX_TEXT_BYTES)?;
                let Ok(text) = std::str::from_utf8(&bytes) else {
                    return Err(conflict(format!("{path} is not a text")));
                };
                numbers(text, heads).map_err(|error| error.within(path))?
            }
            _ => return Err(conflict("one of alpha and file is needed, not both")),
        };
        if alpha.len() != heads {
            let count = alpha.len();
            return Err(conflict(format!("{count} numbers, there are {heads} heads of keys")));
        }
        check("numbers of heads", &alpha)?;
        let sparsity = reader.f64("sparsity", 0.5, 0.0..=1.0)?;
        let few = (sparsity * (heads - 1) as f64).ceil() as usize;
        let full = if sparsity >= 1.0 { 0 } else { heads - few };
        let (mut best, mut is_full, mut from) = (Vec::new(), Vec::new(), Vec::new());
        Ranks::default().top(&alpha, full, &mut best)?;
        grow(&mut is_full, heads, false)?;
        for at in best {
            if let Some(full) = is_full.get_mut(at as usize) {
                *full = true;
            }
        }
        let sink = count(reader, "sink", 64, 0)?;
        grow(&mut from, shape.layers as usize, sink)?;
        Ok(Duo {
            shape: *shape,
            is_full,
            sink,
            recent: count(reader, "recent", 256, 1)?,
            slack: count(reader, "evict_every", 1, 1)? - 1,
            from,
        })
    }

    /// For each head of a layer: whether it retains all.
    pub fn full(&self, layer: u32) -> &[bool] {
        let heads = self.shape.key_heads as usize;
        self.is_full.chunks_exact(heads).nth(layer as usize).unwrap_or_default()
    }
}

impl Sparse for Duo {
    fn traits(&self) -> Traits {
        Traits {
            caps: caps::EVICT_PREFILL | caps::EVICT_DECODE,
            scope: Scope::KeyHead,
            is_ragged: true,
            ..Traits::NONE
        }
    }

    fn state_bytes(&self) -> u64 {
        (self.is_full.capacity() + 4 * self.from.capacity()) as u64
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        self.shape.check_layer(layer)?;
        let from = self.from.get(layer as usize).copied().unwrap_or_default();
        let tokens = context.tokens;
        self.shape.check_tokens(tokens.into())?;
        let first = tokens.saturating_sub(self.recent);
        if first.saturating_sub(from) <= self.slack || self.full(layer).iter().all(|full| *full) {
            return Ok(false);
        }
        let streams = self.sink as usize + (tokens - first) as usize;
        let each = |full: &bool| if *full { tokens as usize } else { streams };
        out.begin(self.full(layer).len(), self.full(layer).iter().map(each).sum())?;
        for &full in self.full(layer) {
            let gap = if full { tokens..tokens } else { self.sink.min(first)..first };
            out.heads.push((0..gap.start).chain(gap.end..tokens));
        }
        Ok(true)
    }

    fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        let heads = self.full(layer);
        if retained.heads.len() != heads.len() {
            fail!(
                Invalid,
                "{} lists of retained tokens, the layer has {}",
                retained.heads.len(),
                heads.len()
            );
        }
        let Some(head) = heads.iter().position(|full| !full) else { return Ok(()) };
        // The newest tokens form one run. Other tokens that stay were added by the caller.
        let list = retained.of(head as u32);
        let run = list.windows(2).rev().take_while(|two| match two {
            [a, b] => a.checked_add(1) == Some(*b),
            _ => false,
        });
        let first = list.iter().rev().nth(run.count()).copied().unwrap_or(0);
        let sink = self.sink;
        if let Some(from) = self.from.get_mut(layer as usize) {
            *from = first.max(sink);
        }
        Ok(())
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        let sink = self.sink;
        // Evicted tokens do not come back: new tokens are appended behind the truncation.
        self.from
            .iter_mut()
            .filter(|from| **from > tokens)
            .for_each(|from| *from = tokens.max(sink));
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }
}
