// Each architecture of the engine has a model arch-NAME.gguf, or a reason in arch-without.txt. The models
// compute: their logits are finite and not constant, equal in two runs, and change with the first token, so
// that attention or a recurrent state is in use.
//
//   archs [NAME...]   checks only some of the models
#include "tier/fixture.hpp"

#include <fstream>
#include <regex>
#include <set>
#include <sstream>

using namespace tier_test;

namespace {

constexpr size_t tokens_per_run = 8;

logits_t run(llama_context *ctx, const tokens_t &tokens, size_t batch) {
    llama_memory_clear(llama_get_memory(ctx), true);
    if (llama_model_has_encoder(llama_get_model(ctx))) {
        tokens_t read = tokens;
        CHECK(llama_encode(ctx, llama_batch_get_one(read.data(), int32_t(read.size()))) == 0);
    }
    CHECK(decode(ctx, 0, tokens, 0, tokens.size(), batch) == 0);
    return logits(ctx);
}

/// The difference of two models' outputs as a share of the spread of `a`.
double share(const logits_t &a, const logits_t &b) {
    double mean = 0, spread = 0, apart = 0;
    for (float x : a) mean += x / double(a.size());
    for (size_t i = 0; i < a.size(); i++) {
        spread += (a[i] - mean) * (a[i] - mean);
        apart += (a[i] - b[i]) * (a[i] - b[i]);
    }
    return std::sqrt(apart / spread);
}

/// What is wrong with the model, or an empty string.
std::string fault(const std::string &path) {
    llama_model *model = llama_model_load_from_file(path.c_str(), llama_model_default_params());
    if (model == nullptr) return "does not load";
    context_config config;
    config.n_ctx = 256;
    config.n_seq = 1;
    config.flash = false;
    llama_context *ctx = llama_init_from_model(model, params_of(config));
    if (ctx == nullptr) return "no context";
    tokens_t tokens = prompt(model, 1, tokens_per_run);
    const logits_t first = run(ctx, tokens, tokens_per_run), again = run(ctx, tokens, tokens_per_run);
    const logits_t single = run(ctx, tokens, 1);
    tokens[0] += 1;
    const logits_t changed = run(ctx, tokens, tokens_per_run);
    llama_free(ctx);
    llama_model_free(model);
    for (float x : first) {
        if (!std::isfinite(x)) return "logits are not finite";
    }
    const auto [low, high] = std::minmax_element(first.begin(), first.end());
    std::printf("%7.2f %7.2f  single %.1e  changed %.1e  ", *low, *high, share(first, single),
                share(first, changed));
    if (*high - *low < 1e-2f) return "logits are constant";
    if (!bitwise_equal(first, again)) return "a second run differs";
    if (share(first, single) > 0.05) return "single tokens differ from a batch";
    if (share(first, changed) < 1e-3) return "the first token does not change the last logits";
    return "";
}

std::string folder() {
    const char *path = std::getenv("KVTIER_LLAMA_MODELS");
    return path ? path : ".";
}

std::string read(const std::string &path) {
    std::ostringstream all;
    all << std::ifstream(path).rdbuf();
    return all.str();
}

std::set<std::string> models_made() {
    std::set<std::string> names;
    for (const auto &file : std::filesystem::directory_iterator(folder())) {
        const std::string name = file.path().stem().string();
        if (name.rfind("arch-", 0) == 0 && file.path().extension() == ".gguf") names.insert(name.substr(5));
    }
    return names;
}

#ifdef KVTIER_LLAMA_SOURCE
/// Prints the engine's architectures that have neither a model nor a reason, and returns their number.
size_t missing(const std::set<std::string> &made) {
    const std::string without = "\n" + read(folder() + "/arch-without.txt");
    const std::string source = read(KVTIER_LLAMA_SOURCE "/src/llama-arch.cpp");
    const std::regex entry("\\{ *LLM_ARCH_\\w+, *\"([^\"(]+)\" *\\}");
    size_t known = 0, absent = 0;
    std::sregex_iterator at(source.begin(), source.end(), entry), end;
    for (; at != end; ++at) {
        const std::string name = (*at)[1];
        known++;
        if (made.count(name) || without.find("\n" + name + ": ") != std::string::npos) continue;
        std::printf("%s: no model, and no reason: add it to models/archs.py\n", name.c_str());
        absent++;
    }
    CHECK(known > 100);
    return absent;
}
#endif

} // namespace

int main(int argc, char **argv) {
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    const std::set<std::string> made = models_made(), asked(argv + 1, argv + argc);
    if (made.empty()) {
        std::printf("SKIP: no models arch-*.gguf: models.sh WORK archs creates them\n");
        return skipped;
    }
    size_t faults = 0;
    for (const std::string &name : asked.empty() ? made : asked) {
        std::printf("%-18s ", name.c_str());
        std::fflush(stdout);
        const std::string what = fault(folder() + "/arch-" + name + ".gguf");
        std::printf("%s\n", what.empty() ? "ok" : what.c_str());
        faults += !what.empty();
    }
#ifdef KVTIER_LLAMA_SOURCE
    faults += missing(made);
#endif
    llama_backend_free();
    return faults == 0 ? 0 : 1;
}
