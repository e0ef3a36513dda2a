// kvtier for TurboMind: the interface that the scheduler of a C++ engine calls. It does not depend
// on the engine.
//
// Three extension points (turbomind.md shows where the engine calls them):
//   evicted  copies a block that the device evicts to a staging slot, and from there to the store
//   resume   looks up blocks that are not on the device in the store, and restores them
//   sort     orders the device's eviction candidates by a policy
//
// Call everything from one thread, the engine's. Only `drain` and the destructor wait.
// The constructor throws kvt::exception. A later failure behaves as without a store: the block is
// dropped and computed again.

#ifndef KVTIER_TURBOMIND_HPP
#define KVTIER_TURBOMIND_HPP

#include <kvtier/kvtier.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace kvtier_turbomind {

/// Identifies a block: the address of the engine's LogicalBlock. Never dereferenced.
using block_t = const void *;

/// Memory of a block's cache object; a composite object has several parts.
struct part {
    void *address;
    std::size_t bytes;
};

/// A copy for the executor. It must run all saves of a batch, then its restores, then its kernels.
struct copy {
    const void *src;
    void *dst;
    std::size_t bytes;
};

struct options {
    /// Spec of the store; empty: no store, eviction order only.
    std::string store = "store(host=8GiB)";
    /// Spec of the device's eviction policy; empty: order by timestamps, as the engine does.
    std::string order = "lru";
    /// Tokens of a block, at least 1.
    std::uint32_t block_tokens = 64;
    /// Bytes of a block's cache object with all parts, at least 1.
    std::size_t object_bytes = 0;
    /// Objects that fit on the device: the policy's capacity (arc and others need it).
    std::uint64_t device_objects = 0;
    /// Staging slots in host memory, `slot_bytes` each, at least 1: blocks in transfer at a time.
    std::uint32_t slots = 64;
    /// `slots * slot_bytes(...)` bytes for the slots; null: the adapter allocates them. Copies to
    /// pinned memory are faster. The memory must outlive the adapter.
    void *slot_memory = nullptr;
    /// Identity of the stored KV: only equal identities share KV.
    std::string model, weights, lora, salt, recipe;
    std::uint32_t shard_index = 0, shard_count = 1;
    /// Nanoseconds that a request waits for its load; then it computes. Default 2 s.
    std::uint64_t wait_ns = 2000000000;
    /// Entries of the eviction log.
    std::uint64_t log_entries = 1024;
    /// Most ops of the store at a time; 0: the runtime's default.
    std::uint32_t max_ops = 0;
    /// Spec of injected faults of the runtime, for tests.
    std::string faults;
    /// Needed with several ranks: returns the minimum over all ranks. All ranks call it in the same
    /// order. It makes ranks schedule alike although their stores may differ.
    std::function<std::uint64_t(std::uint64_t)> agree;
};

/// Distance in bytes between two slots.
std::size_t slot_bytes(const options &opts);

/// A block with memory on the device: a candidate for eviction.
struct candidate {
    /// Its logical block; null without an owner.
    block_t block;
    std::uint64_t timestamp;
    /// The engine's own value; the adapter only passes it through.
    void *handle;
};

enum class coming {
    /// The store has none of the blocks: compute them.
    none,
    /// The load is in progress: skip the request in this pass, and call `resume` in the next one.
    loading,
    /// `blocks` blocks are loaded: restore them if the request is admitted.
    ready,
};
struct answer {
    coming state = coming::none;
    std::uint32_t blocks = 0;
};

/// Counters since the start.
struct counts {
    std::uint64_t saves = 0;          // copies of blocks to slots
    std::uint64_t stored = 0;         // blocks written to the store
    std::uint64_t not_stored = 0;     // blocks that the store rejected or failed to write
    std::uint64_t no_slot = 0;        // blocks dropped because no slot was free
    std::uint64_t asked = 0;          // requests that were looked up
    std::uint64_t loaded = 0;         // blocks loaded from the store
    std::uint64_t not_loaded = 0;     // blocks that the lookup found but the load did not return
    std::uint64_t late = 0;           // requests that exceeded wait_ns
    std::uint64_t restored = 0;       // blocks copied back to the device
    std::uint64_t slots_in_use = 0;   // at present
};

