/// @file
/// Devices: memory, copies, events, kernels and custom devices.
///
/// A device copies between host memory and its own, in streams, and says when with events. The CPU
/// is one, a GPU through the CUDA driver is one, and an engine can bring its own by a table of
/// callbacks (kvt_device_custom_t). A store or a streamer that is given a device accepts views of
/// its memory.
///
/// Life cycle: kvt_device_open, kvt_device_copy, kvt_device_wait or _poll, kvt_device_release of
/// the events, kvt_device_close after the stores that use it. Events are numbers, not handles.
///
///     kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
///     opts.kind = KVT_DEVICE_KIND_CUDA; /* loads the driver: KVT_E_UNAVAILABLE where there is none */
///     if (kvt_device_open(runtime, &opts, &device, &err) != KVT_OK) return fail(err);
///     kvt_device_memory_t memory = KVT_DEVICE_MEMORY_INIT;
///     if (kvt_device_alloc(device, 1u << 20, &memory, &err) != KVT_OK) return fail(err);
///     kvt_store_opts_t stored = KVT_STORE_OPTS_INIT; /* its transfers take views of device memory */
///     stored.device = device;
///     stored.spec = "store(host=8GiB, device=device(capacity=2GiB))";
///     stored.spec_bytes = KVT_NUL_TERMINATED;
///     if (kvt_store_open(runtime, NULL, &stored, &store, &err) != KVT_OK) return fail(err);
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_DEVICE_H
#define KVTIER_DEVICE_H

#include <kvtier/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_index_t; /* kvtier/sparse.h */
struct kvt_device_custom_t;

/* ---- Devices --------------------------------------------------------------------------------- */

/// Copies between an engine's tensors and the library's memory: with the processor, a GPU or code
/// of the engine. Several stores and streamers of the runtime may share a device.
typedef struct kvt_device_t kvt_device_t;

/// Kinds of devices.
typedef uint32_t kvt_device_kind_t;
enum {
    /// The processor copies; copies are complete when the call returns.
    KVT_DEVICE_KIND_HOST = 1,
    /// A GPU, through the CUDA driver, which is loaded when the device is opened.
    KVT_DEVICE_KIND_CUDA = 2,
    /// The engine copies, through the callbacks of kvt_device_custom_t.
    KVT_DEVICE_KIND_CUSTOM = 3,
    /// A simulated device for tests: copies take time, and targets hold garbage until their event has
    /// completed.
    KVT_DEVICE_KIND_SIMULATED = 4,
};

/// Properties of a device.
typedef uint64_t kvt_device_features_t;
enum {
    /// Work continues after a call has returned.
    KVT_DEVICE_ASYNCHRONOUS = 1,
    /// The device computes checksums of the planes that it copies (KVT_COPY_CHECKSUM).
    KVT_DEVICE_CHECKSUMS = 2,
    /// The device has memory that only it can access: KVT_MEMORY_DEVICE.
    KVT_DEVICE_HAS_MEMORY = 4,
    /// Copies of host memory that is not pinned are slow and block; see kvt_device_register_host.
    KVT_DEVICE_WANTS_PINNED = 8,
};

/// Flags of kvt_device_open.
typedef uint64_t kvt_device_flags_t;
enum {
    /// The device computes checksums of copied planes in its own memory, and stores compare them with
    /// the bytes on the host. A copy that differs is repeated once, then fails with KVT_E_CORRUPT.
    KVT_DEVICE_VERIFY = 1,
};

