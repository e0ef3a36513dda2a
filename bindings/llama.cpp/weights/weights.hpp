// What the parts of the streamed weights share.
#ifndef KVTIER_LLAMA_WEIGHTS_HPP
#define KVTIER_LLAMA_WEIGHTS_HPP

#include <kvtier/llama_weights.h>

#include <ggml-backend-impl.h>

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

static_assert(GGML_BACKEND_API_VERSION == 3,
              "kvtier's streamed weights know version 3 of ggml's backend interface: take a kvtier for "
              "the version of these headers");

namespace kvt_weights {

/// Nobody's group: units that stay held for a whole pass.
constexpr uint32_t no_group = 0;
constexpr uint32_t most_contexts = 64;
/// So long a disk may take for a unit: one that does not answer ends a decode, not the process.
constexpr uint64_t most_read_ns = 300000000000ull;

/// A unit of the streamer, as passes see it.
struct Unit {
    uint32_t role = 0;
    /// Units that are computed together: a layer and its experts. Others are groups of their own.
    uint32_t group = no_group;
    /// The layer of an expert.
    uint32_t layer = 0;
    /// Contexts that have it.
    uint32_t holders = 0;
    /// Tensors that lie in it as a whole.
    std::vector<uint32_t> entries;
    /// Tensors of which it has an expert's part that is copied, and which part.
    std::vector<kvt_part_t> copied;
};

/// How a tensor's bytes come to where the engine reads them.
enum class Kind {
    /// It lies in one unit: `data` points there.
    whole,
    /// Divided between experts which are at equal distances in place: `nb` says how far.
    strided,
    /// Divided between experts, whose parts are copied to where they belong in it.
    copied,
};

/// A tensor of the model.
struct Entry {
    ggml_tensor *tensor = nullptr;
    Kind kind = Kind::whole;
    /// The unit of a whole tensor.
    uint32_t unit = 0;
    uint64_t at = 0;
    /// Of a divided one: the unit of each expert.
    std::vector<uint32_t> experts;
    uint32_t layer = 0;
    /// Addresses that are its own, without memory: they read as zeros.
    void *home = nullptr;
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

/// The object itself.
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
    /// The first file when it was opened.
    struct stat opened{};
    kvt_model_t *file = nullptr;
    kvt_stream_t *stream = nullptr;
    kvt_model_info_t info = KVT_MODEL_INFO_INIT;
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    bool in_place = false;

    std::vector<kvt_weights::Unit> units;
    std::vector<kvt_weights::Stack> stacks;
    uint32_t groups = 1;
    /// Experts of a layer, at most; how many a token uses; how many a context may have copied, and have, at
    /// once.
    uint32_t experts = 0, experts_used = 0, copied_at_once = 0, experts_at_once = 0;

    ggml_backend_buffer_type buft{};
    ggml_backend_dev_t no_devices[1] = {nullptr};
    llama_model_tensor_buft_override overrides[2] = {};

    /// What follows is guarded.
    mutable std::mutex lock;
    std::condition_variable released;
    uint64_t releases = 0;
    kvt_weights::Phase phase = kvt_weights::Phase::idle;
    uint32_t buffers = 0;
    /// Why a load failed, from inside the engine.
    std::string refusal;
    std::vector<std::unique_ptr<kvt_weights::Entry>> entries;
    /// Does not change while the model is bound.
    std::unordered_map<const ggml_tensor *, const kvt_weights::Entry *> by_tensor;
    std::vector<std::unique_ptr<kvt_weights::Context>> contexts;
    /// Experts of each layer that are held: at none what was copied is dropped.
    std::vector<uint32_t> layer_holders;
    uint64_t copied_bytes = 0, failed_decodes = 0;
    /// Stays true from the load on: buffers are in host memory, but nothing is to be read into them.
    std::atomic<bool> is_host{false};
};

namespace kvt_weights {

using Weights = kvt_llama_weights_t;

struct Hold {
    kvt_unit_lease_t held;
    /// The group of nodes in which it was used last.
    uint64_t used_in;
};

/// After which node of the graph a group of units is not needed any more; learned while passes go on.
struct Marker {
    char name[GGML_MAX_NAME] = {0};
    bool is_wrong = false;
};

/// One llama_context.
struct Context {
    Weights *weights = nullptr;
    ggml_backend_sched_eval_callback user_eval = nullptr;
    void *user_eval_data = nullptr;
    ggml_abort_callback user_abort = nullptr;
    void *user_abort_data = nullptr;
    bool user_asked = false;

