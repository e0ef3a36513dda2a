// The KV tier of one context, from the inside.
#pragma once

#include "tier/state.hpp"

#include <kvtier/llama.h>

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

/// Calls that not every engine has: one that is there is found by its argument, and fits better.
namespace kvtier_llama {

inline uint32_t llama_n_rs_seq(const void *) { return 0; }
inline bool llama_get_causal_attn(const void *) { return true; }

} // namespace kvtier_llama

namespace kvtier_llama {

using tokens_t = std::vector<llama_token>;

/// What went wrong: a status, and words for the caller.
struct failure {
    kvt_status_t status;
    std::string words;
};

[[noreturn]] void fail(kvt_status_t status, const std::string &words);
/// Throws a failure with the library's error text, unless `status` is KVT_OK. `what`: the action that failed.
void require_ok(kvt_status_t status, kvt_error_t *error, const char *what);
uint64_t now_ns();

/// Memory between the context and the store. While ops are under way it is theirs.
struct buffer_t {
    uint8_t *data = nullptr;
    uint64_t bytes = 0;
    std::vector<kvt_op_t *> ops;
    /// Of ops that have ended while others have not.
    kvt_status_t worst = KVT_OK;
    /// What a put of it stores.
    uint64_t tokens = 0;
    bool taken = false;
    /// Gets into it did not end in time: nobody's until they have.
    bool stuck = false;
};

/// A taken buffer is given back at the end of the block, unless it is released.
struct giver {
    void operator()(buffer_t *buffer) const { buffer->taken = false; }
};
using held_buffer = std::unique_ptr<buffer_t, giver>;

/// What the tier knows of a sequence of the context.
struct sequence_t {
    /// What it holds, from position 0 on.
    tokens_t tokens;
    /// Of those: handed to the store, in full chunks.
    size_t saved = 0;
    /// Where its recurrent state was saved last.
    size_t state_saved = 0;
    /// Nobody knows what its cells are: nothing of it is saved until it was empty.
    bool forgotten = false;
};

/// The end of a conversation that fills no chunk, as the engine wrote it.
struct tail_t {
    tokens_t tokens;
    std::vector<uint8_t> blob;
};

/// Layers of the layout that are one section of the blob.
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
    /// -1 = there is none: whole sequences are copied.
    llama_seq_id scratch = -1;
    uint32_t chunk = 32, checkpoint = 512, piece = 256;
    /// Of attention, of one token.
    uint64_t token_bytes = 0;
    bool holes = false, has_disk = false;
    uint64_t save_wait_ns = 0;

    kvt_runtime_t *own_runtime = nullptr;
    kvt_store_t *own_store = nullptr;
    kvt_account_t *account = nullptr;
    const kvt_store_t *store = nullptr;
    kvt_namespace_t *space = nullptr;

    uint64_t buffer_limit = 0;
    /// The order of being taken: the oldest first.
    std::list<kvtier_llama::buffer_t> buffers;
    std::map<llama_seq_id, kvtier_llama::sequence_t> sequences;
    /// The newest first. Whoever uses one keeps it, also when it has to leave here.
    std::list<std::shared_ptr<const kvtier_llama::tail_t>> tails;
    uint64_t tail_bytes = 0;
    kvt_status_t save_failure = KVT_OK;
    kvt_llama_tier_stats_t stats{};
};