/// Options of kvt_device_open. Fields for other kinds of devices must be 0.
typedef struct kvt_device_opts_t {
    uint64_t struct_size;
    /// KVT_DEVICE_VERIFY or 0.
    kvt_device_flags_t flags;
    /// KVT_DEVICE_KIND_HOST, _CUDA, _CUSTOM or _SIMULATED.
    kvt_device_kind_t kind;
    /// CUDA: index of the device, unless `context` is given.
    uint32_t ordinal;
    /// CUDA: the engine's context (CUcontext), which must outlive the device; 0 = the primary
    /// context.
    uint64_t context;
    /// CUDA: at most 64 streams (CUstream) of the engine in `context`, no default streams; null =
    /// four of the device's own.
    const uint64_t *streams;
    uint64_t stream_count;
    /// CUDA: path of the driver's library; null = the system's.
    const char *library;
    uint64_t library_bytes;
    /// Custom: the engine's callbacks.
    const struct kvt_device_custom_t *custom;
    /// Simulated: bytes that can be allocated; 0 = no limit.
    uint64_t memory_bytes;
    /// Simulated: seed of all random choices.
    uint64_t seed;
    /// Simulated: least duration of a batch of copies; 0 = 10 us.
    uint64_t latency_ns;
    /// Simulated: bandwidth of a stream; 0 = 20 GB/s.
    uint64_t bytes_per_s;
    /// CUDA: device memory of the engine that stores, streamers and kvt_device_alloc allocate from;
    /// it must outlive the device. 0 = allocate from the driver.
    uint64_t arena;
    uint64_t arena_bytes;
    /// CUDA: ordinals of at most 63 other devices of the process. Copies may name memory of their
    /// primary contexts. Null = none.
    const uint32_t *peers;
    uint64_t peer_count;
    /// CUDA: path of cuFile's library, which KVT_STREAM_DIRECT loads; null = the system's.
    const char *cufile;
    uint64_t cufile_bytes;
} kvt_device_opts_t;
#define KVT_DEVICE_OPTS_INIT KVT_INIT_(kvt_device_opts_t)

/// Properties of a device.
typedef struct kvt_device_info_t {
    uint64_t struct_size;
    /// KVT_DEVICE_ASYNCHRONOUS, _CHECKSUMS, _HAS_MEMORY, _WANTS_PINNED.
    kvt_device_features_t flags;
    /// KVT_DEVICE_KIND_HOST, _CUDA, _CUSTOM or _SIMULATED.
    kvt_device_kind_t kind;
    /// Number of streams. Work runs in order within a stream, in any order across streams.
    uint32_t streams;
    /// Available kernels: a set of 1 << KVT_DEVICE_KERNEL_*.
    uint64_t kernels;
    /// Device memory that can still be allocated; UINT64_MAX = unknown.
    uint64_t free_bytes;
} kvt_device_info_t;
#define KVT_DEVICE_INFO_INIT KVT_INIT_(kvt_device_info_t)

/// Opens a device.
///
/// @param out  Close it with kvt_device_close.
/// @return KVT_E_UNAVAILABLE (CUDA: no driver, one that is too old or broken, or no such device;
///         the message says which), KVT_E_UNSUPPORTED (KVT_DEVICE_VERIFY without the checksum
///         kernel), KVT_E_LIMIT.
kvt_status_t kvt_device_open(const kvt_runtime_t *runtime, const kvt_device_opts_t *opts,
                             kvt_device_t **out, kvt_error_t **err);

/// Closes a device: rejects new work, signals the events of kvt_device_create_event, waits for work
/// in flight and for calls of other threads, and frees the device's memory.
///
/// @return KVT_E_BUSY (a store or streamer uses the device, which stays open; or work was in flight
///         at the deadline: the device stays closing, call again).
kvt_status_t kvt_device_close(kvt_device_t **device, uint64_t deadline_ns, kvt_error_t **err);

/// Reads the properties of a device.
kvt_status_t kvt_device_info(const kvt_device_t *device, kvt_device_info_t *out);

/// Describes a device for logs: its name, and how it copies.
///
/// @param out        Text, not NUL-terminated; may be null.
/// @param out_bytes  Length of the text; may be null.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_device_describe(const kvt_device_t *device, char *out, uint64_t out_capacity,
                                 uint64_t *out_bytes);

/* ---- Copies ---------------------------------------------------------------------------------- */

/// An allocation of device memory.
typedef struct kvt_device_memory_t {
    uint64_t struct_size;
    /// A multiple of 256.
    uint64_t address;
    uint64_t bytes;
    /// Id of the allocation, set by the library.
    uint64_t number;
    /// Address space of `address`.
    kvt_memory_t memory;
    uint32_t reserved;
} kvt_device_memory_t;
#define KVT_DEVICE_MEMORY_INIT KVT_INIT_(kvt_device_memory_t)

