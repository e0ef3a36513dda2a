// Saves evicted blocks to a store and loads them again, through staging slots in host memory.

#ifndef KVTIER_TURBOMIND_TIER_HPP
#define KVTIER_TURBOMIND_TIER_HPP

#include "nodes.hpp"

#include <kvtier/session.hpp>

#include <deque>
#include <map>

namespace kvtier_turbomind {

class tier {
public:
    explicit tier(const options &opts);
    ~tier();

    void save(const node_ptr &n, const std::vector<part> &object, std::vector<copy> &saves);
    answer resume(std::uint64_t request, const node_ptr &last, std::uint32_t first);
    void restore(std::uint64_t request, std::uint32_t index, const std::vector<part> &object,
                 std::vector<copy> &restores);
    void forget(std::uint64_t request);
    std::uint64_t submitted() { return batch_++; }
    void completed(std::uint64_t batch);
    void poll();
    bool drain(std::uint64_t deadline_ns);
    void hint(const node_ptr &last, const kvt_policy_hint_t &hint);
    counts count() const;
    const kvt::store &store() const { return store_; }

private:
    using slot_t = std::uint32_t;
    /// A block that the executor copies to a slot in a batch.
    struct save_copy {
        node_ptr block;
        slot_t slot;
        std::uint64_t batch;
    };
    /// An op that uses slots.
    struct slot_op {
        kvt::op op;
        std::vector<slot_t> slots;
    };
    /// A get of blocks for a request. `op` is empty once it has completed.
    struct load {
        kvt::op op;
        std::uint32_t first = 0;   // number of the first block in the request's path
        std::vector<slot_t> slots; // one for each block; NONE after its restore
        std::uint64_t deadline_ns = 0;
        bool settled = false; // all ranks have agreed on the number of blocks
    };
    static constexpr slot_t NONE = UINT32_MAX;

    void *address(slot_t slot) const { return base_ + std::size_t{slot} * stride_; }
    bool begin(load &l, const node_ptr &last, std::uint32_t first);
    std::uint32_t available(const sequence &all, std::uint32_t first) const;
    void abandon(load &l);
    void trim(load &l, std::uint64_t blocks);
    void put(const std::vector<save_copy> &run, kvt::session &session);
    void release(std::vector<slot_t> &slots);
    std::uint64_t agreed(std::uint64_t mine) const { return agree_ ? agree_(mine) : mine; }
    kvt::session open_session(const sequence &all) const;

    const std::uint32_t block_tokens_;
    const std::size_t stride_;
    const std::uint64_t wait_ns_;
    const std::function<std::uint64_t(std::uint64_t)> agree_;
    kvt::runtime runtime_;
    kvt::buffer own_slots_; // empty if the engine provides the slots
    std::uint8_t *base_;
    kvt::store store_;
    kvt::namespace_ namespace_;
    std::vector<slot_t> free_;
    std::uint64_t batch_ = 1;
    counts counts_;
    std::deque<save_copy> saves_;
    std::vector<std::pair<std::uint64_t, slot_t>> restores_; // batch, slot
    std::vector<slot_op> puts_, abandoned_;
    std::map<std::uint64_t, load> loads_; // by request
};

}  // namespace kvtier_turbomind

#endif  // KVTIER_TURBOMIND_TIER_HPP
