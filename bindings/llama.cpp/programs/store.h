// The store of a run, which the KV tier and the closing table share.
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

// Opens the store, before the model is loaded, so that errors show early. Throws failure.
std::shared_ptr<kv_store> open_store(const options &o);

// 120 s from now: only a broken disk misses this deadline of a flush.
uint64_t flush_deadline_ns();
