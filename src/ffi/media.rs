//! Media in sequences: images and sounds that tokens stand for and do not tell apart.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, enter, read, require};
use crate::ffi::error::kvt_error_t;
use crate::ffi::namespace::kvt_namespace_t;
use crate::ffi::namespace_look::{MAX_ROWS, Target, answer, kvt_lookup_t, kvt_range_t};
use crate::ffi::policy_use::numbers;
use crate::ffi::session::kvt_session_t;
use crate::ffi::status::kvt_status_t;
use crate::format::keys::media::Medium;
use crate::store::token_path::MAX_TOKENS;

/// An image or a sound in a sequence. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_media_t {
    /// Its first token, as an index into the sequence's tokens.
    pub token: u64,
    /// What it is: 32 bytes of a hash of at least 256 bits, never shortened.
    pub digest: [u8; 32],
}

/// Tokens, and the media that start in them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sequence_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// The tokens.
    pub tokens: *const u32,
    /// How many, at most 2^27.
    pub token_count: u64,
    /// The media, ascending by their tokens, one at each.
    pub media: *const kvt_media_t,
    /// How many, at most 2^24.
    pub media_count: u64,
    /// sizeof(kvt_media_t).
    pub media_stride_bytes: u64,
}

/// The media of a sequence, by their indices.
///
/// # Safety
/// Its array is null or valid for its length.
unsafe fn media_of(given: &kvt_sequence_t) -> Result<Vec<Medium>> {
    let (base, count) = (given.media.cast_mut(), given.media_count);
    // SAFETY: the caller's promise; nothing is written there.
    let rows = unsafe { Strided::new(base, count, given.media_stride_bytes, MAX_ROWS)? };
    let mut media = Vec::new();
    media.try_reserve_exact(rows.len()).map_err(|_| Status::NoMem)?;
    for at in 0..rows.len() {
        let kvt_media_t { token, digest } = rows.get(at)?;
        if token >= given.token_count {
            fail!(Invalid, "media {at} starts at token {token} of {}", given.token_count);
        }
        media.push(Medium { token, digest });
    }
    Ok(media)
}

/// Adds tokens with media to a session. Where media start in a chunk its key depends on
/// them, and so do the keys of all chunks behind it (docs/keys.md): equal tokens with other
/// images share nothing from there on.
///
/// @param session   The session.
/// @param sequence  What is added; copied.
/// @param err       Explains a failure; may be null.
/// @return As kvt_session_append; KVT_E_INVALID also for media that do not ascend or
///         start beyond the tokens, KVT_E_TOO_NEW. Nothing changes on failure.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `sequence` is null or valid for the size it states, its arrays for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_session_append_media(
    session: *const kvt_session_t,
    sequence: *const kvt_sequence_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let given = read(sequence)?;
    let (tokens, mut media) =
        (numbers(given.tokens, given.token_count, MAX_TOKENS)?, media_of(&given)?);
    let session = enter(session)?;
    session.ns.store.with(|core| {
        let before = core.session(session.number)?.path().tokens().len() as u64;
        media.iter_mut().for_each(|one| one.token += before);
        core.append_media(session.number, tokens, &media)
    })
}

/// kvt_namespace_lookup for a sequence with media.
///
/// @param ns         The namespace.
/// @param sequence      The sequence.
/// @param ranges        See kvt_namespace_lookup.
/// @param capacity      See kvt_namespace_lookup.
/// @param stride_bytes  See kvt_namespace_lookup.
/// @param out_count     See kvt_namespace_lookup.
/// @param out           See kvt_namespace_lookup.
/// @param err           Explains a failure; may be null.
/// @return As kvt_namespace_lookup; KVT_E_TOO_NEW.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// As kvt_namespace_lookup; `sequence` is null or valid for the size it states, its arrays
/// for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_namespace_lookup_media(
    ns: *const kvt_namespace_t,
    sequence: *const kvt_sequence_t,
    ranges: *mut kvt_range_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    out: *mut kvt_lookup_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let to = Target { ranges, capacity, stride_bytes, out_count, out };
    let given = read(sequence)?;
    let tokens = numbers(given.tokens, given.token_count, MAX_TOKENS)?;
    let media = media_of(&given)?;
    answer(ns, &to, |ns| ns.store.lookup_media(ns.number, tokens, &media))
}

/// Says what the full chunks of a sequence are called in events and files: the keys that
/// docs/keys.md defines. A router that knows who has which keys finds by them where a prompt's
/// prefix is.
///
/// @param ns      The namespace.
/// @param sequence   The sequence.
/// @param keys       Receives KVT_KEY_BYTES for each, in their order; may be null with
///                   capacity 0 to learn how many there are.
/// @param capacity   Room there, in keys.
/// @param out_count  How many there are; also written with KVT_E_TOO_SMALL.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `sequence` is valid for the size it states,
/// its arrays for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_namespace_chunk_keys(
    ns: *const kvt_namespace_t,
    sequence: *const kvt_sequence_t,
    keys: *mut u8,
    capacity: u64,
    out_count: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_count)?;
    let given = read(sequence)?;
    let (tokens, media) =
        (numbers(given.tokens, given.token_count, MAX_TOKENS)?, media_of(&given)?);
    if keys.is_null() && capacity > 0 {
        fail!(Invalid, "keys is null, and capacity {capacity}");
    }
    let ns = enter(ns)?;
    let made = ns.0.store.chunk_keys(ns.0.number, tokens, &media)?;
    out_count.write(made.len() as u64);
    if keys.is_null() || made.is_empty() {
        return Ok(());
    }
    if (made.len() as u64) > capacity {
        fail!(TooSmall, "{} keys, and room for {capacity}", made.len());
    }
    // SAFETY: there is room for as many keys, as the caller promises, and a key is its
    // bytes.
    std::ptr::copy_nonoverlapping(made.as_ptr().cast(), keys, size_of_val(&made[..]));
    Ok(())
}
