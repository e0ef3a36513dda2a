// What leaves the device goes to a store, and comes back: slots in host memory between the two.

#ifndef KVTIER_TURBOMIND_TIER_HPP
#define KVTIER_TURBOMIND_TIER_HPP

#include "nodes.hpp"

#include <kvtier/kvtier.hpp>

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
    void hint(const node_ptr &last, const kvt_policy_hint_t &told);
    counts count() const;
    const kvt::store &store() const { return store_; }

private:
    using slot_t = std::uint32_t;
    /// A block that the executor copies to a slot, or has copied.
    struct saving {
        node_ptr what;
        slot_t slot;
        std::uint64_t batch;
    };
    /// Blocks that a put takes from their slots.
    struct storing {
        kvt::op op;
        std::vector<slot_t> slots;
    };
    /// Blocks that a get brings for a request; without an op it has come.
    struct loading {
        kvt::op op;
        std::uint32_t first = 0;
        std::vector<slot_t> slots; // as many as come, NONE where one was given away
        std::uint64_t until_ns = 0;
        bool settled = false;
    };
    static constexpr slot_t NONE = UINT32_MAX;

    void *address(slot_t slot) const { return base_ + std::size_t{slot} * stride_; }
    bool begin(loading &load, const node_ptr &last, std::uint32_t first);
    std::uint32_t available(const sequence &all, std::uint32_t first) const;
    void give_up(loading &load);
    void trim(loading &load, std::uint64_t blocks);
    void put(const std::vector<saving> &run, kvt::session &session);
    void give_back(std::vector<slot_t> &slots);
    std::uint64_t agreed(std::uint64_t mine) const { return agree_ ? agree_(mine) : mine; }
    kvt::session open_session(const sequence &all) const;

    const std::uint32_t block_tokens_;
    const std::size_t stride_;
    const std::uint64_t wait_ns_;
    const std::function<std::uint64_t(std::uint64_t)> agree_;
    kvt::runtime runtime_;
    kvt::buffer own_;
    std::uint8_t *base_;
    kvt::store store_;
    kvt::name_space space_;
    std::vector<slot_t> free_;
    std::uint64_t batch_ = 1;
    counts counts_;
    std::deque<saving> savings_;
    std::vector<std::pair<std::uint64_t, slot_t>> restorings_; // by batch
    std::vector<storing> storings_, given_up_;
    std::map<std::uint64_t, loading> loadings_;
};

}  // namespace kvtier_turbomind

#endif  // KVTIER_TURBOMIND_TIER_HPP
