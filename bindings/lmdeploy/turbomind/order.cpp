#include "order.hpp"

#include <algorithm>

namespace kvtier_turbomind {

namespace {
kvt::policy open_policy(const options &opts) {
    kvt::policy_opts o;
    o.spec = opts.order;
    o.capacity_units = opts.device_objects;
    o.log_entries = opts.log_entries;
    return kvt::policy::open(std::move(o));
}
}  // namespace

order::order(const options &opts) : policy_(open_policy(opts)) {}

// The status of most policy calls is ignored: after a failure `sort` falls back to timestamps.

void order::used(const std::vector<node_ptr> &path, const kvt_policy_context_t *context) {
    std::vector<std::uint64_t> ids;
    for (const node_ptr &n : path) ids.push_back(n->id);
    if (!ids.empty())
        (void)kvt_policy_lookup(policy_.get(), now_ns_, context, ids.data(), ids.size(), nullptr,
                                nullptr, nullptr);
}

void order::produced(const node_ptr &n) {
    const auto it = objects_.find(n->id);
    if (it != objects_.end()) {
        if (it->second != n) { // equal content in a new block: move the state there
            n->state = it->second->state;
            it->second->state = node::order_state();
            std::replace(acquired_.begin(), acquired_.end(), it->second, n);
            it->second = n;
        }
        n->state.resident = true;
        return;
    }
    kvt_policy_object_t row = n->parent ? kvt::policy_object(n->id, 1, n->parent->id)
                                        : kvt::policy_object(n->id);
    row.tokens = static_cast<std::uint32_t>(n->tokens.size());
    row.context = row.tokens * n->index;
    if (kvt_policy_insert(policy_.get(), now_ns_, nullptr, &row, 1, sizeof row, nullptr) != KVT_OK)
        return;
    n->state.in_policy = n->state.resident = true;
    objects_.emplace(n->id, n);
}

/// Removes the bookkeeping of an object that the policy no longer has.
void order::forget(const node &n) {
    if (n.state.acquired)
        acquired_.erase(std::find_if(acquired_.begin(), acquired_.end(),
                                     [&](const node_ptr &a) { return a.get() == &n; }));
    n.state = node::order_state();
    const std::uint64_t id = n.id;
    objects_.erase(id); // may destroy the node
}

void order::evicted(const node_ptr &n) {
    if (!n->state.in_policy) return;
    n->state.resident = false;
    // A node with children stays in the policy until the policy chooses it as a victim.
    if (kvt_policy_report_evicted(policy_.get(), now_ns_, &n->id, 1, nullptr) == KVT_OK) forget(*n);
}

void order::recycled(const node_ptr &n) {
    if (!n->state.in_policy) return;
    n->state.resident = false;
    if (kvt_policy_remove(policy_.get(), now_ns_, &n->id, 1, nullptr) == KVT_OK) forget(*n);
}

void order::hint(const node_ptr &last, const kvt_policy_hint_t &hint,
                 const kvt_policy_context_t *context) {
    std::vector<std::uint64_t> ids;
    for (const node *n : path_of(last)) ids.push_back(n->id);
    if (!ids.empty())
        (void)kvt_policy_hint(policy_.get(), now_ns_, context, ids.data(), ids.size(), &hint,
                              nullptr, nullptr);
}

/// References the objects of blocks in use, and releases the others. The policy then evicts neither
/// a block in use nor its ancestors.
void order::acquire_used(const std::vector<candidate> &all, const std::vector<const node *> &nodes,
                         std::uint64_t floor) {
    std::vector<std::uint64_t> acquire, release;
    std::vector<const node *> fresh;
    for (std::size_t i = 0; i < all.size(); i++) {
        const node *n = nodes[i];
        if (n == nullptr || !n->state.in_policy || !n->state.resident) continue;
        if (all[i].timestamp < floor) continue;
        if (!n->state.acquired && n->state.used_in != pass_) fresh.push_back(n);
        n->state.used_in = pass_;
    }
    // Ranks must make the same calls in the same order, whatever the order of their candidates.
    std::sort(fresh.begin(), fresh.end(),
              [](const node *a, const node *b) { return a->id < b->id; });
    std::vector<node_ptr> still;
    for (node_ptr &n : acquired_) {
        if (n->state.used_in == pass_) {
            still.push_back(std::move(n));
            continue;
        }
        n->state.acquired = false;
        release.push_back(n->id);
    }
    acquired_ = std::move(still);
    std::sort(release.begin(), release.end());
    if (!release.empty())
        (void)kvt_policy_release(policy_.get(), release.data(), release.size(), nullptr);
    for (const node *n : fresh) acquire.push_back(n->id);
    if (acquire.empty() ||
        kvt_policy_acquire(policy_.get(), acquire.data(), acquire.size(), nullptr) != KVT_OK)
        return;
    for (const node *n : fresh) {
        n->state.acquired = true;
        acquired_.push_back(objects_.find(n->id)->second);
    }
}

/// Returns the victims' indices in the candidates of this pass, in the policy's order.
std::vector<std::size_t> order::victims(std::uint64_t needed) {
    std::vector<kvt_policy_victim_t> chosen(static_cast<std::size_t>(needed));
    std::vector<std::size_t> rows;
    for (bool is_stale = needed > 0; is_stale;) {
        kvt_policy_outcome_t out = KVT_POLICY_OUTCOME_INIT;
        if (kvt_policy_preview(policy_.get(), now_ns_, needed, chosen.data(), chosen.size(),
                               sizeof chosen[0], &out, nullptr) != KVT_OK)
            return {};
        rows.clear();
        is_stale = false;
        for (std::uint64_t i = 0; i < out.victims; i++) {
            const std::uint64_t id = chosen[i].id;
            const auto it = objects_.find(id);
            if (it == objects_.end()) continue;
            const node &n = *it->second;
            if (n.state.resident && n.state.evictable_in == pass_) {
                rows.push_back(n.state.row);
            } else if (!n.state.resident &&
                       kvt_policy_remove(policy_.get(), now_ns_, &id, 1, nullptr) == KVT_OK) {
                forget(n); // the engine dropped it before its children
                is_stale = true;
            }
        }
    }
    return rows;
}

void order::sort(std::vector<candidate> &all, const std::vector<const node *> &nodes,
                 std::uint64_t floor, std::uint64_t needed) {
    pass_++;
    std::uint64_t evictable = 0;
    for (std::size_t i = 0; i < all.size(); i++) {
        const node *n = nodes[i];
        if (n == nullptr || !n->state.in_policy || !n->state.resident) continue;
        if (all[i].timestamp >= floor) continue;
        n->state.evictable_in = pass_;
        n->state.row = i;
        evictable++;
    }
    acquire_used(all, nodes, floor);
    const std::vector<std::size_t> chosen = victims(std::min(needed, evictable));
    // Blocks unknown to the policy are merged among the victims by age; the rest follows by age.
    enum : std::uint8_t { UNKNOWN, OTHER, CHOSEN };
    std::vector<std::uint8_t> kind(all.size(), OTHER);
    for (std::size_t i = 0; i < all.size(); i++)
        if (all[i].timestamp < floor &&
            (nodes[i] == nullptr || nodes[i]->state.evictable_in != pass_))
            kind[i] = UNKNOWN;
    for (const std::size_t i : chosen) kind[i] = CHOSEN;
    std::vector<candidate> unknown, others, sorted;
    for (std::size_t i = 0; i < all.size(); i++) {
        if (kind[i] == UNKNOWN) unknown.push_back(all[i]);
        if (kind[i] == OTHER) others.push_back(all[i]);
    }
    const auto is_older = [](const candidate &a, const candidate &b) {
        return a.timestamp < b.timestamp;
    };
    std::sort(unknown.begin(), unknown.end(), is_older);
    std::sort(others.begin(), others.end(), is_older);
    sorted.reserve(all.size());
    auto next = unknown.begin();
    for (const std::size_t i : chosen) {
        for (; next != unknown.end() && is_older(*next, all[i]); ++next) sorted.push_back(*next);
        sorted.push_back(all[i]);
    }
    sorted.insert(sorted.end(), next, unknown.end());
    sorted.insert(sorted.end(), others.begin(), others.end());
    all = std::move(sorted);
}

}  // namespace kvtier_turbomind
