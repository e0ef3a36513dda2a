// Opens and closes the store.
#include "store.h"

#include "failure.h"

#include <ctime>

namespace {

constexpr uint64_t second_ns = 1000000000;
// A disk that needs longer for a flush is broken.
constexpr uint64_t flush_wait_ns = 120 * second_ns;

struct error_text {
    kvt_error_t *error = nullptr;

    ~error_text() { kvt_error_free(&error); }

    std::string message(kvt_status_t status) const {
        return error ? kvt_error_message(error) : kvt_status_str(status);
    }
};

} // namespace

uint64_t flush_deadline_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t) t.tv_sec * second_ns + (uint64_t) t.tv_nsec + flush_wait_ns;
}

// Errors are ignored, because the run was flushed before. If the disk failed, the first close reports the
// failure and the second one frees the store.
kv_store::~kv_store() {
    kvt_store_close(&store, flush_deadline_ns(), nullptr);
    kvt_store_close(&store, flush_deadline_ns(), nullptr);
    kvt_close_report_t report = KVT_CLOSE_REPORT_INIT;
    kvt_runtime_close(&runtime, flush_deadline_ns(), &report, nullptr);
}

std::shared_ptr<kv_store> open_store(const options &o) {
    const auto out = std::make_shared<kv_store>();
    error_text error;
    kvt_runtime_opts_t runtime = KVT_RUNTIME_OPTS_INIT;
    kvt_status_t status = kvt_runtime_open(&runtime, &out->runtime, &error.error);
    kvt_store_opts_t opts = KVT_STORE_OPTS_INIT;
    opts.host_bytes = o.host_bytes;
    const std::string path = o.disk.empty() ? "" : o.disk + "/kv";
    if (!path.empty()) {
        opts.disk_bytes = o.disk_bytes;
        opts.disk_path = path.data();
        opts.disk_path_bytes = path.size();
    }
    if (!o.policy.empty()) {
        opts.policy = o.policy.data();
        opts.policy_bytes = o.policy.size();
    }
    if (status == KVT_OK) {
        status = kvt_store_open(out->runtime, nullptr, &opts, &out->store, &error.error);
    }
    if (status == KVT_E_SPEC) {
        throw failure(exit_usage, "--policy: " + error.message(status));
    }
    if (status != KVT_OK) {
        throw failure(exit_store, "the store" + (path.empty() ? "" : " in " + path) + " cannot be opened: " +
                                      error.message(status) +
                                      (status == KVT_E_BUSY
                                           ? " (does another program use it? Close that program, or choose "
                                             "another --disk)"
                                           : ""));
    }
    return out;
}
