// The object behind kvt_llama_longer_t: a sequence that is longer than the cache it is computed with.
#ifndef KVTIER_LLAMA_LONGER_HPP
#define KVTIER_LLAMA_LONGER_HPP

#include "watch/longer_base.hpp"
#include "watch/longer_cells.hpp"
#include "watch/longer_store.hpp"
#include "watch/roles.hpp"

#include <ggml-backend.h>

#include <memory>
#include <vector>

struct kvt_llama_longer_t {
    // longer.cpp: options, and one inspection of the context.
    kvt_status_t open(const kvt_llama_longer_opts_t &opts, llama_context_params *params,
                      kvt_llama_why_t *why);
    kvt_status_t bind(llama_context *ctx, kvt_llama_why_t *why);
    void stats(kvt_llama_longer_stats_t &out) const;
    kvt_status_t close(kvt_llama_why_t *why);

    // longer_decode.cpp: appends tokens and stores those that leave the window.
    kvt_status_t decode(const llama_token *tokens, size_t n, kvt_llama_why_t *why);
    kvt_status_t truncate(size_t tokens, kvt_llama_why_t *why);
    kvt_status_t save(kvt_llama_why_t *why);

    // longer_resume.cpp: restores a sequence from blocks of the store.
    kvt_status_t resume(const llama_token *tokens, size_t n, size_t &found, kvt_llama_why_t *why);

    // Blocks that each layer chose last.
    std::vector<std::vector<uint32_t>> chosen;
    bool is_bound = false;

  private:
    using status = kvt_status_t;
    enum class work {
        none,
        inspect, // find out the shape of the layers
        claim, // find out which cells the engine gives to tokens; nothing is computed
        run,
    };

    kvt_status_t check_model(kvt_llama_why_t *why) const;
    kvt_status_t check_sizes(kvt_llama_why_t *why);
    kvt_status_t inspect(kvt_llama_why_t *why);
    uint64_t own_bytes() const;

    // longer_graph.cpp: the scheduler's callback and its work.
    static bool on_node(ggml_tensor *node, bool is_ask, void *user_data) noexcept;
    bool before_node(ggml_tensor *node);
    bool wants(const kvt_llama::node_info &info);
    bool after_node(ggml_tensor *node);
    void inspect_layer(uint32_t il);
    bool check_layer(uint32_t il, const kvt_llama::layer_roles &found);
    void at_attention(uint32_t il);
    status read_cells(const kvt_llama::layer_roles &found);
    status choose(uint32_t il, const kvt_llama::layer_roles &found);
    status load(uint32_t il);
    status write_mask(uint32_t il, ggml_tensor *mask);
    void fail(kvt_status_t with) { failure_ = failure_ == KVT_OK ? with : failure_; }

    // longer_rows.cpp: rows of the caches.
    void pages_of(uint32_t il, const std::vector<uint32_t> &at,
                  kvt_llama::longer::place &out) const;
    void read_rows(ggml_tensor *cache, const std::vector<uint32_t> &at, size_t row_bytes,
                   uint8_t *to) const;
    void write_rows(ggml_tensor *cache, const std::vector<uint32_t> &at, size_t row_bytes,
                    const uint8_t *from) const;
    status put_cells(uint32_t first, uint32_t n, bool is_durable, kvt_llama_why_t *why);
    status get_cells(uint32_t il, const std::vector<uint32_t> &blocks,
                     const std::vector<uint32_t> &at, kvt_llama_why_t *why);
    status seal_cells(uint32_t first, uint32_t n, kvt_llama_why_t *why);
    uint32_t group_tokens() const;

    status decode_part(const llama_token *tokens, uint32_t n, bool wants_logits,
                       kvt_llama_why_t *why);
    status check_part(int rc, uint32_t n, kvt_llama_why_t *why) const;
    int run_batch(const llama_token *tokens, uint32_t n, llama_pos first, llama_seq_id seq,
                  bool wants_logits);
    status free_cells(uint32_t n, kvt_llama_why_t *why);
    status divide(kvt_llama_why_t *why);
    status save_until(uint32_t end, bool is_durable, kvt_llama_why_t *why);
    status make_durable(uint32_t end, kvt_llama_why_t *why);
    status reset(kvt_llama_why_t *why);

    status claim(llama_seq_id seq, llama_pos first, uint32_t n, std::vector<uint32_t> &at,
                 kvt_llama_why_t *why);
    status restore(const llama_token *tokens, uint32_t end, size_t exact, kvt_llama_why_t *why);
    status claim_divided(uint32_t tokens, kvt_llama_why_t *why);
    status fill_cells(uint32_t tokens, kvt_llama_why_t *why);
    status seal_all(uint32_t tokens, kvt_llama_why_t *why);

    kvt_llama::longer::settings given_, settings_; // as opened; completed for the context
    kvt_llama::longer::backing store_;
    ggml_backend_sched_eval_callback user_eval_ = nullptr;
    void *user_eval_data_ = nullptr;
    bool user_asked_ = false, stop_requested_ = false;

    llama_context *ctx_ = nullptr;
    llama_memory_t memory_ = nullptr;
    kvt_llama::longer::shape model_;
    std::unique_ptr<kvt_llama::roles> roles_;
    std::unique_ptr<kvt_llama::longer::cells> cells_;
    std::vector<kvt_llama::longer::slots> slots_;
    std::vector<ggml_tensor *> k_, v_; // caches
    bool is_host_ = false; // the CPU can address caches and masks
    uint32_t batch_tokens_ = 0;
    uint32_t saved_end_ = 0, durable_end_ = 0;

    // State of the graph that is being computed.
    work work_ = work::none;
    bool is_claimed_ = false;
    uint32_t part_ = 0; // tokens
    uint32_t inspected_layers_ = 0;
    kvt_status_t failure_ = KVT_OK;
    kvt_llama_why_t failure_why_ = {};
    std::vector<uint32_t> new_cells_;
    std::vector<int64_t> idxs_;
    std::vector<uint8_t> query_, mask_, staging_;
    ggml_tensor *mask_of_ = nullptr; // the mask whose rows are in mask_
    std::vector<kvt_llama::longer::slots::load> missing_;
    std::vector<uint32_t> load_blocks_, load_cells_;
    kvt_llama::longer::place load_place_;

    kvt_llama_longer_stats_t stats_ = {};
};

#endif
