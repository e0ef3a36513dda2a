// The KV tier on one tiny model of each architecture of the engine: restarts, branches, eviction, holes, a
// killed process. Logits are bitwise those of the engine without a tier. An architecture of the engine needs
// a model, or a reason why it has none. Checks the table in docs/reference/llama-models.md, or writes it.
//
//   tier_matrix LLAMA_SOURCE PAGE [--write]   all architectures
//   tier_matrix --model NAME                  one of them
#include "fixture.hpp"

#include "tier/tier.hpp"

#include <csignal>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <sys/wait.h>
#include <unistd.h>

using namespace tier_test;

namespace {

/// The prompts fill chunks of 32 and of 128 tokens, and end within a chunk. All restored tokens end where a
/// batch ends, since the engine rounds in another way where batches differ.
constexpr size_t prompt_tokens = 140, long_tokens = 204, common_tokens = 130, restored_tokens = 128;
constexpr size_t batch_tokens = 64;

/// Models that the tier refuses, with the reason.
const std::map<std::string, std::string> &refused() {
    static const std::map<std::string, std::string> all = {
        {"t5", "KV of the decoder depends on the input of the encoder"},
    };
    return all;
}

/// Models with which the engine aborts when a context has flash attention, or a cache for each sequence.
const std::set<std::string> &broken_flash() {
    static const std::set<std::string> names = {"plm"};
    return names;
}

const std::set<std::string> &broken_streams() {
    static const std::set<std::string> names = {"kimi-linear", "minimax-01"};
    return names;
}

struct test_model {
    llama_model *model;
    std::string name, path;
};

context_config tiny_context() {
    context_config config;
    config.n_ctx = 512;
    config.n_seq = 3;
    config.n_batch = batch_tokens;
    return config;
}

kvt_llama_tier_opts_t default_opts(const test_model &m) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.model_path = m.path.c_str();
    opts.host_bytes = uint64_t(16) << 20;
    opts.disk_bytes = uint64_t(64) << 20;
    return opts;
}

/// Names the sections of the engine's sequence state.
std::string memory_of(const kvtier_llama::shape &shape) {
    std::vector<std::string> parts;
    bool spatial = false, tokens = false;
    for (const kvtier_llama::section_shape &one : shape.sections) {
        std::string part = "cells";
        part = one.window_tokens != 0 ? "window" : part;
        part = one.is_state() ? "state" : part;
        part = one.kind == kvtier_llama::section_kind::compressed ? "compressed keys" : part;
        if (std::find(parts.begin(), parts.end(), part) == parts.end() || part == "cells") {
            parts.push_back(part);
        }
        spatial = spatial || one.spatial;
        tokens = tokens || (one.extra_words == 3 && !one.spatial);
    }
    std::string text;
    for (const std::string &part : parts) {
        text += (text.empty() ? "" : ", ") + part;
    }
    return text + (spatial ? "; M-RoPE" : "") + (tokens ? "; tokens in cells" : "");
}

struct run_t {
    llama_context *ctx;
    kvt_llama_tier_t *tier;

    run_t(const test_model &m, const context_config &config, const kvt_llama_tier_opts_t &opts)
        : ctx(context(m.model, config)), tier(open_tier(ctx, opts)) {}
    ~run_t() {
        kvt_llama_tier_close(&tier, nullptr);
        llama_free(ctx);
    }
};

/// Logits of the engine without a tier. Where two runs of the engine differ, no run can be bitwise equal.
logits_t plain_logits(const test_model &m, const context_config &config, const tokens_t &tokens,
                      const std::vector<size_t> &cuts) {
    const logits_t once = run_without_tier(m.model, config, tokens, cuts);
    CHECK(bitwise_equal(once, run_without_tier(m.model, config, tokens, cuts)));
    return once;
}

void check_logits(const char *what, const logits_t &with, const logits_t &without) {
    if (!bitwise_equal(with, without)) {
        std::printf("%s: logits differ by %g of their range\n", what, relative_distance(with, without));
        std::exit(1);
    }
}

