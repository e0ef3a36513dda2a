//! The caller's table of candidates, as columns.

use crate::base::status::Result;
use crate::fail;

/// Most rows of one table.
pub const MAX_ROWS: usize = 1 << 28;

/// Most rows computed in one step.
pub const STRIDE: usize = 128;

/// Candidates as columns. An empty column is absent: its default applies to every row.
#[derive(Clone, Copy, Default)]
pub struct Columns<'a> {
    /// Ids of the candidates; required.
    pub ids: &'a [u64],
    /// Blocks of each candidate; default 1.
    pub blocks: &'a [u64],
    /// Time of creation; default 0.
    pub created_ns: &'a [i64],
    /// Time of the last use; default: time of creation.
    pub last_access_ns: &'a [i64],
    /// Number of uses; default 1.
    pub count: &'a [u64],
    /// Class; 0 is evicted first; default 1.
    pub priority: &'a [u8],
    /// Not 0: never evicted; default 0.
    pub pinned: &'a [u8],
    /// Time until the next use or the end; below 0 = unknown; default unknown.
    pub lifetime_ns: &'a [i64],
    /// Confidence of `lifetime_ns`, 0 to 1; default 1.
    pub confidence: &'a [f32],
    /// Tokens of the candidate; default 0.
    pub length: &'a [u64],
    /// Most tokens that the candidate can have; default unknown.
    pub max_length: &'a [u64],
    /// Holders; a candidate with more than 1 is shared and never evicted; default 1.
    pub refs: &'a [u32],
    /// Tenant; default 0.
    pub tenant: &'a [u32],
    /// Recompute cost; default: computed from context and tokens.
    pub cost: &'a [f64],
    /// Tokens before the candidate; default 0.
    pub context: &'a [u64],
    /// Tokens in the candidate; default: its length.
    pub tokens: &'a [u64],
    /// Layer; default 0.
    pub layer: &'a [u32],
    /// Layers of the model, for candidates that are cells; default 0.
    pub layers: &'a [u32],
    /// Chunk number within its sequence; default 0.
    pub chunk: &'a [u32],
    /// Chunks of its sequence; default 0.
    pub chunks: &'a [u32],
    /// Start of each row's blocks in `block_ids`, and the end of the last: rows + 1 entries.
    /// Absent: blocks are only counted.
    pub block_offsets: &'a [u64],
    /// Blocks of all rows, in the order of each row's tokens. A block listed by several rows is
    /// shared.
    pub block_ids: &'a [u64],
    /// Holders of each of `block_ids`; 0, the default, = the number of rows that list it.
    pub block_refs: &'a [u32],
}

