// Callables as C callbacks: queue, reclaim, threads, log; also callables that throw.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

static std::mutex lock;
static std::vector<std::string> defects;
static void record_defect(const char *where, kvt_status_t, const char *what) noexcept {
    std::lock_guard<std::mutex> held(lock);
    defects.push_back(std::string(where) + ": " + what);
}
static bool has_defect(const std::string &text) {
    std::lock_guard<std::mutex> held(lock);
    for (const std::string &d : defects)
        if (d.find(text) != std::string::npos) return true;
    return false;
}

static void queue_callback_receives_every_completion() {
    auto alive = std::make_shared<int>(0);
    std::mutex m;
    std::condition_variable more;
    std::vector<kvt_completion_t> seen;
    kvt_status_t wait_inside = KVT_OK;
    {
        kvt::runtime rt = kvt::runtime::open();
        kvt::buffer b = rt.alloc(1 << 16);
        kvt::queue_opts opts;
        opts.callback = [&, alive](const kvt::batch &batch) {
            std::lock_guard<std::mutex> held(m);
            for (const kvt_completion_t &c : batch) {
                kvt::op owned = kvt::op::adopt(c.op);  // a callback may free an op
                wait_inside = kvt_op_wait(owned.get(), KVT_OP_RELEASED, 0);
                seen.push_back(c);
            }
            more.notify_all();
        };
        kvt::queue queue = rt.open_queue(std::move(opts));
        CHECK(alive.use_count() == 2);
        kvt::submit_opts submit;
        submit.queue = &queue;
        for (std::uint64_t i = 0; i < 100; ++i) {
            submit.tag = i;
            (void)rt.submit(kvt::item::checksum(b, 0, 1 << 16), submit).release();
        }
        kvt_completion_t none[1];
        CHECK_THROWS(queue.poll(none), KVT_E_STATE);
        std::unique_lock<std::mutex> held(m);
        CHECK(more.wait_for(held, HANG_GUARD, [&] { return seen.size() == 100; }));
        held.unlock();
        queue.close();
        CHECK(alive.use_count() == 1);
        CHECK(rt.close().ops == 0);
    }
    CHECK(wait_inside == KVT_E_REENTRANT);
    for (const kvt_completion_t &c : seen) CHECK(c.status == KVT_OK && c.tag < 100);
}

// The binding catches exceptions of callbacks, and the runtime continues.
static void exceptions_of_callbacks_go_to_the_defect_hook() {
    kvt::runtime_opts opts;
    opts.workers = 2;
    opts.on_thread = [](kvt_thread_role_t, std::uint32_t) { throw 7; };
    kvt::runtime rt = kvt::runtime::open(std::move(opts));
    kvt::buffer b = rt.alloc(4096);
    std::atomic<int> calls{0};
    kvt::queue_opts queue_opts;
    queue_opts.callback = [&](const kvt::batch &batch) {
        calls += static_cast<int>(batch.size());
        throw std::runtime_error("out of the callback");
    };
    kvt::queue queue = rt.open_queue(std::move(queue_opts));
    kvt::submit_opts submit;
    submit.queue = &queue;
    for (int i = 0; i < 10; ++i) rt.submit(kvt::item::checksum(b, 0, 4096), submit).finish();
    queue.close();
    CHECK(calls == 10);
    CHECK(rt.stats().poisoned == 0);
    std::vector<std::byte> memory(4096);
    kvt::buffer wrapped = rt.wrap(memory, [] { throw std::logic_error("out of on_free"); });
    wrapped.reset();
    rt.close();
    CHECK(has_defect("out of the callback") && has_defect("out of on_free"));
    CHECK(has_defect("no std::exception"));
}

static void on_thread_is_called_in_every_thread() {
    std::atomic<int> workers{0}, notifiers{0};
    kvt::runtime_opts opts;
    opts.workers = 3;
    opts.name = "cpp";
    opts.on_thread = [&](kvt_thread_role_t role, std::uint32_t index) {
        CHECK(index < 3);
        ++(role == KVT_THREAD_WORKER ? workers : notifiers);
    };
    kvt::runtime rt = kvt::runtime::open(std::move(opts));
    CHECK(rt.stats().workers == 3);
    rt.close();
    CHECK(workers == 3 && notifiers >= 1);
}

