// Ownership of handles, moved-from objects, orders of destruction, exception contents, kvt::span.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <array>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

static_assert(!std::is_copy_constructible_v<kvt::runtime> && !std::is_copy_assignable_v<kvt::op>);
static_assert(std::is_nothrow_move_constructible_v<kvt::runtime> &&
              std::is_nothrow_move_assignable_v<kvt::queue> &&
              std::is_nothrow_move_constructible_v<kvt::buffer> &&
              std::is_nothrow_move_constructible_v<kvt::account> &&
              std::is_nothrow_move_constructible_v<kvt::error> &&
              std::is_nothrow_destructible_v<kvt::budget>);
static_assert(sizeof(kvt::buffer) == sizeof(void *), "an owner is as large as its handle");
static_assert(std::is_convertible_v<std::vector<int> &, kvt::span<const int>>);
static_assert(std::is_convertible_v<kvt::span<int>, kvt::span<const int>>);
static_assert(!std::is_convertible_v<const std::vector<int> &, kvt::span<int>>);

static std::atomic<int> defects{0};
static void count_defect(const char *, kvt_status_t, const char *) noexcept { ++defects; }

static void moved_from_and_empty_owners_fail_with_handle_error() {
    kvt::runtime rt = kvt::runtime::open();
    CHECK(rt);
    kvt::runtime other = std::move(rt);
    CHECK(other && !rt);  // NOLINT: tests the moved-from object
    CHECK(rt.get() == nullptr);
    CHECK_THROWS(rt.stats(), KVT_E_HANDLE);
    CHECK_THROWS(rt.open_queue(), KVT_E_HANDLE);
    CHECK_THROWS(rt.alloc(4096), KVT_E_HANDLE);
    kvt::runtime &same = other;
    other = std::move(same);
    CHECK(other && other.now_ns() > 0);

    kvt::buffer a = other.alloc(4096), b = other.alloc(8192);
    a = std::move(b);  // frees the buffer that `a` owned
    CHECK(a.size() == 8192 && b.bytes().empty() && b.data() == nullptr);
    a.swap(b);
    CHECK(!a && b.size() == 8192);
    kvt_buffer_t *raw = b.release();
    CHECK(!b && raw != nullptr);
    b = kvt::buffer::adopt(raw);
    CHECK(b.size() == 8192);
    b.reset();
    CHECK(!b && other.close().buffers == 0 && !other);
    other.reset();

    kvt::op no_op;
    CHECK_THROWS(no_op.wait(), KVT_E_HANDLE);
    CHECK_THROWS(no_op.info(), KVT_E_HANDLE);
    CHECK(no_op.error().status() == KVT_E_HANDLE);
    kvt::queue no_queue;
    CHECK_THROWS(no_queue.fd(), KVT_E_HANDLE);
    kvt::account no_account;
    CHECK_THROWS(no_account.reserve(KVT_TIER_HOST, 1), KVT_E_HANDLE);
    kvt::budget no_budget;
    CHECK_THROWS(no_budget.report(), KVT_E_HANDLE);
}

static void children_outlive_their_runtime() {
    std::vector<std::byte> memory(4096);
    int freed = 0;
    kvt::buffer wrapped;
    kvt::queue queue;
    kvt::op op;
    {
        kvt::runtime rt = kvt::runtime::open();
        queue = rt.open_queue();
        wrapped = rt.wrap(memory, [&freed] { ++freed; });
        op = rt.submit(kvt::item::checksum(wrapped, 0, 4096));
        op.finish();
        kvt_close_report_t left = rt.close();
        CHECK(left.queues == 1 && left.buffers == 1 && left.ops == 1);
    }
    CHECK(freed == 0);
    wrapped.reset();
    CHECK(freed == 1);
}

// Destroys buffers while an op uses them, before the op.
static void buffers_may_be_destroyed_before_ops_in_flight() {
    kvt::runtime_opts opts;
    opts.workers = 1;
    kvt::runtime rt = kvt::runtime::open(opts);
    for (int i = 0; i < 20; ++i) {
        kvt::buffer from = rt.alloc(1 << 20), to = rt.alloc(1 << 20);
        std::vector<kvt_buffer_item_t> items(16, kvt::item::copy(to, 0, from, 0, 1 << 16));
        for (std::size_t k = 0; k < items.size(); ++k)
            items[k].dst_offset = items[k].src_offset = k << 16;
        kvt::op kept = rt.submit(items);
        std::vector<kvt::op> each = rt.submit_each(items);
        CHECK(each.size() == 16);
        from.reset();
        to.reset();
    }
    kvt_close_report_t left = rt.close();
    CHECK(left.ops == 0 && left.buffers == 0);
}

static void exceptions_have_status_message_and_offset() {
    try {
        kvt::check_spec("qos(inner=)");
        CHECK(false);
    } catch (const kvt::exception &e) {
        CHECK(e.status() == KVT_E_SPEC);
        CHECK(e.offset() != UINT64_MAX && e.offset() <= 11);
        CHECK(std::string(e.what()) == std::string("KVT_E_SPEC: ") + e.message());
        CHECK(std::strlen(e.message()) > 0 && e.os_errno() == 0);
        const kvt::exception copy = e;  // exceptions must be copyable
        CHECK(copy.offset() == e.offset());
    }
    try {
        kvt::runtime_opts opts;
        opts.faults = "faults(nonesuch=at(fail=1))";
        kvt::runtime rt = kvt::runtime::open(opts);
        CHECK(false);
    } catch (const std::exception &e) {
        CHECK(std::strncmp(e.what(), "KVT_E_", 6) == 0);
    }
    const kvt::error plain(KVT_E_BUSY);
    CHECK(std::strcmp(plain.message(), kvt_status_str(KVT_E_BUSY)) == 0);
    CHECK(plain.offset() == UINT64_MAX && plain.os_errno() == 0);
    CHECK(kvt::check_spec(" lru ( a = 1 ) ") == kvt::check_spec("lru(a=1)"));
    std::string deep = "a";
    for (int i = 0; i < 3; ++i) deep = "a(x=" + deep + ", y=2)";
    CHECK(kvt::check_spec(kvt::check_spec(deep)) == kvt::check_spec(deep));
    CHECK_THROWS(kvt::find_feature("kuda"), KVT_E_NOT_FOUND);
    const std::vector<kvt::feature> all = kvt::features();
    CHECK(!all.empty() && kvt::find_feature(all[0].name).name == all[0].name);
    kvt::check_abi();
}

