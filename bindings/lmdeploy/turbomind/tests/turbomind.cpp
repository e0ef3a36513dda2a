// Tests of the adapter in a miniature engine. Random requests run with little device memory, under
// several policies, failures and shutdowns. Every byte that a kernel reads is compared.

#include "mini.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <unistd.h>

#define CHECK(condition)                                                                         \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);   \
            std::exit(1);                                                                        \
        }                                                                                        \
    } while (0)

namespace {

using kvtier_turbomind::adapter;
using kvtier_turbomind::options;

constexpr int OBJECTS = 48;
/// Timeout of the whole test: a longer run is a hang. No test asserts a shorter time.
constexpr int HANG_SECONDS = 900;

options small_options(const std::string &order = "lru",
                      const std::string &store = "store(host=8MiB)") {
    options o;
    o.store = store;
    o.order = order;
    o.block_tokens = mini::BLOCK;
    o.object_bytes = mini::OBJECT_BYTES;
    o.device_objects = OBJECTS;
    o.slots = 16;
    o.model = "mini";
    o.wait_ns = HANG_SECONDS * UINT64_C(1000000000);  // so long that every found block loads
    return o;
}

int next_token(const std::vector<int> &tokens) {
    std::uint64_t mark = 11;
    for (const int t : tokens) mark = mini::extend(mark, t);
    return static_cast<int>(mark % 1000);
}

unsigned first_seed = 0;

/// Prompts of a few conversations, so that later prompts extend earlier ones.
std::vector<std::vector<int>> prompts_of(unsigned seed, int count) {
    std::mt19937 random(first_seed + seed);
    std::vector<std::vector<int>> conversations(6);
    for (std::size_t i = 0; i < conversations.size(); i++)
        for (int t = 0; t < 24; t++)
            conversations[i].push_back(1000 * static_cast<int>(i % 2) + t);
    std::vector<std::vector<int>> prompts;
    for (int i = 0; i < count; i++) {
        auto &c = conversations[random() % conversations.size()];
        if (c.size() > 80) c.resize(40);
        for (std::uint32_t n = 3 + random() % 14; n > 0; n--)
            c.push_back(static_cast<int>(random() % 1000));
        prompts.push_back(c);
    }
    return prompts;
}

std::uint64_t in_seconds(int s) {
    timespec t{};
    CHECK(clock_gettime(CLOCK_MONOTONIC, &t) == 0);
    return static_cast<std::uint64_t>(t.tv_sec + s) * UINT64_C(1000000000);
}

struct engine {
    adapter *tier;
    mini::Scheduler scheduler;
    mini::ModelExecutor executor;
    int phases;
    std::vector<std::unique_ptr<mini::Sequence>> all;
    std::vector<mini::Sequence *> live;
    std::size_t next = 0;
    int in_flight = 0, passes = 0;
    /// Passes between waits for all saves, so that later requests find them on any machine; 0:
    /// never wait.
    int drain_every = 0;
    std::string journal;
    std::function<void(engine &)> each_pass;

    engine(adapter *a, const std::vector<std::vector<int>> &prompts, int phases_)
        : tier(a), scheduler(OBJECTS, a), executor(scheduler.device()), phases(phases_) {
        for (const auto &p : prompts) {
            all.push_back(std::make_unique<mini::Sequence>());
            all.back()->id = all.size();
            all.back()->tokens = p;
            all.back()->prompt = static_cast<int>(p.size());
            all.back()->want = 1 + static_cast<int>(p.size() % 7);
        }
    }
    ~engine() {
        while (in_flight > 0) finish_batch();
        for (mini::Sequence *s : live) scheduler.Release(*s);
    }

