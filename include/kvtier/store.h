/// @file
/// Stores, namespaces and remotes: where KV is kept, and for which model.
///
/// A store keeps cells (the KV of a chunk of tokens in one layer) in tiers: device memory, host
/// memory, a disk, a remote. A namespace is a model with its layout and tenant: sessions share KV
/// if their namespaces are equal. Names of KV are hashes of the namespace and of all tokens before
/// a chunk's end.
///
/// Life cycle: kvt_open (or kvt_store_open on a runtime of one's own), kvt_namespace_open,
/// sessions, kvt_namespace_close, kvt_store_close, which writes chunks that are in memory only to
/// disk. A store that is opened on the same directory again finds them.
///
///     const char *spec = "store(host=8GiB, disk=disk(path=\"/var/cache/kv\", bytes=200GiB))";
///     if (kvt_open(spec, KVT_NUL_TERMINATED, &store, &err) != KVT_OK) return fail(err);
///     kvt_identity_t model = KVT_IDENTITY_INIT;
///     model.model = "llama-3-8b", model.model_bytes = KVT_NUL_TERMINATED;
///     model.weights = digest, model.weights_bytes = sizeof digest;
///     kvt_layout_t layout = KVT_LAYOUT_INIT; /* 32 layers, 8 KV heads of 128, chunks of 64 tokens */
///     if (kvt_layout_gqa(&layout, 32, 8, 128, KVT_DTYPE_F16, 64, &err) != KVT_OK) return fail(err);
///     if (kvt_namespace_open(store, &model, &layout, 0, &ns, &err) != KVT_OK) return fail(err);
///     kvt_lookup_t found = KVT_LOOKUP_INIT;
///     if (kvt_namespace_lookup(ns, tokens, count, NULL, 0, sizeof(kvt_range_t), NULL, &found, &err))
///         return fail(err);
///     use(&found.reusable_tokens); /* the longest prefix that need not be computed */
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_STORE_H
#define KVTIER_STORE_H

#include <kvtier/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_device_t; /* kvtier/device.h */
struct kvt_policy_log_entry_t; /* kvtier/policy.h */
struct kvt_remote_custom_t;
struct kvt_secret_t;

/* ---- Stores ---------------------------------------------------------------------------------- */

/// A store: keeps KV in tiers (DEVICE, HOST, DISK, REMOTE).
typedef struct kvt_store_t kvt_store_t;

/// When chunks are written to disk.
typedef uint32_t kvt_write_t;
enum {
    /// Chunks are written to disk right after each put.
    KVT_WRITE_THROUGH = 1,
    /// Chunks are written to disk when their memory is needed.
    KVT_WRITE_BACK = 2,
    /// Chunks are written to disk only when a put's `level` or kvt_session_demote asks for it, and when
    /// their memory is needed while they are referenced, pinned or continued by other chunks.
    KVT_WRITE_NEVER = 3,
    /// Default: chunks are written to disk in the background, about 1 s after the put (`age` in the
    /// spec).
    KVT_WRITE_BEHIND = 4,
};

/// How files are read and written: the store has no disk, worker threads make one request at a time
/// (THREADS), or io_uring carries many at once (URING).
typedef uint32_t kvt_io_t;
enum {
    KVT_IO_NONE = 0,
    KVT_IO_THREADS = 1,
    KVT_IO_URING = 2,
};

/// Options of kvt_store_open. A field that is set overrides the spec's parameter that its comment
/// names, and is checked by the same rules.
typedef struct kvt_store_opts_t {
    uint64_t struct_size;
    /// None are defined: 0.
    uint64_t flags;
    /// Spec (docs/reference/specs.md), such as
    /// "store(host=8GiB, disk=disk(path=\"kv\", bytes=200GiB))"; null = "store(host=1GiB)".
    const char *spec;
    uint64_t spec_bytes;
    /// Limit of cells in host memory, at least 64 KiB (`host`); 0 = as in the spec.
    uint64_t host_bytes;
    /// Limit of all files (`disk(bytes=...)`); 0 = as in the spec.
    uint64_t disk_bytes;
    /// Directory of the disk tier, UTF-8 (`disk(path=...)`); null = as in the spec.
    const char *disk_path;
    uint64_t disk_path_bytes;
    /// Eviction policy of HOST (`policy`); null = as in the spec.
    const char *policy;
    uint64_t policy_bytes;
    /// Eviction policy of DISK (`disk_policy`); null = as in the spec.
    const char *disk_policy;
    uint64_t disk_policy_bytes;
    /// (`write`); 0 = as in the spec.
    kvt_write_t write;
    uint32_t reserved;
    /// Device of the same runtime that copies between the engine and the store; null = the CPU. If
    /// it has memory of its own, transfers accept views of that memory, and
    /// `device=device(capacity=8GiB)` in the spec adds a DEVICE tier.
    const struct kvt_device_t *device;
    /// Credentials for the remote's server; null = none.
    const struct kvt_secret_t *secrets;
    /// At most 16.
    uint64_t secret_count;
    uint64_t secret_stride_bytes;
    /// Custom backend, required by `remote=custom(...)` in the spec; null = none.
    const struct kvt_remote_custom_t *remote;
} kvt_store_opts_t;
#define KVT_STORE_OPTS_INIT KVT_INIT_(kvt_store_opts_t)

/// Opens a store with a runtime and a budget of its own. kvt_store_close closes them, too. A store
/// with a device, with secrets or with a custom remote needs kvt_store_open.
///
/// @param spec  "store(...)", or "kvtier(workers=4, budget=budget(host=8GiB), store=store(...))"
///              with parameters of the runtime and the budget; null = "store(host=1GiB)".
/// @return As kvt_store_open.
kvt_status_t kvt_open(const char *spec, uint64_t spec_bytes, kvt_store_t **out, kvt_error_t **err);

