#include "mini.hpp"

#include <algorithm>
#include <cstring>

namespace mini {

static std::uint64_t mix(std::uint64_t x) {
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

std::uint64_t extend(std::uint64_t mark, int token) {
    return mix(mark ^ static_cast<std::uint64_t>(token));
}
std::uint8_t content(std::uint64_t mark, int i) {
    return static_cast<std::uint8_t>(mix(mark + static_cast<std::uint64_t>(i)));
}

// --- memory ------------------------------------------------------------------

ObjectAllocator::ObjectAllocator(int count)
    : region_(OBJECT_BYTES * static_cast<std::size_t>(count)) {
    for (std::size_t i = region_.size(); i > 0; i -= OBJECT_BYTES)
        free_.push_back(&region_[i - OBJECT_BYTES]);
}
char *ObjectAllocator::Allocate() {
    if (free_.empty()) return nullptr;
    char *base = free_.back();
    free_.pop_back();
    return base;
}
void ObjectAllocator::Deallocate(char *base) { free_.push_back(base); }
bool ObjectAllocator::owns(const void *at) const {
    const auto *p = static_cast<const char *>(at);
    return p >= region_.data() && p + OBJECT_BYTES <= region_.data() + region_.size();
}

// --- trie --------------------------------------------------------------------

LogicalBlock *PrefixTrie::Find(const LogicalBlock *parent, std::uint64_t key,
                               const int *tokens) const {
    const auto it = index_.find(key);
    if (it == index_.end()) return nullptr;
    LogicalBlock *b = it->second;
    const bool is_equal = b->parent == parent && b->size == BLOCK &&
                          std::equal(b->tokens.begin(), b->tokens.end(), tokens);
    return is_equal ? b : nullptr;
}
bool PrefixTrie::Insert(LogicalBlock &b) { return b.indexed = index_.emplace(b.key, &b).second; }
void PrefixTrie::Erase(LogicalBlock &b) {
    if (b.indexed) index_.erase(b.key);
}

// --- executor ----------------------------------------------------------------

ModelExecutor::ModelExecutor(const ObjectAllocator &device)
    : device_(device), thread_([this] { run(); }) {}

ModelExecutor::~ModelExecutor() {
    auto last = std::make_unique<BatchData>();
    last->stop = true;
    submit(std::move(last));
    thread_.join();
}

void ModelExecutor::submit(std::unique_ptr<BatchData> batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_.push_back(std::move(batch));
    changed_.notify_all();
}

std::unique_ptr<BatchData> ModelExecutor::completed(bool wait) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wait) changed_.wait(lock, [this] { return !out_.empty(); });
    if (out_.empty()) return nullptr;
    auto batch = std::move(out_.front());
    out_.pop_front();
    return batch;
}

void ModelExecutor::run() {
    for (;;) {
        std::unique_ptr<BatchData> batch;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return !in_.empty(); });
            batch = std::move(in_.front());
            in_.pop_front();
        }
        if (batch->stop) return;
        copy_all(batch->saves);     // [kvtier] before this batch reuses the memory
        copy_all(batch->restores);  // [kvtier] before kPrepare
        for (const BatchData::work &work : batch->kernels) kernel(work);
        const std::lock_guard<std::mutex> lock(mutex_);
        out_.push_back(std::move(batch));
        changed_.notify_all();
    }
}

void ModelExecutor::copy_all(const std::vector<kvtier_turbomind::copy> &copies) {
    for (const auto &c : copies) std::memcpy(c.dst, c.src, c.bytes);
}

/// Compares the KV of the context, and writes the KV of the input.
void ModelExecutor::kernel(const BatchData::work &work) {
    std::uint64_t mark = 7;
    for (int t = 0; t < work.end; t++) {
        mark = extend(mark, work.tokens[static_cast<std::size_t>(t)]);
        char *base = work.blocks[static_cast<std::size_t>(t / BLOCK)];
        if (!device_.owns(base)) {
            wrong_++;
            return;
        }
        const bool is_last = t % BLOCK == BLOCK - 1;
        char *at = base + t % BLOCK * TOKEN_BYTES;
        for (int i = 0; i < TOKEN_BYTES + (is_last ? TAIL_BYTES : 0); i++) {
            const auto want = static_cast<char>(content(mark, i));
            if (t >= work.first) {
                at[i] = want;
            } else {
                wrong_ += at[i] != want;
                compared_++;
            }
        }
    }
}

}  // namespace mini
