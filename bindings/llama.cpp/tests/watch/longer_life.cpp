// Refusals of long sequences, stores that are full or lose data, and resuming in other contexts.
#include "longer.hpp"

#include <filesystem>
#include <unistd.h>

using namespace watch_test;
namespace fs = std::filesystem;

namespace {

constexpr uint32_t cells = 256;

llama_context_params small_context() { return params(cells, true); }

struct temp_dir {
    fs::path path;
    temp_dir() {
        path = fs::temp_directory_path() / ("kvt-longer-" + std::to_string(getpid()));
        fs::create_directories(path);
    }
    ~temp_dir() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
};

void invalid_options_are_refused() {
    kvt_llama_why_t why;
    kvt_llama_longer_t *longer = nullptr;
    const auto open_with = [&](const kvt_llama_longer_opts_t &opts, llama_context_params p) {
        longer = reinterpret_cast<kvt_llama_longer_t *>(&why);
        const kvt_status_t status = kvt_llama_longer_open(&opts, &p, &longer, &why);
        CHECK(longer == nullptr);
        return status;
    };
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    CHECK(
        refused(open_with(opts, params(cells, false)), KVT_E_UNSUPPORTED, why, "flash_attn_type"));
    opts.flags = 64;
    CHECK(refused(open_with(opts, small_context()), KVT_E_INVALID, why, "flags"));
    opts.flags = 0;
    opts.block_tokens = 1u << 20;
    CHECK(refused(open_with(opts, small_context()), KVT_E_LIMIT, why, "block"));
    opts.block_tokens = 0;
    opts.host_bytes = 1000;
    CHECK(refused(open_with(opts, small_context()), KVT_E_INVALID, why, "host_bytes"));
    opts.host_bytes = 0;
    opts.name = "x";
    CHECK(refused(open_with(opts, small_context()), KVT_E_INVALID, why, "model_id"));
    opts.name = nullptr;
    opts.seq = -1;
    CHECK(refused(open_with(opts, small_context()), KVT_E_INVALID, why, "negative"));
    CHECK(kvt_llama_longer_open(nullptr, nullptr, &longer, nullptr) == KVT_E_INVALID);
    CHECK(kvt_llama_longer_close(&longer, &why) == KVT_OK &&
          kvt_llama_longer_close(nullptr, nullptr) == KVT_OK);
    llama_token token = 1;
    CHECK(kvt_llama_longer_decode(nullptr, &token, 1, &why) == KVT_E_INVALID);
}

// A refused bind gives a message and leaves the context usable.
void check_refused_bind(llama_model *model, kvt_llama_longer_opts_t opts, llama_context_params p,
                  kvt_status_t expected, const char *text) {
    kvt_llama_why_t why;
    kvt_llama_longer_t *longer = nullptr;
    opts.host_bytes = 64u << 20;
    const llama_context_params plain_params = p;
    if (!ok(kvt_llama_longer_open(&opts, &p, &longer, &why), why, "open")) {
        return;
    }
    longer_context s;
    s.longer.reset(longer);
    s.ctx = open(model, p);
    CHECK(s.ctx != nullptr);
    CHECK(refused(kvt_llama_longer_bind(longer, s.ctx.get(), &why), expected, why, text));
    const llama_token token = 1;
    CHECK(kvt_llama_longer_decode(longer, &token, 1, &why) == KVT_E_STATE);
    const std::vector<llama_token> few = {1, 2, 3, 4, 5};
    context_ptr plain = open(model, plain_params);
    CHECK(decode(plain.get(), few, 0, few.size()) && decode(s.ctx.get(), few, 0, few.size()));
    CHECK(distance(logits(plain.get()), logits(s.ctx.get())) < 1e-3);
}

void unsupported_models_are_refused() {
    const struct {
        const char *file, *text;
    } others[] = {{"tiny-swa.gguf", "sliding window"},
                  {"tiny-mla.gguf", "MLA"},
                  {"tiny-mamba.gguf", "recurrent"},
                  {"tiny-hybrid.gguf", "recurrent"}};
    for (const auto &other : others) {
        model_ptr model = load(other.file);
        if (!model) {
            std::printf("SKIP: no %s\n", other.file);
            continue;
        }
        check_refused_bind(model.get(), KVT_LLAMA_LONGER_OPTS_INIT, small_context(), KVT_E_UNSUPPORTED,
                     other.text);
    }
}

void invalid_binds_are_refused(llama_model *model) {
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.slot_tokens = 250;
    check_refused_bind(model, opts, small_context(), KVT_E_INVALID, "lower slot_tokens");
    opts.slot_tokens = 4;
    check_refused_bind(model, opts, small_context(), KVT_E_INVALID, "less than block_tokens");
    opts.slot_tokens = 0;
    opts.seq = 77;
    check_refused_bind(model, opts, small_context(), KVT_E_INVALID, "seq 77");
    opts.seq = 0;
    opts.max_tokens = 100;
    check_refused_bind(model, opts, small_context(), KVT_E_INVALID, "max_tokens");
    opts.max_tokens = 0;
    const struct {
        const char *spec;
        kvt_status_t status;
        const char *text;
    } specs[] = {{"quest(page=8)", KVT_E_UNSUPPORTED, "share=bound"},
                 {"arkvale(page=8)", KVT_E_UNSUPPORTED, "dense=0"},
                 {"h2o", KVT_E_UNSUPPORTED, "selects no blocks"},
                 {"external", KVT_E_UNSUPPORTED, "own keys and queries"},
                 {"quest", KVT_E_SPEC, "whole pages"},
                 {"questt", KVT_E_SPEC, "quest"}};
    for (const auto &one : specs) {
        opts.spec = one.spec;
        check_refused_bind(model, opts, small_context(), one.status, one.text);
    }
    // A context with other params does not call the adapter back.
    kvt_llama_why_t why;
    opts.spec = nullptr;
    longer_context s = open_longer(model, opts, small_context());
    CHECK(kvt_llama_longer_bind(s.longer.get(), s.ctx.get(), &why) == KVT_E_STATE);
    kvt_llama_longer_t *longer = nullptr;
    CHECK(kvt_llama_longer_open(&opts, nullptr, &longer, &why) == KVT_OK);
    context_ptr other = open(model, small_context());
    CHECK(
        refused(kvt_llama_longer_bind(longer, other.get(), &why), KVT_E_INVALID, why, "call back"));
    CHECK(decode(other.get(), {1, 2}, 0, 2));
    CHECK(
        refused(kvt_llama_longer_bind(longer, other.get(), &why), KVT_E_STATE, why, "has tokens"));
    CHECK(kvt_llama_longer_close(&longer, &why) == KVT_OK && longer == nullptr);
}

void refused_tokens_leave_the_sequence_unchanged(llama_model *model, const std::vector<llama_token> &text) {
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.max_tokens = 512;
    opts.spec = "quest(share=bound, dense=0, page=8, budget=4096)";
    longer_context s = open_longer(model, opts, small_context());
    kvt_llama_why_t why;
    const llama_token bad = 1 << 30;
    CHECK(decode_longer(s, text.data(), cells));
    CHECK(refused(kvt_llama_longer_decode(s.longer.get(), &bad, 1, &why), KVT_E_INVALID, why,
                  "not in the vocabulary"));
    CHECK(refused(kvt_llama_longer_decode(s.longer.get(), text.data(), 512, &why), KVT_E_LIMIT, why,
                  "max_tokens"));
    CHECK(refused(kvt_llama_longer_decode(s.longer.get(), text.data() + cells, 40, &why),
                  KVT_E_LIMIT, why,
                  "lower its budget"));
    const kvt_llama_longer_stats_t stats = stats_of(s);
    CHECK(stats.failed_parts == 1 && stats.tokens == cells);
    CHECK(llama_memory_seq_pos_max(llama_get_memory(s.ctx.get()), 0) ==
          (llama_pos) stats.tokens - 1);
    size_t n = 0;
    CHECK(kvt_llama_longer_chosen(s.longer.get(), 999, nullptr, 0, &n) == KVT_E_INVALID);
}

// A full store refuses the next token; the sequence keeps all its tokens.
void full_store_fails_the_next_token(llama_model *model, const std::vector<llama_token> &text) {
    shared_store store("store(host=1MiB)");
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.store = store.store;
    opts.account = store.account;
    longer_context s = open_longer(model, opts, small_context());
    kvt_llama_why_t why = {};
    kvt_status_t status = KVT_OK;
    size_t at = 0;
    for (; at < text.size() && status == KVT_OK; at++) {
        status = kvt_llama_longer_decode(s.longer.get(), text.data() + at, 1, &why);
    }
    CHECK(refused(status, KVT_E_BUDGET, why, "storing"));
    const kvt_llama_longer_stats_t stats = stats_of(s);
    std::printf("a store of 1 MiB is full after %zu tokens: %s\n", (size_t) stats.tokens,
                why.text);
    CHECK(stats.tokens == at - 1 && stats.tokens > cells);
    CHECK(kvt_llama_longer_decode(s.longer.get(), text.data() + at, 1, &why) == KVT_E_BUDGET);
    CHECK(stats_of(s).tokens == stats.tokens);
    // Truncation frees cells of the window for new tokens.
    CHECK(ok(kvt_llama_longer_truncate(s.longer.get(), stats.tokens - 8, &why), why, "truncate"));
    CHECK(decode_longer(s, text.data() + at, 8));
    CHECK(refused(kvt_llama_longer_truncate(s.longer.get(), 40, &why), KVT_E_UNSUPPORTED, why,
                  "left their cells"));
    uint64_t reserved = 0, used = 0;
    CHECK(kvt_account_held(store.account, KVT_TIER_HOST, &reserved, &used) == KVT_OK);
    CHECK(used >= stats.own_bytes && used <= stats.own_bytes + 4 * stats.policy_bytes + 4096);
}

// Blocks from disk give the same bits as blocks from host memory. A lost block fails only the token that
// needs it.
void lost_disk_blocks_fail_only_their_token(llama_model *model, const std::vector<llama_token> &text,
                                            const fs::path &path) {
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    shared_store store("store(host=256KiB, disk=disk(path=\"" + path.string() +
                       "\", bytes=200MiB), write=through)");
    opts.store = store.store;
    longer_context s = open_longer(model, opts, small_context());
    CHECK(decode_longer(s, text.data(), 1200));
    {
        kvt_llama_longer_opts_t plenty = KVT_LLAMA_LONGER_OPTS_INIT;
        longer_context same = open_longer(model, plenty, small_context());
        CHECK(decode_longer(same, text.data(), 1200));
        CHECK(same_bits(logits(same.ctx.get()), logits(s.ctx.get())));
    }
    for (const auto &entry : fs::directory_iterator(path)) {
        if (entry.path().filename().string().rfind("seg-", 0) == 0) {
            fs::resize_file(entry.path(), 8192);
        }
    }
    kvt_llama_why_t why = {};
    kvt_status_t status = KVT_OK;
    size_t at = 1200;
    for (; at < text.size() && status == KVT_OK; at++) {
        status = kvt_llama_longer_decode(s.longer.get(), text.data() + at, 1, &why);
    }
    const kvt_llama_longer_stats_t stats = stats_of(s);
    std::printf("a store that lost its disk: status %d, %s\n", (int) status, why.text);
    CHECK(status != KVT_OK && why.text[0] != 0 && stats.failed_parts == 1 &&
          stats.tokens == at - 1);
    CHECK(llama_memory_seq_pos_max(llama_get_memory(s.ctx.get()), 0) ==
          (llama_pos) stats.tokens - 1);
    CHECK(ok(kvt_llama_longer_truncate(s.longer.get(), 0, &why), why, "truncate"));
    CHECK(decode_longer(s, text.data(), cells));
    context_ptr plain = open(model, small_context());
    CHECK(decode(plain.get(), text, 0, cells));
    CHECK(same_bits(logits(plain.get()), logits(s.ctx.get())));
}

// Truncated tokens give the same bits when they are decoded again.
void truncated_tokens_decode_to_the_same_bits(llama_model *model, const std::vector<llama_token> &text) {
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.flags = KVT_LLAMA_LONGER_ORDERED;
    longer_context s = open_longer(model, opts, small_context());
    kvt_llama_why_t why;
    CHECK(decode_longer(s, text.data(), 500));
    CHECK(decode_longer(s, text.data() + 500, 4));
    const std::vector<float> first = logits(s.ctx.get());
    CHECK(ok(kvt_llama_longer_truncate(s.longer.get(), 500, &why), why, "truncate"));
    CHECK(stats_of(s).tokens == 500);
    CHECK(decode_longer(s, text.data() + 500, 4));
    CHECK(same_bits(first, logits(s.ctx.get())));
    CHECK(refused(kvt_llama_longer_truncate(s.longer.get(), 9999, &why), KVT_E_INVALID, why,
                  "has only 504"));
    // Truncates into a saved block, and continues with other tokens.
    CHECK(ok(kvt_llama_longer_save(s.longer.get(), &why), why, "save"));
    CHECK(ok(kvt_llama_longer_truncate(s.longer.get(), 490, &why), why, "truncate"));
    CHECK(decode_longer(s, text.data() + 100, 300));
    CHECK(stats_of(s).tokens == 790);
}

// The caller's cb_eval is called and may cancel the computation. The sequence then has no new token.
void cancelled_decode_adds_no_token(llama_model *model, const std::vector<llama_token> &text) {
    struct other {
        bool ends = false;
        size_t asked = 0;
    } state;
    llama_context_params p = small_context();
    p.cb_eval = [](ggml_tensor *node, bool ask, void *user_data) {
        other &self = *static_cast<other *>(user_data);
        self.asked += ask;
        return ask ? std::strcmp(node->name, "l_out-1") == 0 : !self.ends;
    };
    p.cb_eval_user_data = &state;
    longer_context s = open_longer(model, KVT_LLAMA_LONGER_OPTS_INIT, p);
    CHECK(decode_longer(s, text.data(), 300));
    CHECK(state.asked > 0);
    state.ends = true;
    kvt_llama_why_t why;
    CHECK(refused(kvt_llama_longer_decode(s.longer.get(), text.data() + 300, 1, &why),
                  KVT_E_CANCELLED, why, "callback"));
    state.ends = false;
    CHECK(stats_of(s).tokens == 300);
    CHECK(decode_longer(s, text.data() + 300, 1));
    longer_context same = open_longer(model, KVT_LLAMA_LONGER_OPTS_INIT, small_context());
    CHECK(decode_longer(same, text.data(), 300) && decode_longer(same, text.data() + 300, 1));
    CHECK(distance(logits(same.ctx.get()), logits(s.ctx.get())) < 0.05);
}

std::vector<float> resume_and_decode(llama_model *model, const kvt_llama_longer_opts_t &opts,
                           const llama_context_params &p, const std::vector<llama_token> &text,
                           size_t n, size_t expected) {
    longer_context s = open_longer(model, opts, p);
    kvt_llama_why_t why;
    size_t found = 99999;
    CHECK(ok(kvt_llama_longer_resume(s.longer.get(), text.data(), n, &found, &why), why, "resume"));
    CHECK(found == expected);
    CHECK(refused(found ? kvt_llama_longer_resume(s.longer.get(), text.data(), n, &found, &why)
                        : KVT_E_STATE,
                  KVT_E_STATE, why, found ? "truncate it to 0" : ""));
    return decode_longer(s, text.data() + expected, n - expected) ? logits(s.ctx.get())
                                                                  : std::vector<float>();
}

// A sequence is resumed from a reopened store. With cells for all tokens, bits are equal.
void reopened_store_resumes_a_sequence(llama_model *model, const std::vector<llama_token> &text,
                                       const fs::path &path) {
    const std::string directory = path.string();
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.host_bytes = 64u << 20;
    opts.disk_path = directory.c_str();
    opts.disk_bytes = 512u << 20;
    opts.name = "restart";
    opts.model_id = "tiny";
    opts.flags = KVT_LLAMA_LONGER_ORDERED;
    std::vector<float> before;
    {
        longer_context s = open_longer(model, opts, params(1024, true));
        kvt_llama_why_t why;
        CHECK(decode_longer(s, text.data(), 696) && decode_longer(s, text.data() + 696, 4));
        before = logits(s.ctx.get());
        CHECK(ok(kvt_llama_longer_save(s.longer.get(), &why), why, "save"));
    }
    CHECK(same_bits(before, resume_and_decode(model, opts, params(1024, true), text, 700, 696)));
    const std::vector<float> once = resume_and_decode(model, opts, small_context(), text, 700, 696);
    CHECK(same_bits(once, resume_and_decode(model, opts, small_context(), text, 700, 696)));
    CHECK(distance(before, once) > 0);
    opts.name = "another";
    resume_and_decode(model, opts, small_context(), text, 200, 0);
    opts.name = "restart";
    opts.model_id = "other weights";
    resume_and_decode(model, opts, small_context(), text, 200, 0);
    // Saved from a small context, after most tokens were evicted from it.
    opts.model_id = "tiny";
    opts.name = "small";
    {
        longer_context s = open_longer(model, opts, small_context());
        kvt_llama_why_t why;
        CHECK(decode_longer(s, text.data(), 900));
        CHECK(ok(kvt_llama_longer_save(s.longer.get(), &why), why, "save"));
        CHECK(decode_longer(s, text.data() + 900, 20));
    }
    resume_and_decode(model, opts, small_context(), text, 901, 896);
    // KV of sparse attention is reused only with the same selection; dense KV in contexts of any size.
    resume_and_decode(model, opts, params(1024, true), text, 901, cells);
    opts.part_tokens = 8;
    resume_and_decode(model, opts, small_context(), text, 901, cells);
    opts.part_tokens = 0;
    // Contexts that compute other K and V find nothing.
    llama_context_params turned = small_context();
    turned.rope_freq_base = 5000;
    resume_and_decode(model, opts, turned, text, 901, 0);
    opts.adapters = "an adapter, 0.5";
    resume_and_decode(model, opts, small_context(), text, 901, 0);
}

} // namespace

int main(int argc, char **argv) {
    model_ptr model = load("tiny-llama-f16.gguf");
    if (!model) {
        skip("no tiny-llama-f16.gguf: bindings/llama.cpp/models/make.py writes it");
    }
    const std::vector<llama_token> text = text_of(model.get(), argc, argv, 4096);
    const temp_dir scratch_dir;
    invalid_options_are_refused();
    unsupported_models_are_refused();
    invalid_binds_are_refused(model.get());
    refused_tokens_leave_the_sequence_unchanged(model.get(), text);
    full_store_fails_the_next_token(model.get(), text);
    fs::create_directories(scratch_dir.path / "lost");
    lost_disk_blocks_fail_only_their_token(model.get(), text, scratch_dir.path / "lost");
    truncated_tokens_decode_to_the_same_bits(model.get(), text);
    cancelled_decode_adds_no_token(model.get(), text);
    fs::create_directories(scratch_dir.path / "restart");
    reopened_store_resumes_a_sequence(model.get(), text, scratch_dir.path / "restart");
    return failures != 0;
}
