// The same through the C++ binding: a value, an exception, a planted defect.
#include <kvtier/kvtier.hpp>

#include <cstdio>
#include <cstring>

int main() {
    kvt::check_abi();
    {
        kvt::runtime rt = kvt::runtime::open();
        kvt::buffer from = rt.alloc(4096), to = rt.alloc(4096);
        std::memset(from.data(), 9, from.size());
        rt.submit(kvt::item::copy(to, 0, from, 0, 4096)).finish();
        if (std::memcmp(from.data(), to.data(), 4096) != 0) return 1;
    }
    try {
        kvt::check_spec("lru(");
        return 2;
    } catch (const kvt::exception &e) {
        if (e.status() != KVT_E_SPEC) return 3;
    }
    kvt::runtime_opts opts;
    opts.faults = "faults(worker=at(panic=1))";
    kvt::runtime rt = kvt::runtime::open(opts);
    kvt::buffer buffer = rt.alloc(4096);
    try {
        rt.submit(kvt::item::checksum(buffer, 0, 4096)).finish();
        return 4;
    } catch (const kvt::exception &e) {
        if (e.status() != KVT_E_PANIC) return 5;
    }
    std::printf("kvtier %s\n", kvt::version());
    return 0;
}
