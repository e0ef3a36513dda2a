// Measures the cost and the gain of the KV tier, each against a baseline without it in the same run:
//
//   tier_bench MODEL.gguf [--quick] [host|disk|stories|overhead]
//
// Prints one JSON object per line. Stores are created in TMPDIR (default /tmp), which must be on the disk to
// measure.
#include "fixture.hpp"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

using namespace tier_test;

namespace {

constexpr size_t prefix_tokens = 1024;

struct setting {
    std::string path;
    llama_model *model;
    bool quick;
    size_t pairs() const { return quick ? 7 : 25; }
};

double median(std::vector<double> all) {
    std::sort(all.begin(), all.end());
    return all.empty() ? 0 : all[all.size() / 2];
}

double ms_since(uint64_t start) { return double(now_ns() - start) / 1e6; }

enum class better { lower, higher };

void line(const char *bar, double value, const char *unit, const char *baseline, double base, double goal,
          better which) {
    const bool lower = which == better::lower;
    const bool good = lower ? value <= goal : value >= goal;
    std::printf("{\"group\":\"llama\",\"bar\":\"%s\",\"value\":%.4f,\"unit\":\"%s\",\"baseline\":\"%s\","
                "\"baseline_value\":%.4f,\"goal\":%g,\"better\":\"%s\",\"ok\":%s}\n",
                bar, value, unit, baseline, base, goal, lower ? "lower" : "higher", good ? "true" : "false");
    std::fflush(stdout);
}

context_config bench_config() {
    context_config config;
    config.n_ctx = 4096;
    config.n_batch = 512;
    config.threads = 2;
    return config;
}

kvt_llama_tier_opts_t options(const setting &s, uint64_t host_bytes, const std::string *disk_path) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.model_path = s.path.c_str();
    opts.host_bytes = host_bytes;
    if (disk_path) {
        opts.disk_path = disk_path->c_str();
        opts.disk_bytes = uint64_t(2) << 30;
    }
    return opts;
}

void clear_sequence(llama_context *ctx, kvt_llama_tier_t *tier) {
    CHECK_OK(kvt_llama_forget(tier, 0));
    llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
}

/// Reads `bytes` with O_DIRECT, 1 MiB at a time. Returns 0 if that is not supported.
double raw_read_ms(const std::string &path, uint64_t bytes) {
    const int file = open(path.c_str(), O_RDONLY | O_DIRECT);
    if (file < 0) {
        return 0;
    }
    constexpr size_t step = 1 << 20;
    void *buffer = std::aligned_alloc(4096, step);
    const uint64_t start = now_ns();
    uint64_t done = 0;
    for (ssize_t got = 1; done < bytes && got > 0; done += uint64_t(got)) {
        got = pread(file, buffer, step, off_t(done));
    }
    const double took = ms_since(start);
    std::free(buffer);
    close(file);
    return done >= bytes ? took : 0;
}

std::string raw_file(const std::string &folder, uint64_t bytes) {
    const std::string path = folder + "/raw";
    FILE *file = std::fopen(path.c_str(), "wb");
    CHECK(file != nullptr);
    std::vector<uint8_t> block(1 << 20);
    for (size_t i = 0; i < block.size(); i++) {
        block[i] = uint8_t(i * 2654435761u >> 13);
    }
    for (uint64_t done = 0; done < bytes + block.size(); done += block.size()) {
        CHECK(std::fwrite(block.data(), 1, block.size(), file) == block.size());
    }
    std::fflush(file);
    fsync(fileno(file));
    std::fclose(file);
    return path;
}

/// Drops the store's files from the page cache, for stores that read through it.
void drop_page_cache(const std::string &folder) {
    for (const auto &entry : std::filesystem::directory_iterator(folder)) {
        const int file = open(entry.path().c_str(), O_RDONLY);
        if (file >= 0) {
            posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
            close(file);
        }
    }
}

