/// @file
/// Sessions: sequences of tokens, transfers of their KV, plans, named blocks, ready events.
///
/// A session is a sequence of tokens in a namespace. Its tokens name its KV: a session with the
/// same first tokens as an earlier one finds the KV that the earlier one stored. An open session
/// references its chunks, so that they stay in some tier.
///
/// Life cycle: kvt_session_open, kvt_session_append, kvt_session_plan, then kvt_session_get for
/// stored KV and kvt_session_put for computed KV, kvt_session_close. Transfers that were submitted
/// continue after the close. Views begin at the first token of their transfer.
///
///     if (kvt_session_open(ns, NULL, &session, &err) != KVT_OK) return fail(err);
///     if (kvt_session_append(session, tokens, count, &err) != KVT_OK) return fail(err);
///     kvt_plan_step_t steps[16];
///     uint64_t step_count = 0;
///     kvt_plan_t plan = KVT_PLAN_INIT;
///     if (kvt_session_plan(session, NULL, steps, 16, sizeof steps[0], &step_count, &plan, &err))
///         return fail(err);
///     for (uint64_t i = 0; i < step_count; i++) { /* load, or compute and put */
///         kvt_transfer_t part = KVT_TRANSFER_INIT;
///         part.first_token = steps[i].first_token, part.tokens = steps[i].tokens;
///         part.k = k_views, part.v = v_views, part.stride_bytes = sizeof k_views[0];
///         part.flags = steps[i].kind == KVT_PLAN_LOAD ? KVT_TRANSFER_NEEDED_ONLY : 0;
///         if (steps[i].kind == KVT_PLAN_LOAD) status = kvt_session_get_wait(session, &part, NULL, &err);
///         else if (steps[i].kind == KVT_PLAN_RECOMPUTE) compute_next_layer(); /* then put */
///         if (status != KVT_OK) return fail(err);
///     }
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_SESSION_H
#define KVTIER_SESSION_H

#include <kvtier/store.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_policy_hint_t; /* kvtier/policy.h */

/* ---- Sessions -------------------------------------------------------------------------------- */

/// A sequence of tokens in a namespace. While it is open, it references its chunks: they stay in
/// at least one tier.
typedef struct kvt_session_t kvt_session_t;

/// Flags of a session.
typedef uint64_t kvt_session_flags_t;
enum {
    /// `priority` is set, even if it is 0.
    KVT_SESSION_PRIORITY = 1,
};

/// Options of a session.
typedef struct kvt_session_opts_t {
    uint64_t struct_size;
    kvt_session_flags_t flags;
    /// At most 256 bytes; null = no name.
    const char *name;
    uint64_t name_bytes;
    /// Tenant number, for fairness and statistics.
    uint32_t tenant;
    /// Priority class, 0 to 255; 0 is evicted first. Needs KVT_SESSION_PRIORITY.
    uint32_t priority;
    /// Expected maximum length in tokens, for policies; not enforced; 0 = unknown.
    uint32_t max_tokens;
    uint32_t reserved;
    /// Time to live of chunks that the session stores first, in nanoseconds; 0 = no end. Each put or
    /// get of them by a session with a TTL starts the time again, but never shortens it; a put
    /// without a TTL removes the end. At its end a chunk is removed from all tiers, once nothing
    /// references, pins or continues it. Ends are not stored: a chunk that is on disk when the store
    /// is opened has none.
    uint64_t ttl_ns;
} kvt_session_opts_t;
#define KVT_SESSION_OPTS_INIT KVT_INIT_(kvt_session_opts_t)

/// Length and layout of a session.
typedef struct kvt_session_info_t {
    uint64_t struct_size;
    uint64_t tokens;
    uint64_t full_chunks;
    /// Tokens per chunk.
    uint32_t chunk_tokens;
    uint32_t layers;
} kvt_session_info_t;
#define KVT_SESSION_INFO_INIT KVT_INIT_(kvt_session_info_t)

/// Opens a session without tokens. The session keeps its namespace open.
///
/// @return KVT_E_AGAIN (as many are open as `sessions` of the spec), KVT_E_LIMIT (name too long).
kvt_status_t kvt_session_open(const kvt_namespace_t *ns, const kvt_session_opts_t *opts,
                              kvt_session_t **out, kvt_error_t **err);

