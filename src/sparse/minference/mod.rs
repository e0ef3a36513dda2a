//! `minference`: computes a prompt with the keys that a pattern of each head names (Jiang et al.,
//! NeurIPS'24).
//!
//! With N tokens so far and A the attention (softmax) of the last `last_q` queries:
//!
//! - `vertical_slash`: column j scores the sum of A over its key, diagonal d the sum of A over
//!   all pairs at distance d. The first `sinks` columns and `recent` diagonals score infinity.
//!   The greatest v and s stay. With a budget b: B = ⌊bN⌋, v = max(sinks + 1, ⌊B / 5⌋), s =
//!   max(recent + 1, ⌊4B / 5⌋); else v = max(vertical, sinks), s = max(slash, min(50,
//!   recent)); neither above N. Of equal columns the lower, of equal diagonals the nearer.
//! - `a_shape`: the first v keys and, for each query, the last s up to itself.
//! - `tri_shape`: the same, and everything for the last `dense_rows` tokens so far.
//! - `block_sparse`: means of 64 queries and of 64 keys. Each row has the blocks with the greatest
//!   products, among those that begin at or before it. Its own block is not forced.
//!
//! Each head gets the form of index that suits it. `form=exact` gives columns and diagonals as
//! chosen. `form=kernel` gives those of `vertical_slash` as the published kernel computes them, a
//! superset ([`inflate`]): columns, and ranges for rows of 64 queries. `form=blocks` gives all 64
//! keys of every block that holds one of those. That superset is far larger where columns are many;
//! the first and last keys come in blocks then, too.
//!
//! A prompt may come in parts. The last queries of each part estimate that part, and N counts the
//! tokens up to its end. `tri_shape` is dense at the end of each part.

pub mod inflate;
mod pooled;

use std::ops::Range;

use crate::attention::Rows;
use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::sparse::estimate::Estimate;
use crate::sparse::index::{Context, Index, NO_QUERY};
use crate::sparse::index_builder::{IndexBuilder, Row, rows};
use crate::sparse::minference::inflate::{BLOCK, Lines, inflate};
use crate::sparse::minference::pooled::Pooled;
use crate::sparse::pattern::{Kind, MAX_SIZE, Pattern, Patterns};
use crate::sparse::prefill_inputs::{PrefillInputs, check_context, only_prefill};
use crate::sparse::ranks::Ranks;
use crate::sparse::shape::Shape;
use crate::sparse::{Scope, Sparse, Traits, caps, needs};

/// Parameters of `minference`.
pub const PARAMS: &[Param] = &[
    Param::new("budget", "share of the tokens: a fifth of it columns, the rest diagonals; 1 = all")
        .default_is("0.3"),
    Param::new("vertical", "columns, instead of `budget`")
        .default_is("1000 where only `slash` is given"),
    Param::new("slash", "diagonals, instead of `budget`")
        .default_is("6096 where only `vertical` is given"),
    Param::new("sinks", "first columns that are always included"),
    Param::new("recent", "nearest diagonals that are always included"),
    Param::new("last_q", "number of last queries from which the pattern is estimated"),
    Param::new("type", "pattern of all heads"),
    Param::new("blocks", "with `type=block_sparse`: blocks of 64 keys for each 64 queries"),
    Param::new("dense_rows", "with `type=tri_shape`: last queries that see everything"),
    Param::new("dense_layers", "number of first layers that see everything"),
    Param::new("pattern", "path of a file with the pattern of each head").default_is("none"),
    Param::new(
        "form",
        "`exact`: columns and diagonals as chosen. `kernel`: as the published kernel computes \
         them. `blocks`: whole blocks of 64 keys",
    ),
];

/// Names of `type`.
const TYPES: [(&str, Kind); 4] = [
    ("vertical_slash", Kind::VerticalSlash),
    ("a_shape", Kind::AShape),
    ("tri_shape", Kind::TriShape),
    ("block_sparse", Kind::BlockSparse),
];
/// Fewest diagonals of a pattern of fixed size.
const LEAST_DIAGONALS: u32 = 50;