/// Opens the tier again after the context and the tier were closed: the prompt is restored from disk.
void a_restart_restores_the_prompt(const test_model &m, const context_config &config) {
    temp_dir dir;
    const std::string path = dir.path + "/kv";
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.disk_path = path.c_str();
    const tokens_t tokens = prompt(m.model, 1, prompt_tokens);
    logits_t cold;
    {
        run_t run(m, config, opts);
        cold = run_with_tier(run.tier, run.ctx, 0, tokens);
        flush(run.tier);
    }
    kvt_llama_attached_t at;
    {
        run_t run(m, config, opts);
        check_logits("restart", run_with_tier(run.tier, run.ctx, 0, tokens, &at), cold);
    }
    CHECK(at.reused_tokens == restored_tokens && at.reused_tokens == at.disk_tokens && at.refused == KVT_OK);
    check_logits("cold", cold, plain_logits(m, config, tokens, {at.reused_tokens}));
}

/// Logits of the engine alone: a sequence gets the state that another one had after the common start, as the
/// engine saves it. Then both continue, in the order of the tier's test.
std::vector<logits_t> branch_of_the_engine(const test_model &m, const context_config &config,
                                           const tokens_t &first, const tokens_t &second,
                                           const tokens_t &more) {
    llama_context *ctx = context(m.model, config);
    CHECK(decode(ctx, 0, first, 0, restored_tokens, batch_tokens) == 0);
    std::vector<uint8_t> blob(llama_state_seq_get_size(ctx, 0));
    CHECK(llama_state_seq_get_data(ctx, blob.data(), blob.size(), 0) == blob.size());
    CHECK(decode(ctx, 0, first, restored_tokens, prompt_tokens, batch_tokens) == 0);
    CHECK(llama_state_seq_set_data(ctx, blob.data(), blob.size(), 1) == blob.size());
    CHECK(decode(ctx, 1, second, restored_tokens, prompt_tokens, batch_tokens) == 0);
    std::vector<logits_t> out = {logits(ctx)};
    CHECK(decode(ctx, 0, more, prompt_tokens, more.size(), batch_tokens) == 0);
    out.push_back(logits(ctx));
    llama_free(ctx);
    return out;
}

/// Two prompts with a common start in two sequences: the second one reuses it, and the first one stays.
void a_branch_reuses_the_common_start(const test_model &m, const context_config &config) {
    run_t run(m, config, default_opts(m));
    const tokens_t first = prompt(m.model, 2, prompt_tokens);
    const tokens_t more = concat(first, prompt(m.model, 4, 8));
    tokens_t second(first.begin(), first.begin() + common_tokens);
    second = concat(second, prompt(m.model, 3, prompt_tokens - common_tokens));
    const std::vector<logits_t> wanted = branch_of_the_engine(m, config, first, second, more);
    run_with_tier(run.tier, run.ctx, 0, first);
    flush(run.tier);
    kvt_llama_attached_t at;
    check_logits("branch", run_with_tier(run.tier, run.ctx, 1, second, &at), wanted[0]);
    CHECK(at.reused_tokens == restored_tokens && at.refused == KVT_OK);
    check_logits("continuation", run_with_tier(run.tier, run.ctx, 0, more, &at), wanted[1]);
    CHECK(at.kept_tokens == prompt_tokens);
}

/// Prompts A, B, A in one sequence with host memory for less than both: the disk has what was evicted.
void an_evicted_prompt_comes_back(const test_model &m, const context_config &config) {
    temp_dir dir;
    const std::string path = dir.path + "/kv";
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.disk_path = path.c_str();
    opts.host_bytes = uint64_t(1) << 20;
    run_t run(m, config, opts);
    const tokens_t a = prompt(m.model, 5, prompt_tokens), b = prompt(m.model, 6, prompt_tokens);
    const logits_t cold_a = run_with_tier(run.tier, run.ctx, 0, a);
    const logits_t cold_b = run_with_tier(run.tier, run.ctx, 0, b);
    flush(run.tier);
    kvt_llama_attached_t at;
    check_logits("return to A", run_with_tier(run.tier, run.ctx, 0, a, &at), cold_a);
    CHECK(at.reused_tokens == restored_tokens && at.refused == KVT_OK);
    check_logits("return to B", run_with_tier(run.tier, run.ctx, 0, b, &at), cold_b);
    CHECK(at.reused_tokens == restored_tokens && at.refused == KVT_OK);
}

