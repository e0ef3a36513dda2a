#include "memory.h"

#include "inner_device.h"

#include <ctime>

#include <cstdio>

namespace kvtier_plugin {

namespace {

// How long an allocation waits for memory to be reclaimed.
constexpr uint64_t RECLAIM_SECONDS = 10;

std::mutex opening;
Memory * the_memory = nullptr;

} // namespace

std::string Failure::text(const char * what, kvt_status_t status) const {
    const char * message = error_ ? kvt_error_message(error_) : nullptr;
    return std::string(what) + ": " + (message ? message : ("status " + std::to_string(status)).c_str());
}

uint64_t deadline_in(uint64_t seconds) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t(now.tv_sec) + seconds) * 1000000000u + uint64_t(now.tv_nsec);
}

std::string mebibytes(uint64_t bytes) {
    char text[48];
    std::snprintf(text, sizeof text, "%.1f MiB", double(bytes) / 1048576.0);
    return text;
}

Memory * Memory::get(std::string & why) {
    std::lock_guard<std::mutex> guard(opening);
    if (!the_memory) {
        Memory * made = new Memory;
        if (!made->open(why)) {
            kvt_account_close(&made->account_, nullptr);
            kvt_budget_close(&made->budget_, nullptr);
            kvt_device_close(&made->device_, 0, nullptr);
            kvt_runtime_close(&made->runtime_, 0, nullptr, nullptr);
            delete made;
            return nullptr;
        }
        // Lives as long as the process: nothing tells a plugin that it is not needed any more.
        the_memory = made;
    }
    return the_memory;
}

Memory * Memory::opened() {
    std::lock_guard<std::mutex> guard(opening);
    return the_memory;
}

bool Memory::open(std::string & why) {
    Failure failure;
    kvt_runtime_opts_t runtime_opts = KVT_RUNTIME_OPTS_INIT;
    kvt_status_t status = kvt_runtime_open(&runtime_opts, &runtime_, failure.out());
    if (status == KVT_OK) {
        kvt_budget_opts_t opts = KVT_BUDGET_OPTS_INIT;
        opts.host_bytes = settings().budget_bytes;
        // A user who sets a budget has reserved the rest already; 0 would reserve half a gigabyte.
        opts.reserve_bytes = settings().budget_bytes ? 1 : 0;
        if (inner_has_memory()) {
            tier_ = KVT_TIER_DEVICE;
            opts.device_bytes =
                settings().device_bytes ? settings().device_bytes : inner_free_bytes() / 10 * 9;
        }
        status = kvt_budget_open(runtime_, &opts, &budget_, failure.out());
    }
    if (status == KVT_OK && inner_has_memory()) {
        status = copy_device_open(runtime_, &device_, failure.out());
    }
    if (status == KVT_OK) {
        kvt_account_opts_t opts = KVT_ACCOUNT_OPTS_INIT;
        opts.name = "llama.cpp";
        opts.name_bytes = 9;
        // This account cannot give memory back. Large requests are served after those of weights.
        opts.priority = 1;
        status = kvt_account_open(budget_, &opts, &account_, failure.out());
    }
    if (status != KVT_OK) {
        why = failure.text("opening the memory budget", status);
    }
    return status == KVT_OK;
}

bool Memory::reserve(uint64_t bytes, const char * what, std::string & why) {
    kvt_status_t status = kvt_account_reserve(account_, tier_, bytes, nullptr);
    if (status == KVT_E_BUDGET) {
        kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
        opts.deadline_ns = deadline_in(RECLAIM_SECONDS);
        kvt_op_t * op = nullptr;
        status = kvt_account_reserve_later(account_, tier_, bytes, &opts, &op, nullptr);
        if (status == KVT_OK) {
            kvt_op_info_t info = KVT_OP_INFO_INIT;
            kvt_op_wait(op, KVT_OP_RELEASED, 0);
            status = kvt_op_info(op, &info);
            status = status == KVT_OK ? info.status : status;
            kvt_op_free(&op);
        }
    }
    if (status != KVT_OK) {
        const kvt_tier_report_t now = report();
        why = std::string(what) + " needs " + mebibytes(bytes) + ", but of the budget of " +
              mebibytes(now.limit_bytes) + " only " + mebibytes(now.free_bytes) + " are free: raise " +
              (inner_has_memory() ? "KVTIER_DEVICE_BUDGET" : "KVTIER_BUDGET") +
              ", or use a shorter context (-c)";
    }
    return status == KVT_OK;
}

bool Memory::charge(uint64_t bytes, const char * what, std::string & why) {
    if (bytes == 0) {
        return true;
    }
    return reserve(bytes, what, why) &&
           kvt_account_commit(account_, tier_, bytes, bytes, nullptr) == KVT_OK;
}

void Memory::release(uint64_t bytes) {
    if (bytes > 0) {
        kvt_account_release(account_, tier_, bytes, nullptr);
    }
}

bool Memory::reserve_ahead(uint64_t bytes, const char * what, std::string & why) {
    return bytes == 0 || reserve(bytes, what, why);
}

void Memory::unreserve(uint64_t bytes) {
    if (bytes > 0) {
        kvt_account_commit(account_, tier_, bytes, 0, nullptr);
    }
}

kvt_tier_report_t Memory::report() const {
    kvt_tier_report_t out = KVT_TIER_REPORT_INIT;
    kvt_budget_tier(budget_, tier_, &out);
    return out;
}

} // namespace kvtier_plugin
