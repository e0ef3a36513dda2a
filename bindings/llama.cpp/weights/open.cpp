// Opens and closes streamed weights: the model's file, the budget, the streamer.
#include "weights/weights.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <unistd.h>

namespace kvt_weights {

kvt_status_t set_error(kvt_llama_why_t *why, kvt_status_t status, const char *form, ...) {
    if (why) {
        va_list list;
        va_start(list, form);
        std::vsnprintf(why->text, sizeof why->text, form, list);
        va_end(list);
    }
    return status;
}

kvt_status_t set_library_error(kvt_llama_why_t *why, kvt_status_t status, const char *what,
                               kvt_error_t *error) {
    const char *message = error ? kvt_error_message(error) : nullptr;
    if (message && *message) {
        set_error(why, status, "%s: %s", what, message);
    } else {
        set_error(why, status, "%s: status %d (%s)", what, (int) status, kvt_status_str(status));
    }
    kvt_error_free(&error);
    return status;
}

uint64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}

uintptr_t page_bytes() {
    static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

bool is_same_file(const Weights &w, const struct stat &now) {
    const struct stat &was = w.opened;
    return now.st_dev == was.st_dev && now.st_ino == was.st_ino && now.st_size == was.st_size &&
           now.st_mtim.tv_sec == was.st_mtim.tv_sec && now.st_mtim.tv_nsec == was.st_mtim.tv_nsec;
}

namespace {

/// Compares with the version that the loaded library reports, not with that of the headers.
kvt_status_t check_interface(kvt_llama_why_t *why) {
    const kvt_status_t status = kvt_llama_check(why);
    if (status != KVT_OK) {
        return status;
    }
    ggml_backend_dev_t processor = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!processor) {
        return set_error(why, KVT_E_UNSUPPORTED,
                         "the engine has no CPU backend: call ggml_backend_load_all first");
    }
    const int loaded = ggml_backend_dev_backend_reg(processor)->api_version;
    if (loaded != GGML_BACKEND_API_VERSION) {
        return set_error(why, KVT_E_UNSUPPORTED,
                   "ggml's backend interface is version %d, kvtier was compiled for %d: compile it against "
                   "the source of the loaded engine",
                   loaded, GGML_BACKEND_API_VERSION);
    }
    return KVT_OK;
}

kvt_status_t check_opts(const kvt_llama_weights_opts_t &opts, kvt_llama_why_t *why) {
    const uint32_t places = KVT_LLAMA_WEIGHTS_IN_PLACE | KVT_LLAMA_WEIGHTS_NOT_IN_PLACE;
    const uint32_t known = places | KVT_LLAMA_WEIGHTS_BUFFERED | KVT_LLAMA_WEIGHTS_VERIFY;
    if (!opts.model_path || !*opts.model_path) {
        return set_error(why, KVT_E_INVALID, "model_path is missing: set it to the GGUF file");
    }
    if (opts.flags & ~known) {
        return set_error(why, KVT_E_INVALID, "unknown flags %#x: only KVT_LLAMA_WEIGHTS_* are allowed",
                   opts.flags & ~known);
    }
    if ((opts.flags & places) == places) {
        return set_error(why, KVT_E_INVALID, "flags has both IN_PLACE and NOT_IN_PLACE: set one of them");
    }
    if (opts.contexts > max_contexts) {
        return set_error(why, KVT_E_LIMIT, "contexts is %u, at most %u is allowed", opts.contexts,
                         max_contexts);
    }
    if (opts.budget && !opts.runtime) {
        return set_error(why, KVT_E_INVALID, "budget is set but runtime is null: pass the budget's runtime");
    }
    return KVT_OK;
}

kvt_status_t open_budget(Weights &w, const kvt_llama_weights_opts_t &opts, kvt_llama_why_t *why) {
    kvt_error_t *error = nullptr;
    w.runtime = opts.runtime;
    w.budget = opts.budget;
    if (!w.runtime) {
        kvt_runtime_opts_t runtime = KVT_RUNTIME_OPTS_INIT;
        runtime.workers = 1;
        const kvt_status_t status = kvt_runtime_open(&runtime, &w.own_runtime, &error);
        if (status != KVT_OK) {
            return set_library_error(why, status, "opening a runtime", error);
        }
        w.runtime = w.own_runtime;
    }
    if (!w.budget && opts.budget_bytes) {
        kvt_budget_opts_t limits = KVT_BUDGET_OPTS_INIT;
        limits.host_bytes = opts.budget_bytes;
        // A caller who sets a limit has reserved the rest already; 0 would reserve half a gigabyte.
        limits.reserve_bytes = 1;
        const kvt_status_t status = kvt_budget_open(w.runtime, &limits, &w.own_budget, &error);
        if (status != KVT_OK) {
            return set_library_error(why, status, "opening a budget", error);
        }
        w.budget = w.own_budget;
    }
    return KVT_OK;
}

kvt_status_t open_file(Weights &w, kvt_llama_why_t *why) {
    const kvt_str_t path = {w.path.c_str(), w.path.size()};
    kvt_error_t *error = nullptr;
    const kvt_status_t status = kvt_model_open(&path, 1, sizeof path, &w.file, &error);
    if (status != KVT_OK) {
        return set_library_error(why, status, "opening the model", error);
    }
    kvt_model_info(w.file, &w.info);
    if (w.info.format != KVT_FORMAT_GGUF) {
        return set_error(why, KVT_E_UNSUPPORTED, "%s is not a GGUF file: only GGUF is supported",
                         w.path.c_str());
    }
    return KVT_OK;
}

/// Upper limit of the bytes of copied experts: parts of one layer's experts for each context.
uint64_t copies_bytes(const Weights &w, uint32_t at_once) {
    std::vector<uint64_t> layers;
    uint64_t most = 0;
    for (const Stack &stack : w.stacks) {
        if (stack.strided && w.in_place) {
            continue;
        }
        if (layers.size() <= stack.layer) {
            layers.resize(stack.layer + 1, 0);
        }
        // Pages at both ends of a part are touched as a whole.
        const uint64_t bytes = stack.part_bytes + 2 * page_bytes();
        layers[stack.layer] += bytes * std::min(at_once, stack.experts);
        most = std::max(most, layers[stack.layer]);
    }
    return most * w.contexts_at_once;
}

uint64_t host_limit(const Weights &w, const kvt_llama_weights_opts_t &opts) {
    uint64_t limit = opts.budget_bytes;
    kvt_tier_report_t report = KVT_TIER_REPORT_INIT;
    if (w.budget && kvt_budget_tier(w.budget, KVT_TIER_HOST, &report) == KVT_OK) {
        limit = limit ? std::min(limit, report.free_bytes) : report.free_bytes;
    }
    return limit;
}

kvt_stream_terms_t terms_of(const Weights &w, const kvt_llama_weights_opts_t &opts, uint64_t limit_bytes) {
    kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
    terms.compute = KVT_COMPUTE_HOST;
    terms.slots = opts.slots ? opts.slots : w.contexts_at_once + 1;
    terms.flags = KVT_TERMS_KV;
    if (limit_bytes) {
        // A caller who sets a limit has reserved the rest already.
        terms.flags |= KVT_TERMS_HOST_CEILING | KVT_TERMS_HOST_RESERVE;
        terms.host_ceiling_bytes = limit_bytes;
    }
    return terms;
}

/// Gives experts all remaining memory as slots, so that experts in use stay resident.
kvt_status_t choose_expert_slots(Weights &w, kvt_stream_terms_t &terms, uint64_t copies,
                                 kvt_llama_why_t *why) {
    if (w.experts == 0) {
        return KVT_OK;
    }
    char what[128];
    std::snprintf(what, sizeof what, "planning the streamer with %llu bytes for copied experts",
                  (unsigned long long) copies);
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    kvt_error_t *error = nullptr;
    kvt_status_t status =
        kvt_model_plan(w.file, &terms, nullptr, &plan, nullptr, nullptr, 0, 0, &error);
    if (status != KVT_OK) {
        return set_library_error(why, status, what, error);
    }
    if (plan.expert_slots == 0) {
        return KVT_OK;
    }
    const uint32_t least = w.experts_used + 1;
    terms.flags |= KVT_TERMS_SHRINKS | KVT_TERMS_EXPERT_SLOTS;
    for (uint32_t slots = plan.expert_slots;; slots = std::max(least, slots - std::max(1u, slots / 16))) {
        terms.expert_slots = slots;
        status = kvt_model_plan(w.file, &terms, nullptr, &plan, nullptr, nullptr, 0, 0, &error);
        if (status == KVT_OK) {
            return KVT_OK;
        }
        if (status != KVT_E_BUDGET || slots <= least) {
            return set_library_error(why, status, what, error);
        }
    }
}

kvt_status_t charge_copies(Weights &w, uint64_t bytes, int64_t priority, kvt_llama_why_t *why) {
    if (bytes == 0 || !w.budget) {
        return KVT_OK;
    }
    kvt_account_opts_t opts = KVT_ACCOUNT_OPTS_INIT;
    opts.name = "llama weights";
    opts.name_bytes = std::strlen(opts.name);
    opts.priority = priority;
    kvt_error_t *error = nullptr;
    kvt_status_t status = kvt_account_open(w.budget, &opts, &w.account, &error);
    if (status == KVT_OK) {
        status = kvt_account_reserve(w.account, KVT_TIER_HOST, bytes, &error);
    }
    if (status == KVT_OK) {
        status = kvt_account_commit(w.account, KVT_TIER_HOST, bytes, bytes, &error);
    }
    if (status != KVT_OK) {
        return set_library_error(why, status, "reserving memory for copied experts", error);
    }
    w.account_bytes = bytes;
    return KVT_OK;
}

void release_copies(Weights &w) {
    if (w.account && w.account_bytes) {
        kvt_account_release(w.account, KVT_TIER_HOST, w.account_bytes, nullptr);
    }
    w.account_bytes = 0;
    kvt_account_close(&w.account, nullptr);
}

kvt_stream_opts_t stream_opts(const Weights &w, const kvt_llama_weights_opts_t &opts,
                              const kvt_stream_terms_t &terms) {
    kvt_stream_opts_t stream = KVT_STREAM_OPTS_INIT;
    stream.model = w.file;
    stream.terms = &terms;
    stream.budget = w.budget;
    stream.priority = opts.priority;
    stream.readers = opts.readers;
    stream.flags = (w.in_place ? KVT_STREAM_IN_PLACE : 0) |
                   (opts.flags & KVT_LLAMA_WEIGHTS_BUFFERED ? KVT_STREAM_BUFFERED : 0);
    if (opts.flags & KVT_LLAMA_WEIGHTS_VERIFY) {
        stream.flags |= KVT_STREAM_SIDECAR;
        stream.verify = KVT_VERIFY_ALWAYS;
    }
    return stream;
}

/// Opens the streamer, and reserves memory for copies of `copied` experts.
kvt_status_t try_stream(Weights &w, const kvt_llama_weights_opts_t &opts, uint32_t copied,
                        kvt_llama_why_t *why) {
    const uint64_t all = host_limit(w, opts);
    const uint64_t copies = copies_bytes(w, copied);
    if (all && copies >= all) {
        return set_error(why, KVT_E_BUDGET,
                         "copied experts take %llu bytes of a budget of %llu: raise the budget",
                   (unsigned long long) copies, (unsigned long long) all);
    }
    kvt_stream_terms_t terms = terms_of(w, opts, all ? all - copies : 0);
    kvt_status_t status = choose_expert_slots(w, terms, copies, why);
    if (status == KVT_OK) {
        status = charge_copies(w, copies, opts.priority, why);
    }
    if (status != KVT_OK) {
        return status;
    }
    const kvt_stream_opts_t stream = stream_opts(w, opts, terms);
    kvt_error_t *error = nullptr;
    status = kvt_stream_open(w.runtime, &stream, &w.stream, &error);
    if (status != KVT_OK) {
        return set_library_error(why, status, "opening the streamer", error);
    }
    kvt_stream_plan(w.stream, &w.plan, nullptr, nullptr, 0, 0);
    w.experts_at_once = std::min(w.experts, w.plan.expert_slots / w.contexts_at_once);
    w.copied_at_once = copies ? copied : w.experts;
    w.experts_at_once = std::min(w.experts_at_once, w.copied_at_once);
    return KVT_OK;
}

kvt_status_t open_stream(Weights &w, const kvt_llama_weights_opts_t &opts, kvt_llama_why_t *why) {
    // Copy all experts if they take little memory, else as many as a small batch uses, or else a token.
    const uint64_t all = host_limit(w, opts);
    const bool copies_are_small = all == 0 || copies_bytes(w, w.experts) <= all / 8;
    const uint32_t copied = copies_are_small ? w.experts : std::min(w.experts, 4 * w.experts_used);
    const kvt_status_t status = try_stream(w, opts, copied, why);
    if (status != KVT_E_BUDGET || copied <= w.experts_used) {
        return status;
    }
    release_copies(w);
    return try_stream(w, opts, w.experts_used, why);
}

kvt_status_t close_parts(Weights &w, kvt_llama_why_t *why) {
    kvt_error_t *error = nullptr;
    kvt_status_t status = kvt_stream_close(&w.stream, 0, &error);
    if (status != KVT_OK) {
        return set_library_error(why, status, "closing the streamer", error);
    }
    release_copies(w);
    kvt_model_close(&w.file);
    status = kvt_budget_close(&w.own_budget, &error);
    if (status != KVT_OK) {
        return set_library_error(why, status, "closing the budget", error);
    }
    if (w.own_runtime) {
        status = kvt_runtime_close(&w.own_runtime, 0, nullptr, &error);
        if (status != KVT_OK) {
            return set_library_error(why, status, "closing the runtime", error);
        }
    }
    return KVT_OK;
}

kvt_status_t open_all(Weights &w, const kvt_llama_weights_opts_t &opts, kvt_llama_why_t *why) {
    w.path = opts.model_path;
    w.flags = opts.flags;
    w.contexts_at_once = opts.contexts ? opts.contexts : 1;
    kvt_status_t status = open_budget(w, opts, why);
    if (status == KVT_OK) {
        // If stat fails, opening the file reports the reason.
        stat(w.path.c_str(), &w.opened);
        status = open_file(w, why);
    }
    if (status == KVT_OK) {
        status = read_units(w, why);
    }
    if (status == KVT_OK) {
        status = open_stream(w, opts, why);
    }
    struct stat now {};
    if (status == KVT_OK && (stat(w.path.c_str(), &now) != 0 || !is_same_file(w, now))) {
        status = set_error(why, KVT_E_CORRUPT, "%s changed while it was opened: open it again",
                           w.path.c_str());
    }
    if (status == KVT_OK) {
        status = read_residency(w, why);
    }
    return status;
}

} // namespace
} // namespace kvt_weights

