/// @file
/// kvt::budget, kvt::account, kvt::buffer, and views of the engine's tensors.
///
/// A budget limits the bytes of each tier for all that share it; an account is one user's part of it.
/// Buffers are memory of the library, pinned or on huge pages. A view describes one plane (K or V of one
/// layer) in the engine's own memory: kvt::view() makes one of contiguous tokens or of pages.
///
/// Life cycle: runtime::open_budget, budget::open_account, account::reserve, commit, release_bytes;
/// runtime::alloc, buffer::bytes. Destructors close and free. Views are plain values.
///
///     // A paged KV cache: block b of 16 tokens at pages[b], 8 heads of 128 elements of 2 bytes.
///     const kvt_view_t view = kvt::view(pages, 16, 128 * 2, 8);
///     // Pinned memory for staging, charged to a budget of 1 GiB of host memory.
///     kvt::budget_opts limits;
///     limits.host_bytes = 1u << 30;
///     const kvt::budget budget = runtime.open_budget(limits);
///     const kvt::account account = budget.open_account();
///     kvt::buffer_opts opts;
///     opts.bytes = 16u << 20;
///     opts.try_pin = true;
///     opts.account = &account;
///     const kvt::buffer staging = runtime.alloc(opts);
///     use(staging.bytes(), view);

#ifndef KVTIER_MEMORY_HPP
#define KVTIER_MEMORY_HPP

#include <kvtier/memory.h>
#include <kvtier/runtime.hpp>

namespace kvt {
inline namespace KVTIER_ERRORS_ {

// --- budgets and accounts ----------------------------------------------------

/// Releases bytes of a tier for another owner. Returns the bytes that it promises to release by
/// `by`. An exception counts as 0.
using reclaim_fn = std::function<std::uint64_t(kvt_tier_t, std::uint64_t bytes, deadline by)>;

// [kvt_account_opts_t: by generate.py]
/// Options of an account.
struct account_opts {
    /// Name in messages, at most 64 bytes; empty = none.
    std::string_view name{};
    /// -2^31 to 2^31 - 1. Owners of low priority are asked to release bytes first.
    std::int64_t priority = 0;
    /// Called when other owners need bytes; empty = never.
    reclaim_fn reclaim{};

    kvt_account_opts_t to_c() const noexcept {
        kvt_account_opts_t c = KVT_ACCOUNT_OPTS_INIT;
        detail::text(name, c.name, c.name_bytes);
        c.priority = priority;
        return c;
    }
};
// [end]

/// One owner's part of a budget. Release all bytes before it is destroyed: an account that holds
/// bytes cannot be closed. It is then reported to the defect hook and leaked.
class account : public detail::owner<account, kvt_account_t> {
    friend class detail::owner<account, kvt_account_t>;
    static void drop(kvt_account_t *raw) noexcept {
        const kvt_status_t status = kvt_account_close(&raw, nullptr);
        if (!detail::ended(status)) detail::report("kvt::account", status);
    }

public:
    struct holding {
        std::uint64_t reserved_bytes = 0;
        std::uint64_t used_bytes = 0;
    };

    ret<void> close() {
        detail::failure f;
        const kvt_status_t status = kvt_account_close(&raw_, f.out());
        return detail::check(status, f);
    }
    ret<void> reserve(kvt_tier_t tier, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status = kvt_account_reserve(raw_, tier, bytes, f.out());
        return detail::check(status, f);
    }
    /// Returns false if reserve() would fail with KVT_E_BUDGET. Formats no message.
    ret<bool> try_reserve(kvt_tier_t tier, std::uint64_t bytes) const {
        const kvt_status_t status = kvt_account_reserve(raw_, tier, bytes, nullptr);
        return detail::give(status == KVT_E_BUDGET ? KVT_OK : status, status == KVT_OK);
    }
    /// Reserves bytes as soon as they are free; owners' reclaim callbacks are called meanwhile. The
    /// op ends with KVT_OK when the bytes are reserved.
    ret<op> reserve_later(kvt_tier_t tier, std::uint64_t bytes,
                          const submit_opts &opts = {}) const {
        detail::failure f;
        const kvt_submit_opts_t c = opts.to_c();
        kvt_op_t *raw = nullptr;
        const kvt_status_t status =
            kvt_account_reserve_later(raw_, tier, bytes, &c, &raw, f.out());
        return detail::give(status, f, op::adopt(raw));
    }
    ret<void> commit(kvt_tier_t tier, std::uint64_t reserved_bytes,
                     std::uint64_t used_bytes) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_account_commit(raw_, tier, reserved_bytes, used_bytes, f.out());
        return detail::check(status, f);
    }
    ret<void> release_bytes(kvt_tier_t tier, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status = kvt_account_release(raw_, tier, bytes, f.out());
        return detail::check(status, f);
    }
    ret<holding> held(kvt_tier_t tier) const {
        holding h;
        const kvt_status_t status =
            kvt_account_held(raw_, tier, &h.reserved_bytes, &h.used_bytes);
        return detail::give(status, h);
    }
};

// [kvt_budget_opts_t: by generate.py]
/// Options of a budget.
struct budget_opts {
    /// Fail with KVT_E_BUDGET if the host or pinned limit exceeds the available memory. Otherwise
    /// the limit is lowered to it.
    bool strict = false;
    /// Limit of the device tier; 0 = no bytes.
    std::uint64_t device_bytes = 0;
    /// Limit of the host tier; absent = half of what this process may still use, which is
    /// min(cgroup headroom, available memory) - reserve_bytes.
    std::optional<std::uint64_t> host_bytes{};
    /// Limit of all disk tiers together. 0 = no limit for stores, no bytes for accounts of the
    /// caller.
    std::uint64_t disk_bytes = 0;
    /// Limit of the remote tier; 0 = no bytes.
    std::uint64_t remote_bytes = 0;
    /// Limit of locked memory; absent = what this process may still lock. At most the host limit.
    std::optional<std::uint64_t> pinned_bytes{};
    /// Memory left to the rest of the process; absent = an eighth of min(cgroup headroom, available
    /// memory), at most 512 MiB.
    std::optional<std::uint64_t> reserve_bytes{};

