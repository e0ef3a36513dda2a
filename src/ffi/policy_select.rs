//! Choosing among candidates that the engine keeps in tables of its own.

use std::ffi::c_char;

use crate::base::status::{Result, Status};
use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, check_out, enter, known_flags, read, write};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy::{PolicyNoun, State, kvt_policy_t};
use crate::ffi::policy_use::numbers;
use crate::ffi::status::kvt_status_t;
use crate::policy::batch::{Room, SelectOptions, Selection};
use crate::policy::columns::{Columns, MAX_ROWS};
use crate::policy::custom;

/// The last victim may give a tail of its blocks and keep the rest.
pub const KVT_SELECT_TAIL: u64 = 1;

/// Candidates as columns: one array a fact, each with `rows` entries. Null = the
/// default holds for every row. Arrays are aligned as C has them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_columns_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// How many candidates there are, at most 2^28.
    pub rows: u64,
    /// Who; required.
    pub ids: *const u64,
    /// Blocks that each holds; default 1.
    pub blocks: *const u64,
    /// When it was made; default 0.
    pub created_ns: *const i64,
    /// When it was used last; default: when it was made.
    pub last_access_ns: *const i64,
    /// How often it was used; default 1.
    pub count: *const u64,
    /// Its class, 0 leaves first; default 1.
    pub priority: *const u8,
    /// Not 0: stays.
    pub pinned: *const u8,
    /// Time until its next use or its end, below 0 = unknown; default unknown.
    pub lifetime_ns: *const i64,
    /// How sure that is, 0 to 1; default 1.
    pub confidence: *const f32,
    /// Tokens it has; default 0.
    pub length: *const u64,
    /// Tokens it can have; default unknown.
    pub max_length: *const u64,
    /// Who holds it: above 1 it is shared and stays; default 1.
    pub refs: *const u32,
    /// Whose it is; default 0.
    pub tenant: *const u32,
    /// Recompute cost; default: from context and tokens.
    pub cost: *const f64,
    /// Tokens before it; default 0.
    pub context: *const u64,
    /// Tokens in it; default: its length.
    pub tokens: *const u64,
    /// Its layer; default 0.
    pub layer: *const u32,
    /// Layers of the model, for candidates that are cells; default 0.
    pub layers: *const u32,
    /// Which chunk of its sequence it is; default 0.
    pub chunk: *const u32,
    /// Chunks of its sequence; default 0.
    pub chunks: *const u32,
    /// Where the blocks of each row start in `block_ids`, and the end of the last:
    /// rows + 1 entries. Null: blocks are only counted.
    pub block_offsets: *const u64,
    /// The blocks of all rows, each row's in the order of its tokens. One that
    /// several rows list is shared: it counts once, and is free when all who hold
    /// it have left.
    pub block_ids: *const u64,
    /// Who holds each of `block_ids`, in all; 0, and null: the rows that list it.
    pub block_refs: *const u32,
    /// Entries of block_ids, and of block_refs.
    pub block_entries: u64,
}

/// A candidate that was chosen. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_pick_t {
    /// Its row.
    pub row: u64,
    /// Who.
    pub id: u64,
    /// Blocks that are free by it.
    pub freed_blocks: u64,
    /// Of its blocks it keeps so many, the first ones; 0 = it leaves.
    pub kept_blocks: u64,
    /// Where its freed blocks start in the selection's block_ids.
    pub first_block: u64,
}

/// What was chosen: the caller's arrays, and what the library says. Start it with
/// KVT_POLICY_SELECTION_INIT and set the arrays.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_selection_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// In: receives who was chosen, in the order of leaving.
    pub victims: *mut kvt_policy_pick_t,
    /// In: room there; as many as there are rows is always enough.
    pub victim_capacity: u64,
    /// In: sizeof(kvt_policy_pick_t).
    pub stride_bytes: u64,
    /// In: receives the blocks that are free, by victim, where the columns list
    /// blocks; may be null.
    pub block_ids: *mut u64,
    /// In: room there.
    pub block_capacity: u64,
    /// How many were chosen; the number needed with KVT_E_TOO_SMALL.
    pub victim_count: u64,
    /// How many block_ids there are; the number needed with KVT_E_TOO_SMALL.
    pub block_count: u64,
    /// How many blocks are free.
    pub freed_blocks: u64,
    /// What is missing to what was asked.
    pub shortfall_blocks: u64,
    /// How long it took to choose.
    pub decision_ns: u64,
    /// The policy that decided, which may be another than the one that was
    /// opened. The text lives as long as the library.
    pub decided_by: *const c_char,
    /// Length of that name.
    pub decided_by_bytes: u64,
}

