// The memory that a process gives weights and KV: kvtier's runtime and one budget, for all models.
#ifndef KVTIER_PLUGIN_MEMORY_H
#define KVTIER_PLUGIN_MEMORY_H

#include <kvtier/kvtier.h>

#include <mutex>
#include <string>

namespace kvtier_plugin {

// An error of the library, in words.
class Failure {
public:
    Failure() = default;
    ~Failure() { kvt_error_free(&error_); }
    Failure(const Failure &) = delete;
    Failure & operator=(const Failure &) = delete;
    kvt_error_t ** out() { return &error_; }
    std::string words(const char * what, kvt_status_t status) const;

private:
    kvt_error_t * error_ = nullptr;
};

class Memory {
public:
    // Opens runtime and budget at the first call. Null with words where that fails.
    static Memory * get(std::string & why);
    // The one that is open, or null.
    static Memory * opened();

    const kvt_runtime_t * runtime() const { return runtime_; }
    const kvt_budget_t * budget() const { return budget_; }
    // Null where the processor computes.
    const kvt_device_t * device() const { return device_; }

    // Pays for memory that is about to be taken. Where it does not fit, streamers are asked to give
    // back what they keep, and waited for.
    bool charge(uint64_t bytes, const char * what, std::string & why);
    void give_back(uint64_t bytes);
    // Memory that has to be there later; it is not used yet.
    bool promise(uint64_t bytes, const char * what, std::string & why);
    void forget_promise(uint64_t bytes);

    kvt_tier_report_t report() const;

private:
    bool open(std::string & why);
    bool reserve(uint64_t bytes, const char * what, std::string & why);

    kvt_runtime_t * runtime_ = nullptr;
    kvt_budget_t * budget_ = nullptr;
    kvt_account_t * account_ = nullptr;
    kvt_device_t * device_ = nullptr;
    // Where what is computed with lies.
    uint32_t tier_ = KVT_TIER_HOST;
};

// CLOCK_MONOTONIC, so many seconds from now.
uint64_t deadline_in(uint64_t seconds);

std::string mebibytes(uint64_t bytes);

} // namespace kvtier_plugin

#endif
