/// @file
/// Budgets, accounts, buffers, and views of the engine's tensors.
///
/// A budget limits the bytes of each tier for all that share it; an account is one user's part of
/// it. Bytes are reserved before they are allocated, so that a limit is never exceeded. Buffers are
/// memory of the library's, pinned or on huge pages. A view describes one plane (K or V of one
/// layer) in the engine's own memory: contiguous, strided, or in pages.
///
/// Life cycle: kvt_budget_open, kvt_account_open, kvt_account_reserve, _commit, _release,
/// kvt_account_close, kvt_budget_close; kvt_buffer_alloc, kvt_buffer_address, kvt_buffer_free.
/// Views are plain values.
///
///     /* A paged KV cache: block b of 16 tokens at pages[b], 8 heads of 128 elements of 2 bytes. */
///     kvt_view_t view = {0};
///     view.pages = pages, view.page_count = page_count, view.page_tokens = 16;
///     view.heads = 8, view.run_bytes = 128 * 2;
///     /* Pinned memory for staging, charged to a budget of 1 GiB of host memory. */
///     kvt_budget_opts_t limits = KVT_BUDGET_OPTS_INIT;
///     limits.host_bytes = 1u << 30;
///     if (kvt_budget_open(runtime, &limits, &budget, &err) != KVT_OK) return fail(err);
///     if (kvt_account_open(budget, NULL, &account, &err) != KVT_OK) return fail(err);
///     kvt_buffer_opts_t opts = KVT_BUFFER_OPTS_INIT;
///     opts.bytes = 16u << 20, opts.flags = KVT_BUFFER_TRY_PIN, opts.account = account;
///     if (kvt_buffer_alloc(runtime, &opts, &buffer, &err) != KVT_OK) return fail(err);
///     use(&view);
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_MEMORY_H
#define KVTIER_MEMORY_H

#include <kvtier/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Budgets --------------------------------------------------------------------------------- */

/// Hard limits on the bytes in use, one for each tier.
typedef struct kvt_budget_t kvt_budget_t;

/// Tiers: device memory, host memory, local disk, remote stores, and locked host memory; a locked
/// buffer is charged in the last and in KVT_TIER_HOST. Functions of budgets and accounts take one
/// as `tier`.
typedef uint32_t kvt_tier_t;
enum {
    KVT_TIER_DEVICE = 0,
    KVT_TIER_HOST = 1,
    KVT_TIER_DISK = 2,
    KVT_TIER_REMOTE = 3,
    KVT_TIER_PINNED = 4,
};

/// Flags of a budget.
typedef uint64_t kvt_budget_flags_t;
enum {
    /// Fail with KVT_E_BUDGET if the host or pinned limit exceeds the available memory. Otherwise the
    /// limit is lowered to it.
    KVT_BUDGET_STRICT = 1,
    /// Take 0 in host_bytes, pinned_bytes or reserve_bytes as 0 bytes, not as the default.
    KVT_BUDGET_ZERO_HOST = 2,
    KVT_BUDGET_ZERO_PINNED = 4,
    KVT_BUDGET_ZERO_RESERVE = 8,
};

/// Options of a budget.
typedef struct kvt_budget_opts_t {
    uint64_t struct_size;
    kvt_budget_flags_t flags;
    /// Limit of the device tier; 0 = no bytes.
    uint64_t device_bytes;
    /// Limit of the host tier; 0 = half of what this process may still use, which is min(cgroup
    /// headroom, available memory) - reserve_bytes.
    uint64_t host_bytes;
    /// Limit of all disk tiers together. 0 = no limit for stores, no bytes for accounts of the
    /// caller.
    uint64_t disk_bytes;
    /// Limit of the remote tier; 0 = no bytes.
    uint64_t remote_bytes;
    /// Limit of locked memory; 0 = what this process may still lock. At most the host limit.
    uint64_t pinned_bytes;
    /// Memory left to the rest of the process; 0 = an eighth of min(cgroup headroom, available
    /// memory), at most 512 MiB.
    uint64_t reserve_bytes;
} kvt_budget_opts_t;
#define KVT_BUDGET_OPTS_INIT KVT_INIT_(kvt_budget_opts_t)

