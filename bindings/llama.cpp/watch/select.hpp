// Chooses blocks of a sequence in each layer, and narrows the mask to them.
//
// A block is a run of consecutive tokens. When it is complete, its keys are read from the cache and
// sealed in the policy. Tokens after the last complete block are always visible. In the ask phase of a
// layer's attention the policy selects with this layer's queries. The mask, which all layers share, is
// then written for this layer. One mask serves all heads, so the choices of all heads are united.
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
    uint64_t tokens = 0; // single tokens that a policy was asked for
    uint64_t layers = 0; // their layers whose mask was narrowed
    uint64_t seen_cells = 0; // cells that the engine would have attended to in those layers
    uint64_t masked_cells = 0; // masked cells among these
    uint64_t rebuilds = 0; // times that all metadata had to be rebuilt
    uint64_t kept_layers = 0; // layers that were narrowed to a choice for an earlier token
    uint64_t audited_layers = 0; // layers whose choice was compared with the attention of all cells
    double audited_mass = 0; // sum over these of the share of the attention that was chosen
};

class block_select {
  public:
    // Fails with a text if the policy cannot be served here.
    static kvt_status_t make(const policy_source &source, uint32_t block_tokens, uint32_t keep_tokens,
                             int n_layers, uint32_t n_window, std::unique_ptr<block_select> &out,
                             std::string &message);
    void adopt() { policy_.adopt(); }

    // Another graph begins. `is_own`: it computes one token of this sequence.
    void begin_graph(bool is_own, bool is_audit);

    // Ask phase of a layer's attention. On an error the layer sees everything, and the text says why.
    kvt_status_t at_attention(const roles &found, int il, std::string &message);

    // Call after the SOFT_MAX of a layer whose choice is audited.
    void after_soft_max(const layer_roles &layer);

    // Restores the masks of the current graph to what the engine filled in.
    void restore_masks();

    // Keys in the cache have changed, or may have: discards all metadata.
    void forget();

    // True if some layer of this graph does not see all that the engine's mask shows.
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
        int64_t first_cell = 0; // of the sequence's stream
        int64_t own_cell = -1;
        bool is_narrowed = false; // the mask differs from the engine's
        bool is_open = false; // some of its tokens may be masked
    };

    // The choice of a layer, and for how many tokens and blocks it was made.
    struct choice {
        std::vector<uint32_t> ids;
        size_t tokens = 0, blocks = 0; // 0: none
        bool has_all = false; // all blocks were chosen
    };

    bool use_kept(int il, pool &of);
    void keep(int il, const pool &of);
    kvt_status_t read_mask(const layer_roles &layer, pool &of, std::string &message);
    pool &pool_of(const layer_roles &layer, bool &is_first);
    kvt_status_t open_for_heads(const layer_roles &layer, std::string &message);
    kvt_status_t seal(const layer_roles &layer, int il, const pool &of, std::string &message);
    kvt_status_t choose(const layer_roles &layer, int il, const pool &of, std::string &message);
    void keep_query(const layer_roles &layer, int il);
    void narrow(pool &of);
    void restore(pool &of);

    policy policy_;
    attention_shape shape_;
    bool has_shape_ = false; // heads are known
    uint32_t n_window_ = 0;
    uint32_t keep_tokens_ = 1; // tokens that a choice serves
    std::vector<choice> kept_; // by layer
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
