//! Views: where the engine has its tensors.

use std::ffi::c_void;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::Memory;
use crate::fail;
use crate::ffi::abi::{Plain, Strided};
use crate::ffi::policy_use::numbers;
use crate::store::handle::Store;
use crate::store::state::session::{LayerViews, PlaneView, Tokens, Views};

/// The processor reaches it.
pub const KVT_MEMORY_HOST: u32 = 0;
/// Only the device does.
pub const KVT_MEMORY_DEVICE: u32 = 1;

/// Most pages of a view.
const MAX_PAGES: usize = 1 << 24;
/// Tables that are looked through for one that was copied already.
const RECENT_TABLES: usize = 4;

/// Where the engine has one plane (K or V) of one layer, from the first token of
/// a move on: the bytes of a head and token lie together, tokens and heads each at
/// equal distances. Either at one address, or in pages. Stands in arrays only. All
/// zero = there is no such plane.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_view_t {
    /// Where the first token is; null with pages.
    pub address: *mut c_void,
    /// Where each page starts; null with an address.
    pub pages: *const *mut c_void,
    /// How many pages.
    pub page_count: u64,
    /// Added to the address of each page: one table serves K, V and all layers.
    pub shift_bytes: i64,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Tokens of the view (of a layer with a state: chunks); 0 = as many as the move
    /// says, or as the pages hold. A move to the end of a session says none.
    pub tokens: u32,
    /// Heads of a token; 0 = 1.
    pub heads: u32,
    /// KVT_MEMORY_*.
    pub memory: u32,
    /// Bytes of a head and token. All heads together have what the layout says.
    pub run_bytes: u64,
    /// From a token to the next; 0 = heads * run_bytes.
    pub token_stride_bytes: u64,
    /// From a head to the next; 0 = run_bytes.
    pub head_stride_bytes: u64,
}

/// Tables of pages that were copied, by where the caller has them.
type Tables = Vec<(*const *mut c_void, u64, Arc<Vec<u64>>)>;

/// # Safety
/// `view`'s pages are null or valid for reads.
unsafe fn place_of(view: &kvt_view_t, tables: &mut Tables) -> Result<Tokens> {
    if view.pages.is_null() {
        if view.page_count != 0 || view.page_tokens != 0 || view.shift_bytes != 0 {
            fail!(Invalid, "a view has page_count, page_tokens or shift_bytes without pages");
        }
        return Ok(Tokens::At(view.address.addr() as u64));
    }
    if !view.address.is_null() {
        fail!(Invalid, "a view has both an address and pages");
    }
    let same = |t: &&(*const *mut c_void, u64, _)| t.0 == view.pages && t.1 == view.page_count;
    let known = tables.iter().rev().take(RECENT_TABLES).find(same);
    let addresses = match known {
        Some((_, _, table)) => table.clone(),
        None => {
            // SAFETY: the caller's promise.
            let pages = unsafe { numbers(view.pages, view.page_count, MAX_PAGES)? };
            let mut table = Vec::new();
            table.try_reserve_exact(pages.len()).map_err(|_| Status::NoMem)?;
            table.extend(pages.iter().map(|page| page.addr() as u64));
            let table = Arc::new(table);
            tables.push((view.pages, view.page_count, table.clone()));
            table
        }
    };
    Ok(Tokens::Pages { addresses, page_tokens: view.page_tokens, shift_bytes: view.shift_bytes })
}

/// A plane as its view says; `None` = there is none.
///
/// # Safety
/// As [`place_of`].
unsafe fn plane_of(
    view: &kvt_view_t,
    moved: Option<u64>,
    tables: &mut Tables,
) -> Result<Option<PlaneView>> {
    if view.address.is_null() && view.pages.is_null() {
        if view.run_bytes != 0 {
            fail!(Invalid, "a view has neither an address nor pages");
        }
        return Ok(None);
    }
    let heads = view.heads.max(1);
    let or = |given: u64, usual: u64| if given == 0 { usual } else { given };
    let has = match (view.pages.is_null(), moved) {
        (false, _) => view.page_count.saturating_mul(u64::from(view.page_tokens)),
        (true, Some(moved)) => moved,
        (true, None) if view.tokens == 0 => fail!(
            Invalid,
            "the move goes to the end of a session that may grow until then, and the view does \
             not say how much fits: say tokens in the move or in the view"
        ),
        (true, None) => 0,
    };
    // More than a move can have is as good as all.
    let all = u32::try_from(has).unwrap_or(u32::MAX);
    Ok(Some(PlaneView {
        // SAFETY: the caller's promise.
        place: unsafe { place_of(view, tables)? },
        tokens: if view.tokens == 0 { all } else { view.tokens },
        heads,
        run_bytes: view.run_bytes,
        token_stride_bytes: or(
            view.token_stride_bytes,
            view.run_bytes.saturating_mul(u64::from(heads)),
        ),
        head_stride_bytes: or(view.head_stride_bytes, view.run_bytes),
        memory: memory_of(view.memory)?,
    }))
}