/// Opens a store: creates or recovers its disk tier and starts its threads. Waits for the disk, and
/// for the remote up to `connect` plus `timeout` of its spec. An unreachable remote is retried
/// later, unless the spec has `require=true`.
///
/// @param budget  Budget of the same runtime that is charged; null = a private one, limited to the
///                memory that the machine or cgroup has available, less a reserve.
/// @return KVT_E_INVALID (also: the remote rejects the credentials or cannot be authenticated),
///         KVT_E_SPEC, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_BUSY (directory or control socket in use),
///         KVT_E_STATE (the control path exists and is not a socket of this user), KVT_E_NOT_FOUND
///         (the parent of the disk's directory is missing), KVT_E_IO, KVT_E_CORRUPT,
///         KVT_E_UNAVAILABLE or KVT_E_TIMEOUT (a required remote cannot be reached),
///         KVT_E_UNSUPPORTED (the remote's backend is not built in).
kvt_status_t kvt_store_open(const kvt_runtime_t *runtime, const kvt_budget_t *budget,
                            const kvt_store_opts_t *opts, kvt_store_t **out, kvt_error_t **err);

/// Closes a store: refuses new work, cancels open ops and waits for them. Then writes full chunks
/// that are in memory only to disk, as admission and space allow, unless `write=never`. At last
/// ends the threads, frees the memory and the directory, and closes the runtime that kvt_open made.
/// Open namespaces and sessions return KVT_E_CLOSED from then on and are closed as usual; results
/// of ops stay.
///
/// @return KVT_E_BUSY (deadline: the store stays closing and valid, call again), KVT_E_IO (the disk
///         failed, but the store is closed: call again to free the handle).
kvt_status_t kvt_store_close(kvt_store_t **store, uint64_t deadline_ns, kvt_error_t **err);

/// Returns the runtime of a store: the argument of kvt_store_open, or the runtime that kvt_open
/// made. Do not close the latter: it closes with the store.
kvt_status_t kvt_store_runtime(const kvt_store_t *store, kvt_runtime_t **out);

/* ---- Statistics of stores -------------------------------------------------------------------- */

/// Statistics of a store: counters since it was opened, and gauges.
typedef struct kvt_store_stats_t {
    /// sizeof of this struct.
    uint64_t struct_size;
    /// Puts begun.
    uint64_t puts;
    /// Gets begun.
    uint64_t gets;
    /// Prefetches begun.
    uint64_t prefetches;
    /// Cells that puts stored.
    uint64_t stored_cells;
    /// Cells of puts that were resident already.
    uint64_t known_cells;
    /// Cells of gets that were in host memory, or that the get fetched from the remote.
    uint64_t host_hit_cells;
    /// Cells of gets that were read from disk.
    uint64_t disk_hit_cells;
    /// Cells of gets that were in device memory.
    uint64_t device_hit_cells;
    /// Cells of gets that were in no tier.
    uint64_t missed_cells;
    /// Cells with a wrong checksum; they became misses.
    uint64_t corrupt_cells;
    /// Copies that arrived damaged over a device's bus and were repeated.
    uint64_t damaged_copies;
    /// Cells of transfers that failed for lack of host memory.
    uint64_t no_room_cells;
    /// Cells written to disk.
    uint64_t written_cells;
    /// Bytes of written cells, before encoding.
    uint64_t written_bytes;
    /// Bytes of cells read from disk.
    uint64_t loaded_bytes;
    /// Written cells that a codec encoded.
    uint64_t coded_cells;
    /// Bytes of encoded cells before encoding.
    uint64_t coded_raw_bytes;
    /// Bytes of encoded cells on disk.
    uint64_t coded_bytes;
    /// Numbers written by lossy codecs.
    uint64_t lossy_numbers;
    /// Largest error of a number written by a lossy codec.
    double lossy_error_max;
    /// Mean error of these numbers.
    double lossy_error_mean;
    /// Root mean square error of these numbers, relative to that of the numbers.
    double lossy_error_relative;
    /// Chunks evicted from host memory that are on disk.
    uint64_t demoted_chunks;
    /// Chunks evicted from host memory that are in no other tier.
    uint64_t dropped_chunks;
    /// Chunks evicted from disk as a whole.
    uint64_t evicted_chunks;
    /// Parts of chunks evicted from disk, where cells are evicted alone.
    uint64_t evicted_parts;
    /// Victims in host memory that the disk had no space for.
    uint64_t disk_full_chunks;
    /// Failed writes.
    uint64_t failed_writes;
    /// Failed reads.
    uint64_t failed_reads;
    /// Chunks admitted to the disk.
    uint64_t admitted_chunks;
    /// Bytes of admitted chunks.
    uint64_t admitted_bytes;
    /// Chunks rejected because nothing is admitted.
    uint64_t rejected_never;
    /// Chunks rejected for too few uses.
    uint64_t rejected_hits;
    /// Chunks rejected for the priority of their session.
    uint64_t rejected_priority;
    /// Chunks rejected for their size.
    uint64_t rejected_size;
    /// Chunks rejected because the day's writes were used up.
    uint64_t rejected_wear;
    /// Namespaces, including those that no caller has open.
    uint64_t namespaces;
    /// Layouts in use.
    uint64_t layouts;
    /// Open sessions.
    uint64_t sessions;
    /// Tenants that are counted separately.
    uint64_t tenants;
    /// Known chunks, of all layouts.
    uint64_t chunks;
    /// Pinned chunks.
    uint64_t pins;
    /// Bytes of pinned chunks: all layers, stored or not, each cell in whole blocks of 4 KiB.
    uint64_t pinned_bytes;
    /// Chunks that were not pinned, because pins would exceed their share of the last tier (`pins`).
    uint64_t rejected_pins;
    /// Chunks removed at the end that their sessions gave them.
    uint64_t expired_chunks;
    /// Chunks evicted because their tenant exceeded its quota.
    uint64_t quota_evicted_chunks;
    /// Puts rejected because their tenant would exceed its quota.
    uint64_t quota_rejected_puts;
    /// Transfers in flight.
    uint64_t transfers;
    /// Cells of transfers in flight.
    uint64_t transfer_cells;
    /// Cells of transfers that wait for host memory.
    uint64_t memory_waiters;
    /// Bytes that these cells wait for.
    uint64_t memory_waiter_bytes;
    /// Bytes in host memory that are evicted once they are on disk.
    uint64_t demoting_bytes;
    /// Chunks queued for write-back.
    uint64_t writeback_chunks;
    /// Bytes of chunks that write-behind has not begun to write (`write=behind`).
    uint64_t unwritten_bytes;
    /// Age of the oldest of those chunks, in nanoseconds.
    uint64_t unwritten_age_ns;
    /// Puts that wait for a sync.
    uint64_t sync_waiters;
    /// Events published.
    uint64_t events;
    /// Limit of cells in host memory, in bytes.
    uint64_t host_limit_bytes;
    /// Bytes of cells in host memory.
    uint64_t host_used_bytes;
    /// Bytes charged for slabs of host memory, their unused parts included, and for the read reserve.
    uint64_t host_cost_bytes;
    /// Cells in host memory.
    uint64_t host_cells;
    /// Slabs of host memory.
    uint64_t host_slabs;
    /// Limit of all files, in bytes; 0 = there is no disk.
    uint64_t disk_limit_bytes;
    /// Bytes of all files.
    uint64_t disk_used_bytes;
    /// Maximum of disk_used_bytes so far.
    uint64_t disk_peak_bytes;
    /// Bytes of live cells on disk, padded to blocks.
    uint64_t disk_live_bytes;
    /// Bytes that compaction would free.
    uint64_t disk_dead_bytes;
    /// Cells on disk.
    uint64_t disk_cells;
    /// Segments of the disk.
    uint64_t disk_segments;
    /// Bytes of memory in which cells are encoded.
    uint64_t disk_scratch_bytes;
    /// Bytes written for cells of callers, padded to blocks.
    uint64_t disk_appended_bytes;
    /// Bytes of cells that compaction wrote again.
    uint64_t disk_compacted_bytes;
    /// Bytes written for headers, records and checkpoints.
    uint64_t disk_overhead_bytes;
    /// Bytes read from disk.
    uint64_t disk_read_bytes;
    /// Syncs of segments.
    uint64_t disk_syncs;
    /// Failed syncs.
    uint64_t disk_failed_syncs;
    /// Segments that were compacted.
    uint64_t disk_compactions;
    /// Checkpoints written.
    uint64_t disk_checkpoints;
    /// Appends that the disk rejected for lack of space.
    uint64_t disk_rejected_appends;
    /// Chunks recovered from disk when the store was opened.
    uint64_t recovered_chunks;
    /// Cells recovered from disk.
    uint64_t recovered_cells;
    /// Cells found on disk that could not be used.
    uint64_t recovered_unusable_cells;
    /// KVT_IO_*: how files are read and written now. kvt_store_metrics says why not faster.
    uint32_t disk_engine;
    /// 1 = files bypass the page cache.
    uint32_t disk_direct;
    /// Limit of device memory, in bytes; 0 = there is no device tier.
    uint64_t device_limit_bytes;
    /// Bytes of device memory in use.
    uint64_t device_used_bytes;
    /// Bytes of cells in device memory.
    uint64_t device_live_bytes;
    /// Cells in device memory.
    uint64_t device_cells;
    /// Slabs of device memory.
    uint32_t device_slabs;
    /// 1 = the device is lost and the tier is closed.
    uint32_t device_is_lost;
    /// Cells copied into device memory.
    uint64_t device_promoted_cells;
    /// Chunks evicted from device memory; they stay in another tier.
    uint64_t device_evicted_chunks;
    /// Replicas lost with their device.
    uint64_t device_lost_cells;
} kvt_store_stats_t;
#define KVT_STORE_STATS_INIT KVT_INIT_(kvt_store_stats_t)

