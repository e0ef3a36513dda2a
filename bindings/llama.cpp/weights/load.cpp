// Loads a model without reading its weights.
#include "weights/weights.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace kvt_weights {

namespace {

/// The model's file as the loader reads it: headers are read, weights are skipped.
struct SkippingReader {
    Weights *weights = nullptr;
    int file = -1;
    int64_t at = 0, bytes = 0;
    /// Ranges of streamed weights in the file, known when the first of them is read.
    std::vector<std::pair<int64_t, int64_t>> weight_ranges;
};

void find_weight_ranges(SkippingReader &s) {
    std::lock_guard<std::mutex> guard(s.weights->lock);
    if (s.weight_ranges.size() == s.weights->entries.size()) {
        return;
    }
    s.weight_ranges.clear();
    for (const auto &entry : s.weights->entries) {
        const auto from = static_cast<int64_t>(entry->file_offset);
        s.weight_ranges.emplace_back(from, from + static_cast<int64_t>(entry->bytes));
    }
    std::sort(s.weight_ranges.begin(), s.weight_ranges.end());
}

/// Length from `at` to the end of a range of weights; negative: to the beginning of the next one.
int64_t range_length(const SkippingReader &s, int64_t at, int64_t end) {
    auto next = std::upper_bound(s.weight_ranges.begin(), s.weight_ranges.end(), std::make_pair(at,
        INT64_MAX));
    if (next != s.weight_ranges.begin() && std::prev(next)->second > at) {
        return std::min(std::prev(next)->second, end) - at;
    }
    return at - (next == s.weight_ranges.end() ? end : std::min(next->first, end));
}

ssize_t read_skipping(void *cookie, char *out, size_t wanted) {
    auto &s = *static_cast<SkippingReader *>(cookie);
    const int64_t begin = s.at;
    const int64_t end = std::min(s.bytes, begin + static_cast<int64_t>(std::min<size_t>(wanted, 1u << 30)));
    try {
        find_weight_ranges(s);
    } catch (...) {
        errno = ENOMEM;
        return -1;
    }
    while (s.at < end) {
        const int64_t length = range_length(s, s.at, end);
        if (length > 0) {
            // The content of `out` does not matter, because set_tensor ignores it.
            s.at += length;
            continue;
        }
        const ssize_t got = pread(s.file, out + (s.at - begin), static_cast<size_t>(-length), s.at);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            errno = got == 0 ? EIO : errno;
            return s.at > begin ? s.at - begin : -1;
        }
        s.at += got;
    }
    return s.at - begin;
}

int seek_skipping(void *cookie, off64_t *offset, int whence) {
    auto &s = *static_cast<SkippingReader *>(cookie);
    const int64_t from = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? s.at : s.bytes;
    if (*offset > INT64_MAX - from || from + *offset < 0) {
        errno = EINVAL;
        return -1;
    }
    s.at = from + *offset;
    *offset = s.at;
    return 0;
}

llama_model *load_skipping(Weights &w, const llama_model_params &params, kvt_llama_why_t *why) {
    SkippingReader s;
    s.weights = &w;
    s.file = open(w.path.c_str(), O_RDONLY | O_CLOEXEC);
    if (s.file < 0) {
        set_error(why, KVT_E_IO, "%s: %s", w.path.c_str(), std::strerror(errno));
        return nullptr;
    }
    struct stat now {};
    if (fstat(s.file, &now) != 0 || !is_same_file(w, now)) {
        set_error(why, KVT_E_CORRUPT, "%s changed since it was opened: open the weights again",
                  w.path.c_str());
        close(s.file);
        return nullptr;
    }
    s.bytes = now.st_size;
    cookie_io_functions_t calls{};
    calls.read = read_skipping;
    calls.seek = seek_skipping;
    FILE *file = fopencookie(&s, "rb", calls);
    llama_model *model = nullptr;
    if (file) {
        std::setvbuf(file, nullptr, _IOFBF, 1 << 16);
        model = llama_model_load_from_file_ptr(file, params);
        std::fclose(file);
    }
    close(s.file);
    return model;
}

void change_params(Weights &w, llama_model_params &params) {
    params.devices = w.no_devices;
    params.n_gpu_layers = 0;
    params.tensor_buft_overrides = w.overrides;
    params.load_mode = LLAMA_LOAD_MODE_MMAP;
    kvtier_llama::disable_lazy_reads(params, 0);
    params.use_extra_bufts = false;
    params.check_tensors = false;
}

