// A tier in use: small host memory, holes, budgets, many sequences, many threads, a process that is killed
// during a save.
#include "fixture.hpp"

#include "tier/tier.hpp"

#include <atomic>
#include <csignal>
#include <random>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace tier_test;

namespace {

struct test_model {
    llama_model *model;
    std::string path;
    const char *self;
    const char *name;
};

kvt_llama_tier_opts_t default_opts(const test_model &m) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.model_path = m.path.c_str();
    opts.host_bytes = uint64_t(64) << 20;
    return opts;
}

kvt_store_stats_t store_stats(const kvt_llama_tier_t *tier) {
    kvt_store_stats_t out = KVT_STORE_STATS_INIT;
    CHECK_OK(kvt_store_stats(tier->store, &out));
    return out;
}

/// Ten conversations with host memory for one. The disk keeps evicted chunks; without a disk they are decoded
/// again. Logits are right in both cases.
void evicted_conversations_are_restored_or_recomputed(const test_model &m, bool disk) {
    temp_dir dir;
    const context_config config = small_context();
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.host_bytes = uint64_t(2) << 20;
    const std::string path = dir.path + "/kv";
    opts.disk_path = disk ? path.c_str() : nullptr;
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    std::vector<tokens_t> all;
    size_t reused = 0;
    for (uint32_t i = 0; i < 10; i++) {
        all.push_back(prompt(m.model, 40 + i, 260));
        run_with_tier(tier, ctx, 0, all.back());
    }
    for (const tokens_t &one : all) {
        kvt_llama_attached_t at;
        const logits_t with = run_with_tier(tier, ctx, 0, one, &at);
        reused += at.reused_tokens;
        const logits_t plain = run_without_tier(m.model, config, one, {128, 256, at.reused_tokens});
        CHECK(relative_distance(with, plain) <= tolerance);
        CHECK(store_stats(tier).host_used_bytes <= opts.host_bytes);
    }
    std::printf("eviction, %s: %zu of 2600 tokens reused\n", disk ? "disk" : "no disk", reused);
    CHECK(disk ? reused == 10 * 256 : reused < 10 * 256);
    CHECK(!disk || stats(tier).failed_saves == 0);
    kvt_llama_tier_close(&tier, &why); /* may fail: without a disk some saves find no room */
    llama_free(ctx);
}

/// Chunks dropped from the middle of a prefix are recomputed at their positions.
void holes_are_recomputed_in_place(const test_model &m) {
    context_config config = small_context();
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.flags = KVT_LLAMA_HOLES;
    const tokens_t tokens = prompt(m.model, 7, 330);
    // A batch has the length of a hole, so that both runs decode equal batches.
    config.n_batch = 64;
    llama_free(ctx);
    ctx = context(m.model, config);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    const logits_t first = run_with_tier(tier, ctx, 0, tokens);
    flush(tier);
    kvt_prefill_cost_t cost = KVT_PREFILL_COST_INIT;
    cost.beta_ns = 1e9;
    CHECK_OK(kvt_namespace_set_prefill_cost(tier->kv_namespace, &cost, nullptr));
    {
        const kvtier_llama::session held(*tier, {tokens.data(), 320});
        CHECK_OK(kvt_session_drop(held.handle, 64, 64, nullptr, nullptr));
        CHECK_OK(kvt_session_drop(held.handle, 192, 64, nullptr, nullptr));
    }
    // The context holds nothing, so that all KV comes from the store.
    kvt_llama_attached_t at;
    llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
    CHECK_OK(kvt_llama_forget(tier, 0));
    at = attach(tier, 1, tokens);
    std::printf("holes: %u reused, %u of them recomputed\n", at.reused_tokens, at.recomputed_tokens);
    CHECK(at.reused_tokens == 320 && at.recomputed_tokens == 128 && at.refused == KVT_OK);
    CHECK(decode(ctx, 1, tokens, 320, 330, 64) == 0);
    CHECK(bitwise_equal(logits(ctx), first));
    CHECK(bitwise_equal(first, run_without_tier(m.model, config, tokens)));
    commit(tier, 1, tokens);
    flush(tier);
    // The commit has filled the holes in the store.
    llama_memory_seq_rm(llama_get_memory(ctx), 1, -1, -1);
    CHECK_OK(kvt_llama_forget(tier, 1));
    at = attach(tier, 2, tokens);
    CHECK(at.reused_tokens == 320 && at.recomputed_tokens == 0);
    close_tier(&tier);
    llama_free(ctx);
}