    kvt_budget_opts_t to_c() const noexcept {
        kvt_budget_opts_t c = KVT_BUDGET_OPTS_INIT;
        if (strict) c.flags |= KVT_BUDGET_STRICT;
        c.device_bytes = device_bytes;
        if (host_bytes) c.flags |= KVT_BUDGET_ZERO_HOST;
        c.host_bytes = host_bytes.value_or(0);
        c.disk_bytes = disk_bytes;
        c.remote_bytes = remote_bytes;
        if (pinned_bytes) c.flags |= KVT_BUDGET_ZERO_PINNED;
        c.pinned_bytes = pinned_bytes.value_or(0);
        if (reserve_bytes) c.flags |= KVT_BUDGET_ZERO_RESERVE;
        c.reserve_bytes = reserve_bytes.value_or(0);
        return c;
    }
};
// [end]

/// Hard limits on the bytes in use, one for each tier.
class budget : public detail::owner<budget, kvt_budget_t> {
    friend class detail::owner<budget, kvt_budget_t>;
    static void drop(kvt_budget_t *raw) noexcept {
        const kvt_status_t status = kvt_budget_close(&raw, nullptr);
        if (!detail::ended(status)) detail::report("kvt::budget", status);
    }

public:
    ret<void> close() {
        detail::failure f;
        const kvt_status_t status = kvt_budget_close(&raw_, f.out());
        return detail::check(status, f);
    }
    ret<void> resize(kvt_tier_t tier, std::uint64_t bytes) const {
        detail::failure f;
        const kvt_status_t status =
            kvt_budget_resize(raw_, tier, bytes, f.out());
        return detail::check(status, f);
    }
    ret<kvt_budget_report_t> report() const {
        kvt_budget_report_t report = KVT_BUDGET_REPORT_INIT;
        const kvt_status_t status = kvt_budget_report(raw_, &report);
        return detail::give(status, report);
    }
    ret<kvt_tier_report_t> tier_report(kvt_tier_t tier) const {
        kvt_tier_report_t report = KVT_TIER_REPORT_INIT;
        const kvt_status_t status =
            kvt_budget_tier(raw_, tier, &report);
        return detail::give(status, report);
    }
    ret<account> open_account(account_opts opts = {}) const {
        struct box {
            reclaim_fn call;
            static std::uint64_t reclaim(void *user_data, kvt_tier_t tier, std::uint64_t bytes,
                                         std::uint64_t deadline_ns) noexcept {
                return detail::guarded<std::uint64_t>(
                    "kvt reclaimer", 0, static_cast<box *>(user_data)->call, tier, bytes,
                    deadline(deadline_ns));
            }
        };
        detail::failure f;
        kvt_account_opts_t c = opts.to_c();
        std::unique_ptr<box> boxed = detail::boxed<box>(opts.reclaim);
        if (boxed) c.reclaim = &box::reclaim;
        detail::pass(boxed, c);
        kvt_account_t *raw = nullptr;
        const kvt_status_t status = kvt_account_open(raw_, &c, &raw, f.out());
        if (status == KVT_OK) (void)boxed.release();
        return detail::give(status, f, account::adopt(raw));
    }
};

// --- buffers -----------------------------------------------------------------

// [kvt_buffer_opts_t: by generate.py]
/// Options of kvt_buffer_alloc.
struct buffer_opts {
    /// Lock the memory in RAM, or fail.
    bool pin = false;
    /// Lock the memory in RAM if the lock quota and the account allow it.
    bool try_pin = false;
    /// Use reserved huge pages of 2 MiB, or fail.
    bool hugetlb = false;
    /// Ask the kernel for transparent huge pages.
    bool try_huge = false;
    /// Make all pages present before the call returns, in parallel on the workers. Not in a
    /// callback.
    bool prefault = false;
    /// 1 to 2^46.
    std::uint64_t bytes = 0;
    /// A power of two up to 1 GiB, with `hugetlb` up to 2 MiB; 0 = one page.
    std::uint64_t align_bytes = 0;
    /// Charged in KVT_TIER_HOST and, for locked memory, KVT_TIER_PINNED; null = no account.
    ref<kvt_account_t> account{};

