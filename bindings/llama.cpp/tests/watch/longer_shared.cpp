// Long sequences beside others: in a store, in a context, and in one that was bound before.
#include "longer.hpp"

#include <chrono>
#include <thread>

using namespace watch_test;

namespace {

constexpr uint32_t cells = 256;

llama_context_params small() { return params(cells, true); }

// What a refused bind has reserved is free again, and it may be called with another context.
void binds_again(llama_model *model, const std::vector<llama_token> &text) {
    shared_store store("store(host=64MiB)");
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.store = store.store;
    opts.account = store.account;
    kvt_llama_why_t why;
    for (const char *spec : {"h2o", (const char *) nullptr}) {
        opts.spec = spec;
        opts.max_tokens = 512;
        llama_context_params p = small();
        kvt_llama_longer_t *longer = nullptr;
        CHECK(ok(kvt_llama_longer_open(&opts, &p, &longer, &why), why, "open"));
        served s;
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
            CHECK(feed(s, text.data(), 400));
        }
    }
}

// Another sequence has cells: that is said, and when it has left the own one goes on.
void crowded(llama_model *model, const std::vector<llama_token> &text) {
    served s = serve(model, KVT_LLAMA_LONGER_OPTS_INIT, small());
    CHECK(decode(s.ctx.get(), text, 0, 40, 1));
    kvt_llama_why_t why;
    CHECK(refused(kvt_llama_longer_decode(s.longer.get(), text.data(), 300, &why), KVT_E_BUSY, why,
                  "other sequences"));
    CHECK(llama_memory_seq_rm(llama_get_memory(s.ctx.get()), 1, -1, -1));
    const size_t n = (size_t) stats_of(s).tokens;
    CHECK(feed(s, text.data() + n, 300 - n));
}

// A store that others keep busy for a while is waited for.
void busy(llama_model *model, const std::vector<llama_token> &text) {
    constexpr uint32_t most = 32;
    shared_store store("store(host=64MiB)", "", most);
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.store = store.store;
    served s = serve(model, opts, small());
    CHECK(feed(s, text.data(), cells));
    std::vector<kvt_op_t *> others(most, nullptr);
    size_t n = 0;
    while (n < most && kvt_account_reserve_later(store.account, KVT_TIER_HOST, 1, nullptr,
                                                 &others[n], nullptr) == KVT_OK) {
        n++;
    }
    CHECK(n > 0);
    std::thread leave([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        for (size_t i = 0; i < n; i++) {
            kvt_op_wait(others[i], KVT_OP_RELEASED, 0);
            kvt_op_free(&others[i]);
            CHECK(kvt_account_commit(store.account, KVT_TIER_HOST, 1, 0, nullptr) == KVT_OK);
        }
    });
    CHECK(feed(s, text.data() + cells, 20));
    leave.join();
}

// Sequences of several threads in one store do not disturb each other.
void crowd(llama_model *model, const std::vector<llama_token> &text) {
    constexpr size_t users = 4, length = 700;
    shared_store store("store(host=64MiB)");
    kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
    opts.store = store.store;
    opts.account = store.account;
    opts.flags = KVT_LLAMA_LONGER_ORDERED;
    std::vector<served> all;
    std::vector<std::vector<float>> ends(users);
    for (size_t i = 0; i < users; i++) {
        all.push_back(serve(model, opts, small()));
    }
    const auto work = [&](size_t i) {
        const llama_token *from = text.data() + i % 2 * 1000;
        kvt_llama_why_t why;
        if (kvt_llama_longer_decode(all[i].longer.get(), from, length, &why) == KVT_OK) {
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
        skip("tiny-llama-f16.gguf is not there: bindings/llama.cpp/models/make.py makes it");
    }
    const std::vector<llama_token> text = text_of(model.get(), argc, argv, 2048);
    binds_again(model.get(), text);
    crowded(model.get(), text);
    busy(model.get(), text);
    crowd(model.get(), text);
    return failures != 0;
}