/// Directions of a copy.
typedef uint32_t kvt_copy_direction_t;
enum {
    /// From the view to the plane.
    KVT_COPY_GATHER = 0,
    /// From the plane to the view.
    KVT_COPY_SCATTER = 1,
};

/// Flags of a copy.
typedef uint64_t kvt_copy_flags_t;
enum {
    /// Compute a checksum; ignored without KVT_DEVICE_CHECKSUMS. An asynchronous device sums the side
    /// in its own memory: the source as read, or the target as written. If both sides are there, it
    /// sums the target.
    KVT_COPY_CHECKSUM = 1,
};

/// A copy between an engine's tensor and a plane, which holds the same tokens, heads and elements
/// without gaps.
typedef struct kvt_copy_t {
    /// KVT_COPY_CHECKSUM or 0.
    kvt_copy_flags_t flags;
    /// The engine's tensor; it must state its number of tokens.
    kvt_view_t view;
    /// tokens * heads * run_bytes bytes.
    void *plane;
    /// Address space of `plane`.
    kvt_memory_t plane_memory;
    /// KVT_COPY_GATHER or KVT_COPY_SCATTER.
    kvt_copy_direction_t direction;
    /// First token of the view to copy.
    uint32_t first_token;
    /// 0 = all from `first_token` on.
    uint32_t tokens;
    /// Receives the checksum (see kvt_checksum) that KVT_COPY_CHECKSUM requests from a synchronous
    /// device; an asynchronous one returns it from kvt_device_checksums.
    uint64_t sum;
} kvt_copy_t;

/// Allocates device memory with undefined content. Closing the device frees it.
///
/// @param bytes  At least 1.
/// @param out    Free it with kvt_device_free.
/// @return KVT_E_UNSUPPORTED (the device cannot allocate), KVT_E_UNAVAILABLE (the device is lost).
kvt_status_t kvt_device_alloc(const kvt_device_t *device, uint64_t bytes, kvt_device_memory_t *out,
                              kvt_error_t **err);

/// Frees device memory.
///
/// @param memory  As kvt_device_alloc wrote it.
/// @return KVT_E_BUSY (work in flight uses the memory, as far as the device can tell), KVT_E_HANDLE
///         (also: memory of another device, or freed before).
kvt_status_t kvt_device_free(const kvt_device_t *device, const kvt_device_memory_t *memory,
                             kvt_error_t **err);

/// Registers host memory that many copies will use, so that they run at full speed: CUDA pins it;
/// host and simulated devices do nothing. Memory that cannot be pinned is registered all the same:
/// its copies are slower and block in the call, and kvt_device_describe states how much that is.
/// The memory must stay mapped until it is unregistered.
///
/// @param address  Start of a page.
/// @return KVT_E_INVALID (also: overlaps registered memory), KVT_E_UNAVAILABLE, or the status of a
///         custom device's `register_host`.
kvt_status_t kvt_device_register_host(const kvt_device_t *device, void *address, uint64_t bytes,
                                      kvt_error_t **err);

/// Unregisters host memory, before it is unmapped and when no work in flight uses it.
///
/// @param address  As it was registered.
/// @return KVT_E_HANDLE (also: CUDA, not registered), KVT_E_UNAVAILABLE, or the status of a custom
///         device's `register_host`.
kvt_status_t kvt_device_unregister_host(const kvt_device_t *device, void *address,
                                        kvt_error_t **err);