    kvt_buffer_opts_t to_c() const noexcept {
        kvt_buffer_opts_t c = KVT_BUFFER_OPTS_INIT;
        if (pin) c.flags |= KVT_BUFFER_PIN;
        if (try_pin) c.flags |= KVT_BUFFER_TRY_PIN;
        if (hugetlb) c.flags |= KVT_BUFFER_HUGETLB;
        if (try_huge) c.flags |= KVT_BUFFER_TRY_HUGE;
        if (prefault) c.flags |= KVT_BUFFER_PREFAULT;
        c.bytes = bytes;
        c.align_bytes = align_bytes;
        c.account = account.get();
        return c;
    }
};
// [end]

/// A range of host memory that ops may read and write.
class buffer : public detail::owner<buffer, kvt_buffer_t> {
    friend class detail::owner<buffer, kvt_buffer_t>;
    static void drop(kvt_buffer_t *raw) noexcept {
        kvt_status_t status = kvt_buffer_free(&raw);
        // Ops on the buffer end by themselves, but there is no handle to wait for: poll. A buffer
        // that stays in use is leaked, because freeing it would be unsafe.
        if (status == KVT_E_BUSY)
            (void)detail::poll_until(
                [&] { return (status = kvt_buffer_free(&raw)) != KVT_E_BUSY; });
        if (!detail::ended(status)) detail::report("kvt::buffer", status);
    }

public:
    ret<kvt_buffer_info_t> info() const {
        kvt_buffer_info_t info = KVT_BUFFER_INFO_INIT;
        const kvt_status_t status = kvt_buffer_info(raw_, &info);
        return detail::give(status, info);
    }
    /// The memory; empty for an empty owner. Do not touch it from the submission of an op that uses
    /// it until the op's release.
    span<std::byte> bytes() const noexcept {
        void *address = nullptr;
        std::uint64_t size = 0;
        if (kvt_buffer_address(raw_, &address, &size) != KVT_OK) return span<std::byte>();
        return span<std::byte>(static_cast<std::byte *>(address), static_cast<std::size_t>(size));
    }
    /// The memory as elements of a trivial type, without an incomplete last element.
    template <class T> span<T> as() const noexcept {
        static_assert(std::is_trivially_copyable_v<T>, "a buffer holds plain data");
        const span<std::byte> b = bytes();
        return span<T>(static_cast<T *>(static_cast<void *>(b.data())), b.size() / sizeof(T));
    }
    std::byte *data() const noexcept { return bytes().data(); }
    std::size_t size() const noexcept { return bytes().size(); }
};

/// Items for runtime::submit.
namespace item {
inline kvt_buffer_item_t copy(const buffer &dst, std::uint64_t dst_offset, const buffer &src,
                              std::uint64_t src_offset, std::uint64_t bytes) noexcept {
    kvt_buffer_item_t i = kvt_buffer_item_t();
    i.kind = KVT_ITEM_COPY;
    i.dst = dst.get();
    i.dst_offset = dst_offset;
    i.src = src.get();
    i.src_offset = src_offset;
    i.bytes = bytes;
    return i;
}
inline kvt_buffer_item_t checksum(const buffer &src, std::uint64_t offset,
                                  std::uint64_t bytes) noexcept {
    kvt_buffer_item_t i = kvt_buffer_item_t();
    i.kind = KVT_ITEM_CHECKSUM;
    i.src = src.get();
    i.src_offset = offset;
    i.bytes = bytes;
    return i;
}
inline kvt_buffer_item_t verify(const buffer &src, std::uint64_t offset, std::uint64_t bytes,
                                std::uint64_t expect) noexcept {
    kvt_buffer_item_t i = checksum(src, offset, bytes);
    i.kind = KVT_ITEM_VERIFY;
    i.expect = expect;
    return i;
}
inline kvt_buffer_item_t prefault(const buffer &dst, std::uint64_t offset,
                                  std::uint64_t bytes) noexcept {
    kvt_buffer_item_t i = kvt_buffer_item_t();
    i.kind = KVT_ITEM_PREFAULT;
    i.dst = dst.get();
    i.dst_offset = offset;
    i.bytes = bytes;
    return i;
}
}  // namespace item

inline ret<std::uint64_t> checksum(span<const std::byte> data) {
    std::uint64_t value = 0;
    const kvt_status_t status = kvt_checksum(data.data(), data.size(), &value);
    return detail::give(status, value);
}

// --- views -------------------------------------------------------------------

/// A view of tokens without gaps. Change the fields that differ.
inline kvt_view_t view(void *address, std::uint64_t run_bytes, std::uint32_t heads = 1,
                       std::uint32_t tokens = 0) noexcept {
    kvt_view_t v{};
    v.address = address;
    v.run_bytes = run_bytes;
    v.heads = heads;
    v.tokens = tokens;
    return v;
}
/// A view of tokens in pages.
inline kvt_view_t view(span<void *const> pages, std::uint32_t page_tokens, std::uint64_t run_bytes,
                       std::uint32_t heads = 1) noexcept {
    kvt_view_t v = view(nullptr, run_bytes, heads);
    v.pages = pages.data();
    v.page_count = pages.size();
    v.page_tokens = page_tokens;
    return v;
}

// --- methods of runtime ------------------------------------------------------

inline ret<budget> runtime::open_budget(const budget_opts &opts) const {
    detail::failure f;
    const kvt_budget_opts_t c = opts.to_c();
    kvt_budget_t *raw = nullptr;
    const kvt_status_t status = kvt_budget_open(raw_, &c, &raw, f.out());
    return detail::give(status, f, budget::adopt(raw));
}
inline ret<budget> runtime::open_budget() const { return open_budget(budget_opts()); }

inline ret<buffer> runtime::alloc(const buffer_opts &opts) const {
    detail::failure f;
    const kvt_buffer_opts_t c = opts.to_c();
    kvt_buffer_t *raw = nullptr;
    const kvt_status_t status = kvt_buffer_alloc(raw_, &c, &raw, f.out());
    return detail::give(status, f, buffer::adopt(raw));
}
inline ret<buffer> runtime::alloc(std::uint64_t bytes) const {
    buffer_opts opts;
    opts.bytes = bytes;
    return alloc(opts);
}
inline ret<buffer> runtime::wrap(span<std::byte> memory, std::function<void()> on_free) const {
    struct box {
        std::function<void()> call;
        static void destroy(void *user_data) noexcept {
            std::unique_ptr<box> self(static_cast<box *>(user_data));
            detail::guarded_void("kvt buffer on_free", self->call);
        }
    };
    detail::failure f;
    std::unique_ptr<box> boxed = detail::boxed<box>(on_free);
    kvt_buffer_t *raw = nullptr;
    const kvt_status_t status =
        kvt_buffer_wrap(raw_, memory.data(), memory.size(), boxed.get(),
                        boxed ? &box::destroy : nullptr, &raw, f.out());
    if (status == KVT_OK) (void)boxed.release();
    return detail::give(status, f, buffer::adopt(raw));
}

inline ret<op> runtime::submit(span<const kvt_buffer_item_t> items,
                               const submit_opts &opts) const {
    detail::failure f;
    const kvt_submit_opts_t c = opts.to_c();
    kvt_op_t *raw = nullptr;
    const kvt_status_t status = kvt_buffer_submit(raw_, &c, items.data(), items.size(),
                                                  sizeof(kvt_buffer_item_t), &raw, f.out());
    return detail::give(status, f, op::adopt(raw));
}
inline ret<op> runtime::submit(const kvt_buffer_item_t &item, const submit_opts &opts) const {
    return submit(span<const kvt_buffer_item_t>(&item, 1), opts);
}
inline ret<std::vector<op>> runtime::submit_each(span<const kvt_buffer_item_t> items,
                                                 const submit_opts &opts) const {
    detail::failure f;
    kvt_submit_opts_t c = opts.to_c();
    c.flags |= KVT_SUBMIT_EACH;
    // Allocate first: nothing may throw between the submission and the ownership of the ops.
    std::vector<kvt_op_t *> raw(items.size());
    std::vector<op> ops;
    ops.reserve(items.size());
    const kvt_status_t status =
        kvt_buffer_submit(raw_, &c, items.data(), items.size(), sizeof(kvt_buffer_item_t),
                          raw.data(), f.out());
    for (kvt_op_t *one : raw)
        if (status == KVT_OK) ops.push_back(op::adopt(one));
    return detail::give(status, f, std::move(ops));
}
inline ret<void> runtime::post(span<const kvt_buffer_item_t> items, const submit_opts &opts,
                               bool each) const {
    detail::failure f;
    kvt_submit_opts_t c = opts.to_c();
    if (each) c.flags |= KVT_SUBMIT_EACH;
    const kvt_status_t status = kvt_buffer_submit(raw_, &c, items.data(), items.size(),
                                                  sizeof(kvt_buffer_item_t), nullptr, f.out());
    return detail::check(status, f);
}
inline kvt_status_t runtime::try_submit(span<const kvt_buffer_item_t> items,
                                        const submit_opts &opts, op &out) const noexcept {
    const kvt_submit_opts_t c = opts.to_c();
    kvt_op_t *raw = nullptr;
    const kvt_status_t status = kvt_buffer_submit(raw_, &c, items.data(), items.size(),
                                                  sizeof(kvt_buffer_item_t), &raw, nullptr);
    if (status == KVT_OK) out = op::adopt(raw);
    return status;
}

#if defined(KVTIER_HAS_COROUTINES)
inline ret<async_op> reactor::submit(const runtime &rt, span<const kvt_buffer_item_t> items,
                                     const submit_opts &opts) {
    return launch(opts, [&](const kvt_submit_opts_t *c, kvt_op_t **raw, kvt_error_t **err) {
        return kvt_buffer_submit(rt.get(), c, items.data(), items.size(),
                                 sizeof(kvt_buffer_item_t), raw, err);
    });
}
inline ret<async_op> reactor::submit(const runtime &rt, const kvt_buffer_item_t &item,
                                     const submit_opts &opts) {
    return submit(rt, span<const kvt_buffer_item_t>(&item, 1), opts);
}
inline ret<async_op> reactor::reserve(const account &a, std::uint32_t tier, std::uint64_t bytes,
                                      const submit_opts &opts) {
    return launch(opts, [&](const kvt_submit_opts_t *c, kvt_op_t **raw, kvt_error_t **err) {
        return kvt_account_reserve_later(a.get(), tier, bytes, c, raw, err);
    });
}
#endif

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_MEMORY_HPP