/// Form of the answer.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Exact,
    Kernel,
    Blocks,
}

/// Parameters of the spec.
#[derive(Clone)]
struct Settings {
    shape: Shape,
    form: Form,
    /// Share of the tokens; none = sizes are fixed.
    budget: Option<f64>,
    fixed: Pattern,
    blocks: u32,
    sinks: u32,
    recent: u32,
    last_q: u32,
    dense_rows: u32,
    dense_layers: u32,
    patterns: Patterns,
}

/// Patterns of heads, estimated from the last queries.
pub struct MInference {
    settings: Settings,
    estimate: Estimate,
    ranks: Ranks,
    pooled: Pooled,
    lines: Lines,
    ranges: Vec<Range<u32>>,
}

impl Settings {
    fn read(reader: &mut Reader, shape: &Shape) -> Result<Settings> {
        let forms = [Form::Exact, Form::Kernel, Form::Blocks];
        let form = reader.choice("form", &["exact", "kernel", "blocks"])?.unwrap_or(0);
        let kind = reader.choice("type", &TYPES.map(|(name, _)| name))?.unwrap_or(0);
        let mut size = |key, default, least: u64| {
            reader.u64(key, default, least..=u64::from(MAX_SIZE)).map(|n| n as u32)
        };
        // 0 means that the parameter was not given; a given 0 is rejected.
        let (vertical, slash) = (size("vertical", 0, 1)?, size("slash", 0, 1)?);
        let (sinks, recent) = (size("sinks", 30, 0)?, size("recent", 100, 1)?);
        let (blocks, dense_rows) = (size("blocks", 100, 1)?, size("dense_rows", 100, 0)?);
        let dense_layers = size("dense_layers", 0, 0)?;
        let last_q = reader.u64("last_q", 64, 1..=1024)? as u32;
        let budget = reader.f64("budget", 0.0, f64::MIN_POSITIVE..=1.0)?;
        let is_fixed = vertical > 0 || slash > 0;
        if is_fixed && budget > 0.0 {
            fail!(Spec, "budget excludes vertical and slash: give one or the other");
        }
        let or = |n: u32, default| if n > 0 { n } else { default };
        let patterns = match reader.text("pattern")? {
            Some(path) => Patterns::open(path, shape)?,
            None => Patterns::default(),
        };
        Ok(Settings {
            shape: *shape,
            form: forms.get(form).copied().unwrap_or(Form::Exact),
            budget: (!is_fixed).then_some(if budget > 0.0 { budget } else { 0.3 }),
            fixed: Pattern {
                kind: TYPES.get(kind).map(|t| t.1).unwrap_or_default(),
                vertical: or(vertical, 1000),
                slash: or(slash, 6096),
            },
            blocks,
            sinks,
            recent,
            last_q,
            dense_rows,
            dense_layers,
            patterns,
        })
    }

    /// The pattern of a head for `tokens` tokens; sizes are capped by them.
    fn pattern(&self, layer: u32, head: u32, tokens: u32) -> Pattern {
        let own = self.patterns.get(layer, head);
        let mut pattern = own.unwrap_or(self.fixed);
        let blocks = tokens.div_ceil(BLOCK);
        match (pattern.kind, own, self.budget) {
            (Kind::BlockSparse, Some(_), _) => {}
            (Kind::BlockSparse, None, None | Some(..1.0)) => pattern.vertical = self.blocks,
            (_, None, Some(1.0..)) => (pattern.vertical, pattern.slash) = (tokens, tokens),
            (_, None, Some(budget)) => {
                let all = (budget * f64::from(tokens)) as u32;
                pattern.vertical = (all / 5).max(self.sinks.saturating_add(1));
                pattern.slash =
                    ((u64::from(all) * 4 / 5) as u32).max(self.recent.saturating_add(1));
            }
            (Kind::VerticalSlash, _, _) => {
                pattern.vertical = pattern.vertical.max(self.sinks);
                pattern.slash = pattern.slash.max(LEAST_DIAGONALS.min(self.recent));
            }
            _ => {}
        }
        let most = if pattern.kind == Kind::BlockSparse { blocks } else { tokens };
        Pattern {
            vertical: pattern.vertical.min(most),
            slash: pattern.slash.min(tokens),
            ..pattern
        }
    }