/// Submits copies to a stream, after its earlier work and after an event. Until the event of the
/// batch has completed or failed, do not change sources, and do not access targets. CUDA blocks in
/// the call until earlier work has completed, if a copy is within host memory or uses host memory
/// that is not registered (kvt_device_register_host) or not pinned.
///
/// @param stream     0 to kvt_device_info_t.streams - 1.
/// @param after      An event of the device; 0 = none.
/// @param count      At most 65,536; 0 = only record an event.
/// @param out_event  Completes with the copies; release it with kvt_device_release.
/// @return KVT_E_LIMIT, KVT_E_UNSUPPORTED (memory that the device cannot access, or a checksum that
///         it cannot compute), KVT_E_AGAIN (65,536 events, or 256 batches with checksums, are not
///         released), KVT_E_STATE (the stream is being captured into a graph), KVT_E_UNAVAILABLE
///         (the device is lost), KVT_E_IO, or the status that `after` failed with.
kvt_status_t kvt_device_copy(const kvt_device_t *device, uint32_t stream, uint64_t after,
                             kvt_copy_t *copies, uint64_t count, uint64_t stride_bytes,
                             uint64_t *out_event, kvt_error_t **err);

/* ---- Events of devices ----------------------------------------------------------------------- */

/// Queries an event. Never waits for it, but may wait for a submission of another thread. After a
/// failure the content of the targets is undefined.
///
/// @return KVT_OK (completed), KVT_E_AGAIN (pending), KVT_E_HANDLE (also: an event of another
///         device, or released), or the status that its batch failed with.
kvt_status_t kvt_device_query(const kvt_device_t *device, uint64_t event);

/// Waits for an event.
///
/// @return KVT_E_TIMEOUT, or as kvt_device_query.
kvt_status_t kvt_device_wait(const kvt_device_t *device, uint64_t event, uint64_t deadline_ns,
                             kvt_error_t **err);

/// Reads the checksums that copies of a batch requested (KVT_COPY_CHECKSUM), in the order of the
/// copies. They are available from the completion of the event until its release. Compare them with
/// kvt_checksum of the bytes in host memory: a difference means that bytes changed on the bus.
///
/// @param device    Asynchronous, with KVT_DEVICE_CHECKSUMS.
/// @param sums      Receives at most `capacity` checksums; not null.
/// @param capacity  At most 65,536.
/// @return KVT_E_BUSY (the event is pending), KVT_E_UNSUPPORTED (the device computes no checksums),
///         KVT_E_LIMIT, or the status that the batch failed with.
kvt_status_t kvt_device_checksums(const kvt_device_t *device, uint64_t event, uint64_t *sums,
                                  uint64_t capacity, uint64_t *out_count, kvt_error_t **err);

/// Returns events that have completed or failed. Never waits for one. An asynchronous device
/// reports each event once, unless it is released before; a synchronous one reports none. Events of
/// stores and streamers that share the device are reported as well, and internal ones of a
/// kvt_device_copy that blocks in another thread.
///
/// @param events    Receives at most `capacity` events; not null.
/// @param capacity  At most 65,536.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_device_poll(const kvt_device_t *device, uint64_t *events, uint64_t capacity,
                             uint64_t *out_count);

/// Releases events that have completed or failed. Stops at the first error; the events before it
/// are released. A synchronous device keeps no events and accepts each of them repeatedly.
///
/// @param count  At most 65,536.
/// @return KVT_E_BUSY (an event is pending), KVT_E_HANDLE (also: an event of another device, or
///         released before), KVT_E_LIMIT.
kvt_status_t kvt_device_release(const kvt_device_t *device, const uint64_t *events, uint64_t count,
                                kvt_error_t **err);

/// Imports an event of the engine: creates a device event that completes with it. Work submitted
/// after the device event waits for the engine's kernels; no thread waits.
///
/// @param raw        CUDA: a CUevent that was recorded; it must stay valid until it has completed.
/// @param out_event  Release it with kvt_device_release.
/// @return KVT_E_UNSUPPORTED, KVT_E_HANDLE (also: `raw` is no event, or of another context),
///         KVT_E_AGAIN (65,536 events are not released), KVT_E_STATE (`raw` was recorded on a
///         stream that is being captured into a graph), KVT_E_UNAVAILABLE.
kvt_status_t kvt_device_import_event(const kvt_device_t *device, uint64_t raw, uint64_t *out_event,
                                     kvt_error_t **err);