namespace kvtier_llama {

using tier_t = kvt_llama_tier_t;

// room.cpp: the store's side.
void open_store_side(tier_t &tier, const kvt_llama_tier_opts_t &opts);
/// Waits up to 10 s for ops in flight. The buffers of ops that do not end are leaked.
kvt_status_t close_store_side(tier_t &tier, std::string *words);
/// Charges memory of the tier to its account; false: the budget is exceeded.
bool charge(tier_t &tier, uint64_t bytes);
void release_charge(tier_t &tier, uint64_t bytes);
/// Takes a buffer of at least `bytes`; waits for one until `deadline_ns`. Null: none was free in time.
held_buffer take_buffer(tier_t &tier, uint64_t bytes, uint64_t deadline_ns);
/// Waits until `deadline_ns` for the ops of a buffer and frees them; true: all have ended. `status`: the first
/// error.
bool reap(tier_t &tier, buffer_t &buffer, uint64_t deadline_ns, kvt_status_t *status);
/// Waits for all saves in flight until `deadline_ns`; false: some have not ended.
bool drain(tier_t &tier, uint64_t deadline_ns);

/// A session of the store for a prefix; closed at the end of the block.
class session {
public:
    session(const tier_t &tier, const llama_token *tokens, size_t count);
    ~session() { kvt_session_close(&handle); }
    session(const session &) = delete;
    session &operator=(const session &) = delete;
    kvt_session_t *handle = nullptr;
};

// rows.cpp: rows of a blob as rectangles of a session.
/// Puts the chunks of [first, end) that the blob has all rows of; with `state` the recurrent state at
/// `end` too. Ops go to the buffer that has the blob.
kvt_status_t put_rows(tier_t &tier, const session &from, buffer_t &buffer, const blob_place &place,
                      uint32_t first, uint32_t end, bool state);
/// Gets what a restored blob has of [first, end), all of it chunks, until a deadline.
kvt_status_t get_rows(tier_t &tier, const session &from, buffer_t &buffer, const blob_place &place,
                      uint32_t first, uint32_t end, uint64_t deadline_ns);
/// Where the rows of a section begin that go on without a gap up to `end`; `end` = there are none.
uint32_t rows_begin(const section_place &place, uint32_t first, uint32_t end);

// probe.cpp: what the context's KV looks like.
void probe(tier_t &tier, const kvt_llama_tier_opts_t &opts);

// save.cpp
/// Hands chunks of what the sequence holds to the store, as far as buffers are had in time; with
/// `state` also the recurrent state, if the sequence ends with a chunk.
void save(tier_t &tier, llama_seq_id seq, uint64_t deadline_ns, bool state);
/// Cuts the notes of a sequence to what the engine still has of it; where that ends.
size_t trim(tier_t &tier, llama_seq_id seq);
/// Where the last full chunk of `tokens` ends.
size_t full_chunks(const tier_t &tier, size_t tokens);
/// That a sequence is one of the context's and not the scratch sequence.
void check_sequence(const tier_t &tier, llama_seq_id seq);
/// That all of them are tokens of the vocabulary.
void check_tokens(const tier_t &tier, const llama_token *tokens, size_t count);
/// That nobody has put anything into the scratch sequence.
void check_scratch(const tier_t &tier);
/// Copies [first, end) of a sequence out of the context. Null where no buffer is had in time, or
/// where the sequence does not hold that.
held_buffer export_rows(tier_t &tier, llama_seq_id seq, uint32_t first, uint32_t end,
                        uint64_t deadline_ns, blob_place *place);
void commit(tier_t &tier, llama_seq_id seq, const llama_token *tokens, size_t count, bool state);

// restore.cpp
struct restored_t {
    /// Tokens that the sequence holds now.
    uint32_t tokens = 0;
    uint64_t bytes = 0;
    kvt_status_t refused = KVT_OK;
};
/// Brings [from, to) into a sequence that ends at `from`, chunks both. With `state` false recurrent
/// states are left out: a tail brings them.
restored_t restore(tier_t &tier, const session &held, llama_seq_id seq, uint32_t from, uint32_t to,
                   bool state);
/// Puts a blob behind what the sequence holds.
bool splice(tier_t &tier, llama_seq_id seq, bool empty, const uint8_t *blob, uint64_t bytes);

// prefill.cpp
/// Decodes [first, end) of a prompt in batches of at most `batch`; logits of the last one if wanted.
int decode(tier_t &tier, llama_seq_id seq, const llama_token *tokens, size_t first, size_t end,
           bool logits);

// tails.cpp
void keep_tail(tier_t &tier, llama_seq_id seq);
/// The longest tail that the prompt goes on with, longer than `longer_than`; null = none.
std::shared_ptr<const tail_t> find_tail(const tier_t &tier, const llama_token *tokens, size_t limit,
                                        size_t longer_than);

// identity.cpp
struct identity {
    std::string model, weights, context, engine;
};
identity identify(const tier_t &tier, const kvt_llama_tier_opts_t &opts);
/// Whether a token sees only those before it.
bool is_causal(const llama_context *ctx, const llama_context_params *params);

/// Runs what may throw; every exported function is one of these.
template <typename F> kvt_status_t guarded(kvt_llama_why_t *why, F &&body) noexcept;

} // namespace kvtier_llama

#include "tier/guard.hpp"