/// Memory of the machine, and limits of this process, as measured during the call.
typedef struct kvt_budget_report_t {
    uint64_t struct_size;
    /// RAM of the machine.
    uint64_t total_bytes;
    /// The kernel's estimate of the bytes available without swapping.
    uint64_t available_bytes;
    /// Lowest memory limit of the process's cgroup and its ancestors; UINT64_MAX = none.
    uint64_t cgroup_limit_bytes;
    /// Bytes still free below that limit; UINT64_MAX = no limit.
    uint64_t cgroup_headroom_bytes;
    /// min(cgroup_headroom_bytes, available_bytes).
    uint64_t effective_bytes;
    /// Bytes of those that the budget leaves to the rest of the process, fixed when it was opened.
    uint64_t reserve_bytes;
    /// Bytes that this process may lock in total; UINT64_MAX = unlimited.
    uint64_t lock_quota_bytes;
    /// Bytes that it has locked.
    uint64_t locked_bytes;
    /// Open accounts of the budget.
    uint64_t accounts;
    /// 1 or 2; 0 = no cgroup limit.
    uint32_t cgroup_version;
    uint32_t reserved;
} kvt_budget_report_t;
#define KVT_BUDGET_REPORT_INIT KVT_INIT_(kvt_budget_report_t)

/// Limit and counters of one tier of a budget.
typedef struct kvt_tier_report_t {
    uint64_t struct_size;
    /// Requested limit.
    uint64_t asked_bytes;
    /// Effective limit: the requested one, lowered to what the machine has.
    uint64_t limit_bytes;
    /// Reserved by accounts and not yet in use.
    uint64_t reserved_bytes;
    /// In use by accounts.
    uint64_t committed_bytes;
    /// Most bytes ever reserved and committed together.
    uint64_t peak_bytes;
    /// limit_bytes - reserved_bytes - committed_bytes, at least 0.
    uint64_t free_bytes;
    /// Reservations that failed at once.
    uint64_t refused;
    /// Reservations that wait.
    uint64_t waiting;
    /// Bytes that reclaim callbacks were asked for so far.
    uint64_t reclaim_requested_bytes;
} kvt_tier_report_t;
#define KVT_TIER_REPORT_INIT KVT_INIT_(kvt_tier_report_t)

/// Opens a budget, with limits from the memory that the machine has now.
///
/// @return KVT_E_BUDGET (with KVT_BUDGET_STRICT only).
kvt_status_t kvt_budget_open(const kvt_runtime_t *runtime, const kvt_budget_opts_t *opts,
                             kvt_budget_t **out, kvt_error_t **err);

/// Closes a budget. Waiting reservations end with KVT_E_CLOSED and new ones are refused. Its
/// accounts stay valid and can still release bytes until they are closed.
kvt_status_t kvt_budget_close(kvt_budget_t **budget, kvt_error_t **err);

/// Sets the limit of a tier. Below the bytes in use, reservations are granted again only after
/// owners, whose reclaim callbacks are called, have released enough.
///
/// @param bytes  New limit; host and pinned limits are lowered to what the machine has.
kvt_status_t kvt_budget_resize(const kvt_budget_t *budget, kvt_tier_t tier, uint64_t bytes,
                               kvt_error_t **err);

/// Measures the memory that this process may use. Reads files in /proc and /sys: not for a hot
/// path.
kvt_status_t kvt_budget_report(const kvt_budget_t *budget, kvt_budget_report_t *out);

/// Reads the limit and counters of one tier.
kvt_status_t kvt_budget_tier(const kvt_budget_t *budget, kvt_tier_t tier, kvt_tier_report_t *out);

/* ---- Accounts -------------------------------------------------------------------------------- */

/// One owner's part of a budget: the bytes that it has reserved and committed.
typedef struct kvt_account_t kvt_account_t;

/// Asks an owner to release up to `bytes` of a tier. Returns the bytes that it promises to release,
/// 0 if none. The release may follow later, from any thread. A promise counts until `deadline_ns`
/// (0 = none). Called on the notifier thread, with no lock held; it must not unwind and must not
/// wait.
typedef uint64_t (*kvt_reclaim_fn)(void *user_data, kvt_tier_t tier, uint64_t bytes,
                                   uint64_t deadline_ns);

