// A tier in use: memory that is too small, holes, budgets, many sequences, many threads, a process that is
// killed while it saves.
#include "world.hpp"

#include "tier/tier.hpp"

#include <atomic>
#include <csignal>
#include <random>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace world;

namespace {

struct subject {
    llama_model *model;
    std::string path;
    const char *self;
    const char *name;
};

/// Of logits, in parts of their range: cells lie elsewhere where others have used a context.
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
    opts.host_bytes = uint64_t(64) << 20;
    return opts;
}

kvt_store_stats_t store_stats(const kvt_llama_tier_t *tier) {
    kvt_store_stats_t out = KVT_STORE_STATS_INIT;
    CHECK_OK(kvt_store_stats(tier->store, &out));
    return out;
}

/// Several conversations through memory for one of them: the disk has the others. Without a disk what
/// was evicted is decoded, and nothing is wrong.
void eviction(const subject &of, bool disk) {
    folder place;
    const how is = small();
    llama_context *ctx = context(of.model, is);
    kvt_llama_tier_opts_t opts = plain(of);
    opts.host_bytes = uint64_t(2) << 20;
    const std::string path = place.path + "/kv";
    opts.disk_path = disk ? path.c_str() : nullptr;
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    std::vector<tokens_t> all;
    size_t reused = 0;
    for (uint32_t i = 0; i < 10; i++) {
        all.push_back(prompt(of.model, 40 + i, 260));
        with_us(tier, ctx, 0, all.back());
    }
    for (const tokens_t &one : all) {
        kvt_llama_attached_t at;
        const logits_t with = with_us(tier, ctx, 0, one, &at);
        reused += at.reused_tokens;
        CHECK(far(with, without_us(of.model, is, one, {128, 256, at.reused_tokens})) <= tolerance);
        CHECK(store_stats(tier).host_used_bytes <= opts.host_bytes);
    }
    std::printf("eviction, %s: %zu of 2600 tokens reused\n", disk ? "disk" : "no disk", reused);
    CHECK(disk ? reused == 10 * 256 : reused < 10 * 256);
    CHECK(!disk || stats(tier).failed_saves == 0);
    kvt_llama_tier_close(&tier, &why); /* without a disk something may have found no room */
    llama_free(ctx);
}

/// Chunks in the middle are taken out of the store; they are computed anew, in their places.
void holes(const subject &of) {
    how is = small();
    llama_context *ctx = context(of.model, is);
    kvt_llama_tier_opts_t opts = plain(of);
    opts.flags = KVT_LLAMA_HOLES;
    const tokens_t tokens = prompt(of.model, 7, 330);
    // As many tokens at once as a hole has, so that both runs decode the same batches.
    is.n_batch = 64;
    llama_free(ctx);
    ctx = context(of.model, is);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    const logits_t first = with_us(tier, ctx, 0, tokens);
    flush(tier);
    kvt_prefill_cost_t cost = KVT_PREFILL_COST_INIT;
    cost.beta_ns = 1e9;
    CHECK_OK(kvt_namespace_set_prefill_cost(tier->space, &cost, nullptr));
    {
        const kvtier_llama::session held(*tier, tokens.data(), 320);
        CHECK_OK(kvt_session_drop(held.handle, 64, 64, nullptr, nullptr));
        CHECK_OK(kvt_session_drop(held.handle, 192, 64, nullptr, nullptr));
    }
    // Another sequence, so that nothing is there but what is in the store.
    kvt_llama_attached_t at;
    llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
    CHECK_OK(kvt_llama_forget(tier, 0));
    at = attach(tier, 1, tokens);
    std::printf("holes: %u reused, %u of them computed anew\n", at.reused_tokens, at.recomputed_tokens);
    CHECK(at.reused_tokens == 320 && at.recomputed_tokens == 128 && at.refused == KVT_OK);
    CHECK(decode(ctx, 1, tokens, 320, 330, 64) == 0);
    CHECK(bitwise(logits(ctx), first));
    CHECK(bitwise(first, without_us(of.model, is, tokens)));
    commit(tier, 1, tokens);
    flush(tier);
    // Now the holes are filled in the store, too.
    llama_memory_seq_rm(llama_get_memory(ctx), 1, -1, -1);
    CHECK_OK(kvt_llama_forget(tier, 1));
    at = attach(tier, 2, tokens);
    CHECK(at.reused_tokens == 320 && at.recomputed_tokens == 0);
    close_tier(&tier);
    llama_free(ctx);
}

