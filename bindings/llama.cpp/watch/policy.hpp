// Owns a sparse policy of the library: opens it for a shape, closes it, and turns errors into text.
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

// A policy by its spec, or the caller's own.
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

    // Reads the source. The traits of a caller's own policy are known from here on. It is opened only
    // once, when the shape is known, because opening takes ownership of its data.
    kvt_status_t set_source(const policy_source &source, std::string &message);

    // Takes ownership of the caller's data, whether the policy is opened or not.
    void adopt() { owns_data_ = true; }

    // A policy by spec may be opened again; its state is lost.
    kvt_status_t open(const attention_shape &shape, std::string &message);

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

// The text of the library's error, which it frees.
std::string take_message(kvt_error_t **error, kvt_status_t status);

} // namespace kvt_llama

#endif