/// Statistics of a store's remote. Metrics are named `kvtier_remote_NAME`.
typedef struct kvt_remote_stats_t {
    /// sizeof of this struct.
    uint64_t struct_size;
    /// KVT_REMOTE_CIRCUIT_* of reads; 0 = there is no remote.
    uint32_t read_circuit;
    /// KVT_REMOTE_CIRCUIT_* of writes.
    uint32_t write_circuit;
    /// Times that a circuit was opened: requests were suspended for a while.
    uint64_t circuit_opens;
    /// Names looked up.
    uint64_t looked_up_names;
    /// Names that lookups found.
    uint64_t found_names;
    /// Names answered from the remote index, without a lookup.
    uint64_t cached_names;
    /// Objects fetched.
    uint64_t fetched_objects;
    /// Cells fetched with a valid checksum.
    uint64_t fetched_cells;
    /// Bytes of those cells.
    uint64_t fetched_bytes;
    /// Fetched bytes that no transfer needed.
    uint64_t wasted_bytes;
    /// Objects that a hint promised and the remote did not have.
    uint64_t absent_objects;
    /// Objects, or cells of them, with wrong content; malformed replies.
    uint64_t corrupt_objects;
    /// Requests without an answer before their deadline, or to an unreachable or busy server.
    uint64_t late_requests;
    /// Requests that have not returned after twice their timeout.
    uint64_t hung_requests;
    /// Objects not fetched because the circuit was open.
    uint64_t skipped_objects;
    /// Objects uploaded.
    uint64_t uploaded_objects;
    /// Bytes of uploaded objects.
    uint64_t uploaded_bytes;
    /// Objects that another store had uploaded before.
    uint64_t known_objects;
    /// Failed uploads.
    uint64_t failed_uploads;
    /// Chunks not uploaded: rejected by admission, or too many were queued.
    uint64_t rejected_chunks;
    /// Objects removed because they were damaged or their chunk was dropped.
    uint64_t removed_objects;
} kvt_remote_stats_t;
#define KVT_REMOTE_STATS_INIT KVT_INIT_(kvt_remote_stats_t)

/// Reads counters since the open, and current state. Works on a poisoned store, too.
kvt_status_t kvt_store_stats(const kvt_store_t *store, kvt_store_stats_t *out);

/// Writes the statistics of a store as Prometheus text, not NUL-terminated.
///
/// @param out_capacity  The text grows between calls: leave some spare room.
/// @param out_bytes     May be null.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_store_metrics(const kvt_store_t *store, char *out, uint64_t out_capacity,
                               uint64_t *out_bytes);

/* ---- Namespaces ------------------------------------------------------------------------------ */

/// A namespace of a store: its sessions share the KV of common prefixes.
typedef struct kvt_namespace_t kvt_namespace_t;

/// Flags of a namespace.
typedef uint64_t kvt_namespace_flags_t;
enum {
    /// The engine can compute a missing chunk (a hole) before reused ones, so chunks are evicted in any
    /// order. Without this flag a chunk is evicted only after the chunks that continue it.
    KVT_NAMESPACE_HOLES = 1,
};