/// Restores from host memory, against llama_state_seq_set_data and against decoding.
void from_host(const setting &s) {
    const context_config config = bench_config();
    llama_context *ctx = context(s.model, config);
    kvt_llama_tier_t *tier = open_tier(ctx, options(s, uint64_t(512) << 20, nullptr));
    const tokens_t tokens = prompt(s.model, 1, prefix_tokens + 1);
    uint64_t start = now_ns();
    CHECK(decode(ctx, 0, tokens, 0, prefix_tokens, config.n_batch) == 0);
    llama_synchronize(ctx);
    const double prefill_ms = ms_since(start);
    CHECK_OK(kvt_llama_commit(tier, 0, tokens.data(), prefix_tokens, &why));
    flush(tier);
    std::vector<uint8_t> blob(llama_state_seq_get_size(ctx, 0));
    CHECK(llama_state_seq_get_data(ctx, blob.data(), blob.size(), 0) == blob.size());
    std::vector<double> ratios, copies, restores;
    for (size_t i = 0; i < s.pairs() + 2; i++) {
        clear_sequence(ctx, tier);
        start = now_ns();
        CHECK(llama_state_seq_set_data(ctx, blob.data(), blob.size(), 0) == blob.size());
        const double copy = ms_since(start);
        clear_sequence(ctx, tier);
        start = now_ns();
        CHECK(attach(tier, 0, tokens).reused_tokens == prefix_tokens);
        const double restore = ms_since(start);
        if (i >= 2) {
            ratios.push_back(restore / copy);
            copies.push_back(copy);
            restores.push_back(restore);
        }
    }
    line("restore_host", median(ratios), "x", "llama_state_seq_set_data of 1024 tokens, ms", median(copies),
         1.2, better::lower);
    line("restore_against_prefill", prefill_ms / median(restores), "x", "decoding 1024 tokens, ms",
         prefill_ms, 100, better::higher);
    close_tier(&tier);
    llama_free(ctx);
}

/// Restores from the disk of a reopened store.
void from_disk(const setting &s) {
    temp_dir dir;
    const context_config config = bench_config();
    llama_context *ctx = context(s.model, config);
    const tokens_t tokens = prompt(s.model, 1, prefix_tokens + 1);
    const std::string store = dir.path + "/kv";
    kvt_llama_tier_opts_t opts = options(s, uint64_t(512) << 20, &store);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    CHECK(decode(ctx, 0, tokens, 0, prefix_tokens, config.n_batch) == 0);
    CHECK_OK(kvt_llama_commit(tier, 0, tokens.data(), prefix_tokens, &why));
    close_tier(&tier);
    const uint64_t bytes = llama_state_seq_get_size(ctx, 0);
    const std::string file = raw_file(dir.path, bytes);
    std::vector<double> ratios, reads;
    for (size_t i = 0; i < (s.quick ? 3 : 11); i++) {
        llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
        const double read = raw_read_ms(file, bytes);
        if (read == 0) {
            std::printf("{\"group\":\"llama\",\"bar\":\"restore_disk\",\"ok\":null,"
                        "\"why\":\"no O_DIRECT here\"}\n");
            break;
        }
        tier = open_tier(ctx, opts);
        drop_page_cache(store);
        const uint64_t start = now_ns();
        const kvt_llama_attached_t at = attach(tier, 0, tokens);
        const double took = ms_since(start);
        CHECK(at.reused_tokens == prefix_tokens && at.disk_tokens == prefix_tokens);
        ratios.push_back(took / (1.2 * read));
        reads.push_back(read);
        close_tier(&tier);
    }
    if (!ratios.empty()) {
        line("restore_disk", median(ratios), "x", "1.2 * raw O_DIRECT read, ms", median(reads), 1.05,
             better::lower);
    }
    llama_free(ctx);
}

