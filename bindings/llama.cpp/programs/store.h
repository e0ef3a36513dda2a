// The store of a run, which the tier and the closing table share.
#pragma once

#include "options.h"

#include <kvtier/kvtier.h>

#include <memory>
#include <string>

struct kv_store {
    kvt_runtime_t *runtime = nullptr;
    kvt_store_t *store = nullptr;

    kv_store() = default;
    ~kv_store();
    kv_store(const kv_store &) = delete;
    kv_store &operator=(const kv_store &) = delete;
};

// Opened before a model is loaded: what is wrong with it is known soon. Throws failure.
std::shared_ptr<kv_store> open_store(const options &o);

// A deadline for what a working disk has done long before.
uint64_t flush_deadline_ns();