    /// Whether a pattern selects all keys.
    fn is_full(pattern: &Pattern, tokens: u32) -> bool {
        match pattern.kind {
            Kind::BlockSparse => pattern.vertical >= tokens.div_ceil(BLOCK),
            _ => pattern.vertical >= tokens || pattern.slash >= tokens,
        }
    }

    /// Whether all heads have the pattern of the spec, and it does not depend on keys.
    fn is_same_for_all(&self) -> bool {
        self.patterns.is_empty() && matches!(self.fixed.kind, Kind::AShape | Kind::TriShape)
    }
}

impl MInference {
    /// Reads the parameters of `minference`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<MInference> {
        Settings::read(reader, shape).map(MInference::new)
    }

    fn new(settings: Settings) -> MInference {
        MInference {
            settings,
            estimate: Estimate::default(),
            ranks: Ranks::default(),
            pooled: Pooled::default(),
            lines: Lines::default(),
            ranges: Vec::new(),
        }
    }

    /// Finds the columns and diagonals of a head from its last queries.
    fn find(&mut self, inputs: &PrefillInputs<'_>, head: u32, pattern: &Pattern) -> Result<()> {
        let Settings { sinks, recent, last_q, .. } = self.settings;
        self.estimate.run(inputs, head, last_q)?;
        let force = |scores: &mut [f32], count: u32| {
            scores.iter_mut().take(count as usize).for_each(|score| *score = f32::INFINITY);
        };
        let Lines { columns, diagonals } = &mut self.lines;
        for (scores, forced, out, count) in [
            (&mut self.estimate.columns, sinks, columns, pattern.vertical),
            (&mut self.estimate.diagonals, recent, diagonals, pattern.slash),
        ] {
            force(scores, forced);
            out.clear();
            self.ranks.top(scores, count as usize, out)?;
        }
        Ok(())
    }

    /// Adds a head of the first and the last keys.
    fn positional(
        &self,
        span: &Range<u32>,
        pattern: &Pattern,
        out: &mut IndexBuilder,
    ) -> Result<()> {
        let Settings { form, dense_rows, .. } = self.settings;
        let is_a = pattern.kind == Kind::AShape;
        let dense_from = if is_a { NO_QUERY } else { span.end.saturating_sub(dense_rows) };
        if form == Form::Blocks {
            return rounded(span, pattern, dense_from, out);
        }
        out.lines(dense_from)?;
        out.list(0..pattern.vertical)?;
        out.list(0..pattern.slash)
    }

    /// Adds a head whose pattern does not select all keys.
    fn head(
        &mut self,
        inputs: &PrefillInputs<'_>,
        head: u32,
        pattern: &Pattern,
        out: &mut IndexBuilder,
    ) -> Result<()> {
        match pattern.kind {
            Kind::BlockSparse => {
                out.blocks(BLOCK, BLOCK, NO_QUERY)?;
                self.pooled.add(inputs, head, pattern.vertical, out)
            }
            Kind::VerticalSlash => {
                self.find(inputs, head, pattern)?;
                if self.settings.form == Form::Exact {
                    out.lines(NO_QUERY)?;
                    out.list(self.lines.columns.iter().copied())?;
                    return out.list(self.lines.diagonals.iter().copied());
                }
                self.inflated(inputs, out)
            }
            Kind::AShape | Kind::TriShape => {
                self.positional(&(inputs.first..inputs.tokens), pattern, out)
            }
        }
    }

    /// Adds a head in the form that the published kernel computes.
    fn inflated(&mut self, inputs: &PrefillInputs<'_>, out: &mut IndexBuilder) -> Result<()> {
        let is_blocks = self.settings.form == Form::Blocks;
        let Lines { columns, diagonals } = &self.lines;
        if is_blocks {
            out.blocks(BLOCK, BLOCK, NO_QUERY)?;
        } else {
            out.ranges(BLOCK)?;
            out.list(columns.iter().copied())?;
        }
        for Row { first, end, .. } in rows(inputs.first, inputs.tokens, BLOCK) {
            // The kernel's rows are whole, also the last one.
            inflate(diagonals, first.saturating_add(BLOCK), &mut self.ranges)?;
            let mut columns = columns.iter().copied().filter(|_| is_blocks).peekable();
            for range in &self.ranges {
                while let Some(key) = columns.next_if(|&key| key < range.end.min(end)) {
                    // Columns inside a range are in it already.
                    out.add(key..(key + 1).min(range.start))?;
                }
                out.add(range.start..range.end.min(end))?;
            }
            for key in columns.take_while(|&key| key < end) {
                out.add(key..key + 1)?;
            }
            out.end()?;
        }
        Ok(())
    }
}