static void spans_view_arrays_and_buffers() {
    int raw[4] = {1, 2, 3, 4};
    kvt::span<int> s(raw);
    CHECK(s.size() == 4 && s.size_bytes() == 16 && s[2] == 3 && s.front() == 1 && s.back() == 4);
    CHECK(s.subspan(1, 2).back() == 3 && s.subspan(3).size() == 1 && s.first(2).size() == 2 &&
          s.last(1)[0] == 4);
    std::array<int, 3> array{{5, 6, 7}};
    const std::vector<int> vector{8, 9};
    CHECK(kvt::span<const int>(array).size() == 3 && kvt::span<const int>(vector)[1] == 9);
    int sum = 0;
    for (int v : s) sum += v;
    CHECK(sum == 10 && kvt::span<int>().empty());

    kvt::runtime rt = kvt::runtime::open();
    kvt::buffer b = rt.alloc(4096);
    kvt::span<float> floats = b.as<float>();
    CHECK(floats.size() == 1024);
    for (float &f : floats) f = 1.5f;
    CHECK(b.as<double>().size() == 512);
    kvt_completion_t none[1];
    CHECK(rt.open_queue().poll(none) == 0);
    CHECK(kvt::checksum(b.bytes()) != 0);
}

static void ops_report_items_and_completions() {
    kvt::runtime rt = kvt::runtime::open();
    kvt::buffer from = rt.alloc(65536), to = rt.alloc(65536);
    std::memset(from.data(), 0x5a, from.size());
    std::vector<kvt_buffer_item_t> items{kvt::item::copy(to, 0, from, 0, 32768),
                                         kvt::item::copy(to, 32768, from, 32768, 32768)};
    kvt_op_info_t info = rt.submit(items).finish();
    CHECK(info.items_done == 2 && info.bytes_done == 65536);
    CHECK(std::memcmp(from.data(), to.data(), 65536) == 0);

    kvt::op sum = rt.submit(kvt::item::checksum(to, 0, 65536));
    CHECK(sum.wait());
    kvt_op_item_t one[1];
    CHECK(sum.items(one) == 1 && one[0].value == kvt::checksum(from.bytes()));
    CHECK(sum.error().status() == KVT_OK);
    kvt::op bad = rt.submit(kvt::item::verify(to, 0, 65536, one[0].value + 1));
    CHECK_THROWS(bad.finish(), KVT_E_CORRUPT);
    CHECK(bad.error().status() == KVT_E_CORRUPT);
    rt.submit(kvt::item::prefault(to, 0, 65536)).finish();

    kvt::queue queue = rt.open_queue();
    CHECK(queue.fd() >= 0);
    kvt_completion_t got[4];
    CHECK(queue.wait(got, kvt::deadline::in(std::chrono::milliseconds(1))) == 0);
    kvt::submit_opts opts;
    opts.queue = &queue;
    opts.tag = 77;
    rt.post(items, opts);
    CHECK(queue.wait(got) == 1 && got[0].tag == 77 && got[0].op == nullptr);
    kvt::op tried;
    CHECK(rt.try_submit(items, opts, tried) == KVT_OK && tried);
    CHECK(rt.try_submit({}, opts, tried) == KVT_E_INVALID);
    CHECK(queue.stats().posted >= 1);
    queue.close();
    CHECK(!queue);
}

static void account_with_bytes_cannot_be_closed() {
    kvt::runtime rt = kvt::runtime::open();
    kvt::budget_opts limits;
    limits.host_bytes = 1 << 20;
    limits.reserve_bytes = 1;
    kvt::budget budget = rt.open_budget(limits);
    kvt::account account = budget.open_account();
    account.reserve(KVT_TIER_HOST, 4096);
    CHECK_THROWS(account.close(), KVT_E_BUSY);
    CHECK(account.held(KVT_TIER_HOST).reserved_bytes == 4096);
    CHECK(!account.try_reserve(KVT_TIER_HOST, 1 << 20));
    const int before = defects;
    kvt_account_t *raw = account.get();
    account.reset();  // fails to close, must not throw
    CHECK(defects == before + 1 && !account);
    account = kvt::account::adopt(raw);
    account.commit(KVT_TIER_HOST, 4096, 4096);
    account.release_bytes(KVT_TIER_HOST, 4096);
    account.close();
    budget.close();
    CHECK(!account && !budget);
}

int main() {
    kvt::set_defect_hook(count_defect);
    moved_from_and_empty_owners_fail_with_handle_error();
    children_outlive_their_runtime();
    buffers_may_be_destroyed_before_ops_in_flight();
    exceptions_have_status_message_and_offset();
    spans_view_arrays_and_buffers();
    ops_report_items_and_completions();
    CHECK(defects == 0);
    account_with_bytes_cannot_be_closed();
    return done();
}
