// kvtier's side of a long sequence: a store, a session that has its blocks, a policy that chooses.
#ifndef KVTIER_LLAMA_LONGER_STORE_HPP
#define KVTIER_LLAMA_LONGER_STORE_HPP

#include "watch/longer_base.hpp"

#include <string>
#include <vector>

namespace kvt_llama {
namespace longer {

// Options with all defaults filled in, and texts of their own.
struct settings {
    const kvt_store_t *store = nullptr;
    const kvt_account_t *account = nullptr;
    uint64_t host_bytes = 0, disk_bytes = 0;
    bool has_disk = false, has_name = false;
    std::string disk_path, name, model_id, spec, adapters;
    std::string context; // how K and V are computed in such a context
    std::string sparse;  // which of them a token sees, where it does not see all
    uint32_t block_tokens = 0, sink_tokens = 0, slot_tokens = 0, part_tokens = 0, max_tokens = 0;
    llama_seq_id seq = 0, held_seq = 0;
    bool is_ordered = false, is_staged = false;
};

// Where K and V of tokens of one layer are, block after block: in pages of equal size, or in one
// piece.
struct place {
    void *k = nullptr, *v = nullptr;
    std::vector<void *> k_pages, v_pages;
    uint32_t page_tokens = 0;

    // The same without the first tokens, which are whole pages.
    place behind(uint32_t tokens, const shape &model) const;
};

class backing {
  public:
    backing() = default;
    ~backing() { close(nullptr); }
    backing(const backing &) = delete;
    backing &operator=(const backing &) = delete;

    kvt_status_t open(const settings &set, kvt_llama_why_t *why);

    // Namespace, session and policy, for a model. `own_bytes` is what the adapter keeps itself.
    kvt_status_t begin(const settings &set, const shape &model, const char *description,
                       uint64_t own_bytes, kvt_llama_why_t *why);

    // The first `exact` of these are computed as the engine alone would.
    kvt_status_t append(const llama_token *tokens, size_t n, size_t exact, kvt_llama_why_t *why);
    // The first tokens are left; what a policy knows of whole blocks of them.
    kvt_status_t truncate(uint32_t tokens, uint32_t policy_tokens, kvt_llama_why_t *why);

    // Tokens [first, first + n), whole blocks, of all layers; waits.
    kvt_status_t put(uint32_t first, uint32_t n, const std::vector<place> &layers, bool is_durable,
                     kvt_llama_why_t *why);
    // Blocks of one layer, ascending; waits. Nothing is written to `to` after it.
    kvt_status_t get(uint32_t layer, const std::vector<uint32_t> &blocks, const place &to,
                     kvt_llama_why_t *why);
    // How many of these tokens are there, from the first on; and how many of those are exact.
    kvt_status_t lookup(const llama_token *tokens, size_t n, size_t &found, size_t &exact,
                        kvt_llama_why_t *why);

    // A policy learns the keys of a block of a layer, and chooses among blocks [first, end).
    kvt_status_t seal(uint32_t layer, uint32_t block, const void *keys, kvt_llama_why_t *why);
    kvt_status_t choose(uint32_t layer, const kvt_rows_t &queries, uint32_t tokens, uint32_t first,
                        uint32_t end, std::vector<uint32_t> &chosen, kvt_llama_why_t *why);

    // Whether what is put can be durable; of a store that was lent true until a put says no.
    bool has_disk() const { return has_disk_; }

    uint64_t policy_bytes() const;
    kvt_status_t close(kvt_llama_why_t *why);

  private:
    kvt_status_t open_own(const settings &set, kvt_llama_why_t *why);
    kvt_status_t reserve(uint64_t bytes, kvt_llama_why_t *why);
    kvt_status_t open_namespace(const settings &set, const char *description,
                                const std::string &sparse, kvt_namespace_t **out,
                                kvt_llama_why_t *why);
    kvt_status_t open_session(const kvt_namespace_t *space, kvt_session_t **out,
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
    kvt_status_t finish(kvt_op_t **op, const char *doing, kvt_llama_why_t *why);

    kvt_runtime_t *runtime_ = nullptr;
    kvt_budget_t *budget_ = nullptr;
    kvt_store_t *store_ = nullptr;
    kvt_account_t *own_account_ = nullptr;
    const kvt_account_t *account_ = nullptr;
    const kvt_store_t *used_store_ = nullptr;
    // What was computed exactly may be had by contexts of any size; the rest, where it has a name,
    // is in a namespace of those who choose likewise.
    kvt_namespace_t *space_ = nullptr, *sparse_space_ = nullptr;
    kvt_session_t *session_ = nullptr, *sparse_session_ = nullptr;
    kvt_sparse_t *policy_ = nullptr;
    bool has_disk_ = false, has_name_ = false;
    uint64_t reserved_bytes_ = 0;
    uint32_t block_tokens_ = 0, max_tokens_ = 0;
    uint32_t tokens_ = 0, exact_ = 0; // of the sequence; the first of those that are exact
    shape model_;
    std::vector<float> keys_;          // of a block, where the cache has a type of its own
    std::vector<uint32_t> candidates_; // of the choice under way
};

} // namespace longer
} // namespace kvt_llama

#endif
