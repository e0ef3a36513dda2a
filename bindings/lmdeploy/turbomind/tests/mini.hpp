// A miniature of TurboMind's engine: objects in one memory region, blocks with timestamps, a prefix
// trie, a scheduler that plans, evicts and replays, and an executor thread that runs copies and
// kernels in order. Names are those of turbomind.md; lines marked [kvtier] are the patch. A kernel
// computes content from tokens, and compares every byte of its context.

#ifndef KVTIER_TURBOMIND_MINI_HPP
#define KVTIER_TURBOMIND_MINI_HPP

#include <kvtier/turbomind.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace mini {

constexpr int BLOCK = 4;         // tokens of a block
constexpr int TOKEN_BYTES = 50;  // bytes of a token in a block's object
constexpr int TAIL_BYTES = 3;    // padding, so that an object's size is no multiple of its tokens
constexpr std::size_t OBJECT_BYTES = BLOCK * TOKEN_BYTES + TAIL_BYTES;

struct LogicalBlock;

/// Allocates objects of one size from one region.
class ObjectAllocator {
public:
    explicit ObjectAllocator(int count);
    int free_count() const { return static_cast<int>(free_.size()); }
    char *Allocate();
    void Deallocate(char *base);
    bool owns(const void *at) const;

private:
    std::vector<char> region_;
    std::vector<char *> free_;
};

struct CacheBlock {
    std::uint64_t timestamp = 0;
    char *base = nullptr;
    LogicalBlock *owner = nullptr;
    std::shared_ptr<LogicalBlock> pin;  // keeps the logical block alive while it has memory
    bool valid() const { return base != nullptr; }
};

struct LogicalBlock : std::enable_shared_from_this<LogicalBlock> {
    int offset = 0;
    int size = 0;  // tokens; set when the block is indexed
    const LogicalBlock *parent = nullptr;
    std::uint64_t key = 0;
    std::vector<int> tokens;
    bool indexed = false, is_valid = false;
    std::uint64_t producer = 0;
    CacheBlock prefix;
    std::function<void(LogicalBlock &)> recycle;
    ~LogicalBlock() {
        if (recycle) recycle(*this);
    }
};

class PrefixTrie {
public:
    LogicalBlock *Find(const LogicalBlock *parent, std::uint64_t key, const int *tokens) const;
    bool Insert(LogicalBlock &b);
    void Erase(LogicalBlock &b);

private:
    std::unordered_map<std::uint64_t, LogicalBlock *> index_;
};

struct Sequence {
    std::uint64_t id = 0;
    std::vector<int> tokens;
    int prompt = 0, want = 0;  // tokens of the prompt, tokens to generate
    int filled = 0, resume_len = 0, input_len = 0, inflight = 0;
    int restore_first = 0, restore_count = 0;  // [kvtier] blocks to restore in this pass
    bool active = false, waits = false, done = false;
    std::vector<std::shared_ptr<LogicalBlock>> blocks;
    std::vector<LogicalBlock *> alloc, involved;
};

struct BatchData {
    struct work {
        std::vector<int> tokens;  // context and input
        std::vector<char *> blocks;
        int first, end;
    };
    std::vector<kvtier_turbomind::copy> saves, restores;
    std::vector<work> kernels;
    std::uint64_t ticket = 0;
    std::vector<Sequence *> sequences;
    bool stop = false;
};

/// Runs batches in order on its own thread. `wrong` counts context bytes with unexpected values.
class ModelExecutor {
public:
    explicit ModelExecutor(const ObjectAllocator &device);
    ~ModelExecutor();
    void submit(std::unique_ptr<BatchData> batch);
    std::unique_ptr<BatchData> completed(bool wait);
    std::uint64_t wrong() const { return wrong_; }
    std::uint64_t compared() const { return compared_; }

private:
    void run();
    void copy_all(const std::vector<kvtier_turbomind::copy> &copies);
    void kernel(const BatchData::work &work);
    const ObjectAllocator &device_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::unique_ptr<BatchData>> in_, out_;
    std::atomic<std::uint64_t> wrong_{0}, compared_{0};
    std::thread thread_;
};

class Scheduler {
public:
    Scheduler(int objects, kvtier_turbomind::adapter *tier);
    ~Scheduler();
    void AdmitPrompt(Sequence &s);
    /// Fills a batch; false if no request can run.
    bool Schedule(const std::vector<Sequence *> &requests, int most_input, BatchData &batch);
    void Finalize(Sequence &s);
    void Release(Sequence &s);
    ObjectAllocator &device() { return alloc_; }

    std::int64_t now_ns = 0;  // [kvtier] equal on all ranks
    std::uint64_t computed = 0, reused = 0, restored = 0, evictions = 0;

private:
    struct Pass;
    void PlanResume(Sequence &s);
    void PlanContinue(Sequence &s);
    void RunRequiredAdmission(Pass &pass, int most_input);
    void ReplayMemory(Pass &pass, BatchData &batch);
    void CommitResults(Pass &pass, BatchData &batch);
    void EnsureBlocks(Sequence &s);
    bool index(LogicalBlock &b, const LogicalBlock *parent, std::uint64_t key, const int *tokens);
    std::shared_ptr<LogicalBlock> Create(int number);
    void Deallocate(LogicalBlock &b);
    std::vector<LogicalBlock *> SortedBlocks(std::uint64_t floor, std::uint64_t needed);
    std::uint64_t Stamp(const std::vector<LogicalBlock *> &blocks);
    bool foreign_producer(const Sequence &s, int first, int end) const;

    kvtier_turbomind::adapter *tier_;
    ObjectAllocator alloc_;
    PrefixTrie trie_;
    std::unordered_set<LogicalBlock *> allocated_;
    std::uint64_t next_timestamp_ = 1;
};

/// Byte `i` of a token's KV; `mark` is the hash of all tokens up to it.
std::uint8_t content(std::uint64_t mark, int i);
/// Extends the hash of a token sequence by one token.
std::uint64_t extend(std::uint64_t mark, int token);

}  // namespace mini

#endif  // KVTIER_TURBOMIND_MINI_HPP
