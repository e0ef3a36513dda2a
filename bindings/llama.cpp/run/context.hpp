// One context of the program: which tokens its sequences hold, and the tier that restores and saves them.
#pragma once

#include "run/batch.hpp"

#include "tier/prompt.hpp"

#include <kvtier/llama.h>

#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

namespace kvtier_run {

/// Embeddings of media, as the engine decodes them.
struct embeddings_t {
    std::vector<float> rows;
    /// The first position of all tokens, then with M-RoPE the second of all, and so on.
    std::vector<llama_pos> positions;
    bool causal = true;
};

/// What is known of one sequence. The engine may hold more than the program decoded: a decode failed after
/// a part was restored. Or less: media wait for the text after them, with which they are restored or decoded;
/// or what was held did not fit what came next, and had to be removed.
struct sequence_t {
    /// From position 0 on: what the program decoded or what the engine holds, whichever is longer. The
    /// shorter one is a prefix of it.
    kvtier_llama::text_t text;
    size_t engine = 0, program = 0;
    /// The text does not describe the cells. Ends when the sequence is empty.
    bool unknown = false;
    /// Embeddings of media, by the index of their first token. Media that the engine holds may have none.
    std::map<size_t, embeddings_t> embeddings;

    kvtier_llama::prompt_t prompt() const { return text.prompt(); }
};

/// A state that the program copied out of a sequence. It is recognised when it comes back.
struct copied_state {
    uint64_t sum = 0, bytes = 0;
    llama_state_seq_flags flags = 0;
    kvtier_llama::text_t text;
};

/// What a program may have set on a context that this library treats with care.
enum special_t : uint32_t {
    /// Outputs of all tokens are wanted: nothing is restored.
    special_embeddings = 1,
    special_layers = 2,
    special_next = 4,
    /// KV is not that of the tokens alone: nothing is restored or saved.
    special_attention = 8,
    special_warmup = 16,
};

/// The tokens of one sequence in one batch.
struct run_t {
    tokens_t tokens;
    /// Index of the first token that has an output; the number of tokens = none.
    size_t first_output = 0;
    /// The tokens continue the sequence.
    bool follows = true;
    /// They belong to no other sequence as well.
    bool alone = true;

    bool simple() const { return follows && alone; }
};

class context_t {
public:
    using decode_t = std::function<int32_t()>;

    context_t(llama_context *ctx, const llama_context_params &params, uint32_t sequences, bool has_scratch);
    ~context_t();
    context_t(const context_t &) = delete;
    context_t &operator=(const context_t &) = delete;

    /// Sequences that the program asked for.
    const uint32_t sequences;

    /// Decodes a batch of the program; null = its contents are not known. `as_it_is` passes it to the
    /// engine unchanged.
    int32_t decode(const batch_t *batch, const decode_t &as_it_is) noexcept;
    /// The index in the engine's last batch of an index in the program's.
    int32_t index(int32_t at) const;

    /// Numbers of an embedding, and positions of one.
    size_t embedding_width() const { return width; }
    size_t embedding_positions() const { return positions; }

    /// Makes the engine hold what the program decoded into a sequence, or into all (-1), before the program
    /// copies or changes its cells.
    void settle(llama_seq_id seq);
    /// Before the program removes cells of a sequence, or of all (-1), from a position on: saves what is not
    /// saved yet of them.
    void leaving(llama_seq_id seq, llama_pos first);
    // What the program did to the cells, after it was done.
    void removed(llama_seq_id seq, llama_pos first, llama_pos end);
    void copied(llama_seq_id from, llama_seq_id to, llama_pos first, llama_pos end);
    void cleared();
    void kept_only(llama_seq_id seq);
    /// Cells of a sequence, or of all (-1), were changed in another way.
    void changed(llama_seq_id seq);
    void state_taken(llama_seq_id seq, const uint8_t *data, size_t bytes, llama_state_seq_flags flags);
    void state_given(llama_seq_id seq, const uint8_t *data, size_t bytes, llama_state_seq_flags flags);

    /// The last and the first position as the program knows them; `real` is the engine's.
    llama_pos last_position(llama_seq_id seq, llama_pos real) const;
    llama_pos first_position(llama_seq_id seq, llama_pos real) const;

    bool changes_loras(bool known, const std::string &text) const;
    void set_loras(bool known, const std::string &text);
    void set_vector(const std::string &text);
    void set_special(special_t which, bool on);

    /// Waits for what is being saved, without the engine.
    void drain();

private:
    using runs_t = std::map<llama_seq_id, run_t>;

    int32_t decode_known(const batch_t &batch, const decode_t &as_it_is);
    void failed(const runs_t &runs);
    bool is_valid(const batch_t &batch) const;
    runs_t runs_of(const batch_t &batch) const;
    void check(const runs_t &runs);
    void prepare(llama_seq_id seq, const run_t &run, bool restore);
    bool as_given(const runs_t &runs) const;
    void attach(llama_seq_id seq, const run_t &run, size_t limit);
    void rewind(llama_seq_id seq, size_t tokens);
    void remove_after(llama_seq_id seq, size_t tokens);
    std::vector<size_t> cuts(llama_seq_id seq, const run_t &run) const;
    int32_t decode_media(const batch_t &batch, const runs_t &runs, const decode_t &as_it_is);
    bool add_media(llama_seq_id seq, const batch_t &batch);
    int32_t decode_embeddings(llama_seq_id seq, const kvtier_llama::media_t &media);
    bool can_lose_engine(const sequence_t &has) const;
    void drop_embeddings();
    int32_t decode_part(llama_seq_id seq, const run_t &run, size_t end);
    int32_t decode_rest(const batch_t &batch, const runs_t &runs);
    int32_t decode_missing(llama_seq_id seq);
    int32_t decode_in_parts(const batch_t &batch, const runs_t &runs);
    void decoded(const batch_t &batch, const runs_t &runs);
    void commit(llama_seq_id seq, bool state);
    void reset(llama_seq_id seq);

    void open_tier();
    /// The open tier of the current adapters; null = none.
    kvt_llama_tier_t *current() const;
    std::string key() const { return loras + vector; }
    void close_tiers();
    void report();

    llama_context *const ctx;
    const llama_memory_t memory;
    const llama_context_params params;
    const bool has_scratch;
    size_t width = 0, positions = 1;
    std::map<llama_seq_id, sequence_t> known;
    std::vector<int32_t> indices;
    bool indices_changed = false;
    std::list<copied_state> states;

    std::string loras, vector;
    bool loras_known = true;
    uint32_t special = 0;
    /// The tier of each set of adapters; null = it could not be opened.
    std::map<std::string, kvt_llama_tier_t *> tiers;
    std::string model_name;
    uint64_t decoded_tokens = 0, reused_tokens = 0, saved_tokens = 0, restored_bytes = 0;
    bool was_open = false, told_unknown = false;
};

} // namespace kvtier_run
