//! Rectangles of a session: tokens by layers, and where the engine has them.

use std::ops::Range;

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Event;
use crate::fail;
use crate::meta::index::NONE;
use crate::meta::layout::Layout;
use crate::store::state::StoreState;
use crate::store::state::transfer::{Level, MoveSpec, TransferKind};
use crate::store::state::views::Views;

/// As the tokens of a rectangle: as many as the session has when the move begins.
pub const TO_THE_END: u64 = u64::MAX;

/// What of a rectangle is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// All.
    #[default]
    All,
    /// Only what going on after its last token needs. Windows and states need the end;
    /// other cells of their layers are left alone, and are no misses.
    Needed,
    /// Some of its chunks, by their places in it, ascending. Views have their tokens one
    /// after the other.
    Chunks(Vec<u32>),
}

/// A rectangle of a session's cells, and where the engine has them.
pub struct CellRange {
    /// The first token: a multiple of a chunk's tokens.
    pub first_token: u64,
    /// How many; a multiple too, unless they go to the end of the session, as they do with
    /// [`TO_THE_END`].
    pub tokens: u64,
    /// The first layer.
    pub first_layer: usize,
    /// How many.
    pub layers: usize,
    /// One result a layer.
    pub by_layer: bool,
    /// What of it; all of it, for a put.
    pub wanted: Wanted,
    /// Where the engine has them.
    pub views: Arc<Views>,
    /// An event of the store's device: no copy to or from the views runs before it has come.
    /// It stays known until the move has ended.
    pub after: Option<Event>,
}

impl StoreState {
    /// Begins a put or a get of a rectangle; the number of its move.
    pub fn submit_cell_range(
        &mut self,
        at: u32,
        kind: TransferKind,
        level: Level,
        lane: usize,
        cell_range: CellRange,
    ) -> Result<u32> {
        self.begin_cell_range(at, (kind, level, lane), cell_range, None)
    }

    /// The same; with a ticket it waits.
    pub(super) fn begin_cell_range(
        &mut self,
        at: u32,
        (kind, level, lane): (TransferKind, Level, usize),
        mut cell_range: CellRange,
        ticket: Option<u64>,
    ) -> Result<u32> {
        if cell_range.tokens == TO_THE_END {
            let all = self.session(at)?.path.tokens().len() as u64;
            cell_range.tokens = all.saturating_sub(cell_range.first_token);
        }
        let (first, end, tail) = self.chunks_of(at, cell_range.first_token, cell_range.tokens)?;
        let space = self.session(at)?.space;
        let table = self.spaces[space as usize].table;
        if kind == TransferKind::Put && cell_range.wanted != Wanted::All {
            fail!(Invalid, "a put is one of a whole rectangle");
        }
        let all = (end - first + usize::from(tail)) as u32;
        let picked = match &cell_range.wanted {
            Wanted::Chunks(picked) => Some(&picked[..]),
            _ => None,
        };
        let each = u64::from(self.tables[table as usize].layout.chunk_tokens());
        let tokens = match picked {
            Some(picked) => tokens_of(picked, all, cell_range.tokens, each)?,
            None => cell_range.tokens,
        };
        let tokens = u32::try_from(tokens).map_err(|_| Status::Limit)?;
        let chunks = picked.map_or(all, |picked| picked.len() as u32);
        let CellRange { first_layer, layers, by_layer, wanted, views, after, .. } = &cell_range;
        self.check_views((table, kind), views, *first_layer, tokens, chunks)?;
        let who = self.session(at)?.who;
        let mut spec = MoveSpec {
            table,
            flow: at,
            who,
            lane,
            kind,
            level,
            slots: Vec::new(),
            asked: Vec::new(),
            first_layer: *first_layer,
            layers: *layers,
            by_layer: *by_layer,
            by_chunk: false,
            needed_from: Vec::new(),
            views: views.clone(),
            after: *after,
            ticket,
        };
        // What is refused sends nobody away.
        self.check_move(&spec, chunks as usize)?;
        spec.slots = match kind {
            TransferKind::Put => self.rows_of(at, first, end, tail)?,
            TransferKind::Get | TransferKind::Prefetch => self.rows_there(at, first, end, tail)?,
        };
        pick(&mut spec.slots, picked);
        if kind == TransferKind::Get && spec.slots.contains(&NONE) {
            spec.asked = self.ids_of(at, first, end, tail)?;
        }
        pick(&mut spec.asked, picked);
        if *wanted == Wanted::Needed {
            let layout = &self.tables[table as usize].layout;
            let end = cell_range.first_token + cell_range.tokens;
            let of = *first_layer..first_layer + layers;
            spec.needed_from = needed_from(layout, of, first as u64, end);
        }
        self.submit(spec)
    }
}

/// Leaves those of a rectangle's chunks that were picked.
fn pick<T: Copy>(all: &mut Vec<T>, picked: Option<&[u32]>) {
    let Some(picked) = picked.filter(|_| !all.is_empty()) else { return };
    let mut kept = 0;
    // They ascend, so none is read after it was written over. A tail that is not there has
    // no name yet.
    for &from in picked {
        if let Some(&one) = all.get(from as usize) {
            all[kept] = one;
            kept += 1;
        }
    }
    all.truncate(kept);
}

/// The tokens of some of `all` chunks, which have `tokens` together, each as many as any
/// other but the last.
fn tokens_of(picked: &[u32], all: u32, tokens: u64, each: u64) -> Result<u64> {
    let ascend = picked.is_sorted_by(|a, b| a < b);
    let Some(&last) = picked.last().filter(|&&last| ascend && last < all) else {
        fail!(
            Invalid,
            "chunks of a move: one or more, ascending, each once, below the {all} of its tokens"
        );
    };
    let missing = if last + 1 == all { u64::from(all) * each - tokens } else { 0 };
    Ok(picked.len() as u64 * each - missing)
}

/// For each layer of some, the first chunk after `first` that going on at a token needs.
fn needed_from(layout: &Layout, layers: Range<usize>, first: u64, end: u64) -> Vec<u32> {
    let each = u64::from(layout.chunk_tokens());
    let from = |layer| {
        let reach = layout.group(layer).map_or(u64::MAX, |group| group.rule.reach_tokens());
        (end.saturating_sub(reach) / each).saturating_sub(first) as u32
    };
    layers.map(from).collect()
}
