// Starts and stops this library in a process; opens the store; finds the record of a context.
#include "run/process.hpp"

#include "run/settings.hpp"
#include "tier/tier.hpp"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <vector>

namespace kvtier_run {

namespace {

constexpr uint64_t close_wait_ns = uint64_t(60) * 1000000000;

std::atomic<bool> on{false};

std::mutex store_lock;
kvt_store_t *the_store = nullptr;
kvt_runtime_t *the_runtime = nullptr;
bool store_tried = false;

/// Credentials of a remote, and the variables in which `kvtier run` passes them.
constexpr const char *credentials[][2] = {
    {"password", "KVTIER_REMOTE_PASSWORD"},   {"s3.key", "KVTIER_REMOTE_S3_KEY"},
    {"s3.secret", "KVTIER_REMOTE_S3_SECRET"}, {"s3.token", "KVTIER_REMOTE_S3_TOKEN"},
    {"seal", "KVTIER_REMOTE_SEAL"},
};

/// Never destroyed: the program may end without freeing its contexts, and then the engine is gone first.
struct contexts_t {
    std::mutex lock;
    std::unordered_map<const llama_context *, std::unique_ptr<context_t>> all;
    std::unordered_map<llama_memory_t, context_t *> by_memory;
};

contexts_t &contexts() {
    static auto *const made = new contexts_t;
    return *made;
}

/// A child that a fork made has none of the store's threads.
void after_fork() { on = false; }

/// Why the loaded engine cannot be used; empty = it can.
std::string obstacle() {
    if (!engine().missing.empty()) {
        return "the loaded libllama has no function " + engine().missing + ": use another version of it";
    }
    kvt_llama_why_t why{};
    return kvt_llama_check(&why) == KVT_OK ? "" : why.text;
}

/// LD_PRELOAD without this library.
std::string other_preloads() {
    Dl_info own{};
    dladdr(reinterpret_cast<void *>(&other_preloads), &own);
    const char *all = std::getenv("LD_PRELOAD");
    std::string out;
    std::istringstream parts(all ? all : "");
    for (std::string part; std::getline(parts, part, ':');) {
        if (own.dli_fname && part != own.dli_fname) {
            out += (out.empty() ? "" : ":") + part;
        }
    }
    return out;
}

/// Starts the program again without this library.
[[noreturn]] void start_without(char **arguments) {
    const std::string others = other_preloads();
    others.empty() ? unsetenv("LD_PRELOAD") : setenv("LD_PRELOAD", others.c_str(), 1);
    unsetenv("KVTIER_RUN_STORE");
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length > 0) {
        path[length] = 0;
        execv(path, arguments);
    }
    warn("the program cannot be started again: start it without kvtier run");
    _exit(127);
}

/// Programs without libllama, such as a shell that starts the server, are left alone.
__attribute__((constructor)) void start(int, char **arguments, char **) {
    if (settings().store.empty() || !engine().llama_decode) {
        return;
    }
    const std::string why = obstacle();
    if (!why.empty()) {
        warn(why + "; the program runs without kvtier");
        // Structs of another version have another size, so its functions must not pass through here.
        start_without(arguments);
    }
    pthread_atfork(nullptr, nullptr, after_fork);
    on = true;
}

__attribute__((destructor)) void stop() {
    if (!on) {
        return;
    }
    on = false;
    // Contexts that the program did not free: the engine may be gone already.
    for (const auto &one : contexts().all) {
        one.second->drain();
    }
    const uint64_t until = kvtier_llama::now_ns() + close_wait_ns;
    if (the_store && kvt_store_close(&the_store, until, nullptr) != KVT_OK) {
        kvt_store_close(&the_store, until, nullptr);
    }
    kvt_runtime_close(&the_runtime, until, nullptr, nullptr);
}

kvt_status_t open_store(const std::string &spec, kvt_error_t **error) {
    std::vector<kvt_secret_t> secrets;
    for (const auto &one : credentials) {
        const char *secret = std::getenv(one[1]);
        if (secret && secret[0] != 0) {
            secrets.push_back({one[0], std::strlen(one[0]), secret, std::strlen(secret)});
        }
    }
    // The spec may set the runtime and the budget as well, if there are no credentials.
    if (secrets.empty()) {
        return kvt_open(spec.data(), spec.size(), &the_store, error);
    }
    const kvt_status_t status = kvt_runtime_open(nullptr, &the_runtime, error);
    if (status != KVT_OK) {
        return status;
    }
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.spec = spec.data();
    opts.spec_bytes = spec.size();
    opts.secrets = secrets.data();
    opts.secret_count = secrets.size();
    opts.secret_stride_bytes = sizeof secrets[0];
    return kvt_store_open(the_runtime, nullptr, &opts, &the_store, error);
}

} // namespace

bool active() { return on.load(std::memory_order_relaxed) && !inside(); }

const kvt_store_t *store() {
    const std::lock_guard<std::mutex> held(store_lock);
    if (store_tried) {
        return the_store;
    }
    store_tried = true;
    kvt_error_t *error = nullptr;
    const kvt_status_t status = open_store(settings().store, &error);
    if (status != KVT_OK) {
        warn(std::string("the store cannot be opened, so the program runs without kvtier: ") +
             (error ? kvt_error_message(error) : kvt_status_str(status)));
        kvt_error_free(&error);
    }
    return the_store;
}

void add_context(llama_context *ctx, const llama_context_params &params, uint32_t sequences, bool has_scratch) {
    auto made = std::make_unique<context_t>(ctx, params, sequences, has_scratch);
    const std::lock_guard<std::mutex> held(contexts().lock);
    contexts().by_memory[engine().llama_get_memory(ctx)] = made.get();
    contexts().all[ctx] = std::move(made);
}

void remove_context(llama_context *ctx) {
    std::unique_ptr<context_t> gone;
    const std::lock_guard<std::mutex> held(contexts().lock);
    const auto found = contexts().all.find(ctx);
    if (found != contexts().all.end()) {
        // Closing waits for what is being saved, after the lock was released.
        gone = std::move(found->second);
        contexts().all.erase(found);
        contexts().by_memory.erase(engine().llama_get_memory(ctx));
    }
}

void remove_contexts_of(const llama_model *model) {
    std::vector<llama_context *> theirs;
    {
        const std::lock_guard<std::mutex> held(contexts().lock);
        for (const auto &one : contexts().all) {
            if (llama_get_model(one.first) == model) {
                theirs.push_back(const_cast<llama_context *>(one.first));
            }
        }
    }
    for (llama_context *one : theirs) {
        remove_context(one);
    }
}

context_t *find_context(const llama_context *ctx) {
    const std::lock_guard<std::mutex> held(contexts().lock);
    const auto found = contexts().all.find(ctx);
    return found == contexts().all.end() ? nullptr : found->second.get();
}

context_t *find_context(llama_memory_t memory) {
    const std::lock_guard<std::mutex> held(contexts().lock);
    const auto found = contexts().by_memory.find(memory);
    return found == contexts().by_memory.end() ? nullptr : found->second;
}

} // namespace kvtier_run
