// Internal declarations of the streamed weights.
#ifndef KVTIER_LLAMA_WEIGHTS_HPP
#define KVTIER_LLAMA_WEIGHTS_HPP

#include "common/engine.hpp"

#include <kvtier/llama_weights.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unordered_map>
#include <vector>

namespace kvt_weights {

/// The group of units that stay leased for a whole pass.
constexpr uint32_t no_group = 0;
constexpr uint32_t max_contexts = 64;
/// A unit that the disk does not deliver within this time fails the decode, not the process.
constexpr uint64_t max_read_ns = 300000000000ull;

/// A unit of the streamer, as passes see it.
struct Unit {
    uint32_t role = 0;
    /// Units that are computed together: a layer and its experts. Other units form groups of their own.
    uint32_t group = no_group;
    /// The layer of an expert.
    uint32_t layer = 0;
    /// Contexts that lease the unit.
    uint32_t holders = 0;
    /// Tensors that lie in this unit completely.
    std::vector<uint32_t> entries;
    /// Parts of tensors that an expert's unit has and that are copied.
    std::vector<kvt_part_t> copied;
};

/// How the engine gets at a tensor's bytes.
enum class Kind {
    /// In one unit: `data` points there.
    whole,
    /// Divided between experts at equal distances in place: `nb` has the distance.
    strided,
    /// Divided between experts, whose parts are copied into the tensor's own addresses.
    copied,
};

/// A tensor of the model.
struct Entry {
    ggml_tensor *tensor = nullptr;
    Kind kind = Kind::whole;
    /// The unit of a whole tensor.
    uint32_t unit = 0;
    uint64_t at = 0;
    /// The unit of each expert of a divided tensor.
    std::vector<uint32_t> experts;
    uint32_t layer = 0;
    /// The tensor's reserved addresses, without memory: they read as zeros.
    void *placeholder = nullptr;
    uint64_t bytes = 0;
    uint64_t file_offset = 0;
};

/// A stacked tensor of the file, known before the model is loaded.
struct Stack {
    uint32_t layer = 0;
    uint32_t experts = 0;
    uint64_t part_bytes = 0;
    bool strided = false;
};

struct Context;

enum class Phase { idle, loading, loaded, bound };

} // namespace kvt_weights

/// The object behind the C handle.
struct kvt_llama_weights_t {
    std::string path;
    uint32_t flags = 0;
    uint32_t contexts_at_once = 1;

    kvt_runtime_t *own_runtime = nullptr;
    kvt_budget_t *own_budget = nullptr;
    const kvt_runtime_t *runtime = nullptr;
    const kvt_budget_t *budget = nullptr;
    kvt_account_t *account = nullptr;
    uint64_t account_bytes = 0;
    /// Identity of the first file when it was opened.
    struct stat opened{};
    kvt_model_t *file = nullptr;
    kvt_stream_t *stream = nullptr;
    kvt_model_info_t info = KVT_MODEL_INFO_INIT;
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    bool in_place = false;

    std::vector<kvt_weights::Unit> units;
    std::vector<kvt_weights::Stack> stacks;
    uint32_t groups = 1;
    /// Number of experts in the largest layer; experts that a token uses; experts that a context may
    /// have copied, and leased, at once.
    uint32_t experts = 0, experts_used = 0, copied_at_once = 0, experts_at_once = 0;

    ggml_backend_buffer_type buft{};
    ggml_backend_dev_t no_devices[1] = {nullptr};
    llama_model_tensor_buft_override overrides[2] = {};

    /// `lock` guards the fields below.
    mutable std::mutex lock;
    std::condition_variable released;
    uint64_t releases = 0;
    kvt_weights::Phase phase = kvt_weights::Phase::idle;
    uint32_t buffers = 0;
    /// Error of a load, or of a read for the engine, set in a callback of the engine.
    std::string refusal;
    std::vector<std::unique_ptr<kvt_weights::Entry>> entries;
    /// Does not change while the model is bound.
    std::unordered_map<const ggml_tensor *, const kvt_weights::Entry *> by_tensor;
    std::vector<std::unique_ptr<kvt_weights::Context>> contexts;
    /// Leased experts of each layer; when the count reaches 0, the layer's copies are dropped.
    std::vector<uint32_t> layer_holders;
    uint64_t copied_bytes = 0, failed_decodes = 0;
    /// True from the end of the load on: buffers are in host memory, but must not be read into.
    std::atomic<bool> is_host{false};
};

