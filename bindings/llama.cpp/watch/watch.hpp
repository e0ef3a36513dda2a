// The cb_eval callback of a context. It tracks the beginning and end of layers, serves the policies of
// sequences, and calls the callback that was set before.
#ifndef KVTIER_LLAMA_WATCH_HPP
#define KVTIER_LLAMA_WATCH_HPP

#include <kvtier/llama_watch.h>

#include "watch/evict.hpp"
#include "watch/roles.hpp"
#include "watch/select.hpp"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kvt_llama {

// The policy of one sequence: one of the two, or neither after it has ended.
struct sequence_policy {
    std::unique_ptr<token_evict> evict;
    std::unique_ptr<block_select> select;
    uint32_t audit_every = 0;
    uint64_t n_steps = 0;
    uint64_t evicted = 0; // since the sequence was empty
    bool is_narrowed = false; // since then a token was computed that did not see all
};

// A batch with the defaults of null fields filled in.
struct batch_facts {
    llama_seq_id seq = -1; // -1: several sequences
    std::vector<llama_pos> positions;
    bool wants_logits = false;
};

} // namespace kvt_llama

// The object behind the C handle.
struct kvt_llama_watch_t {
    kvt_llama_watch_t(const llama_model *model, const kvt_llama_watch_opts_t &opts);

    kvt_status_t set_params(llama_context_params &params, std::string &message);
    kvt_status_t attach(llama_context *ctx, std::string &message);
    kvt_status_t set_policy(llama_seq_id seq, const kvt_llama_sparse_opts_t &opts, std::string &message);
    kvt_status_t decode(llama_batch batch, int32_t &rc, std::string &message);
    kvt_status_t evicted(llama_seq_id seq, uint64_t &out) const;
    bool is_exact(llama_seq_id seq) const;
    void changed(llama_seq_id seq);
    void stats(kvt_llama_watch_stats_t &out) const;

    kvt_status_t fault_ = KVT_OK;
    std::string fault_message_;

  private:
    static bool on_node(ggml_tensor *node, bool is_ask, void *user_data);
    bool before_node(ggml_tensor *node);
    void after_node(ggml_tensor *node);
    void begin_graph();
    void end_graph();
    void check_layer(int il);
    bool at_attention(int il);
    void fail(kvt_status_t status, int il, const std::string &message);
    void end_policy(kvt_llama::sequence_policy &of);
    void at_shift();
    template <typename work> void guarded(work &&run);
    kvt_status_t end_batch(int32_t rc, std::string &message);
    static void add_counts(const kvt_llama::sequence_policy &of, kvt_llama_watch_stats_t &to);
    kvt_status_t make(const kvt_llama_sparse_opts_t &opts, kvt_llama::sequence_policy &out,
                      std::string &message) const;
    kvt_llama::batch_facts facts_of(const llama_batch &batch) const;
    kvt_status_t begin_batch(const llama_batch &batch, std::string &message);

    const llama_model *model_;
    kvt_llama_watch_opts_t opts_;
    llama_context *ctx_ = nullptr;
    ggml_backend_sched_eval_callback user_eval_ = nullptr;
    void *user_eval_data_ = nullptr;
    llama_flash_attn_type flash_ = LLAMA_FLASH_ATTN_TYPE_AUTO;
    bool may_lack_attention_; // some layers of the model have no attention

    kvt_llama::roles roles_;
    std::map<llama_seq_id, kvt_llama::sequence_policy> policies_;
    kvt_llama::sequence_policy *active_ = nullptr; // sequence whose batch is being decoded
    llama_seq_id active_seq_ = -1;
    bool is_single_ = false, is_audit_ = false;
    kvt_status_t batch_fault_ = KVT_OK;
    std::string batch_message_;

    // State of the graph that is being computed.
    int open_layer_ = -1; // the layer that has begun and not ended
    int attentions_ = 0;
    bool is_in_graph_ = false, user_wants_ = false;
    int observed_ = -1; // the layer whose SOFT_MAX the scheduler stops at
    kvt_llama_watch_stats_t stats_ = {};
};

#endif
