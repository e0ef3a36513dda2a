// Failing stores: damaged files, a disk that is too small, a store closed before its tier, ops that do not
// end. Requests succeed, and no restored KV is wrong.
#include "fixture.hpp"

#include "tier/tier.hpp"

#include <fstream>

using namespace tier_test;

namespace {

struct test_model {
    llama_model *model;
    std::string path;
};

kvt_llama_tier_opts_t default_opts(const test_model &m) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.model_path = m.path.c_str();
    opts.host_bytes = uint64_t(32) << 20;
    return opts;
}

/// Changes every `step`-th byte of each segment, from offset `start` on. Returns the number of changes.
size_t flip_bytes(const std::string &folder, uint64_t start, uint64_t step) {
    size_t count = 0;
    for (const auto &entry : std::filesystem::directory_iterator(folder)) {
        if (entry.path().filename().string().rfind("seg-", 0) != 0) {
            continue;
        }
        std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
        const uint64_t bytes = entry.file_size();
        for (uint64_t at = start; at < bytes; at += step) {
            char byte = 0;
            file.seekg(std::streamoff(at));
            file.read(&byte, 1);
            // Zeros are unwritten space, so that changing them would test nothing.
            if (file && byte != 0) {
                byte = char(byte ^ 0x41);
                file.seekp(std::streamoff(at));
                file.write(&byte, 1);
                count++;
            }
            file.clear();
        }
    }
    return count;
}

void damaged_segments_give_no_wrong_logits(const test_model &m, uint64_t start, uint64_t step) {
    temp_dir dir;
    const context_config config = small_context();
    const std::string path = dir.path + "/kv";
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.disk_path = path.c_str();
    opts.disk_bytes = uint64_t(256) << 20;
    std::vector<tokens_t> all;
    {
        llama_context *ctx = context(m.model, config);
        kvt_llama_tier_t *tier = open_tier(ctx, opts);
        for (uint32_t i = 0; i < 4; i++) {
            all.push_back(prompt(m.model, 300 + i, 300));
            run_with_tier(tier, ctx, 0, all.back());
        }
        flush(tier);
        close_tier(&tier);
        llama_free(ctx);
    }
    const size_t flips = flip_bytes(path, start, step);
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    size_t reused = 0;
    for (const tokens_t &one : all) {
        kvt_llama_attached_t at;
        const logits_t with = run_with_tier(tier, ctx, 0, one, &at);
        CHECK(relative_distance(with, run_without_tier(m.model, config, one, {128, 256})) <= tolerance);
        reused += at.reused_tokens;
    }
    const kvt_llama_tier_stats_t seen = stats(tier);
    std::printf("%zu bytes flipped: %zu of 1152 tokens reused, %llu restores refused\n", flips, reused,
                (unsigned long long) seen.refused_restores);
    CHECK(flips > 0 && reused < 1152);
    kvt_llama_tier_close(&tier, &why); /* may fail: a chunk before a damaged one may be refused again */
    llama_free(ctx);
}

/// A disk of the smallest size that a store accepts: most chunks are evicted.
void tiny_disk_stays_within_its_limit(const test_model &m) {
    temp_dir dir;
    const context_config config = small_context();
    const std::string path = dir.path + "/kv";
    kvt_runtime_t *runtime = nullptr;
    kvt_store_t *store = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    const std::string spec =
        "store(host=1MiB, disk=disk(path=\"" + path + "\", bytes=1280KiB, segment=256KiB))";
    kvt_store_opts_t so = KVT_STORE_OPTS_INIT;
    so.spec = spec.c_str();
    so.spec_bytes = spec.size();
    CHECK_OK(kvt_store_open(runtime, nullptr, &so, &store, nullptr));
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.store = store;
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    for (uint32_t i = 0; i < 16; i++) {
        const tokens_t one = prompt(m.model, 320 + i % 5, 300);
        const logits_t with = run_with_tier(tier, ctx, llama_seq_id(i % 2), one);
        CHECK(relative_distance(with, run_without_tier(m.model, config, one, {128, 256})) <= tolerance);
        kvt_store_stats_t seen = KVT_STORE_STATS_INIT;
        CHECK_OK(kvt_store_stats(store, &seen));
        CHECK(seen.disk_peak_bytes <= uint64_t(1280) << 10);
    }
    std::printf("tiny disk: %llu saves failed\n", (unsigned long long) stats(tier).failed_saves);
    kvt_llama_tier_close(&tier, &why);
    llama_free(ctx);
    kvt_store_close(&store, 0, nullptr);
    CHECK_OK(kvt_runtime_close(&runtime, 0, nullptr, nullptr));
}