kvt_status_t begin_load(Weights &w, const llama_model_params &params, kvt_llama_why_t *why) {
    std::lock_guard<std::mutex> guard(w.lock);
    if (w.buffers) {
        return set_error(why, KVT_E_STATE,
                         "a model is already loaded: open another weights object for another model");
    }
    if (params.no_alloc || params.vocab_only) {
        return set_error(why, KVT_E_INVALID,
                         "no_alloc and vocab_only load no weights: load the model without this adapter");
    }
    w.by_tensor.clear();
    w.entries.clear();
    w.refusal.clear();
    w.phase = Phase::loading;
    w.is_host = false;
    return KVT_OK;
}

bool has_text(const kvt_llama_why_t *why) { return why && why->text[0]; }

/// Addresses that parts of experts are copied to must be writable.
kvt_status_t make_writable(const Entry &entry, kvt_llama_why_t *why) {
    const auto from = reinterpret_cast<uintptr_t>(entry.placeholder) & ~(page_bytes() - 1);
    const uintptr_t end = reinterpret_cast<uintptr_t>(entry.placeholder) + entry.bytes;
    if (mprotect(reinterpret_cast<void *>(from), end - from, PROT_READ | PROT_WRITE) != 0) {
        return set_error(why, KVT_E_NOMEM, "memory for copied experts cannot be made writable: %s",
                         std::strerror(errno));
    }
    return KVT_OK;
}

kvt_status_t bind_strided(Weights &w, Entry &entry, kvt_llama_why_t *why) {
    uintptr_t first = 0;
    size_t stride = 0;
    for (size_t i = 0; i < entry.experts.size(); i++) {
        const void *address = nullptr;
        const kvt_status_t status = kvt_stream_unit_address(w.stream, entry.experts[i], &address, nullptr);
        if (status != KVT_OK) {
            return set_error(why, status, "an expert of %s has no fixed address", entry.tensor->name);
        }
        const auto at = reinterpret_cast<uintptr_t>(address);
        first = i == 0 ? at : first;
        stride = i == 1 ? at - first : stride;
        if (at != first + i * stride) {
            return set_error(why, KVT_E_UNSUPPORTED,
                       "experts of %s are not at equal distances: use KVT_LLAMA_WEIGHTS_NOT_IN_PLACE",
                       entry.tensor->name);
        }
    }
    entry.tensor->data = reinterpret_cast<void *>(first + entry.at);
    entry.tensor->nb[2] = stride;
    entry.tensor->nb[3] = stride * static_cast<size_t>(entry.tensor->ne[2]);
    return KVT_OK;
}

/// K-shift reads the factors of RoPE before the engine gives a context's callback to its scheduler.
/// They must therefore always be in memory.
bool is_always_resident(const Entry &entry) {
    constexpr uint64_t small_bytes = 64 << 10;
    return entry.kind == Kind::whole && entry.bytes <= small_bytes &&
           std::strncmp(entry.tensor->name, "rope_f", 6) == 0;
}

kvt_status_t bind_resident(Weights &w, Entry &entry, kvt_llama_why_t *why) {
    const kvt_status_t status = make_writable(entry, why);
    if (status != KVT_OK) {
        return status;
    }
    if (!read_entry(w, entry, entry.placeholder)) {
        return set_error(why, KVT_E_IO, "tensor %s cannot be read from the file", entry.tensor->name);
    }
    // No pass acquires it any more.
    w.by_tensor.erase(entry.tensor);
    return KVT_OK;
}

/// Records which part of the tensor each expert's unit has.
kvt_status_t bind_copied(Weights &w, uint32_t number, kvt_llama_why_t *why) {
    Entry &entry = *w.entries[number];
    const uint64_t part_bytes = entry.bytes / entry.experts.size();
    uint32_t tensor = 0;
    kvt_model_find_tensor(w.file, entry.tensor->name, std::strlen(entry.tensor->name), &tensor);
    for (uint32_t unit : entry.experts) {
        uint64_t count = 0;
        kvt_model_unit_parts(w.file, unit, nullptr, 0, sizeof(kvt_part_t), &count);
        std::vector<kvt_part_t> parts(count);
        const kvt_status_t status =
            kvt_model_unit_parts(w.file, unit, parts.data(), count, sizeof(kvt_part_t), &count);
        if (status != KVT_OK) {
            return set_error(why, status, "the parts of an expert of %s cannot be read", entry.tensor->name);
        }
        for (kvt_part_t part : parts) {
            const bool is_in = part.bytes == part_bytes && part.from <= entry.bytes - part.bytes;
            if (part.tensor == tensor && is_in) {
                part.tensor = number;
                w.units[unit].copied.push_back(part);
            }
        }
    }
    return make_writable(entry, why);
}

} // namespace

