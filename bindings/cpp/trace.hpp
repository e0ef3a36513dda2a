/// @file
/// kvt::trace: traces of requests, and their replay on a policy. How a policy would have done.
///
/// A trace is a list of requests with the hashes of their blocks. Replaying it on a policy gives the
/// hit ratio, the cost of misses and the time of decisions, without an engine.
///
/// Life cycle: trace::open or trace::generate, replay as often as wanted; the destructor frees it.
///
///     const kvt::trace trace = kvt::trace::open("requests.jsonl");
///     const std::uint64_t capacity = 5000; // in blocks
///     for (const char *policy : {"lru", "horizon"}) {
///         const kvt_replay_report_t report = trace.replay(policy, capacity);
///         std::printf("%s finds %.1f %% of the tokens\n", policy,
///                     100.0 * static_cast<double>(report.hit_tokens) / static_cast<double>(report.tokens));
///     }

#ifndef KVTIER_TRACE_HPP
#define KVTIER_TRACE_HPP

#include <kvtier/runtime.hpp>
#include <kvtier/trace.h>

namespace kvt {
inline namespace KVTIER_ERRORS_ {

/// Receives the number of replayed requests and their total; false cancels the replay.
using progress_fn = std::function<bool(std::uint64_t, std::uint64_t)>;

// [kvt_trace_opts_t: by generate.py]
/// Options of kvt_trace_open and kvt_trace_generate.
struct trace_opts {
    /// Each block becomes a request of its own, without a prefix.
    bool flat = false;
    /// kvt_trace_open: kvtier, mooncake, weka, sharegpt, azure, oracle or csv; empty = detect from
    /// the content. kvt_trace_generate: chat, agent, batch, multitenant or burst.
    std::string_view kind{};
    /// Tokens of a block, at most 2^20, unless the file states it; 0 = 512.
    std::uint64_t block_tokens = 0;
    /// Seed of generated workloads, and of times that a file lacks; 0 = 7.
    std::uint64_t seed = 0;
    /// kvt_trace_open: mean time between session starts that a file (weka, sharegpt) lacks; 0 = the
    /// format's default.
    std::chrono::nanoseconds gap{0};
    /// Later requests are dropped, if generated or with random start times; 0 = one day.
    std::chrono::nanoseconds duration{0};
    /// kvt_trace_generate: sessions started per second; 0 = the default of the kind.
    double rate = 0;

    kvt_trace_opts_t to_c() const noexcept {
        kvt_trace_opts_t c = KVT_TRACE_OPTS_INIT;
        if (flat) c.flags |= KVT_TRACE_FLAT;
        detail::text(kind, c.kind, c.kind_bytes);
        c.block_tokens = block_tokens;
        c.seed = seed;
        c.gap_ns = detail::count(gap);
        c.duration_ns = detail::count(duration);
        c.rate = rate;
        return c;
    }
};
// [end]

// [kvt_replay_opts_t: by generate.py]
/// Options of kvt_trace_replay.
struct replay_opts {
    /// The engine can use blocks after a hole.
    bool holes = false;
    /// Does not measure decision times; faster.
    bool untimed = false;
    /// Requests replayed before counting starts.
    std::uint64_t warm_up = 0;
    /// Objects are cells of this many layers, at most 1,024; 0 = whole blocks.
    std::uint32_t layers = 0;
    /// KVT_HINTS_STOP, KVT_HINTS_NONE, KVT_HINTS_THINK.
    kvt_hints_t hints = KVT_HINTS_STOP;
    /// Attention cost of a token per token of context, 0 to 1e12, where computing a token costs 1;
    /// 0 = 1 / 53,800, a model of the 70B class.
    double alpha = 0;
    /// A copy is called on the calling thread. An exception cancels the replay.
    progress_fn progress{};

    kvt_replay_opts_t to_c() const noexcept {
        kvt_replay_opts_t c = KVT_REPLAY_OPTS_INIT;
        if (holes) c.flags |= KVT_REPLAY_HOLES;
        if (untimed) c.flags |= KVT_REPLAY_UNTIMED;
        c.warm_up = warm_up;
        c.layers = layers;
        c.hints = hints;
        c.alpha = alpha;
        return c;
    }
};
// [end]

namespace detail {
struct progress_box {
    progress_fn call;
    static std::int32_t run(void *user_data, std::uint64_t done, std::uint64_t total) noexcept {
        return guarded<bool>("kvt progress", false, static_cast<progress_box *>(user_data)->call,
                             done, total);
    }
};
}  // namespace detail

/// A trace: requests to a KV cache over time. Immutable; any thread may use it.
class trace : public detail::owner<trace, kvt_trace_t> {
    friend class detail::owner<trace, kvt_trace_t>;
    static void drop(kvt_trace_t *raw) noexcept {
        const kvt_status_t status = kvt_trace_free(&raw);
        if (!detail::ended(status)) detail::report("kvt::trace", status);
    }

public:
    /// Reads a trace file, plain or zstd.
    static ret<trace> open(std::string_view path, const trace_opts &opts = {}) {
        detail::failure f;
        kvt_trace_opts_t c = opts.to_c();
        detail::text(path, c.path, c.path_bytes);
        kvt_trace_t *raw = nullptr;
        const kvt_status_t status = kvt_trace_open(&c, &raw, f.out());
        return detail::give(status, f, trace::adopt(raw));
    }
    /// Generates a workload, such as "chat".
    static ret<trace> generate(const trace_opts &opts) {
        detail::failure f;
        const kvt_trace_opts_t c = opts.to_c();
        kvt_trace_t *raw = nullptr;
        const kvt_status_t status = kvt_trace_generate(&c, &raw, f.out());
        return detail::give(status, f, trace::adopt(raw));
    }
    ret<void> close() { return detail::check(kvt_trace_free(&raw_)); }

    ret<kvt_trace_info_t> info() const {
        kvt_trace_info_t info = KVT_TRACE_INFO_INIT;
        const kvt_status_t status = kvt_trace_info(raw_, &info);
        return detail::give(status, info);
    }
    /// Replays the trace on a policy with a capacity in blocks.
    ret<kvt_replay_report_t> replay(std::string_view spec, std::uint64_t capacity_blocks,
                                    const replay_opts &opts = {}) const {
        detail::failure f;
        kvt_replay_opts_t c = opts.to_c();
        detail::text(spec, c.spec, c.spec_bytes);
        c.capacity_blocks = capacity_blocks;
        // A copy: the callable may destroy the options.
        detail::progress_box box{opts.progress};
        if (box.call) {
            c.progress = &detail::progress_box::run;
            c.user_data = &box;
        }
        kvt_replay_report_t report = KVT_REPLAY_REPORT_INIT;
        const kvt_status_t status = kvt_trace_replay(raw_, &c, &report, f.out());
        return detail::give(status, f, report);
    }
};

}  // namespace KVTIER_ERRORS_
}  // namespace kvt

#endif  // KVTIER_TRACE_HPP
