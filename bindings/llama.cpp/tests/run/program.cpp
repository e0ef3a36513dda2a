// An unmodified program for the tests of `kvtier run`: it uses llama.h only.
//
//   run-program MODEL [--old] [--apart] [--batch TOKENS] [--cells TOKENS] [--limit TOKENS] [--pause SCENARIO]
//               SCENARIO...
//
// Each scenario prints lines `NAME HASH`, with a hash of the logits, for the driver to compare with those of
// a run without kvtier. Prompts are decoded in batches of `--batch` tokens (32), which is the length of a
// chunk: results of the engine depend on how a prompt is cut into batches.
//
//   --old     llama_decode with a llama_batch, as most programs; otherwise llama_process, where there is one
//   --apart   each sequence has cells of its own
//   --limit   n_batch and n_ubatch of the context
//   --pause   prints `paused` after that scenario, and waits to be killed
#include <llama.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace {

using tokens_t = std::vector<llama_token>;

struct options_t {
    const char *model = nullptr;
    bool old = false, apart = false;
    int batch = 32, cells = 2048, limit = 512;
    std::string pause;
    std::vector<std::string> scenarios;
};

/// One token of a batch of several sequences.
struct item_t {
    llama_token token;
    llama_pos pos;
    llama_seq_id seq;
    bool output;
};

[[noreturn]] void stop(const char *what) {
    std::fprintf(stderr, "run-program: %s\n", what);
    std::exit(1);
}

class program_t {
public:
    explicit program_t(const options_t &options) : options(options) {
        llama_model_params model_params = llama_model_default_params();
        model = llama_model_load_from_file(options.model, model_params);
        if (!model) {
            stop("the model does not load");
        }
        llama_context_params params = llama_context_default_params();
        params.n_ctx = uint32_t(options.cells);
        params.n_batch = params.n_ubatch = uint32_t(options.limit);
        params.n_seq_max = 4;
        params.kv_unified = !options.apart;
        params.n_threads = params.n_threads_batch = 1;
        ctx = llama_init_from_model(model, params);
        if (!ctx || llama_n_seq_max(ctx) != 4) {
            stop("the context does not open, or has other sequences");
        }
        memory = llama_get_memory(ctx);
        vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    }

    ~program_t() {
        llama_free(ctx);
        llama_model_free(model);
    }

    llama_context *context() const { return ctx; }
    llama_memory_t cells() const { return memory; }

    /// Pseudorandom tokens; equal seeds give equal texts.
    tokens_t text(uint32_t seed, size_t count) const {
        tokens_t out;
        uint32_t state = seed * 2654435761u + 12345;
        for (size_t i = 0; i < count; i++) {
            state = state * 1664525u + 1013904223u;
            out.push_back(llama_token((state >> 8) % uint32_t(vocabulary)));
        }
        return out;
    }

    int32_t decode(const std::vector<item_t> &items) {
#ifdef KVTIER_LLAMA_BATCH_EXT
        if (!options.old) {
            return decode_extended(items);
        }
#endif
        llama_batch batch = llama_batch_init(int32_t(items.size()), 0, 1);
        batch.n_tokens = int32_t(items.size());
        for (size_t i = 0; i < items.size(); i++) {
            batch.token[i] = items[i].token;
            batch.pos[i] = items[i].pos;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = items[i].seq;
            batch.logits[i] = items[i].output;
        }
        const int32_t status = llama_decode(ctx, batch);
        llama_batch_free(batch);
        return status;
    }

    /// Decodes tokens of one sequence from `first` on; prints the logits of the last one.
    void prompt(const std::string &name, llama_seq_id seq, const tokens_t &all, size_t first) {
        const size_t step = size_t(options.batch);
        size_t start = first;
        for (size_t at = first; at < all.size();) {
            const size_t end = std::min(all.size(), (at / step + 1) * step);
            std::vector<item_t> items;
            for (size_t i = at; i < end; i++) {
                items.push_back({all[i], llama_pos(i), seq, i + 1 == all.size()});
            }
            const int32_t status = decode(items);
            if (status != 0) {
                std::printf("%s status %d\n", name.c_str(), int(status));
                return;
            }
            start = at;
            at = end;
        }
        print(name, int32_t(all.size() - 1 - start));
    }

