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

/// One layer whose K is a block's object, however the engine divides it: a token is a part of it.
kvt::name_space open_space(const kvt::store &store, const options &opts) {
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
    if (opts.shard_count > 1) id.shard = kvt::shard{opts.shard_index, opts.shard_count};
    // The device may have the beginning of a path of which the store has the end.
    return store.open_name_space(id, layout, KVT_NAMESPACE_HOLES);
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
      store_(kvt::store::open(runtime_, opts.store)), space_(open_space(store_, opts)) {
    if (base_ == nullptr) {
        own_ = runtime_.alloc(std::uint64_t{opts.slots} * stride_);
        base_ = reinterpret_cast<std::uint8_t *>(own_.data());
    }
    // What is behind an object in its slot is stored with it: always the same.
    std::memset(base_, 0, std::size_t{opts.slots} * stride_);
    for (slot_t i = opts.slots; i-- > 0;) free_.push_back(i);
}

tier::~tier() = default; // ops go first, and wait; slots and store after them

kvt::session tier::open_session(const sequence &all) const {
    kvt::session session = space_.open_session();
    if (all.media.empty()) session.append(all.tokens);
    else session.append(all.tokens, all.media);
    return session;
}

void tier::give_back(std::vector<slot_t> &slots) {
    for (const slot_t s : slots)
        if (s != NONE) free_.push_back(s);
    slots.clear();
}

// --- replay ------------------------------------------------------------------

void tier::save(const node_ptr &n, const std::vector<part> &object, std::vector<copy> &saves) {
    if (bytes_of(object) > stride_) { // not what `object_bytes` said
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
    savings_.push_back({n, slot, batch_});
    counts_.saves++;
}

/// Blocks that follow each other in one path, with one call.
void tier::put(const std::vector<saving> &run, kvt::session &session) {
    std::vector<void *> pages;
    storing store;
    for (const saving &s : run) {
        pages.push_back(address(s.slot));
        store.slots.push_back(s.slot);
    }
    const kvt_view_t view = kvt::view(pages, block_tokens_, stride_ / block_tokens_);
    kvt::transfer what;
    what.first_token = std::uint64_t{run.front().what->index} * block_tokens_;
    what.tokens = run.size() * block_tokens_;
    what.k = kvt::span<const kvt_view_t>(&view, 1);
    try {
        store.op = session.put(what);
        storings_.push_back(std::move(store));
    } catch (const kvt::exception &) {
        counts_.not_stored += run.size();
        give_back(store.slots);
    }
}

void tier::completed(std::uint64_t batch) {
    std::vector<saving> done;
    while (!savings_.empty() && savings_.front().batch <= batch) {
        done.push_back(std::move(savings_.front()));
        savings_.pop_front();
    }
    restorings_.erase(std::remove_if(restorings_.begin(), restorings_.end(),
                                     [&](const auto &r) {
                                         if (r.first > batch) return false;
                                         free_.push_back(r.second);
                                         return true;
                                     }),
                      restorings_.end());
    // The deepest first: what else is on its path goes with the same session.
    std::sort(done.begin(), done.end(),
              [](const saving &a, const saving &b) { return a.what->index > b.what->index; });
    std::vector<bool> taken(done.size(), false);
    for (std::size_t i = 0; i < done.size(); i++) {
        if (taken[i]) continue;
        const std::vector<const node *> path = path_of(done[i].what);
        std::vector<saving> mine;
        for (std::size_t j = i; j < done.size(); j++)
            if (!taken[j] && path[done[j].what->index] == done[j].what.get()) {
                taken[j] = true;
                mine.push_back(done[j]);
            }
        std::reverse(mine.begin(), mine.end());
        try {
            kvt::session session = open_session(sequence_of(done[i].what));
            std::vector<saving> run;
            for (const saving &s : mine) {
                if (!run.empty() && run.back().what->index + 1 != s.what->index) {
                    put(run, session);
                    run.clear();
                }
                run.push_back(s);
            }
            put(run, session);
        } catch (const kvt::exception &) { // no session: nothing of it was put
            counts_.not_stored += mine.size();
            for (const saving &s : mine) free_.push_back(s.slot);
        }
    }
}

void tier::poll() {
    const auto is_over = [](const kvt::op &op, kvt_op_info_t *out) {
        *out = KVT_OP_INFO_INIT;
        return kvt_op_info(op.get(), out) != KVT_OK || (out->state & KVT_OP_RELEASED) != 0;
    };
    kvt_op_info_t info;
    for (std::size_t i = storings_.size(); i-- > 0;) {
        storing &s = storings_[i];
        if (!is_over(s.op, &info)) continue;
        const std::uint64_t stored = std::min<std::uint64_t>(info.value / block_tokens_,
                                                             s.slots.size());
        counts_.stored += stored;
        counts_.not_stored += s.slots.size() - stored;
        give_back(s.slots);
        storings_.erase(storings_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (std::size_t i = given_up_.size(); i-- > 0;) {
        if (!is_over(given_up_[i].op, &info)) continue;
        give_back(given_up_[i].slots);
        given_up_.erase(given_up_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (auto &[request, load] : loadings_) {
        if (!load.op || !is_over(load.op, &info)) continue;
        const std::uint64_t came = info.value / block_tokens_;
        counts_.loaded += came;
        counts_.not_loaded += load.slots.size() - came;
        load.op = kvt::op();
        trim(load, came);
    }
}

bool tier::drain(std::uint64_t deadline_ns) {
    for (const storing &s : storings_)
        if (kvt_op_wait(s.op.get(), KVT_OP_RELEASED, deadline_ns) == KVT_E_TIMEOUT) return false;
    poll();
    return true;
}

// --- match -------------------------------------------------------------------

/// How many blocks from `first` on are in the store, one after the other.
std::uint32_t tier::available(const sequence &all, std::uint32_t first) const {
    const kvt::lookup_result found = all.media.empty() ? space_.lookup(all.tokens)
                                                       : space_.lookup(all.tokens, all.media);
    const std::uint64_t from = std::uint64_t{first} * block_tokens_;
    std::uint64_t to = from;
    for (const kvt_range_t &r : found.ranges) {
        if (r.state != KVT_RANGE_HIT && r.state != KVT_RANGE_PENDING) continue;
        if (r.first_token <= to && r.first_token + r.tokens > to) to = r.first_token + r.tokens;
    }
    return static_cast<std::uint32_t>((to - from) / block_tokens_);
}

/// Keeps the first blocks of a load that has come.
void tier::trim(loading &load, std::uint64_t blocks) {
    while (load.slots.size() > blocks) {
        if (load.slots.back() != NONE) free_.push_back(load.slots.back());
        load.slots.pop_back();
    }
}

/// Its slots are free when the store has let go of them.
void tier::give_up(loading &load) {
    (void)kvt_op_cancel(load.op.get());
    given_up_.push_back({std::move(load.op), std::move(load.slots)});
    load.op = kvt::op();
    load.slots.clear();
}

bool tier::begin(loading &load, const node_ptr &last, std::uint32_t first) {
    counts_.asked++;
    load.first = first;
    load.until_ns = clock_ns() + wait_ns_;
    std::uint64_t blocks = 0;
    sequence all;
    try {
        all = sequence_of(last);
        // A part of the slots stays for what leaves meanwhile.
        blocks = std::min<std::uint64_t>(available(all, first), free_.size() - free_.size() / 4);
    } catch (const kvt::exception &) {
        blocks = 0;
    }
    blocks = agreed(blocks);
    if (blocks == 0) return false;
    std::vector<void *> pages;
    for (std::uint64_t i = 0; i < blocks; i++) {
        load.slots.push_back(free_.back());
        pages.push_back(address(free_.back()));
        free_.pop_back();
    }
    const kvt_view_t view = kvt::view(pages, block_tokens_, stride_ / block_tokens_);
    kvt::transfer what;
    what.first_token = std::uint64_t{first} * block_tokens_;
    what.tokens = blocks * block_tokens_;
    what.k = kvt::span<const kvt_view_t>(&view, 1);
    try {
        load.op = open_session(all).get(what);
    } catch (const kvt::exception &) {
        counts_.not_loaded += blocks;
        give_back(load.slots); // settled with nothing; with several ranks all hear of it
    }
    return true;
}

answer tier::resume(std::uint64_t request, const node_ptr &last, std::uint32_t first) {
    const auto it = loadings_.find(request);
    if (it == loadings_.end()) {
        if (!last || first > last->index) return {};
        loading load;
        const bool is_coming = begin(load, last, first);
        load.settled = !is_coming;
        loadings_.emplace(request, std::move(load)); // also "nothing": it is asked once
        return {is_coming ? coming::loading : coming::none, 0};
    }
    loading &load = it->second;
    if (load.settled) {
        const bool is_next = first >= load.first && first < load.first + load.slots.size();
        if (!is_next) return {};
        return {coming::ready, static_cast<std::uint32_t>(load.first + load.slots.size() - first)};
    }
    poll();
    // The least of all ranks counts: one that has waited for too long ends it for all, one that
    // still waits has all wait, then so many blocks.
    constexpr std::uint64_t LATE = 0, NOT_YET = 1, SOME = 2;
    const bool is_late = load.op && clock_ns() > load.until_ns;
    const std::uint64_t said =
        agreed(is_late ? LATE : load.op ? NOT_YET : SOME + load.slots.size());
    if (said == NOT_YET) return {coming::loading, 0};
    load.settled = true;
    if (said == LATE) {
        counts_.late++;
        if (load.op) give_up(load);
    }
    trim(load, said == LATE ? 0 : said - SOME);
    return resume(request, last, first);
}

void tier::restore(std::uint64_t request, std::uint32_t index, const std::vector<part> &object,
                   std::vector<copy> &restores) {
    const auto it = loadings_.find(request);
    if (it == loadings_.end() || index < it->second.first) return;
    loading &load = it->second;
    const std::size_t at = index - load.first;
    if (!load.settled || at >= load.slots.size() || load.slots[at] == NONE) return;
    if (bytes_of(object) > stride_) return;
    const auto *from = static_cast<const std::uint8_t *>(address(load.slots[at]));
    for (const part &p : object) {
        restores.push_back({from, p.address, p.bytes});
        from += p.bytes;
    }
    restorings_.emplace_back(batch_, load.slots[at]);
    load.slots[at] = NONE;
    counts_.restored++;
}

void tier::forget(std::uint64_t request) {
    const auto it = loadings_.find(request);
    if (it == loadings_.end()) return;
    loading &load = it->second;
    if (load.op) give_up(load);
    give_back(load.slots);
    loadings_.erase(it);
}

// --- beside ------------------------------------------------------------------

void tier::hint(const node_ptr &last, const kvt_policy_hint_t &told) {
    try {
        kvt::policy_hint c;
        c.stop = told.stop;
        c.next_use_ns = told.next_use_ns;
        c.confidence = (told.flags & KVT_HINT_ZERO_CONFIDENCE) != 0 ? told.confidence : 1;
        c.done = (told.flags & KVT_HINT_DONE) != 0;
        open_session(sequence_of(last)).hint(c);
    } catch (const kvt::exception &) {
        // A hint is a hint.
    }
}

counts tier::count() const {
    counts c = counts_;
    c.slots_in_use = savings_.size() + restorings_.size();
    for (const storing &s : storings_) c.slots_in_use += s.slots.size();
    for (const storing &s : given_up_) c.slots_in_use += s.slots.size();
    for (const auto &[request, load] : loadings_)
        for (const slot_t s : load.slots) c.slots_in_use += s != NONE;
    return c;
}

}  // namespace kvtier_turbomind