/// Nothing was observed of what decoding takes yet: what is there is loaded all the same.
void holes_after_restart(const subject &of) {
    folder place;
    const std::string path = place.path + "/kv";
    kvt_llama_tier_opts_t opts = plain(of);
    opts.flags = KVT_LLAMA_HOLES;
    opts.disk_path = path.c_str();
    const tokens_t tokens = prompt(of.model, 8, 330);
    for (const uint32_t wanted : {0u, 320u}) {
        llama_context *ctx = context(of.model, small());
        kvt_llama_tier_t *tier = open_tier(ctx, opts);
        kvt_llama_attached_t at;
        with_us(tier, ctx, 0, tokens, &at);
        std::printf("holes, opened again: %u reused\n", at.reused_tokens);
        CHECK(at.reused_tokens == wanted && at.recomputed_tokens == 0);
        close_tier(&tier);
        llama_free(ctx);
    }
}

/// All that the tier and its store take is paid for by a budget, at every moment.
void budgets(const subject &of) {
    kvt_runtime_t *runtime = nullptr;
    kvt_budget_t *budget = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    kvt_budget_opts_t bo = KVT_BUDGET_OPTS_INIT;
    bo.host_bytes = uint64_t(48) << 20;
    CHECK_OK(kvt_budget_open(runtime, &bo, &budget, nullptr));
    llama_context *ctx = context(of.model, small());
    kvt_llama_tier_opts_t opts = plain(of);
    opts.runtime = runtime;
    opts.budget = budget;
    opts.host_bytes = uint64_t(32) << 20;
    opts.buffer_bytes = uint64_t(2) << 20;
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    for (uint32_t i = 0; i < 12; i++) {
        with_us(tier, ctx, llama_seq_id(i % 3), prompt(of.model, 60 + i % 5, 300));
        kvt_tier_report_t report = KVT_TIER_REPORT_INIT;
        CHECK_OK(kvt_budget_tier(budget, KVT_TIER_HOST, &report));
        CHECK(report.peak_bytes <= bo.host_bytes && report.committed_bytes >= stats(tier).buffer_bytes);
    }
    CHECK(stats(tier).most_buffer_bytes <= opts.buffer_bytes && stats(tier).reused_tokens > 0);
    close_tier(&tier);
    llama_free(ctx);
    CHECK_OK(kvt_budget_close(&budget, nullptr));
    CHECK_OK(kvt_runtime_close(&runtime, 0, nullptr, nullptr));
}

/// One context, three sequences for nine people who come and go: as a server does it.
void server(const subject &of, bool flash) {
    how is = small();
    is.flash = flash;
    llama_context *ctx = context(of.model, is);
    kvt_llama_tier_t *tier = open_tier(ctx, plain(of));
    std::mt19937 random(5);
    std::vector<tokens_t> users;
    const tokens_t system = prompt(of.model, 80, 64);
    for (uint32_t i = 0; i < 9; i++) {
        users.push_back(joined(system, prompt(of.model, 81 + i, 40)));
    }
    size_t asked = 0, reused = 0;
    for (int turn = 0; turn < 40; turn++) {
        tokens_t &who = users[random() % users.size()];
        const llama_seq_id seq = llama_seq_id(random() % 3);
        kvt_llama_attached_t at;
        const logits_t with = with_us(tier, ctx, seq, who, &at);
        asked += who.size();
        reused += at.reused_tokens;
        CHECK(far(with, without_us(of.model, is, who)) <= tolerance);
        // The answer, a token at a time.
        for (int i = 0; i < 5; i++) {
            who.push_back(llama_token(best(logits(ctx))));
            CHECK(decode(ctx, seq, who, who.size() - 1, who.size(), 1) == 0);
            commit(tier, seq, who);
        }
        who = joined(who, prompt(of.model, random(), 1 + random() % 6));
        if (who.size() > 250) {
            who.resize(104);
        }
    }
    std::printf("server: %zu of %zu tokens reused\n", reused, asked);
    CHECK(reused * 10 > asked * 6);
    CHECK(stats(tier).failed_saves == 0 && stats(tier).refused_restores == 0);
    close_tier(&tier);
    llama_free(ctx);
}

