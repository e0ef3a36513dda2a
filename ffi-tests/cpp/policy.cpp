// kvt::policy: every call, callables as callbacks, exceptions in callbacks.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <stdexcept>
#include <string>
#include <vector>

static kvt::policy_opts small_policy(std::string_view spec) {
    kvt::policy_opts opts;
    opts.spec = spec;
    opts.max_objects = 64;
    opts.remember = 64;
    opts.log_entries = 4;
    return opts;
}

static void policy_evicts_objects_of_its_table() {
    kvt::policy p = kvt::policy::open(small_policy("lru"));
    const std::vector<kvt_policy_object_t> rows = {kvt::policy_object(1, 2), kvt::policy_object(2, 2, 1),
                                                kvt::policy_object(3, 2, 2)};
    p.insert(rows);
    p.insert(kvt::policy_object(9, 5));
    kvt::policy_context context;
    context.session = 4;
    context.tokens_each = 16;
    const std::vector<std::uint64_t> path = {1, 2, 3, 4};
    std::vector<std::uint8_t> found(4);
    CHECK(p.lookup(path, context, 0, found) == 3);
    CHECK(found[2] == 1 && found[3] == 0);
    CHECK(p.touch(path) == 3);
    CHECK(p.record(std::vector<std::uint64_t>{9, 10}, context) == 1);
    kvt::policy_hint hint;
    hint.stop = KVT_STOP_END_TURN;
    CHECK(p.hint(path, hint, context) == 3);
    const std::vector<std::uint64_t> nine = {9}, three = {3};
    p.pin(nine);
    p.acquire(three);
    // Only 10 is a candidate: 9 is pinned, and a reference on the end of the path protects it.
    CHECK(p.preview(100).victims.size() == 1);
    p.unpin(nine);
    p.release_refs(three);
    p.resize(nine, std::vector<std::uint64_t>{6});
    const kvt::eviction out = p.evict(7);
    CHECK(out.freed_units >= 7 && out.shortfall_units == 0 && out.decided_by == "lru");
    CHECK(p.log().size() == out.victims.size());
    CHECK_THROWS(p.remove(std::vector<std::uint64_t>{404}), KVT_E_NOT_FOUND);
    CHECK_THROWS(p.switch_to("fifa"), KVT_E_SPEC);
    p.switch_to("fifo");
    p.set_capacity(100);
    CHECK(p.spec() == "fifo" && p.stats().capacity_units == 100);
    CHECK_THROWS(p.gauge("none"), KVT_E_NOT_FOUND);
    kvt::policy_advice_rules rules;
    rules.max_batch = 4;
    p.set_advice(rules);
    CHECK(p.advise(100).batch == 4);
    CHECK(kvt::policies().size() >= 2);
    p.close();
    CHECK_THROWS(p.stats(), KVT_E_HANDLE);
}

static void select_chooses_among_the_callers_candidates() {
    kvt::policy p = kvt::policy::open(small_policy("lru"));
    const std::vector<std::uint64_t> ids = {3, 2, 1}, blocks = {4, 4, 4};
    const std::vector<std::int64_t> last = {30, 20, 10};
    kvt_policy_columns_t c = kvt::policy_columns(ids);
    c.blocks = blocks.data();
    c.last_access_ns = last.data();
    kvt::selection s = p.select(c, 5);
    CHECK(s.victims.size() == 2 && s.victims[0].id == 1 && s.freed_blocks == 8);
    s = p.select(c, 5, KVT_SELECT_TAIL);
    CHECK(s.freed_blocks == 5 && s.victims[1].kept_blocks == 3);
    CHECK(p.select(c, 100).shortfall_blocks == 88);
    const std::vector<std::uint64_t> twice = {3, 2, 3};
    c.ids = twice.data();
    CHECK_THROWS(p.select(c, 5), KVT_E_INVALID);
}

static void score_and_predict_callables_are_called() {
    CHECK_THROWS(kvt::policy::open(small_policy("custom")), KVT_E_INVALID);
    int calls = 0;
    bool throws = false;
    kvt::policy_opts opts = small_policy("custom");
    opts.score = [&](const kvt_policy_columns_t &c, std::int64_t, kvt::span<double> scores) {
        ++calls;
        if (throws) throw std::runtime_error("no");
        for (std::size_t i = 0; i < scores.size(); ++i)
            scores[i] = -static_cast<double>(c.ids[i]);
        return KVT_OK;
    };
    opts.predict = [&](std::uint64_t, std::uint64_t, std::uint64_t) {
        ++calls;
        return std::optional<kvt::prediction>();
    };
    kvt::policy p = kvt::policy::open(std::move(opts));
    p.record(std::vector<std::uint64_t>{1, 2, 3});
    CHECK(p.evict(1).victims.at(0).id == 3);
    throws = true;
    CHECK_THROWS(p.evict(1), KVT_E_STATE);
    throws = false;
    CHECK(p.stats().objects == 2);
    kvt::policy_context context;
    context.session = 1;
    calls = 0;
    p.lookup(std::vector<std::uint64_t>{1}, context);
    CHECK(calls == 1);
}

int main() {
    kvt::check_abi();
    policy_evicts_objects_of_its_table();
    select_chooses_among_the_callers_candidates();
    score_and_predict_callables_are_called();
    return done();
}
