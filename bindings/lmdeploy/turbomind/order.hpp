// Who leaves the device first: a kvtier policy over the engine's blocks.

#ifndef KVTIER_TURBOMIND_ORDER_HPP
#define KVTIER_TURBOMIND_ORDER_HPP

#include "nodes.hpp"

#include <kvtier/kvtier.hpp>

namespace kvtier_turbomind {

/// Blocks are objects of one unit that continue each other, so the end of a path leaves first. The
/// policy may know some that the engine gave up meanwhile: they are taken out when it names them.
class order {
public:
    explicit order(const options &opts);

    void begin(std::int64_t now_ns) { now_ns_ = now_ns; }
    void used(const std::vector<node_ptr> &path, const kvt_policy_context_t *who);
    void produced(const node_ptr &n);
    void evicted(const node_ptr &n);
    void recycled(const node_ptr &n);
    void hint(const node_ptr &last, const kvt_policy_hint_t &told, const kvt_policy_context_t *who);
    void sort(std::vector<candidate> &all, const std::vector<const node *> &nodes,
              std::uint64_t floor, std::uint64_t needed);
    const kvt::policy &policy() const { return policy_; }

private:
    void hold(const std::vector<candidate> &all, const std::vector<const node *> &nodes,
              std::uint64_t floor);
    std::vector<std::size_t> leaving(std::uint64_t needed);
    void forget(const node &n);

    kvt::policy policy_;
    std::int64_t now_ns_ = 0;
    std::uint64_t pass_ = 0;
    /// What the policy has: a node of that content.
    std::unordered_map<std::uint64_t, node_ptr> known_;
    /// What is referenced there.
    std::vector<node_ptr> held_;
};

}  // namespace kvtier_turbomind

#endif  // KVTIER_TURBOMIND_ORDER_HPP
