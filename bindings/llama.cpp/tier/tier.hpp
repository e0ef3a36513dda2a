// Internal declarations of the KV tier of one context.
#pragma once

#include "common/engine.hpp"
#include "tier/prompt.hpp"
#include "tier/state.hpp"

#include <kvtier/llama.h>

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kvtier_llama {

/// Thrown on an error: a status and a text for the caller.
struct failure {
    kvt_status_t status;
    std::string message;
};

[[noreturn]] void fail(kvt_status_t status, const std::string &message);
/// Throws the library's error if `status` is not KVT_OK; frees `error`.
void demand(kvt_status_t status, kvt_error_t *error, const char *what);
uint64_t now_ns();

/// Memory between the context and the store. The store owns it while ops are in flight.
struct buffer_t {
    uint8_t *data = nullptr;
    uint64_t bytes = 0;
    std::vector<kvt_op_t *> ops;
    /// First error of ops that have completed while others have not.
    kvt_status_t worst = KVT_OK;
    /// Tokens that a put from this buffer stores.
    uint64_t tokens = 0;
    bool taken = false;
    /// Gets into this buffer missed their deadline; it stays taken until they complete.
    bool stuck = false;
};

/// Deleter of held_buffer: makes a taken buffer available again.
struct return_buffer {
    void operator()(buffer_t *buffer) const { buffer->taken = false; }
};
using held_buffer = std::unique_ptr<buffer_t, return_buffer>;

/// The tier's record of one sequence of the context: what it holds, from position 0 on.
struct sequence_t : text_t {
    /// How many of these, in full chunks, were submitted to the store.
    size_t saved = 0;
    /// Position at which the recurrent state was saved last.
    size_t state_saved = 0;
    /// The cells are unknown: nothing is saved until the sequence was empty.
    bool forgotten = false;
};

/// The end of a conversation that fills no chunk, as a state blob of the engine.
struct tail_t : text_t {
    std::vector<uint8_t> blob;
};

/// The layers of the layout that belong to one section of the blob.
struct section_layers {
    uint32_t first = 0, count = 0;
};

} // namespace kvtier_llama

struct kvt_llama_tier_t {
    llama_context *ctx = nullptr;
    llama_memory_t memory = nullptr;
    kvtier_llama::shape shape;
    std::vector<kvtier_llama::section_layers> layers;
    uint32_t n_seq_max = 1;
    int32_t n_vocab = 0;
    /// -1 = no scratch sequence: whole sequences are copied.
    llama_seq_id scratch = -1;
    uint32_t chunk = 32, checkpoint = 512, piece = 256;
    /// Bytes of attention KV of one token.
    uint64_t token_bytes = 0;
    bool holes = false, has_disk = false, has_remote = false;
    uint64_t save_wait_ns = 0;

    kvt_runtime_t *own_runtime = nullptr;
    kvt_store_t *own_store = nullptr;
    kvt_account_t *account = nullptr;
    const kvt_store_t *store = nullptr;
    kvt_namespace_t *kv_namespace = nullptr;

    uint64_t buffer_limit = 0;
    /// Least recently taken first.
    std::list<kvtier_llama::buffer_t> buffers;
    std::map<llama_seq_id, kvtier_llama::sequence_t> sequences;
    /// Newest first. Shared, so that an evicted tail outlives its use.
    std::list<std::shared_ptr<const kvtier_llama::tail_t>> tails;
    uint64_t tail_bytes = 0;
    /// The scratch sequence has cells that a get which missed its deadline may still write to.
    bool scratch_stuck = false;
    kvt_status_t save_failure = KVT_OK;
    kvt_llama_tier_stats_t stats{};
};