/// Opens a session with the tokens of another one. Both share the full chunks; a partial chunk at
/// the end is private to each.
///
/// @param opts  Options of the new session; it inherits none.
/// @return As kvt_session_open.
kvt_status_t kvt_session_fork(const kvt_session_t *session, const kvt_session_opts_t *opts,
                              kvt_session_t **out, kvt_error_t **err);

/// Appends tokens. The session references the chunks that they complete, as far as these are
/// stored. On failure nothing changes.
///
/// @param count  A session has at most 2^27 tokens.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_session_append(const kvt_session_t *session, const uint32_t *tokens,
                                uint64_t count, kvt_error_t **err);

/// Truncates a session. Submitted transfers continue.
///
/// @param tokens  Tokens that remain; at most those that the session has.
kvt_status_t kvt_session_truncate(const kvt_session_t *session, uint64_t tokens, kvt_error_t **err);

/// Pins chunks of a session: they stay in at least one tier, also when the session is closed. The
/// weakest pin is given up when nothing else can be evicted. A chunk that is pinned twice keeps the
/// higher priority and the later end. Chunks that are not stored yet are pinned, too, if the chunk
/// table has room for them. Pins have at most a share of the last tier (`pins` of the spec, 0.5 by
/// default). A call that would exceed it pins nothing.
///
/// @param first_token  A multiple of chunk_tokens.
/// @param tokens       Up to a multiple of chunk_tokens or the end of the session; 0 = to the end.
/// @param priority     0 to 255; pins of low priority are given up first.
/// @param until_ns     End of the pin, CLOCK_MONOTONIC; 0 = none.
/// @return KVT_E_BUDGET (pins would exceed their share).
kvt_status_t kvt_session_pin(const kvt_session_t *session, uint64_t first_token, uint64_t tokens,
                             uint32_t priority, uint64_t until_ns, kvt_error_t **err);

/// Passes a hint about the future of a session to the policies of its store, usually when a
/// request has ended.
///
/// @param hint  Its times are CLOCK_MONOTONIC.
kvt_status_t kvt_session_hint(const kvt_session_t *session, const struct kvt_policy_hint_t *hint,
                              kvt_error_t **err);

/// Reads length and layout of a session.
kvt_status_t kvt_session_info(const kvt_session_t *session, kvt_session_info_t *out);

/// Closes a session. Its chunks may be evicted then; submitted transfers continue.
kvt_status_t kvt_session_close(kvt_session_t **session);

/* ---- Ready events ---------------------------------------------------------------------------- */

/// A ready event: the engine signals it once, when the memory of a transfer may be touched
/// (kvt_transfer_t.ready). Events of a device are numbers, see kvt_transfer_t.after.
typedef struct kvt_ready_event_t kvt_ready_event_t;

/// States of a ready event.
typedef uint32_t kvt_ready_event_state_t;
enum {
    KVT_READY_EVENT_PENDING = 0,
    KVT_READY_EVENT_SIGNALLED = 1,
};

/// Opens a pending event. It belongs to no runtime: transfers of any store may wait for it.
///
/// @param flags  0; none are defined.
/// @return KVT_E_LIMIT (too many are open).
kvt_status_t kvt_ready_event_open(uint64_t flags, kvt_ready_event_t **out, kvt_error_t **err);

/// Signals an event: transfers that wait for it begin. Never blocks; a second signal has no effect.
kvt_status_t kvt_ready_event_signal(const kvt_ready_event_t *event);

/// Reads the state of an event.
///
/// @param out_state  KVT_READY_EVENT_*.
kvt_status_t kvt_ready_event_query(const kvt_ready_event_t *event,
                                   kvt_ready_event_state_t *out_state);

/// Closes an event. If it is pending, transfers that wait for it end with KVT_E_CANCELLED and have
/// touched no memory.
kvt_status_t kvt_ready_event_close(kvt_ready_event_t **event);

/* ---- Transfers ------------------------------------------------------------------------------- */

/// Flags of a transfer.
typedef uint64_t kvt_transfer_flags_t;
enum {
    /// One op per layer: out_ops receives one for each layer of the transfer. The tag of its i-th
    /// layer is the given tag plus i. The transfer is cancelled once all of its ops are.
    KVT_TRANSFER_EACH_LAYER = 1,
    /// Gets and prefetches: only the cells that are needed to continue after the last token. Layers
    /// with a window need the chunks of the window's last tokens, layers with a state the last chunk.
    /// Their other cells are not touched and are no misses. A load step of a plan is got like this.
    /// Views describe all tokens of the transfer.
    KVT_TRANSFER_NEEDED_ONLY = 2,
};