/// Makes a stream of the engine wait for a device event. No thread waits.
///
/// @param raw_stream  CUDA: a CUstream of the device's context, not a default stream.
/// @return KVT_E_UNSUPPORTED, KVT_E_HANDLE (device, stream or event), KVT_E_STATE (the stream is
///         being captured into a graph), KVT_E_UNAVAILABLE, or the status that the event failed
///         with.
kvt_status_t kvt_device_stream_wait(const kvt_device_t *device, uint64_t raw_stream, uint64_t event,
                                    kvt_error_t **err);

/// Creates an event that completes when kvt_device_signal_event signals it, or when the device or
/// its runtime is closed. Batches, transfers and streams may wait for it before that. A
/// kvt_device_copy that blocks in the call (see there) waits for the event: signal it from another
/// thread then.
///
/// @param out_event  Signal it, then release it with kvt_device_release.
/// @return KVT_E_UNSUPPORTED (by the device or its driver), KVT_E_AGAIN (1,024 such events are not
///         released), KVT_E_UNAVAILABLE.
kvt_status_t kvt_device_create_event(const kvt_device_t *device, uint64_t *out_event,
                                     kvt_error_t **err);

/// Signals an event of kvt_device_create_event: work that waits for it proceeds. Signalling it
/// again does nothing.
///
/// @return KVT_E_HANDLE (also: no such event of this device, or released), or the status of a
///         custom device's `signal_event`.
kvt_status_t kvt_device_signal_event(const kvt_device_t *device, uint64_t event, kvt_error_t **err);

/// Makes a stream of the engine wait until an op, of any kind, is released, whether it succeeded or
/// not: query the op afterwards. The op need not have begun. No thread waits. Closing the device or
/// its runtime ends the wait.
///
/// CUDA waits for a number in memory (cuStreamWaitValue32), a dependency that the driver does not
/// know: the op's release must not depend on work that waits for this stream.
///
/// @param raw_stream  See kvt_device_stream_wait.
/// @return KVT_E_UNSUPPORTED, KVT_E_HANDLE (device, stream or op), KVT_E_STATE (the stream is being
///         captured into a graph), KVT_E_AGAIN (see kvt_device_create_event), KVT_E_UNAVAILABLE.
kvt_status_t kvt_device_stream_wait_op(const kvt_device_t *device, uint64_t raw_stream,
                                       const kvt_op_t *op, kvt_error_t **err);

/* ---- Kernels on devices ---------------------------------------------------------------------- */

/// Kernels of a device.
typedef uint32_t kvt_device_kernel_t;
enum {
    /// Copy runs of bytes, convert numbers to another type, compute checksums.
    KVT_DEVICE_KERNEL_MOVE = 1,
    KVT_DEVICE_KERNEL_CONVERT = 2,
    KVT_DEVICE_KERNEL_SUM = 3,
    /// Page selection: extend bounding boxes of pages, bound a query's scores of pages, choose the
    /// largest scores.
    KVT_DEVICE_KERNEL_PAGE_BOXES = 4,
    KVT_DEVICE_KERNEL_PAGE_SCORES = 5,
    KVT_DEVICE_KERNEL_TOP = 6,
    /// Token eviction: add attention weights to scores of tokens, choose the tokens to keep, compact
    /// their rows.
    KVT_DEVICE_KERNEL_ADD = 7,
    KVT_DEVICE_KERNEL_KEEP = 8,
    KVT_DEVICE_KERNEL_COMPACT = 9,
    /// Attention: estimate weights of columns and diagonals from the last queries; attention of a
    /// prompt over columns, diagonals or blocks; attention of few queries over chosen pages.
    KVT_DEVICE_KERNEL_ESTIMATE = 10,
    KVT_DEVICE_KERNEL_PREFILL = 11,
    KVT_DEVICE_KERNEL_DECODE = 12,
};

