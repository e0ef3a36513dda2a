// Brings the KV of a prompt into the context: from the KV tier, or without kvtier for comparison.
#pragma once

#include "engine.h"
#include "options.h"
#include "store.h"

#include <llama.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

using tokens_t = std::vector<llama_token>;

// Tokens of a prompt by the source of their KV. The remaining tokens are decoded.
struct prefix_reuse {
    uint32_t kept = 0; // resident in the context
    uint32_t host = 0;
    uint32_t disk = 0;
    uint32_t recomputed = 0;
    uint64_t bytes = 0;
    uint64_t ns = 0;
    std::string refused; // why a restore was refused or incomplete; empty otherwise

    uint32_t all() const { return kept + host + disk + recomputed; }
};

// Totals of a run: stored tokens, use of the tiers, evictions, failures.
struct cache_totals {
    uint64_t saved_tokens = 0, saved_bytes = 0;
    uint64_t host_bytes = 0, host_limit_bytes = 0, disk_bytes = 0, disk_limit_bytes = 0;
    uint64_t to_disk_chunks = 0; // evicted from memory, resident on disk
    uint64_t dropped_chunks = 0; // evicted from memory, in no tier
    uint64_t disk_evicted_chunks = 0;
    uint64_t failed_saves = 0, refused_restores = 0;
    uint64_t save_ns = 0;
};

// Adds the store's statistics.
void add_store_totals(const kv_store &store, cache_totals &out);

// Works on sequence 0 only. Functions throw failure.
class kv_cache {
  public:
    virtual ~kv_cache() = default;

    // Before a request: restores the longest prefix for which KV exists.
    virtual prefix_reuse attach(const tokens_t &tokens) = 0;
    // Decodes tokens [first, upto).
    virtual void prefill(const tokens_t &tokens, size_t first, size_t upto) = 0;
    // Decodes one token of an answer.
    virtual void decode(llama_token token) = 0;
    // Limit of a sequence.
    virtual size_t max_tokens() const = 0;
    // Saves the KV of these tokens, which are all of the sequence.
    virtual void commit(const tokens_t &tokens) = 0;
    // Waits until all committed tokens are stored. Returns the reason of a failure, else an empty string.
    virtual std::string flush() = 0;
    virtual cache_totals totals() const = 0;
    // More lines for the closing table, and fields for the summary.
    virtual std::string rows() const { return ""; }
    virtual void fields(json_object &) const {}
};

std::unique_ptr<kv_cache> open_tier(const options &o, engine &e, std::shared_ptr<kv_store> store);
std::unique_ptr<kv_cache> no_tier(const options &o, engine &e);
