// Statistics of a run, for the closing table and for JSON.
#pragma once

#include "answer.h"
#include "kv_cache.h"
#include "screen.h"

class report {
  public:
    void add(const answer_t &a);
    // Counts a failed request.
    void add_failure() { ++failed_; }

    // Prints the table on standard error, or the line of type "summary".
    void show(screen &out, const engine &e, const kv_cache &cache, bool kv) const;

    uint64_t failures() const { return failed_; }

  private:
    void table(screen &out, const engine &e, const kv_cache &cache, bool kv) const;

    uint64_t answers_ = 0, failed_ = 0;
    uint64_t prompt_ = 0, kept_ = 0, host_ = 0, disk_ = 0, recomputed_ = 0, prefilled_ = 0, decoded_ = 0;
    uint64_t restored_bytes_ = 0;
    double restore_ns_ = 0, prefill_ns_ = 0, decode_ns_ = 0, first_ns_ = 0;
};

// The line of type "answer", without the user's name.
json_object answer_line(const answer_t &a);