/// Without a measured decode time the tier restores all stored chunks.
void holes_mode_restores_before_prefill_was_measured(const test_model &m) {
    temp_dir dir;
    const std::string path = dir.path + "/kv";
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.flags = KVT_LLAMA_HOLES;
    opts.disk_path = path.c_str();
    const tokens_t tokens = prompt(m.model, 8, 330);
    for (const uint32_t wanted : {0u, 320u}) {
        llama_context *ctx = context(m.model, small_context());
        kvt_llama_tier_t *tier = open_tier(ctx, opts);
        kvt_llama_attached_t at;
        run_with_tier(tier, ctx, 0, tokens, &at);
        std::printf("holes, reopened: %u reused\n", at.reused_tokens);
        CHECK(at.reused_tokens == wanted && at.recomputed_tokens == 0);
        close_tier(&tier);
        llama_free(ctx);
    }
}

/// The budget covers the memory of the tier and its store at every instant.
void tier_and_store_stay_within_the_budget(const test_model &m) {
    kvt_runtime_t *runtime = nullptr;
    kvt_budget_t *budget = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    kvt_budget_opts_t bo = KVT_BUDGET_OPTS_INIT;
    bo.host_bytes = uint64_t(48) << 20;
    CHECK_OK(kvt_budget_open(runtime, &bo, &budget, nullptr));
    llama_context *ctx = context(m.model, small_context());
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.runtime = runtime;
    opts.budget = budget;
    opts.host_bytes = uint64_t(32) << 20;
    opts.buffer_bytes = uint64_t(2) << 20;
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    for (uint32_t i = 0; i < 12; i++) {
        run_with_tier(tier, ctx, llama_seq_id(i % 3), prompt(m.model, 60 + i % 5, 300));
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

/// One context with three sequences serves nine users in random order, as a server does.
void interleaved_users_reuse_their_prefixes(const test_model &m, bool flash) {
    context_config config = small_context();
    config.flash = flash;
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_t *tier = open_tier(ctx, default_opts(m));
    std::mt19937 random(5);
    std::vector<tokens_t> users;
    const tokens_t system = prompt(m.model, 80, 64);
    for (uint32_t i = 0; i < 9; i++) {
        users.push_back(concat(system, prompt(m.model, 81 + i, 40)));
    }
    size_t prompt_tokens = 0, reused = 0;
    for (int turn = 0; turn < 40; turn++) {
        tokens_t &user = users[random() % users.size()];
        const llama_seq_id seq = llama_seq_id(random() % 3);
        kvt_llama_attached_t at;
        const logits_t with = run_with_tier(tier, ctx, seq, user, &at);
        prompt_tokens += user.size();
        reused += at.reused_tokens;
        CHECK(relative_distance(with, run_without_tier(m.model, config, user)) <= tolerance);
        // The answer is decoded token by token.
        for (int i = 0; i < 5; i++) {
            user.push_back(llama_token(argmax(logits(ctx))));
            CHECK(decode(ctx, seq, user, user.size() - 1, user.size(), 1) == 0);
            commit(tier, seq, user);
        }
        user = concat(user, prompt(m.model, random(), 1 + random() % 6));
        if (user.size() > 250) {
            user.resize(104);
        }
    }
    std::printf("server: %zu of %zu tokens reused\n", reused, prompt_tokens);
    CHECK(reused * 10 > prompt_tokens * 6);
    CHECK(stats(tier).failed_saves == 0 && stats(tier).refused_restores == 0);
    close_tier(&tier);
    llama_free(ctx);
}

/// Eight contexts, each on its own thread, use one store.
void contexts_on_threads_share_a_store(const test_model &m) {
    temp_dir dir;
    kvt_runtime_t *runtime = nullptr;
    kvt_store_t *store = nullptr;
    CHECK_OK(kvt_runtime_open(nullptr, &runtime, nullptr));
    kvt_store_opts_t so = KVT_STORE_OPTS_INIT;
    const std::string path = dir.path + "/kv";
    so.host_bytes = uint64_t(8) << 20;
    so.disk_path = path.c_str();
    so.disk_path_bytes = path.size();
    so.disk_bytes = uint64_t(512) << 20;
    CHECK_OK(kvt_store_open(runtime, nullptr, &so, &store, nullptr));
    context_config config = small_context();
    config.n_ctx = 512;
    const tokens_t common = prompt(m.model, 100, 96);
    std::vector<tokens_t> prompts;
    std::vector<logits_t> expected;
    for (uint32_t i = 0; i < 6; i++) {
        prompts.push_back(concat(common, prompt(m.model, 101 + i, 60 + 20 * i)));
        expected.push_back(run_without_tier(m.model, config, prompts.back()));
    }
    std::atomic<size_t> reused{0};
    std::vector<std::thread> all;
    for (uint32_t number = 0; number < 8; number++) {
        all.emplace_back([&, number] {
            kvt_llama_tier_opts_t opts = default_opts(m);
            opts.store = store;
            llama_context *ctx = context(m.model, config);
            kvt_llama_tier_t *tier = open_tier(ctx, opts);
            std::mt19937 random(number);
            for (int turn = 0; turn < 12; turn++) {
                const size_t which = random() % prompts.size();
                kvt_llama_attached_t at;
                const llama_seq_id seq = llama_seq_id(random() % 2);
                const logits_t with = run_with_tier(tier, ctx, seq, prompts[which], &at);
                CHECK(relative_distance(with, expected[which]) <= tolerance);
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

/// The child process: flushes one prompt, then saves others until it is killed.
int save_until_killed(const test_model &m, const char *disk_path, uint32_t round) {
    llama_context *ctx = context(m.model, small_context());
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.disk_path = disk_path;
    opts.disk_bytes = uint64_t(256) << 20;
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    run_with_tier(tier, ctx, 0, prompt(m.model, 200, 300));
    flush(tier);
    std::printf("flushed\n");
    std::fflush(stdout);
    for (uint32_t i = 0;; i++) {
        run_with_tier(tier, ctx, llama_seq_id(i % 3), prompt(m.model, 1000 * (round + 1) + i, 300));
        std::printf(".");
        std::fflush(stdout);
    }
}

/// After a kill during later saves, all flushed tokens are restored, and no restored KV is wrong.
void flushed_tokens_survive_a_kill(const test_model &m) {
    temp_dir dir;
    const std::string path = dir.path + "/kv";
    const context_config config = small_context();
    for (uint32_t round = 0; round < 4; round++) {
        int ends[2];
        CHECK(pipe(ends) == 0);
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            dup2(ends[1], 1);
            close(ends[0]);
            execl(m.self, m.self, m.name, "child", path.c_str(), std::to_string(round).c_str(),
                  (char *) nullptr);
            _exit(3);
        }
        close(ends[1]);
        // Waits for the flush and some further saves, then kills the child at an arbitrary point.
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

        llama_context *ctx = context(m.model, config);
        kvt_llama_tier_opts_t opts = default_opts(m);
        opts.disk_path = path.c_str();
        opts.disk_bytes = uint64_t(256) << 20;
        kvt_llama_tier_t *tier = open_tier(ctx, opts);
        kvt_llama_attached_t at;
        const tokens_t flushed = prompt(m.model, 200, 300);
        const logits_t with = run_with_tier(tier, ctx, 0, flushed, &at);
        CHECK(at.reused_tokens == 288 && at.disk_tokens == 288 && at.refused == KVT_OK);
        const logits_t plain = run_without_tier(m.model, config, flushed, {128, 256, 288});
        CHECK(relative_distance(with, plain) <= tolerance);
        size_t found = 0;
        for (uint32_t i = 0; i < 8; i++) {
            const tokens_t other = prompt(m.model, 1000 * (round + 1) + i, 300);
            const logits_t seen = run_with_tier(tier, ctx, 1, other, &at);
            CHECK(relative_distance(seen, run_without_tier(m.model, config, other, {128, 256})) <= tolerance);
            found += at.reused_tokens;
        }
        std::printf("killed, round %d: %zu unflushed tokens were restored\n", round, found);
        close_tier(&tier);
        llama_free(ctx);
    }
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc >= 2);
    test_model m{nullptr, model_path(argv[1]), argv[0], argv[1]};
    m.model = load(m.path);
    if (argc == 5 && std::strcmp(argv[2], "child") == 0) {
        return save_until_killed(m, argv[3], uint32_t(std::atoi(argv[4])));
    }
    const bool attends = !llama_model_is_recurrent(m.model) && !llama_model_is_hybrid(m.model);
    if (attends && llama_model_n_swa(m.model) == 0) {
        evicted_conversations_are_restored_or_recomputed(m, true);
        evicted_conversations_are_restored_or_recomputed(m, false);
        holes_are_recomputed_in_place(m);
        holes_mode_restores_before_prefill_was_measured(m);
        tier_and_store_stay_within_the_budget(m);
    }
    interleaved_users_reuse_their_prefixes(m, true);
    interleaved_users_reuse_their_prefixes(m, false);
    contexts_on_threads_share_a_store(m);
    flushed_tokens_survive_a_kill(m);
    llama_model_free(m.model);
    return 0;
}
