// Long sequences beside other users of a store or a context, and repeated binds.
#include "longer.hpp"

#include <chrono>
#include <thread>

using namespace watch_test;

namespace {

constexpr uint32_t cells = 256;

llama_context_params small_context() { return params(cells, true); }

// A refused bind releases its reservation, and a bind to another context succeeds.
void refused_bind_releases_its_memory(llama_model *model, const std::vector<llama_token> &text) {
    shared_store store("store(host=64MiB)");
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.store = store.store;
    opts.account = store.account;
    kvt_llama_why_t why;
    for (const char *spec : {"h2o", (const char *) nullptr}) {
        opts.spec = spec;
        opts.max_tokens = 512;
        llama_context_params p = small_context();
        kvt_llama_longer_t *longer = nullptr;
        CHECK(ok(kvt_llama_longer_open(&opts, &p, &longer, &why), why, "open"));
        longer_context s;
        s.longer.reset(longer);
        if (!spec) {
            llama_context_params big = p;
            big.n_ctx = 1024;
            const context_ptr other = open(model, big);
            CHECK(refused(kvt_llama_longer_bind(longer, other.get(), &why), KVT_E_INVALID, why,
                          "max_tokens"));
        }
        s.ctx = open(model, p);
        for (int i = 0; i < 2 && spec; i++) {
            uint64_t reserved = 0, used = 0;
            CHECK(kvt_llama_longer_bind(longer, s.ctx.get(), &why) == KVT_E_UNSUPPORTED);
            CHECK(kvt_account_held(store.account, KVT_TIER_HOST, &reserved, &used) == KVT_OK);
            CHECK(reserved == 0 && used == 0);
        }
        if (!spec) {
            CHECK(ok(kvt_llama_longer_bind(longer, s.ctx.get(), &why), why, "bind"));
            CHECK(decode_longer(s, text.data(), 400));
        }
    }
}

// Another sequence occupies cells: KVT_E_BUSY. After it is removed, decoding continues.
void cells_of_other_sequences_make_it_busy(llama_model *model, const std::vector<llama_token> &text) {
    longer_context s = open_longer(model, KVT_LLAMA_LONGER_OPTS_INIT, small_context());
    CHECK(decode(s.ctx.get(), text, 0, 40, 1));
    kvt_llama_why_t why;
    CHECK(refused(kvt_llama_longer_decode(s.longer.get(), text.data(), 300, &why), KVT_E_BUSY, why,
                  "other sequences"));
    CHECK(llama_memory_seq_rm(llama_get_memory(s.ctx.get()), 1, -1, -1));
    const size_t n = (size_t) stats_of(s).tokens;
    CHECK(decode_longer(s, text.data() + n, 300 - n));
}

// All ops of the runtime are in use for 200 ms; the decode waits.
void busy_store_is_waited_for(llama_model *model, const std::vector<llama_token> &text) {
    constexpr uint32_t max_ops = 32;
    shared_store store("store(host=64MiB)", "", max_ops);
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.store = store.store;
    longer_context s = open_longer(model, opts, small_context());
    CHECK(decode_longer(s, text.data(), cells));
    std::vector<kvt_op_t *> others(max_ops, nullptr);
    size_t n = 0;
    while (n < max_ops && kvt_account_reserve_later(store.account, KVT_TIER_HOST, 1, nullptr,
                                                 &others[n], nullptr) == KVT_OK) {
        n++;
    }
    CHECK(n > 0);
    std::thread release([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        for (size_t i = 0; i < n; i++) {
            kvt_op_wait(others[i], KVT_OP_RELEASED, 0);
            kvt_op_free(&others[i]);
            CHECK(kvt_account_commit(store.account, KVT_TIER_HOST, 1, 0, nullptr) == KVT_OK);
        }
    });
    CHECK(decode_longer(s, text.data() + cells, 20));
    release.join();
}

// Sequences on several threads in one store give the right bits.
void sequences_on_threads_share_a_store(llama_model *model, const std::vector<llama_token> &text) {
    constexpr size_t users = 4, length = 700;
    shared_store store("store(host=64MiB)");
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.store = store.store;
    opts.account = store.account;
    opts.flags = KVT_LLAMA_LONGER_ORDERED;
    std::vector<longer_context> all;
    std::vector<std::vector<float>> ends(users);
    for (size_t i = 0; i < users; i++) {
        all.push_back(open_longer(model, opts, small_context()));
    }
    const auto work = [&](size_t i) {
        const llama_token *start = text.data() + i % 2 * 1000;
        kvt_llama_why_t why;
        if (kvt_llama_longer_decode(all[i].longer.get(), start, length, &why) == KVT_OK) {
            ends[i] = logits(all[i].ctx.get());
        }
    };
    std::vector<std::thread> threads;
    for (size_t i = 0; i < users; i++) {
        threads.emplace_back(work, i);
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    CHECK(same_bits(ends[0], ends[2]) && same_bits(ends[1], ends[3]));
    CHECK(distance(ends[0], ends[1]) > 0);
}

} // namespace

int main(int argc, char **argv) {
    model_ptr model = load("tiny-llama-f16.gguf");
    if (!model) {
        skip("no tiny-llama-f16.gguf: bindings/llama.cpp/models/make.py writes it");
    }
    const std::vector<llama_token> text = text_of(model.get(), argc, argv, 2048);
    refused_bind_releases_its_memory(model.get(), text);
    cells_of_other_sequences_make_it_busy(model.get(), text);
    busy_store_is_waited_for(model.get(), text);
    sequences_on_threads_share_a_store(model.get(), text);
    return failures != 0;
}