/// Bytes of a namespace's or chunk's key.
#define KVT_KEY_BYTES 32

/// Reuse rules: the earlier tokens that a layer needs in order to continue. FULL: all. WINDOW: the
/// last window_tokens. STATE: its state at exactly that point, which is kept at the ends of chunks.
typedef uint32_t kvt_rule_t;
enum {
    KVT_RULE_FULL = 0,
    KVT_RULE_WINDOW = 1,
    KVT_RULE_STATE = 2,
};

/// A field of an identity that the engine defines. Stands in arrays only.
typedef struct kvt_identity_extra_t {
    /// At least 0x80000000, unique in the identity.
    uint32_t tag;
    uint32_t reserved;
    /// Bytes that are hashed unchanged.
    const void *value;
    /// At most 65536.
    uint64_t value_bytes;
} kvt_identity_extra_t;

/// Everything that KV depends on beside its tokens: sessions share KV if all fields are equal.
/// Fields are bytes, at most 65536 each, hashed unchanged. A null field is absent, which differs
/// from an empty one (a pointer with length 0). docs/internals/keys.md defines the hash.
typedef struct kvt_identity_t {
    uint64_t struct_size;
    /// Name of the model.
    const void *model;
    uint64_t model_bytes;
    /// Fingerprint of the weights, the engine's own.
    const void *weights;
    uint64_t weights_bytes;
    /// Adapters that change the KV, in the order they apply.
    const void *lora;
    uint64_t lora_bytes;
    /// Digest of media that all sequences of the namespace have.
    const void *media;
    uint64_t media_bytes;
    /// Separates the KV of tenants; long and random.
    const void *salt;
    uint64_t salt_bytes;
    /// How KV is computed and encoded where that is not exact: a canonical spec. Its argument
    /// `codec` (none, lz4, int8) sets the codec on disk; without it the store's applies.
    const void *recipe;
    uint64_t recipe_bytes;
    /// Part of the KV that this rank holds, below shard_count.
    uint32_t shard_index;
    /// Number of parts; 0 = all ranks hold the same KV (shard_index is 0).
    uint32_t shard_count;
    /// Fields that the engine defines, in any order.
    const kvt_identity_extra_t *extra;
    /// At most 64.
    uint64_t extra_count;
    uint64_t extra_stride_bytes;
    /// Tenant in the names of the namespace's objects at a remote (`prefix/t42/...`), for access
    /// rules; 0 = no tenant. Not part of the identity.
    uint64_t remote_tenant;
} kvt_identity_t;
#define KVT_IDENTITY_INIT KVT_INIT_(kvt_identity_t)

/// Layers with equal sizes, dtype and reuse rule. Stands in arrays only.
typedef struct kvt_group_t {
    kvt_rule_t rule;
    kvt_dtype_t dtype;
    /// Heads of K and V, at most 65536; 0 = unspecified. Each head fills whole elements.
    uint32_t kv_heads;
    /// With KVT_RULE_WINDOW: 1 to 2^30; else 0.
    uint32_t window_tokens;
    /// Bytes of K, or of the latent, per token and layer.
    uint64_t k_bytes;
    /// Bytes of V per token and layer; 0 = V is part of K.
    uint64_t v_bytes;
    /// With KVT_RULE_STATE: bytes of a layer's state; k_bytes, v_bytes and kv_heads are 0.
    uint64_t state_bytes;
    /// Layers in any order; each layer of the model, from 0, is in exactly one group.
    const uint16_t *layers;
    /// At least 1; at most 4096 in all groups.
    uint64_t layer_count;
} kvt_group_t;

/// Chunk length and contents of a model's cells. Part of the namespace's key.
typedef struct kvt_layout_t {
    uint64_t struct_size;
    /// 1 to 32768 tokens of a chunk, the unit of sharing. A cell (a chunk in one layer) has at most
    /// 32 MiB.
    uint32_t chunk_tokens;
    uint32_t reserved;
    /// Groups of layers, in any order.
    const kvt_group_t *groups;
    /// 1 to 64.
    uint64_t group_count;
    uint64_t stride_bytes;
    /// The layers of a model whose layers are alike, at most 4096: set by kvt_layout_gqa, _mla and
    /// _window, with the fields below. 0 = `groups` describes the layers; else `groups` is null.
    uint32_t layers;
    kvt_dtype_t dtype;
    /// Heads of K and V; 0 = unspecified.
    uint32_t kv_heads;
    /// Tokens of the window of layers that have one; 0 = all layers attend to all tokens.
    uint32_t window_tokens;
    /// With a window: each full_every-th layer attends to all tokens; 0 = no layer does.
    uint32_t full_every;
    /// The first layer that does, below full_every.
    uint32_t full_first;
    /// Bytes of K, or of the latent, per token and layer.
    uint64_t k_bytes;
    /// Bytes of V per token and layer; 0 = V is part of K.
    uint64_t v_bytes;
} kvt_layout_t;
#define KVT_LAYOUT_INIT KVT_INIT_(kvt_layout_t)

/// Fills the layout of a model with grouped-query, multi-query or multi-head attention: K and V by
/// head, all layers alike.
///
/// @param layers        Layers of the model, 1 to 4096.
/// @param kv_heads      Heads of K and V, 1 to 65536.
/// @param head_dim      Elements of a head.
/// @param chunk_tokens  1 to 32768 tokens of a chunk, the unit of sharing and eviction.
/// @return KVT_E_LIMIT (more layers).
kvt_status_t kvt_layout_gqa(kvt_layout_t *layout, uint32_t layers, uint32_t kv_heads,
                            uint32_t head_dim, kvt_dtype_t dtype, uint32_t chunk_tokens,
                            kvt_error_t **err);

/// Fills the layout of a model with latent attention (MLA): one plane, K, of the latent and the
/// rotated part of the key, shared by all heads.
///
/// @param layers      As kvt_layout_gqa.
/// @param latent_dim  Elements of the latent, such as 512.
/// @param rope_dim    Elements of the rotated part, such as 64; may be 0.
/// @return KVT_E_LIMIT (more layers).
kvt_status_t kvt_layout_mla(kvt_layout_t *layout, uint32_t layers, uint32_t latent_dim,
                            uint32_t rope_dim, kvt_dtype_t dtype, uint32_t chunk_tokens,
                            kvt_error_t **err);