/// When a put completes.
typedef uint32_t kvt_level_t;
enum {
    /// Its cells are in host memory.
    KVT_LEVEL_RAM = 0,
    /// Its cells are written to disk.
    KVT_LEVEL_DISK = 1,
    /// Its cells are synced to disk: they survive a crash of the machine.
    KVT_LEVEL_DURABLE = 2,
    /// The remote has confirmed all full chunks that have all layers; other chunks are in host memory.
    /// The put ends with KVT_E_AGAIN if layers of a chunk have left host memory: they are not uploaded
    /// from elsewhere.
    KVT_LEVEL_REMOTE = 3,
};

/// A range of tokens by a range of layers of a session, and the engine's tensors for them.
typedef struct kvt_transfer_t {
    uint64_t struct_size;
    kvt_transfer_flags_t flags;
    /// A multiple of chunk_tokens.
    uint64_t first_token;
    /// Up to a multiple of chunk_tokens or the end of the session. 0 = to the end at submission;
    /// views must then state their tokens.
    uint64_t tokens;
    uint32_t first_layer;
    /// 0 = all from first_layer on.
    uint32_t layers;
    /// One view per layer of K, the latent or the states; null for a prefetch.
    const kvt_view_t *k;
    /// One view per layer of V, all zero for a layer without V; null if none of the layers has V.
    const kvt_view_t *v;
    uint64_t stride_bytes;
    /// Puts only.
    kvt_level_t level;
    uint32_t reserved;
    /// The transfer begins when this event is signalled: sources are complete then, targets unused.
    /// Null = at once. At most 65536 transfers wait for one event. The handle may be closed after
    /// the signal. To read from disk in the meantime, submit a prefetch first.
    const kvt_ready_event_t *ready;
    /// Gets and prefetches: indices of the chunks to transfer, such as a sparse policy selects.
    /// Ascending; 0 = the chunk of first_token. Views have the tokens of these chunks without gaps.
    /// Null = all chunks.
    const uint32_t *chunks;
    /// At most 2^22; not 0 unless chunks is null.
    uint64_t chunk_count;
    /// Event of the store's device (kvt_device_copy, kvt_device_launch, kvt_device_import_event,
    /// kvt_device_create_event); 0 = none. Not for prefetches. Copies between tensors and store run
    /// after it, on the device; no thread waits. Reads from disk do not wait for it. The caller
    /// keeps the event, may use it for several transfers, and releases it after the last of their
    /// ops. If it fails, or is released before the library saw it complete, the transfer fails with
    /// that status, and tensors of cells that were not copied are unchanged. With `ready`, the
    /// transfer waits for both.
    uint64_t after;
} kvt_transfer_t;
#define KVT_TRANSFER_INIT KVT_INIT_(kvt_transfer_t)

/// Submits a put: copies the engine's tensors into host memory, from where they are written to
/// disk and remote as the spec says. Cells that are stored already are not stored again. Never
/// blocks. Closing the session does not end the transfer.
///
/// At most `inline` bytes (a parameter of the store's spec; default 64 KiB) between host memory are
/// copied by the calling thread: the op is released when the call returns. Workers copy more.
///
/// The op's value (kvt_completion_t, kvt_op_info_t) is the number of tokens, from the first on,
/// that were stored without a gap; bytes_done is the number of copied bytes. The op ends with
/// KVT_E_BUDGET if host memory runs out, or KVT_E_IO if the disk fails; other cells are stored all
/// the same. The tensors must not change before the op is released.
///
/// @param transfer  Copied, tables of pages included.
/// @param out_ops   Receives the op, or one per layer with KVT_TRANSFER_EACH_LAYER; free them with
///                  kvt_op_free. Null = no handle, only completions.
/// @return KVT_E_AGAIN (queue, runtime, store or `ready` is full), KVT_E_UNAVAILABLE (no disk or
///         remote for this level, memory that no device reaches, `after` without a device),
///         KVT_E_LIMIT (more than 2^22 chunks or 2^32 cells, or the chunk table is full),
///         KVT_E_HANDLE (also: `after` is no event of the store's device).
kvt_status_t kvt_session_put(const kvt_session_t *session, const kvt_transfer_t *transfer,
                             const kvt_submit_opts_t *opts, kvt_op_t **out_ops, kvt_error_t **err);