class adapter {
public:
    explicit adapter(const options &opts);
    /// Cancels transfers in progress and waits for them. Stored blocks stay stored.
    ~adapter();
    adapter(const adapter &) = delete;
    adapter &operator=(const adapter &) = delete;

    // --- content of blocks ---------------------------------------------------
    /// A full block entered the trie after `parent` (null: first block). `media`: the images that
    /// start in this block, with token positions relative to its first token.
    void indexed(block_t block, block_t parent, const int *tokens, std::size_t count,
                 const kvt_media_t *media = nullptr, std::size_t media_count = 0);
    /// The engine recycled a block: a new block may get the same address.
    void recycled(block_t block);

    // --- passes --------------------------------------------------------------
    /// Begins a scheduling pass. `now_ns` must be equal on all ranks; 0: the rank's own clock.
    void begin_pass(std::int64_t now_ns = 0);

    // --- eviction order ------------------------------------------------------
    /// A request accesses these blocks; `path` begins with its first block.
    void used(const std::vector<block_t> &path, const kvt_policy_context_t *context = nullptr);
    /// The block's content is on the device for all later work of the executor.
    void produced(block_t block);
    /// Sorts at least `needed` victims to the front, in eviction order. Blocks with a timestamp of
    /// at least `floor` are in use: they come last, ordered by timestamp.
    void sort(std::vector<candidate> &all, std::uint64_t floor, std::uint64_t needed);
    /// Replaces the device's policy and keeps its objects. On failure returns false and sets `why`.
    bool set_order(const std::string &spec, std::string *why = nullptr);
    /// Replaces the policy of the store's tier KVT_TIER_HOST or KVT_TIER_DISK.
    bool set_store_policy(std::uint32_t tier, const std::string &spec, std::string *why = nullptr);
    /// Passes a hint about the future use of the path that ends with block `last`.
    void hint(block_t last, const kvt_policy_hint_t &hint,
              const kvt_policy_context_t *context = nullptr);
    /// Evictions from the device, from entry number `from` on.
    std::vector<kvt_policy_log_entry_t> evictions(std::uint64_t from = 0) const;
    /// Batch size that the policy recommends; `batch` is the present one.
    std::uint64_t advise(std::uint64_t batch) const;
    kvt_policy_stats_t order_stats() const;

    // --- replay: save evicted blocks -----------------------------------------
    /// Call before a block's object is deallocated. If its content is `valid` and a slot is free,
    /// adds the copies to that slot to `saves`.
    void evicted(block_t block, bool valid, const std::vector<part> &object,
                 std::vector<copy> &saves);

    // --- match: load stored blocks -------------------------------------------
    /// Looks up blocks number `first` to `last` of a request's path, and loads them. The first call
    /// for a request starts the load; later calls report its state.
    answer resume(std::uint64_t request, block_t last, std::uint32_t first);
    /// Call once for each block of a `ready` answer when the request was admitted and the block has
    /// memory: adds the copies into block number `index` to `restores`. Otherwise call `forget`.
    void restore(std::uint64_t request, std::uint32_t index, const std::vector<part> &object,
                 std::vector<copy> &restores);
    /// Cancels the request's load and frees its slots.
    void forget(std::uint64_t request);

    // --- batches -------------------------------------------------------------
    /// Call when a batch is submitted: returns the number of the batch that has the copies since
    /// the last call.
    std::uint64_t submitted();
    /// Call when a batch has run: puts its saved blocks into the store, and frees restored slots.
    void completed(std::uint64_t batch);

    /// Waits until all puts have ended; false at the deadline (CLOCK_MONOTONIC).
    bool drain(std::uint64_t deadline_ns);
    counts count() const;
    kvt_store_stats_t store_stats() const;
    /// Metrics of the store in Prometheus' text format.
    std::string metrics() const;

private:
    struct impl;
    std::unique_ptr<impl> impl_;
};

}  // namespace kvtier_turbomind

#endif  // KVTIER_TURBOMIND_HPP