/// One kernel launch: the same 256 bytes for all kernels. Addresses are device addresses, strides
/// are in bytes, unused fields are 0. docs/internals/kernels.md lists the fields of each kernel.
typedef struct kvt_kernel_t {
    /// KVT_DEVICE_KERNEL_*.
    uint32_t kind;
    /// KVT_DTYPE_* of keys and values, or of the input.
    uint32_t dtype;
    /// KVT_DTYPE_* of queries and output, or of the output.
    uint32_t other_dtype;
    /// KVT_SCALES_*.
    uint32_t scaling;
    uint64_t queries;
    /// Keys, or the input.
    uint64_t keys;
    uint64_t values;
    /// The output.
    uint64_t out;
    /// Lists of positions, and the length of each list.
    uint64_t index;
    uint64_t counts;
    /// Page table, or list of ranges.
    uint64_t table;
    /// Numbers that are read or updated (boxes, scores, sums), and further ones.
    uint64_t numbers;
    uint64_t more;
    /// Scales of quantized numbers.
    uint64_t scales;
    uint64_t scratch;
    uint64_t scratch_bytes;
    /// Distances from an item to the next, and from a head of an item to the next.
    int64_t query_stride;
    int64_t query_head_stride;
    int64_t key_stride;
    int64_t key_head_stride;
    int64_t value_stride;
    int64_t value_head_stride;
    int64_t out_stride;
    int64_t out_head_stride;
    uint32_t query_count;
    uint32_t query_heads;
    uint32_t key_heads;
    /// Elements of a key head, and of a value head.
    uint32_t key_dim;
    uint32_t value_dim;
    /// Tokens of a page or block.
    uint32_t page_tokens;
    /// Tokens of the sequence.
    uint32_t tokens;
    /// First item to process, and number of items.
    uint32_t first;
    uint32_t count;
    /// Items to keep or choose; last and first items that are always kept.
    uint32_t keep;
    uint32_t recent;
    uint32_t sinks;
    /// Factor of the products of queries and keys.
    float scale;
    /// Flags of the kernel.
    uint32_t flags;
    uint64_t reserved[3];
} kvt_kernel_t;

/// Submits kernels to a stream, after its earlier work and after an event. They run in order. The
/// memory that they name belongs to the device until the event of the batch has completed or
/// failed.
///
/// @param stream     0 to kvt_device_info_t.streams - 1.
/// @param after      An event of the device; 0 = none.
/// @param count      At most 4,096.
/// @param out_event  Completes with the kernels; release it with kvt_device_release.
/// @return KVT_E_UNSUPPORTED (see kvt_device_info_t.kernels), KVT_E_UNAVAILABLE (also: a kernel
///         does not load), and as kvt_device_copy.
kvt_status_t kvt_device_launch(const kvt_device_t *device, uint32_t stream, uint64_t after,
                               const kvt_kernel_t *kernels, uint64_t count, uint64_t stride_bytes,
                               uint64_t *out_event, kvt_error_t **err);

/// Packs an index for KVT_DEVICE_KERNEL_PREFILL (heads, `starts` and `items` of kvt_index_t,
/// contiguous) and enters it in a kernel. The call validates the index; the kernel trusts it.
/// Afterwards copy the bytes to `address`, and set the kernel's `scratch`.
///
/// @param index    Keys that are visible; null, or without heads = all keys, 0 bytes.
/// @param kernel   Its query_count, query_heads, key_heads, tokens and first must be set. The call
///                 writes count, numbers, counts, index and scratch_bytes (the bytes needed).
/// @param address  Where the device will read the bytes; a multiple of 4, not 0.
/// @param to       Receives the bytes, at most `out_capacity`; may be null.
/// @return KVT_E_TOO_SMALL (`kernel` is not written), KVT_E_INVALID (also: an index that is not
///         valid), KVT_E_LIMIT.
kvt_status_t kvt_kernel_pack_index(const struct kvt_index_t *index, kvt_kernel_t *kernel,
                                   uint64_t address, void *to, uint64_t out_capacity,
                                   uint64_t *out_bytes, kvt_error_t **err);

/* ---- Custom devices: callbacks of the engine ------------------------------------------------- */

/// Rows of bytes to copy: `runs` runs of `run_bytes` bytes at constant strides. One side has no
/// gaps.
typedef struct kvt_copy_rows_t {
    /// Source and target of the first run.
    uint64_t from;
    uint64_t to;
    /// From a run to the next, in the source and in the target.
    uint64_t from_stride_bytes;
    uint64_t to_stride_bytes;
    uint64_t run_bytes;
    uint64_t runs;
    /// Address space of the source.
    kvt_memory_t from_memory;
    /// Address space of the target.
    kvt_memory_t to_memory;
} kvt_copy_rows_t;