/// Submits a get: copies KV into the engine's tensors, from whichever tier has it. Never blocks.
/// Up to `inline` bytes in host memory are copied as by kvt_session_put.
///
/// The op's value is the number of tokens, from the first on, that arrived without a gap. The op
/// ends with KVT_E_NOT_FOUND if cells are missing: the others have arrived, and tensors of missing
/// cells are unchanged. At its deadline it resolves with KVT_E_TIMEOUT; the tensors are the
/// library's until the op is released.
///
/// @param transfer  See kvt_session_put.
/// @param out_ops   See kvt_session_put.
/// @return As kvt_session_put.
kvt_status_t kvt_session_get(const kvt_session_t *session, const kvt_transfer_t *transfer,
                             const kvt_submit_opts_t *opts, kvt_op_t **out_ops, kvt_error_t **err);

/// Puts and waits: kvt_session_put and kvt_op_finish.
///
/// @param opts  Null = the defaults. At its deadline the call ends with KVT_E_TIMEOUT, as soon as
///              the tensors are free. Its queue, if set, receives the completion as well.
/// @return KVT_E_TIMEOUT, or as kvt_session_put and its op.
///
/// Threading: not inside callbacks.
kvt_status_t kvt_session_put_wait(const kvt_session_t *session, const kvt_transfer_t *transfer,
                                  const kvt_submit_opts_t *opts, kvt_error_t **err);

/// Gets and waits: kvt_session_get and kvt_op_finish.
///
/// @param opts  See kvt_session_put_wait.
/// @return KVT_E_NOT_FOUND (cells are missing; the others have arrived), KVT_E_TIMEOUT, or as
///         kvt_session_get and its op.
///
/// Threading: not inside callbacks.
kvt_status_t kvt_session_get_wait(const kvt_session_t *session, const kvt_transfer_t *transfer,
                                  const kvt_submit_opts_t *opts, kvt_error_t **err);

/// Submits a prefetch: brings KV into host memory for a later get. Never blocks. Value and status
/// of the op are those of a get.
///
/// @param transfer  Without views.
/// @param opts      Set `priority` to KVT_PRIORITY_PREFETCH.
/// @param out_ops   See kvt_session_put.
/// @return As kvt_session_put.
kvt_status_t kvt_session_prefetch(const kvt_session_t *session, const kvt_transfer_t *transfer,
                                  const kvt_submit_opts_t *opts, kvt_op_t **out_ops,
                                  kvt_error_t **err);

/* ---- Plans ----------------------------------------------------------------------------------- */

/// Flags of a plan.
typedef uint64_t kvt_plan_flags_t;
enum {
    /// Loads and computation run one after the other, not at the same time.
    KVT_PLAN_NO_OVERLAP = 1,
    /// Ignore KV that is still on its way into the store.
    KVT_PLAN_NO_WAIT = 2,
    /// `alpha_ns` and `beta_ns` are set, even if they are 0.
    KVT_PLAN_COST = 4,
};

/// What to do in a step of a plan.
typedef uint32_t kvt_plan_step_kind_t;
enum {
    /// Nothing to do, the KV is in place or not needed.
    KVT_PLAN_RESIDENT = 0,
    /// Load the tokens: kvt_session_get with KVT_TRANSFER_NEEDED_ONLY.
    KVT_PLAN_LOAD = 1,
    /// Compute the tokens.
    KVT_PLAN_RECOMPUTE = 2,
};

/// How the engine will run, as input of a plan.
typedef struct kvt_plan_terms_t {
    uint64_t struct_size;
    /// KVT_PLAN_NO_OVERLAP, KVT_PLAN_NO_WAIT, KVT_PLAN_COST.
    kvt_plan_flags_t flags;
    /// With KVT_PLAN_COST: nanoseconds per token and token of context, 0 to 1e15. Without it, plans
    /// use the cost of kvt_namespace_prefill_cost.
    double alpha_ns;
    /// With KVT_PLAN_COST: nanoseconds per token, 0 to 1e15.
    double beta_ns;
    /// Of the loads.
    kvt_priority_t priority;
    uint32_t reserved;
} kvt_plan_terms_t;
#define KVT_PLAN_TERMS_INIT KVT_INIT_(kvt_plan_terms_t)