/// Fills the layout of a model whose layers attend to the last tokens only, all or most of them.
///
/// @param kv_heads       This and the others: as kvt_layout_gqa.
/// @param window_tokens  Tokens that a layer with a window attends to, 1 to 2^30.
/// @param full_every     Each full_every-th layer attends to all tokens: 6 for Gemma 3, 2 for
///                       gpt-oss. 0 = no layer does. The first one is layer full_every - 1; change
///                       kvt_layout_t.full_first where it is another.
/// @return KVT_E_LIMIT (more layers).
kvt_status_t kvt_layout_window(kvt_layout_t *layout, uint32_t layers, uint32_t kv_heads,
                               uint32_t head_dim, kvt_dtype_t dtype, uint32_t chunk_tokens,
                               uint32_t window_tokens, uint32_t full_every, kvt_error_t **err);

/// Opens a namespace. Equal identities and layouts give the same namespace, with the chunks that
/// the store recovered from disk. While it is open, other opens must pass the same flags and
/// remote_tenant.
///
/// @param identity  Null = all fields absent.
/// @param flags     KVT_NAMESPACE_*.
/// @return KVT_E_SPEC (the recipe names an unknown codec), KVT_E_LIMIT (a field is too long, or
///         65,536 namespaces or 64 layouts are in use: open, or with referenced or pinned chunks;
///         others are dropped to make room).
kvt_status_t kvt_namespace_open(const kvt_store_t *store, const kvt_identity_t *identity,
                                const kvt_layout_t *layout, kvt_namespace_flags_t flags,
                                kvt_namespace_t **out, kvt_error_t **err);

/// Reads the key of a namespace, the hash of its identity and layout.
///
/// @param out_key  Receives KVT_KEY_BYTES bytes.
kvt_status_t kvt_namespace_key(const kvt_namespace_t *ns, uint8_t *out_key);

/// Closes a namespace. Its chunks stay in the store, its sessions stay open.
kvt_status_t kvt_namespace_close(kvt_namespace_t **ns);

/* ---- Lookups --------------------------------------------------------------------------------- */

/// No tier.
#define KVT_TIER_NONE 4294967295

/// States of a range of tokens.
typedef uint32_t kvt_range_state_t;
enum {
    /// Some needed cells are in no tier: the engine must compute these tokens.
    KVT_RANGE_MISS = 0,
    /// All needed cells can be loaded.
    KVT_RANGE_HIT = 1,
    /// All needed cells can be loaded once transfers in flight have arrived.
    KVT_RANGE_PENDING = 2,
    /// No layer needs these tokens in order to continue.
    KVT_RANGE_UNNEEDED = 3,
};

/// Every cell of the chunk is resident in some tier of the store, not necessarily in the same one.
#define KVT_EXISTS_WHOLE 16

/// A run of tokens in the same state. Stands in arrays only.
typedef struct kvt_range_t {
    uint64_t first_token;
    uint64_t tokens;
    kvt_range_state_t state;
    /// Slowest tier that a needed cell is loaded from, KVT_TIER_*; KVT_TIER_NONE = nothing to load.
    kvt_tier_t tier;
    /// Bytes that are resident in DEVICE.
    uint64_t device_bytes;
    /// Bytes to load from HOST.
    uint64_t host_bytes;
    /// Bytes to load from DISK.
    uint64_t disk_bytes;
    /// Bytes to fetch from the remote, by remote hints.
    uint64_t remote_bytes;
    /// Bytes on their way into the store, in no tier yet.
    uint64_t pending_bytes;
    /// Predicted time to load these tokens alone.
    uint64_t load_ns;
} kvt_range_t;

/// Totals of a lookup. Bytes and time are those of continuing after reusable_soon_tokens; with
/// KVT_NAMESPACE_HOLES, of loading all that is resident.
typedef struct kvt_lookup_t {
    uint64_t struct_size;
    /// Tokens looked up.
    uint64_t tokens;
    /// Longest prefix that can be reused now.
    uint64_t reusable_tokens;
    /// Longest prefix that can be reused once transfers in flight have arrived.
    uint64_t reusable_soon_tokens;
    /// Bytes that are resident in DEVICE.
    uint64_t device_bytes;
    /// Bytes to load from HOST.
    uint64_t host_bytes;
    /// Bytes to load from DISK.
    uint64_t disk_bytes;
    /// Bytes to fetch from the remote, by remote hints.
    uint64_t remote_bytes;
    /// Bytes on their way into the store, in no tier yet.
    uint64_t pending_bytes;
    /// Predicted time to load all of it, including queued work.
    uint64_t load_ns;
} kvt_lookup_t;
#define KVT_LOOKUP_INIT KVT_INIT_(kvt_lookup_t)

/// Reports how much of a token sequence is reusable in a namespace, and what loading it takes; for
/// routers that compare stores. Counts no use and references nothing: chunks may be evicted before
/// the next call.
///
/// @param token_count  At most 2^27.
/// @param ranges       Receives ranges that cover all tokens, in order.
/// @param capacity     At most 2^24.
/// @param out_count    May be null.
/// @param out          Receives the totals; may be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_namespace_lookup(const kvt_namespace_t *ns, const uint32_t *tokens,
                                  uint64_t token_count, kvt_range_t *ranges, uint64_t capacity,
                                  uint64_t stride_bytes, uint64_t *out_count, kvt_lookup_t *out,
                                  kvt_error_t **err);

/// Does the same for a sequence whose chunk keys are known (docs/internals/keys.md). See
/// kvt_namespace_lookup for the other parameters.
///
/// @param keys         Keys of the full chunks, KVT_KEY_BYTES each, in order.
/// @param key_count    token_count / chunk_tokens.
/// @param token_count  Tokens of the sequence, those of a last partial chunk included.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_namespace_lookup_keys(const kvt_namespace_t *ns, const uint8_t *keys,
                                       uint64_t key_count, uint64_t token_count,
                                       kvt_range_t *ranges, uint64_t capacity,
                                       uint64_t stride_bytes, uint64_t *out_count,
                                       kvt_lookup_t *out, kvt_error_t **err);