    std::vector<Hold> holds;
    std::vector<Marker> markers;
    /// The group of units that is computed with, and the highest one in this pass.
    uint32_t group = no_group, highest = no_group;
    bool let_go = false, has_pass = false, has_layers = false;
    /// Counts groups of nodes that were computed.
    uint64_t span = 0;
    char last_name[GGML_MAX_NAME] = {0};
    /// Whole numbers that were computed in this graph: ids of experts are among them.
    std::vector<const ggml_tensor *> numbers;
    std::vector<uint32_t> wanted, missing;
    std::vector<uint8_t> seen;

    std::atomic<kvt_status_t> status{KVT_OK};
    /// Who failed: a thread that asks for its words computes with it no more.
    std::thread::id failed_by;
    char words[sizeof(kvt_llama_why_t::text)] = {0};
};

/// Writes words, and gives the status back.
kvt_status_t say(kvt_llama_why_t *why, kvt_status_t status, const char *form, ...)
    __attribute__((format(printf, 3, 4)));
/// The same with what the library says, which is freed.
kvt_status_t say_error(kvt_llama_why_t *why, kvt_status_t status, const char *what, kvt_error_t *error);
uint64_t now_ns();
uintptr_t page_bytes();

/// Runs what may throw; nothing leaves a function of C.
template <class Body> kvt_status_t guarded(kvt_llama_why_t *why, Body body) noexcept {
    if (why) {
        why->text[0] = 0;
    }
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return say(why, KVT_E_NOMEM, "no memory");
    } catch (const std::exception &error) {
        return say(why, KVT_E_PANIC, "%s", error.what());
    } catch (...) {
        return say(why, KVT_E_PANIC, "an unknown exception");
    }
}

// units.cpp: what the file has.
kvt_status_t learn_units(Weights &w, kvt_llama_why_t *why);
kvt_status_t learn_homes(Weights &w, kvt_llama_why_t *why);
/// The path still has the file that was opened.
bool is_same_file(const Weights &w, const struct stat &now);
kvt_status_t describe(const Weights &w, const ggml_tensor *tensor, Entry &entry, kvt_llama_why_t *why);

// buffer.cpp: the engine's side of memory.
void make_buffer_type(Weights &w);
/// All bytes of a tensor that lies in one unit, read for good.
bool read_entry(Weights &w, const Entry &entry, void *out);
/// A weight of ours, or null. Not by `extra`: kernels take a tensor that has one for another layout.
const Entry *entry_of(const Weights &w, const ggml_tensor *tensor);

// load.cpp
kvt_status_t bind(Weights &w, kvt_llama_why_t *why);

// pass.cpp: called by the engine.
bool on_node(ggml_tensor *node, bool ask, void *context);
bool on_abort(void *context);

// hold.cpp: units that a context has.
bool hold(Context &c, uint32_t unit);
void release_if(Context &c, bool (*leaves)(const Context &, const Hold &));
void release_all(Context &c);
void fail(Context &c, kvt_status_t status, const char *form, ...) __attribute__((format(printf, 3, 4)));
void fail_with(Context &c, kvt_status_t status, const char *what, kvt_error_t *error);

// experts.cpp
bool hold_experts(Context &c, const Entry &entry, const ggml_tensor *node, int source);
void copy_parts(Weights &w, uint32_t unit, const void *address);
void drop_copies(Weights &w, uint32_t layer);

} // namespace kvt_weights

#endif
