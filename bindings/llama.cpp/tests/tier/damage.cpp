// Stores that fail: files that were damaged, a disk that is too small, a store that is closed under its
// tier, a runtime that breaks. Requests go on, and nothing that comes back is wrong.
#include "world.hpp"

#include "tier/tier.hpp"

#include <fstream>

using namespace world;

namespace {

struct subject {
    llama_model *model;
    std::string path;
};

constexpr double tolerance = 0.02;

double far(const logits_t &with, const logits_t &without) {
    const auto [low, high] = std::minmax_element(without.begin(), without.end());
    return distance(with, without) / double(*high - *low);
}

how small() {
    how is;
    is.n_ctx = 1024;
    is.n_batch = 128;
    return is;
}

kvt_llama_tier_opts_t plain(const subject &of) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.model_path = of.path.c_str();
    opts.host_bytes = uint64_t(32) << 20;
    return opts;
}

/// Flips a byte of every segment's each `step`, from `start` on. How many.
size_t flip(const std::string &folder, uint64_t start, uint64_t step) {
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
            // What was never written stays so: zeros are no records.
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

void damaged(const subject &of, uint64_t start, uint64_t step) {
    folder place;
    const how is = small();
    const std::string path = place.path + "/kv";
    kvt_llama_tier_opts_t opts = plain(of);
    opts.disk_path = path.c_str();
    opts.disk_bytes = uint64_t(256) << 20;
    std::vector<tokens_t> all;
    {
        llama_context *ctx = context(of.model, is);
        kvt_llama_tier_t *tier = open_tier(ctx, opts);
        for (uint32_t i = 0; i < 4; i++) {
            all.push_back(prompt(of.model, 300 + i, 300));
            with_us(tier, ctx, 0, all.back());
        }
        flush(tier);
        close_tier(&tier);
        llama_free(ctx);
    }
    const size_t flips = flip(path, start, step);
    llama_context *ctx = context(of.model, is);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    size_t reused = 0;
    for (const tokens_t &one : all) {
        kvt_llama_attached_t at;
        const logits_t with = with_us(tier, ctx, 0, one, &at);
        CHECK(far(with, without_us(of.model, is, one, {128, 256})) <= tolerance);
        reused += at.reused_tokens;
    }
    const kvt_llama_tier_stats_t seen = stats(tier);
    std::printf("%zu bytes flipped: %zu of 1152 tokens reused, %llu restores refused\n", flips, reused,
                (unsigned long long) seen.refused_restores);
    CHECK(flips > 0 && reused < 1152);
    kvt_llama_tier_close(&tier, &why); /* what lies before a damaged chunk may not be storable again */
    llama_free(ctx);
}

/// The smallest disk that a store opens with: most of it leaves again.
void tiny_disk(const subject &of) {
    folder place;
    const how is = small();
    const std::string path = place.path + "/kv";
    kvt_runtime_t *runtime = nullptr;
    kvt_store_t *store = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    const std::string spec =
        "store(host=1MiB, disk=disk(path=\"" + path + "\", bytes=1280KiB, segment=256KiB))";
    kvt_store_opts_t so = KVT_STORE_OPTS_INIT;
    so.spec = spec.c_str();
    so.spec_bytes = spec.size();
    CHECK_OK(kvt_store_open(runtime, nullptr, &so, &store, nullptr));
    kvt_llama_tier_opts_t opts = plain(of);
    opts.store = store;
    llama_context *ctx = context(of.model, is);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    for (uint32_t i = 0; i < 16; i++) {
        const tokens_t one = prompt(of.model, 320 + i % 5, 300);
        const logits_t with = with_us(tier, ctx, llama_seq_id(i % 2), one);
        CHECK(far(with, without_us(of.model, is, one, {128, 256})) <= tolerance);
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

/// The store goes while a tier uses it.
void closed(const subject &of) {
    const how is = small();
    kvt_runtime_t *runtime = nullptr;
    kvt_store_t *store = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    CHECK_OK(kvt_store_open(runtime, nullptr, nullptr, &store, nullptr));
    kvt_llama_tier_opts_t opts = plain(of);
    opts.store = store;
    llama_context *ctx = context(of.model, is);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    const tokens_t one = prompt(of.model, 340, 300), other = prompt(of.model, 341, 300);
    with_us(tier, ctx, 0, one);
    CHECK_OK(kvt_store_close(&store, 0, nullptr));
    kvt_llama_attached_t at;
    CHECK_OK(kvt_llama_attach(tier, 0, other.data(), other.size(), &at, &why));
    CHECK(at.reused_tokens == 0 && at.refused == KVT_E_CLOSED && why.text[0] != 0);
    CHECK_OK(kvt_llama_prefill(tier, 0, other.data(), other.size(), 0, &why));
    CHECK(far(logits(ctx), without_us(of.model, is, other)) <= tolerance);
    CHECK(stats(tier).failed_saves > 0);
    CHECK(kvt_llama_commit(tier, 0, other.data(), other.size(), &why) != KVT_OK);
    CHECK(kvt_llama_tier_close(&tier, &why) != KVT_OK && tier == nullptr);
    llama_free(ctx);
    CHECK_OK(kvt_runtime_close(&runtime, 0, nullptr, nullptr));
}

/// An op that does not end: its buffer is nobody's until it has, and closing does not wait for ever.
void in_flight(const subject &of) {
    kvt_runtime_t *runtime = nullptr;
    kvt_budget_t *budget = nullptr;
    kvt_account_t *account = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    kvt_budget_opts_t bo = KVT_BUDGET_OPTS_INIT;
    bo.host_bytes = uint64_t(1) << 20;
    CHECK_OK(kvt_budget_open(runtime, &bo, &budget, nullptr));
    CHECK_OK(kvt_account_open(budget, nullptr, &account, nullptr));
    CHECK_OK(kvt_account_reserve(account, KVT_TIER_HOST, bo.host_bytes, nullptr));
    // What waits for memory that nobody gives back.
    kvt_op_t *ops[2] = {};
    for (kvt_op_t *&op : ops) {
        CHECK_OK(kvt_account_reserve_later(account, KVT_TIER_HOST, 4096, nullptr, &op, nullptr));
    }
    llama_context *ctx = context(of.model, small());
    kvt_llama_tier_t *tier = open_tier(ctx, plain(of));
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
    std::memset(data, 1, 4096); /* it is the op's still */
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
    subject of{nullptr, model_path(argv[1])};
    of.model = load(of.path);
    damaged(of, 5000, 40000);
    damaged(of, 300, 4096);
    tiny_disk(of);
    closed(of);
    in_flight(of);
    llama_model_free(of.model);
    return 0;
}