/// Successive tokens with the same step.
typedef struct kvt_plan_step_t {
    uint64_t first_token;
    uint64_t tokens;
    /// KVT_PLAN_RESIDENT, KVT_PLAN_LOAD or KVT_PLAN_RECOMPUTE.
    kvt_plan_step_kind_t kind;
    /// Slowest tier that anything is loaded from, KVT_TIER_*; KVT_TIER_NONE if nothing is.
    kvt_tier_t tier;
    /// Bytes to load from each tier.
    uint64_t host_bytes;
    uint64_t disk_bytes;
    uint64_t remote_bytes;
    /// Predicted time of this step alone.
    uint64_t predicted_ns;
    /// Bytes to copy from the device tier, on the device.
    uint64_t device_bytes;
} kvt_plan_step_t;

/// Totals of a plan.
typedef struct kvt_plan_t {
    uint64_t struct_size;
    /// All tokens of the session; the next three counts add up to it.
    uint64_t tokens;
    uint64_t resident_tokens;
    uint64_t load_tokens;
    uint64_t recompute_tokens;
    /// Predicted time until all KV is available, queues included.
    uint64_t total_ns;
    /// Predicted time of the loads alone, queues included.
    uint64_t load_ns;
    /// Predicted time of the computation alone.
    uint64_t compute_ns;
    /// Predicted time to compute all tokens instead.
    uint64_t without_ns;
} kvt_plan_t;
#define KVT_PLAN_INIT KVT_INIT_(kvt_plan_t)

/// Computes the cheapest way to get the KV of all tokens of a session: what to load, what to
/// compute, and how long that takes, from residency, measured bandwidth and queues. Counts no use
/// and references nothing. Without KVT_NAMESPACE_HOLES, all tokens from the first computed one on
/// are computed.
///
/// @param steps      Receives all tokens in order, as steps.
/// @param capacity   At most 2^24.
/// @param out_count  May be null.
/// @param out        Totals; may be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (capacity, or more than 2^22 chunks).
kvt_status_t kvt_session_plan(const kvt_session_t *session, const kvt_plan_terms_t *terms,
                              kvt_plan_step_t *steps, uint64_t capacity, uint64_t stride_bytes,
                              uint64_t *out_count, kvt_plan_t *out, kvt_error_t **err);

/* ---- Clearing, dropping, demotion, unpinning ------------------------------------------------- */

/// Counts of chunks after a clear or drop.
typedef struct kvt_clear_report_t {
    uint64_t struct_size;
    /// Removed from all tiers.
    uint64_t removed_chunks;
    /// Kept: sessions, transfers or pins reference them, or a kept chunk continues them.
    uint64_t referenced_chunks;
    /// Kept, because they were moving between tiers: call again.
    uint64_t transferring_chunks;
} kvt_clear_report_t;
#define KVT_CLEAR_REPORT_INIT KVT_INIT_(kvt_clear_report_t)

/// Counts of chunks after a demotion.
typedef struct kvt_demote_report_t {
    uint64_t struct_size;
    /// They were on disk already: their memory is freed.
    uint64_t freed_chunks;
    /// Their memory is freed once they are written to disk.
    uint64_t pending_chunks;
    /// They stay in memory: there is no disk.
    uint64_t kept_chunks;
} kvt_demote_report_t;
#define KVT_DEMOTE_REPORT_INIT KVT_INIT_(kvt_demote_report_t)

/// Removes all chunks of a namespace that nothing references from all tiers, and waits until no
/// opening of the store finds them again. Chunks that are stored meanwhile may stay. The bytes
/// stay in files until these are reused, but no lookup finds them.
///
/// @param out  Counts; may be null.
/// @return KVT_E_TIMEOUT, KVT_E_BUDGET, KVT_E_IO: removed chunks may be found by the next opening
///         (call again).
kvt_status_t kvt_namespace_clear(const kvt_namespace_t *ns, uint64_t deadline_ns,
                                 kvt_clear_report_t *out, kvt_error_t **err);

/// Removes chunks of a session from all tiers, unless something else references them. The session
/// keeps its tokens, and finds chunks that stay or are stored again. Does not wait for the disk:
/// after a crash, chunks that were on disk may be found again, as after any eviction. For the
/// range, see kvt_session_pin.
///
/// @param out  Counts; may be null.
kvt_status_t kvt_session_drop(const kvt_session_t *session, uint64_t first_token, uint64_t tokens,
                              kvt_clear_report_t *out, kvt_error_t **err);