/// Submits copies to a stream (0 to `streams` - 1, each in order), after the event `after` (0 =
/// none). Entries are `stride_bytes` apart. Writes the event that completes with them, a number of
/// the engine's choice, not 0. Without copies it only records an event. A batch whose `after` fails
/// must fail. A rejected batch must not have begun. KVT_E_UNAVAILABLE, from any callback, means
/// that the device is lost; afterwards the library only calls `release` and `free`.
typedef kvt_status_t (*kvt_device_submit_fn)(void *user_data, uint32_t stream, uint64_t after,
                                             const kvt_copy_rows_t *copies, uint64_t count,
                                             uint64_t stride_bytes, uint64_t *out_event);

/// Queries an event: KVT_OK (completed), KVT_E_AGAIN (pending), or the status that its batch failed
/// with; the batch must not access memory any more. If only the query failed, return KVT_E_AGAIN.
typedef kvt_status_t (*kvt_device_query_fn)(void *user_data, uint64_t event);

/// Waits for an event until a deadline. It may return early: the library queries the event
/// afterwards, and pauses before the next wait if this one was very short.
typedef kvt_status_t (*kvt_device_wait_fn)(void *user_data, uint64_t event, uint64_t deadline_ns);

/// Releases an event: the library uses it no more. Batches that have it as `after` may still wait
/// for it.
typedef void (*kvt_device_release_fn)(void *user_data, uint64_t event);

/// Allocates memory at a multiple of 256, not 0. KVT_E_NOMEM: not enough is free.
typedef kvt_status_t (*kvt_device_allocate_fn)(void *user_data, uint64_t bytes,
                                               uint64_t *out_address);

/// Frees memory.
typedef void (*kvt_device_free_fn)(void *user_data, uint64_t address, uint64_t bytes);

/// Writes the number of bytes that can still be allocated.
typedef kvt_status_t (*kvt_device_free_bytes_fn)(void *user_data, uint64_t *out_bytes);

/// Registers host memory that many copies will use; with `bytes` 0, unregisters it.
typedef kvt_status_t (*kvt_device_register_host_fn)(void *user_data, uint64_t address,
                                                    uint64_t bytes);

/// Imports an event; see kvt_device_import_event. `raw` stays the caller's.
typedef kvt_status_t (*kvt_device_import_event_fn)(void *user_data, uint64_t raw,
                                                   uint64_t *out_event);

/// Makes a stream wait for an event; see kvt_device_stream_wait. Not called for an event that is
/// known to have completed.
typedef kvt_status_t (*kvt_device_stream_wait_fn)(void *user_data, uint64_t raw_stream,
                                                  uint64_t event);

/// Creates an event that completes when `signal_event` is called with it.
typedef kvt_status_t (*kvt_device_create_event_fn)(void *user_data, uint64_t *out_event);

/// Signals an event of `create_event`; signalling it again does nothing. Must not wait. Called from
/// any thread, also from the one that releases an op.
typedef kvt_status_t (*kvt_device_signal_event_fn)(void *user_data, uint64_t event);

/// Submits kernels to a stream, as kvt_device_submit_fn does copies.
typedef kvt_status_t (*kvt_device_launch_fn)(void *user_data, uint32_t stream, uint64_t after,
                                             const kvt_kernel_t *kernels, uint64_t count,
                                             uint64_t stride_bytes, uint64_t *out_event);

