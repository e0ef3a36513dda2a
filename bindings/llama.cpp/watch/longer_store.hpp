// The store's side of a long sequence: the store, sessions with its blocks, and the policy that
// chooses.
#ifndef KVTIER_LLAMA_LONGER_STORE_HPP
#define KVTIER_LLAMA_LONGER_STORE_HPP

#include "watch/longer_base.hpp"

#include <string>
#include <vector>

namespace kvt_llama {
namespace longer {

// Options with all defaults filled in, and own copies of texts.
struct settings {
    const kvt_store_t *store = nullptr;
    const kvt_account_t *account = nullptr;
    uint64_t host_bytes = 0, disk_bytes = 0;
    bool has_disk = false, has_name = false;
    std::string disk_path, name, model_id, spec, adapters;
    std::string context; // how K and V are computed in such a context
    std::string sparse; // which of them a token sees, if it does not see all
    uint32_t block_tokens = 0, sink_tokens = 0, slot_tokens = 0, part_tokens = 0, max_tokens = 0;
    llama_seq_id seq = 0, held_seq = 0;
    bool is_ordered = false, is_staged = false;
};

// Memory for K and V of one layer's tokens, block after block: in pages of equal size, or contiguous.
struct place {
    void *k = nullptr, *v = nullptr;
    std::vector<void *> k_pages, v_pages;
    uint32_t page_tokens = 0;

    // The same without the first tokens, which are whole pages.
    place skip_tokens(uint32_t tokens, const shape &model) const;
};

class backing {
  public:
    backing() = default;
    ~backing() { close(nullptr); }
    backing(const backing &) = delete;
    backing &operator=(const backing &) = delete;

    kvt_status_t open(const settings &set, kvt_llama_why_t *why);

    // Opens namespace, session and policy for a model. `own_bytes` is the adapter's own memory.
    kvt_status_t begin(const settings &set, const shape &model, const char *description,
                       uint64_t own_bytes, kvt_llama_why_t *why);

    // Appends tokens. The first `exact` of them are computed as by the engine alone.
    kvt_status_t append(const llama_token *tokens, size_t n, size_t exact, kvt_llama_why_t *why);
    // Keeps the first `tokens`; the policy keeps `policy_tokens`, whole blocks.
    kvt_status_t truncate(uint32_t tokens, uint32_t policy_tokens, kvt_llama_why_t *why);

    // Stores tokens [first, first + n), whole blocks of all layers, and waits.
    kvt_status_t put(uint32_t first, uint32_t n, const std::vector<place> &layers, bool is_durable,
                     kvt_llama_why_t *why);
    // Loads blocks of one layer, ascending, and waits. Nothing writes to `to` afterwards.
    kvt_status_t get(uint32_t layer, const std::vector<uint32_t> &blocks, const place &to,
                     kvt_llama_why_t *why);
    // How many tokens of the prefix are stored, and how many of these are exact.
    kvt_status_t lookup(const llama_token *tokens, size_t n, size_t &found, size_t &exact,
                        kvt_llama_why_t *why);

    // `seal` passes the keys of a layer's block to the policy; `choose` selects among blocks [first,
    // end).
    kvt_status_t seal(uint32_t layer, uint32_t block, const void *keys, kvt_llama_why_t *why);
    kvt_status_t choose(uint32_t layer, const kvt_rows_t &queries, uint32_t tokens, uint32_t first,
                        uint32_t end, std::vector<uint32_t> &chosen, kvt_llama_why_t *why);

    // Tells whether puts can be durable. True for a caller's store until a put shows otherwise.
    bool has_disk() const { return has_disk_; }

    uint64_t policy_bytes() const;
    kvt_status_t close(kvt_llama_why_t *why);

  private:
    kvt_status_t open_own(const settings &set, kvt_llama_why_t *why);
    kvt_status_t reserve(uint64_t bytes, kvt_llama_why_t *why);
    kvt_status_t open_namespace(const settings &set, const char *description,
                                const std::string &sparse, kvt_namespace_t **out,
                                kvt_llama_why_t *why);
    kvt_status_t open_session(const kvt_namespace_t *ns, kvt_session_t **out,
                              kvt_llama_why_t *why);
    void end();
    uint32_t exact_end() const;
    kvt_status_t put_run(const kvt_session_t *session, uint32_t first, uint32_t n,
                         const std::vector<place> &layers, bool is_durable, kvt_llama_why_t *why);
    kvt_status_t get_run(const kvt_session_t *session, uint32_t layer, const uint32_t *blocks,
                         size_t count, const place &to, kvt_llama_why_t *why);
    kvt_status_t lookup_sparse(const uint32_t *tokens, size_t n, size_t &found,
                               kvt_llama_why_t *why) const;
    kvt_status_t open_policy(const settings &set, kvt_llama_why_t *why);
    kvt_status_t check_policy(const settings &set, kvt_llama_why_t *why) const;
    kvt_view_t view(void *address, const std::vector<void *> &pages, uint32_t page_tokens,
                    size_t row_bytes) const;
    kvt_status_t wait_op(kvt_op_t **op, const char *doing, kvt_llama_why_t *why);

    kvt_runtime_t *runtime_ = nullptr;
    kvt_budget_t *budget_ = nullptr;
    kvt_store_t *store_ = nullptr;
    kvt_account_t *own_account_ = nullptr;
    const kvt_account_t *account_ = nullptr;
    const kvt_store_t *used_store_ = nullptr;
    // Exact blocks may be shared by contexts of any size. Sparsely computed ones, if the sequence has a
    // name, are in another namespace for contexts with the same choice.
    kvt_namespace_t *namespace_ = nullptr, *sparse_namespace_ = nullptr;
    kvt_session_t *session_ = nullptr, *sparse_session_ = nullptr;
    kvt_sparse_t *policy_ = nullptr;
    bool has_disk_ = false, has_name_ = false;
    uint64_t reserved_bytes_ = 0;
    uint32_t block_tokens_ = 0, max_tokens_ = 0;
    uint32_t tokens_ = 0, exact_ = 0; // tokens of the sequence; length of its exact prefix
    shape model_;
    std::vector<float> keys_; // of a block, if the cache's type must be converted
    std::vector<uint32_t> candidates_; // of the current choice
};

} // namespace longer
} // namespace kvt_llama

#endif
