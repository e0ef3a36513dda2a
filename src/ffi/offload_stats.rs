//! What an offload has done, and who waited for what.

use crate::ffi::abi::{Plain, capi, check_out, write};
use crate::ffi::offload::{kvt_offload_t, with_offload};
use crate::ffi::status::kvt_status_t;

/// What an offload has done, and who waited for what.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_offload_stats_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Loads of a layer.
    pub loads: u64,
    /// Of them, those that a policy has cut.
    pub selections: u64,
    /// Blocks that could have been loaded.
    pub candidates: u64,
    /// Blocks that were.
    pub loaded_blocks: u64,
    /// Bytes of them.
    pub loaded_bytes: u64,
    /// Bytes that were not loaded, since a policy did not want them.
    pub saved_bytes: u64,
    /// Loads that failed.
    pub failed_loads: u64,
    /// Blocks that were put into the store.
    pub put_blocks: u64,
    /// Bytes of them.
    pub put_bytes: u64,
    /// Bytes that were copied to or from tails, the last tokens, which fill no block.
    pub tail_bytes: u64,
    /// Tokens that policies evicted: heads times tokens, where heads have lists of their own.
    pub evicted_tokens: u64,
    /// What policies know of the sequence, in bytes.
    pub policy_bytes: u64,
    /// Waits for blocks to come.
    pub load_waits: u64,
    /// How long those took, in nanoseconds.
    pub load_wait_ns: u64,
    /// Waits for a full tail to leave.
    pub tail_waits: u64,
    /// How long those took, in nanoseconds.
    pub tail_wait_ns: u64,
    /// Waits for blocks that kvt_offload_truncate divides.
    pub cut_waits: u64,
    /// How long those took, in nanoseconds.
    pub cut_wait_ns: u64,
    /// Selections of a policy that took any time.
    pub select_waits: u64,
    /// How long those took, in nanoseconds.
    pub select_wait_ns: u64,
    /// Loads that were audited.
    pub audited: u64,
    /// Blocks that their layers' own queries looked at most, as many of each load as came.
    pub wanted: u64,
    /// Of those, blocks that came: found / wanted is the recall of selections.
    pub found: u64,
    /// Which part of the attention to blocks went to those that came, in millionths: the sum
    /// over what was audited.
    pub found_ppm: u64,
    /// Bytes of keys that came from device memory to host memory, for policies to see.
    pub key_bytes: u64,
}

/// What an offload has done since it was opened.
///
/// @param offload  The offload.
/// @param out      Receives it.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_offload_stats(
    offload: *const kvt_offload_t,
    out: *mut kvt_offload_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let stats = with_offload(offload, |offload| Ok(offload.stats()))?;
    write(
        out,
        &kvt_offload_stats_t {
            struct_size: 0,
            loads: stats.loads,
            selections: stats.selections,
            candidates: stats.candidates,
            loaded_blocks: stats.loaded_blocks,
            loaded_bytes: stats.loaded_bytes,
            saved_bytes: stats.saved_bytes,
            failed_loads: stats.failed_loads,
            put_blocks: stats.put_blocks,
            put_bytes: stats.put_bytes,
            tail_bytes: stats.tail_bytes,
            evicted_tokens: stats.evicted_tokens,
            policy_bytes: stats.policy_bytes,
            load_waits: stats.load_waits.count,
            load_wait_ns: stats.load_waits.ns,
            tail_waits: stats.tail_waits.count,
            tail_wait_ns: stats.tail_waits.ns,
            cut_waits: stats.cut_waits.count,
            cut_wait_ns: stats.cut_waits.ns,
            select_waits: stats.select_waits.count,
            select_wait_ns: stats.select_waits.ns,
            audited: stats.audited,
            wanted: stats.wanted,
            found: stats.found,
            found_ppm: stats.found_ppm,
            key_bytes: stats.key_bytes,
        },
    );
    Ok(())
}