/// The caller closes the store while a tier uses it.
void closed_store_fails_saves_but_not_requests(const test_model &m) {
    const context_config config = small_context();
    kvt_runtime_t *runtime = nullptr;
    kvt_store_t *store = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    CHECK_OK(kvt_store_open(runtime, nullptr, nullptr, &store, nullptr));
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.store = store;
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    const tokens_t one = prompt(m.model, 340, 300), other = prompt(m.model, 341, 300);
    run_with_tier(tier, ctx, 0, one);
    CHECK_OK(kvt_store_close(&store, 0, nullptr));
    kvt_llama_attached_t at;
    CHECK_OK(kvt_llama_attach(tier, 0, other.data(), other.size(), &at, &why));
    CHECK(at.reused_tokens == 0 && at.refused == KVT_E_CLOSED && why.text[0] != 0);
    CHECK_OK(kvt_llama_prefill(tier, 0, other.data(), other.size(), 0, &why));
    CHECK(relative_distance(logits(ctx), run_without_tier(m.model, config, other)) <= tolerance);
    CHECK(stats(tier).failed_saves > 0);
    CHECK(kvt_llama_commit(tier, 0, other.data(), other.size(), &why) != KVT_OK);
    CHECK(kvt_llama_tier_close(&tier, &why) != KVT_OK && tier == nullptr);
    llama_free(ctx);
    CHECK_OK(kvt_runtime_close(&runtime, 0, nullptr, nullptr));
}

/// The buffer stays taken until the op is released, and the close has a time limit.
void buffer_of_an_unfinished_op_is_not_reused(const test_model &m) {
    kvt_runtime_t *runtime = nullptr;
    kvt_budget_t *budget = nullptr;
    kvt_account_t *account = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    kvt_budget_opts_t bo = KVT_BUDGET_OPTS_INIT;
    bo.host_bytes = uint64_t(1) << 20;
    CHECK_OK(kvt_budget_open(runtime, &bo, &budget, nullptr));
    CHECK_OK(kvt_account_open(budget, nullptr, &account, nullptr));
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_HOST, bo.host_bytes, nullptr));
    // These ops wait for memory, because all of it is reserved.
    kvt_op_t *ops[2] = {};
    for (kvt_op_t *&op : ops) {
        CHECK_OK(kvt_account_reserve_later(account, KVT_TIER_HOST, 4096, nullptr, &op, nullptr));
    }
    llama_context *ctx = context(m.model, small_context());
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    kvtier_llama::buffer_t *buffer = kvtier_llama::take_buffer(*tier, 4096, in_seconds(1)).release();
    CHECK(buffer != nullptr);
    buffer->ops.push_back(ops[0]);
    buffer->stuck = true;
    CHECK(kvtier_llama::take_buffer(*tier, 4096, in_seconds(1)).get() != buffer);
    CHECK(buffer->taken && buffer->ops.size() == 1);
    CHECK_OK(kvt_op_cancel(ops[0]));
    CHECK_OK(kvt_op_wait(ops[0], KVT_OP_RELEASED, in_seconds(600)));
    kvtier_llama::take_buffer(*tier, 4096, in_seconds(1));
    CHECK(!buffer->taken && !buffer->stuck && buffer->ops.empty());

    buffer->taken = true;
    buffer->ops.push_back(ops[1]);
    uint8_t *data = buffer->data;
    const uint64_t until = in_seconds(600);
    CHECK(kvt_llama_tier_close(&tier, &why) == KVT_E_TIMEOUT && tier == nullptr && why.text[0] != 0);
    CHECK(now_ns() < until);
    std::memset(data, 1, 4096); /* the op still owns the buffer, so it must be valid memory */
    CHECK_OK(kvt_op_cancel(ops[1]));
    CHECK_OK(kvt_op_wait(ops[1], KVT_OP_RELEASED, in_seconds(600)));
    CHECK_OK(kvt_op_free(&ops[1]));
    std::free(data);
    llama_free(ctx);
    CHECK_OK(kvt_account_commit(account, KVT_TIER_HOST, bo.host_bytes, 0, nullptr));
    CHECK_OK(kvt_account_close(&account, nullptr));
    CHECK_OK(kvt_budget_close(&budget, nullptr));
    CHECK_OK(kvt_runtime_close(&runtime, 0, nullptr, nullptr));
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc == 2);
    test_model m{nullptr, model_path(argv[1])};
    m.model = load(m.path);
    damaged_segments_give_no_wrong_logits(m, 5000, 40000);
    damaged_segments_give_no_wrong_logits(m, 300, 4096);
    tiny_disk_stays_within_its_limit(m);
    closed_store_fails_saves_but_not_requests(m);
    buffer_of_an_unfinished_op_is_not_reused(m);
    llama_model_free(m.model);
    return 0;
}
