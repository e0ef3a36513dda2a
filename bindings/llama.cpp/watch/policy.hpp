// A sparse policy of the library, for this room: opened for a shape, closed with its owner, its
// refusals in words.
#ifndef KVTIER_LLAMA_POLICY_HPP
#define KVTIER_LLAMA_POLICY_HPP

#include <kvtier/kvtier.h>

#include <cstdint>
#include <string>

namespace kvt_llama {

struct attention_shape {
    uint32_t layers = 0;
    uint32_t query_heads = 0;
    uint32_t key_heads = 0;
    uint32_t key_dim = 0;
    uint32_t block_tokens = 0;
    uint32_t max_tokens = 0;

    bool operator==(const attention_shape &other) const {
        return layers == other.layers && query_heads == other.query_heads &&
               key_heads == other.key_heads && key_dim == other.key_dim &&
               block_tokens == other.block_tokens && max_tokens == other.max_tokens;
    }
};

// By a spec, or the caller's own.
struct policy_source {
    std::string spec;
    const kvt_sparse_custom_t *custom = nullptr;

    std::string name() const { return custom ? "the policy" : "'" + spec + "'"; }
};

class policy {
  public:
    policy() = default;
    policy(const policy &) = delete;
    policy &operator=(const policy &) = delete;
    ~policy();

    // Of a policy of the caller's own the traits are known from here on; it is opened once, when
    // the shape is known, since opening takes its data over.
    kvt_status_t set_source(const policy_source &source, std::string &words);

    // The caller's data is ours to release, whether it has been opened or not.
    void adopt() { owns_data_ = true; }

    // One by a spec may be opened anew: what it knew is gone.
    kvt_status_t open(const attention_shape &shape, std::string &words);

    bool is_custom() const { return is_custom_; }
    bool is_open() const { return handle_ != nullptr; }
    kvt_sparse_t *get() const { return handle_; }
    const kvt_sparse_traits_t &traits() const { return traits_; }

  private:
    std::string spec_;
    bool is_custom_ = false, owns_data_ = false;
    kvt_sparse_custom_t custom_ = KVT_SPARSE_CUSTOM_INIT;
    kvt_sparse_t *handle_ = nullptr;
    kvt_sparse_traits_t traits_ = KVT_SPARSE_TRAITS_INIT;
};

// What the library said of a failure; frees it.
std::string words_of(kvt_error_t **error, kvt_status_t status);

} // namespace kvt_llama

#endif
