// Evicts tokens of a sequence as a policy of the library decides.
//
// All layers and heads of a model share cells, so a token is evicted from all of them or from none.
// Policies that use attention serve a model of one layer and one head. They get one value per token:
// its mean attention over all heads of all layers. Policies that use keys get those of all layers and
// heads, and answer for each. The tokens kept by most answers stay; of equal ones the newer. Their
// number is the length of the longest answer.
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
    uint64_t observed_layers = 0; // layers of graphs whose attention was summed
    uint64_t observed_rows = 0; // queries whose attention the policy received
    uint64_t evictions = 0; // evictions, of one or more tokens
    uint64_t evicted = 0; // evicted tokens
};

class token_evict {
  public:
    struct model_facts {
        int n_layers = 0;
        uint32_t key_heads = 0;
        uint32_t max_tokens = 0;
        bool has_windows = false;
    };

    // Fails with a text if the policy cannot be served here.
    static kvt_status_t make(const policy_source &source, const model_facts &model,
                             std::unique_ptr<token_evict> &out, std::string &message);
    void adopt() { policy_.adopt(); }

    // A batch of this sequence is about to be decoded. `wants_logits`: it requests logits of its last
    // token, which ends the prompt.
    kvt_status_t begin_batch(llama_memory_t memory, llama_seq_id seq, const llama_pos *positions,
                             size_t n, bool wants_logits, std::string &message);
    void begin_graph();
    kvt_status_t at_attention(const roles &found, int il, std::string &message);
    void after_soft_max(const layer_roles &layer);
    void end_graph();
    // The batch has been decoded: passes its attention or keys to the policy, then evicts.
    kvt_status_t end_batch(llama_memory_t memory, llama_seq_id seq, std::string &message);
    // The batch was not decoded: the sequence is unchanged.
    void abandon_batch();

    // Tells whether the probabilities of this batch are needed.
    bool wants_soft_max() const { return wants_sums_; }
    bool uses_attention() const { return (policy_.traits().needs & KVT_NEEDS_COLUMN_SUMS) != 0; }

    const evict_counts &counts() const { return counts_; }
    uint64_t rows_read() const { return reader_.rows(); }

  private:
    // One cache, and the sums of this graph by its cells.
    struct pool {
        std::vector<int32_t> owners; // by cell: the token, or -1
        std::vector<float> sums; // by query and cell
        size_t cells = 0;
    };
    struct query_sums {
        uint32_t query; // the token whose attention it is
        std::vector<float> sums; // by token
    };

    bool uses_keys() const { return (policy_.traits().needs & KVT_NEEDS_KEYS) != 0; }
    bool sums_all_queries() const { return policy_.traits().sum_queries == UINT32_MAX; }
    kvt_status_t sync_positions(llama_memory_t memory, llama_seq_id seq, std::string &message);
    void truncate_to(size_t tokens);
    void clear_owners(size_t first);
    kvt_status_t record_cells(const layer_roles &layer, pool &of, std::string &message);
    void add_token_sums(const pool &of);
    kvt_status_t observe(std::string &message);
    kvt_status_t append_keys(std::string &message);
    kvt_status_t append_layer(uint32_t il, uint32_t first, std::string &message);
    kvt_status_t evict(llama_memory_t memory, llama_seq_id seq, std::string &message);
    kvt_status_t read_answer(uint32_t layer, const kvt_sparse_context_t &context, bool &any,
                     std::string &message);
    void count_votes(size_t &longest);
    kvt_status_t remove(llama_memory_t memory, llama_seq_id seq, std::string &message);

    policy policy_;
    attention_shape shape_; // one layer and one head, or the model's if keys are needed
    bool has_shape_ = false;
    model_facts model_;

    std::vector<llama_pos> positions_; // by token, including evicted ones
    std::vector<uint32_t> kept_; // tokens that were not evicted, ascending
    std::vector<llama_pos> new_; // of the batch that is being decoded
    bool is_prompt_ = true, wants_logits_ = false, wants_sums_ = false, is_decode_ = false;

    std::vector<ggml_tensor *> masks_; // of this graph
    std::vector<pool> pools_;
    std::vector<ggml_tensor *> caches_; // by layer
    size_t graph_rows_ = 0, done_rows_ = 0, first_row_ = 0, wanted_rows_ = 0;
    size_t observed_layers_ = 0; // in this graph
    size_t graph_heads_ = 1;
    bool has_unobserved_ = false; // attention fell on cells whose tokens were not observed
    std::deque<query_sums> queries_;

    std::vector<uint32_t> starts_, items_, votes_, survivors_;
    std::vector<float> column_sums_;
    std::vector<int64_t> cells_;
    row_reader reader_;
    evict_counts counts_;
};

} // namespace kvt_llama

#endif
