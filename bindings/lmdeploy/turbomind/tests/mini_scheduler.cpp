#include "mini.hpp"

#include <algorithm>
#include <cassert>
#include <limits>

namespace mini {

using kvtier_turbomind::coming;
using kvtier_turbomind::part;

struct Scheduler::Pass {
    struct replay {
        LogicalBlock *block;
        bool evict;
    };
    std::vector<Sequence *> requests;
    std::vector<std::uint64_t> cutoff;
    std::uint64_t floor = 0;
    std::vector<replay> ops;
    std::vector<Sequence *> committed;
};

namespace {
part object_of(const LogicalBlock &b) { return {b.prefix.base, OBJECT_BYTES}; }
}  // namespace

Scheduler::Scheduler(int objects, kvtier_turbomind::adapter *tier) : tier_(tier), alloc_(objects) {}

Scheduler::~Scheduler() {
    while (!allocated_.empty()) Deallocate(**allocated_.begin());
}

std::shared_ptr<LogicalBlock> Scheduler::Create(int number) {
    auto b = std::make_shared<LogicalBlock>();
    b->offset = number * BLOCK;
    b->recycle = [this](LogicalBlock &x) {
        trie_.Erase(x);
        if (tier_) tier_->recycled(&x);  // [kvtier]
    };
    return b;
}

bool Scheduler::index(LogicalBlock &b, const LogicalBlock *parent, std::uint64_t key,
                      const int *tokens) {
    b.key = key;
    if (!trie_.Insert(b)) return false;
    b.parent = parent;
    b.size = BLOCK;
    b.tokens.assign(tokens, tokens + BLOCK);
    if (tier_) tier_->indexed(&b, parent, tokens, BLOCK);  // [kvtier]
    return true;
}

void Scheduler::Deallocate(LogicalBlock &b) {
    alloc_.Deallocate(b.prefix.base);
    b.prefix.base = nullptr;
    b.prefix.timestamp = 0;
    b.is_valid = false;
    allocated_.erase(&b);
    const auto last = std::move(b.prefix.pin);  // may recycle the block
}

std::uint64_t Scheduler::Stamp(const std::vector<LogicalBlock *> &blocks) {
    const std::uint64_t before = next_timestamp_;
    for (auto it = blocks.rbegin(); it != blocks.rend(); ++it)
        (*it)->prefix.timestamp = next_timestamp_++;
    return before;
}

std::vector<LogicalBlock *> Scheduler::SortedBlocks(std::uint64_t floor, std::uint64_t needed) {
    std::vector<kvtier_turbomind::candidate> all;
    for (LogicalBlock *b : allocated_) all.push_back({b, b->prefix.timestamp, b});
    if (tier_) {
        tier_->sort(all, floor, needed);  // [kvtier]
    } else {
        std::sort(all.begin(), all.end(),
                  [](const auto &a, const auto &b) { return a.timestamp < b.timestamp; });
    }
    std::vector<LogicalBlock *> sorted;
    for (const auto &c : all) sorted.push_back(static_cast<LogicalBlock *>(c.handle));
    return sorted;
}

void Scheduler::AdmitPrompt(Sequence &s) {
    const LogicalBlock *parent = nullptr;
    std::uint64_t key = 7;
    bool is_matching = true;
    std::vector<kvtier_turbomind::block_t> path;
    for (int i = 0; (i + 1) * BLOCK <= s.prompt; i++) {
        const int *tokens = &s.tokens[static_cast<std::size_t>(i * BLOCK)];
        std::uint64_t next = key;
        for (int t = 0; t < BLOCK; t++) next = extend(next, tokens[t]);
        LogicalBlock *b = is_matching ? trie_.Find(parent, next, tokens) : nullptr;
        if (b) {
            s.blocks.push_back(b->shared_from_this());
        } else {
            is_matching = false;
            s.blocks.push_back(Create(i));
            b = s.blocks.back().get();
            if (!index(*b, parent, next, tokens)) break;  // private from here on
        }
        path.push_back(b);
        parent = b;
        key = next;
    }
    if (tier_) tier_->used(path);  // [kvtier]
}

void Scheduler::EnsureBlocks(Sequence &s) {
    const int needed = (static_cast<int>(s.tokens.size()) + BLOCK - 1) / BLOCK;
    while (static_cast<int>(s.blocks.size()) < needed)
        s.blocks.push_back(Create(static_cast<int>(s.blocks.size())));
}

void Scheduler::PlanContinue(Sequence &s) {
    EnsureBlocks(s);
    s.alloc.clear();
    s.involved.clear();
    for (const auto &b : s.blocks) {
        s.involved.push_back(b.get());
        if (!b->prefix.valid()) s.alloc.push_back(b.get());
    }
}

void Scheduler::PlanResume(Sequence &s) {
    PlanContinue(s);
    const int upper = static_cast<int>(s.tokens.size()) - 1;
    int end = 0;
    for (const auto &b : s.blocks) {
        if (!b->is_valid || !b->prefix.valid()) break;
        const int extent = b->indexed ? b->size : std::clamp(s.filled - b->offset, 0, BLOCK);
        end = b->offset + extent;
        if (extent < BLOCK) break;
    }
    s.resume_len = std::min(end, upper);
    s.restore_first = s.restore_count = 0;
    s.waits = false;
    if (!tier_ || s.resume_len % BLOCK != 0) return;
    // [kvtier] Look up the blocks that the device does not have in the store.
    const int first = s.resume_len / BLOCK;
    int last = first - 1;
    while (last + 1 < static_cast<int>(s.blocks.size()) &&
           s.blocks[static_cast<std::size_t>(last + 1)]->indexed && (last + 2) * BLOCK <= upper)
        last++;
    if (last < first) return;
    const auto answer = tier_->resume(s.id, s.blocks[static_cast<std::size_t>(last)].get(),
                                      static_cast<std::uint32_t>(first));
    s.waits = answer.state == coming::loading;
    if (answer.state != coming::ready) return;
    s.restore_first = first;
    s.restore_count = std::min(static_cast<int>(answer.blocks), last + 1 - first);
    s.resume_len = (first + s.restore_count) * BLOCK;
}

bool Scheduler::foreign_producer(const Sequence &s, int first, int end) const {
    for (int i = first / BLOCK; i < (end + BLOCK - 1) / BLOCK; i++) {
        const std::uint64_t producer = s.blocks[static_cast<std::size_t>(i)]->producer;
        if (producer != 0 && producer != s.id) return true;
    }
    return false;
}

void Scheduler::RunRequiredAdmission(Pass &pass, int most_input) {
    std::uint64_t needed = 0;
    for (const Sequence *s : pass.requests)
        if (!s->inflight && !s->waits) needed += s->alloc.size();
    const std::vector<LogicalBlock *> sorted = SortedBlocks(pass.floor, needed);
    std::size_t cursor = 0;
    int free = alloc_.free_count();
    std::uint64_t latest = 0;  // highest timestamp of the evicted blocks
    std::unordered_set<LogicalBlock *> planned;
    for (std::size_t i = 0; i < pass.requests.size(); i++) {
        Sequence &s = *pass.requests[i];
        if (latest >= pass.cutoff[i]) break;  // a more urgent request evicted blocks of this one
        const int length = static_cast<int>(s.tokens.size());
        int end = std::min(length, s.resume_len + most_input);
        if (end < length) end = end / BLOCK * BLOCK;
        if (s.inflight || s.waits || end <= s.resume_len) continue;
        const int from = s.restore_count > 0 ? s.restore_first * BLOCK : s.resume_len;
        if (foreign_producer(s, from, end)) continue;
        const std::size_t mark = pass.ops.size(), cursor_before = cursor;
        const int free_before = free;
        bool ok = true;
        std::vector<LogicalBlock *> now;
        for (LogicalBlock *b : s.alloc) {
            if (b->prefix.valid() || planned.count(b)) continue;
            if (free == 0 && cursor < sorted.size() &&
                sorted[cursor]->prefix.timestamp < pass.cutoff[i]) {
                pass.ops.push_back({sorted[cursor++], true});
                free++;
            }
            ok = free > 0;
            if (!ok) break;
            free--;
            planned.insert(b);
            now.push_back(b);
            pass.ops.push_back({b, false});
        }
        if (!ok) {
            for (LogicalBlock *b : now) planned.erase(b);
            pass.ops.resize(mark);
            cursor = cursor_before;
            free = free_before;
            break;
        }
        for (std::size_t at = mark; at < pass.ops.size(); at++)
            if (pass.ops[at].evict)
                latest = std::max(latest, pass.ops[at].block->prefix.timestamp);
        s.input_len = end - s.resume_len;
        for (int b = from / BLOCK; b < (end + BLOCK - 1) / BLOCK; b++)
            s.blocks[static_cast<std::size_t>(b)]->producer = s.id;
        pass.committed.push_back(&s);
    }
}

void Scheduler::ReplayMemory(Pass &pass, BatchData &batch) {
    for (const Pass::replay &op : pass.ops) {
        LogicalBlock &b = *op.block;
        if (op.evict) {
            if (tier_)  // [kvtier] copy to a slot before the memory is reused
                tier_->evicted(&b, b.indexed && b.is_valid, {object_of(b)}, batch.saves);
            evictions++;
            Deallocate(b);
        } else {
            b.prefix.base = alloc_.Allocate();
            assert(b.prefix.base != nullptr);
            b.prefix.pin = b.shared_from_this();
            allocated_.insert(&b);
        }
    }
}

void Scheduler::CommitResults(Pass &pass, BatchData &batch) {
    for (Sequence *s : pass.committed) {
        const int end = s->resume_len + s->input_len;
        for (int i = s->restore_first; i < s->restore_first + s->restore_count; i++) {  // [kvtier]
            LogicalBlock &b = *s->blocks[static_cast<std::size_t>(i)];
            if (!b.is_valid)
                tier_->restore(s->id, static_cast<std::uint32_t>(i), {object_of(b)},
                               batch.restores);
        }
        if (tier_) tier_->forget(s->id);  // [kvtier] frees the slots of the rest
        restored += static_cast<std::uint64_t>(s->restore_count);
        reused += static_cast<std::uint64_t>(std::max(0, s->resume_len - s->filled));
        computed += static_cast<std::uint64_t>(s->input_len);
        BatchData::work work;
        work.tokens.assign(s->tokens.begin(), s->tokens.begin() + end);
        work.first = s->resume_len;
        work.end = end;
        for (const auto &b : s->blocks) {
            work.blocks.push_back(b->prefix.base);
            if (b->producer == s->id) b->producer = 0;
            if (b->offset >= end || (b->indexed && b->offset + b->size > end)) continue;
            const bool is_new = !b->is_valid;
            b->is_valid = true;
            if (tier_ && is_new && b->indexed) tier_->produced(b.get());  // [kvtier]
        }
        batch.kernels.push_back(std::move(work));
        s->filled = end;
        s->inflight = 1;
        batch.sequences.push_back(s);
    }
}

bool Scheduler::Schedule(const std::vector<Sequence *> &requests, int most_input,
                         BatchData &batch) {
    Pass pass;
    pass.requests = requests;
    std::sort(pass.requests.begin(), pass.requests.end(),
              [](const Sequence *a, const Sequence *b) { return a->id < b->id; });
    if (tier_) tier_->begin_pass(now_ns);  // [kvtier]
    for (Sequence *s : pass.requests) {
        if (s->inflight) PlanContinue(*s);
        else PlanResume(*s);
    }
    pass.cutoff.resize(pass.requests.size());
    pass.floor = next_timestamp_;
    for (std::size_t i = pass.requests.size(); i-- > 0;)
        pass.cutoff[i] = Stamp(pass.requests[i]->involved);
    for (const Sequence *s : pass.requests)
        if (s->inflight) (void)Stamp(s->involved);
    RunRequiredAdmission(pass, most_input);
    ReplayMemory(pass, batch);
    CommitResults(pass, batch);
    if (tier_) batch.ticket = tier_->submitted();  // [kvtier]
    return !pass.committed.empty();
}

void Scheduler::Finalize(Sequence &s) {
    const LogicalBlock *parent = nullptr;
    std::uint64_t key = 7;
    for (const auto &b : s.blocks) {
        if (b->offset + BLOCK > s.filled || !b->is_valid || !b->prefix.valid()) break;
        const int *tokens = &s.tokens[static_cast<std::size_t>(b->offset)];
        std::uint64_t next = key;
        for (int t = 0; t < BLOCK; t++) next = extend(next, tokens[t]);
        if (!b->indexed) {
            if (!index(*b, parent, next, tokens)) break;
            if (tier_) tier_->produced(b.get());  // [kvtier]
        }
        parent = b.get();
        key = next;
    }
    if (!tier_ || parent == nullptr) return;
    kvt_policy_hint_t hint = KVT_POLICY_HINT_INIT;  // [kvtier]
    hint.stop = KVT_STOP_END_TURN;
    tier_->hint(parent, hint);
}

void Scheduler::Release(Sequence &s) {
    if (tier_) tier_->forget(s.id);  // [kvtier]
    for (const auto &b : s.blocks)
        if (!b->indexed && b->prefix.valid()) Deallocate(*b);
    s.blocks.clear();
}

}  // namespace mini
