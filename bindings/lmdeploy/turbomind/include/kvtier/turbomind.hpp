// kvtier for TurboMind: what the scheduler of a C++ engine calls, and nothing of the engine itself.
//
// Three seams (turbomind.md says where they lie):
//   evict    a block that leaves the device is copied to a slot, and from there into the store
//   resume   blocks that the device does not have are looked for in the store, and restored
//   sort     a policy says in which order blocks leave the device
//
// One thread, the engine's, calls everything; nothing here waits but `drain` and the destructor.
// What goes wrong after the constructor degrades to what the engine does without a tier: blocks are
// dropped and computed again. The constructor throws kvt::exception.

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

/// A block as the engine knows it: the address of its LogicalBlock. Never followed.
using block_t = const void *;

/// Memory of a block's cache object; several where the object is a composite.
struct part {
    void *address;
    std::size_t bytes;
};

/// A copy that the executor is to run, in its order: all saves of a batch, then its restores, then
/// its kernels.
struct copy {
    const void *src;
    void *dst;
    std::size_t bytes;
};

struct options {
    /// The store's spec; empty: no store, victims alone.
    std::string store = "store(host=8GiB)";
    /// The policy of victims on the device; empty: the engine's own order.
    std::string order = "lru";
    std::uint32_t block_tokens = 64;
    /// Bytes of a block's cache object, all parts.
    std::size_t object_bytes = 0;
    /// How many objects the device has room for: policies such as arc want to know.
    std::uint64_t device_objects = 0;
    /// Blocks on their way: this many times `object_bytes` of host memory.
    std::uint32_t slots = 64;
    /// Where slots are; null: own memory. Pinned memory of the engine's is faster to copy to, and
    /// must stay until the adapter is gone. `slots * slot_bytes(...)` bytes.
    void *slot_memory = nullptr;
    /// Who may share what is stored.
    std::string model, weights, lora, salt, recipe;
    std::uint32_t shard_index = 0, shard_count = 1;
    /// How long a request waits for blocks that come, before it computes them after all.
    std::uint64_t wait_ns = 2000000000;
    /// Entries of the eviction log.
    std::uint64_t log_entries = 1024;
    /// Ops of the store at a time; 0: as many as the runtime has by default.
    std::uint32_t max_ops = 0;
    /// Planted faults of the runtime, for tests.
    std::string faults;
    /// With several ranks: the least of what all ranks give, in the same order of calls on each.
    /// Ranks must schedule alike, and their stores need not have the same.
    std::function<std::uint64_t(std::uint64_t)> agree;
};

/// Bytes from a slot to the next.
std::size_t slot_bytes(const options &opts);

/// A block with memory on the device, to be sorted.
struct candidate {
    /// Its logical block; null when it is nobody's.
    block_t block;
    std::uint64_t timestamp;
    /// The engine's, not looked at.
    void *handle;
};

enum class coming {
    /// Compute it.
    none,
    /// Not in this pass; ask again in the next one.
    loading,
    /// `blocks` of them are to be restored, if the request is admitted.
    ready,
};
struct answer {
    coming state = coming::none;
    std::uint32_t blocks = 0;
};

/// Numbers since the start.
struct counts {
    std::uint64_t saves = 0;          // copies to slots that were asked for
    std::uint64_t stored = 0;         // blocks that the store took
    std::uint64_t not_stored = 0;     // and those that it did not take
    std::uint64_t no_slot = 0;        // evicted while all slots were in use
    std::uint64_t asked = 0;          // requests that asked
    std::uint64_t loaded = 0;         // blocks that came from the store
    std::uint64_t not_loaded = 0;     // were there at the lookup, and did not come
    std::uint64_t late = 0;           // requests that waited for too long
    std::uint64_t restored = 0;       // blocks that were copied back to the device
    std::uint64_t slots_in_use = 0;   // now
};

class adapter {
public:
    explicit adapter(const options &opts);
    /// Cancels what is on its way and waits for it; what the store has taken stays.
    ~adapter();
    adapter(const adapter &) = delete;
    adapter &operator=(const adapter &) = delete;

    // --- what blocks are -----------------------------------------------------
    /// A full block entered the trie behind `parent` (null: the first one). `media` are images that
    /// start in it, their tokens counted from the block's first one.
    void indexed(block_t block, block_t parent, const int *tokens, std::size_t count,
                 const kvt_media_t *media = nullptr, std::size_t media_count = 0);
    /// A block is recycled: its address may come again as another one.
    void recycled(block_t block);

    // --- passes --------------------------------------------------------------
    /// A pass begins. With several ranks the same time on all of them; 0: each its own clock.
    void begin_pass(std::int64_t now_ns = 0);

    // --- who leaves ----------------------------------------------------------
    /// A request goes through these blocks, from the first one on.
    void used(const std::vector<block_t> &path, const kvt_policy_context_t *who = nullptr);
    /// The content of a block is on the device from here on, in the executor's order.
    void produced(block_t block);
    /// Puts first who is to leave first, at least `needed` of them. Blocks with a timestamp of
    /// `floor` and more are in use: they stay behind all others, in the order of their timestamps.
    void sort(std::vector<candidate> &all, std::uint64_t floor, std::uint64_t needed);
    /// Goes on with another policy; the objects stay known. False, and `why`, when there is none.
    bool set_order(const std::string &spec, std::string *why = nullptr);
    /// The same for KVT_TIER_HOST or KVT_TIER_DISK of the store.
    bool set_store_policy(std::uint32_t tier, const std::string &spec, std::string *why = nullptr);
    /// What is known of the future of a request that ended with this block.
    void hint(block_t last, const kvt_policy_hint_t &told, const kvt_policy_context_t *who = nullptr);
    /// Evictions from the device from number `from` on.
    std::vector<kvt_policy_log_entry_t> evictions(std::uint64_t from = 0) const;
    /// How large the policy would have a batch.
    std::uint64_t advise(std::uint64_t batch) const;
    kvt_policy_stats_t order_stats() const;

    // --- replay: what leaves is saved ----------------------------------------
    /// A block's object is about to be deallocated. With `valid` content its copies to a slot are
    /// added, if there is one free.
    void evicted(block_t block, bool valid, const std::vector<part> &object,
                 std::vector<copy> &saves);

    // --- match: what was saved comes back ------------------------------------
    /// The request needs the blocks of the path that ends with `last`, and has those before number
    /// `first`. Asks the store once, then says how that stands.
    answer resume(std::uint64_t request, block_t last, std::uint32_t first);
    /// The request was admitted, and block number `index` of its path has memory: adds the copies
    /// into it. Every block of a `ready` answer once, or `forget`.
    void restore(std::uint64_t request, std::uint32_t index, const std::vector<part> &object,
                 std::vector<copy> &restores);
    /// What is loaded for the request is not needed (any more).
    void forget(std::uint64_t request);

    // --- batches -------------------------------------------------------------
    /// All copies since the last call go with the batch that is submitted now.
    std::uint64_t submitted();
    /// A batch has run: what it saved goes to the store, its slots become free.
    void completed(std::uint64_t batch);

    /// Waits until the store has what it was given; false at the deadline (CLOCK_MONOTONIC).
    bool drain(std::uint64_t deadline_ns);
    counts count() const;
    kvt_store_stats_t store_stats() const;
    /// In the text format of Prometheus.
    std::string metrics() const;

private:
    struct impl;
    std::unique_ptr<impl> impl_;
};

}  // namespace kvtier_turbomind

#endif  // KVTIER_TURBOMIND_HPP
