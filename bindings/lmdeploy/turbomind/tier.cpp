#include "tier.hpp"

#include <algorithm>
#include <ctime>

namespace kvtier_turbomind {

namespace {

std::uint64_t clock_ns() {
    timespec t{};
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<std::uint64_t>(t.tv_sec) * UINT64_C(1000000000) +
           static_cast<std::uint64_t>(t.tv_nsec);
}

std::size_t bytes_of(const std::vector<part> &object) {
    std::size_t bytes = 0;
    for (const part &p : object) bytes += p.bytes;
    return bytes;
}

const options &checked(const options &opts) {
    if (opts.block_tokens == 0 || opts.object_bytes == 0 || opts.slots == 0)
        throw kvt::exception(kvt::error(KVT_E_INVALID));
    return opts;
}

kvt::runtime open_runtime(const options &opts) {
    kvt::runtime_opts o;
    o.name = "turbomind";
    o.max_ops = opts.max_ops;
    o.faults = opts.faults;
    return kvt::runtime::open(std::move(o));
}

/// The namespace has one layer whose K plane is a block's whole object: the store need not know
/// its parts. A token's K is an equal share of the object, rounded up.
kvt::namespace_ open_namespace(const kvt::store &store, const options &opts) {
    kvt::layer_group group;
    group.layers = {0};
    group.k_bytes = slot_bytes(opts) / opts.block_tokens;
    kvt::layout layout;
    layout.chunk_tokens = opts.block_tokens;
    layout.groups = {group};
    kvt::identity id;
    if (!opts.model.empty()) id.model = opts.model;
    if (!opts.weights.empty()) id.weights = opts.weights;
    if (!opts.lora.empty()) id.lora = opts.lora;
    if (!opts.salt.empty()) id.salt = opts.salt;
    if (!opts.recipe.empty()) id.recipe = opts.recipe;
    if (opts.shard_count > 1) {
        id.shard_index = opts.shard_index;
        id.shard_count = opts.shard_count;
    }
    // Holes: the device may have the beginning of a path, and the store only its end.
    return store.open_namespace(id, layout, KVT_NAMESPACE_HOLES);
}

}  // namespace

std::size_t slot_bytes(const options &opts) {
    const std::size_t tokens = opts.block_tokens;
    return tokens == 0 ? 0 : (opts.object_bytes + tokens - 1) / tokens * tokens;
}

tier::tier(const options &opts)
    : block_tokens_(checked(opts).block_tokens), stride_(slot_bytes(opts)),
      wait_ns_(opts.wait_ns), agree_(opts.agree), runtime_(open_runtime(opts)),
      base_(static_cast<std::uint8_t *>(opts.slot_memory)),
      store_(kvt::store::open(runtime_, opts.store)), namespace_(open_namespace(store_, opts)) {
    if (base_ == nullptr) {
        own_slots_ = runtime_.alloc(std::uint64_t{opts.slots} * stride_);
        base_ = reinterpret_cast<std::uint8_t *>(own_slots_.data());
    }
    // The padding after an object is stored too: zero it once, so that stored bytes are defined.
    std::memset(base_, 0, std::size_t{opts.slots} * stride_);
    for (slot_t i = opts.slots; i-- > 0;) free_.push_back(i);
}

tier::~tier() = default; // members end in reverse order: ops cancel and wait before the store ends

kvt::session tier::open_session(const sequence &all) const {
    kvt::session session = namespace_.open_session();
    if (all.media.empty()) session.append(all.tokens);
    else session.append(all.tokens, all.media);
    return session;
}

void tier::release(std::vector<slot_t> &slots) {
    for (const slot_t s : slots)
        if (s != NONE) free_.push_back(s);
    slots.clear();
}

// --- replay ------------------------------------------------------------------

void tier::save(const node_ptr &n, const std::vector<part> &object, std::vector<copy> &saves) {
    if (bytes_of(object) > stride_) { // larger than options::object_bytes
        counts_.not_stored++;
        return;
    }
    if (free_.empty()) {
        counts_.no_slot++;
        return;
    }
    const slot_t slot = free_.back();
    free_.pop_back();
    auto *to = static_cast<std::uint8_t *>(address(slot));
    for (const part &p : object) {
        saves.push_back({p.address, to, p.bytes});
        to += p.bytes;
    }
    saves_.push_back({n, slot, batch_});
    counts_.saves++;
}

/// Puts consecutive blocks of one path with one op.
void tier::put(const std::vector<save_copy> &run, kvt::session &session) {
    std::vector<void *> pages;
    slot_op op;
    for (const save_copy &s : run) {
        pages.push_back(address(s.slot));
        op.slots.push_back(s.slot);
    }
    const kvt_view_t view = kvt::view(pages, block_tokens_, stride_ / block_tokens_);
    kvt::transfer transfer;
    transfer.first_token = std::uint64_t{run.front().block->index} * block_tokens_;
    transfer.tokens = run.size() * block_tokens_;
    transfer.k = kvt::span<const kvt_view_t>(&view, 1);
    try {
        op.op = session.put(transfer);
        puts_.push_back(std::move(op));
    } catch (const kvt::exception &) {
        counts_.not_stored += run.size();
        release(op.slots);
    }
}

void tier::completed(std::uint64_t batch) {
    std::vector<save_copy> done;
    while (!saves_.empty() && saves_.front().batch <= batch) {
        done.push_back(std::move(saves_.front()));
        saves_.pop_front();
    }
    restores_.erase(std::remove_if(restores_.begin(), restores_.end(),
                                   [&](const auto &r) {
                                       if (r.first > batch) return false;
                                       free_.push_back(r.second);
                                       return true;
                                   }),
                    restores_.end());
    // Deepest block first: the other blocks on its path share its session.
    std::sort(done.begin(), done.end(), [](const save_copy &a, const save_copy &b) {
        return a.block->index > b.block->index;
    });
    std::vector<bool> taken(done.size(), false);
    for (std::size_t i = 0; i < done.size(); i++) {
        if (taken[i]) continue;
        const std::vector<const node *> path = path_of(done[i].block);
        std::vector<save_copy> mine;
        for (std::size_t j = i; j < done.size(); j++)
            if (!taken[j] && path[done[j].block->index] == done[j].block.get()) {
                taken[j] = true;
                mine.push_back(done[j]);
            }
        std::reverse(mine.begin(), mine.end());
        try {
            kvt::session session = open_session(sequence_of(done[i].block));
            std::vector<save_copy> run;
            for (const save_copy &s : mine) {
                if (!run.empty() && run.back().block->index + 1 != s.block->index) {
                    put(run, session);
                    run.clear();
                }
                run.push_back(s);
            }
            put(run, session);
        } catch (const kvt::exception &) { // the session failed to open, so nothing was put
            counts_.not_stored += mine.size();
            for (const save_copy &s : mine) free_.push_back(s.slot);
        }
    }
}

void tier::poll() {
    const auto is_over = [](const kvt::op &op, kvt_op_info_t *out) {
        *out = KVT_OP_INFO_INIT;
        return kvt_op_info(op.get(), out) != KVT_OK || (out->state & KVT_OP_RELEASED) != 0;
    };
    kvt_op_info_t info;
    for (std::size_t i = puts_.size(); i-- > 0;) {
        slot_op &s = puts_[i];
        if (!is_over(s.op, &info)) continue;
        const std::uint64_t stored = std::min<std::uint64_t>(info.value / block_tokens_,
                                                             s.slots.size());
        counts_.stored += stored;
        counts_.not_stored += s.slots.size() - stored;
        release(s.slots);
        puts_.erase(puts_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (std::size_t i = abandoned_.size(); i-- > 0;) {
        if (!is_over(abandoned_[i].op, &info)) continue;
        release(abandoned_[i].slots);
        abandoned_.erase(abandoned_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (auto &[request, l] : loads_) {
        if (!l.op || !is_over(l.op, &info)) continue;
        const std::uint64_t loaded = info.value / block_tokens_;
        counts_.loaded += loaded;
        counts_.not_loaded += l.slots.size() - loaded;
        l.op = kvt::op();
        trim(l, loaded);
    }
}

bool tier::drain(std::uint64_t deadline_ns) {
    for (const slot_op &s : puts_)
        if (kvt_op_wait(s.op.get(), KVT_OP_RELEASED, deadline_ns) == KVT_E_TIMEOUT) return false;
    poll();
    return true;
}

// --- match -------------------------------------------------------------------

/// Returns how many consecutive blocks from `first` on the store has.
std::uint32_t tier::available(const sequence &all, std::uint32_t first) const {
    const kvt::lookup_result found = all.media.empty() ? namespace_.lookup(all.tokens)
                                                       : namespace_.lookup(all.tokens, all.media);
    const std::uint64_t from = std::uint64_t{first} * block_tokens_;
    std::uint64_t to = from;
    for (const kvt_range_t &r : found.ranges) {
        if (r.state != KVT_RANGE_HIT && r.state != KVT_RANGE_PENDING) continue;
        if (r.first_token <= to && r.first_token + r.tokens > to) to = r.first_token + r.tokens;
    }
    return static_cast<std::uint32_t>((to - from) / block_tokens_);
}

/// Keeps the first `blocks` blocks of a completed load.
void tier::trim(load &l, std::uint64_t blocks) {
    while (l.slots.size() > blocks) {
        if (l.slots.back() != NONE) free_.push_back(l.slots.back());
        l.slots.pop_back();
    }
}

/// Cancels a load. `poll` frees its slots once the op has released them.
void tier::abandon(load &l) {
    (void)kvt_op_cancel(l.op.get());
    abandoned_.push_back({std::move(l.op), std::move(l.slots)});
    l.op = kvt::op();
    l.slots.clear();
}

bool tier::begin(load &l, const node_ptr &last, std::uint32_t first) {
    counts_.asked++;
    l.first = first;
    l.deadline_ns = clock_ns() + wait_ns_;
    std::uint64_t blocks = 0;
    sequence all;
    try {
        all = sequence_of(last);
        // A quarter of the free slots is reserved for blocks that are evicted meanwhile.
        blocks = std::min<std::uint64_t>(available(all, first), free_.size() - free_.size() / 4);
    } catch (const kvt::exception &) {
        blocks = 0;
    }
    blocks = agreed(blocks);
    if (blocks == 0) return false;
    std::vector<void *> pages;
    for (std::uint64_t i = 0; i < blocks; i++) {
        l.slots.push_back(free_.back());
        pages.push_back(address(free_.back()));
        free_.pop_back();
    }
    const kvt_view_t view = kvt::view(pages, block_tokens_, stride_ / block_tokens_);
    kvt::transfer transfer;
    transfer.first_token = std::uint64_t{first} * block_tokens_;
    transfer.tokens = blocks * block_tokens_;
    transfer.k = kvt::span<const kvt_view_t>(&view, 1);
    try {
        l.op = open_session(all).get(transfer);
    } catch (const kvt::exception &) {
        counts_.not_loaded += blocks;
        release(l.slots); // the load is empty; `resume` lets all ranks agree on that
    }
    return true;
}

answer tier::resume(std::uint64_t request, const node_ptr &last, std::uint32_t first) {
    const auto it = loads_.find(request);
    if (it == loads_.end()) {
        if (!last || first > last->index) return {};
        load l;
        const bool is_loading = begin(l, last, first);
        l.settled = !is_loading;
        loads_.emplace(request, std::move(l)); // an empty load too: one lookup for each request
        return {is_loading ? coming::loading : coming::none, 0};
    }
    load &l = it->second;
    if (l.settled) {
        const bool is_next = first >= l.first && first < l.first + l.slots.size();
        if (!is_next) return {};
        return {coming::ready, static_cast<std::uint32_t>(l.first + l.slots.size() - first)};
    }
    poll();
    // The minimum over all ranks decides: one late rank ends the load on all, one waiting rank
    // makes all wait. Otherwise the smallest number of blocks counts, encoded as SOME + blocks.
    constexpr std::uint64_t LATE = 0, NOT_YET = 1, SOME = 2;
    const bool is_late = l.op && clock_ns() > l.deadline_ns;
    const std::uint64_t outcome = agreed(is_late ? LATE : l.op ? NOT_YET : SOME + l.slots.size());
    if (outcome == NOT_YET) return {coming::loading, 0};
    l.settled = true;
    if (outcome == LATE) {
        counts_.late++;
        if (l.op) abandon(l);
    }
    trim(l, outcome == LATE ? 0 : outcome - SOME);
    return resume(request, last, first);
}

void tier::restore(std::uint64_t request, std::uint32_t index, const std::vector<part> &object,
                   std::vector<copy> &restores) {
    const auto it = loads_.find(request);
    if (it == loads_.end() || index < it->second.first) return;
    load &l = it->second;
    const std::size_t at = index - l.first;
    if (!l.settled || at >= l.slots.size() || l.slots[at] == NONE) return;
    if (bytes_of(object) > stride_) return;
    const auto *from = static_cast<const std::uint8_t *>(address(l.slots[at]));
    for (const part &p : object) {
        restores.push_back({from, p.address, p.bytes});
        from += p.bytes;
    }
    restores_.emplace_back(batch_, l.slots[at]);
    l.slots[at] = NONE;
    counts_.restored++;
}

void tier::forget(std::uint64_t request) {
    const auto it = loads_.find(request);
    if (it == loads_.end()) return;
    load &l = it->second;
    if (l.op) abandon(l);
    release(l.slots);
    loads_.erase(it);
}

// --- hints and counters ------------------------------------------------------

void tier::hint(const node_ptr &last, const kvt_policy_hint_t &hint) {
    try {
        kvt::policy_hint h;
        h.stop = hint.stop;
        h.next_use_ns = hint.next_use_ns;
        if (hint.confidence != 0 || (hint.flags & KVT_HINT_ZERO_CONFIDENCE) != 0)
            h.confidence = hint.confidence;
        h.done = (hint.flags & KVT_HINT_DONE) != 0;
        open_session(sequence_of(last)).hint(h);
    } catch (const kvt::exception &) {
        // A lost hint costs nothing but a worse choice of victims.
    }
}

counts tier::count() const {
    counts c = counts_;
    c.slots_in_use = saves_.size() + restores_.size();
    for (const slot_op &s : puts_) c.slots_in_use += s.slots.size();
    for (const slot_op &s : abandoned_) c.slots_in_use += s.slots.size();
    for (const auto &[request, l] : loads_)
        for (const slot_t s : l.slots) c.slots_in_use += s != NONE;
    return c;
}

}  // namespace kvtier_turbomind