/// Eight contexts of one store, each with a thread.
void threads(const subject &of) {
    folder place;
    kvt_runtime_t *runtime = nullptr;
    kvt_store_t *store = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    kvt_store_opts_t so = KVT_STORE_OPTS_INIT;
    const std::string path = place.path + "/kv";
    so.host_bytes = uint64_t(8) << 20;
    so.disk_path = path.c_str();
    so.disk_path_bytes = path.size();
    so.disk_bytes = uint64_t(512) << 20;
    CHECK_OK(kvt_store_open(runtime, nullptr, &so, &store, nullptr));
    how is = small();
    is.n_ctx = 512;
    const tokens_t common = prompt(of.model, 100, 96);
    std::vector<tokens_t> prompts;
    std::vector<logits_t> right;
    for (uint32_t i = 0; i < 6; i++) {
        prompts.push_back(joined(common, prompt(of.model, 101 + i, 60 + 20 * i)));
        right.push_back(without_us(of.model, is, prompts.back()));
    }
    std::atomic<size_t> reused{0};
    std::vector<std::thread> all;
    for (uint32_t number = 0; number < 8; number++) {
        all.emplace_back([&, number] {
            kvt_llama_tier_opts_t opts = plain(of);
            opts.store = store;
            llama_context *ctx = context(of.model, is);
            kvt_llama_tier_t *tier = open_tier(ctx, opts);
            std::mt19937 random(number);
            for (int turn = 0; turn < 12; turn++) {
                const size_t which = random() % prompts.size();
                kvt_llama_attached_t at;
                const logits_t with = with_us(tier, ctx, llama_seq_id(random() % 2), prompts[which], &at);
                CHECK(far(with, right[which]) <= tolerance);
                reused += at.reused_tokens;
            }
            CHECK(stats(tier).failed_saves == 0 && stats(tier).refused_restores == 0);
            close_tier(&tier);
            llama_free(ctx);
        });
    }
    for (std::thread &one : all) {
        one.join();
    }
    std::printf("threads: %zu tokens reused\n", reused.load());
    CHECK(reused > 0);
    CHECK_OK(kvt_store_close(&store, 0, nullptr));
    CHECK_OK(kvt_runtime_close(&runtime, 0, nullptr, nullptr));
}

/// What the process does that is killed: saves until the end.
int child(const subject &of, const char *folder, uint32_t round) {
    llama_context *ctx = context(of.model, small());
    kvt_llama_tier_opts_t opts = plain(of);
    opts.disk_path = folder;
    opts.disk_bytes = uint64_t(256) << 20;
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    with_us(tier, ctx, 0, prompt(of.model, 200, 300));
    flush(tier);
    std::printf("flushed\n");
    std::fflush(stdout);
    for (uint32_t i = 0;; i++) {
        with_us(tier, ctx, llama_seq_id(i % 3), prompt(of.model, 1000 * (round + 1) + i, 300));
        std::printf(".");
        std::fflush(stdout);
    }
}

/// What was flushed is there after the process was killed while it saved more; all that is found is right.
void killed(const subject &of) {
    folder place;
    const std::string path = place.path + "/kv";
    const how is = small();
    for (uint32_t round = 0; round < 4; round++) {
        int ends[2];
        CHECK(pipe(ends) == 0);
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            dup2(ends[1], 1);
            close(ends[0]);
            execl(of.self, of.self, of.name, "child", path.c_str(), std::to_string(round).c_str(),
                  (char *) nullptr);
            _exit(3);
        }
        close(ends[1]);
        // It has flushed, and saved some more; then it is in the middle of something.
        uint32_t dots = 0;
        char one = 0;
        while (dots < 1 + round && read(ends[0], &one, 1) == 1) {
            dots += one == '.';
        }
        CHECK(dots == 1 + round);
        std::this_thread::sleep_for(std::chrono::milliseconds(40 * round));
        CHECK(kill(pid, SIGKILL) == 0);
        int status = 0;
        CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
        close(ends[0]);

        llama_context *ctx = context(of.model, is);
        kvt_llama_tier_opts_t opts = plain(of);
        opts.disk_path = path.c_str();
        opts.disk_bytes = uint64_t(256) << 20;
        kvt_llama_tier_t *tier = open_tier(ctx, opts);
        kvt_llama_attached_t at;
        const tokens_t flushed = prompt(of.model, 200, 300);
        const logits_t with = with_us(tier, ctx, 0, flushed, &at);
        CHECK(at.reused_tokens == 288 && at.disk_tokens == 288 && at.refused == KVT_OK);
        CHECK(far(with, without_us(of.model, is, flushed, {128, 256, 288})) <= tolerance);
        size_t found = 0;
        for (uint32_t i = 0; i < 8; i++) {
            const tokens_t other = prompt(of.model, 1000 * (round + 1) + i, 300);
            const logits_t seen = with_us(tier, ctx, 1, other, &at);
            CHECK(far(seen, without_us(of.model, is, other, {128, 256})) <= tolerance);
            found += at.reused_tokens;
        }
        std::printf("killed, round %d: %zu tokens more were found\n", round, found);
        close_tier(&tier);
        llama_free(ctx);
    }
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc >= 2);
    subject of{nullptr, model_path(argv[1]), argv[0], argv[1]};
    of.model = load(of.path);
    if (argc == 5 && std::strcmp(argv[2], "child") == 0) {
        return child(of, argv[3], uint32_t(std::atoi(argv[4])));
    }
    const bool attends = !llama_model_is_recurrent(of.model) && !llama_model_is_hybrid(of.model);
    if (attends && llama_model_n_swa(of.model) == 0) {
        eviction(of, true);
        eviction(of, false);
        holes(of);
        holes_after_restart(of);
        budgets(of);
    }
    server(of, true);
    server(of, false);
    threads(of);
    killed(of);
    llama_model_free(of.model);
    return 0;
}
