//! What happens to a policy's objects: they come, are used, held and go.

use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, enter, known_flags, put, read};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy::{PolicyNoun, State, kvt_policy_t};
use crate::ffi::status::kvt_status_t;
use crate::meta::objects::{Facts, MAX_UNITS};
use crate::policy::Hint;
use crate::policy::evictor::{MAX_BATCH, New, Who};

/// `session` is given.
pub const KVT_CONTEXT_SESSION: u64 = 1;
/// `priority` is given, also when it is 0.
pub const KVT_CONTEXT_PRIORITY: u64 = 2;
/// `parent` is given.
pub const KVT_ROW_PARENT: u64 = 1;
/// It will not be used again.
pub const KVT_HINT_DONE: u64 = 1;
/// `confidence` is meant as it is; without this flag it is 1.
pub const KVT_HINT_CONFIDENCE: u64 = 2;

/// Why a sequence stopped: not said.
pub const KVT_STOP_UNKNOWN: u32 = 0;
/// It waits for a tool and goes on soon.
pub const KVT_STOP_TOOL_USE: u32 = 1;
/// The turn ended; a person reads it.
pub const KVT_STOP_END_TURN: u32 = 2;
/// The length limit was reached.
pub const KVT_STOP_LENGTH: u32 = 3;
/// It was cancelled.
pub const KVT_STOP_CANCELLED: u32 = 4;

/// Who asks. All of it is optional.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_context_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_CONTEXT_*.
    pub flags: u64,
    /// The session: the caller's number for a sequence.
    pub session: u64,
    /// Its tenant. Kept with the session: without KVT_CONTEXT_SESSION it must be 0.
    pub tenant: u32,
    /// Its class, at most 255: 0 leaves first; without KVT_CONTEXT_PRIORITY as before,
    /// at first 1. KVT_CONTEXT_PRIORITY needs KVT_CONTEXT_SESSION too.
    pub priority: u32,
    /// Tokens of the whole request; 0 = tokens_each for each id.
    pub length: u32,
    /// Tokens it can have; 0 = unknown.
    pub max_length: u32,
    /// Tokens of one object of its path, the last may have fewer; 0 = 1.
    pub tokens_each: u32,
    /// Always 0.
    pub reserved: u32,
}

/// An object to be inserted. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_row_t {
    /// The caller's number for it.
    pub id: u64,
    /// The object that it continues, with KVT_ROW_PARENT; one that is not there
    /// counts as none.
    pub parent: u64,
    /// Its size, 1 to 2^32 - 1.
    pub units: u64,
    /// KVT_ROW_*.
    pub flags: u64,
    /// When it is used next, as the caller expects; 0 = unknown.
    pub next_use_ns: i64,
    /// Recompute cost; 0 = from the tokens.
    pub cost: f64,
    /// Tokens before it.
    pub context: u32,
    /// Tokens in it.
    pub tokens: u32,
    /// Its layer, when objects are cells.
    pub layer: u32,
    /// Layers of the model; 0 = an object has all.
    pub layers: u32,
    /// Which chunk of its sequence it is.
    pub chunk: u32,
    /// Chunks of that sequence.
    pub chunks: u32,
}

/// What the engine says of the future of objects.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_hint_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_HINT_*.
    pub flags: u64,
    /// When they are used next, by the clock of now_ns; 0 = not said.
    pub next_use_ns: i64,
    /// How sure that is, 0 to 1.
    pub confidence: f64,
    /// KVT_STOP_*: why the request that used them stopped.
    pub stop: u32,
    /// Always 0.
    pub reserved: u32,
}

/// An array of numbers; null with 0 is an empty one.
///
/// # Safety
/// `data` is null or valid for reads of `count` numbers that nobody changes
/// meanwhile.
pub(crate) unsafe fn numbers<'a, T>(data: *const T, count: u64, max: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > max as u64 {
        fail!(Limit, "an array of {count} entries, at most {max} are allowed");
    }
    if data.is_null() || !data.is_aligned() {
        fail!(Invalid, "the array of {count} entries is null or not aligned");
    }
    // SAFETY: not null, aligned, at most 2^28 entries, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data, count as usize) })
}

/// # Safety
/// As [`numbers`].
pub(crate) unsafe fn ids<'a>(data: *const u64, count: u64) -> Result<&'a [u64]> {
    // SAFETY: the caller's promise.
    unsafe { numbers(data, count, MAX_BATCH) }
}