/// Demotes chunks of a session, also referenced and pinned ones. Chunks that are not on disk yet
/// are written, whatever admission and `write` of the spec say; then their memory is freed. Never
/// blocks: events (KVT_STORE_EVENT_REMOVED) and kvt_store_stats show the end. A get promotes the
/// chunks again. A chunk that cannot be written stays in memory while something references it. For
/// the range, see kvt_session_pin.
///
/// @param out  Counts; may be null.
kvt_status_t kvt_session_demote(const kvt_session_t *session, uint64_t first_token, uint64_t tokens,
                                kvt_demote_report_t *out, kvt_error_t **err);

/// Removes the pins of chunks of a session, whichever session set them. For the range, see
/// kvt_session_pin.
kvt_status_t kvt_session_unpin(const kvt_session_t *session, uint64_t first_token, uint64_t tokens,
                               kvt_error_t **err);

/* ---- Media ----------------------------------------------------------------------------------- */

/// An image or a sound in a sequence.
typedef struct kvt_media_t {
    /// Index of its first token in the sequence.
    uint64_t token;
    /// Hash of its content: 32 bytes of a hash of at least 256 bits.
    uint8_t digest[32];
} kvt_media_t;

/// Tokens, and the media that start in them.
typedef struct kvt_sequence_t {
    uint64_t struct_size;
    const uint32_t *tokens;
    /// At most 2^27.
    uint64_t token_count;
    /// Ascending by token, at most one per token; null = none.
    const kvt_media_t *media;
    /// At most 2^24.
    uint64_t media_count;
    uint64_t media_stride_bytes;
} kvt_sequence_t;
#define KVT_SEQUENCE_INIT KVT_INIT_(kvt_sequence_t)

/// Appends tokens with media. Media enter the key of the chunk that they start in and of all later
/// chunks (docs/internals/keys.md): equal tokens with other images share nothing from there on. On
/// failure nothing changes.
///
/// @return As kvt_session_append.
kvt_status_t kvt_session_append_media(const kvt_session_t *session, const kvt_sequence_t *sequence,
                                      kvt_error_t **err);

/// Looks up a sequence with media; otherwise as kvt_namespace_lookup.
///
/// @return As kvt_namespace_lookup.
kvt_status_t kvt_namespace_lookup_media(const kvt_namespace_t *ns, const kvt_sequence_t *sequence,
                                        kvt_range_t *ranges, uint64_t capacity,
                                        uint64_t stride_bytes, uint64_t *out_count,
                                        kvt_lookup_t *out, kvt_error_t **err);

/// Computes the keys of the full chunks of a sequence (docs/internals/keys.md), as events and files
/// have them. A router that knows the keys of each store finds a prompt's prefix by them.
///
/// @param keys      Receives KVT_KEY_BYTES per chunk, in order.
/// @param capacity  In keys.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_namespace_chunk_keys(const kvt_namespace_t *ns, const kvt_sequence_t *sequence,
                                      uint8_t *keys, uint64_t capacity, uint64_t *out_count,
                                      kvt_error_t **err);

/* ---- Named blocks: chunks that the engine names itself --------------------------------------- */

/// Names of blocks: any bytes. Equal names must mean equal content, so a name is, for example, the
/// engine's hash of all that the content depends on, except the namespace's identity.
typedef struct kvt_block_names_t {
    uint64_t struct_size;
    /// The names one after the other, without gaps.
    const uint8_t *bytes;
    /// End of each name as an offset from `bytes`, ascending; null = all have each_bytes bytes.
    const uint64_t *ends;
    /// 1 to 65536; 0 if `ends` is set.
    uint64_t each_bytes;
    /// At most 65536; 2^22 for kvt_namespace_block_keys and kvt_namespace_blocks_exist.
    uint64_t count;
} kvt_block_names_t;
#define KVT_BLOCK_NAMES_INIT KVT_INIT_(kvt_block_names_t)

/// Blocks to transfer, and the engine's tensors for them.
typedef struct kvt_blocks_t {
    uint64_t struct_size;
    /// 0; none are defined.
    uint64_t flags;
    /// 1 to 65536 names.
    const kvt_block_names_t *names;
    uint32_t first_layer;
    /// 0 = all from first_layer on.
    uint32_t layers;
    /// One view per layer of K, the latent or the states: the tokens of all blocks, in the order of
    /// their names. Pages of chunk_tokens tokens give each block an address of its own. Null for a
    /// prefetch.
    const kvt_view_t *k;
    /// This and the next fields: see kvt_transfer_t.
    const kvt_view_t *v;
    uint64_t stride_bytes;
    kvt_level_t level;
    uint32_t reserved;
    const kvt_ready_event_t *ready;
    uint64_t after;
} kvt_blocks_t;
#define KVT_BLOCKS_INIT KVT_INIT_(kvt_blocks_t)

