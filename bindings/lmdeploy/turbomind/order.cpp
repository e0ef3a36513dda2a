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

// The C calls: what they say may be ignored, since the engine's own order stands behind all of it.

void order::used(const std::vector<node_ptr> &path, const kvt_policy_context_t *who) {
    std::vector<std::uint64_t> ids;
    for (const node_ptr &n : path) ids.push_back(n->id);
    if (!ids.empty())
        (void)kvt_policy_lookup(policy_.get(), now_ns_, who, ids.data(), ids.size(), nullptr,
                                nullptr, nullptr);
}

void order::produced(const node_ptr &n) {
    const auto it = known_.find(n->id);
    if (it != known_.end()) {
        if (it->second != n) { // the same content, that came again
            n->noted = it->second->noted;
            it->second->noted = node::note();
            std::replace(held_.begin(), held_.end(), it->second, n);
            it->second = n;
        }
        n->noted.here = true;
        return;
    }
    kvt_policy_object_t row = n->parent ? kvt::policy_row(n->id, 1, n->parent->id)
                                     : kvt::policy_row(n->id);
    row.tokens = static_cast<std::uint32_t>(n->tokens.size());
    row.context = row.tokens * n->index;
    if (kvt_policy_insert(policy_.get(), now_ns_, nullptr, &row, 1, sizeof row, nullptr) != KVT_OK)
        return;
    n->noted.known = n->noted.here = true;
    known_.emplace(n->id, n);
}

/// The policy does not have it any more.
void order::forget(const node &n) {
    if (n.noted.held)
        held_.erase(std::find_if(held_.begin(), held_.end(),
                                 [&](const node_ptr &h) { return h.get() == &n; }));
    n.noted = node::note();
    const std::uint64_t id = n.id;
    known_.erase(id); // may be the last to hold it
}

void order::evicted(const node_ptr &n) {
    if (!n->noted.known) return;
    n->noted.here = false;
    // Where others continue it, it goes when the policy names it.
    if (kvt_policy_report_evicted(policy_.get(), now_ns_, &n->id, 1, nullptr) == KVT_OK) forget(*n);
}

void order::recycled(const node_ptr &n) {
    if (!n->noted.known) return;
    n->noted.here = false;
    if (kvt_policy_remove(policy_.get(), now_ns_, &n->id, 1, nullptr) == KVT_OK) forget(*n);
}

void order::hint(const node_ptr &last, const kvt_policy_hint_t &told,
                 const kvt_policy_context_t *who) {
    std::vector<std::uint64_t> ids;
    for (const node *n : path_of(last)) ids.push_back(n->id);
    if (!ids.empty())
        (void)kvt_policy_hint(policy_.get(), now_ns_, who, ids.data(), ids.size(), &told, nullptr,
                              nullptr);
}

/// What runs is referenced: the policy neither names it nor what it continues.
void order::hold(const std::vector<candidate> &all, const std::vector<const node *> &nodes,
                 std::uint64_t floor) {
    std::vector<std::uint64_t> come, gone;
    std::vector<const node *> fresh;
    for (std::size_t i = 0; i < all.size(); i++) {
        const node *n = nodes[i];
        if (n == nullptr || !n->noted.known || !n->noted.here || all[i].timestamp < floor) continue;
        if (!n->noted.held && n->noted.used != pass_) fresh.push_back(n);
        n->noted.used = pass_;
    }
    // Several ranks must make the same calls, whatever the order of their candidates.
    std::sort(fresh.begin(), fresh.end(),
              [](const node *a, const node *b) { return a->id < b->id; });
    std::vector<node_ptr> still;
    for (node_ptr &n : held_) {
        if (n->noted.used == pass_) {
            still.push_back(std::move(n));
            continue;
        }
        n->noted.held = false;
        gone.push_back(n->id);
    }
    held_ = std::move(still);
    std::sort(gone.begin(), gone.end());
    if (!gone.empty()) (void)kvt_policy_release(policy_.get(), gone.data(), gone.size(), nullptr);
    for (const node *n : fresh) come.push_back(n->id);
    if (come.empty() ||
        kvt_policy_acquire(policy_.get(), come.data(), come.size(), nullptr) != KVT_OK)
        return;
    for (const node *n : fresh) {
        n->noted.held = true;
        held_.push_back(known_.find(n->id)->second);
    }
}

/// Rows of this pass, in the policy's order.
std::vector<std::size_t> order::leaving(std::uint64_t needed) {
    std::vector<kvt_policy_victim_t> victims(static_cast<std::size_t>(needed));
    std::vector<std::size_t> rows;
    for (bool is_stale = needed > 0; is_stale;) {
        kvt_policy_outcome_t out = KVT_POLICY_OUTCOME_INIT;
        if (kvt_policy_preview(policy_.get(), now_ns_, needed, victims.data(), victims.size(),
                               sizeof victims[0], &out, nullptr) != KVT_OK)
            return {};
        rows.clear();
        is_stale = false;
        for (std::uint64_t i = 0; i < out.victims; i++) {
            const std::uint64_t id = victims[i].id;
            const auto it = known_.find(id);
            if (it == known_.end()) continue;
            const node &n = *it->second;
            if (n.noted.here && n.noted.pass == pass_) {
                rows.push_back(n.noted.row);
            } else if (!n.noted.here &&
                       kvt_policy_remove(policy_.get(), now_ns_, &id, 1, nullptr) == KVT_OK) {
                forget(n); // the engine gave it up before what continues it
                is_stale = true;
            }
        }
    }
    return rows;
}

void order::sort(std::vector<candidate> &all, const std::vector<const node *> &nodes,
                 std::uint64_t floor, std::uint64_t needed) {
    pass_++;
    std::uint64_t may_leave = 0;
    for (std::size_t i = 0; i < all.size(); i++) {
        const node *n = nodes[i];
        if (n == nullptr || !n->noted.known || !n->noted.here) continue;
        if (all[i].timestamp >= floor) continue;
        n->noted.pass = pass_;
        n->noted.row = i;
        may_leave++;
    }
    hold(all, nodes, floor);
    const std::vector<std::size_t> chosen = leaving(std::min(needed, may_leave));
    // Behind them: who is not known stands among them by age, the others follow by age.
    enum : std::uint8_t { STRANGER, OTHER, CHOSEN };
    std::vector<std::uint8_t> kind(all.size(), OTHER);
    for (std::size_t i = 0; i < all.size(); i++)
        if (all[i].timestamp < floor && (nodes[i] == nullptr || nodes[i]->noted.pass != pass_))
            kind[i] = STRANGER;
    for (const std::size_t i : chosen) kind[i] = CHOSEN;
    std::vector<candidate> strangers, others, sorted;
    for (std::size_t i = 0; i < all.size(); i++) {
        if (kind[i] == STRANGER) strangers.push_back(all[i]);
        if (kind[i] == OTHER) others.push_back(all[i]);
    }
    const auto is_older = [](const candidate &a, const candidate &b) {
        return a.timestamp < b.timestamp;
    };
    std::sort(strangers.begin(), strangers.end(), is_older);
    std::sort(others.begin(), others.end(), is_older);
    sorted.reserve(all.size());
    auto next = strangers.begin();
    for (const std::size_t i : chosen) {
        for (; next != strangers.end() && is_older(*next, all[i]); ++next) sorted.push_back(*next);
        sorted.push_back(all[i]);
    }
    sorted.insert(sorted.end(), next, strangers.end());
    sorted.insert(sorted.end(), others.begin(), others.end());
    all = std::move(sorted);
}

}  // namespace kvtier_turbomind