using namespace kvt_weights;

kvt_status_t kvt_llama_weights_open(const kvt_llama_weights_opts_t *opts, kvt_llama_weights_t **out,
                                    kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        if (!opts || !out) {
            return set_error(why, KVT_E_INVALID, "opts or out is null: both are required");
        }
        kvt_status_t status = check_interface(why);
        if (status == KVT_OK) {
            status = check_opts(*opts, why);
        }
        if (status != KVT_OK) {
            return status;
        }
        auto made = std::make_unique<Weights>();
        make_buffer_type(*made);
        try {
            status = open_all(*made, *opts, why);
        } catch (...) {
            close_parts(*made, nullptr);
            throw;
        }
        if (status != KVT_OK) {
            close_parts(*made, nullptr);
            return status;
        }
        *out = made.release();
        return KVT_OK;
    });
}

kvt_status_t kvt_llama_weights_close(kvt_llama_weights_t **weights, kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        if (!weights || !*weights) {
            return KVT_OK;
        }
        Weights &w = **weights;
        {
            std::lock_guard<std::mutex> guard(w.lock);
            if (w.buffers) {
                return set_error(why, KVT_E_BUSY,
                           "the model still exists: free its contexts, then the model, then close its "
                           "weights");
            }
        }
        for (auto &context : w.contexts) {
            release_all(*context);
        }
        const kvt_status_t status = close_parts(w, why);
        if (status == KVT_OK) {
            delete *weights;
            *weights = nullptr;
        }
        return status;
    });
}