/// Options of an account.
typedef struct kvt_account_opts_t {
    uint64_t struct_size;
    /// 0: no flags are defined.
    uint64_t flags;
    /// Name in messages, at most 64 bytes; null = none.
    const char *name;
    uint64_t name_bytes;
    /// -2^31 to 2^31 - 1. Owners of low priority are asked to release bytes first.
    int64_t priority;
    /// Called when other owners need bytes; null = never.
    kvt_reclaim_fn reclaim;
    /// Passed to reclaim, and to destroy at the end; taken over only on success.
    void *user_data;
    /// May be null.
    kvt_destroy_fn destroy;
} kvt_account_opts_t;
#define KVT_ACCOUNT_OPTS_INIT KVT_INIT_(kvt_account_opts_t)

/// Opens an account in a budget.
///
/// @return KVT_E_LIMIT (1024 accounts of the budget are open, or the name is too long).
kvt_status_t kvt_account_open(const kvt_budget_t *budget, const kvt_account_opts_t *opts,
                              kvt_account_t **out, kvt_error_t **err);

/// Reserves bytes at once, or fails. Does not overtake reservations that wait.
///
/// @return KVT_E_BUDGET (the bytes do not fit, or reservations wait).
kvt_status_t kvt_account_reserve(const kvt_account_t *account, kvt_tier_t tier, uint64_t bytes,
                                 kvt_error_t **err);

/// Reserves bytes as soon as they are free. Reservations of a tier are granted in their order,
/// while the reclaim callbacks of owners are called. The op ends with KVT_OK when the bytes are
/// reserved, with KVT_E_BUDGET when a new limit makes that impossible.
///
/// @param out  May be null if opts names a queue.
/// @return KVT_E_BUDGET (more than the limit of the tier), KVT_E_AGAIN (4096 reservations of the
///         budget wait, or the queue or the runtime is full), KVT_E_LIMIT.
kvt_status_t kvt_account_reserve_later(const kvt_account_t *account, kvt_tier_t tier,
                                       uint64_t bytes, const kvt_submit_opts_t *opts,
                                       kvt_op_t **out, kvt_error_t **err);

/// Commits reserved bytes: used_bytes are in use from now on, the rest of reserved_bytes is free
/// again.
///
/// @param reserved_bytes  At most what the account has reserved in the tier.
/// @param used_bytes      At most reserved_bytes; 0 ends the reservation.
kvt_status_t kvt_account_commit(const kvt_account_t *account, kvt_tier_t tier,
                                uint64_t reserved_bytes, uint64_t used_bytes, kvt_error_t **err);

/// Releases bytes in use.
///
/// @param bytes  At most what the account has committed in the tier.
kvt_status_t kvt_account_release(const kvt_account_t *account, kvt_tier_t tier, uint64_t bytes,
                                 kvt_error_t **err);

/// Reads the bytes of a tier that an account holds.
///
/// @param out_reserved_bytes  Reserved and not yet in use; may be null.
/// @param out_used_bytes      Committed; may be null.
kvt_status_t kvt_account_held(const kvt_account_t *account, kvt_tier_t tier,
                              uint64_t *out_reserved_bytes, uint64_t *out_used_bytes);

/// Closes an account that has released all its bytes. Waits for a running call of its reclaim
/// callback, except inside a callback.
///
/// @return KVT_E_BUSY (the account holds bytes, a reservation waits, or, inside a callback, its
///         reclaim callback is running).
kvt_status_t kvt_account_close(kvt_account_t **account, kvt_error_t **err);

/* ---- Buffers --------------------------------------------------------------------------------- */

/// A range of host memory that ops read and write. Its bytes belong to the library from the
/// submission of such an op until the release of that op, otherwise to the caller.
typedef struct kvt_buffer_t kvt_buffer_t;

/// Flags of a buffer.
typedef uint64_t kvt_buffer_flags_t;
enum {
    /// Lock the memory in RAM, or fail.
    KVT_BUFFER_PIN = 1,
    /// Lock the memory in RAM if the lock quota and the account allow it.
    KVT_BUFFER_TRY_PIN = 2,
    /// Use reserved huge pages of 2 MiB, or fail.
    KVT_BUFFER_HUGETLB = 4,
    /// Ask the kernel for transparent huge pages.
    KVT_BUFFER_TRY_HUGE = 8,
    /// Make all pages present before the call returns, in parallel on the workers. Not in a callback.
    KVT_BUFFER_PREFAULT = 16,
};

