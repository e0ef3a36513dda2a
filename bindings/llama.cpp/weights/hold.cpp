// Units that a context has while it computes with them.
#include "weights/weights.hpp"

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>

namespace kvt_weights {

namespace {

/// So often it is looked whether the caller wants to end a decode that waits for the disk.
constexpr uint64_t patience_ns = 200000000ull;
/// So long a context waits for others to give a slot back.
constexpr uint64_t most_wait_ns = 60000000000ull;

/// Tensors point to where their unit is. Who else has it has it there too.
void point(Weights &w, uint32_t unit, const void *address) {
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

/// Tensors whose unit did not come read as zeros: what is computed with them is thrown away.
void point_home(Weights &w, uint32_t unit) {
    std::lock_guard<std::mutex> guard(w.lock);
    if (w.units[unit].holders) {
        return;
    }
    for (uint32_t number : w.units[unit].entries) {
        const Entry &entry = *w.entries[number];
        __atomic_store_n(&entry.tensor->data, entry.home, __ATOMIC_RELAXED);
    }
}

void release(Context &c, Hold &hold) {
    Weights &w = *c.weights;
    const uint32_t unit = hold.held.unit;
    {
        std::lock_guard<std::mutex> guard(w.lock);
        Unit &own = w.units[unit];
        own.holders--;
        if (own.role == KVT_ROLE_EXPERT && own.holders == 0 && --w.layer_holders[own.layer] == 0) {
            drop_copies(w, own.layer);
        }
    }
    kvt_stream_release(w.stream, &hold.held, 0, nullptr);
    {
        std::lock_guard<std::mutex> guard(w.lock);
        w.releases++;
    }
    w.released.notify_all();
}

bool is_stale(const Context &c, const Hold &hold) { return hold.used_in != c.span; }

/// All slots are in use: what this context does not need now goes, or else others are waited for.
bool make_room(Context &c, uint64_t releases, uint64_t until_ns) {
    const size_t before = c.holds.size();
    release_if(c, is_stale);
    if (c.holds.size() < before) {
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
    std::vsnprintf(c.words, sizeof c.words, form, list);
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

/// A shared budget may have shrunk: then there are fewer slots than when the context was made.
static void fail_full(Context &c, uint32_t unit) {
    const Weights &w = *c.weights;
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    kvt_stream_plan(w.stream, &plan, nullptr, nullptr, 0, 0);
    if (w.units[unit].role == KVT_ROLE_EXPERT && plan.expert_slots) {
        const uint32_t fit = plan.expert_slots / w.contexts_at_once / w.experts_used;
        fail(c, KVT_E_BUSY,
             "all %u slots for experts are in use: make contexts with n_ubatch of at most %u, or give memory",
             plan.expert_slots, std::max(1u, fit));
        return;
    }
    fail(c, KVT_E_BUSY, "all slots for weights are in use: open the weights with more `slots` or memory");
}

bool hold(Context &c, uint32_t unit) {
    for (Hold &known : c.holds) {
        if (known.held.unit == unit) {
            known.used_in = c.span;
            return true;
        }
    }
    Weights &w = *c.weights;
    c.holds.reserve(c.holds.size() + 1);
    kvt_unit_lease_t held = KVT_UNIT_LEASE_INIT;
    kvt_error_t *error = nullptr;
    const uint64_t until_ns = now_ns() + most_wait_ns, read_until_ns = now_ns() + most_read_ns;
    for (;;) {
        const uint64_t releases = releases_of(w);
        const kvt_status_t status =
            kvt_stream_acquire(w.stream, unit, 0, now_ns() + patience_ns, &held, &error);
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
                 is_over ? "weights did not come within 300 seconds: does the disk answer?"
                         : "the caller's abort callback ended a wait for weights");
        } else if (status == KVT_E_BUSY && make_room(c, releases, until_ns)) {
            kvt_error_free(&error);
            continue;
        } else if (status == KVT_E_BUSY) {
            kvt_error_free(&error);
            fail_full(c, unit);
        } else {
            fail_with(c, status, "weights cannot be read", error);
        }
        point_home(w, unit);
        return false;
    }
    c.holds.push_back({held, c.span});
    point(w, unit, held.address);
    return true;
}

void release_if(Context &c, bool (*leaves)(const Context &, const Hold &)) {
    size_t kept = 0;
    for (size_t i = 0; i < c.holds.size(); i++) {
        if (leaves(c, c.holds[i])) {
            release(c, c.holds[i]);
        } else {
            c.holds[kept++] = c.holds[i];
        }
    }
    c.holds.resize(kept);
}

void release_all(Context &c) {
    release_if(c, [](const Context &, const Hold &) { return true; });
}

} // namespace kvt_weights