    void finish_batch() {
        const std::unique_ptr<mini::BatchData> batch = executor.completed(true);
        in_flight--;
        if (tier) tier->completed(batch->ticket);
        for (mini::Sequence *s : batch->sequences) {
            s->inflight = 0;
            if (s->filled < static_cast<int>(s->tokens.size())) continue;
            if (static_cast<int>(s->tokens.size()) == s->prompt + s->want) {
                scheduler.Finalize(*s);
                scheduler.Release(*s);
                s->done = true;
                live.erase(std::find(live.begin(), live.end(), s));
            } else {
                s->tokens.push_back(next_token(s->tokens));
            }
        }
    }

    /// Runs one pass; false if all requests are done.
    bool step() {
        while (next < all.size() && live.size() < 3) {
            live.push_back(all[next++].get());
            scheduler.AdmitPrompt(*live.back());
        }
        if (live.empty()) return false;
        if (each_pass) each_pass(*this);
        passes++;
        if (drain_every > 0 && passes % drain_every == 0) {
            while (in_flight > 0) finish_batch();
            CHECK(tier->drain(in_seconds(HANG_SECONDS)));
        }
        auto batch = std::make_unique<mini::BatchData>();
        const bool runs = scheduler.Schedule(live, 24, *batch);
        if (runs) {
            for (const mini::Sequence *s : batch->sequences)
                journal += std::to_string(s->id) + ":" + std::to_string(s->resume_len) + "+" +
                           std::to_string(s->input_len) + " ";
            executor.submit(std::move(batch));
            in_flight++;
        }
        if (in_flight >= phases || (!runs && in_flight > 0)) finish_batch();
        else if (!runs) usleep(50);
        return true;
    }

