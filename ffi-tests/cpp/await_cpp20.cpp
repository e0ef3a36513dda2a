// co_await on ops: driven and spontaneous reactors; ops that fail, are cancelled or abandoned.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#if !defined(KVTIER_HAS_COROUTINES)
int main() { return 77; }
#else

#include <cstring>
#include <span>
#include <thread>

static_assert(std::is_same_v<kvt::span<int>, std::span<int>>);

// A minimal coroutine: starts at once and is destroyed by its owner.
struct task {
    struct promise_type {
        task get_return_object() {
            return task{std::coroutine_handle<promise_type>::from_promise(*this)};
        }
        std::suspend_never initial_suspend() noexcept { return {}; }
        std::suspend_always final_suspend() noexcept { return {}; }
        void return_void() {}
        void unhandled_exception() { throw; }
    };
    std::coroutine_handle<promise_type> self;
    explicit task(std::coroutine_handle<promise_type> h) : self(h) {}
    task(task &&other) noexcept : self(std::exchange(other.self, nullptr)) {}
    ~task() {
        if (self) self.destroy();
    }
};

static std::atomic<int> defects{0};
static void count_defect(const char *, kvt_status_t, const char *) noexcept { ++defects; }

static task copies(kvt::reactor &reactor, kvt::runtime &rt, std::atomic<int> &finished) {
    kvt::buffer from = rt.alloc(1 << 16), to = rt.alloc(1 << 16);
    std::memset(from.data(), 0x42, from.size());
    for (int i = 0; i < 10; ++i) {
        kvt::async_op op = reactor.submit(rt, kvt::item::copy(to, 0, from, 0, 1 << 16));
        const kvt::outcome copied = co_await op;
        CHECK(copied.bytes_done == 1 << 16);
        const kvt::outcome sum = co_await reactor.submit(rt, kvt::item::checksum(to, 0, 1 << 16));
        CHECK(sum.value == kvt::checksum(from.bytes()));
        std::memset(to.data(), 0, to.size());
    }
    kvt_status_t status = KVT_OK;
    try {
        co_await reactor.submit(rt, kvt::item::verify(to, 0, 4096, 1));
    } catch (const kvt::exception &e) {
        status = e.status();
    }
    CHECK(status == KVT_E_CORRUPT);
    ++finished;
}

static void driven_reactor_resumes_coroutines_in_run() {
    kvt::runtime rt = kvt::runtime::open();
    kvt::reactor reactor = kvt::reactor::open(rt);
    std::atomic<int> finished{0};
    std::vector<task> tasks;
    for (int i = 0; i < 8; ++i) tasks.push_back(copies(reactor, rt, finished));
    CHECK(reactor.fd() >= 0);
    kvt::reactor moved = std::move(reactor);  // ops in flight are not affected
    reactor = std::move(moved);
    while (finished < 8)
        CHECK(reactor.run_once(kvt::deadline::in(HANG_GUARD)) > 0);
    reactor.run();
    CHECK(reactor.in_flight() == 0 && reactor.poll() == 0 && reactor.run_once() == 0);
}

static void spontaneous_reactor_resumes_coroutines_on_the_notifier() {
    kvt::runtime rt = kvt::runtime::open();
    std::atomic<int> finished{0};
    std::vector<task> tasks;
    {
        kvt::reactor reactor = kvt::reactor::open(rt, kvt::reactor::mode::spontaneous);
        for (int i = 0; i < 8; ++i) tasks.push_back(copies(reactor, rt, finished));
        CHECK(wait_until([&] { return finished == 8; }));
    }
    // A coroutine reaches its final suspension after it counts itself. The reactor's destructor
    // has waited for that.
    for (task &t : tasks) CHECK(t.self.done());
}

constexpr kvt_status_t PENDING = 1;

static task reserves(kvt::reactor &reactor, kvt::account &a, std::atomic<kvt_status_t> &status) {
    status = PENDING;
    try {
        co_await reactor.reserve(a, KVT_TIER_HOST, 4096);
        status = KVT_OK;
    } catch (const kvt::exception &e) {
        status = e.status();
    }
}

static void destroying_a_coroutine_or_reactor_cancels_ops() {
    kvt::runtime rt = kvt::runtime::open();
    kvt::budget_opts limits;
    limits.host_bytes = 1 << 20;
    limits.reserve_bytes = 1;
    kvt::budget budget = rt.open_budget(limits);
    kvt::account a = budget.open_account();
    a.reserve(KVT_TIER_HOST, 1 << 20);
    for (auto mode : {kvt::reactor::mode::driven, kvt::reactor::mode::spontaneous}) {
        std::atomic<kvt_status_t> first{0}, second{0}, third{0}, ready{0};
        kvt::reactor reactor = kvt::reactor::open(rt, mode);
        {
            task destroyed = reserves(reactor, a, first);
            CHECK(first == PENDING && reactor.in_flight() == 1);
        }  // destroyed while it awaits: cancelled, never resumed
        CHECK(first == PENDING);
        task granted = reserves(reactor, a, second);
        a.commit(KVT_TIER_HOST, 4096, 0);
        CHECK(wait_until([&] {
            if (mode == kvt::reactor::mode::driven) (void)reactor.poll();
            return second != PENDING;
        }));
        CHECK(second == KVT_OK);
        task cancelled = reserves(reactor, a, third);
        reactor = kvt::reactor();  // cancels ops in flight and resumes their coroutines
        CHECK(third == KVT_E_CANCELLED && cancelled.self.done());
        task rejected = reserves(reactor, a, ready);
        CHECK(ready == KVT_E_HANDLE);
    }
    a.commit(KVT_TIER_HOST, a.held(KVT_TIER_HOST).reserved_bytes, 0);
    a.close();
    check_no_ops(rt);
}

static task throws_after_await(kvt::reactor &reactor, kvt::runtime &rt, kvt::buffer &b) {
    co_await reactor.submit(rt, kvt::item::checksum(b, 0, 4096));
    throw 5;
}

int main() {
    kvt::set_defect_hook(count_defect);
    driven_reactor_resumes_coroutines_in_run();
    spontaneous_reactor_resumes_coroutines_on_the_notifier();
    destroying_a_coroutine_or_reactor_cancels_ops();
    CHECK(defects == 0);
    {
        kvt::runtime rt = kvt::runtime::open();
        kvt::buffer b = rt.alloc(4096);
        kvt::reactor reactor = kvt::reactor::open(rt);
        task t = throws_after_await(reactor, rt, b);
        reactor.run();
        CHECK(defects == 1);
    }
    return done();
}
#endif