    /// Decodes 60 embeddings from a position on, with M-RoPE as 10 x 6; returns the next position.
    llama_pos decode_image(uint32_t seed, llama_pos at) {
        const size_t count = 60, width = size_t(llama_model_n_embd_inp(model));
        const llama_rope_type rope = llama_model_rope_type(model);
        const bool grid = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE;
        const tokens_t noise = text(seed, count * width);
        std::vector<float> rows;
        for (const llama_token one : noise) {
            rows.push_back(float(one) / float(vocabulary) - 0.5f);
        }
        std::vector<llama_pos> positions(4 * count, 0);
        for (size_t i = 0; i < count; i++) {
            positions[i] = grid ? at : at + llama_pos(i);
            positions[count + i] = at + llama_pos(i / 10);
            positions[2 * count + i] = at + llama_pos(i % 10);
        }
#ifdef KVTIER_LLAMA_BATCH_EXT
        if (!options.old) {
            if (!extended) {
                extended = llama_batch_ext_init(ctx);
            }
            llama_batch_ext_clear(extended);
            for (size_t i = 0; i < count; i++) {
                const llama_pos pos[4] = {positions[i], positions[count + i], positions[2 * count + i], 0};
                llama_batch_ext_set_pos(extended,
                                        llama_batch_ext_add_embd(extended, 0, {rows.data() + i * width, 1, width}),
                                        pos);
            }
            if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, extended) != 0) {
                stop("an image is not decoded");
            }
            return at + (grid ? 10 : llama_pos(count));
        }
#endif
        std::vector<int32_t> counts(count, 1);
        llama_seq_id seq = 0;
        std::vector<llama_seq_id *> of(count, &seq);
        std::vector<int8_t> outputs(count, 0);
        llama_batch batch{};
        batch.n_tokens = int32_t(count);
        batch.embd = rows.data();
        batch.pos = positions.data();
        batch.n_seq_id = counts.data();
        batch.seq_id = of.data();
        batch.logits = outputs.data();
        if (llama_decode(ctx, batch) != 0) {
            stop("an image is not decoded");
        }
        return at + (grid ? 10 : llama_pos(count));
    }

    /// Decodes text of sequence 0 whose first token has an index and a position; prints the last logits.
    void text_after(const std::string &name, const tokens_t &all, size_t index, llama_pos at) {
        const size_t step = size_t(options.batch);
        std::vector<item_t> items;
        for (size_t i = 0; i < all.size(); i++) {
            items.push_back({all[i], at + llama_pos(i), 0, i + 1 == all.size()});
            if ((index + i + 1) % step == 0 || i + 1 == all.size()) {
                if (decode(items) != 0) {
                    stop("text is not decoded");
                }
                if (i + 1 == all.size()) {
                    print(name, int32_t(items.size()) - 1);
                }
                items.clear();
            }
        }
    }

    void print(const std::string &name, int32_t index) {
        const float *logits = llama_get_logits_ith(ctx, index);
        if (!logits || logits != llama_get_logits_ith(ctx, index)) {
            stop("no logits");
        }
        uint64_t sum = 14695981039346656037u;
        const auto *bytes = reinterpret_cast<const unsigned char *>(logits);
        for (size_t i = 0; i < size_t(vocabulary) * sizeof(float); i++) {
            sum = (sum ^ bytes[i]) * 1099511628211u;
        }
        std::printf("%s %016llx\n", name.c_str(), (unsigned long long) sum);
    }

    void print_most_likely(const std::string &name, int32_t index) {
        const float *logits = llama_get_logits_ith(ctx, index);
        if (!logits) {
            stop("no logits");
        }
        std::printf("%s token %d\n", name.c_str(), int(std::max_element(logits, logits + vocabulary) - logits));
    }

