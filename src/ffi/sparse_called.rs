//! A policy that is called back: what it is told becomes C structs, what it answers is checked.

use std::ffi::c_void;

use crate::attention::keys::Heads;
use crate::attention::{Rows, Scales};
use crate::base::callback::Foreign;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::abi::Plain;
use crate::ffi::attention::{
    KVT_SCALES_CHANNEL, KVT_SCALES_NONE, KVT_SCALES_TOKEN, kvt_rows_t, kvt_sparse_context_t,
};
use crate::ffi::sparse_ask::{kvt_index_t, kvt_token_lists_t};
use crate::ffi::sparse_custom::Table;
use crate::ffi::sparse_lists::{keep_for_c, keep_of, keys_of};
use crate::ffi::status::kvt_status_t;
use crate::ffi::view::{KVT_MEMORY_HOST, kvt_view_t};
use crate::meta::view::Place;
use crate::sparse::{Context, Index, RetainedTokens, Shape, Sparse, Stats, Traits};

/// Rows as C has them; borrowed as the rows are.
fn rows_for_c(rows: &Rows<'_>) -> kvt_rows_t {
    let view = rows.view();
    let mut out = kvt_rows_t {
        struct_size: size_of::<kvt_rows_t>() as u64,
        view: kvt_view_t {
            tokens: view.tokens,
            heads: view.heads,
            memory: KVT_MEMORY_HOST,
            run_bytes: view.run_bytes,
            token_stride_bytes: view.token_stride_bytes,
            head_stride_bytes: view.head_stride_bytes,
            ..<kvt_view_t as Plain>::zeroed()
        },
        dtype: rows.dtype().code(),
        ..<kvt_rows_t as Plain>::zeroed()
    };
    match view.place {
        Place::At(address) => {
            out.view.address = std::ptr::with_exposed_provenance_mut(address as usize);
        }
        Place::Pages { addresses, page_tokens, shift_bytes } => {
            // Pointers have 64 bits wherever this library is built.
            out.view.pages = addresses.as_ptr().cast::<*mut c_void>();
            out.view.page_count = addresses.len() as u64;
            (out.view.page_tokens, out.view.shift_bytes) = (page_tokens, shift_bytes);
        }
    }
    let (scaling, scales) = match rows.scales() {
        Scales::None => (KVT_SCALES_NONE, &[][..]),
        Scales::Token(scales) => (KVT_SCALES_TOKEN, scales),
        Scales::Channel(scales) => (KVT_SCALES_CHANNEL, scales),
    };
    if !scales.is_empty() {
        (out.scaling, out.scales) = (scaling, scales.as_ptr());
        out.scale_count = scales.len() as u64;
    }
    out
}

fn context_for_c(context: &Context) -> kvt_sparse_context_t {
    kvt_sparse_context_t {
        struct_size: size_of::<kvt_sparse_context_t>() as u64,
        is_prefill: u32::from(context.is_prefill),
        part: context.part,
        parts: context.parts,
        first_query: context.first_query,
        tokens: context.tokens,
        reserved: 0,
    }
}

/// A pointer to something that may not be there.
fn maybe<T>(of: Option<&T>) -> *const T {
    of.map_or(std::ptr::null(), |of| of)
}

/// What a callback came to.
fn result(what: &str, status: kvt_status_t) -> Result<()> {
    match Status::from_code(status) {
        Some(Status::Ok) => Ok(()),
        known => {
            let text = format!("{what} of the engine's policy returned {status}");
            Err(Error::new(known.unwrap_or(Status::Invalid), text))
        }
    }
}

/// Whether a callback did it; KVT_E_UNSUPPORTED = it leaves it to the library.
fn computed(what: &str, status: kvt_status_t) -> Result<bool> {
    if status == Status::Unsupported.code() {
        return Ok(false);
    }
    result(what, status).map(|()| true)
}

/// A policy by callbacks.
pub(crate) struct Called {
    foreign: Arc<Foreign<Table>>,
    traits: Traits,
    layers: u32,
    heads: Heads,
    stats: Stats,
}