/// Kinds of pages: normal, transparent huge pages (the kernel was asked for them), reserved huge
/// pages, the caller's memory.
typedef uint32_t kvt_pages_t;
enum {
    KVT_PAGES_NORMAL = 0,
    KVT_PAGES_TRANSPARENT = 1,
    KVT_PAGES_HUGETLB = 2,
    KVT_PAGES_FOREIGN = 3,
};

/// Options of kvt_buffer_alloc.
typedef struct kvt_buffer_opts_t {
    uint64_t struct_size;
    kvt_buffer_flags_t flags;
    /// 1 to 2^46.
    uint64_t bytes;
    /// A power of two up to 1 GiB, with KVT_BUFFER_HUGETLB up to 2 MiB; 0 = one page.
    uint64_t align_bytes;
    /// Charged in KVT_TIER_HOST and, for locked memory, KVT_TIER_PINNED; null = no account.
    const kvt_account_t *account;
} kvt_buffer_opts_t;
#define KVT_BUFFER_OPTS_INIT KVT_INIT_(kvt_buffer_opts_t)

/// Properties of a buffer.
typedef struct kvt_buffer_info_t {
    uint64_t struct_size;
    void *address;
    /// Usable size.
    uint64_t bytes;
    /// Charged to its account: the size in whole pages; 0 for the caller's memory.
    uint64_t charged_bytes;
    /// Uses by ops that are not released, one for each item that reads or writes the buffer.
    uint64_t in_flight;
    /// 1 = locked in RAM.
    uint32_t pinned;
    kvt_pages_t pages;
} kvt_buffer_info_t;
#define KVT_BUFFER_INFO_INIT KVT_INIT_(kvt_buffer_info_t)

/// Allocates a buffer. Forked children do not inherit its memory.
///
/// @param opts  Its `bytes` must be set.
/// @return KVT_E_IO, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_PIN_QUOTA, KVT_E_UNAVAILABLE (too few
///         reserved huge pages are free); with KVT_BUFFER_PREFAULT also KVT_E_AGAIN and
///         KVT_E_CANCELLED (the runtime closes).
kvt_status_t kvt_buffer_alloc(const kvt_runtime_t *runtime, const kvt_buffer_opts_t *opts,
                              kvt_buffer_t **out, kvt_error_t **err);

/// Makes a buffer of memory that belongs to the caller. It must stay valid until the buffer is
/// freed.
///
/// @param size       1 to 2^46 bytes.
/// @param user_data  Passed to destroy; taken over only on success.
/// @param destroy    Called once, when the buffer is freed and no op uses it; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_buffer_wrap(const kvt_runtime_t *runtime, void *address, uint64_t size,
                             void *user_data, kvt_destroy_fn destroy, kvt_buffer_t **out,
                             kvt_error_t **err);

/// Frees a buffer.
///
/// @return KVT_E_BUSY (an op uses it).
kvt_status_t kvt_buffer_free(kvt_buffer_t **buffer);

/// Reads the address and the usable size of a buffer. Both hold until it is freed.
///
/// @param out_address  May be null.
/// @param out_bytes    May be null.
kvt_status_t kvt_buffer_address(const kvt_buffer_t *buffer, void **out_address,
                                uint64_t *out_bytes);

/// Reads the properties of a buffer.
kvt_status_t kvt_buffer_info(const kvt_buffer_t *buffer, kvt_buffer_info_t *out);

/* ---- Work on host memory --------------------------------------------------------------------- */

/// Work of an item: one or more bits.
typedef uint32_t kvt_item_work_t;
enum {
    /// Copy the source to the target; the ranges may overlap.
    KVT_ITEM_COPY = 1,
    /// Report the checksum of the source, as it was read, as the value of the item.
    KVT_ITEM_CHECKSUM = 2,
    /// Compare that checksum with `expect`; KVT_E_CORRUPT if they differ. A copy by the same item is
    /// made all the same.
    KVT_ITEM_VERIFY = 4,
    /// Make the target's pages present and keep their contents. Not combined with other bits.
    KVT_ITEM_PREFAULT = 8,
};