/// Computes the keys of blocks (docs/internals/keys.md), as events and files have them.
///
/// @param out  Receives KVT_KEY_BYTES per name.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_namespace_block_keys(const kvt_namespace_t *ns, const kvt_block_names_t *names,
                                      uint8_t *out, kvt_error_t **err);

/// Reads in which tiers blocks are resident. Counts no use and references nothing. It does not ask
/// the remote: a block that kvt_session_remote_lookup_blocks found there has 1 << KVT_TIER_REMOTE
/// without KVT_EXISTS_WHOLE, and gets and prefetches fetch it.
///
/// @param out  Receives a byte per name, as kvt_namespace_exists.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_namespace_blocks_exist(const kvt_namespace_t *ns, const kvt_block_names_t *names,
                                        uint8_t *out, kvt_error_t **err);

/// Submits a put of blocks that the engine names itself; otherwise as kvt_session_put, which stores
/// KV by tokens. Never blocks.
///
/// A block is a chunk of the namespace's layout without a parent, so it is evicted by itself. All
/// sessions of the namespace share blocks. The session only says for whom the transfer is: its
/// tenant, priority and share of the bandwidth.
///
/// The op has an item per block (kvt_op_items), in order, with the status of the block. The op's
/// status is KVT_OK if that of all blocks is, else that of a failed one; KVT_E_NOT_FOUND only if
/// nothing else failed. Its value is the number of tokens, from the first on, that were stored
/// without a gap.
///
/// @param blocks  Copied, names and tables of pages included.
/// @param out_op  Receives the op; free it with kvt_op_free. Null = no handle, only a completion.
/// @return As kvt_session_put.
kvt_status_t kvt_session_put_blocks(const kvt_session_t *session, const kvt_blocks_t *blocks,
                                    const kvt_submit_opts_t *opts, kvt_op_t **out_op,
                                    kvt_error_t **err);

/// Submits a get of blocks, from whichever tier has them; from the remote only those that
/// kvt_session_remote_lookup_blocks found there. Never blocks. If blocks are missing, the op ends
/// with KVT_E_NOT_FOUND and its items say which; the tensors of a missing block may be written in
/// part.
///
/// @param blocks  See kvt_session_put_blocks.
/// @param out_op  See kvt_session_put_blocks.
/// @return As kvt_session_put.
kvt_status_t kvt_session_get_blocks(const kvt_session_t *session, const kvt_blocks_t *blocks,
                                    const kvt_submit_opts_t *opts, kvt_op_t **out_op,
                                    kvt_error_t **err);

/// Submits a prefetch of blocks into host memory, for a later get. Never blocks. The items of the
/// op are those of a get.
///
/// @param blocks  Without views.
/// @param opts    Set `priority` to KVT_PRIORITY_PREFETCH.
/// @param out_op  See kvt_session_put_blocks.
/// @return As kvt_session_put.
kvt_status_t kvt_session_prefetch_blocks(const kvt_session_t *session, const kvt_blocks_t *blocks,
                                         const kvt_submit_opts_t *opts, kvt_op_t **out_op,
                                         kvt_error_t **err);

/// Removes blocks from all tiers, unless transfers or sessions (kvt_session_hold_blocks) reference
/// them. Does not wait for the disk: after a crash, blocks that were on disk may be found again, as
/// after any eviction.
///
/// @param names  Names without a block are skipped.
/// @param out    Counts; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_session_drop_blocks(const kvt_session_t *session, const kvt_block_names_t *names,
                                     kvt_clear_report_t *out, kvt_error_t **err);

/* ---- Remote lookups -------------------------------------------------------------------------- */

/// Starts a remote lookup of a session's chunks. Never blocks. The op's value is the number of
/// tokens, from the first on, that can be reused from this store and its remote. From then on,
/// lookups and plans count chunks at the remote, and gets and prefetches fetch them. Appending at
/// least a chunk starts the same lookup (`lookup=append`); the op then only waits for it. Without a
/// remote, or while its circuit is open, the op ends at once. Closing the session ends it with
/// KVT_E_CANCELLED.
///
/// An answer is a hint: a chunk that is gone when it is fetched is a miss.
///
/// @param opts    Set a deadline: the op then ends with KVT_E_TIMEOUT, and answers so far count.
/// @param out_op  Null = no handle, only a completion in the queue of `opts`.
/// @return KVT_E_AGAIN (too many transfers or ops are in flight, or the queue is full).
kvt_status_t kvt_session_remote_lookup(const kvt_session_t *session, const kvt_submit_opts_t *opts,
                                       kvt_op_t **out_op, kvt_error_t **err);