// An account reserves bytes that the reclaim callback of another account releases.
static void reclaim_callback_releases_bytes_for_a_waiting_reservation(bool throws) {
    kvt::runtime rt = kvt::runtime::open();
    kvt::budget_opts limits;
    limits.host_bytes = 1 << 20;
    limits.reserve_bytes = 1;
    kvt::budget budget = rt.open_budget(limits);
    kvt::account cache, *cache_at = &cache;
    std::atomic<int> calls{0};
    kvt::account_opts opts;
    opts.name = "cache";
    opts.priority = -1;
    opts.reclaim = [&, cache_at](kvt_tier_t tier, std::uint64_t bytes, kvt::deadline) {
        CHECK(tier == KVT_TIER_HOST && bytes > 0);
        ++calls;
        if (throws) throw std::runtime_error("out of the reclaimer");
        cache_at->release_bytes(tier, 1 << 20);
        return std::uint64_t(1) << 20;
    };
    cache = budget.open_account(std::move(opts));
    cache.reserve(KVT_TIER_HOST, 1 << 20);
    cache.commit(KVT_TIER_HOST, 1 << 20, 1 << 20);
    kvt::account store = budget.open_account();
    CHECK_THROWS(store.reserve(KVT_TIER_HOST, 4096), KVT_E_BUDGET);
    CHECK_THROWS(store.reserve_later(KVT_TIER_HOST, 1 << 21), KVT_E_BUDGET);
    kvt::op later;
    if (throws) {
        // The callback threw and released nothing: the deadline ends the op. If the deadline was
        // reached before the callback was called, try again with a later one.
        for (auto wait = std::chrono::milliseconds(50); !has_defect("out of the reclaimer");
             wait *= 2) {
            kvt::submit_opts submit;
            submit.deadline = kvt::deadline::in(wait);
            later = store.reserve_later(KVT_TIER_HOST, 4096, submit);
            CHECK_THROWS(later.finish(), KVT_E_TIMEOUT);
            CHECK(wait < HANG_GUARD);
            if (wait >= HANG_GUARD) break;
        }
        CHECK(has_defect("out of the reclaimer"));
        cache.release_bytes(KVT_TIER_HOST, 1 << 20);
    } else {
        later = store.reserve_later(KVT_TIER_HOST, 4096);
        later.finish();
        CHECK(store.held(KVT_TIER_HOST).reserved_bytes == 4096);
        store.commit(KVT_TIER_HOST, 4096, 0);
    }
    CHECK(calls >= 1);
    CHECK(budget.tier_report(KVT_TIER_HOST).waiting == 0);
    later.reset();
    store.close();
    cache.close();
}

static void destroying_a_waiting_op_cancels_it() {
    kvt::runtime rt = kvt::runtime::open();
    kvt::budget_opts limits;
    limits.host_bytes = 1 << 20;
    limits.reserve_bytes = 1;
    kvt::budget budget = rt.open_budget(limits);
    kvt::account a = budget.open_account();
    a.reserve(KVT_TIER_HOST, 1 << 20);
    {
        kvt::op never = a.reserve_later(KVT_TIER_HOST, 4096);
    }  // the destructor cancels the op; without that it would wait forever
    a.commit(KVT_TIER_HOST, 1 << 20, 0);
    a.close();
}

static void log_sink_may_throw_and_is_released() {
    auto alive = std::make_shared<int>(0);
    kvt::set_log(KVT_LOG_TRACE,
                 [alive](kvt_log_level_t, std::string_view, std::string_view) { throw 1; });
    kvt::runtime::open().close();
    kvt::clear_log();
    CHECK(alive.use_count() == 1);
}

int main() {
    kvt::set_defect_hook(record_defect);
    queue_callback_receives_every_completion();
    CHECK(defects.empty());
    exceptions_of_callbacks_go_to_the_defect_hook();
    on_thread_is_called_in_every_thread();
    reclaim_callback_releases_bytes_for_a_waiting_reservation(false);
    reclaim_callback_releases_bytes_for_a_waiting_reservation(true);
    destroying_a_waiting_op_cancels_it();
    log_sink_may_throw_and_is_released();
    return done();
}
