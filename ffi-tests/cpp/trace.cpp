// kvt::trace: generation, reading, replay; progress callbacks that cancel, throw or close.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <stdexcept>
#include <string>

static kvt::trace generate_chat(double rate = 1) {
    kvt::trace_opts opts;
    opts.kind = "chat";
    opts.duration = std::chrono::minutes(10);
    opts.rate = rate;
    return kvt::trace::generate(opts);
}

static void replay_is_deterministic() {
    kvt::trace t = generate_chat();
    const kvt_trace_info_t info = t.info();
    CHECK(info.requests > 600 && info.block_tokens == 512 && info.known_tokens <= info.tokens);
    const kvt_replay_report_t all = t.replay("lru", info.blocks);
    CHECK(all.evictions == 0 && all.hit_tokens == info.known_tokens);
    kvt::replay_opts opts;
    opts.untimed = true;
    opts.hints = KVT_HINTS_NONE;
    const kvt_replay_report_t limited = t.replay("horizon", info.blocks / 8, opts);
    CHECK(limited.evictions > 0 && limited.hits < all.hits && limited.decision_max_ns == 0);
    const kvt_replay_report_t again = t.replay("horizon", info.blocks / 8, opts);
    CHECK(limited.hit_tokens == again.hit_tokens && limited.evictions == again.evictions);
    opts.warm_up = info.requests;
    CHECK(t.replay("lru", 9, opts).requests == 0);
    kvt::trace moved = std::move(t);
    CHECK(moved.info().requests == info.requests);
    CHECK_THROWS(t.info(), KVT_E_HANDLE);
    moved.close();
    moved.close();
    CHECK_THROWS(moved.replay("lru", 9), KVT_E_HANDLE);
}

static void invalid_trace_options_throw() {
    kvt::trace_opts opts;
    opts.kind = "chta";
    CHECK_THROWS(kvt::trace::generate(opts), KVT_E_SPEC);
    CHECK_THROWS(kvt::trace::open("/nonexistent/trace"), KVT_E_NOT_FOUND);
    CHECK_THROWS(kvt::trace::open("/nonexistent/trace", opts), KVT_E_SPEC);
    CHECK_THROWS(kvt::trace::open(""), KVT_E_INVALID);
    opts.kind = "chat";
    opts.duration = std::chrono::nanoseconds(-1);
    CHECK_THROWS(kvt::trace::generate(opts), KVT_E_INVALID);
    kvt::trace t = generate_chat(0.1);
    CHECK_THROWS(t.replay("lru", 0), KVT_E_LIMIT);
    CHECK_THROWS(t.replay("lur", 1), KVT_E_SPEC);
    std::string here = __FILE__;
    here.resize(here.rfind('/') + 1);
    const kvt_trace_info_t info =
        kvt::trace::open(here + "../../tests/data/agent.kvtrace").info();
    CHECK(info.requests > 0);
}

static void progress_callback_can_cancel_throw_and_close() {
    kvt::trace t = generate_chat();
    const std::uint64_t requests = t.info().requests;
    std::uint64_t calls = 0, last = 0;
    kvt::replay_opts opts;
    opts.progress = [&](std::uint64_t done, std::uint64_t total) {
        CHECK(total == requests && done >= last);
        last = done;
        ++calls;
        return true;
    };
    t.replay("lru", 100, opts);
    CHECK(calls >= 3 && last == requests);
    opts.progress = [](std::uint64_t, std::uint64_t) { return false; };
    CHECK_THROWS(t.replay("lru", 100, opts), KVT_E_CANCELLED);
    opts.progress = [](std::uint64_t, std::uint64_t) -> bool { throw std::runtime_error("no"); };
    CHECK_THROWS(t.replay("lru", 100, opts), KVT_E_CANCELLED);
    opts.progress = [&](std::uint64_t, std::uint64_t) {
        CHECK_THROWS(t.replay("lru", 100), KVT_E_REENTRANT);
        t.close();  // the replay continues to its end
        return true;
    };
    CHECK(t.replay("lru", 100, opts).requests == requests);
    CHECK(!t);
}

static void gauges_are_listed_and_read_by_name() {
    kvt::policy_opts opts;
    opts.spec = "arc";
    opts.max_objects = 16;
    kvt::policy p = kvt::policy::open(std::move(opts));
    bool has_p = false;
    for (const kvt::gauge_value &gauge : p.gauges()) {
        has_p = has_p || gauge.name == "arc_p";
        CHECK(p.gauge(gauge.name) == gauge.value);
    }
    CHECK(has_p);
}

int main() {
    kvt::check_abi();
    replay_is_deterministic();
    invalid_trace_options_throw();
    progress_callback_can_cancel_throw_and_close();
    gauges_are_listed_and_read_by_name();
    return done();
}
