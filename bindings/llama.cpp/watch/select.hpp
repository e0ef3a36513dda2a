// Blocks of a sequence are chosen layer by layer, and the mask is narrowed to them.
//
// A block is so many tokens that came one after the other. When it is complete its keys are read
// from the cache and told to the policy; the tokens behind the last complete block are always seen.
// In the ask phase of a layer's attention the policy is asked with this layer's queries, and the
// mask, which all layers share, is written anew for this one. One mask serves all heads, so what
// each head wants of its own is united.
#ifndef KVTIER_LLAMA_SELECT_HPP
#define KVTIER_LLAMA_SELECT_HPP

#include "watch/cells.hpp"
#include "watch/policy.hpp"
#include "watch/roles.hpp"

#include <memory>
#include <string>
#include <vector>

namespace kvt_llama {

struct select_counts {
    uint64_t tokens = 0;         // single tokens that a policy was asked for
    uint64_t layers = 0;         // layers of those that were narrowed
    uint64_t seen_cells = 0;     // cells that the engine would have looked at, in those layers
    uint64_t masked_cells = 0;   // of those, cells that were masked
    uint64_t rebuilds = 0;       // times that all that was known had to be read anew
    uint64_t audited_layers = 0; // layers whose choice was held against the attention of all cells
    double audited_mass = 0;     // sum over those of the share of the attention that was chosen
};

class block_select {
  public:
    // One that cannot serve here is refused with words.
    static kvt_status_t make(const policy_source &source, uint32_t block_tokens, int n_layers,
                             uint32_t n_window, std::unique_ptr<block_select> &out,
                             std::string &words);
    void adopt() { policy_.adopt(); }

    // Another graph begins. `is_own`: it computes one token, of this sequence.
    void begin_graph(bool is_own, bool is_audit);

    // Ask phase of a layer's attention. Anything but KVT_OK: the layer sees everything, words say why.
    kvt_status_t at_attention(const roles &found, int il, std::string &words);

    // After the SOFT_MAX of a layer whose choice is audited.
    void after_soft_max(const layer_roles &layer);

    // Masks of the graph that is being computed are as the engine filled them again.
    void restore_masks();

    // Keys have changed where they lie, or may have.
    void forget();

    // Some layer of this graph does not see all that the engine meant it to see.
    bool has_narrowed() const { return has_narrowed_; }
    bool is_audited_now() const { return is_audit_ && has_audit_; }
    const select_counts &counts() const { return counts_; }
    uint64_t rows_read() const { return reader_.rows(); }

  private:
    struct pool {
        ggml_tensor *mask = nullptr; // of this graph
        mask_row row;
        cell_order order;
        cell_marks marks;
        ggml_tensor *last_cache = nullptr; // of the deepest layer
        int64_t first_cell = 0;            // of the sequence's stream
        int64_t own_cell = -1;
        bool is_narrowed = false; // the mask is not as the engine filled it
        bool is_open = false;     // some of its tokens may be left out
    };

    kvt_status_t look_at(const layer_roles &layer, pool &of, std::string &words);
    pool &pool_of(const layer_roles &layer, bool &is_first);
    kvt_status_t reopen(const layer_roles &layer, std::string &words);
    kvt_status_t seal(const layer_roles &layer, int il, const pool &of, std::string &words);
    kvt_status_t choose(const layer_roles &layer, int il, const pool &of, std::string &words);
    void keep_query(const layer_roles &layer, int il);
    void narrow(pool &of);
    void restore(pool &of);

    policy policy_;
    attention_shape shape_;
    bool has_shape_ = false; // heads are known
    uint32_t n_window_ = 0;
    bool is_own_ = false, is_audit_ = false, has_audit_ = false, has_narrowed_ = false;
    std::vector<ggml_tensor *> masks_; // of this graph, in the order in which layers use them
    std::vector<pool> pools_;
    std::vector<size_t> sealed_; // blocks that the policy knows, by layer
    std::vector<std::vector<float>> queries_;
    std::vector<uint32_t> candidates_, ids_;
    uint64_t n_ids_ = 0;
    std::vector<int64_t> cells_;
    std::vector<uint8_t> row_;
    std::vector<uint8_t> audit_; // by cell: was chosen
    row_reader reader_;
    select_counts counts_;
};

} // namespace kvt_llama

#endif
