// The tiers of a context: one for each set of adapters that the program uses.
#include "run/context.hpp"

#include "run/models.hpp"
#include "run/process.hpp"
#include "run/settings.hpp"
#include "tier/tier.hpp"

#include <cstdio>

namespace kvtier_run {

namespace {

constexpr uint64_t drain_wait_ns = uint64_t(10) * 1000000000;

std::string name_of(const std::string &path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? path : path.substr(slash + 1);
}

} // namespace

kvt_llama_tier_t *context_t::current() const {
    if (!loras_known || (special & special_warmup) != 0) {
        return nullptr;
    }
    const auto found = tiers.find(key());
    return found == tiers.end() ? nullptr : found->second;
}

/// Opens the tier of the current adapters with the first batch. Servers warm up with one, so their first
/// request does not wait for it.
void context_t::open_tier() {
    if ((special & ~uint32_t(special_attention)) != 0 || !loras_known || tiers.count(key()) != 0) {
        return;
    }
    kvt_llama_tier_t *&tier = tiers[key()];
    tier = nullptr;
    model_t model;
    if (!find_model(llama_get_model(ctx), &model) || model.path.empty()) {
        warn("the program loaded a model in a way that does not tell its file: this model runs without kvtier");
        return;
    }
    model_name = name_of(model.path);
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    opts.store = store();
    if (!opts.store) {
        return;
    }
    const std::string adapters = key();
    model.params.kv_overrides = model.overrides.data();
    // Without an own scratch sequence the last one is the program's.
    opts.scratch_seq = has_scratch ? 0 : -1;
    opts.model_path = model.path.c_str();
    opts.model_params = &model.params;
    opts.params = &params;
    opts.adapters = adapters.empty() ? nullptr : adapters.c_str();
    opts.salt = settings().salt.empty() ? nullptr : settings().salt.c_str();
    kvt_llama_why_t why{};
    if (kvt_llama_tier_open(ctx, &opts, &tier, &why) != KVT_OK) {
        tier = nullptr;
        warn(model_name + " runs without kvtier: " + why.text);
    }
    was_open = was_open || tier;
}

bool context_t::changes_loras(bool is_known, const std::string &text) const {
    return is_known != loras_known || text != loras;
}

void context_t::set_loras(bool is_known, const std::string &text) {
    if (!changes_loras(is_known, text)) {
        return;
    }
    loras_known = is_known;
    loras = text;
    if (!is_known) {
        warn("the program uses an adapter whose file is not known: it runs without kvtier meanwhile");
    }
    // What the sequences hold was computed with other adapters.
    changed(-1);
}

void context_t::set_vector(const std::string &text) {
    if (text != vector) {
        vector = text;
        changed(-1);
    }
}

void context_t::drain() {
    for (const auto &one : tiers) {
        if (one.second) {
            kvtier_llama::drain(*one.second, kvtier_llama::now_ns() + drain_wait_ns);
        }
    }
}

void context_t::close_tiers() {
    const inside_scope scope;
    for (auto &one : tiers) {
        if (!one.second) {
            continue;
        }
        kvt_llama_flush(one.second, kvtier_llama::now_ns() + drain_wait_ns, nullptr);
        saved_tokens += one.second->stats.saved_tokens;
        restored_bytes += one.second->stats.restored_bytes;
        kvt_llama_why_t why{};
        if (kvt_llama_tier_close(&one.second, &why) != KVT_OK) {
            warn(model_name + ": not all KV was saved: " + why.text);
        }
    }
}

void context_t::report() {
    if (!was_open) {
        return;
    }
    char text[320];
    std::snprintf(text, sizeof text, "%s: %llu tokens, %llu of them restored (%.1f MB), %llu saved",
                  model_name.c_str(), (unsigned long long) decoded_tokens, (unsigned long long) reused_tokens,
                  double(restored_bytes) / 1e6, (unsigned long long) saved_tokens);
    tell(text);
    if (settings().stats.empty()) {
        return;
    }
    if (std::FILE *file = std::fopen(settings().stats.c_str(), "a")) {
        std::fprintf(file,
                     "{\"tokens\": %llu, \"restored_tokens\": %llu, \"restored_bytes\": %llu, "
                     "\"saved_tokens\": %llu}\n",
                     (unsigned long long) decoded_tokens, (unsigned long long) reused_tokens,
                     (unsigned long long) restored_bytes, (unsigned long long) saved_tokens);
        std::fclose(file);
    }
}

} // namespace kvtier_run
