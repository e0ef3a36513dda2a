// Tokens leave a sequence by what a policy of the library says of them.
//
// Cells are shared by all layers and heads of a model, so a token goes from all of them or from none.
// Policies that go by attention are told one sum a token: what it got of the attention of all heads
// of all layers, in the mean; they serve a model of one layer and one head. Policies that go by keys
// are told those of all layers and heads, answer for each, and the tokens that most of the answers
// keep stay (of equal ones the newer), as many as the longest answer has.
#ifndef KVTIER_LLAMA_EVICT_HPP
#define KVTIER_LLAMA_EVICT_HPP

#include "watch/cells.hpp"
#include "watch/policy.hpp"
#include "watch/roles.hpp"

#include <llama.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace kvt_llama {

struct evict_counts {
    uint64_t observed_layers = 0; // attention of a layer in a graph that was added up
    uint64_t observed_rows = 0;   // queries whose attention was told
    uint64_t evictions = 0;       // times that tokens went
    uint64_t evicted = 0;         // tokens that went
};

class token_evict {
  public:
    struct made_for {
        int n_layers = 0;
        uint32_t key_heads = 0;
        uint32_t max_tokens = 0;
        bool has_windows = false;
    };

    // One that cannot serve here is refused with words.
    static kvt_status_t make(const policy_source &source, const made_for &model,
                             std::unique_ptr<token_evict> &out, std::string &words);
    void adopt() { policy_.adopt(); }

    // A batch of this sequence is about to be decoded. `is_asked`: logits of its last token are
    // wanted, which ends the prompt.
    kvt_status_t begin_batch(llama_memory_t memory, llama_seq_id seq, const llama_pos *positions,
                             size_t n, bool is_asked, std::string &words);
    void begin_graph();
    kvt_status_t at_attention(const roles &found, int il, std::string &words);
    void after_soft_max(const layer_roles &layer);
    void end_graph();
    // The batch has been decoded: what it brought is told, and what has to go goes.
    kvt_status_t end_batch(llama_memory_t memory, llama_seq_id seq, std::string &words);
    // The batch was not decoded: the sequence is as it was.
    void abandon_batch();

    // Whether the probabilities of this batch are wanted.
    bool wants_soft_max() const { return wants_sums_; }
    bool goes_by_attention() const { return (policy_.traits().needs & KVT_NEEDS_COLUMN_SUMS) != 0; }

    const evict_counts &counts() const { return counts_; }
    uint64_t rows_read() const { return reader_.rows(); }

  private:
    // One cache, and the sums of this graph by its cells.
    struct pool {
        std::vector<int32_t> owners; // by cell: the token; -1
        std::vector<float> sums;     // by query and cell
        size_t cells = 0;
    };
    struct query_sums {
        uint32_t query;          // the token whose attention it is
        std::vector<float> sums; // by token
    };

    bool goes_by_keys() const { return (policy_.traits().needs & KVT_NEEDS_KEYS) != 0; }
    bool is_all() const { return policy_.traits().sum_queries == UINT32_MAX; }
    kvt_status_t follow(llama_memory_t memory, llama_seq_id seq, std::string &words);
    void cut_back(size_t tokens);
    void disown(size_t first);
    kvt_status_t own_cells(const layer_roles &layer, pool &of, std::string &words);
    void fold(const pool &of);
    kvt_status_t observe(std::string &words);
    kvt_status_t append_keys(std::string &words);
    kvt_status_t append_layer(uint32_t il, uint32_t first, std::string &words);
    kvt_status_t evict(llama_memory_t memory, llama_seq_id seq, std::string &words);
    kvt_status_t ask(uint32_t layer, const kvt_sparse_context_t &context, bool &any,
                     std::string &words);
    void count_votes(size_t &longest);
    kvt_status_t remove(llama_memory_t memory, llama_seq_id seq, std::string &words);

    policy policy_;
    attention_shape shape_; // one layer and one head, or those of the model where keys are wanted
    bool has_shape_ = false;
    made_for model_;

    std::vector<llama_pos> positions_; // by token, those that went included
    std::vector<uint32_t> kept_;       // tokens that are there, ascending
    std::vector<llama_pos> new_;       // of the batch that is being decoded
    bool is_prompt_ = true, is_asked_ = false, wants_sums_ = false, is_decode_ = false;

    std::vector<ggml_tensor *> masks_; // of this graph
    std::vector<pool> pools_;
    std::vector<ggml_tensor *> caches_; // by layer
    size_t graph_rows_ = 0, done_rows_ = 0, first_row_ = 0, wanted_rows_ = 0;
    size_t observed_layers_ = 0; // in this graph
    size_t graph_heads_ = 1;
    bool has_strangers_ = false; // attention fell on cells whose tokens nobody told
    std::deque<query_sums> queries_;

    std::vector<uint32_t> starts_, items_, votes_, stay_;
    std::vector<float> told_;
    std::vector<int64_t> cells_;
    row_reader reader_;
    evict_counts counts_;
};

} // namespace kvt_llama

#endif