/// Reports in which tiers chunks are resident. Counts no use and references nothing.
///
/// @param keys       Keys of full chunks, KVT_KEY_BYTES each.
/// @param key_count  At most 2^27.
/// @param out        Receives a byte for each key: KVT_EXISTS_WHOLE, and 1 << KVT_TIER_* for each
///                   tier that has every cell. 1 << KVT_TIER_REMOTE is a remote hint: it may be
///                   stale, does not count for KVT_EXISTS_WHOLE, and is set only while the remote's
///                   circuit is closed. 0 = absent, or incomplete.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_namespace_exists(const kvt_namespace_t *ns, const uint8_t *keys,
                                  uint64_t key_count, uint8_t *out);

/* ---- Prefill cost ---------------------------------------------------------------------------- */

/// Cost of prefill. Computing n tokens after l tokens of context takes, in nanoseconds,
/// n * beta_ns + alpha_ns * (n * l + n * n / 2).
typedef struct kvt_prefill_cost_t {
    uint64_t struct_size;
    /// Nanoseconds per token and token of context.
    double alpha_ns;
    /// Nanoseconds per token.
    double beta_ns;
    /// Out: number of calls of kvt_namespace_observe_prefill.
    uint64_t observed;
    /// Out: 1 = set by kvt_namespace_set_prefill_cost, 0 = observed.
    uint32_t fixed;
    uint32_t reserved;
} kvt_prefill_cost_t;
#define KVT_PREFILL_COST_INIT KVT_INIT_(kvt_prefill_cost_t)

/// Records how long the engine took to compute tokens. Plans use the cost that these observations
/// give.
///
/// @param context_tokens  Tokens before the first computed one, at most 2^27.
/// @param tokens          Tokens computed, 1 to 2^27.
/// @param duration_ns     Time taken, from 10 ns a token to one hour.
kvt_status_t kvt_namespace_observe_prefill(const kvt_namespace_t *ns, uint64_t context_tokens,
                                           uint64_t tokens, uint64_t duration_ns,
                                           kvt_error_t **err);

/// Sets the prefill cost of a namespace, whatever is observed.
///
/// @param cost  Its alpha_ns and beta_ns, 0 to 1e15 each; null = use observations again.
kvt_status_t kvt_namespace_set_prefill_cost(const kvt_namespace_t *ns,
                                            const kvt_prefill_cost_t *cost, kvt_error_t **err);

/// Reads the prefill cost that plans use now.
kvt_status_t kvt_namespace_prefill_cost(const kvt_namespace_t *ns, kvt_prefill_cost_t *out);

/* ---- Events of stores ------------------------------------------------------------------------ */

/// Kinds of events of a store.
typedef uint32_t kvt_store_event_kind_t;
enum {
    /// All cells of a chunk are resident in a tier.
    KVT_STORE_EVENT_STORED = 1,
    /// Some cell of a chunk is no longer resident in a tier that had them all.
    KVT_STORE_EVENT_REMOVED = 2,
    /// All chunks of a namespace are gone from every tier (kvt_namespace_clear).
    KVT_STORE_EVENT_CLEARED = 3,
};

/// A change of residency. Stands in arrays only.
typedef struct kvt_store_event_t {
    /// Consecutive, from 0.
    uint64_t number;
    /// Time, CLOCK_MONOTONIC.
    uint64_t at_ns;
    /// KVT_STORE_EVENT_STORED, _REMOVED or _CLEARED. Ignore others: kinds may be added.
    kvt_store_event_kind_t kind;
    /// 0 with KVT_STORE_EVENT_CLEARED.
    kvt_tier_t tier;
    /// Tokens of the chunk.
    uint32_t tokens;
    /// Index of the chunk in its sequence, from 0.
    uint32_t position;
    /// Key of the chunk.
    uint8_t key[32];
    /// Key of the chunk before it; for the first one the namespace's key.
    uint8_t parent[32];
    uint8_t namespace_key[32];
} kvt_store_event_t;

/// Reads events, oldest first. The store keeps the newest ones (`events` of its spec, 16,384 by
/// default) for any number of readers. A reader that missed some must read the state again
/// (kvt_store_residents, kvt_namespace_lookup, _exists).
///
/// @param cursor      In: number of the first event wanted; 0 = all that are kept, UINT64_MAX =
///                    future ones. Out: the cursor of the next call.
/// @param capacity    At most 2^24; 0 = only skip the events that are no longer kept.
/// @param out_count   Receives the number of events written.
/// @param out_missed  Receives the number of events that were lost; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_store_events(const kvt_store_t *store, uint64_t *cursor, kvt_store_event_t *events,
                              uint64_t capacity, uint64_t stride_bytes, uint64_t *out_count,
                              uint64_t *out_missed);

/// Reads what is resident, as KVT_STORE_EVENT_STORED: an entry for each chunk and each tier that has
/// all cells of it. Read the cursor of kvt_store_events first, then all of this, then the events
/// from that cursor on: their last word about a chunk and a tier holds. The `number` of an entry is
/// that of the first event that it does not reflect. The order of entries is unspecified. The store
/// is locked for at most 4,096 chunks at a time.
///
/// @param cursor     In: 0 = from the start. Out: the cursor of the next call; UINT64_MAX = all
///                   entries were read.
/// @param capacity   At most 2^24; 0 = write nothing.
/// @param out_count  Receives the number of entries written.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_store_residents(const kvt_store_t *store, uint64_t *cursor,
                                 kvt_store_event_t *entries, uint64_t capacity,
                                 uint64_t stride_bytes, uint64_t *out_count);

/// Submits an op that completes when the event `from` or a later one exists. Never waits. The op's
/// value is the number of events from `from` on. Its queue (kvt_queue_fd, or a callback) wakes the
/// reader, which reads all events and watches again from its new cursor. Closing the store ends the
/// op with KVT_E_CANCELLED.
///
/// @param from    Cursor of kvt_store_events; UINT64_MAX = the next event.
/// @param out_op  May be null if opts names a queue.
/// @return KVT_E_AGAIN (1,024 watches are open, `max_ops` is reached, or the queue is full).
kvt_status_t kvt_store_watch(const kvt_store_t *store, uint64_t from, const kvt_submit_opts_t *opts,
                             kvt_op_t **out_op, kvt_error_t **err);