/// # Safety
/// `who` is null or valid for the size it states.
pub(crate) unsafe fn context(context: *const kvt_policy_context_t) -> Result<Who> {
    // SAFETY: the caller's promise.
    let given = unsafe { read(context)? };
    known_flags(given.flags, KVT_CONTEXT_SESSION | KVT_CONTEXT_PRIORITY)?;
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
    let Ok(priority) = u8::try_from(given.priority) else {
        fail!(Invalid, "priority {} is above 255", given.priority);
    };
    if given.flags & KVT_CONTEXT_SESSION == 0 && given.tenant != 0 {
        fail!(Invalid, "tenant {} without a session: it is kept with that", given.tenant);
    }
    if given.flags & (KVT_CONTEXT_SESSION | KVT_CONTEXT_PRIORITY) == KVT_CONTEXT_PRIORITY {
        fail!(Invalid, "priority {priority} without a session: it is kept with that");
    }
    Ok(Who {
        session: (given.flags & KVT_CONTEXT_SESSION != 0).then_some(given.session),
        tenant: given.tenant,
        priority: (given.flags & KVT_CONTEXT_PRIORITY != 0).then_some(priority),
        length: given.length,
        max_length: given.max_length,
        tokens_each: given.tokens_each,
    })
}

pub(crate) fn sizes(units: &[u64]) -> Result<()> {
    match units.iter().position(|units| !(1..=MAX_UNITS).contains(units)) {
        Some(at) => fail!(Invalid, "size {at} is 0 or above {MAX_UNITS}"),
        None => Ok(()),
    }
}

impl PolicyNoun {
    /// After a call for a session: what the engine's predictor says of it.
    fn foresee(&self, context: &Who, ids: &[u64]) -> Result<()> {
        let Some(session) = context.session else { return Ok(()) };
        let (length, max_length) = (u64::from(context.length), u64::from(context.max_length));
        if let Some((ahead_ns, confidence)) = self.predict(session, length, max_length) {
            let evictor = &mut self.state.lock().evictor;
            let now = evictor.now_ns();
            let next_use = Some((now.saturating_add(ahead_ns), confidence));
            evictor.hint(now, context, ids, &Hint { next_use, ..Hint::default() })?;
        }
        Ok(())
    }
}

/// Looks up a path of objects, first to last, and counts it in the statistics.
/// Found ones are touched, the last first, so that none is older than what
/// continues it. Where holes are allowed, objects behind one are found too.
///
/// @param policy       The policy.
/// @param now_ns       The caller's clock, which must not go back; 0 = the
///                     library's (CLOCK_MONOTONIC).
/// @param context          Who asks; may be null.
/// @param ids          The path.
/// @param count        How many, at most 2^24.
/// @param out_found    1 or 0 for each id; may be null.
/// @param out_leading  How many from the start on are there; may be null.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (also a clock that went back), KVT_E_LIMIT,
///         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_lookup(
    policy: *const kvt_policy_t,
    now_ns: i64,
    context: *const kvt_policy_context_t,
    ids: *const u64,
    count: u64,
    out_found: *mut u8,
    out_leading: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let (context, ids) = (self::context(context)?, self::ids(ids, count)?);
    let found = match out_found.is_null() {
        true => &mut [][..],
        // SAFETY: not null, with room for `count` bytes, by the caller's promise.
        false => std::slice::from_raw_parts_mut(out_found, ids.len()),
    };
    let policy = enter(policy)?;
    let leading = policy.state.lock().evictor.lookup(now_ns, &context, ids, found)?;
    policy.foresee(&context, ids)?;
    put(out_leading, leading as u64);
    Ok(())
}

/// Touches objects, the last first, without counting a lookup. Those that are
/// not there are passed over.
///
/// @param policy       The policy.
/// @param now_ns       See kvt_policy_lookup.
/// @param context          Who uses them; may be null.
/// @param ids          The objects.
/// @param count        How many.
/// @param out_touched  How many were there; may be null.
/// @param err          Explains a failure; may be null.
/// @return As kvt_policy_lookup.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_touch(
    policy: *const kvt_policy_t,
    now_ns: i64,
    context: *const kvt_policy_context_t,
    ids: *const u64,
    count: u64,
    out_touched: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let (context, ids) = (self::context(context)?, self::ids(ids, count)?);
    let policy = enter(policy)?;
    let touched = policy.state.lock().evictor.touch(now_ns, &context, ids)?;
    put(out_touched, touched as u64);
    Ok(())
}