/// A device that the engine implements; test it with kvt_device_conformance. `submit` and `query`
/// are required; the others may be null, and the device then lacks that feature. Set both or none
/// of `allocate` and `free`, `create_event` and `signal_event`, `kernels` and `launch`.
///
/// Threading: callbacks are called from any thread, several at once. They must not unwind, and must
/// not call this device. `release`, `allocate`, `free` and `free_bytes` may be called while the
/// library holds a lock: they must not call the library, nor wait for a thread that does.
typedef struct kvt_device_custom_t {
    uint64_t struct_size;
    /// KVT_DEVICE_HAS_MEMORY, KVT_DEVICE_WANTS_PINNED.
    kvt_device_features_t flags;
    /// 1 to 64. The upper half is for batches that wait for late events, so that they delay nothing
    /// else.
    uint32_t streams;
    uint32_t reserved;
    /// Kernels of `launch`: a set of 1 << KVT_DEVICE_KERNEL_*.
    uint64_t kernels;
    kvt_device_submit_fn submit;
    kvt_device_query_fn query;
    /// Null = the library polls with `query`.
    kvt_device_wait_fn wait;
    kvt_device_release_fn release;
    kvt_device_allocate_fn allocate;
    kvt_device_free_fn free;
    kvt_device_free_bytes_fn free_bytes;
    kvt_device_register_host_fn register_host;
    kvt_device_import_event_fn import_event;
    kvt_device_stream_wait_fn stream_wait;
    kvt_device_launch_fn launch;
    /// Passed to all callbacks; taken over only if the open succeeds.
    void *user_data;
    /// Releases user_data; may be null.
    kvt_destroy_fn destroy;
    /// Null = streams cannot wait for an op.
    kvt_device_create_event_fn create_event;
    kvt_device_signal_event_fn signal_event;
} kvt_device_custom_t;
#define KVT_DEVICE_CUSTOM_INIT KVT_INIT_(kvt_device_custom_t)

/* ---- Conformance of devices ------------------------------------------------------------------ */

/// Flags of kvt_device_conformance.
typedef uint64_t kvt_conformance_flags_t;
enum {
    /// Close the device at the end, and check that.
    KVT_CONFORMANCE_CLOSES = 1,
};

/// Results of a check. SKIPPED: it does not apply to the device, or an earlier failure prevents it.
typedef uint32_t kvt_verdict_t;
enum {
    KVT_VERDICT_PASSED = 0,
    KVT_VERDICT_SKIPPED = 1,
    KVT_VERDICT_FAILED = 2,
};

/// Options of kvt_device_conformance.
typedef struct kvt_conformance_opts_t {
    uint64_t struct_size;
    /// KVT_CONFORMANCE_CLOSES or 0.
    kvt_conformance_flags_t flags;
    /// Seed of all random choices.
    uint64_t seed;
    /// Time limit of an event; 0 = 30 s.
    uint64_t patience_ns;
    /// Random trials, at most 100,000; 0 = 40.
    uint32_t rounds;
    uint32_t reserved;
} kvt_conformance_opts_t;
#define KVT_CONFORMANCE_OPTS_INIT KVT_INIT_(kvt_conformance_opts_t)

/// Number of checks with each result.
typedef struct kvt_conformance_report_t {
    uint64_t struct_size;
    uint32_t passed;
    uint32_t skipped;
    uint32_t failed;
    uint32_t reserved;
} kvt_conformance_report_t;
#define KVT_CONFORMANCE_REPORT_INIT KVT_INIT_(kvt_conformance_report_t)

/// Receives the result of a check: its name, a KVT_VERDICT_*, and the reason (empty if it passed).
/// Texts are not NUL-terminated and valid during the call. Called on the calling thread. Must not
/// unwind.
typedef void (*kvt_conformance_fn)(void *user_data, const char *name, uint64_t name_bytes,
                                   kvt_verdict_t verdict, const char *why, uint64_t why_bytes);

/// Runs the conformance suite on a device: memory, copies of all sizes, layouts and address spaces,
/// order, events, deadlines, rejections, threads, and its kernels. Run it first on a custom device.
/// It uses at most a few hundred MiB; nothing else should use the device meanwhile.
///
/// @param report  Receives each result; may be null.
/// @return KVT_OK, also if checks failed (see `out`); KVT_E_LIMIT.
kvt_status_t kvt_device_conformance(const kvt_device_t *device, const kvt_conformance_opts_t *opts,
                                    kvt_conformance_fn report, void *user_data,
                                    kvt_conformance_report_t *out, kvt_error_t **err);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_DEVICE_H */