/// The reused share of returning prompts, in patterns in which a cache of whole sequences reuses nothing.
void reuse_patterns(const setting &s) {
    temp_dir dir;
    context_config config = bench_config();
    llama_context *ctx = context(s.model, config);
    const size_t count = s.quick ? 256 : 512;
    const tokens_t a = prompt(s.model, 11, count), b = prompt(s.model, 12, count);
    const tokens_t more = prompt(s.model, 13, 16);
    const tokens_t x = concat(a, prompt(s.model, 14, count / 4));
    const tokens_t y = concat(a, prompt(s.model, 15, count / 4));
    const std::string store = dir.path + "/kv";
    kvt_llama_attached_t at;

    // Host memory for 1.8 states; the disk keeps the rest.
    CHECK(decode(ctx, 0, a, 0, 64, 64) == 0);
    const uint64_t state = llama_state_seq_get_size(ctx, 0) / 64 * count;
    llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
    kvt_llama_tier_opts_t opts = options(s, std::max<uint64_t>(state * 18 / 10, 8 << 20), &store);
    kvt_llama_tier_t *tier = open_tier(ctx, opts);
    run_with_tier(tier, ctx, 0, a);
    run_with_tier(tier, ctx, 0, b);
    run_with_tier(tier, ctx, 0, concat(a, more), &at);
    const double of_a = double(a.size());
    line("story_a_b_a", double(at.reused_tokens) / of_a, "of A", "A's tokens", of_a, 1, better::higher);
    run_with_tier(tier, ctx, 0, x);
    run_with_tier(tier, ctx, 0, y);
    run_with_tier(tier, ctx, 0, concat(x, more), &at);
    const double of_x = double(x.size());
    line("story_branches", double(at.reused_tokens) / of_x, "of P+x", "its tokens", of_x, 1, better::higher);
    close_tier(&tier);
    llama_free(ctx);

    ctx = context(s.model, config);
    tier = open_tier(ctx, opts);
    at = attach(tier, 0, concat(x, more));
    const double full = double(x.size() / 32 * 32);
    line("story_restart", double(at.reused_tokens) / full, "of P+x", "tokens of its full chunks", full, 1,
         better::higher);
    close_tier(&tier);
    llama_free(ctx);
}

/// Processor time of all threads, which other work on the machine does not change.
double cpu_ms() {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return double(now.tv_sec) * 1e3 + double(now.tv_nsec) / 1e6;
}

/// Saves chunks until they are durable, and relates their processor time to that of decoding their tokens.
void save_cost(const setting &s) {
    temp_dir dir;
    context_config config = bench_config();
    // A second thread would spin while the first one works.
    config.threads = 1;
    llama_context *ctx = context(s.model, config);
    const std::string store = dir.path + "/kv";
    kvt_llama_tier_t *tier = open_tier(ctx, options(s, uint64_t(64) << 20, &store));
    const size_t chunk = 32, chunks = 16;
    const tokens_t tokens = prompt(s.model, 31, (chunks + 1) * chunk);
    CHECK(decode(ctx, 0, tokens, 0, chunks * chunk, config.n_batch) == 0);
    double start = cpu_ms();
    for (size_t at = chunks * chunk; at < tokens.size(); at++) {
        CHECK(decode(ctx, 0, tokens, at, at + 1, 1) == 0);
    }
    const double decoded = cpu_ms() - start;
    std::vector<double> saves;
    for (size_t round = 0; round < (s.quick ? 4 : 12); round++) {
        // The store has none of these chunks. It does not compare tokens with what the engine decoded.
        const tokens_t other = prompt(s.model, uint32_t(100 + round), chunks * chunk);
        for (size_t end = chunk; end <= other.size(); end += chunk) {
            start = cpu_ms();
            for (size_t at = end - chunk + 1; at <= end; at++) {
                CHECK_OK(kvt_llama_commit(tier, 0, other.data(), at, &why));
            }
            flush(tier);
            saves.push_back(cpu_ms() - start);
        }
    }
    line("save_processor_time", 1 + median(saves) / decoded, "x", "decoding 32 tokens, processor ms", decoded,
         1.005, better::lower);
    close_tier(&tier);
    llama_free(ctx);
}

