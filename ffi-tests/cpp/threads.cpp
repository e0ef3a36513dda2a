// Many threads on one runtime, one queue and one account.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <thread>
#include <vector>

int main() {
    constexpr std::size_t submitters = 6, drainers = 2, each = 500;
    kvt::runtime rt = kvt::runtime::open();
    kvt::buffer shared = rt.alloc(1 << 20);
    kvt::queue_opts small;
    small.capacity = 64;  // small enough that submissions return KVT_E_AGAIN
    kvt::queue queue = rt.open_queue(std::move(small));
    kvt::budget_opts limits;
    limits.host_bytes = 1 << 24;
    limits.reserve_bytes = 1;
    kvt::budget budget = rt.open_budget(limits);
    kvt::account account = budget.open_account();

    std::atomic<std::size_t> drained{0}, sum{0};
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < submitters; ++t)
        threads.emplace_back([&, t] {
            for (std::size_t i = 0; i < each; ++i) {
                if (account.try_reserve(KVT_TIER_HOST, 4096)) {
                    account.commit(KVT_TIER_HOST, 4096, 4096);
                    account.release_bytes(KVT_TIER_HOST, 4096);
                }
                kvt::submit_opts opts;
                opts.queue = &queue;
                opts.tag = t * each + i;
                const kvt_buffer_item_t item =
                    kvt::item::checksum(shared, 4096 * (opts.tag % 256), 4096);
                kvt::op op;
                kvt_status_t status;
                while ((status = rt.try_submit(kvt::span<const kvt_buffer_item_t>(&item, 1), opts,
                                               op)) == KVT_E_AGAIN)
                    std::this_thread::yield();
                CHECK(status == KVT_OK);
                if (i % 7 == 0) op.cancel();
            }
        });
    for (std::size_t t = 0; t < drainers; ++t)
        threads.emplace_back([&] {
            kvt_completion_t got[16];
            while (drained < submitters * each) {
                const std::size_t n =
                    queue.wait(got, kvt::deadline::in(std::chrono::milliseconds(20)));
                for (std::size_t i = 0; i < n; ++i) {
                    CHECK(got[i].status == KVT_OK || got[i].status == KVT_E_CANCELLED);
                    sum += got[i].tag;
                }
                drained += n;
            }
        });
    for (std::thread &t : threads) t.join();
    const std::size_t all = submitters * each;
    CHECK(drained == all && sum == all * (all - 1) / 2);
    CHECK(account.held(KVT_TIER_HOST).used_bytes == 0);
    account.close();
    queue.close();
    check_no_ops(rt);
    return done();
}