/* ---- Changes to open stores ------------------------------------------------------------------ */

/// Switches the eviction policy of a tier. The new policy receives every chunk with its last use
/// and number of uses, and the learned state of a former policy of the same kind. The store is
/// blocked for 0.1 to 0.2 s per million chunks. The next open uses its spec again.
///
/// @param tier  KVT_TIER_HOST, KVT_TIER_DISK or KVT_TIER_DEVICE.
/// @param spec  The policy, as in the store's spec; not `custom`.
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_NOT_FOUND (the store has no such tier), KVT_E_UNSUPPORTED
///         (another tier).
kvt_status_t kvt_store_set_policy(const kvt_store_t *store, kvt_tier_t tier, const char *spec,
                                  uint64_t spec_bytes, kvt_error_t **err);

/// Changes the limit of a tier: bytes of cells in HOST, bytes of files on DISK. Chunks beyond it
/// are evicted in the background; the call does not wait. The store's account in its budget limits
/// HOST as well. The next open uses its spec again.
///
/// @param tier   KVT_TIER_HOST or KVT_TIER_DISK.
/// @param bytes  At least 64 KiB for HOST; for DISK at least what kvt_store_open requires.
/// @return KVT_E_LIMIT (above what a tier can have), KVT_E_NOT_FOUND (the store has no disk),
///         KVT_E_UNSUPPORTED (another tier).
kvt_status_t kvt_store_set_limit(const kvt_store_t *store, kvt_tier_t tier, uint64_t bytes,
                                 kvt_error_t **err);

/* ---- Latencies, tenants and evictions -------------------------------------------------------- */

/// Kinds of kvt_latency_t. GET_HOST: gets that read nothing from disk. GET_DISK: gets that did.
/// PUT_*: puts by `level`, until they are in memory, on disk, durable. *_BATCH: batches of workers:
/// copies between tensors and memory, disk reads, disk writes, syncs, upkeep (compaction, sweeps,
/// checkpoints, namespace records), remote reads, remote writes, remote lookups. *_DECISION:
/// choices of victims, of which one in 16 is timed.
typedef uint32_t kvt_latency_kind_t;
enum {
    KVT_LATENCY_GET_HOST = 1,
    KVT_LATENCY_GET_DISK = 2,
    KVT_LATENCY_PUT_RAM = 3,
    KVT_LATENCY_PUT_DISK = 4,
    KVT_LATENCY_PUT_DURABLE = 5,
    KVT_LATENCY_COPY_BATCH = 6,
    KVT_LATENCY_READ_BATCH = 7,
    KVT_LATENCY_WRITE_BATCH = 8,
    KVT_LATENCY_SYNC_BATCH = 9,
    KVT_LATENCY_UPKEEP_BATCH = 10,
    KVT_LATENCY_HOST_DECISION = 11,
    KVT_LATENCY_DISK_DECISION = 12,
    KVT_LATENCY_FETCH_BATCH = 13,
    KVT_LATENCY_UPLOAD_BATCH = 14,
    KVT_LATENCY_LOOKUP_BATCH = 15,
};

/// Latencies of one kind since the store was opened, in nanoseconds. Stands in arrays only.
typedef struct kvt_latency_t {
    kvt_latency_kind_t kind;
    uint32_t reserved;
    /// Number of timings.
    uint64_t count;
    uint64_t mean_ns;
    /// Median, at most a quarter too high.
    uint64_t p50_ns;
    /// 99th percentile, at most a quarter too high.
    uint64_t p99_ns;
    uint64_t max_ns;
} kvt_latency_t;

/// Traffic of a tenant: puts and gets, no prefetches. Stands in arrays only.
typedef struct kvt_tenant_t {
    /// kvt_session_opts_t.tenant.
    uint32_t tenant;
    /// 1 = this row sums all tenants beyond the 1,024 that are counted separately.
    uint32_t is_rest;
    /// Bytes stored by puts.
    uint64_t put_bytes;
    /// Bytes loaded by gets.
    uint64_t got_bytes;
    /// Cells that gets asked for and loaded.
    uint64_t hit_cells;
    /// Cells that gets asked for and that were in no tier.
    uint64_t missed_cells;
    /// Puts rejected because the tenant would exceed its quota (kvt_store_set_quota).
    uint64_t rejected_puts;
    /// Bytes of its chunks in host memory; 0 = it has no quota there.
    uint64_t host_bytes;
    /// Bytes of its chunks on disk, before encoding; 0 = it has no quota there.
    uint64_t disk_bytes;
    /// Quota of host memory; 0 = none.
    uint64_t host_quota_bytes;
    /// Quota of the disk; 0 = none.
    uint64_t disk_quota_bytes;
} kvt_tenant_t;

/// Reads the latest evictions of a tier, oldest first. The store keeps 4,096 of each tier; gaps in
/// their numbers show what a reader missed.
///
/// @param tier       KVT_TIER_HOST, KVT_TIER_DISK or KVT_TIER_DEVICE.
/// @param entries    Receives entries: `id` is the first 8 bytes of the chunk's key, little-endian
///                   (with another granularity: the policy's id), `units` are blocks of 4 KiB,
///                   times CLOCK_MONOTONIC.
/// @param capacity   At most 2^24; the latest entries that fit are written.
/// @param out_count  Receives the number written.
/// @return KVT_E_NOT_FOUND (the store has no such tier), KVT_E_UNSUPPORTED (another tier),
///         KVT_E_LIMIT.
kvt_status_t kvt_store_evictions(const kvt_store_t *store, kvt_tier_t tier,
                                 struct kvt_policy_log_entry_t *entries, uint64_t capacity,
                                 uint64_t stride_bytes, uint64_t *out_count);