/// Decodes token by token with a commit after each, against the same without commits. The store is filled
/// first, because first touches of memory would dominate.
void overhead(const setting &s) {
    temp_dir dir;
    const context_config config = bench_config();
    llama_context *ctx = context(s.model, config);
    const std::string store = dir.path + "/kv";
    kvt_llama_tier_t *tier = open_tier(ctx, options(s, uint64_t(24) << 20, &store));
    for (uint64_t seed = 22; seed < 24; seed++) {
        const tokens_t filler = prompt(s.model, seed, 1024);
        CHECK(decode(ctx, 0, filler, 0, filler.size(), config.n_batch) == 0);
        commit(tier, 0, filler);
        flush(tier);
        clear_sequence(ctx, tier);
    }
    const size_t rounds = s.quick ? 8 : 30, step = 32;
    const tokens_t tokens = prompt(s.model, 21, 128 + (3 * rounds + 1) * step);
    CHECK(attach(tier, 0, tokens).reused_tokens == 0);
    CHECK(decode(ctx, 0, tokens, 0, 128, config.n_batch) == 0);
    commit(tier, 0, tokens_t(tokens.begin(), tokens.begin() + 128));
    size_t at = 128;
    const auto run = [&](bool with) {
        const uint64_t start = now_ns();
        for (size_t i = 0; i < step; i++, at++) {
            CHECK(decode(ctx, 0, tokens, at, at + 1, 1) == 0);
            llama_synchronize(ctx);
            if (with) {
                CHECK_OK(kvt_llama_commit(tier, 0, tokens.data(), at + 1, &why));
            }
        }
        return ms_since(start);
    };
    run(true);
    const kvt_llama_tier_stats_t before = stats(tier);
    // Each round has one run with the tier and two without, in rotation. The two differ by noise only.
    std::vector<double> ratios, noise, plain_ms;
    for (size_t i = 0; i < rounds; i++) {
        double ms[3];
        for (size_t turn = 0; turn < 3; turn++) {
            const size_t which = (i + turn) % 3;
            ms[which] = run(which == 0);
        }
        const double plain = (ms[1] + ms[2]) / 2;
        ratios.push_back(ms[0] / plain);
        noise.push_back(std::max(ms[1], ms[2]) / std::min(ms[1], ms[2]));
        plain_ms.push_back(plain / double(step));
    }
    line("overhead_per_token", median(ratios), "x", "a decoded token without the tier, ms",
         median(plain_ms), 1.005, better::lower);
    std::printf("{\"group\":\"llama\",\"note\":\"two runs without the tier differ by\",\"value\":%.4f}\n",
                median(noise));
    const kvt_llama_tier_stats_t seen = stats(tier);
    const double commit_ms =
        double(seen.commit_ns - before.commit_ns) / 1e6 / double(seen.commits - before.commits);
    line("commit_of_a_token", commit_ms / median(plain_ms), "of its time",
         "a decoded token without the tier, ms", median(plain_ms), 0.01, better::lower);
    close_tier(&tier);
    llama_free(ctx);
}

} // namespace

int main(int argc, char **argv) {
    std::string only;
    setting s{};
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        std::string &target = s.path.empty() ? s.path : only;
        s.quick = s.quick || word == "--quick";
        target = word == "--quick" ? target : word;
    }
    if (s.path.empty()) {
        std::fprintf(stderr, "usage: tier_bench MODEL.gguf [--quick] [host|disk|stories|overhead]\n");
        return 2;
    }
    s.model = load(s.path);
    const auto wanted = [&](const char *part) { return only.empty() || only == part; };
    if (wanted("host")) {
        from_host(s);
    }
    if (wanted("disk")) {
        from_disk(s);
    }
    if (wanted("stories")) {
        reuse_patterns(s);
    }
    if (wanted("overhead")) {
        overhead(s);
        save_cost(s);
    }
    llama_model_free(s.model);
    return 0;
}