/// A column; null is an absent one.
///
/// # Safety
/// `data` is null or valid for reads of `rows` numbers.
unsafe fn column<'a, T>(data: *const T, rows: u64) -> Result<&'a [T]> {
    // SAFETY: the caller's promise.
    unsafe { numbers(data, if data.is_null() { 0 } else { rows }, MAX_ROWS + 1) }
}

/// # Safety
/// Every column is null or valid for as many rows as are stated.
unsafe fn columns<'a>(c: &kvt_policy_columns_t) -> Result<Columns<'a>> {
    let rows = c.rows;
    if c.block_offsets.is_null() && c.block_entries != 0 {
        fail!(Invalid, "block_ids without block_offsets");
    }
    // SAFETY: the caller's promise.
    unsafe {
        Ok(Columns {
            ids: numbers(c.ids, rows, MAX_ROWS)?,
            blocks: column(c.blocks, rows)?,
            created_ns: column(c.created_ns, rows)?,
            last_access_ns: column(c.last_access_ns, rows)?,
            count: column(c.count, rows)?,
            priority: column(c.priority, rows)?,
            pinned: column(c.pinned, rows)?,
            lifetime_ns: column(c.lifetime_ns, rows)?,
            confidence: column(c.confidence, rows)?,
            length: column(c.length, rows)?,
            max_length: column(c.max_length, rows)?,
            refs: column(c.refs, rows)?,
            tenant: column(c.tenant, rows)?,
            cost: column(c.cost, rows)?,
            context: column(c.context, rows)?,
            tokens: column(c.tokens, rows)?,
            layer: column(c.layer, rows)?,
            layers: column(c.layers, rows)?,
            chunk: column(c.chunk, rows)?,
            chunks: column(c.chunks, rows)?,
            block_offsets: column(c.block_offsets, rows.saturating_add(1))?,
            block_ids: numbers(c.block_ids, c.block_entries, MAX_ROWS)?,
            block_refs: column(c.block_refs, c.block_entries)?,
        })
    }
}

/// Columns as a score function sees them.
pub(crate) fn columns_for_c(columns: &Columns) -> kvt_policy_columns_t {
    fn at<T>(column: &[T]) -> *const T {
        if column.is_empty() { std::ptr::null() } else { column.as_ptr() }
    }
    kvt_policy_columns_t {
        struct_size: size_of::<kvt_policy_columns_t>() as u64,
        rows: columns.rows() as u64,
        ids: at(columns.ids),
        blocks: at(columns.blocks),
        created_ns: at(columns.created_ns),
        last_access_ns: at(columns.last_access_ns),
        count: at(columns.count),
        priority: at(columns.priority),
        pinned: at(columns.pinned),
        lifetime_ns: at(columns.lifetime_ns),
        confidence: at(columns.confidence),
        length: at(columns.length),
        max_length: at(columns.max_length),
        refs: at(columns.refs),
        tenant: at(columns.tenant),
        cost: at(columns.cost),
        context: at(columns.context),
        tokens: at(columns.tokens),
        layer: at(columns.layer),
        layers: at(columns.layers),
        chunk: at(columns.chunk),
        chunks: at(columns.chunks),
        block_offsets: at(columns.block_offsets),
        block_ids: at(columns.block_ids),
        block_refs: at(columns.block_refs),
        block_entries: columns.block_ids.len() as u64,
    }
}

/// Rows without a lifetime get the one that the engine's predictor says.
fn foresee(
    noun: &PolicyNoun,
    columns: &Columns,
    lifetimes: &mut Vec<i64>,
    sure: &mut Vec<f32>,
) -> Result<()> {
    let rows = columns.rows();
    if lifetimes.try_reserve(rows).is_err() || sure.try_reserve(rows).is_err() {
        fail!(NoMem, "no memory for the lifetimes of {rows} candidates");
    }
    for (row, &id) in columns.ids.iter().enumerate() {
        let known = (columns.lifetime_ns(row), columns.confidence(row));
        let told = match known.0 {
            ..0 => noun.predict(id, columns.length(row), columns.max_length(row)),
            _ => None,
        };
        let (lifetime, confidence) = told.unwrap_or(known);
        lifetimes.push(lifetime);
        sure.push(confidence);
    }
    Ok(())
}

