// kvt::store: closing in any order, transfers as one op and by layers, blocks, lookups, plans,
// remote, errors as exceptions.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

namespace {

constexpr std::uint32_t LAYERS = 3, CHUNK = 4, HEADS = 2, RUN = 16;

struct tensors {
    std::vector<std::uint8_t> bytes;
    std::vector<kvt_view_t> k, v;

    explicit tensors(std::uint32_t tokens)
        : bytes(std::size_t{LAYERS} * 2 * tokens * HEADS * RUN, 0xA5) {
        const std::size_t plane = std::size_t{tokens} * HEADS * RUN;
        for (std::uint32_t i = 0; i < LAYERS; i++) {
            k.push_back(kvt::view(&bytes[2 * i * plane], RUN, HEADS, tokens));
            v.push_back(kvt::view(&bytes[(2 * i + 1) * plane], RUN, HEADS, tokens));
        }
    }
    kvt::transfer all() const {
        kvt::transfer r;
        r.k = k;
        r.v = v;
        return r;
    }
};

kvt::layout model_layout() {
    kvt::layer_group group;
    group.layers = {0, 1, 2};
    group.dtype = KVT_DTYPE_F16;
    group.kv_heads = HEADS;
    group.k_bytes = group.v_bytes = HEADS * RUN;
    kvt::layout layout;
    layout.chunk_tokens = CHUNK;
    layout.groups = {group};
    return layout;
}

kvt::identity identity_with(std::string_view salt) {
    kvt::identity id;
    id.model = "m";
    id.salt = salt;
    id.extra = {{0x80000001u, "x"}};
    return id;
}

void durable_put_survives_reopen(const kvt::runtime &runtime, const std::string &folder) {
    const std::string spec =
        "store(host=1MiB, write=back, disk=disk(path=\"" + folder +
        "\", bytes=16MiB, segment=1MiB))";
    std::vector<std::uint32_t> tokens;
    for (std::uint32_t i = 0; i < 16; i++) tokens.push_back(i * i);
    tensors from(16);
    for (std::size_t i = 0; i < from.bytes.size(); i++)
        from.bytes[i] = static_cast<std::uint8_t>(i * 31 + i / 256);
    {
        kvt::store store = kvt::store::open(runtime, spec);
        kvt::session session =
            store.open_namespace(identity_with("a"), model_layout()).open_session();
        session.append(tokens);
        kvt::transfer what = from.all();
        what.level = KVT_LEVEL_DURABLE;
        CHECK(session.put(what).finish().value == 16);
        CHECK(store.stats().stored_cells == 4 * LAYERS);
        kvt::session fork = session.fork();
        fork.truncate(8);
        CHECK(fork.info().tokens == 8 && fork.info().full_chunks == 2);
        fork.pin(0, 0, 3);
        kvt::policy_hint hint;
        hint.stop = KVT_STOP_END_TURN;
        fork.hint(hint);
        CHECK(store.stats().pins == 2);
        // The store is closed before its sessions, which report that.
        store.close();
        CHECK_THROWS(fork.append(tokens), KVT_E_CLOSED);
    }
    kvt::store store = kvt::store::open(runtime, spec);
    kvt::namespace_ ns = store.open_namespace(identity_with("a"), model_layout());
    kvt::session session = ns.open_session();
    session.append(tokens);
    tensors to(16);
    std::vector<kvt::op> ops = session.get_each(to.all());
    CHECK(ops.size() == LAYERS);
    for (kvt::op &op : ops) CHECK(op.finish().value == 16);
    CHECK(to.bytes == from.bytes);
    kvt::transfer ahead;
    ahead.tokens = 8;
    CHECK(session.prefetch(ahead).finish().value == 8);

    kvt::namespace_ other = store.open_namespace(identity_with("b"), model_layout());
    CHECK(other.key() != ns.key() && ns.key().size() == KVT_KEY_BYTES);
    kvt::session unrelated = other.open_session();
    unrelated.append(tokens);
    tensors untouched(16);
    kvt::op missing = unrelated.get(untouched.all());
    CHECK_THROWS(missing.finish(), KVT_E_NOT_FOUND);
    CHECK(missing.info().value == 0 && untouched.bytes == tensors(16).bytes);
    CHECK(store.metrics().find("# TYPE kvtier_") != std::string::npos);
}

void blocks_are_stored_and_held_by_name(const kvt::runtime &runtime) {
    kvt::store store = kvt::store::open(runtime, "store(host=1MiB)");
    kvt::namespace_ ns = store.open_namespace(identity_with("a"), model_layout());
    kvt::session session = ns.open_session();
    tensors from(3 * CHUNK), to(4 * CHUNK);
    for (std::size_t i = 0; i < from.bytes.size(); i++)
        from.bytes[i] = static_cast<std::uint8_t>(i * 13 + i / 256);
    const std::vector<std::uint8_t> name_bytes = {'a', 'b', 'c', 'x'};
    kvt::blocks what;
    what.names.bytes = {name_bytes.data(), 3};
    what.names.each_bytes = 1;
    const kvt::transfer all = from.all(), targets = to.all();
    what.k = all.k;
    what.v = all.v;
    kvt::op stored = session.put_blocks(what);
    CHECK(stored.finish().value == 3 * CHUNK && stored.info().items == 3);
    kvt::blocks back;
    const std::vector<std::uint64_t> ends = {1, 2, 3, 4};
    back.names.bytes = {name_bytes.data(), name_bytes.size()};
    back.names.ends = {ends.data(), ends.size()};
    back.k = targets.k;
    back.v = targets.v;
    kvt::op loaded = session.get_blocks(back);
    CHECK_THROWS(loaded.finish(), KVT_E_NOT_FOUND);
    CHECK(loaded.info().items_failed == 1);
    std::vector<kvt_op_item_t> items(9);
    CHECK(loaded.items(items) == 4);
    CHECK(items[2].status == KVT_OK && items[3].status == KVT_E_NOT_FOUND);
    for (std::size_t layer = 0; layer < LAYERS; layer++)
        CHECK(std::memcmp(all.k[layer].address, targets.k[layer].address,
                          3 * CHUNK * HEADS * RUN) == 0);
    kvt::blocks ahead;
    ahead.names = what.names;
    CHECK(session.prefetch_blocks(ahead).finish().value == 3 * CHUNK);
    const std::vector<std::uint8_t> resident = ns.blocks_exist(back.names);
    CHECK(resident.size() == 4 && resident[0] != 0 && resident[3] == 0);
    CHECK(ns.block_keys(back.names).size() == 4 * KVT_KEY_BYTES);
    // Held blocks are not dropped. Each hold is released once, also after a move assignment.
    {
        kvt::block_references held = session.hold_blocks(back.names);
        CHECK(held.found().size() == 4 && held.found()[2] != 0 && held.found()[3] == 0);
        kvt::block_references again = session.hold_blocks(what.names);
        CHECK(session.drop_blocks(what.names).referenced_chunks == 3);
        again.release();
        again.release();
        again = std::move(held);
        CHECK(session.drop_blocks(what.names).referenced_chunks == 3);
        kvt::policy_hint hint;
        hint.done = true;
        session.hint_blocks(back.names, hint);
        hint.confidence = 2;
        CHECK_THROWS(session.hint_blocks(back.names, hint), KVT_E_INVALID);
    }
    kvt::block_references outlives;
    {
        kvt::session other = ns.open_session();
        outlives = other.hold_blocks(what.names);
        CHECK(session.drop_blocks(what.names).referenced_chunks == 3);
    }
    outlives.release();
    CHECK(session.drop_blocks(what.names).removed_chunks == 3);
    CHECK(session.hold_blocks(what.names).found() == std::vector<std::uint8_t>(3, 0));
    CHECK(ns.blocks_exist(what.names) == std::vector<std::uint8_t>(3, 0));
    // Names that do not fill their bytes, or end after them, are rejected.
    back.names = {{name_bytes.data(), 3}, 2, {}};
    CHECK_THROWS(session.get_blocks(back), KVT_E_INVALID);
    CHECK_THROWS(ns.blocks_exist(back.names), KVT_E_INVALID);
    back.names = {{name_bytes.data(), 3}, 0, {ends.data(), ends.size()}};
    CHECK_THROWS(session.drop_blocks(back.names), KVT_E_INVALID);
    CHECK_THROWS(session.hold_blocks(back.names), KVT_E_INVALID);
    CHECK_THROWS(session.hint_blocks(back.names, {}), KVT_E_INVALID);
    what.v = {};
    CHECK_THROWS(session.put_blocks(what), KVT_E_INVALID);
}

void lookups_events_and_plans_follow_puts(const kvt::runtime &runtime, const std::string &folder) {
    const std::string spec =
        "store(host=1MiB, write=back, disk=disk(path=\"" + folder +
        "\", bytes=16MiB, segment=1MiB))";
    kvt::store store = kvt::store::open(runtime, spec);
    kvt::namespace_ ns = store.open_namespace(identity_with("a"), model_layout());
    kvt::session session = ns.open_session();
    std::vector<std::uint32_t> tokens(24, 5);
    session.append(tokens);
    CHECK(ns.lookup(tokens).totals.reusable_tokens == 0);

    tensors from(24), to(24);
    kvt::ready_event event = kvt::ready_event::open();
    kvt::transfer what = from.all();
    what.ready = &event;
    what.tokens = 16;
    kvt::op put = session.put(what);
    CHECK(!event.is_signalled());
    event.signal();
    CHECK(event.is_signalled() && put.finish().value == 16);
    kvt::ready_event never = kvt::ready_event::open();
    what = to.all();
    what.ready = &never;
    kvt::op get = session.get(what);
    never.close();
    CHECK_THROWS(get.finish(), KVT_E_CANCELLED);
    CHECK_THROWS(never.signal(), KVT_E_HANDLE);

    const kvt::lookup_result found = ns.lookup(tokens);
    CHECK(found.ranges.size() == 2 && found.totals.reusable_tokens == 16);
    CHECK(found.ranges[0].state == KVT_RANGE_HIT && found.ranges[0].tier == KVT_TIER_HOST);
    std::uint64_t cursor = 0;
    const kvt::store_events read = store.events(cursor);
    CHECK(read.events.size() == 4 && read.missed == 0 && cursor == 4);
    CHECK(store.events(cursor).events.empty());
    std::uint64_t at = 0;
    const std::vector<kvt_store_event_t> resident = store.residents(at);
    CHECK(!resident.empty() && at == UINT64_MAX);
    CHECK(resident[0].kind == KVT_STORE_EVENT_STORED && resident[0].number == cursor);
    CHECK(store.watch(1).finish().value == 3);
    kvt::op next = store.watch(UINT64_MAX);
    next.cancel();
    CHECK_THROWS(next.finish(), KVT_E_CANCELLED);
    std::vector<std::uint8_t> keys;
    for (const kvt_store_event_t &e : read.events)
        keys.insert(keys.end(), e.key, e.key + KVT_KEY_BYTES);
    CHECK(keys == ns.chunk_keys(kvt::span<const std::uint32_t>(tokens.data(), 19)));
    CHECK(ns.chunk_keys({}).empty());
    CHECK(ns.lookup_keys(keys, 17).totals.reusable_tokens == 16);
    CHECK(ns.exists(keys) ==
          std::vector<std::uint8_t>(4, KVT_EXISTS_WHOLE | 1 << KVT_TIER_HOST));
    keys.pop_back();
    CHECK_THROWS(ns.exists(keys), KVT_E_INVALID);
    CHECK_THROWS(ns.lookup_keys(keys, 16), KVT_E_INVALID);

    kvt::plan_terms terms;
    terms.costs = kvt::prefill_cost{0, 1e9};
    kvt::session_plan plan = session.plan(terms);
    CHECK(plan.steps.size() == 2 && plan.totals.load_tokens == 16);
    CHECK(plan.steps[1].kind == KVT_PLAN_RECOMPUTE && plan.steps[1].tokens == 8);
    ns.set_prefill_cost(kvt::prefill_cost{0, 0});
    CHECK(session.plan().totals.recompute_tokens == 24);
    CHECK(ns.prefill_cost().fixed == 1);
    ns.observe_prefill(0, 100, std::chrono::milliseconds(1));
    ns.set_prefill_cost(std::nullopt);
    CHECK(ns.prefill_cost().observed == 1 && ns.prefill_cost().fixed == 0);
    CHECK_THROWS(ns.observe_prefill(0, 0, std::chrono::nanoseconds(1)), KVT_E_INVALID);

    session.pin(0, 16);
    CHECK(store.stats().pins == 4);
    session.unpin();
    CHECK(store.stats().pins == 0);
    CHECK(session.drop_chunks(12).removed_chunks == 1);
    CHECK(ns.clear().referenced_chunks == 3);
    session.close();
    CHECK(ns.clear(kvt::deadline{}).removed_chunks == 3 && store.stats().chunks == 0);
}

/// Gets some chunks of a session into tensors of exactly their size.
void get_loads_only_the_chosen_chunks(const kvt::runtime &runtime) {
    kvt::store store = kvt::store::open(runtime, "store(host=1MiB)");
    kvt::session session = store.open_namespace(identity_with("a"), model_layout()).open_session();
    session.append(std::vector<std::uint32_t>(22, 9));
    tensors from(22), to(10);
    for (std::size_t i = 0; i < from.bytes.size(); i++)
        from.bytes[i] = static_cast<std::uint8_t>(i * 29 + i / 256);
    session.put(from.all()).finish();

    const std::vector<std::uint32_t> list = {1, 3, 5}; // chunk 5 is partial: two tokens
    kvt::transfer what = to.all();
    what.chunks = list;
    CHECK(session.get(what).finish().value == 10);
    const std::size_t token = HEADS * RUN;
    for (std::size_t plane = 0; plane < 2 * LAYERS; plane++)
        for (std::size_t i = 0; i < 10 * token; i++) {
            const std::size_t at = list[i / token / CHUNK] * CHUNK * token + i % (CHUNK * token);
            CHECK(to.bytes[plane * 10 * token + i] == from.bytes[plane * 22 * token + at]);
        }
    for (kvt::op &op : session.get_each(what)) CHECK(op.finish().value == 10);
    kvt::transfer ahead;
    ahead.first_token = 8;
    ahead.chunks = kvt::span<const std::uint32_t>(list.data(), 2);
    CHECK(session.prefetch(ahead).finish().value == 6); // chunks 3 and 5 of the session
    ahead.chunks = list;
    CHECK_THROWS(session.prefetch(ahead), KVT_E_INVALID);

    const tensors clean(10);
    to.bytes = clean.bytes;
    CHECK_THROWS(session.put(what), KVT_E_INVALID);
    what.needed_only = true;
    CHECK_THROWS(session.get(what), KVT_E_INVALID);
    what.needed_only = false;
    what.chunks = kvt::span<const std::uint32_t>();
    CHECK_THROWS(session.get(what), KVT_E_INVALID); // an empty list does not mean all chunks
    CHECK_THROWS(session.get_each(what), KVT_E_INVALID);
    const std::uint32_t twice[] = {1, 1};
    what.chunks = twice;
    CHECK_THROWS(session.get(what), KVT_E_INVALID);
    CHECK(to.bytes == clean.bytes);
    CHECK(session.drop_chunks(12).removed_chunks == 3);
    what.chunks = list;
    kvt::op missing = session.get(what);
    CHECK_THROWS(missing.finish(), KVT_E_NOT_FOUND);
    CHECK(missing.info().value == 4);
}

kvt_media_t image(std::uint64_t token, std::uint8_t fill) {
    kvt_media_t media{};
    media.token = token;
    for (std::uint8_t &byte : media.digest) byte = fill;
    return media;
}

void store_options_override_the_spec(const kvt::runtime &runtime, const std::string &folder) {
    kvt::store_opts opts;
    opts.spec = "store(policy=lru, disk=disk(path=\"wrong\", bytes=1GiB, segment=1MiB))";
    opts.host_bytes = 2 << 20;
    opts.disk_bytes = 16 << 20;
    opts.disk_path = folder;
    opts.disk_policy = "arc";
    opts.write = KVT_WRITE_NEVER;
    kvt::store store = kvt::store::open(runtime, opts);
    CHECK(store.stats().host_limit_bytes == 2 << 20);
    CHECK(store.stats().disk_limit_bytes == 16 << 20);
    kvt::namespace_ ns = store.open_namespace(identity_with("a"), model_layout());
    const std::vector<std::uint32_t> tokens(16, 5);
    const std::vector<kvt_media_t> cat = {image(5, 1)}, dog = {image(5, 2)};
    kvt::session_opts as;
    as.tenant = 7;
    kvt::session session = ns.open_session(as);
    session.append(tokens, cat);
    tensors from(16), to(16);
    from.bytes.assign(from.bytes.size(), 3);
    session.put(from.all()).finish();
    CHECK(ns.lookup(tokens, cat).totals.reusable_tokens == 16);
    CHECK(ns.lookup(tokens, dog).totals.reusable_tokens == 4);
    CHECK(ns.lookup(tokens).totals.reusable_tokens == 4);
    CHECK_THROWS(session.append(tokens, std::vector<kvt_media_t>{image(16, 1)}), KVT_E_INVALID);

    CHECK(session.demote().pending_chunks == 4);
    kvt::transfer what = to.all();
    what.needed_only = true;
    CHECK(session.get(what).finish().value == 16 && to.bytes == from.bytes);
    CHECK_THROWS(session.put(what), KVT_E_INVALID);
    CHECK(session.demote(0, 4).kept_chunks == 0);
    const std::vector<kvt_tenant_t> tenants = store.tenants();
    CHECK(tenants.size() == 1 && tenants[0].tenant == 7);
    const std::vector<kvt_latency_t> times = store.latencies();
    CHECK(times.size() == KVT_LATENCY_LOOKUP_BATCH);
    const kvt_latency_t &host = times[KVT_LATENCY_GET_HOST - 1];
    const kvt_latency_t &disk = times[KVT_LATENCY_GET_DISK - 1];
    CHECK(host.kind == KVT_LATENCY_GET_HOST && disk.kind == KVT_LATENCY_GET_DISK);
    CHECK(host.count + disk.count == 1); // whether the demotion ended before the get
    CHECK(tenants[0].put_bytes == from.bytes.size() && tenants[0].hit_cells == 4 * LAYERS);

    store.set_policy(KVT_TIER_HOST, "s3fifo");
    CHECK(store.metrics().find("policy=\"s3fifo\"") != std::string::npos);
    CHECK_THROWS(store.set_policy(KVT_TIER_HOST, "s3fif"), KVT_E_SPEC);
    store.set_limit(KVT_TIER_DISK, 20 << 20);
    CHECK(store.stats().disk_limit_bytes == 20 << 20);
    CHECK_THROWS(store.set_limit(KVT_TIER_REMOTE, 1 << 20), KVT_E_UNSUPPORTED);
    CHECK(store.evictions(KVT_TIER_HOST).empty());
    CHECK_THROWS(store.evictions(KVT_TIER_REMOTE), KVT_E_UNSUPPORTED);
}

/* Two stores share a directory as their remote. */
void remote_objects_are_found_by_another_store(const kvt::runtime &runtime,
                                               const std::string &path) {
    std::filesystem::create_directory(path);
    const std::string spec = "store(host=8MiB, remote=dir(path=\"" + path + "\", timeout=600000))";
    kvt::store_opts opts;
    opts.spec = spec;
    const kvt_secret_t secrets[] = {kvt::secret("password", "unused")};
    opts.secrets = secrets;
    kvt::store one = kvt::store::open(runtime, opts);
    kvt::store other = kvt::store::open(runtime, opts);
    std::vector<std::uint32_t> tokens(64);
    for (std::uint32_t i = 0; i < 64; i++) tokens[i] = i * 3;
    const auto open = [&](const kvt::store &store) {
        kvt::session session =
            store.open_namespace(identity_with("remote"), model_layout()).open_session();
        session.append(tokens);
        return session;
    };
    kvt::session first = open(one);
    tensors t(64);
    kvt::transfer r = t.all();
    r.level = KVT_LEVEL_REMOTE;
    first.put(r).wait(KVT_OP_RELEASED);
    CHECK(one.remote_stats().uploaded_objects > 0);
    CHECK(one.remote_stats().write_circuit == KVT_REMOTE_CIRCUIT_CLOSED);
    kvt::session second = open(other);
    kvt::op located = second.remote_lookup();
    located.wait(KVT_OP_RELEASED);
    CHECK(located.info().value > 0);
    CHECK(other.remote_stats().found_names > 0);
    const std::uint8_t bytes[] = {1, 2};
    kvt::block_names called;
    called.bytes = bytes;
    called.each_bytes = 1;
    kvt::blocks b;
    b.names = called;
    b.k = r.k;
    b.v = r.v;
    b.level = KVT_LEVEL_REMOTE;
    first.put_blocks(b).wait(KVT_OP_RELEASED);
    kvt::op found = second.remote_lookup_blocks(called);
    found.wait(KVT_OP_RELEASED);
    CHECK(found.info().status == KVT_OK && found.info().items == 2);
    called.each_bytes = 3; // 2 bytes are no names of 3 bytes
    CHECK_THROWS(second.remote_lookup_blocks(called), KVT_E_INVALID);
}

/// A store that is opened by its spec alone has a runtime and a budget of its own.
void store_of_a_spec_has_a_runtime(const std::string &folder) {
    const std::string spec =
        "kvtier(workers=2, name=\"own\", budget=budget(host=64MiB), store=store(host=1MiB, "
        "disk=disk(path=\"" + folder + "\", bytes=16MiB, segment=1MiB)))";
    const std::vector<std::uint32_t> tokens(16, 3);
    const kvt::layout layout = kvt::layout::gqa(LAYERS, HEADS, RUN / 2, KVT_DTYPE_F16, CHUNK);
    tensors from(16), to(16);
    from.bytes.assign(from.bytes.size(), 9);
    {
        const kvt::store store = kvt::store::open(spec);
        CHECK(store.stats().host_limit_bytes == 1 << 20);
        const auto runtime = store.runtime();
        CHECK((*runtime).stats().workers == 2);
        const kvt::queue queue = runtime->open_queue();
        const kvt::session session =
            store.open_namespace(identity_with("a"), layout).open_session();
        session.append(tokens);
        CHECK_THROWS(session.get_wait(to.all()), KVT_E_NOT_FOUND);
        session.put_wait(from.all());
        kvt::submit_opts opts;
        opts.queue = &queue;
        CHECK(session.get(to.all(), opts).finish().value == 16 && to.bytes == from.bytes);
        kvt::transfer none = from.all();
        none.k = {};
        CHECK_THROWS(session.put_wait(none), KVT_E_INVALID);
    }
    // The destructor wrote back.
    const kvt::store store = kvt::store::open(spec);
    const kvt::session session = store.open_namespace(identity_with("a"), layout).open_session();
    session.append(tokens);
    to.bytes.assign(to.bytes.size(), 0);
    session.get_wait(to.all());
    CHECK(to.bytes == from.bytes);
    CHECK_THROWS(kvt::store::open("shop"), KVT_E_SPEC);
    CHECK(kvt::store::open().stats().host_limit_bytes == 1 << 30);
    CHECK_THROWS(kvt::store().runtime(), KVT_E_HANDLE);
}

void invalid_calls_throw(const kvt::runtime &runtime) {
    CHECK_THROWS(kvt::store::open(runtime, "shop"), KVT_E_SPEC);
    kvt::store store = kvt::store::open(runtime, "store(host=1MiB)");
    kvt::layout wrong = model_layout();
    wrong.groups[0].layers.pop_back();
    wrong.groups[0].layers[0] = 7;
    CHECK_THROWS(store.open_namespace(identity_with(""), wrong), KVT_E_INVALID);
    kvt::session session = store.open_namespace(identity_with(""), model_layout()).open_session();
    const std::uint32_t tokens[] = {1, 2, 3, 4, 5};
    session.append(tokens);
    tensors t(5);
    kvt::transfer r = t.all();
    r.layers = 2; // but three views
    CHECK_THROWS(session.put(r), KVT_E_INVALID);
    r = t.all();
    r.v = kvt::span<const kvt_view_t>(t.v.data(), 2);
    CHECK_THROWS(session.put_each(r), KVT_E_INVALID);
    r = t.all();
    r.first_token = 1;
    CHECK_THROWS(session.put(r), KVT_E_INVALID);
    r = t.all();
    r.level = KVT_LEVEL_DISK;
    CHECK_THROWS(session.put(r), KVT_E_UNAVAILABLE);
    CHECK_THROWS(session.prefetch(t.all()), KVT_E_INVALID);
    kvt::session moved = std::move(session);
    CHECK(moved.info().tokens == 5);
    CHECK_THROWS(session.info(), KVT_E_HANDLE);
    moved.close();
    moved.close();
}

}  // namespace

int main() {
    kvt::check_abi();
    char folder[] = "/tmp/kvt-store-cpp-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    {
        kvt::runtime runtime = kvt::runtime::open();
        durable_put_survives_reopen(runtime, std::string(folder) + "/kv");
        blocks_are_stored_and_held_by_name(runtime);
        lookups_events_and_plans_follow_puts(runtime, std::string(folder) + "/kv2");
        store_options_override_the_spec(runtime, std::string(folder) + "/kv3");
        get_loads_only_the_chosen_chunks(runtime);
        remote_objects_are_found_by_another_store(runtime, std::string(folder) + "/remote");
        store_of_a_spec_has_a_runtime(std::string(folder) + "/kv4");
        invalid_calls_throw(runtime);
        CHECK(runtime.close().stores == 0);
    }
    std::filesystem::remove_all(folder);
    return done();
}
