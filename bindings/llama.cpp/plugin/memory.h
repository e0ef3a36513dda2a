// The process's memory for weights and KV: kvtier's runtime and one budget for all models.
#ifndef KVTIER_PLUGIN_MEMORY_H
#define KVTIER_PLUGIN_MEMORY_H

#include <kvtier/kvtier.h>

#include <mutex>
#include <string>

namespace kvtier_plugin {

// Owns an error of the library.
class Failure {
public:
    Failure() = default;
    ~Failure() { kvt_error_free(&error_); }
    Failure(const Failure &) = delete;
    Failure & operator=(const Failure &) = delete;
    kvt_error_t ** out() { return &error_; }
    std::string text(const char * what, kvt_status_t status) const;

private:
    kvt_error_t * error_ = nullptr;
};

class Memory {
public:
    // Opens runtime and budget at the first call; null with a text on failure.
    static Memory * get(std::string & why);
    // The open one, or null.
    static Memory * opened();

    const kvt_runtime_t * runtime() const { return runtime_; }
    const kvt_budget_t * budget() const { return budget_; }
    // Null if the CPU computes.
    const kvt_device_t * device() const { return device_; }

    // Charges memory that is about to be allocated. If the budget is full, waits until streamers gave
    // memory back.
    bool charge(uint64_t bytes, const char * what, std::string & why);
    void release(uint64_t bytes);
    // Reserves memory for later use.
    bool reserve_ahead(uint64_t bytes, const char * what, std::string & why);
    void unreserve(uint64_t bytes);

    kvt_tier_report_t report() const;

private:
    bool open(std::string & why);
    bool reserve(uint64_t bytes, const char * what, std::string & why);

    kvt_runtime_t * runtime_ = nullptr;
    kvt_budget_t * budget_ = nullptr;
    kvt_account_t * account_ = nullptr;
    kvt_device_t * device_ = nullptr;
    // The tier whose memory the inner device computes in.
    uint32_t tier_ = KVT_TIER_HOST;
};

// CLOCK_MONOTONIC, `seconds` from now.
uint64_t deadline_in(uint64_t seconds);

std::string mebibytes(uint64_t bytes);

} // namespace kvtier_plugin

#endif