kvt_status_t bind(Weights &w, kvt_llama_why_t *why) {
    std::lock_guard<std::mutex> guard(w.lock);
    if (w.phase != Phase::loading || w.entries.empty()) {
        return set_error(why, KVT_E_STATE,
                         "no model was loaded with the parameters of kvt_llama_weights_params");
    }
    struct stat now {};
    if (stat(w.path.c_str(), &now) != 0 || !is_same_file(w, now)) {
        return set_error(why, KVT_E_CORRUPT, "%s changed since it was opened: open the weights again",
                   w.path.c_str());
    }
    for (uint32_t i = 0; i < w.entries.size(); i++) {
        Entry &entry = *w.entries[i];
        kvt_status_t status = KVT_OK;
        if (is_always_resident(entry)) {
            status = bind_resident(w, entry, why);
        } else if (entry.kind == Kind::whole) {
            w.units[entry.unit].entries.push_back(i);
        } else if (entry.kind == Kind::strided) {
            status = bind_strided(w, entry, why);
        } else {
            status = bind_copied(w, i, why);
        }
        if (status != KVT_OK) {
            return status;
        }
    }
    w.phase = Phase::bound;
    w.is_host = true;
    return KVT_OK;
}

namespace {

/// Waits for the resident units. Reads for a pass have priority over them, so a pass need not wait.
kvt_status_t wait_residents(Weights &w, llama_progress_callback progress, void *data, kvt_llama_why_t *why) {
    for (;;) {
        kvt_stream_progress_t now = KVT_STREAM_PROGRESS_INIT;
        kvt_stream_progress(w.stream, &now);
        const float part = now.resident_units ? 1.0f - float(now.missing) / float(now.resident_units) : 1.0f;
        if (progress && !progress(part, data)) {
            return set_error(why, KVT_E_CANCELLED, "the progress callback cancelled the load");
        }
        kvt_error_t *error = nullptr;
        const kvt_status_t status = kvt_stream_wait_resident(w.stream, now_ns() + 50000000ull, &error);
        if (status == KVT_OK) {
            return progress && !progress(1.0f, data)
                       ? set_error(why, KVT_E_CANCELLED, "the progress callback cancelled the load")
                       : KVT_OK;
        }
        if (status != KVT_E_TIMEOUT) {
            return set_library_error(why, status, "reading the resident weights", error);
        }
        kvt_error_free(&error);
    }
}

kvt_status_t load(Weights &w, const llama_model_params &given, llama_model **out, kvt_llama_why_t *why) {
    kvt_status_t status = begin_load(w, given, why);
    if (status != KVT_OK) {
        return status;
    }
    llama_model_params params = given;
    change_params(w, params);
    params.progress_callback = nullptr;
    llama_model *model = nullptr;
    if (w.info.files == 1) {
        params.load_mode = LLAMA_LOAD_MODE_NONE;
        model = load_skipping(w, params, why);
    } else {
        model = llama_model_load_from_file(w.path.c_str(), params);
    }
    if (!model) {
        std::lock_guard<std::mutex> guard(w.lock);
        w.phase = Phase::idle;
        if (!w.refusal.empty()) {
            return set_error(why, KVT_E_UNSUPPORTED, "%s", w.refusal.c_str());
        }
        return has_text(why) ? KVT_E_IO
                              : set_error(why, KVT_E_CORRUPT, "the engine cannot load %s: see its log",
                                    w.path.c_str());
    }
    status = bind(w, why);
    if (status == KVT_OK) {
        status = wait_residents(w, given.progress_callback, given.progress_callback_user_data, why);
    }
    if (status != KVT_OK) {
        llama_model_free(model);
        return status;
    }
    *out = model;
    return KVT_OK;
}

} // namespace
} // namespace kvt_weights

using namespace kvt_weights;

kvt_status_t kvt_llama_weights_load(kvt_llama_weights_t *weights, const struct llama_model_params *params,
                                    struct llama_model **out, kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        if (!weights || !params || !out) {
            return set_error(why, KVT_E_INVALID, "weights, params or out is null: all are required");
        }
        return load(*weights, *params, out, why);
    });
}

kvt_status_t kvt_llama_weights_params(kvt_llama_weights_t *weights, struct llama_model_params *params,
                                      kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        if (!weights || !params) {
            return set_error(why, KVT_E_INVALID, "weights or params is null: both are required");
        }
        const kvt_status_t status = begin_load(*weights, *params, why);
        if (status == KVT_OK) {
            change_params(*weights, *params);
        }
        return status;
    });
}

kvt_status_t kvt_llama_weights_bind(kvt_llama_weights_t *weights, const struct llama_model *model,
                                    kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        if (!weights || !model) {
            return set_error(why, KVT_E_INVALID, "weights or model is null: %s",
                       weights && !weights->refusal.empty() ? weights->refusal.c_str()
                                                            : "load the model first");
        }
        if (llama_model_size(model) != weights->info.bytes) {
            return set_error(why, KVT_E_INVALID,
                             "the model was not loaded from %s: pass the model of this "
                             "file", weights->path.c_str());
        }
        return bind(*weights, why);
    });
}