/// Where memory is said to be.
pub(crate) fn memory_of(code: u32) -> Result<Memory> {
    match code {
        KVT_MEMORY_HOST => Ok(Memory::Host),
        KVT_MEMORY_DEVICE => Ok(Memory::Device),
        other => fail!(Invalid, "memory {other} is none of KVT_MEMORY_*"),
    }
}

/// A plane of a view that says itself how many tokens it has.
///
/// # Safety
/// As [`place_of`].
pub(crate) unsafe fn plane_alone(view: &kvt_view_t) -> Result<PlaneView> {
    // SAFETY: the caller's promise.
    let plane = unsafe { plane_anywhere(view)? };
    if plane.memory != Memory::Host {
        fail!(Unavailable, "a view of device memory, and it is the processor that reads it");
    }
    Ok(plane)
}

/// A view that says all of itself, in whatever memory.
///
/// # Safety
/// As [`place_of`].
pub(crate) unsafe fn plane_anywhere(view: &kvt_view_t) -> Result<PlaneView> {
    if view.tokens == 0 && view.pages.is_null() {
        fail!(Invalid, "a view without pages says here how many tokens it has");
    }
    // SAFETY: the caller's promise.
    match unsafe { plane_of(view, Some(view.tokens.into()), &mut Tables::new())? } {
        Some(plane) => Ok(plane),
        None => fail!(Invalid, "the view is empty"),
    }
}

/// The views of a move of so many tokens; none = to the end of a session.
///
/// # Safety
/// The arrays of K and V are null or valid for reads of `layers` views.
pub(crate) unsafe fn views_of(
    (k, v, stride_bytes): (*const kvt_view_t, *const kvt_view_t, u64),
    first_layer: u32,
    layers: usize,
    tokens: Option<u64>,
) -> Result<Views> {
    // SAFETY: the caller's promise; none without a pointer.
    let rows = |data: *const kvt_view_t| unsafe {
        let count = if data.is_null() { 0 } else { layers as u64 };
        Strided::new(data.cast_mut(), count, stride_bytes, layers as u64)
    };
    let (k_rows, v_rows) = (rows(k)?, rows(v)?);
    if k_rows.len() == 0 {
        fail!(Invalid, "k is null: give the views of the engine's K tensors, one for each layer");
    }
    let mut tables = Tables::new();
    let mut views = Vec::new();
    views.try_reserve_exact(layers).map_err(|_| Status::NoMem)?;
    for i in 0..layers {
        // SAFETY: the caller's promise.
        let mut plane = |name: &str, row: Result<kvt_view_t>| unsafe {
            let at = u64::from(first_layer) + i as u64;
            row.and_then(|row| plane_of(&row, tokens, &mut tables))
                .map_err(|e: Error| e.within(&format!("{name} of layer {at}")))
        };
        let Some(k) = plane("K", k_rows.get(i))? else {
            fail!(Invalid, "the view of K of layer {} is empty", first_layer as usize + i);
        };
        let v = if v_rows.len() > 0 { plane("V", v_rows.get(i))? } else { None };
        views.push(LayerViews { k, v });
    }
    Ok(Views(views))
}

/// Device memory needs a device that reaches it.
pub(crate) fn check_memory(store: &Store, views: &Views, first_layer: u32) -> Result<()> {
    let Some((name, at)) = views.on_device().filter(|_| !store.reaches_device()) else {
        return Ok(());
    };
    fail!(
        Unavailable,
        "{name} of layer {} is in device memory, and the store was opened with no device that \
         reaches it",
        first_layer as usize + at
    );
}