/// Adds a head of the first and the last keys, in whole blocks.
fn rounded(
    span: &Range<u32>,
    pattern: &Pattern,
    dense_from: u32,
    out: &mut IndexBuilder,
) -> Result<()> {
    out.blocks(BLOCK, BLOCK, dense_from)?;
    for Row { first, end, .. } in rows(span.start, span.end, BLOCK) {
        if first < dense_from {
            out.add(0..pattern.vertical.min(end))?;
            let window = (first + 1).saturating_sub(pattern.slash);
            out.add(window.max(pattern.vertical)..end)?;
        }
        out.end()?;
    }
    Ok(())
}

impl Sparse for MInference {
    fn traits(&self) -> Traits {
        let is_positional = self.settings.is_same_for_all();
        Traits {
            caps: caps::INDEX_PREFILL,
            needs: if is_positional { 0 } else { needs::QUERIES | needs::ALL_KEYS },
            scope: Scope::QueryHead,
            dense_layers: self.settings.dense_layers,
            ..Traits::NONE
        }
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        only_prefill("minference", context)?;
        let settings = &self.settings;
        if settings.is_same_for_all() {
            // Depends on positions only, and is the same for all heads. Keys may be evicted.
            settings.shape.check_queries(layer, queries)?;
            check_context(&settings.shape, queries.tokens(), context)?;
            let (tokens, mut builder) = (context.tokens, IndexBuilder::default());
            let pattern = settings.pattern(layer, 0, tokens);
            if !Settings::is_full(&pattern, tokens) && layer >= settings.dense_layers {
                self.positional(&(context.first_query..tokens), &pattern, &mut builder)?;
            }
            *out = builder.into_index();
            return Ok(());
        }
        let inputs = PrefillInputs::check(&settings.shape, layer, queries, keys, context)?;
        let tokens = inputs.tokens;
        let mut patterns = Vec::new();
        if patterns.try_reserve_exact(inputs.heads() as usize).is_err() {
            return Err(Status::NoMem.into());
        }
        patterns.extend((0..inputs.heads()).map(|head| settings.pattern(layer, head, tokens)));
        let is_full = patterns.iter().all(|pattern| Settings::is_full(pattern, tokens));
        let mut builder = IndexBuilder::default();
        if !is_full && layer >= settings.dense_layers {
            for (head, pattern) in (0..).zip(&patterns) {
                match Settings::is_full(pattern, tokens) {
                    true => builder.dense()?,
                    false => self.head(&inputs, head, pattern, &mut builder)?,
                }
            }
        }
        *out = builder.into_index();
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(MInference::new(self.settings.clone())))
    }
}