private:
#ifdef KVTIER_LLAMA_BATCH_EXT
    int32_t decode_extended(const std::vector<item_t> &items) {
        if (!extended) {
            extended = llama_batch_ext_init(ctx);
        }
        llama_batch_ext_clear(extended);
        for (const item_t &item : items) {
            const int32_t at = llama_batch_ext_add_token(extended, item.seq, item.token);
            llama_batch_ext_set_pos(extended, at, &item.pos);
            llama_batch_ext_set_output_logits(extended, at, item.output);
        }
        return llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, extended);
    }

    llama_batch_ext *extended = nullptr;
#endif

    const options_t options;
    llama_model *model = nullptr;
    llama_context *ctx = nullptr;
    llama_memory_t memory = nullptr;
    int32_t vocabulary = 0;
};

using scenario_t = std::function<void(program_t &)>;

void prompt(program_t &of) {
    tokens_t all = of.text(1, 300);
    of.prompt("prompt", 0, all, 0);
    for (int i = 0; i < 40; i++) {
        all.push_back(of.text(uint32_t(100 + i), 1)[0]);
        of.prompt("token", 0, all, all.size() - 1);
    }
}

/// Two texts with a common start, each in a sequence of its own.
void branch(program_t &of) {
    for (uint32_t i = 0; i < 2; i++) {
        tokens_t all = of.text(1, 160);
        const tokens_t rest = of.text(10 + i, 100);
        all.insert(all.end(), rest.begin(), rest.end());
        of.prompt("branch", llama_seq_id(i + 1), all, 0);
    }
}

/// One sequence, three conversations in turn.
void turns(program_t &of) {
    for (const uint32_t seed : {31u, 32u, 31u}) {
        llama_memory_seq_rm(of.cells(), 0, -1, -1);
        of.prompt("turn", 0, of.text(seed, 200), 0);
    }
}

/// Batches with tokens of several sequences: prompts of which one is stored, and single tokens.
void together(program_t &of) {
    llama_memory_clear(of.cells(), true);
    const tokens_t one = of.text(41, 96), two = of.text(42, 96);
    for (size_t at = 0; at < 96; at += 32) {
        std::vector<item_t> items;
        for (size_t i = at; i < at + 32; i++) {
            items.push_back({one[i], llama_pos(i), 0, i == 95});
            items.push_back({two[i], llama_pos(i), 1, i == 95});
        }
        if (of.decode(items) != 0) {
            stop("a batch of two sequences fails");
        }
    }
    // The cells of the two are in another order when one was restored, and so is the sum over them.
    of.print_most_likely("together", 62);
    of.print_most_likely("together", 63);
    of.print_most_likely("together", -1);
}

/// The program cuts, copies, shifts, saves and restores cells itself.
void cells(program_t &of) {
    llama_memory_clear(of.cells(), true);
    tokens_t all = of.text(51, 128);
    of.prompt("cells", 0, all, 0);
    llama_memory_seq_cp(of.cells(), 0, 2, -1, -1);
    all.push_back(7);
    of.prompt("copy", 2, all, 128);

    std::vector<uint8_t> state(llama_state_seq_get_size(of.context(), 0));
    llama_state_seq_get_data(of.context(), state.data(), state.size(), 0);
    llama_memory_seq_rm(of.cells(), 0, -1, -1);
    if (llama_state_seq_set_data(of.context(), state.data(), state.size(), 0) == 0) {
        stop("a state is not restored");
    }
    const tokens_t more = of.text(52, 96);
    all.pop_back();
    all.insert(all.end(), more.begin(), more.end());
    of.prompt("state", 0, all, 128);

    if (llama_memory_seq_rm(of.cells(), 0, 160, -1)) {
        const tokens_t other = of.text(53, 64);
        all.resize(160);
        all.insert(all.end(), other.begin(), other.end());
        of.prompt("cut", 0, all, 160);
    }
    if (llama_memory_can_shift(of.cells()) && llama_memory_seq_rm(of.cells(), 0, 32, 64)) {
        llama_memory_seq_add(of.cells(), 0, 64, -1, -32);
        all.erase(all.begin() + 32, all.begin() + 64);
        const size_t before = all.size();
        const tokens_t after = of.text(54, 64);
        all.insert(all.end(), after.begin(), after.end());
        of.prompt("shift", 0, all, before);
    }
    llama_memory_seq_keep(of.cells(), 2);
    std::printf("last %d %d\n", int(llama_memory_seq_pos_max(of.cells(), 0)),
                int(llama_memory_seq_pos_max(of.cells(), 2)));
}

