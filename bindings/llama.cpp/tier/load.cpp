// kvt_llama_attach: before a request is decoded, finds the reusable prefix of its prompt in the sequence and
// in the store, and restores it into the sequence.
#include "tier/tier.hpp"

#include <algorithm>

namespace kvtier_llama {

namespace {

constexpr uint64_t pending_wait_ns = 2000000000;
constexpr uint64_t prefetch_wait_ns = 5000000000;

/// A prompt to attach, and the results so far.
struct request {
    llama_seq_id seq;
    const llama_token *tokens;
    /// Most tokens that may be reused: all but the last, which must be decoded.
    size_t limit;
    /// Tokens of the prompt that are in the sequence already, and after which decoding can continue.
    size_t keep = 0;
    kvt_llama_attached_t *out;
};

/// Corrects the tier's record of a sequence if it differs from the engine's KV cache.
void check_sequence_record(tier_t &tier, const request &of) {
    if (tier.sequences[of.seq].forgotten) {
        llama_memory_seq_rm(tier.memory, of.seq, -1, -1);
        tier.sequences[of.seq] = sequence_t{};
    }
    const size_t end = trim(tier, of.seq);
    const bool plain = !tier.shape.has_states() && !tier.shape.has_windows();
    if (plain && end > 0 && llama_memory_seq_pos_min(tier.memory, of.seq) != 0) {
        tier.sequences[of.seq] = sequence_t{};
    }
}

uint32_t largest_window(const tier_t &tier) {
    uint32_t window = 0;
    for (const section_shape &section : tier.shape.sections) {
        window = std::max(window, section.window_tokens);
    }
    return window;
}

/// Number of tokens of the sequence that can stay: the common prefix with the prompt, if the engine can
/// continue decoding after it.
size_t keepable_tokens(const tier_t &tier, const request &of) {
    const tokens_t &has = tier.sequences.at(of.seq).tokens;
    const size_t shorter = std::min(has.size(), of.limit);
    const auto differ = std::mismatch(has.begin(), has.begin() + long(shorter), of.tokens);
    const size_t common = size_t(differ.first - has.begin());
    const size_t end = size_t(llama_memory_seq_pos_max(tier.memory, of.seq) + 1);
    if (common == end || common == 0) {
        return common;
    }
    if (tier.shape.has_states()) {
        return 0;
    }
    const uint32_t window = largest_window(tier);
    const size_t first = common > window ? common - window : 0;
    const bool has_window = size_t(llama_memory_seq_pos_min(tier.memory, of.seq)) <= first;
    return window == 0 || has_window ? common : 0;
}

/// Result of a lookup in the store.
struct lookup_result {
    /// Reusable tokens, in full chunks.
    size_t reusable = 0;
    std::vector<kvt_range_t> ranges;
};

bool is_on_disk(const lookup_result &result) {
    return std::any_of(result.ranges.begin(), result.ranges.end(),
                       [](const kvt_range_t &range) { return range.disk_bytes != 0; });
}

/// A prefetch of [from, to) from disk to host memory, so that all disk reads start at once and not piece by
/// piece. Only if `wanted`, and if the KV fits half of the store's host memory.
class prefetch_op {
public:
    prefetch_op(const tier_t &tier, const session &held, size_t from, size_t to, bool wanted) {
        kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
        kvt_transfer_t transfer = KVT_TRANSFER_INIT;
        transfer.first_token = from;
        transfer.tokens = to - from;
        transfer.flags = KVT_TRANSFER_NEEDED_ONLY;
        if (wanted && from < to && kvt_store_stats(tier.store, &stats) == KVT_OK &&
            (to - from) * tier.token_bytes <= stats.host_limit_bytes / 2) {
            kvt_submit_opts_t submit = KVT_SUBMIT_OPTS_INIT;
            submit.deadline_ns = now_ns() + prefetch_wait_ns;
            kvt_session_prefetch(held.handle, &transfer, &submit, &op, nullptr);
        }
    }
    prefetch_op(const prefetch_op &) = delete;
    prefetch_op &operator=(const prefetch_op &) = delete;
    ~prefetch_op() {
        if (op) {
            // A prefetch uses no memory of the caller, so it may stay in flight after the wait.
            kvt_op_cancel(op);
            kvt_op_wait(op, KVT_OP_RELEASED, now_ns() + prefetch_wait_ns);
            kvt_op_free(&op);
        }
    }

private:
    kvt_op_t *op = nullptr;
};

kvt_lookup_t lookup_once(const tier_t &tier, const request &of, size_t count,
                       std::vector<kvt_range_t> *ranges) {
    const auto *words = reinterpret_cast<const uint32_t *>(of.tokens);
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
    ranges->resize(64);
    for (;;) {
        uint64_t range_count = 0;
        const kvt_status_t status =
            kvt_namespace_lookup(tier.space, words, count, ranges->data(), ranges->size(),
                                 sizeof(kvt_range_t), &range_count, &sum, nullptr);
        if (status != KVT_E_TOO_SMALL) {
            require_ok(status, nullptr, "looking up the KV of the prompt");
            ranges->resize(range_count);
            return sum;
        }
        ranges->resize(range_count + range_count / 4);
    }
}

/// Looks up the first `count` tokens of the prompt. If more are reusable once saves in flight have ended, waits
/// for these.
lookup_result lookup(tier_t &tier, const request &of, size_t count) {
    lookup_result out;
    if (count == 0) {
        return out;
    }
    kvt_lookup_t sum = lookup_once(tier, of, count, &out.ranges);
    if (sum.reusable_soon_tokens > sum.reusable_tokens) {
        drain(tier, now_ns() + pending_wait_ns);
        sum = lookup_once(tier, of, count, &out.ranges);
    }
    out.reusable = full_chunks(tier, std::min<uint64_t>(sum.reusable_tokens, count));
    return out;
}

/// Counts the restored tokens [first, end) by the tier that they were in.
void count_tiers(const lookup_result &result, size_t first, size_t end, kvt_llama_attached_t *out) {
    uint64_t disk = 0;
    uint32_t tier = KVT_TIER_HOST;
    // Tokens whose KV is not needed count for the tier of the tokens after them.
    for (size_t i = result.ranges.size(); i-- > 0;) {
        const kvt_range_t &range = result.ranges[i];
        const uint64_t begin = std::max<uint64_t>(range.first_token, first);
        const uint64_t stop = std::min<uint64_t>(range.first_token + range.tokens, end);
        tier = range.state == KVT_RANGE_HIT ? range.tier : tier;
        disk += begin < stop && tier == KVT_TIER_DISK ? stop - begin : 0;
    }
    out->disk_tokens += uint32_t(disk);
    out->host_tokens += uint32_t(end - first - disk);
}

/// Reduces the number of saved tokens if the store has evicted some of them since, so that they are saved again.
void check_saved(tier_t &tier, sequence_t &has) {
    if (has.saved == 0 || tier.shape.has_states() || tier.shape.has_windows()) {
        return;
    }
    const auto *words = reinterpret_cast<const uint32_t *>(has.tokens.data());
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
    if (kvt_namespace_lookup(tier.space, words, has.saved, nullptr, 0, sizeof(kvt_range_t), nullptr, &sum,
                             nullptr) != KVT_E_INVALID) {
        has.saved = full_chunks(tier, std::min<uint64_t>(has.saved, sum.reusable_soon_tokens));
    }
}

/// Saves the tokens after the first `keep`, and removes them from the sequence. False: the sequence is empty now.
bool truncate_sequence(tier_t &tier, const request &of, size_t keep) {
    sequence_t &has = tier.sequences[of.seq];
    if (has.tokens.size() > keep) {
        check_saved(tier, has);
        save(tier, of.seq, now_ns() + pending_wait_ns, true);
        keep_tail(tier, of.seq);
    }
    bool kept = keep != 0 && llama_memory_seq_rm(tier.memory, of.seq, llama_pos(keep), -1);
    if (!kept) {
        llama_memory_seq_rm(tier.memory, of.seq, -1, -1);
        keep = 0;
    }
    has.tokens.resize(keep);
    has.saved = std::min(has.saved, full_chunks(tier, keep));
    has.state_saved = std::min(has.state_saved, keep);
    return kept;
}

/// Records that the sequence has the first `count` tokens of the prompt, and that these are saved.
void record_tokens(tier_t &tier, const request &of, size_t count) {
    sequence_t &has = tier.sequences[of.seq];
    has.tokens.assign(of.tokens, of.tokens + count);
    has.saved = full_chunks(tier, count);
    has.state_saved = count;
    has.forgotten = false;
}

/// Reports and counts a restore that failed or was incomplete.
void refuse(tier_t &tier, request &of, kvt_status_t status) {
    of.out->refused = status;
    tier.stats.refused_restores++;
}

/// Empties a sequence after a restore that leaves KV from which decoding cannot continue.
size_t empty_sequence(tier_t &tier, const request &of) {
    llama_memory_seq_rm(tier.memory, of.seq, -1, -1);
    record_tokens(tier, of, 0);
    return 0;
}

/// Restores [from, to) and, if there is one, the tail after it. Returns the number of tokens of the sequence then.
size_t restore_prefix(tier_t &tier, request &of, const lookup_result &result, size_t from, size_t to,
                      const tail_t *tail) {
    const session held(tier, of.tokens, to);
    const bool state_only = !tier.shape.has_attention();
    const bool with_state = !tail && tier.shape.has_states();
    restored_t done;
    if (state_only) {
        // Without attention only the state at the end is needed: that of the last chunk, or the tail's.
        done = tail ? restored_t{uint32_t(to), 0, KVT_OK}
                    : restore(tier, held, of.seq, uint32_t(to) - tier.chunk, uint32_t(to), true);
    } else {
        const prefetch_op prefetch(tier, held, from, to, is_on_disk(result));
        done = restore(tier, held, of.seq, uint32_t(from), uint32_t(to), with_state);
    }
    of.out->bytes += done.bytes;
    const bool needs_end = tier.shape.has_states() || tier.shape.has_windows();
    if (done.refused != KVT_OK) {
        refuse(tier, of, done.refused);
    }
    if (done.tokens < to && needs_end) {
        return empty_sequence(tier, of);
    }
    count_tiers(result, from, std::max<size_t>(done.tokens, from), of.out);
    size_t end = done.tokens;
    if (tail && end == to) {
        const bool empty = state_only || to == 0;
        if (splice(tier, of.seq, empty, tail->blob.data(), tail->blob.size())) {
            end = tail->tokens.size();
            of.out->bytes += tail->blob.size();
            of.out->host_tokens += uint32_t(end - to);
        } else if (tier.shape.has_states()) {
            refuse(tier, of, KVT_E_STATE);
            return empty_sequence(tier, of);
        }
    }
    if (llama_memory_seq_pos_max(tier.memory, of.seq) + 1 != llama_pos(end)) {
        refuse(tier, of, KVT_E_STATE);
        return empty_sequence(tier, of);
    }
    record_tokens(tier, of, end);
    return end;
}

/// A tail that may be restorable: the tokens before it are reusable or in the sequence. With recurrent states
/// only the restore itself shows that.
std::shared_ptr<const tail_t> usable_tail(const tier_t &tier, const request &of, size_t reusable) {
    std::shared_ptr<const tail_t> tail = find_tail(tier, of.tokens, of.limit, std::max(reusable, of.keep));
    if (!tail || (tier.scratch < 0 && tier.shape.has_attention())) {
        return nullptr;
    }
    const size_t before = full_chunks(tier, tail->tokens.size());
    const bool usable = before <= reusable || before <= of.keep || tier.shape.has_states();
    return usable ? tail : nullptr;
}

/// Restores the longest reusable prefix. Returns the number of tokens of the sequence.
size_t attach_prefix(tier_t &tier, request &of) {
    size_t limit = full_chunks(tier, of.limit);
    // A get may miss chunks that the lookup reported: then look up a shorter prefix and try again.
    for (int attempt = 0; attempt < 3; attempt++) {
        const lookup_result result = lookup(tier, of, limit);
        std::shared_ptr<const tail_t> tail;
        if (attempt == 0) {
            tail = usable_tail(tier, of, result.reusable);
        }
        const size_t to = tail ? full_chunks(tier, tail->tokens.size()) : result.reusable;
        if (!tail && to <= of.keep) {
            break;
        }
        const bool from_start = tier.scratch < 0 || tier.shape.has_states() || tier.shape.has_windows();
        const size_t keep = from_start ? 0 : std::min(full_chunks(tier, of.keep), to);
        of.keep = truncate_sequence(tier, of, keep) ? keep : 0;
        of.out->host_tokens = of.out->disk_tokens = 0;
        const uint64_t refused = tier.stats.refused_restores;
        const size_t end = restore_prefix(tier, of, result, of.keep, to, tail.get());
        if (tail && to > result.reusable && end == 0) {
            // The tail was only a guess, beyond the reusable prefix: this does not count as a failed restore.
            tier.stats.refused_restores = refused;
            of.out->refused = KVT_OK;
        }
        if (end > of.keep || end == limit) {
            return end;
        }
        limit = std::min(limit, tail ? limit : full_chunks(tier, to - 1));
    }
    of.out->host_tokens = of.out->disk_tokens = 0;
    const size_t keep = std::min(of.keep, tier.sequences[of.seq].tokens.size());
    of.keep = truncate_sequence(tier, of, keep) ? keep : 0;
    return of.keep;
}

/// Records the first `count` tokens, when some of them were recomputed or not saved yet.
void record_with_holes(tier_t &tier, const request &of, size_t count) {
    sequence_t &has = tier.sequences[of.seq];
    const size_t stored = has.saved;
    record_tokens(tier, of, count);
    if (of.out->recomputed_tokens != 0 || stored < full_chunks(tier, of.keep)) {
        has.saved = std::min(stored, has.saved);
    }
}

/// As attach_prefix, for a namespace with holes: restores reusable chunks and decodes the tokens between them, in
/// the order of positions.
size_t attach_holes(tier_t &tier, request &of) {
    const size_t limit = full_chunks(tier, of.limit);
    const lookup_result result = lookup(tier, of, limit);
    const session held(tier, of.tokens, limit);
    std::vector<kvt_plan_step_t> plan(limit / tier.chunk + 1);
    uint64_t count = 0;
    if (limit != 0) {
        kvt_error_t *error = nullptr;
        const kvt_status_t status = kvt_session_plan(held.handle, nullptr, plan.data(), plan.size(),
                                                     sizeof plan[0], &count, nullptr, &error);
        require_ok(status, error, "planning the request");
    }
    while (count > 0 && plan[count - 1].kind == KVT_PLAN_RECOMPUTE) {
        count--;
    }
    const size_t last = count != 0 ? plan[count - 1].first_token + plan[count - 1].tokens : 0;
    const size_t keep = last > of.keep ? full_chunks(tier, of.keep) : of.keep;
    of.keep = truncate_sequence(tier, of, keep) ? keep : 0;
    size_t end = of.keep;
    for (uint64_t i = 0; i < count; i++) {
        const size_t to = plan[i].first_token + plan[i].tokens;
        if (to <= end) {
            continue;
        }
        if (plan[i].kind == KVT_PLAN_RECOMPUTE) {
            if (decode(tier, of.seq, of.tokens, end, to, false) != 0) {
                return empty_sequence(tier, of);
            }
            of.out->recomputed_tokens += uint32_t(to - end);
        } else {
            const restored_t done = restore(tier, held, of.seq, uint32_t(end), uint32_t(to), false);
            count_tiers(result, end, done.tokens, of.out);
            of.out->bytes += done.bytes;
            if (done.tokens < to) {
                refuse(tier, of, done.refused);
                record_with_holes(tier, of, done.tokens);
                return done.tokens;
            }
        }
        end = to;
    }
    if (end > of.keep) {
        record_with_holes(tier, of, end);
    }
    return end;
}

/// Why a restore was incomplete, for people.
const char *reason_of(kvt_status_t refused) {
    switch (refused) {
    case KVT_OK: return "";
    case KVT_E_NOT_FOUND: return "some of its KV was evicted from the store, or is damaged";
    case KVT_E_STATE: return "the context rejected the KV: its KV cache is full";
    case KVT_E_AGAIN: return "no staging buffer was free in time";
    case KVT_E_TIMEOUT: return "the disk reads did not complete in time";
    default: return kvt_status_str(refused);
    }
}

void attach(tier_t &tier, request &of) {
    check_scratch(tier);
    check_sequence_record(tier, of);
    of.keep = keepable_tokens(tier, of);
    const size_t end = tier.holes ? attach_holes(tier, of) : attach_prefix(tier, of);
    kvt_llama_attached_t &out = *of.out;
    out.reused_tokens = uint32_t(end);
    out.kept_tokens = uint32_t(std::min(of.keep, end));
    kvt_llama_tier_stats_t &stats = tier.stats;
    stats.reused_tokens += out.reused_tokens;
    stats.kept_tokens += out.kept_tokens;
    stats.host_tokens += out.host_tokens;
    stats.disk_tokens += out.disk_tokens;
    stats.recomputed_tokens += out.recomputed_tokens;
}

} // namespace

} // namespace kvtier_llama

