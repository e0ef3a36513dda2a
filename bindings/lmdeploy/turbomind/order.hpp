// Eviction order on the device: a kvtier policy over the engine's blocks.

#ifndef KVTIER_TURBOMIND_ORDER_HPP
#define KVTIER_TURBOMIND_ORDER_HPP

#include "nodes.hpp"

#include <kvtier/policy.hpp>

namespace kvtier_turbomind {

/// Each block is an object of one unit whose parent is the block before, so the policy evicts the
/// end of a path first. Objects of blocks that the engine dropped are removed when the policy
/// chooses them as victims.
class order {
public:
    explicit order(const options &opts);

    void begin(std::int64_t now_ns) { now_ns_ = now_ns; }
    void used(const std::vector<node_ptr> &path, const kvt_policy_context_t *context);
    void produced(const node_ptr &n);
    void evicted(const node_ptr &n);
    void recycled(const node_ptr &n);
    void hint(const node_ptr &last, const kvt_policy_hint_t &hint,
              const kvt_policy_context_t *context);
    void sort(std::vector<candidate> &all, const std::vector<const node *> &nodes,
              std::uint64_t floor, std::uint64_t needed);
    const kvt::policy &policy() const { return policy_; }

private:
    void acquire_used(const std::vector<candidate> &all, const std::vector<const node *> &nodes,
                      std::uint64_t floor);
    std::vector<std::size_t> victims(std::uint64_t needed);
    void forget(const node &n);

    kvt::policy policy_;
    std::int64_t now_ns_ = 0;
    std::uint64_t pass_ = 0;
    /// The policy's objects by id.
    std::unordered_map<std::uint64_t, node_ptr> objects_;
    /// Nodes whose objects are referenced in the policy.
    std::vector<node_ptr> acquired_;
};

}  // namespace kvtier_turbomind

#endif  // KVTIER_TURBOMIND_ORDER_HPP