/// A prompt that does not fit beside another: the program makes room and tries again.
void full(program_t &of) {
    llama_memory_clear(of.cells(), true);
    of.prompt("first", 0, of.text(61, 400), 0);
    const tokens_t all = of.text(62, 400);
    of.prompt("second", 1, all, 0);
    llama_memory_seq_rm(of.cells(), 0, -1, -1);
    const size_t done = size_t(llama_memory_seq_pos_max(of.cells(), 1) + 1);
    std::printf("held %zu\n", done);
    of.prompt("again", 1, all, done);
}

/// Text, an image of random embeddings, text; then the same with other text, and with another image.
void image(program_t &of) {
    for (const uint32_t turn : {0u, 1u, 2u}) {
        llama_memory_clear(of.cells(), true);
        of.prompt("before", 0, of.text(81, 40), 0);
        const llama_pos next = of.decode_image(turn < 2 ? 1 : 2, 40);
        of.text_after("after", of.text(turn == 1 ? 83 : 82, 100), 100, next);
    }
}

/// A control vector: KV that was computed with it must not be restored without it, nor the reverse.
void vector(program_t &of) {
    const llama_model *model = llama_get_model(of.context());
    const int32_t width = llama_model_n_embd(model), layers = llama_model_n_layer(model);
    const std::vector<float> values(size_t(width) * size_t(layers), 0.25f);
    for (const bool on : {false, true, false}) {
        llama_memory_clear(of.cells(), true);
        const float *data = on ? values.data() : nullptr;
        if (llama_set_adapter_cvec(of.context(), data, on ? values.size() : 0, width, 1, layers) != 0) {
            stop("the control vector is refused");
        }
        of.prompt(on ? "with" : "without", 0, of.text(91, 128), 0);
    }
}

/// A child of the program, and what the program does after it.
void fork_it(program_t &of) {
    llama_memory_clear(of.cells(), true);
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        llama_memory_seq_rm(of.cells(), 0, -1, -1);
        _exit(7);
    }
    int status = 0;
    waitpid(child, &status, 0);
    std::printf("child %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    of.prompt("after", 0, of.text(71, 128), 0);
}

const std::map<std::string, scenario_t> scenarios = {
    {"prompt", prompt}, {"branch", branch}, {"turns", turns}, {"together", together},
    {"cells", cells},   {"full", full},     {"fork", fork_it}, {"image", image}, {"vector", vector},
};

options_t read(int argc, char **argv) {
    options_t out;
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--old") {
            out.old = true;
        } else if (word == "--apart") {
            out.apart = true;
        } else if (word == "--batch" && i + 1 < argc) {
            out.batch = std::atoi(argv[++i]);
        } else if (word == "--cells" && i + 1 < argc) {
            out.cells = std::atoi(argv[++i]);
        } else if (word == "--limit" && i + 1 < argc) {
            out.limit = std::atoi(argv[++i]);
        } else if (word == "--pause" && i + 1 < argc) {
            out.pause = argv[++i];
        } else if (!out.model) {
            out.model = argv[i];
        } else if (scenarios.count(word) != 0) {
            out.scenarios.push_back(word);
        } else {
            stop("usage: see the head of program.cpp");
        }
    }
    return out;
}

} // namespace

int main(int argc, char **argv) {
    const options_t options = read(argc, argv);
    if (!options.model || options.scenarios.empty()) {
        stop("usage: see the head of program.cpp");
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    program_t of(options);
    for (const std::string &name : options.scenarios) {
        scenarios.at(name)(of);
        if (name == options.pause) {
            std::printf("paused\n");
            std::fflush(stdout);
            pause();
        }
    }
    return 0;
}
