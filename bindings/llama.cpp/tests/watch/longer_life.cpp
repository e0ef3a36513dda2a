// What a long sequence is refused, how it ends where memory does, and that it goes on elsewhere.
#include "longer.hpp"

#include <filesystem>
#include <unistd.h>

using namespace watch_test;
namespace fs = std::filesystem;

namespace {

constexpr uint32_t cells = 256;

llama_context_params small() { return params(cells, true); }

struct folder {
    fs::path path;
    folder() {
        path = fs::temp_directory_path() / ("kvt-longer-" + std::to_string(getpid()));
        fs::create_directories(path);
    }
    ~folder() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
};

void refuses_opts() {
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
    CHECK(refused(open_with(opts, small()), KVT_E_INVALID, why, "flags"));
    opts.flags = 0;
    opts.block_tokens = 1u << 20;
    CHECK(refused(open_with(opts, small()), KVT_E_LIMIT, why, "block"));
    opts.block_tokens = 0;
    opts.host_bytes = 1000;
    CHECK(refused(open_with(opts, small()), KVT_E_INVALID, why, "host_bytes"));
    opts.host_bytes = 0;
    opts.name = "x";
    CHECK(refused(open_with(opts, small()), KVT_E_INVALID, why, "model_id"));
    opts.name = nullptr;
    opts.seq = -1;
    CHECK(refused(open_with(opts, small()), KVT_E_INVALID, why, "negative"));
    CHECK(kvt_llama_longer_open(nullptr, nullptr, &longer, nullptr) == KVT_E_INVALID);
    CHECK(kvt_llama_longer_close(&longer, &why) == KVT_OK &&
          kvt_llama_longer_close(nullptr, nullptr) == KVT_OK);
    llama_token token = 1;
    CHECK(kvt_llama_longer_decode(nullptr, &token, 1, &why) == KVT_E_INVALID);
}

// A bind that is refused says why, and the context works as if nothing had been.
void refuses_bind(llama_model *model, kvt_llama_longer_opts_t opts, llama_context_params p,
                  kvt_status_t wanted, const char *word) {
    kvt_llama_why_t why;
    kvt_llama_longer_t *longer = nullptr;
    opts.host_bytes = 64u << 20;
    const llama_context_params plain_params = p;
    if (!ok(kvt_llama_longer_open(&opts, &p, &longer, &why), why, "open")) {
        return;
    }
    served s;
    s.longer.reset(longer);
    s.ctx = open(model, p);
    CHECK(s.ctx != nullptr);
    CHECK(refused(kvt_llama_longer_bind(longer, s.ctx.get(), &why), wanted, why, word));
    const llama_token token = 1;
    CHECK(kvt_llama_longer_decode(longer, &token, 1, &why) == KVT_E_STATE);
    const std::vector<llama_token> few = {1, 2, 3, 4, 5};
    context_ptr plain = open(model, plain_params);
    CHECK(decode(plain.get(), few, 0, few.size()) && decode(s.ctx.get(), few, 0, few.size()));
    CHECK(distance(logits(plain.get()), logits(s.ctx.get())) < 1e-3);
}

void refuses_models() {
    const struct {
        const char *file, *word;
    } others[] = {{"tiny-swa.gguf", "sliding window"},
                  {"tiny-mla.gguf", "MLA"},
                  {"tiny-mamba.gguf", "recurrent"},
                  {"tiny-hybrid.gguf", "recurrent"}};
    for (const auto &other : others) {
        model_ptr model = load(other.file);
        if (!model) {
            std::printf("SKIP: %s is not there\n", other.file);
            continue;
        }
        refuses_bind(model.get(), KVT_LLAMA_LONGER_OPTS_INIT, small(), KVT_E_UNSUPPORTED,
                     other.word);
    }
}

void refuses_binds(llama_model *model) {
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.slot_tokens = 250;
    refuses_bind(model, opts, small(), KVT_E_INVALID, "slot_tokens smaller");
    opts.slot_tokens = 4;
    refuses_bind(model, opts, small(), KVT_E_INVALID, "less than a block");
    opts.slot_tokens = 0;
    opts.seq = 77;
    refuses_bind(model, opts, small(), KVT_E_INVALID, "sequences 77");
    opts.seq = 0;
    opts.max_tokens = 100;
    refuses_bind(model, opts, small(), KVT_E_INVALID, "max_tokens");
    opts.max_tokens = 0;
    const struct {
        const char *spec;
        kvt_status_t status;
        const char *word;
    } specs[] = {{"quest(page=8)", KVT_E_UNSUPPORTED, "share=bound"},
                 {"arkvale(page=8)", KVT_E_UNSUPPORTED, "dense=0"},
                 {"h2o", KVT_E_UNSUPPORTED, "selects no blocks"},
                 {"external", KVT_E_UNSUPPORTED, "own keys and queries"},
                 {"quest", KVT_E_SPEC, "whole pages"},
                 {"questt", KVT_E_SPEC, "quest"}};
    for (const auto &one : specs) {
        opts.spec = one.spec;
        refuses_bind(model, opts, small(), one.status, one.word);
    }
    // A context of other params does not call back.
    kvt_llama_why_t why;
    opts.spec = nullptr;
    served s = serve(model, opts, small());
    CHECK(kvt_llama_longer_bind(s.longer.get(), s.ctx.get(), &why) == KVT_E_STATE);
    kvt_llama_longer_t *longer = nullptr;
    CHECK(kvt_llama_longer_open(&opts, nullptr, &longer, &why) == KVT_OK);
    context_ptr other = open(model, small());
    CHECK(
        refused(kvt_llama_longer_bind(longer, other.get(), &why), KVT_E_INVALID, why, "call back"));
    CHECK(decode(other.get(), {1, 2}, 0, 2));
    CHECK(
        refused(kvt_llama_longer_bind(longer, other.get(), &why), KVT_E_STATE, why, "has tokens"));
    CHECK(kvt_llama_longer_close(&longer, &why) == KVT_OK && longer == nullptr);
}

// Refused tokens leave the sequence as it was.
void refuses_tokens(llama_model *model, const std::vector<llama_token> &text) {
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.max_tokens = 512;
    opts.spec = "quest(share=bound, dense=0, page=8, budget=4096)";
    served s = serve(model, opts, small());
    kvt_llama_why_t why;
    const llama_token bad = 1 << 30;
    CHECK(feed(s, text.data(), cells));
    CHECK(refused(kvt_llama_longer_decode(s.longer.get(), &bad, 1, &why), KVT_E_INVALID, why,
                  "does not have"));
    CHECK(refused(kvt_llama_longer_decode(s.longer.get(), text.data(), 512, &why), KVT_E_LIMIT, why,
                  "max_tokens"));
    CHECK(refused(kvt_llama_longer_decode(s.longer.get(), text.data() + cells, 40, &why),
                  KVT_E_LIMIT, why,
                  "smaller "
                  "budget"));
    const kvt_llama_longer_stats_t stats = stats_of(s);
    CHECK(stats.failed_parts == 1 && stats.tokens == cells);
    CHECK(llama_memory_seq_pos_max(llama_get_memory(s.ctx.get()), 0) ==
          (llama_pos) stats.tokens - 1);
    size_t n = 0;
    CHECK(kvt_llama_longer_chosen(s.longer.get(), 999, nullptr, 0, &n) == KVT_E_INVALID);
}

// Where the store is full the sequence ends, with all that it has.
void full(llama_model *model, const std::vector<llama_token> &text) {
    shared_store store("store(host=1MiB)");
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.store = store.store;
    opts.account = store.account;
    served s = serve(model, opts, small());
    kvt_llama_why_t why = {};
    kvt_status_t status = KVT_OK;
    size_t at = 0;
    for (; at < text.size() && status == KVT_OK; at++) {
        status = kvt_llama_longer_decode(s.longer.get(), text.data() + at, 1, &why);
    }
    CHECK(refused(status, KVT_E_BUDGET, why, "storing"));
    const kvt_llama_longer_stats_t stats = stats_of(s);
    std::printf("a store of 1 MiB is full behind %zu tokens: %s\n", (size_t) stats.tokens,
                why.text);
    CHECK(stats.tokens == at - 1 && stats.tokens > cells);
    CHECK(kvt_llama_longer_decode(s.longer.get(), text.data() + at, 1, &why) == KVT_E_BUDGET);
    CHECK(stats_of(s).tokens == stats.tokens);
    // There is room for a few in the window, once others are taken back.
    CHECK(ok(kvt_llama_longer_truncate(s.longer.get(), stats.tokens - 8, &why), why, "truncate"));
    CHECK(feed(s, text.data() + at, 8));
    CHECK(refused(kvt_llama_longer_truncate(s.longer.get(), 40, &why), KVT_E_UNSUPPORTED, why,
                  "left their cells"));
    uint64_t reserved = 0, used = 0;
    CHECK(kvt_account_held(store.account, KVT_TIER_HOST, &reserved, &used) == KVT_OK);
    CHECK(used >= stats.own_bytes && used <= stats.own_bytes + 4 * stats.policy_bytes + 4096);
}

// What comes from disk is what memory would have. A block that the disk has lost fails the token
// that wants it, and nothing else.
void lost(llama_model *model, const std::vector<llama_token> &text, const fs::path &path) {
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    shared_store store("store(host=256KiB, disk=disk(path=\"" + path.string() +
                       "\", bytes=200MiB), write=through)");
    opts.store = store.store;
    served s = serve(model, opts, small());
    CHECK(feed(s, text.data(), 1200));
    {
        kvt_llama_longer_opts_t plenty = KVT_LLAMA_LONGER_OPTS_INIT;
        served same = serve(model, plenty, small());
        CHECK(feed(same, text.data(), 1200));
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
    std::printf("a store that has lost what was on disk: status %d, %s\n", (int) status, why.text);
    CHECK(status != KVT_OK && why.text[0] != 0 && stats.failed_parts == 1 &&
          stats.tokens == at - 1);
    CHECK(llama_memory_seq_pos_max(llama_get_memory(s.ctx.get()), 0) ==
          (llama_pos) stats.tokens - 1);
    CHECK(ok(kvt_llama_longer_truncate(s.longer.get(), 0, &why), why, "truncate"));
    CHECK(feed(s, text.data(), cells));
    context_ptr plain = open(model, small());
    CHECK(decode(plain.get(), text, 0, cells));
    CHECK(same_bits(logits(plain.get()), logits(s.ctx.get())));
}

// What is taken back and decoded again is the same.
void again(llama_model *model, const std::vector<llama_token> &text) {
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.flags = KVT_LLAMA_LONGER_ORDERED;
    served s = serve(model, opts, small());
    kvt_llama_why_t why;
    CHECK(feed(s, text.data(), 500));
    CHECK(feed(s, text.data() + 500, 4));
    const std::vector<float> first = logits(s.ctx.get());
    CHECK(ok(kvt_llama_longer_truncate(s.longer.get(), 500, &why), why, "truncate"));
    CHECK(stats_of(s).tokens == 500);
    CHECK(feed(s, text.data() + 500, 4));
    CHECK(same_bits(first, logits(s.ctx.get())));
    CHECK(refused(kvt_llama_longer_truncate(s.longer.get(), 9999, &why), KVT_E_INVALID, why,
                  "has 504"));
    // Into a block that was saved, and on with other tokens.
    CHECK(ok(kvt_llama_longer_save(s.longer.get(), &why), why, "save"));
    CHECK(ok(kvt_llama_longer_truncate(s.longer.get(), 490, &why), why, "truncate"));
    CHECK(feed(s, text.data() + 100, 300));
    CHECK(stats_of(s).tokens == 790);
}

// A callback that was there before is called, and may end the computation: the token did not
// happen.
void ended(llama_model *model, const std::vector<llama_token> &text) {
    struct other {
        bool ends = false;
        size_t asked = 0;
    } state;
    llama_context_params p = small();
    p.cb_eval = [](ggml_tensor *node, bool ask, void *user_data) {
        other &self = *static_cast<other *>(user_data);
        self.asked += ask;
        return ask ? std::strcmp(node->name, "l_out-1") == 0 : !self.ends;
    };
    p.cb_eval_user_data = &state;
    served s = serve(model, KVT_LLAMA_LONGER_OPTS_INIT, p);
    CHECK(feed(s, text.data(), 300));
    CHECK(state.asked > 0);
    state.ends = true;
    kvt_llama_why_t why;
    CHECK(refused(kvt_llama_longer_decode(s.longer.get(), text.data() + 300, 1, &why),
                  KVT_E_CANCELLED, why, "callback"));
    state.ends = false;
    CHECK(stats_of(s).tokens == 300);
    CHECK(feed(s, text.data() + 300, 1));
    served same = serve(model, KVT_LLAMA_LONGER_OPTS_INIT, small());
    CHECK(feed(same, text.data(), 300) && feed(same, text.data() + 300, 1));
    CHECK(distance(logits(same.ctx.get()), logits(s.ctx.get())) < 0.05);
}

std::vector<float> resumed(llama_model *model, const kvt_llama_longer_opts_t &opts,
                           const llama_context_params &p, const std::vector<llama_token> &text,
                           size_t n, size_t wanted) {
    served s = serve(model, opts, p);
    kvt_llama_why_t why;
    size_t found = 99999;
    CHECK(ok(kvt_llama_longer_resume(s.longer.get(), text.data(), n, &found, &why), why, "resume"));
    CHECK(found == wanted);
    CHECK(refused(found ? kvt_llama_longer_resume(s.longer.get(), text.data(), n, &found, &why)
                        : KVT_E_STATE,
                  KVT_E_STATE, why, found ? "cut it to 0" : ""));
    return feed(s, text.data() + wanted, n - wanted) ? logits(s.ctx.get()) : std::vector<float>();
}

// A sequence goes on after all was closed: exactly, where it has all cells.
void restart(llama_model *model, const std::vector<llama_token> &text, const fs::path &path) {
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
        served s = serve(model, opts, params(1024, true));
        kvt_llama_why_t why;
        CHECK(feed(s, text.data(), 696) && feed(s, text.data() + 696, 4));
        before = logits(s.ctx.get());
        CHECK(ok(kvt_llama_longer_save(s.longer.get(), &why), why, "save"));
    }
    CHECK(same_bits(before, resumed(model, opts, params(1024, true), text, 700, 696)));
    const std::vector<float> once = resumed(model, opts, small(), text, 700, 696);
    CHECK(same_bits(once, resumed(model, opts, small(), text, 700, 696)));
    CHECK(distance(before, once) > 0);
    opts.name = "another";
    resumed(model, opts, small(), text, 200, 0);
    opts.name = "restart";
    opts.model_id = "other weights";
    resumed(model, opts, small(), text, 200, 0);
    // Saved from a small context, after most of it had left.
    opts.model_id = "tiny";
    opts.name = "small";
    {
        served s = serve(model, opts, small());
        kvt_llama_why_t why;
        CHECK(feed(s, text.data(), 900));
        CHECK(ok(kvt_llama_longer_save(s.longer.get(), &why), why, "save"));
        CHECK(feed(s, text.data() + 900, 20));
    }
    resumed(model, opts, small(), text, 901, 896);
    // What was computed sparsely is for those who choose likewise, the rest for contexts of any size.
    resumed(model, opts, params(1024, true), text, 901, cells);
    opts.part_tokens = 8;
    resumed(model, opts, small(), text, 901, cells);
    opts.part_tokens = 0;
    // In contexts that compute K and V in another way nothing is found.
    llama_context_params turned = small();
    turned.rope_freq_base = 5000;
    resumed(model, opts, turned, text, 901, 0);
    opts.adapters = "an adapter, 0.5";
    resumed(model, opts, small(), text, 901, 0);
}

} // namespace

int main(int argc, char **argv) {
    model_ptr model = load("tiny-llama-f16.gguf");
    if (!model) {
        skip("tiny-llama-f16.gguf is not there: bindings/llama.cpp/models/make.py makes it");
    }
    const std::vector<llama_token> text = text_of(model.get(), argc, argv, 4096);
    const folder here;
    refuses_opts();
    refuses_models();
    refuses_binds(model.get());
    refuses_tokens(model.get(), text);
    full(model.get(), text);
    fs::create_directories(here.path / "lost");
    lost(model.get(), text, here.path / "lost");
    again(model.get(), text);
    ended(model.get(), text);
    fs::create_directories(here.path / "restart");
    restart(model.get(), text, here.path / "restart");
    return failures != 0;
}