namespace kvt_weights {

using Weights = kvt_llama_weights_t;

struct Lease {
    kvt_unit_lease_t handle;
    /// The span of nodes in which it was used last.
    uint64_t used_in;
};

/// The node of the graph after which a group of units is not needed any more; learned in the first
/// pass.
struct Marker {
    char name[GGML_MAX_NAME] = {0};
    bool is_wrong = false;
};

/// Callback state of one llama_context.
struct Context {
    Weights *weights = nullptr;
    ggml_backend_sched_eval_callback user_eval = nullptr;
    void *user_eval_data = nullptr;
    ggml_abort_callback user_abort = nullptr;
    void *user_abort_data = nullptr;
    bool user_asked = false;

    std::vector<Lease> leases;
    std::vector<Marker> markers;
    /// The group of units in use, and the highest one in this pass.
    uint32_t group = no_group, highest = no_group;
    bool release_after = false, has_pass = false, has_layers = false;
    /// Counts the spans of nodes that were computed.
    uint64_t span = 0;
    char last_name[GGML_MAX_NAME] = {0};
    /// Integer nodes computed in this graph; ids of experts are among them.
    std::vector<const ggml_tensor *> integer_nodes;
    std::vector<uint32_t> wanted, missing;
    std::vector<uint8_t> seen;

    std::atomic<kvt_status_t> status{KVT_OK};
    /// The thread whose decode failed. Once it asks for the error it does not compute with this
    /// context.
    std::thread::id failed_by;
    char message[sizeof(kvt_llama_why_t::text)] = {0};
};

/// Writes the text and returns the status.
kvt_status_t set_error(kvt_llama_why_t *why, kvt_status_t status, const char *form, ...)
    __attribute__((format(printf, 3, 4)));
/// Writes the library's error with a prefix, frees it and returns the status.
kvt_status_t set_library_error(kvt_llama_why_t *why, kvt_status_t status, const char *what,
                               kvt_error_t *error);
uint64_t now_ns();
uintptr_t page_bytes();

/// Runs the body of an exported function and turns exceptions into a status and a text.
template <class Body> kvt_status_t guarded(kvt_llama_why_t *why, Body body) noexcept {
    if (why) {
        why->text[0] = 0;
    }
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return set_error(why, KVT_E_NOMEM, "out of memory: lower budget_bytes, or free memory");
    } catch (const std::exception &error) {
        return set_error(why, KVT_E_PANIC, "%s", error.what());
    } catch (...) {
        return set_error(why, KVT_E_PANIC, "internal error: an exception of unknown type");
    }
}

// units.cpp: units, tensors and experts of the file.
kvt_status_t read_units(Weights &w, kvt_llama_why_t *why);
kvt_status_t read_residency(Weights &w, kvt_llama_why_t *why);
/// Tells whether the path still has the file that was opened.
bool is_same_file(const Weights &w, const struct stat &now);
kvt_status_t describe(const Weights &w, const ggml_tensor *tensor, Entry &entry, kvt_llama_why_t *why);

// buffer.cpp: the buffer type in which the engine places the weights.
void make_buffer_type(Weights &w);
/// Reads all bytes of a tensor that lies in one unit.
bool read_entry(Weights &w, const Entry &entry, void *out);
/// The weight behind a tensor, or null. `extra` cannot be used for this: kernels take a tensor with
/// `extra` for one of another layout.
const Entry *entry_of(const Weights &w, const ggml_tensor *tensor);

// load.cpp
kvt_status_t bind(Weights &w, kvt_llama_why_t *why);

// pass.cpp: callbacks of the engine.
bool on_node(ggml_tensor *node, bool before_node, void *context);
bool on_abort(void *context);

// lease.cpp: units that a context leases.
bool acquire(Context &c, uint32_t unit);
void release_if(Context &c, bool (*selects)(const Context &, const Lease &));
void release_all(Context &c);
void fail(Context &c, kvt_status_t status, const char *form, ...) __attribute__((format(printf, 3, 4)));
void fail_with(Context &c, kvt_status_t status, const char *what, kvt_error_t *error);

// experts.cpp
bool acquire_experts(Context &c, const Entry &entry, const ggml_tensor *node, int source);
void copy_parts(Weights &w, uint32_t unit, const void *address);
void drop_copies(Weights &w, uint32_t layer);

} // namespace kvt_weights

#endif
