#include "order.hpp"
#include "tier.hpp"

#include <algorithm>

namespace kvtier_turbomind {

struct adapter::impl {
    block_index blocks;
    std::unique_ptr<order> victims;
    std::unique_ptr<tier> store;
};

namespace {
/// Returns whether a call succeeded; otherwise sets `why` to its message. Consumes `err`.
bool succeeded(kvt_status_t status, kvt_error_t *err, std::string *why) {
    const kvt::error error(status, err);
    if (status != KVT_OK && why != nullptr) *why = error.message();
    return status == KVT_OK;
}

bool unavailable(const char *message, std::string *why) {
    if (why != nullptr) *why = message;
    return false;
}
}  // namespace

adapter::adapter(const options &opts) : impl_(new impl) {
    if (!opts.order.empty()) impl_->victims.reset(new order(opts));
    if (!opts.store.empty()) impl_->store.reset(new tier(opts));
}
adapter::~adapter() = default;

void adapter::indexed(block_t block, block_t parent, const int *tokens, std::size_t count,
                      const kvt_media_t *media, std::size_t media_count) {
    impl_->blocks.add(block, parent, tokens, count, media, media_count);
}

void adapter::recycled(block_t block) {
    const node_ptr n = impl_->blocks.find(block);
    if (!n) return;
    if (impl_->victims) impl_->victims->recycled(n);
    impl_->blocks.remove(block);
}

void adapter::begin_pass(std::int64_t now_ns) {
    if (impl_->victims) impl_->victims->begin(now_ns);
    if (impl_->store) impl_->store->poll();
}

void adapter::used(const std::vector<block_t> &path, const kvt_policy_context_t *context) {
    if (!impl_->victims) return;
    std::vector<node_ptr> nodes;
    for (block_t block : path) {
        node_ptr n = impl_->blocks.find(block);
        if (!n) break;
        nodes.push_back(std::move(n));
    }
    impl_->victims->used(nodes, context);
}

void adapter::produced(block_t block) {
    if (!impl_->victims) return;
    if (const node_ptr n = impl_->blocks.find(block)) impl_->victims->produced(n);
}

void adapter::sort(std::vector<candidate> &all, std::uint64_t floor, std::uint64_t needed) {
    if (!impl_->victims) {
        std::sort(all.begin(), all.end(), [](const candidate &a, const candidate &b) {
            return a.timestamp < b.timestamp;
        });
        return;
    }
    std::vector<const node *> nodes;
    nodes.reserve(all.size());
    for (const candidate &c : all) nodes.push_back(impl_->blocks.peek(c.block));
    impl_->victims->sort(all, nodes, floor, needed);
}

bool adapter::set_order(const std::string &spec, std::string *why) {
    if (!impl_->victims) return unavailable("there is no device policy: set options::order", why);
    kvt_error_t *err = nullptr;
    const kvt_status_t status =
        kvt_policy_switch(impl_->victims->policy().get(), spec.data(), spec.size(), &err);
    return succeeded(status, err, why);
}

bool adapter::set_store_policy(std::uint32_t tier, const std::string &spec, std::string *why) {
    if (!impl_->store) return unavailable("there is no store: set options::store", why);
    kvt_error_t *err = nullptr;
    const kvt_status_t status = kvt_store_set_policy(impl_->store->store().get(), tier, spec.data(),
                                                     spec.size(), &err);
    return succeeded(status, err, why);
}

void adapter::hint(block_t last, const kvt_policy_hint_t &hint,
                   const kvt_policy_context_t *context) {
    const node_ptr n = impl_->blocks.find(last);
    if (!n) return;
    if (impl_->victims) impl_->victims->hint(n, hint, context);
    if (impl_->store) impl_->store->hint(n, hint);
}

std::vector<kvt_policy_log_entry_t> adapter::evictions(std::uint64_t from) const {
    return impl_->victims ? impl_->victims->policy().log(from)
                          : std::vector<kvt_policy_log_entry_t>();
}

std::uint64_t adapter::advise(std::uint64_t batch) const {
    kvt_policy_advice_t advice = KVT_POLICY_ADVICE_INIT;
    if (!impl_->victims ||
        kvt_policy_advise(impl_->victims->policy().get(), batch, &advice) != KVT_OK)
        return batch;
    return advice.batch;
}

kvt_policy_stats_t adapter::order_stats() const {
    kvt_policy_stats_t stats = KVT_POLICY_STATS_INIT;
    if (impl_->victims) (void)kvt_policy_stats(impl_->victims->policy().get(), &stats);
    return stats;
}

void adapter::evicted(block_t block, bool valid, const std::vector<part> &object,
                      std::vector<copy> &saves) {
    const node_ptr n = impl_->blocks.find(block);
    if (!n) return;
    if (impl_->victims) impl_->victims->evicted(n);
    if (valid && impl_->store) impl_->store->save(n, object, saves);
}

answer adapter::resume(std::uint64_t request, block_t last, std::uint32_t first) {
    return impl_->store ? impl_->store->resume(request, impl_->blocks.find(last), first) : answer();
}

void adapter::restore(std::uint64_t request, std::uint32_t index, const std::vector<part> &object,
                      std::vector<copy> &restores) {
    if (impl_->store) impl_->store->restore(request, index, object, restores);
}

void adapter::forget(std::uint64_t request) {
    if (impl_->store) impl_->store->forget(request);
}

std::uint64_t adapter::submitted() { return impl_->store ? impl_->store->submitted() : 0; }

void adapter::completed(std::uint64_t batch) {
    if (impl_->store) impl_->store->completed(batch);
}

bool adapter::drain(std::uint64_t deadline_ns) {
    return !impl_->store || impl_->store->drain(deadline_ns);
}

counts adapter::count() const { return impl_->store ? impl_->store->count() : counts(); }

kvt_store_stats_t adapter::store_stats() const {
    kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
    if (impl_->store) (void)kvt_store_stats(impl_->store->store().get(), &stats);
    return stats;
}

std::string adapter::metrics() const {
    if (!impl_->store) return {};
    try {
        return impl_->store->store().metrics();
    } catch (const kvt::exception &) {
        return {};
    }
}

}  // namespace kvtier_turbomind
