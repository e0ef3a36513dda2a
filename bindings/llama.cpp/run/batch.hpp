// What a batch of the program contains, whichever interface it was built with.
#pragma once

#include "run/engine.hpp"

#include <array>
#include <vector>

namespace kvtier_run {

using tokens_t = std::vector<llama_token>;

struct entry_t {
    /// LLAMA_TOKEN_NULL = an embedding.
    llama_token token = LLAMA_TOKEN_NULL;
    /// -1 = not set: the engine continues the sequence. Only embeddings of M-RoPE models use the others.
    std::array<llama_pos, 4> pos{-1, 0, 0, 0};
    /// Its logits or embeddings are wanted.
    bool output = false;
    std::vector<llama_seq_id> sequences;
};

struct batch_t {
    std::vector<entry_t> entries;
    /// All entries are plain tokens. Others (embeddings, states, marks of a decision head) are never
    /// dropped or moved.
    bool plain = true;
    /// All entries are plain embeddings, which are in `rows`.
    bool media = true;
    std::vector<float> rows;
};

/// `width`: numbers of an embedding. `positions`: 4 with M-RoPE, else 1.
batch_t read_batch(const llama_batch &of, size_t width, size_t positions);

/// Arrays of a batch of plain tokens, or of embeddings.
class batch_arrays {
public:
    void add(const entry_t &entry);
    llama_batch view();
    size_t size() const { return tokens.size(); }

private:
    tokens_t tokens;
    std::vector<llama_pos> positions;
    std::vector<int32_t> counts;
    std::vector<std::vector<llama_seq_id>> sequences;
    std::vector<llama_seq_id *> pointers;
    std::vector<int8_t> outputs;
};

#ifdef KVTIER_LLAMA_BATCH_EXT
/// Copies of the extended batches of the program, which the engine does not let anybody read.
void record_init(const llama_batch_ext *batch, size_t positions);
void record_free(const llama_batch_ext *batch);
void record_clear(const llama_batch_ext *batch);
/// `at` is what the engine's function returned. `embd`: null = a token.
void record_add(const llama_batch_ext *batch, int32_t at, llama_seq_id sequence, llama_token token,
                const llama_embd *embd);
void record_sequence(const llama_batch_ext *batch, int32_t at, llama_seq_id sequence);
void record_position(const llama_batch_ext *batch, int32_t at, const llama_pos *pos);
void record_output(const llama_batch_ext *batch, int32_t at, bool value);
void record_special(const llama_batch_ext *batch);
/// The copy of a batch; null = the batch was made before this library was active.
const batch_t *recorded(const llama_batch_ext *batch);
#endif

} // namespace kvtier_run
