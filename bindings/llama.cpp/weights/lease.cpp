// Leases of units that a context computes with.
#include "weights/weights.hpp"

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>

namespace kvt_weights {

namespace {

/// Interval at which a waiting decode asks the caller's abort callback.
constexpr uint64_t poll_ns = 200000000ull;
/// How long a context waits for another one to release a slot.
constexpr uint64_t max_wait_ns = 60000000000ull;

/// Points tensors to the address of their unit. All holders of a unit have it at the same address.
void point_to_unit(Weights &w, uint32_t unit, const void *address) {
    std::lock_guard<std::mutex> guard(w.lock);
    Unit &own = w.units[unit];
    own.holders++;
    if (own.role == KVT_ROLE_EXPERT && own.holders == 1) {
        w.layer_holders[own.layer]++;
    }
    for (uint32_t number : own.entries) {
        const Entry &entry = *w.entries[number];
        void *to = const_cast<uint8_t *>(static_cast<const uint8_t *>(address)) + entry.at;
        if (entry.tensor->data != to) {
            __atomic_store_n(&entry.tensor->data, to, __ATOMIC_RELAXED);
        }
    }
    if (own.holders == 1) {
        copy_parts(w, unit, address);
    }
}

/// Points the tensors of a missing unit to their reserved addresses, which read as zeros. Results
/// computed with them are discarded.
void point_to_placeholder(Weights &w, uint32_t unit) {
    std::lock_guard<std::mutex> guard(w.lock);
    if (w.units[unit].holders) {
        return;
    }
    for (uint32_t number : w.units[unit].entries) {
        const Entry &entry = *w.entries[number];
        __atomic_store_n(&entry.tensor->data, entry.placeholder, __ATOMIC_RELAXED);
    }
}

void release(Context &c, Lease &lease) {
    Weights &w = *c.weights;
    const uint32_t unit = lease.handle.unit;
    {
        std::lock_guard<std::mutex> guard(w.lock);
        Unit &own = w.units[unit];
        own.holders--;
        if (own.role == KVT_ROLE_EXPERT && own.holders == 0 && --w.layer_holders[own.layer] == 0) {
            drop_copies(w, own.layer);
        }
    }
    kvt_stream_release(w.stream, &lease.handle, 0, nullptr);
    {
        std::lock_guard<std::mutex> guard(w.lock);
        w.releases++;
    }
    w.released.notify_all();
}

bool is_stale(const Context &c, const Lease &lease) { return lease.used_in != c.span; }

/// All slots are in use: releases units that this context does not need now, or waits for others.
bool free_slot(Context &c, uint64_t releases, uint64_t until_ns) {
    const size_t before = c.leases.size();
    release_if(c, is_stale);
    if (c.leases.size() < before) {
        return true;
    }
    Weights &w = *c.weights;
    std::unique_lock<std::mutex> guard(w.lock);
    if (w.contexts.size() < 2 || now_ns() > until_ns) {
        return false;
    }
    w.released.wait_for(guard, std::chrono::milliseconds(100), [&] { return w.releases != releases; });
    return true;
}

uint64_t releases_of(Weights &w) {
    std::lock_guard<std::mutex> guard(w.lock);
    return w.releases;
}

} // namespace

void fail(Context &c, kvt_status_t status, const char *form, ...) {
    if (c.status != KVT_OK) {
        return;
    }
    va_list list;
    va_start(list, form);
    std::vsnprintf(c.message, sizeof c.message, form, list);
    va_end(list);
    c.failed_by = std::this_thread::get_id();
    c.status = status;
    std::lock_guard<std::mutex> guard(c.weights->lock);
    c.weights->failed_decodes++;
}

void fail_with(Context &c, kvt_status_t status, const char *what, kvt_error_t *error) {
    const char *message = error ? kvt_error_message(error) : "";
    fail(c, status, "%s: %s (status %d)", what, message ? message : "", (int) status);
    kvt_error_free(&error);
}

/// A shared budget may have shrunk, so that fewer slots exist than when the context was made.
static void fail_full(Context &c, uint32_t unit) {
    const Weights &w = *c.weights;
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    kvt_stream_plan(w.stream, &plan, nullptr, nullptr, 0, 0);
    if (w.units[unit].role == KVT_ROLE_EXPERT && plan.expert_slots) {
        const uint32_t fit = plan.expert_slots / w.contexts_at_once / w.experts_used;
        fail(c, KVT_E_BUSY,
             "all %u expert slots are in use: make contexts with n_ubatch of at most %u, or raise the budget",
             plan.expert_slots, std::max(1u, fit));
        return;
    }
    fail(c, KVT_E_BUSY, "all weight slots are in use: open the weights with more `slots`, or raise the "
                        "budget");
}

bool acquire(Context &c, uint32_t unit) {
    for (Lease &known : c.leases) {
        if (known.handle.unit == unit) {
            known.used_in = c.span;
            return true;
        }
    }
    Weights &w = *c.weights;
    c.leases.reserve(c.leases.size() + 1);
    kvt_unit_lease_t lease = KVT_UNIT_LEASE_INIT;
    kvt_error_t *error = nullptr;
    const uint64_t until_ns = now_ns() + max_wait_ns, read_until_ns = now_ns() + max_read_ns;
    for (;;) {
        const uint64_t releases = releases_of(w);
        const kvt_status_t status =
            kvt_stream_acquire(w.stream, unit, 0, now_ns() + poll_ns, &lease, &error);
        if (status == KVT_OK) {
            break;
        }
        if (status == KVT_E_TIMEOUT) {
            kvt_error_free(&error);
            const bool is_over = now_ns() > read_until_ns;
            if (!is_over && (!c.user_abort || !c.user_abort(c.user_abort_data))) {
                continue;
            }
            fail(c, is_over ? KVT_E_TIMEOUT : KVT_E_CANCELLED, "%s",
                 is_over ? "weights were not read within 300 seconds: check the disk"
                         : "the abort callback cancelled a wait for weights");
        } else if (status == KVT_E_BUSY && free_slot(c, releases, until_ns)) {
            kvt_error_free(&error);
            continue;
        } else if (status == KVT_E_BUSY) {
            kvt_error_free(&error);
            fail_full(c, unit);
        } else {
            fail_with(c, status, "reading weights", error);
        }
        point_to_placeholder(w, unit);
        return false;
    }
    c.leases.push_back({lease, c.span});
    point_to_unit(w, unit, lease.address);
    return true;
}

void release_if(Context &c, bool (*selects)(const Context &, const Lease &)) {
    size_t kept = 0;
    for (size_t i = 0; i < c.leases.size(); i++) {
        if (selects(c, c.leases[i])) {
            release(c, c.leases[i]);
        } else {
            c.leases[kept++] = c.leases[i];
        }
    }
    c.leases.resize(kept);
}

void release_all(Context &c) {
    release_if(c, [](const Context &, const Lease &) { return true; });
}

} // namespace kvt_weights