/// One item of kvt_buffer_submit: work on up to two buffers.
typedef struct kvt_buffer_item_t {
    kvt_item_work_t kind;
    /// 0: no flags are defined.
    uint32_t flags;
    /// Target; null unless `kind` has KVT_ITEM_COPY or KVT_ITEM_PREFAULT.
    const kvt_buffer_t *dst;
    uint64_t dst_offset;
    /// Source; null with KVT_ITEM_PREFAULT.
    const kvt_buffer_t *src;
    uint64_t src_offset;
    uint64_t bytes;
    /// Expected checksum, with KVT_ITEM_VERIFY.
    uint64_t expect;
    /// Tag of the item's op, with KVT_SUBMIT_EACH.
    uint64_t tag;
} kvt_buffer_item_t;

/// Submits work on buffers: all items or none, as one op or, with KVT_SUBMIT_EACH, as one op each.
/// Never waits. Items of an op run in any order and in parallel, so an item must not write what
/// another one reads or writes.
///
/// @param count    1 to 65536.
/// @param out_ops  Receives one op, or `count` ops with KVT_SUBMIT_EACH; may be null if opts names
///                 a queue.
/// @return KVT_E_AGAIN (the queue or the runtime is full), KVT_E_LIMIT.
kvt_status_t kvt_buffer_submit(const kvt_runtime_t *runtime, const kvt_submit_opts_t *opts,
                               const kvt_buffer_item_t *items, uint64_t count,
                               uint64_t stride_bytes, kvt_op_t **out_ops, kvt_error_t **err);

/// Computes the checksum of bytes as ops do: XXH3-64 (seed 0) of every 4096-byte block, the last
/// one as short as it is, then XXH3-64 of these sums as little-endian numbers.
///
/// @param data  May be null if size is 0.
kvt_status_t kvt_checksum(const void *data, uint64_t size, uint64_t *out_value);

/* ---- Views of tensors ------------------------------------------------------------------------ */

/// Element types. BYTES: opaque to the library. F32, F16: IEEE 754. BF16: the upper half of an F32.
/// F8_E4M3, F8_E5M2: 8 bits with 4 or 5 of exponent. I8: signed. I4: 4 bits, two to a byte.
typedef uint32_t kvt_dtype_t;
enum {
    KVT_DTYPE_BYTES = 0,
    KVT_DTYPE_F32 = 1,
    KVT_DTYPE_F16 = 2,
    KVT_DTYPE_BF16 = 3,
    KVT_DTYPE_F8_E4M3 = 4,
    KVT_DTYPE_F8_E5M2 = 5,
    KVT_DTYPE_I8 = 6,
    KVT_DTYPE_I4 = 7,
};

/// Address spaces.
typedef uint32_t kvt_memory_t;
enum {
    /// Memory that the processor can access.
    KVT_MEMORY_HOST = 0,
    /// Memory that only the device can access.
    KVT_MEMORY_DEVICE = 1,
};

/// One plane (K or V) of one layer in the engine's memory, from the first token of a transfer on.
/// The bytes of one head of a token are contiguous; tokens and heads have constant strides. The
/// tokens are at one address or in pages. All zero = no such plane. Stands in arrays and in other
/// structs.
typedef struct kvt_view_t {
    /// Address of the first token; null with pages.
    void *address;
    /// Address of each page; null with an address.
    void *const *pages;
    /// At most 2^24.
    uint64_t page_count;
    /// Added to the address of each page: one page table serves K, V and all layers.
    int64_t shift_bytes;
    /// Tokens of a page.
    uint32_t page_tokens;
    /// Tokens of the view (chunks, for a layer with a state); 0 = as many as the transfer has or,
    /// with pages, as the pages hold. With an address it must be set where no transfer gives a
    /// number: in kvt_rows_t, in kvt_copy_t, and for a transfer to the end of a session.
    uint32_t tokens;
    /// Heads of a token; 0 = 1.
    uint32_t heads;
    kvt_memory_t memory;
    /// Bytes of one head of a token; heads * run_bytes must be what the layout says.
    uint64_t run_bytes;
    /// Bytes from a token to the next; 0 = heads * run_bytes.
    uint64_t token_stride_bytes;
    /// Bytes from a head to the next; 0 = run_bytes.
    uint64_t head_stride_bytes;
} kvt_view_t;

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_MEMORY_H */
