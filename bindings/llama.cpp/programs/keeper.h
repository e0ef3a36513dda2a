// Who sees to it that the context holds a prompt: the KV tier, or the same run without it.
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

// Where the KV of a prompt came from. The rest is decoded.
struct found {
    uint32_t kept = 0;
    uint32_t host = 0;
    uint32_t disk = 0;
    uint32_t recomputed = 0;
    uint64_t bytes = 0;
    uint64_t ns = 0;
    std::string refused; // why not more, where something was refused

    uint32_t all() const { return kept + host + disk + recomputed; }
};

// What is stored, and what left the store.
struct kept_totals {
    uint64_t saved_tokens = 0, saved_bytes = 0;
    uint64_t host_bytes = 0, host_limit_bytes = 0, disk_bytes = 0, disk_limit_bytes = 0;
    uint64_t to_disk_chunks = 0;   // left memory, are on disk
    uint64_t dropped_chunks = 0;   // left memory, are gone
    uint64_t disk_evicted_chunks = 0;
    uint64_t failed_saves = 0, refused_restores = 0;
    uint64_t save_ns = 0;
};

// What the store has and did.
void add_store_totals(const kv_store &store, kept_totals &out);

// Everything happens in sequence 0. Throws failure.
class keeper {
  public:
    virtual ~keeper() = default;

    // Before a request: as much of it as there is.
    virtual found attach(const tokens_t &tokens) = 0;
    // Decodes tokens [first, upto).
    virtual void prefill(const tokens_t &tokens, size_t first, size_t upto) = 0;
    // Decodes one token of an answer.
    virtual void decode(llama_token token) = 0;
    // How long a sequence may become.
    virtual size_t most_tokens() const = 0;
    // These are in the sequence now.
    virtual void commit(const tokens_t &tokens) = 0;
    // Waits until all that was committed is stored. Gives the words of what could not be.
    virtual std::string flush() = 0;
    virtual kept_totals totals() const = 0;
    // More lines of the closing table, and fields of the summary.
    virtual std::string rows() const { return ""; }
    virtual void fields(json_object &) const {}
};

std::unique_ptr<keeper> open_tier(const options &o, engine &e, std::shared_ptr<kv_store> store);
std::unique_ptr<keeper> no_tier(const options &o, engine &e);