/// Notes a use of objects ("update access"): those that are there are touched,
/// the others inserted; all or none. For engines that keep their own tables and
/// choose by kvt_policy_select: recorded uses win over columns.
///
/// @param policy     The policy.
/// @param now_ns     See kvt_policy_lookup.
/// @param context        Who uses them; may be null.
/// @param ids        The objects.
/// @param units      Sizes of those that are new; null = 1 each.
/// @param count      How many.
/// @param out_added  How many were new; may be null.
/// @param err        Explains a failure; may be null.
/// @return As kvt_policy_lookup; KVT_E_LIMIT when the table is full.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_record(
    policy: *const kvt_policy_t,
    now_ns: i64,
    context: *const kvt_policy_context_t,
    ids: *const u64,
    units: *const u64,
    count: u64,
    out_added: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let units_there = if units.is_null() { 0 } else { count };
    let (context, ids, units) =
        (self::context(context)?, self::ids(ids, count)?, self::ids(units, units_there)?);
    sizes(units)?;
    let policy = enter(policy)?;
    let added = policy.state.lock().evictor.record(now_ns, &context, ids, units)?;
    policy.foresee(&context, ids)?;
    put(out_added, added as u64);
    Ok(())
}

fn new_row(row: &kvt_policy_row_t) -> Result<New> {
    known_flags(row.flags, KVT_ROW_PARENT)?;
    let id = row.id;
    if !(1..=MAX_UNITS).contains(&row.units) {
        fail!(Invalid, "object {id} has a size of {}, allowed is 1 to {MAX_UNITS}", row.units);
    }
    let (Ok(layer), Ok(layers)) = (u16::try_from(row.layer), u16::try_from(row.layers)) else {
        fail!(Limit, "object {id} is in layer {} of {}", row.layer, row.layers);
    };
    if !(0.0..=f64::from(f32::MAX)).contains(&row.cost) {
        fail!(Invalid, "object {id} has a cost of {}", row.cost);
    }
    let facts = Facts {
        context: row.context,
        tokens: row.tokens,
        layer,
        layers,
        chunk: row.chunk,
        chunks: row.chunks,
        cost: row.cost as f32,
        next_use_ns: row.next_use_ns,
    };
    let parent = (row.flags & KVT_ROW_PARENT != 0).then_some(row.parent);
    Ok(New { id, parent, units: row.units, facts })
}

/// Inserts objects, all or none.
///
/// @param policy        The policy.
/// @param now_ns        See kvt_policy_lookup.
/// @param context           Who brought them; may be null.
/// @param rows          The objects; a parent stands before what continues it.
/// @param count         How many.
/// @param stride_bytes  sizeof(kvt_policy_row_t).
/// @param err           Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (an id that is there, a size of 0, a clock that
///         went back), KVT_E_LIMIT (the table is full: evict), KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_policy_insert(
    policy: *const kvt_policy_t,
    now_ns: i64,
    context: *const kvt_policy_context_t,
    rows: *const kvt_policy_row_t,
    count: u64,
    stride_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let context = self::context(context)?;
    let rows = Strided::new(rows.cast_mut(), count, stride_bytes, MAX_BATCH as u64)?;
    let policy = enter(policy)?;
    let mut state = policy.state.lock();
    let State { evictor, news, .. } = &mut *state;
    news.clear();
    if news.try_reserve(rows.len()).is_err() {
        fail!(NoMem, "no memory for {} rows", rows.len());
    }
    for at in 0..rows.len() {
        news.push(new_row(&rows.get(at)?)?);
    }
    evictor.insert(now_ns, &context, news)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_with_a_session_is_refused_without_one() {
        let given = |flags, tenant, priority| {
            let context = kvt_policy_context_t {
                struct_size: size_of::<kvt_policy_context_t>() as u64,
                flags,
                session: 7,
                tenant,
                priority,
                length: 64,
                max_length: 0,
                tokens_each: 16,
                reserved: 0,
            };
            // SAFETY: a whole struct.
            unsafe { self::context(&context) }
        };
        let both = KVT_CONTEXT_SESSION | KVT_CONTEXT_PRIORITY;
        let whole = (Some(7), 5, Some(2));
        let told = |context: Who| (context.session, context.tenant, context.priority);
        assert_eq!(given(both, 5, 2).map(told).ok(), Some(whole));
        assert!(given(KVT_CONTEXT_SESSION, 5, 2).is_ok_and(|context| context.priority.is_none()));
        assert!(
            given(0, 0, 2).is_ok_and(|context| context.session.is_none() && context.length == 64)
        );
        for (flags, tenant, word) in [(0, 5, "tenant 5"), (KVT_CONTEXT_PRIORITY, 0, "priority 2")] {
            let error = given(flags, tenant, 2).err().map(|error| error.to_string());
            assert!(error.as_ref().is_some_and(|text| text.contains(word)), "{error:?}");
        }
    }
}