impl Called {
    pub(crate) fn new(foreign: Arc<Foreign<Table>>, traits: Traits, shape: &Shape) -> Called {
        let heads = Heads { queries: shape.query_heads, keys: shape.key_heads };
        Called { foreign, traits, layers: shape.layers, heads, stats: Stats::default() }
    }

    /// Calls `body` with the table and the user data.
    fn call<R>(&self, body: impl FnOnce(&Table, *mut c_void) -> R) -> R {
        self.foreign.call(|table, user_data| body(&table, user_data))
    }
}

impl Sparse for Called {
    fn traits(&self) -> Traits {
        self.traits
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn seal(&mut self, layer: u32, id: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        let keys = rows_for_c(keys);
        self.call(|table, user_data| match table.on_prefill_offload {
            // SAFETY: function and data came together; keys are borrowed for the call.
            Some(hook) => result("on_prefill_offload", unsafe {
                hook(user_data, id, layer, first, &raw const keys)
            }),
            None => Ok(()),
        })
    }

    fn seal_all(&mut self, id: u32, first: u32, keys: &[Rows<'_>]) -> Result<()> {
        if self.call(|table, _| table.on_decode_offload.is_none()) {
            let each = |(layer, keys)| self.seal(layer, id, first, keys);
            return (0..).zip(keys).try_for_each(each);
        }
        let mut all: Vec<kvt_rows_t> = Vec::new();
        all.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
        all.extend(keys.iter().map(rows_for_c));
        self.call(|table, user_data| match table.on_decode_offload {
            // SAFETY: function and data came together; the list is borrowed for the call.
            Some(hook) => result("on_decode_offload", unsafe {
                hook(user_data, id, first, all.as_ptr(), self.layers)
            }),
            None => Ok(()),
        })
    }

    fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        let count = sums.len() as u64;
        self.call(|table, user_data| match table.observe {
            // SAFETY: function and data came together; sums are borrowed for the call.
            Some(observe) => result("observe", unsafe {
                observe(user_data, layer, queries, sums.as_ptr(), count, tokens)
            }),
            None => Ok(()),
        })
    }

    fn select(
        &mut self,
        layer: u32,
        query: Option<&Rows<'_>>,
        candidates: &[u32],
        context: &Context,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        out.clear();
        out.try_reserve(candidates.len()).map_err(|_| Status::NoMem)?;
        out.resize(candidates.len(), 0);
        let (query, context) = (query.map(rows_for_c), context_for_c(context));
        let mut count = 0;
        self.call(|table, user_data| match table.select_blocks {
            // SAFETY: function and data came together; `out` has room for all candidates.
            Some(select) => result("select_blocks", unsafe {
                select(
                    user_data,
                    layer,
                    maybe(query.as_ref()),
                    candidates.as_ptr(),
                    candidates.len() as u64,
                    &raw const context,
                    out.as_mut_ptr(),
                    &raw mut count,
                )
            }),
            None => Err(Status::Unsupported.into()),
        })?;
        if count > candidates.len() as u64 {
            fail!(Invalid, "select_blocks chose {count} of {} candidates", candidates.len());
        }
        out.truncate(count as usize);
        out.sort_unstable();
        check_chosen(candidates, out)?;
        self.stats.count(candidates.len(), out.len());
        Ok(())
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        out.set_dense();
        let (tokens, context) = (queries.tokens(), context_for_c(context));
        let (queries, keys) = (rows_for_c(queries), keys.map(rows_for_c));
        let mut answer = kvt_index_t::zeroed();
        answer.struct_size = size_of::<kvt_index_t>() as u64;
        self.call(|table, user_data| match table.index {
            // SAFETY: function and data came together; all is borrowed for the call.
            Some(index) => result("index", unsafe {
                let keys = maybe(keys.as_ref());
                index(
                    user_data,
                    layer,
                    &raw const queries,
                    keys,
                    &raw const context,
                    &raw mut answer,
                )
            }),
            None => Err(Status::Unsupported.into()),
        })?;
        // SAFETY: the function says that its arrays are there until it is called again.
        let keys = unsafe { keys_of(&raw const answer)? };
        keys.check(self.heads, context.first_query, tokens)
            .map_err(|error| error.within("index of the engine's policy"))?;
        out.copy(&keys)
    }

    fn attend(
        &mut self,
        layer: u32,
        (queries, keys, values): (&Rows<'_>, &Rows<'_>, &Rows<'_>),
        context: &Context,
        out: &mut [f32],
        lse: Option<&mut [f32]>,
    ) -> Result<bool> {
        let (queries, context) = (rows_for_c(queries), context_for_c(context));
        let (keys, values) = (rows_for_c(keys), rows_for_c(values));
        let lse = lse.map_or(std::ptr::null_mut(), |lse| lse.as_mut_ptr());
        self.call(|table, user_data| match table.attention {
            // SAFETY: function and data came together; memory is as long as the header says.
            // What it does not compute itself is computed by its index.
            Some(attend) => computed("sparse_prefill_attention", unsafe {
                attend(
                    user_data,
                    layer,
                    &raw const queries,
                    &raw const keys,
                    &raw const values,
                    &raw const context,
                    out.as_mut_ptr(),
                    lse,
                )
            }),
            None => Ok(false),
        })
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        out.clear();
        let context = context_for_c(context);
        let mut answer = kvt_token_lists_t::zeroed();
        answer.struct_size = size_of::<kvt_token_lists_t>() as u64;
        self.call(|table, user_data| match table.evict {
            // SAFETY: function and data came together; all is borrowed for the call.
            Some(evict) => result("evict", unsafe {
                evict(user_data, layer, &raw const context, &raw mut answer)
            }),
            None => Err(Status::Unsupported.into()),
        })?;
        if answer.start_count == 0 {
            return Ok(false);
        }
        // SAFETY: the function says that its arrays are there until it is called again.
        *out = unsafe { keep_of(&raw const answer)? };
        Ok(true)
    }

    fn evicted(&mut self, layer: u32, kept: &RetainedTokens) -> Result<()> {
        let kept = keep_for_c(kept);
        self.call(|table, user_data| match table.evicted {
            // SAFETY: function and data came together; lists are borrowed for the call.
            Some(hook) => result("evicted", unsafe { hook(user_data, layer, &raw const kept) }),
            None => Ok(()),
        })
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        self.call(|table, user_data| match table.truncate {
            // SAFETY: function and data came together.
            Some(truncate) => result("truncate", unsafe { truncate(user_data, tokens) }),
            None => Ok(()),
        })
    }

    fn reset(&mut self) {
        self.stats = Stats::default();
        if let Err(error) = self.truncate(0) {
            log::warn!("a policy was not reset: {error}");
        }
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        let mut copy = std::ptr::null_mut();
        let table = self.call(|table, user_data| {
            let Some(fork) = table.fork else {
                fail!(Unsupported, "this policy of the engine's has no fork");
            };
            // SAFETY: function and data came together; the output is local.
            result("fork", unsafe { fork(user_data, &raw mut copy) }).map(|()| *table)
        })?;
        let foreign = Arc::new(Foreign::new(table, copy, table.destroy));
        foreign.keep();
        let stats = Stats::default();
        let (traits, layers, heads) = (self.traits, self.layers, self.heads);
        Ok(Box::new(Called { foreign, traits, layers, heads, stats }))
    }
}

/// Whether what was chosen are candidates, each once; it is sorted.
fn check_chosen(candidates: &[u32], chosen: &[u32]) -> Result<()> {
    let mut sorted = Vec::new();
    let mut among = candidates;
    if !candidates.is_sorted() {
        sorted.try_reserve_exact(candidates.len()).map_err(|_| Status::NoMem)?;
        sorted.extend_from_slice(candidates);
        sorted.sort_unstable();
        among = &sorted;
    }
    if !chosen.is_sorted_by(|a, b| a < b) {
        fail!(Invalid, "select_blocks chose a block twice");
    }
    if let Some(id) = chosen.iter().find(|id| among.binary_search(id).is_err()) {
        fail!(Invalid, "select_blocks chose {id}, which is no candidate");
    }
    Ok(())
}