/// Leaves the answer in `state.selection`, and looks whether it fits.
fn select(
    noun: &PolicyNoun,
    now_ns: i64,
    columns: &Columns,
    required: u64,
    options: &SelectOptions,
    out: &mut kvt_policy_selection_t,
    picks: &Strided<kvt_policy_pick_t>,
) -> Result<()> {
    let (mut lifetimes, mut sure) = (Vec::new(), Vec::new());
    let mut columns = *columns;
    if noun.predict.is_some() {
        columns.validate()?;
        foresee(noun, &columns, &mut lifetimes, &mut sure)?;
        columns.lifetime_ns = &lifetimes;
        columns.confidence = &sure;
    }
    let (mut last, mut count, mut scores, mut by) = (Vec::new(), Vec::new(), Vec::new(), None);
    let mut state = noun.state.lock();
    if state.evictor.name() == custom::NAME && columns.rows() > 0 {
        state.evictor.recorded(&columns, &mut last, &mut count)?;
        drop(state);
        columns.last_access_ns = &last;
        columns.count = &count;
        scores = noun.score_rows(&columns, now_ns)?;
        by = Some(custom::NAME);
        state = noun.state.lock();
    }
    let State { evictor, selection, .. } = &mut *state;
    let done = evictor.select_by(now_ns, &columns, &scores, required, options, selection);
    if done.as_ref().err().is_none_or(|error| error.status() == Status::TooSmall) {
        out.victim_count = selection.victims.len() as u64;
        out.block_count = selection.block_ids.len() as u64;
    }
    done?;
    tell(selection, by, out, picks);
    Ok(())
}

fn tell(
    selection: &Selection,
    by: Option<&'static str>,
    out: &mut kvt_policy_selection_t,
    picks: &Strided<kvt_policy_pick_t>,
) {
    let blocks = if out.block_ids.is_null() { 0 } else { selection.block_ids.len() };
    for (i, pick) in selection.victims.iter().enumerate() {
        let pick = kvt_policy_pick_t {
            row: pick.row as u64,
            id: pick.id,
            freed_blocks: pick.freed_blocks,
            kept_blocks: pick.kept_blocks,
            first_block: pick.first_block as u64,
        };
        picks.put(i, &pick);
    }
    if blocks > 0 {
        // SAFETY: not null, with room for `block_capacity` >= `blocks` numbers.
        unsafe {
            std::ptr::copy_nonoverlapping(selection.block_ids.as_ptr(), out.block_ids, blocks);
        }
    }
    let decided_by = by.unwrap_or(selection.decided_by);
    out.freed_blocks = selection.freed_blocks;
    out.shortfall_blocks = selection.shortfall_blocks;
    out.decision_ns = selection.decision_ns;
    out.decided_by = decided_by.as_ptr().cast();
    out.decided_by_bytes = decided_by.len() as u64;
}

/// Chooses candidates that free enough blocks, in the policy's order, the least
/// first, and none without which it would be enough. Uses that were recorded of
/// an id (kvt_policy_record and the like) win over its columns; what these say of
/// its context, tokens, layer, layers, chunk, chunks and cost is noted of the
/// object in the table, for policies that want to know. Rows that are pinned
/// or shared are never chosen, nor are those whose object in the table is
/// referenced, pinned or continued by another. Nothing is evicted: the caller
/// frees what was chosen, and removes it from the table where it is in one. The
/// order of the rows does not matter.
///
/// @param policy           The policy.
/// @param now_ns           See kvt_policy_lookup.
/// @param candidates       The columns.
/// @param required_blocks  What must be free; 0 frees nothing. When it cannot be,
///                         everything that may leave is chosen and the shortfall
///                         told.
/// @param flags            KVT_SELECT_*.
/// @param selection        Filled in. When its arrays are too small nothing but
///                         the counts is, with KVT_E_TOO_SMALL.
/// @param err              Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (an id that is there twice, a confidence or cost
///         that is no number, a clock that went back), KVT_E_TOO_SMALL,
///         KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC; what a custom policy's score function gives.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_policy_select(
    policy: *const kvt_policy_t,
    now_ns: i64,
    candidates: *const kvt_policy_columns_t,
    required_blocks: u64,
    flags: u64,
    selection: *mut kvt_policy_selection_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_SELECT_TAIL)?;
    check_out(selection)?;
    let (columns, mut out) = (columns(&read(candidates)?)?, read(selection.cast_const())?);
    let room = out.victim_capacity.min(columns.rows() as u64);
    let picks = Strided::new(out.victims, room, out.stride_bytes, MAX_ROWS as u64)?;
    let blocks = match out.block_ids.is_null() {
        true => usize::MAX,
        false => usize::try_from(out.block_capacity).unwrap_or(usize::MAX),
    };
    let options = SelectOptions {
        allow_tail: flags & KVT_SELECT_TAIL != 0,
        room: Some(Room { victims: picks.len(), blocks }),
    };
    let done = enter(policy).and_then(|policy| {
        select(&policy, now_ns, &columns, required_blocks, &options, &mut out, &picks)
    });
    if done.as_ref().err().is_none_or(|error| error.status() == Status::TooSmall) {
        write(selection, &out);
    }
    done
}