/// Starts a lookup of blocks in this store and its remote. Never blocks. From then on,
/// kvt_namespace_blocks_exist reports those at the remote as 1 << KVT_TIER_REMOTE, and
/// kvt_session_get_blocks and kvt_session_prefetch_blocks fetch them. The remote is asked for all
/// blocks that are not in this store and have no recent answer. Without a remote, or while its
/// circuit is open, the op ends at once. Closing the session does not end it.
///
/// The op has an item per block (kvt_op_items): KVT_OK if all of it is in this store or at the
/// remote, else KVT_E_NOT_FOUND. Its status is KVT_OK if that of all blocks is. Its value is the
/// number of tokens, from the first on, that can be used without a gap.
///
/// An answer is a hint: a block that is gone when it is fetched is a miss. A hint is forgotten when
/// the store needs its row for a chunk of its own, or after `known` later ones (a parameter of the
/// remote); look the block up again then.
///
/// @param names   1 to 65536; a name that occurs twice has two items. Copied.
/// @param opts    Set a deadline: blocks without an answer then end with KVT_E_TIMEOUT.
/// @param out_op  See kvt_session_remote_lookup.
/// @return KVT_E_AGAIN (as kvt_session_remote_lookup, or 2^20 blocks are being looked up),
///         KVT_E_LIMIT.
kvt_status_t kvt_session_remote_lookup_blocks(const kvt_session_t *session,
                                              const kvt_block_names_t *names,
                                              const kvt_submit_opts_t *opts, kvt_op_t **out_op,
                                              kvt_error_t **err);

/* ---- References to blocks -------------------------------------------------------------------- */

/// References blocks that are stored: they stay in at least one tier, and gets find them, until
/// they are released. They may be demoted to disk; kvt_session_prefetch_blocks promotes them.
/// Counts no use. Never blocks.
///
/// Holds are counted, for each name of each call: a block that is held twice must be released
/// twice. A block that lacks layers, or whose put has not completed, is not held. Closing the
/// session releases all; forks hold none. If held blocks fill the memory or the chunk table, puts
/// end with KVT_E_BUDGET, or are refused with KVT_E_LIMIT. A held block whose only copy is damaged
/// is lost; its name stays held for the next put.
///
/// @param out  Receives a byte per name, as kvt_namespace_blocks_exist; 0 = not held. May be null
///             if only kvt_session_close releases them.
/// @return KVT_E_LIMIT (also: 2^20 holds of a session). On failure nothing is held.
kvt_status_t kvt_session_hold_blocks(const kvt_session_t *session, const kvt_block_names_t *names,
                                     uint8_t *out, kvt_error_t **err);

/// Releases one hold of each block. A block without holds may be evicted. Never blocks.
///
/// The session must hold each block as often as it is named, else nothing changes: a miscount
/// would release holds of another part of the program.
///
/// @return KVT_E_INVALID (also: not held as often), KVT_E_LIMIT.
kvt_status_t kvt_session_release_blocks(const kvt_session_t *session,
                                        const kvt_block_names_t *names, kvt_error_t **err);

/// Passes a hint about the future of each block to the policies, as kvt_session_hint does for a
/// session. Names without a block are skipped.
///
/// @param session  Supplies tenant and priority; the hint does not concern it.
/// @param hint     Its times are CLOCK_MONOTONIC.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_session_hint_blocks(const kvt_session_t *session, const kvt_block_names_t *names,
                                     const struct kvt_policy_hint_t *hint, kvt_error_t **err);

/// Pins blocks until a time, as kvt_session_pin pins chunks of a session. Names without a block are
/// skipped.
///
/// @param priority  0 to 255; pins of low priority are given up first.
/// @param until_ns  End of the pin, CLOCK_MONOTONIC; not 0: blocks cannot be unpinned.
/// @return KVT_E_BUDGET (pins would exceed their share), KVT_E_LIMIT.
kvt_status_t kvt_session_pin_blocks(const kvt_session_t *session, const kvt_block_names_t *names,
                                    uint32_t priority, uint64_t until_ns, kvt_error_t **err);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_SESSION_H */