macro_rules! column {
    ($(#[$doc:meta] $name:ident: $type:ty = $default:expr;)*) => {
        $(#[$doc]
        #[inline]
        pub fn $name(&self, row: usize) -> $type {
            match self.$name.get(row) {
                Some(&value) => value,
                None => $default,
            }
        })*
    };
}

impl Columns<'_> {
    column! {
        /// Time of creation of a row.
        created_ns: i64 = 0;
        /// Uses of a row.
        count: u64 = 1;
        /// Class of a row.
        priority: u8 = 1;
        /// Whether a row is pinned.
        pinned: u8 = 0;
        /// Time to a row's next use.
        lifetime_ns: i64 = -1;
        /// Confidence of that time.
        confidence: f32 = 1.0;
        /// Tokens of a row.
        length: u64 = 0;
        /// Most tokens that a row can have.
        max_length: u64 = 0;
        /// Holders of a row.
        refs: u32 = 1;
        /// Tenant of a row.
        tenant: u32 = 0;
        /// Tokens before a row.
        context: u64 = 0;
        /// Layer of a row.
        layer: u32 = 0;
        /// Layers of the model.
        layers: u32 = 0;
        /// Chunk number of a row.
        chunk: u32 = 0;
        /// Chunks of a row's sequence.
        chunks: u32 = 0;
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Blocks of a row; where the column is absent, the number of blocks that the row lists.
    #[inline]
    pub fn blocks(&self, row: usize) -> u64 {
        if let Some(&blocks) = self.blocks.get(row) {
            return blocks;
        }
        match self.block_offsets.get(row..=row + 1) {
            Some(&[start, end]) => end.saturating_sub(start),
            _ => 1,
        }
    }

    /// Blocks of rows as floats, from row `first` on.
    pub fn sizes(&self, first: usize, out: &mut [f64]) {
        if self.blocks.is_empty() && !self.block_offsets.is_empty() {
            out.iter_mut().zip(first..).for_each(|(x, row)| *x = self.blocks(row) as f64);
        } else {
            Columns::floats(self.blocks, 1.0, first, out);
        }
    }

    /// Time of a row's last use.
    #[inline]
    pub fn last_access_ns(&self, row: usize) -> i64 {
        match self.last_access_ns.get(row) {
            Some(&ns) => ns,
            None => self.created_ns(row),
        }
    }

    /// Tokens in a row.
    #[inline]
    pub fn tokens(&self, row: usize) -> u64 {
        match self.tokens.get(row) {
            Some(&tokens) => tokens,
            None => self.length(row),
        }
    }

    /// Recompute cost of a row, if the caller gives one.
    #[inline]
    pub fn cost(&self, row: usize) -> Option<f64> {
        self.cost.get(row).copied()
    }

    /// A column as floats, from row `first` on.
    #[inline]
    pub fn floats(column: &[u64], default: f64, first: usize, out: &mut [f64]) {
        match column.get(first..first + out.len()) {
            Some(part) => out.iter_mut().zip(part).for_each(|(x, &n)| *x = n as f64),
            None => out.fill(default),
        }
    }

    /// Recompute costs of rows, from row `first` on: the caller's value where it is above zero,
    /// else `model` of context and tokens. The steps are uniform, so that the compiler vectorizes
    /// them.
    #[inline]
    pub fn costs(&self, first: usize, out: &mut [f64], model: impl Fn(f64, f64) -> f64) {
        let mut context = [0.0; STRIDE];
        let context = &mut context[..out.len()];
        let tokens = if self.tokens.is_empty() { self.length } else { self.tokens };
        Columns::floats(self.context, 0.0, first, context);
        Columns::floats(tokens, 0.0, first, out);
        for (cost, &context) in out.iter_mut().zip(&*context) {
            *cost = model(context, *cost);
        }
        if let Some(own) = self.cost.get(first..first + out.len()) {
            for (cost, &own) in out.iter_mut().zip(own) {
                *cost = if own > 0.0 { own } else { *cost };
            }
        }
    }

    /// Whether a row must not be evicted.
    #[inline]
    pub fn is_blocked(&self, row: usize) -> bool {
        self.pinned(row) != 0 || self.refs(row) > 1
    }

    /// Checks lengths and ranges.
    pub fn validate(&self) -> Result<()> {
        let rows = self.rows();
        if rows > MAX_ROWS {
            fail!(Limit, "{rows} candidates are more than the limit of {MAX_ROWS}");
        }
        let lengths = [
            ("blocks", self.blocks.len()),
            ("created_ns", self.created_ns.len()),
            ("last_access_ns", self.last_access_ns.len()),
            ("count", self.count.len()),
            ("priority", self.priority.len()),
            ("pinned", self.pinned.len()),
            ("lifetime_ns", self.lifetime_ns.len()),
            ("confidence", self.confidence.len()),
            ("length", self.length.len()),
            ("max_length", self.max_length.len()),
            ("refs", self.refs.len()),
            ("tenant", self.tenant.len()),
            ("cost", self.cost.len()),
            ("context", self.context.len()),
            ("tokens", self.tokens.len()),
            ("layer", self.layer.len()),
            ("layers", self.layers.len()),
            ("chunk", self.chunk.len()),
            ("chunks", self.chunks.len()),
        ];
        for (name, len) in lengths {
            if len != 0 && len != rows {
                fail!(Invalid, "column {name} has {len} rows, ids has {rows}");
            }
        }
        if let Some(row) = self.confidence.iter().position(|c| !(0.0..=1.0).contains(c)) {
            fail!(Invalid, "confidence in row {row} is {}, not 0 to 1", self.confidence[row]);
        }
        if let Some(row) = self.cost.iter().position(|c| !c.is_finite() || *c < 0.0) {
            fail!(Invalid, "cost in row {row} is {}", self.cost[row]);
        }
        if self.blocks.iter().fold(0, |all, b| all | b) > u64::from(u32::MAX) {
            let most = self.blocks.iter().max().copied().unwrap_or(0);
            fail!(Limit, "a row has {most} blocks, the limit is {}", u32::MAX);
        }
        self.validate_blocks()
    }

    fn validate_blocks(&self) -> Result<()> {
        let (offsets, ids) = (self.block_offsets, self.block_ids);
        let refs = self.block_refs.len();
        if refs != 0 && refs != ids.len() {
            fail!(Invalid, "{refs} reference counts for {} blocks", ids.len());
        }
        if offsets.is_empty() {
            if !ids.is_empty() {
                fail!(Invalid, "block_ids is given without block_offsets: pass both or neither");
            }
            return Ok(());
        }
        if ids.len() > MAX_ROWS {
            fail!(Limit, "{} blocks are more than the limit of {MAX_ROWS}", ids.len());
        }
        if offsets.len() != self.rows() + 1 {
            fail!(Invalid, "{} block offsets for {} rows", offsets.len(), self.rows());
        }
        if offsets[0] != 0 || offsets[self.rows()] != ids.len() as u64 || !offsets.is_sorted() {
            fail!(
                Invalid,
                "block_offsets must rise from 0 to {}, the length of block_ids",
                ids.len()
            );
        }
        let counts = self.blocks.iter().zip(offsets.windows(2));
        if let Some(row) = counts.into_iter().position(|(&n, pair)| n != pair[1] - pair[0]) {
            fail!(Invalid, "row {row} has {} blocks, but lists another number", self.blocks[row]);
        }
        Ok(())
    }
}
