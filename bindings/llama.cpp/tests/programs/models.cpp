// A generated model loads, decodes 300 tokens, and its answers depend on the prompt.
//
//   models NAME...      in KVTIER_LLAMA_MODELS
#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int answer_tokens = 300;

struct free_model {
    void operator()(llama_model *model) const { llama_model_free(model); }
};
struct free_context {
    void operator()(llama_context *ctx) const { llama_free(ctx); }
};

void fail(const std::string &what) {
    std::fprintf(stderr, "FAIL %s\n", what.c_str());
    std::exit(1);
}

std::vector<llama_token> tokens_of(const llama_vocab *vocab, const std::string &text) {
    std::vector<llama_token> tokens(text.size() + 8);
    const int n = llama_tokenize(vocab, text.data(), (int32_t) text.size(), tokens.data(),
                                 (int32_t) tokens.size(), true, true);
    if (n <= 0) {
        fail("the prompt cannot be tokenized");
    }
    tokens.resize((size_t) n);
    return tokens;
}

// The logits after the last token. With `answer`, decodes greedily and returns the tokens there.
std::vector<float> decode(llama_model *model, const std::string &prompt, std::vector<llama_token> *answer) {
    const llama_vocab *vocab = llama_model_get_vocab(model);
    const size_t n_vocab = (size_t) llama_vocab_n_tokens(vocab);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 1024;
    params.n_threads = params.n_threads_batch = 1;
    std::unique_ptr<llama_context, free_context> ctx(llama_init_from_model(model, params));
    if (!ctx) {
        fail("the context cannot be created");
    }
    std::vector<llama_token> batch = tokens_of(vocab, prompt);
    std::vector<float> logits;
    for (int i = 0; i <= (answer ? answer_tokens : 0); ++i) {
        if (llama_decode(ctx.get(), llama_batch_get_one(batch.data(), (int32_t) batch.size())) != 0) {
            fail("decoding token " + std::to_string(i) + " failed");
        }
        const float *row = llama_get_logits_ith(ctx.get(), -1);
        logits.assign(row, row + n_vocab);
        if (!std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) {
            fail("a logit of token " + std::to_string(i) + " is not finite");
        }
        batch.assign(1, (llama_token) (std::max_element(logits.begin(), logits.end()) - logits.begin()));
        if (answer) {
            answer->push_back(batch[0]);
        }
    }
    return logits;
}

double spread(const std::vector<float> &logits) {
    double sum = 0, squares = 0;
    for (const float x : logits) {
        sum += x;
        squares += (double) x * x;
    }
    const double mean = sum / (double) logits.size();
    return std::sqrt(squares / (double) logits.size() - mean * mean);
}

double max_difference(const std::vector<float> &a, const std::vector<float> &b) {
    double largest = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        largest = std::max(largest, (double) std::fabs(a[i] - b[i]));
    }
    return largest;
}

void check_model(const std::string &path) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    std::unique_ptr<llama_model, free_model> model(llama_model_load_from_file(path.c_str(), params));
    if (!model) {
        fail(path + ": cannot be loaded");
    }
    std::vector<llama_token> answer;
    const std::string end = " and then the other thing in the end, that was on the table.";
    const std::vector<float> last = decode(model.get(), "Something at the start" + end, &answer);
    const std::vector<float> one = decode(model.get(), "Something at the start" + end, nullptr);
    const std::vector<float> same = decode(model.get(), "Something at the start" + end, nullptr);
    const std::vector<float> other = decode(model.get(), "Anything at the start" + end, nullptr);
    const size_t distinct = std::set<llama_token>(answer.begin(), answer.end()).size();
    std::printf("%s: logits spread %.2f, other start moves them by %.3f, %zu different tokens of %d\n",
                path.c_str(), spread(last), max_difference(one, other), distinct, answer_tokens);
    if (one != same) {
        fail("the same prompt gave other logits");
    }
    if (spread(last) < 0.3 || max_difference(one, other) < 0.02 || distinct < 8) {
        fail("the output is degenerate");
    }
}

} // namespace

int main(int argc, char **argv) {
    const char *models = std::getenv("KVTIER_LLAMA_MODELS");
    llama_log_set([](ggml_log_level level, const char *text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            std::fputs(text, stderr);
        }
    }, nullptr);
    for (int i = 1; i < argc; ++i) {
        const std::string path = std::string(models ? models : "") + "/" + argv[i] + ".gguf";
        if (FILE *file = std::fopen(path.c_str(), "rb")) {
            std::fclose(file);
            check_model(path);
        } else {
            std::printf("SKIP no %s: models.sh WORK tiny creates it\n", path.c_str());
            return 77;
        }
    }
    return 0;
}