/// Sets the most bytes that a tenant's chunks may have in a tier. A chunk belongs to the tenant of
/// the session that stored it first, and counts with all its layers, before encoding; chunks that
/// were on disk when the store was opened belong to none. A put that would exceed the quota of host
/// memory evicts the tenant's least recently used chunks, and is rejected with KVT_E_BUDGET if they
/// do not suffice (because sessions, transfers or pins hold them). Chunks that gets bring into
/// memory, or that are written to disk, evict others of their tenant afterwards. `quota` of the
/// store's spec limits each tenant for which this call set no quota.
///
/// @param tenant  kvt_session_opts_t.tenant, not 0: that stands for no tenant.
/// @param tier    KVT_TIER_HOST or KVT_TIER_DISK.
/// @param bytes   0 = remove the tenant's own quota, so that `quota` of the spec applies again.
/// @return KVT_E_UNSUPPORTED (another tier, or DISK in a store without a disk), KVT_E_INVALID
///         (tenant 0), KVT_E_LIMIT (65,536 tenants have quotas of their own).
kvt_status_t kvt_store_set_quota(const kvt_store_t *store, uint32_t tenant, kvt_tier_t tier,
                                 uint64_t bytes, kvt_error_t **err);

/// Reads the traffic of each tenant, by number. The last row sums the tenants that are not counted
/// separately, if there are any.
///
/// @param capacity   At most 2^24; 1,025 always suffice.
/// @param out_count  May be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_store_tenants(const kvt_store_t *store, kvt_tenant_t *rows, uint64_t capacity,
                               uint64_t stride_bytes, uint64_t *out_count);

/// Reads the latencies of gets, puts, worker batches and policy decisions: one row for each
/// KVT_LATENCY_*, in their order. Gets and puts count if they moved everything, from the call (or
/// the ready event) to completion; those with `after` do not count. kvt_store_metrics has the
/// histograms.
///
/// @param capacity   At most 2^24; 32 always suffice.
/// @param out_count  May be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_store_latencies(const kvt_store_t *store, kvt_latency_t *rows, uint64_t capacity,
                                 uint64_t stride_bytes, uint64_t *out_count);

/* ---- Remotes --------------------------------------------------------------------------------- */

/// State of the circuit breaker of a remote: requests are sent (CLOSED), none are sent for a while
/// after failures or malformed replies (OPEN), one request probes the remote (PROBING).
typedef uint32_t kvt_circuit_t;
enum {
    KVT_REMOTE_CIRCUIT_CLOSED = 1,
    KVT_REMOTE_CIRCUIT_OPEN = 2,
    KVT_REMOTE_CIRCUIT_PROBING = 3,
};

/// A credential for the remote's server. Copied when the store is opened, wiped when it is closed,
/// and never shown in specs, logs, errors or at the control socket. Stands in arrays only.
typedef struct kvt_secret_t {
    /// "password" (Redis), "s3.key", "s3.secret", "s3.token", or "seal" (encrypts objects).
    const char *name;
    uint64_t name_bytes;
    const void *secret;
    /// At most 4,096.
    uint64_t secret_bytes;
} kvt_secret_t;

/// Reads the counters of a store's remote; all 0 without a remote. Works on a poisoned store, too.
kvt_status_t kvt_store_remote_stats(const kvt_store_t *store, kvt_remote_stats_t *out);

/* ---- Custom remotes: a table of callbacks ---------------------------------------------------- */

/// Flags of puts to a custom remote.
typedef uint64_t kvt_remote_put_flags_t;
enum {
    /// A put of a name that exists does nothing. Without this flag the last writer wins.
    KVT_REMOTE_FIRST_WINS = 1,
};

/// A piece of host memory. Parts of a put must not be written; parts of a get whose bytes are not
/// wanted may share memory. Stands in arrays only.
typedef struct kvt_remote_part_t {
    void *address;
    uint64_t bytes;
} kvt_remote_part_t;

/// One object of a batch. Stands in arrays only; the next one is `stride_bytes` further.
typedef struct kvt_remote_item_t {
    /// Letters, digits, '.', '_', '-' and '/'. Not NUL-terminated.
    const char *name;
    uint64_t name_bytes;
    /// Memory that the object's bytes go to (get) or come from (put), in order.
    const kvt_remote_part_t *parts;
    uint64_t part_count;
    /// Get: first byte of the object that is wanted.
    uint64_t offset;
    /// Out, preset to 0. Get: bytes read, fewer than the parts have if the object ends before.
    /// Exists: length of the object. Put: 1 = it existed already.
    uint64_t bytes;
    /// Out, preset to KVT_E_AGAIN: KVT_OK, KVT_E_NOT_FOUND, KVT_E_AGAIN (retry later),
    /// KVT_E_TIMEOUT, KVT_E_BUDGET (full), KVT_E_LIMIT (object too long), KVT_E_CORRUPT,
    /// KVT_E_UNSUPPORTED, KVT_E_UNAVAILABLE.
    kvt_status_t status;
    uint32_t reserved;
} kvt_remote_item_t;

/// Processes a batch of objects until a deadline (CLOCK_MONOTONIC), and sets the status of each
/// item. Must not touch memory of the batch after it returns. A result other than KVT_OK becomes
/// the status of every item that has none.
typedef kvt_status_t (*kvt_remote_batch_fn)(void *user_data, kvt_remote_item_t *items,
                                            uint64_t count, uint64_t stride_bytes,
                                            uint64_t deadline_ns);

/// A custom remote backend, for `remote=custom(...)` in a store's spec. The store calls it from
/// several threads at once, without a lock. Callbacks must return by the deadline, must not unwind
/// and must not call the same store. The store verifies every object and treats `exists` as a hint.
typedef struct kvt_remote_custom_t {
    uint64_t struct_size;
    /// KVT_REMOTE_FIRST_WINS.
    kvt_remote_put_flags_t flags;
    /// Object size that the backend handles best; 0 = 1 MiB.
    uint64_t preferred_bytes;
    /// Longest object; 0 = unlimited.
    uint64_t max_bytes;
    /// Most objects of a call, at most 4096; 0 = 32.
    uint32_t batch;
    uint32_t reserved;
    /// Reads objects or parts of objects.
    kvt_remote_batch_fn get;
    /// Stores objects.
    kvt_remote_batch_fn put;
    /// Reports which objects exist, and their lengths.
    kvt_remote_batch_fn exists;
    /// Removes objects; null = objects are never removed.
    kvt_remote_batch_fn remove;
    /// Passed to the callbacks; the store owns it once kvt_store_open has succeeded.
    void *user_data;
    /// Releases user_data after the store is closed; may be null.
    kvt_destroy_fn destroy;
} kvt_remote_custom_t;
#define KVT_REMOTE_CUSTOM_INIT KVT_INIT_(kvt_remote_custom_t)

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_STORE_H */