/// Chunks that the store dropped from the middle of a prompt are computed again.
void holes_are_computed_again(const test_model &m, const context_config &config) {
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.flags = KVT_LLAMA_HOLES;
    run_t run(m, config, opts);
    const tokens_t tokens = prompt(m.model, 7, long_tokens);
    const logits_t cold = run_with_tier(run.tier, run.ctx, 0, tokens);
    flush(run.tier);
    kvt_prefill_cost_t cost = KVT_PREFILL_COST_INIT;
    cost.beta_ns = 1e9;
    CHECK_OK(kvt_namespace_set_prefill_cost(run.tier->kv_namespace, &cost, nullptr));
    {
        const kvtier_llama::session held(*run.tier, {tokens.data(), 192});
        CHECK_OK(kvt_session_drop(held.handle, 64, 64, nullptr, nullptr));
    }
    llama_memory_seq_rm(llama_get_memory(run.ctx), 0, -1, -1);
    CHECK_OK(kvt_llama_forget(run.tier, 0));
    kvt_llama_attached_t at;
    check_logits("holes", run_with_tier(run.tier, run.ctx, 1, tokens, &at), cold);
    CHECK(at.reused_tokens == 192 && at.recomputed_tokens == 64 && at.refused == KVT_OK);
}

/// The child process: flushes one prompt, then saves others until it is killed.
int save_until_killed(const test_model &m, const char *disk_path) {
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.disk_path = disk_path;
    run_t run(m, tiny_context(), opts);
    run_with_tier(run.tier, run.ctx, 0, prompt(m.model, 8, prompt_tokens));
    flush(run.tier);
    for (uint32_t i = 0;; i++) {
        run_with_tier(run.tier, run.ctx, llama_seq_id(i % 2), prompt(m.model, 100 + i, prompt_tokens));
        if (write(1, ".", 1) != 1) {
            return 1;
        }
    }
}

/// What was flushed before a kill is restored from disk.
int check_kill(const test_model &m, const char *self) {
    temp_dir dir;
    const std::string path = dir.path + "/kv";
    int ends[2];
    CHECK(pipe(ends) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        dup2(ends[1], 1);
        close(ends[0]);
        execl(self, self, "--until-killed", m.name.c_str(), path.c_str(), (char *) nullptr);
        _exit(3);
    }
    close(ends[1]);
    char dots[3];
    for (char &dot : dots) {
        CHECK(read(ends[0], &dot, 1) == 1);
    }
    CHECK(kill(pid, SIGKILL) == 0);
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
    close(ends[0]);
    kvt_llama_tier_opts_t opts = default_opts(m);
    opts.disk_path = path.c_str();
    const context_config config = tiny_context();
    const tokens_t tokens = prompt(m.model, 8, prompt_tokens);
    run_t run(m, config, opts);
    kvt_llama_attached_t at;
    const logits_t with = run_with_tier(run.tier, run.ctx, 0, tokens, &at);
    CHECK(at.reused_tokens == restored_tokens && at.disk_tokens == restored_tokens && at.refused == KVT_OK);
    check_logits("kill", with, plain_logits(m, config, tokens, {restored_tokens}));
    return 0;
}

/// All checks of one model. The last line of output is its memory.
int check_model(const test_model &m) {
    context_config config = tiny_context();
    kvt_llama_tier_t *tier = nullptr;
    config.flash = broken_flash().count(m.name) == 0;
    llama_context *ctx = context(m.model, config);
    kvt_llama_tier_opts_t opts = default_opts(m);
    if (refused().count(m.name) != 0) {
        CHECK(kvt_llama_tier_open(ctx, &opts, &tier, &why) == KVT_E_UNSUPPORTED && why.text[0] != 0);
        llama_free(ctx);
        std::printf("refused: %s\n", why.text);
        return 0;
    }
    CHECK_OK(kvt_llama_tier_open(ctx, &opts, &tier, &why));
    const std::string memory = memory_of(tier->shape);
    const bool holes = !tier->shape.has_states() && !tier->shape.has_windows();
    close_tier(&tier);
    llama_free(ctx);
    a_restart_restores_the_prompt(m, config);
    a_branch_reuses_the_common_start(m, config);
    an_evicted_prompt_comes_back(m, config);
    if (holes) {
        holes_are_computed_again(m, config);
    }
    // A cache of its own for each sequence, and V in another layout.
    config.unified = config.flash = false;
    if (broken_streams().count(m.name) == 0) {
        a_restart_restores_the_prompt(m, config);
        a_branch_reuses_the_common_start(m, config);
    }
    std::printf("%s\n", memory.c_str());
    return 0;
}

std::string read_file(const std::string &path) {
    std::ostringstream all;
    all << std::ifstream(path).rdbuf();
    return all.str();
}

std::string models_folder() {
    const char *folder = std::getenv("KVTIER_LLAMA_MODELS");
    return folder ? folder : ".";
}