    void run() {
        while (step()) CHECK(passes < 1000000);
        while (in_flight > 0) finish_batch();
        for (const auto &s : all) {
            CHECK(s->done);
            std::vector<int> want(s->tokens.begin(), s->tokens.begin() + s->prompt);
            for (int i = 0; i < s->want; i++) want.push_back(next_token(want));
            CHECK(s->tokens == want);
        }
        CHECK(executor.wrong() == 0);
    }
};

template <class F> bool throws(F call) {
    try {
        call();
    } catch (const std::exception &) {
        return true;
    }
    return false;
}

/// Waits for all transfers, then checks that no slot is in use.
void check_all_slots_free(adapter &tier) {
    CHECK(tier.drain(in_seconds(HANG_SECONDS)));
    const std::uint64_t end = in_seconds(HANG_SECONDS);
    while (tier.count().slots_in_use != 0 && in_seconds(0) < end) {
        tier.begin_pass();
        usleep(200);
    }
    CHECK(tier.count().slots_in_use == 0);
}

void restored_blocks_are_correct_under_each_policy(int requests) {
    const auto prompts = prompts_of(1, requests);
    std::uint64_t without = 0;
    {
        engine plain(nullptr, prompts, 2);
        plain.run();
        without = plain.scheduler.computed;
    }
    for (const char *order : {"lru", "fifo", "arc", "s3fifo", "lfu", "gdsf", "horizon",
                              "qos(inner=lru)", "predictive"}) {
        for (const int phases : {1, 2}) {
            adapter tier(small_options(order));
            engine e(&tier, prompts, phases);
            e.drain_every = 16;
            e.run();
            check_all_slots_free(tier);
            const auto c = tier.count();
            CHECK(e.executor.compared() > 0 && e.scheduler.evictions > 0);
            CHECK(c.stored > 0 && c.loaded > 0 && c.restored > 0 && c.not_stored == 0);
            CHECK(e.scheduler.computed < without);
            CHECK(!tier.evictions().empty() && tier.order_stats().evictions > 0);
            if (phases == 2)
                std::printf("%-16s computed %5llu of %5llu, restored %4llu blocks, %llu evicted\n",
                            order, static_cast<unsigned long long>(e.scheduler.computed),
                            static_cast<unsigned long long>(without),
                            static_cast<unsigned long long>(c.restored),
                            static_cast<unsigned long long>(e.scheduler.evictions));
        }
    }
}

void policies_can_be_switched_while_running(int requests) {
    adapter tier(small_options("lru", "store(host=1MiB, policy=lru)"));
    engine e(&tier, prompts_of(2, requests), 2);
    e.drain_every = 16;
    const std::vector<std::string> specs = {"arc", "horizon", "sieve", "lru-k", "qos_aware", "lru"};
    std::size_t switches = 0;
    e.each_pass = [&](engine &now) {
        if (now.passes % 17 != 16) return;
        const std::string &spec = specs[switches++ % specs.size()];
        CHECK(tier.set_order(spec));
        CHECK(tier.set_store_policy(KVT_TIER_HOST, spec));
        std::string why;
        CHECK(!tier.set_order("arcc", &why) && why.find("arc") != std::string::npos);
    };
    e.run();
    CHECK(switches > specs.size());
    CHECK(tier.count().restored > 0 && tier.advise(8) >= 1);
    CHECK(tier.metrics().find("kvtier_") != std::string::npos);
    check_all_slots_free(tier);
}

/// The eviction order works without a store, and the store without an order.
void order_and_store_work_alone(int requests) {
    adapter victims(small_options("arc", ""));
    engine a(&victims, prompts_of(3, requests), 2);
    a.run();
    CHECK(victims.order_stats().evictions > 0 && victims.count().saves == 0);
    CHECK(!victims.set_store_policy(KVT_TIER_HOST, "lru"));
    adapter store(small_options(""));
    engine b(&store, prompts_of(3, requests), 2);
    b.drain_every = 16;
    b.run();
    CHECK(store.count().restored > 0 && store.evictions().empty());
    CHECK(!store.set_order("lru"));
}

void failures_drop_blocks_only(int requests, const std::string &folder) {
    const auto prompts = prompts_of(4, requests);
    // The store is smaller than the evicted blocks: it evicts, and puts fail where it cannot.
    for (const char *store : {"store(host=64KiB)", "store(host=64KiB, policy=arc)"}) {
        adapter tier(small_options("lru", store));
        engine e(&tier, prompts, 2);
        e.run();
        check_all_slots_free(tier);
    }
    // One slot, then requests that do not wait for loads.
    options o = small_options();
    o.slots = 1;
    adapter narrow(o);
    engine e1(&narrow, prompts, 2);
    e1.run();
    CHECK(narrow.count().no_slot > 0);
    o = small_options();
    o.wait_ns = 0;
    adapter hasty(o);
    engine e2(&hasty, prompts, 2);
    e2.run();
    check_all_slots_free(hasty);
    // Submissions fail while another op runs; the constructor fails without memory.
    o = small_options();
    o.max_ops = 1;
    adapter busy(o);
    engine e4(&busy, prompts, 2);
    e4.run();
    check_all_slots_free(busy);
    CHECK(busy.count().not_stored + busy.count().not_loaded > 0);
    CHECK(throws([] {
        options none = small_options();
        none.faults = "faults(map=at(fail=1))";
        adapter tier(none);
    }));
    // The disk is nearly full at once.
    adapter disk(small_options(
        "lru", "store(host=64KiB, disk=disk(path=\"" + folder +
                   "/little\", bytes=256KiB, segment=64KiB, buffered=true))"));
    engine e3(&disk, prompts, 2);
    e3.run();
    check_all_slots_free(disk);
}

/// Blocks with damaged bytes on disk are misses, and computed.
void damaged_blocks_are_misses(int requests, const std::string &folder) {
    const std::string spec = "store(host=64KiB, write=through, disk=disk(path=\"" + folder +
                             "/kv\", bytes=64MiB, segment=1MiB, buffered=true))";
    const auto prompts = prompts_of(5, requests);
    {
        adapter tier(small_options("lru", spec));
        engine e(&tier, prompts, 2);
        e.run();
        check_all_slots_free(tier);
        CHECK(tier.store_stats().written_cells > 0);
    }
    {
        adapter tier(small_options("lru", spec)); // a restart
        engine e(&tier, prompts, 2);
        e.run();
        CHECK(tier.store_stats().disk_hit_cells > 0 && tier.count().restored > 0);
    }
    for (const auto &file : std::filesystem::directory_iterator(folder + "/kv")) {
        if (file.path().filename().string().rfind("seg-", 0) != 0) continue;
        std::fstream f(file.path(), std::ios::in | std::ios::out | std::ios::binary);
        const auto size = std::filesystem::file_size(file.path());
        for (std::uintmax_t at = 4096 + 99; at < size; at += 4096 * 3) {
            f.seekg(static_cast<std::streamoff>(at));
            const char flipped = static_cast<char>(f.get() ^ 0x5a);
            f.seekp(static_cast<std::streamoff>(at));
            f.put(flipped);
        }
    }
    adapter tier(small_options("lru", spec));
    engine e(&tier, prompts, 2);
    e.each_pass = [&](engine &now) { // later reads fail after the first 64 KiB
        if (now.passes == 100)
            for (const auto &file : std::filesystem::directory_iterator(folder + "/kv"))
                if (file.path().filename().string().rfind("seg-", 0) == 0)
                    std::filesystem::resize_file(file.path(), 64 << 10);
    };
    e.run();
    check_all_slots_free(tier);
    std::printf("damaged: %llu corrupt cells, %llu blocks not loaded\n",
                static_cast<unsigned long long>(tier.store_stats().corrupt_cells),
                static_cast<unsigned long long>(tier.count().not_loaded));
    CHECK(tier.store_stats().corrupt_cells > 0 && tier.count().not_loaded > 0);
}

/// A shutdown at any pass neither hangs nor loses stored blocks. Wrong options throw.
void shutdown_at_any_pass_loses_no_stored_block(int requests, const std::string &folder) {
    const std::string spec = "store(host=1MiB, write=through, disk=disk(path=\"" + folder +
                             "/stop\", bytes=64MiB, segment=1MiB, buffered=true))";
    const auto prompts = prompts_of(6, requests);
    for (int stop = 1; stop < 120; stop += 17) {
        adapter tier(small_options("lru", spec));
        engine e(&tier, prompts, 2);
        while (e.passes < stop && e.step()) {
        }
        CHECK(e.executor.wrong() == 0);
    }
    for (const char *bad : {"store(host=0", "stroe", "store(host=8MiB, policy=lur)"})
        CHECK(throws([&] { adapter tier(small_options("lru", bad)); }));
    CHECK(throws([] { adapter tier(small_options("lur")); }));
    options o = small_options();
    o.object_bytes = 0;
    CHECK(throws([&] { adapter tier(o); }));
}

/// Returns the minimum of the values that two ranks pass in corresponding calls.
struct minimum_of_two {
    std::mutex mutex;
    std::condition_variable changed;
    int here = 0;
    std::uint64_t round = 0, least = UINT64_MAX, result = 0;
    std::uint64_t agree(std::uint64_t mine) {
        std::unique_lock<std::mutex> lock(mutex);
        least = std::min(least, mine);
        const std::uint64_t now = round;
        if (++here == 2) {
            result = least;
            least = UINT64_MAX;
            here = 0;
            round++;
            changed.notify_all();
        } else {
            changed.wait(lock, [&] { return round != now; });
        }
        return result;
    }
};

/// Two ranks with different stores make the same schedule.
void ranks_with_different_stores_schedule_alike(int requests) {
    const auto prompts = prompts_of(7, requests);
    minimum_of_two both;
    std::string journals[2];
    std::uint64_t restored[2];
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; rank++)
        threads.emplace_back([&, rank] {
            options o = small_options("arc", rank == 0 ? "store(host=8MiB)" : "store(host=128KiB)");
            o.slots = rank == 0 ? 24 : 12;
            o.shard_index = static_cast<std::uint32_t>(rank);
            o.shard_count = 2;
            o.agree = [&](std::uint64_t mine) { return both.agree(mine); };
            adapter tier(o);
            engine e(&tier, prompts, 1);
            e.drain_every = 16;
            e.each_pass = [](engine &now) { now.scheduler.now_ns += 1000000; };
            e.run();
            journals[rank] = e.journal;
            restored[rank] = tier.count().restored;
        });
    for (std::thread &t : threads) t.join();
    CHECK(journals[0] == journals[1] && restored[0] == restored[1] && restored[0] > 0);
}

