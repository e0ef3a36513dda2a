// Error handling without exceptions: results and callbacks, compiled with -fno-exceptions.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <cstring>
#include <string>

int main() {
    CHECK(kvt::check_abi().ok());
    kvt::result<std::string> bad = kvt::check_spec("lru(");
    CHECK(!bad && bad.status() == KVT_E_SPEC && bad.error().offset() != UINT64_MAX);
    CHECK(std::strlen(bad.error().message()) > 0);
    CHECK(std::strcmp(bad.error().name(), "KVT_E_SPEC") == 0);
    CHECK(std::move(bad).value_or("fallback") == "fallback");
    CHECK(*kvt::check_spec("lru") == "lru");

    kvt::result<kvt::runtime> opened = kvt::runtime::open();
    CHECK(opened.ok() && opened.status() == KVT_OK);
    kvt::runtime rt = *std::move(opened);
    kvt::buffer a = *rt.alloc(4096), b = *rt.alloc(4096);
    std::memset(a.data(), 3, a.size());
    kvt::op op = *rt.submit(kvt::item::copy(b, 0, a, 0, 4096));
    kvt::result<kvt_op_info_t> info = op.finish();
    CHECK(info && info->bytes_done == 4096 && std::memcmp(a.data(), b.data(), 4096) == 0);
    kvt::result<kvt_op_info_t> wrong = (*rt.submit(kvt::item::verify(a, 0, 4096, 1))).finish();
    CHECK(wrong.status() == KVT_E_CORRUPT);
    CHECK(rt.submit(kvt::item::copy(b, 4096, a, 0, 4096)).status() == KVT_E_INVALID);

    std::atomic<int> seen{0};
    kvt::queue_opts opts;
    opts.callback = [&](const kvt::batch &batch) { seen += static_cast<int>(batch.size()); };
    kvt::queue queue = *rt.open_queue(std::move(opts));
    kvt::submit_opts submit;
    submit.queue = &queue;
    CHECK((*rt.submit(kvt::item::checksum(a, 0, 4096), submit)).wait().ok());
    CHECK(queue.close().ok() && seen == 1);

    kvt::runtime empty;
    CHECK(empty.stats().status() == KVT_E_HANDLE);
    kvt::result<kvt::buffer> too_much = rt.alloc(UINT64_C(1) << 62);
    CHECK(!too_much);
    kvt::result<kvt::buffer> moved = std::move(too_much);
    CHECK(!moved && moved.status() != KVT_OK);
    op.reset();
    a.reset();
    b.reset();
    CHECK(rt.close()->buffers == 0);
    return done();
}