namespace kvtier_llama {

using tier_t = kvt_llama_tier_t;

// store.cpp: namespace and layout, buffers, ops, sessions.
void open_tier_store(tier_t &tier, const kvt_llama_tier_opts_t &opts);
/// Waits for ops in flight until a deadline. Memory of ops that do not complete is never freed.
kvt_status_t close_tier_store(tier_t &tier, std::string *message);
/// Reserves and commits host memory in the budget; false if the budget has not enough left.
bool reserve_memory(tier_t &tier, uint64_t bytes);
void release_memory(tier_t &tier, uint64_t bytes);
/// Takes a buffer of at least `bytes`, waiting until `deadline_ns`; null if none becomes free.
held_buffer take_buffer(tier_t &tier, uint64_t bytes, uint64_t deadline_ns);
/// Collects the ops of a buffer; true when all have completed and were freed.
bool reap(tier_t &tier, buffer_t &buffer, uint64_t deadline_ns, kvt_status_t *status);
/// Collects buffers of gets that missed their deadline and have completed since. True if none is left.
bool reap_stuck(tier_t &tier);
/// Waits for all saves in flight.
bool drain(tier_t &tier, uint64_t deadline_ns);

/// Checks media of a caller's prompt. `from` is the index after the media before it, or 0, and `position` the
/// position there.
media_t read_media(const tier_t &tier, const kvt_llama_prompt_t &of, size_t number, size_t from,
                   int32_t position);

/// A caller's prompt, checked. Copies the tokens only if there are media, which have null tokens.
struct given_t {
    given_t(const tier_t &tier, const kvt_llama_prompt_t &of);
    given_t(const given_t &) = delete;
    given_t &operator=(const given_t &) = delete;
    text_t own;
    prompt_t prompt;
};

/// A prefix as the store takes it. The prompt must outlive it.
class stored_sequence {
public:
    explicit stored_sequence(const prompt_t &of);
    stored_sequence(const stored_sequence &) = delete;
    stored_sequence &operator=(const stored_sequence &) = delete;
    kvt_sequence_t sequence;

private:
    std::vector<kvt_media_t> media_;
};

/// A store session for a prefix; closed at the end of the scope.
class session {
public:
    session(const tier_t &tier, const prompt_t &of);
    ~session() { kvt_session_close(&handle); }
    session(const session &) = delete;
    session &operator=(const session &) = delete;
    kvt_session_t *handle = nullptr;
};

// rows.cpp: transfers between rows of a blob and a session.
/// Finds the index of each cell of a blob in the sequence. Cells that the sequence has not get -1.
void locate_cells(const shape &is, const prompt_t &of, blob_place *place);
/// Puts those chunks of [first, end) whose rows the blob has completely; with `state` also the
/// recurrent state at `end`. The ops are attached to the buffer that holds the blob.
kvt_status_t put_rows(tier_t &tier, const session &from, buffer_t &buffer, const blob_place &place,
                      uint32_t first, uint32_t end, bool state);
/// Gets the cells that a restored blob has of [first, end), until a deadline. `first` and `end` are
/// chunk boundaries.
kvt_status_t get_rows(tier_t &tier, const session &from, buffer_t &buffer, const blob_place &place,
                      uint32_t first, uint32_t end, uint64_t deadline_ns);
/// First index from which on a section has all rows up to `end`; `end` = it has none.
uint32_t rows_begin(const section_shape &is, const section_place &place, uint32_t first, uint32_t end);

// probe.cpp: learns the layout of the context's KV.
void probe(tier_t &tier, const kvt_llama_tier_opts_t &opts);

// save.cpp
/// Submits the sequence's new chunks to the store, as far as buffers become free in time. With
/// `state` also the recurrent state, if the sequence ends at a chunk boundary.
void save(tier_t &tier, llama_seq_id seq, uint64_t deadline_ns, bool state);
/// Shortens the record of a sequence to what the engine still holds; returns the engine's end.
size_t trim(tier_t &tier, llama_seq_id seq);
/// The end of the last full chunk of `tokens`.
size_t full_chunks(const tier_t &tier, size_t tokens);
/// Fails unless `seq` is a sequence of the context other than the scratch sequence.
void check_sequence(const tier_t &tier, llama_seq_id seq);
/// Fails unless all tokens outside media are in the vocabulary.
void check_tokens(const tier_t &tier, const prompt_t &of);
/// Fails unless the scratch sequence is empty.
void check_scratch(tier_t &tier);
/// Copies [first, end) of a sequence out of the context. Null if no buffer becomes free in time, or
/// if the sequence does not hold that range.
held_buffer export_rows(tier_t &tier, llama_seq_id seq, uint32_t first, uint32_t end,
                        uint64_t deadline_ns, blob_place *place);
void commit(tier_t &tier, llama_seq_id seq, const prompt_t &of, bool state);

// restore.cpp
struct restored_t {
    /// Tokens that the sequence now holds.
    uint32_t tokens = 0;
    uint64_t bytes = 0;
    kvt_status_t refused = KVT_OK;
};
/// Restores [from, to), both chunk boundaries, into a sequence that ends at `from`. With `state`
/// false recurrent states are omitted, because a tail provides them.
restored_t restore(tier_t &tier, const session &held, const prompt_t &of, llama_seq_id seq, uint32_t from,
                   uint32_t to, bool state);
/// Appends a blob to what the sequence holds.
bool splice(tier_t &tier, llama_seq_id seq, bool empty, const uint8_t *blob, uint64_t bytes);

// load.cpp
/// Records that a sequence holds this, which the caller put there.
void adopt(tier_t &tier, llama_seq_id seq, const prompt_t &of);
/// kvt_llama_attach_prompt for a prompt that was checked.
void attach_prompt(tier_t &tier, llama_seq_id seq, const prompt_t &prompt, kvt_llama_attached_t *out,
                   kvt_llama_why_t *why);

// direct.cpp: the only file of the tier that uses private headers of the engine.
/// Assigns cells of the context to the scratch sequence, and finds their rows. On success offsets in
/// `place` are those of the engine's tensors, relative to `base`. False, with the scratch sequence empty,
/// if the context has not enough free cells in a row, if the tensors are not in host memory, or if the
/// tier was built without KVTIER_LLAMA_SOURCE.
bool take_cells(tier_t &tier, const std::vector<cell_range> &cells, const uint8_t *base, blob_place *place);

// prefill.cpp
/// Decodes [first, end) of a prompt, which has no media there, in batches of at most n_batch; `logits`:
/// those of the last token.
int decode(tier_t &tier, llama_seq_id seq, const prompt_t &of, size_t first, size_t end, bool logits);

// tails.cpp
void keep_tail(tier_t &tier, llama_seq_id seq);
/// The longest tail that is a prefix of the prompt and longer than `longer_than`; null = none.
std::shared_ptr<const tail_t> find_tail(const tier_t &tier, const prompt_t &of, size_t longer_than);

// identity.cpp
struct identity {
    std::string model, weights, context, engine;
};
/// The token that cells of media have, in models that compute n-grams of tokens; -1 = none.
llama_token media_token(const llama_model *model);
identity identify(const tier_t &tier, const kvt_llama_tier_opts_t &opts);
/// Tells whether tokens attend to earlier tokens only.
bool is_causal(const llama_context *ctx, const llama_context_params *params);

/// Runs the body of an exported function and turns exceptions into a status and a text.
template <typename F> kvt_status_t guarded(kvt_llama_why_t *why, F &&body) noexcept;

} // namespace kvtier_llama

#include "tier/guard.hpp"