/// The engine's names of architectures.
std::set<std::string> engine_names(const std::string &source) {
    const std::string text = read_file(source + "/src/llama-arch.cpp");
    const std::regex entry("\\{ *LLM_ARCH_\\w+, *\"([^\"(]+)\" *\\}");
    std::set<std::string> names;
    for (std::sregex_iterator at(text.begin(), text.end(), entry), end; at != end; ++at) {
        names.insert((*at)[1]);
    }
    CHECK(names.size() > 100);
    return names;
}

/// Runs this program on one model, in its own process, because the engine may abort. Returns the last line
/// of its output; empty if the checks failed.
std::string run_child(const std::string &self, const char *what, const std::string &name) {
    const std::string command = self + " " + what + " " + name + " 2>&1";
    FILE *out = popen(command.c_str(), "r");
    CHECK(out != nullptr);
    std::string last, all;
    char line[1024];
    while (std::fgets(line, sizeof line, out)) {
        last.assign(line, std::strcspn(line, "\n"));
        all += line;
    }
    if (pclose(out) != 0) {
        std::printf("%s %s failed:\n%s\n", what, name.c_str(), all.c_str());
        return "";
    }
    return last.empty() ? "-" : last;
}

struct table_t {
    std::string rows;
    size_t failures = 0;

    void add(const std::string &name, const std::string &memory, const std::string &tier) {
        rows += "| `" + name + "` | " + memory + " | " + tier + " |\n";
    }
};

/// Runs all models. One of each kind of memory is also killed.
table_t check_all(const std::string &self, const std::set<std::string> &names) {
    const std::string without = "\n" + read_file(models_folder() + "/arch-without.txt");
    std::set<std::string> killed;
    table_t table;
    for (const std::string &name : names) {
        const size_t reason = without.find("\n" + name + ": ");
        if (std::filesystem::exists(models_folder() + "/arch-" + name + ".gguf")) {
            const std::string memory = run_child(self, "--model", name);
            table.failures += memory.empty();
            if (refused().count(name) != 0) {
                table.add(name, "", "no: " + refused().at(name));
                continue;
            }
            table.add(name, memory, "yes");
            table.failures += killed.insert(memory).second && run_child(self, "--kill", name).empty();
        } else if (reason != std::string::npos) {
            const size_t at = reason + name.size() + 3;
            table.add(name, "", "no model: " + without.substr(at, without.find('\n', at) - at));
        } else {
            std::printf("%s: no model and no reason: add it to models/archs.py\n", name.c_str());
            table.failures++;
        }
    }
    return table;
}

/// Compares the table with the page's, or writes it.
bool check_page(const std::string &path, const std::string &rows, bool writes) {
    const std::string begin = "| architecture | memory | the KV tier |\n|---|---|---|\n", end = "\n## ";
    const std::string page = read_file(path);
    const size_t at = page.find(begin), stop = at == std::string::npos ? at : page.find(end, at);
    if (stop == std::string::npos) {
        std::printf("%s has no table of architectures\n", path.c_str());
        return false;
    }
    const std::string wanted = page.substr(0, at + begin.size()) + rows + page.substr(stop);
    if (writes) {
        std::ofstream(path) << wanted;
    } else if (wanted != page) {
        std::printf("%s is stale: run tier_matrix LLAMA_SOURCE PAGE --write\n", path.c_str());
    }
    return writes || wanted == page;
}

} // namespace

int main(int argc, char **argv) {
    CHECK(argc >= 3);
    const std::string what = argv[1];
    if (what.rfind("--", 0) != 0) {
        if (!std::filesystem::exists(models_folder() + "/arch-llama.gguf")) {
            std::printf("SKIP: no models arch-*.gguf: models.sh WORK archs creates them\n");
            return skipped;
        }
        const table_t table = check_all(argv[0], engine_names(what));
        const bool same = check_page(argv[2], table.rows, argc > 3);
        return table.failures == 0 && same ? 0 : 1;
    }
    test_model m{nullptr, argv[2], model_path(std::string("arch-") + argv[2])};
    m.model = load(m.path);
    int status = 1;
    if (what == "--model") {
        status = check_model(m);
    } else if (what == "--kill") {
        status = check_kill(m, argv[0]);
    } else if (what == "--until-killed") {
        status = save_until_killed(m, argv[3]);
    }
    llama_model_free(m.model);
    return status;
}