/// Equal tokens with different images share no KV. An object of several parts is restored to them.
void images_separate_equal_tokens_and_objects_keep_their_parts() {
    adapter tier(small_options());
    const int tokens[mini::BLOCK] = {1, 2, 3, 4};
    const int blocks[3] = {};  // three addresses
    kvt_media_t image[2] = {};
    image[0].token = image[1].token = 2;
    image[0].digest[0] = 1;
    image[1].digest[0] = 2;
    std::vector<char> device(mini::OBJECT_BYTES), back(mini::OBJECT_BYTES);
    for (std::size_t i = 0; i < device.size(); i++) device[i] = static_cast<char>(i * 7 + 1);
    const auto parts = [](std::vector<char> &of) {
        return std::vector<kvtier_turbomind::part>{{of.data(), 80},
                                                   {of.data() + 80, of.size() - 80}};
    };
    const auto run = [](const std::vector<kvtier_turbomind::copy> &copies) {
        for (const auto &c : copies) std::memcpy(c.dst, c.src, c.bytes);
        return copies.size();
    };
    tier.indexed(&blocks[0], nullptr, tokens, mini::BLOCK, &image[0], 1);
    tier.produced(&blocks[0]);
    std::vector<kvtier_turbomind::copy> saves, restores;
    tier.evicted(&blocks[0], true, parts(device), saves);
    CHECK(run(saves) == 2);
    tier.completed(tier.submitted());
    CHECK(tier.drain(in_seconds(HANG_SECONDS)) && tier.count().stored == 1);
    tier.recycled(&blocks[0]);
    tier.indexed(&blocks[1], nullptr, tokens, mini::BLOCK, &image[1], 1);
    tier.indexed(&blocks[2], nullptr, tokens, mini::BLOCK, &image[0], 1);
    using kvtier_turbomind::coming;
    CHECK(tier.resume(1, &blocks[1], 0).state == coming::none);
    CHECK(tier.resume(2, &blocks[2], 0).state == coming::loading);
    auto answer = tier.resume(2, &blocks[2], 0);
    for (; answer.state == coming::loading; answer = tier.resume(2, &blocks[2], 0)) usleep(100);
    CHECK(answer.state == coming::ready && answer.blocks == 1);
    tier.restore(2, 0, parts(back), restores);
    CHECK(run(restores) == 2 && back == device);
    tier.restore(2, 0, parts(back), restores);  // a second restore does nothing
    tier.forget(2);
    tier.completed(tier.submitted());
    check_all_slots_free(tier);
    CHECK(restores.size() == 2);
}

}  // namespace

int main(int argc, char **argv) {
    const int requests = argc > 1 ? std::atoi(argv[1]) : 120;
    if (argc > 2) first_seed = static_cast<unsigned>(std::atoi(argv[2]));
    alarm(HANG_SECONDS);
    char folder[] = "/tmp/kvt-turbomind-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    restored_blocks_are_correct_under_each_policy(requests);
    policies_can_be_switched_while_running(requests);
    order_and_store_work_alone(requests);
    failures_drop_blocks_only(requests, folder);
    damaged_blocks_are_misses(requests, folder);
    shutdown_at_any_pass_loses_no_stored_block(requests, folder);
    ranks_with_different_stores_schedule_alike(requests);
    images_separate_equal_tokens_and_objects_keep_their_parts();
    std::filesystem::remove_all(folder);
    std::printf("turbomind: passed\n");
    return 0;
}
