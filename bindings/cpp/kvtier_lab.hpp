// kvt::trace: traces of requests, and their replay on a policy. kvtier.hpp includes this file.

#ifndef KVTIER_LAB_HPP
#define KVTIER_LAB_HPP

#ifndef KVTIER_HPP
#error "include <kvtier/kvtier.hpp>"
#endif

namespace kvt {
inline namespace KVTIER_FACE_ {

/// Options of trace::open and trace::generate. 0 is the default of every field.
struct trace_opts {
    /// trace::open: the format, empty = detect it from the content. trace::generate: the workload.
    std::string_view kind;
    /// KVT_TRACE_*.
    std::uint64_t flags = 0;
    std::uint64_t block_tokens = 0;
    std::uint64_t seed = 0;
    /// trace::open: mean time between session starts that the file lacks.
    std::chrono::nanoseconds gap{0};
    /// Later requests are dropped; 0 = one day.
    std::chrono::nanoseconds duration{0};
    /// trace::generate: sessions started per second.
    double rate = 0;
};

/// Receives the number of replayed requests and their total; false cancels the replay.
using progress_fn = std::function<bool(std::uint64_t, std::uint64_t)>;

/// Options of a replay.
struct replay_opts {
    /// KVT_REPLAY_*.
    std::uint64_t flags = 0;
    /// Requests replayed before counting starts.
    std::uint64_t warm_up = 0;
    /// Objects are cells of this many layers; 0 = whole blocks.
    std::uint32_t layers = 0;
    /// KVT_HINTS_*.
    std::uint32_t hints = KVT_HINTS_STOP;
    /// Attention cost of a token per token of context; 0 = the default.
    double alpha = 0;
    /// A copy is called on the calling thread. An exception cancels the replay.
    progress_fn progress;
};

namespace detail {
inline kvt_trace_opts_t lower(const trace_opts &opts, std::string_view path) noexcept {
    kvt_trace_opts_t c = KVT_TRACE_OPTS_INIT;
    c.flags = opts.flags;
    detail::text(path, c.path, c.path_bytes);
    detail::text(opts.kind, c.kind, c.kind_bytes);
    c.block_tokens = opts.block_tokens;
    c.seed = opts.seed;
    // A negative duration becomes a very large number, which the library rejects.
    c.gap_ns = static_cast<std::uint64_t>(opts.gap.count());
    c.duration_ns = static_cast<std::uint64_t>(opts.duration.count());
    c.rate = opts.rate;
    return c;
}

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
        const kvt_trace_opts_t c = detail::lower(opts, path);
        kvt_trace_t *raw = nullptr;
        const kvt_status_t status = kvt_trace_open(&c, &raw, f.out());
        return detail::give(status, f, trace::adopt(raw));
    }
    /// Generates a workload, such as "chat".
    static ret<trace> generate(const trace_opts &opts) {
        detail::failure f;
        const kvt_trace_opts_t c = detail::lower(opts, {});
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
        kvt_replay_opts_t c = KVT_REPLAY_OPTS_INIT;
        c.flags = opts.flags;
        detail::text(spec, c.spec, c.spec_bytes);
        c.capacity_blocks = capacity_blocks;
        c.warm_up = opts.warm_up;
        c.layers = opts.layers;
        c.hints = opts.hints;
        c.alpha = opts.alpha;
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

}  // namespace KVTIER_FACE_
}  // namespace kvt

#endif  // KVTIER_LAB_HPP