using namespace kvtier_llama;

extern "C" kvt_status_t kvt_llama_attach(kvt_llama_tier_t *tier, llama_seq_id seq,
                                         const llama_token *tokens, size_t n_tokens,
                                         kvt_llama_attached_t *out, kvt_llama_why_t *why) {
    kvt_llama_attached_t unused;
    kvt_llama_attached_t *report = out ? out : &unused;
    *report = kvt_llama_attached_t{};
    return guarded(why, [&] {
        if (!tier || !tokens || n_tokens == 0 || n_tokens > INT32_MAX) {
            fail(KVT_E_INVALID, "attach needs a tier and a prompt of at least one token");
        }
        const uint64_t start = now_ns();
        check_sequence(*tier, seq);
        check_tokens(*tier, tokens, n_tokens);
        request of{seq, tokens, n_tokens - 1, 0, report};
        const kvt_status_t status = guarded(why, [&] {
            attach(*tier, of);
            return KVT_OK;
        });
        if (status != KVT_OK) {
            // The store failed, or memory was short: the request is decoded from its start.
            empty_sequence(*tier, of);
            *report = kvt_llama_attached_t{};
            refuse(*tier, of, status);
        } else {
            tell(why, reason_of(report->refused));
        }
        report->ns = now_ns() - start;
        tier->stats.attaches++;
        tier->stats.attach_ns += report->ns;
        return KVT_OK;
    });
}
