// Attach: looks up the reusable prefix of a prompt, and restores it into the sequence.
#include "tier/tier.hpp"

#include <algorithm>

namespace kvtier_llama {

namespace {

constexpr uint64_t pending_wait_ns = 2000000000;
constexpr uint64_t prefetch_wait_ns = 5000000000;
constexpr uint64_t remote_wait_ns = 500000000;

/// An attach request and what is known about it.
struct request {
    llama_seq_id seq;
    /// The part of the prompt that may be reused: all but its last token, or the media that end it.
    prompt_t prompt;
    /// Tokens that the sequence already has, equal to the prompt's, from which decoding can
    /// continue.
    size_t keep = 0;
    kvt_llama_attached_t *out;
};

/// Compares the tier's record of a sequence with the engine's state.
void check_held(tier_t &tier, const request &of) {
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

/// Length of the common prefix that can stay, if the engine can continue from its end.
size_t reusable_length(const tier_t &tier, const request &of) {
    const size_t common = of.prompt.common(tier.sequences.at(of.seq).prompt());
    const llama_pos end = llama_memory_seq_pos_max(tier.memory, of.seq) + 1;
    if (of.prompt.end_position(common) == end || common == 0) {
        return common;
    }
    if (tier.shape.has_states()) {
        return 0;
    }
    const uint32_t window = tier.shape.window_tokens();
    const size_t first = common > window ? common - window : 0;
    const bool whole = size_t(llama_memory_seq_pos_min(tier.memory, of.seq)) <= first;
    return window == 0 || whole ? common : 0;
}

struct lookup_result {
    size_t reusable = 0;
    /// What the remote answered is known as long as this is open.
    std::unique_ptr<session> asking;
    std::vector<kvt_range_t> ranges;
};

bool is_on_disk(const lookup_result &cached) {
    return std::any_of(cached.ranges.begin(), cached.ranges.end(),
                       [](const kvt_range_t &range) { return range.disk_bytes != 0; });
}

/// Prefetches everything that is on disk at once, instead of piece by piece, if half of the store's
/// host memory can hold it.
class prefetched {
public:
    prefetched(const tier_t &tier, const session &held, size_t from, size_t to, bool wanted) {
        kvt_store_stats_t stats = KVT_STORE_STATS_INIT;
        kvt_transfer_t transfer = KVT_TRANSFER_INIT;
        transfer.first_token = from;
        transfer.tokens = to - from;
        transfer.flags = KVT_TRANSFER_NEEDED_ONLY;
        if (wanted && from < to && kvt_store_stats(tier.store, &stats) == KVT_OK &&
            (to - from) * tier.token_bytes <= stats.host_limit_bytes / 2) {
            kvt_submit_opts_t until = KVT_SUBMIT_OPTS_INIT;
            until.deadline_ns = now_ns() + prefetch_wait_ns;
            kvt_session_prefetch(held.handle, &transfer, &until, &op, nullptr);
        }
    }
    prefetched(const prefetched &) = delete;
    prefetched &operator=(const prefetched &) = delete;
    ~prefetched() {
        if (op) {
            // A prefetch uses no memory of the tier: if it does not complete it may be abandoned.
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
    const stored_sequence all(of.prompt.prefix(count));
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
    ranges->resize(64);
    for (;;) {
        uint64_t range_count = 0;
        const kvt_status_t status =
            kvt_namespace_lookup_media(tier.kv_namespace, &all.sequence, ranges->data(), ranges->size(),
                                       sizeof(kvt_range_t), &range_count, &sum, nullptr);
        if (status != KVT_E_TOO_SMALL) {
            demand(status, nullptr, "looking up the prompt's KV");
            ranges->resize(range_count);
            return sum;
        }
        ranges->resize(range_count + range_count / 4);
    }
}

/// Looks the prompt up at the store's remote. A late answer is none.
std::unique_ptr<session> look_up_remote(const tier_t &tier, const request &of, size_t count) {
    auto asking = std::make_unique<session>(tier, of.prompt.prefix(count));
    kvt_submit_opts_t until = KVT_SUBMIT_OPTS_INIT;
    until.deadline_ns = now_ns() + remote_wait_ns;
    kvt_op_t *op = nullptr;
    if (kvt_session_remote_lookup(asking->handle, &until, &op, nullptr) == KVT_OK) {
        kvt_op_wait(op, KVT_OP_RELEASED, until.deadline_ns + remote_wait_ns);
        kvt_op_free(&op);
    }
    return asking;
}

/// The longest part of `length` tokens that is full chunks and cuts no media.
size_t whole_chunks(const tier_t &tier, const request &of, size_t length) {
    size_t end = full_chunks(tier, length);
    while (of.prompt.cut(end) != end) {
        end = full_chunks(tier, of.prompt.cut(end));
    }
    return end;
}

lookup_result lookup(tier_t &tier, const request &of, size_t count) {
    lookup_result out;
    while (count != 0) {
        kvt_lookup_t sum = lookup_once(tier, of, count, &out.ranges);
        if (tier.has_remote && !out.asking && sum.reusable_soon_tokens < count) {
            out.asking = look_up_remote(tier, of, count);
            sum = lookup_once(tier, of, count, &out.ranges);
        }
        if (sum.reusable_soon_tokens > sum.reusable_tokens) {
            drain(tier, now_ns() + pending_wait_ns);
            sum = lookup_once(tier, of, count, &out.ranges);
        }
        out.reusable = full_chunks(tier, std::min<uint64_t>(sum.reusable_tokens, count));
        count = whole_chunks(tier, of, out.reusable);
        if (count == out.reusable) {
            return out;
        }
    }
    return {};
}

void count_tiers(const lookup_result &from, size_t first, size_t end, kvt_llama_attached_t *out) {
    uint64_t disk = 0;
    uint32_t tier = KVT_TIER_HOST;
    // Tokens that need no KV any more count with those after them.
    for (size_t i = from.ranges.size(); i-- > 0;) {
        const kvt_range_t &range = from.ranges[i];
        const uint64_t begin = std::max<uint64_t>(range.first_token, first);
        const uint64_t stop = std::min<uint64_t>(range.first_token + range.tokens, end);
        tier = range.state == KVT_RANGE_HIT ? range.tier : tier;
        disk += begin < stop && tier == KVT_TIER_DISK ? stop - begin : 0;
    }
    out->disk_tokens += uint32_t(disk);
    out->host_tokens += uint32_t(end - first - disk);
}

/// Marks saved chunks that were evicted from the store since as not saved.
void check_saved(tier_t &tier, sequence_t &has) {
    if (has.saved == 0 || tier.shape.has_states() || tier.shape.has_windows()) {
        return;
    }
    const stored_sequence all(has.prompt().prefix(has.saved));
    kvt_lookup_t sum = KVT_LOOKUP_INIT;
    if (kvt_namespace_lookup_media(tier.kv_namespace, &all.sequence, nullptr, 0, sizeof(kvt_range_t), nullptr,
                                   &sum, nullptr) != KVT_E_INVALID) {
        has.saved = full_chunks(tier, std::min<uint64_t>(has.saved, sum.reusable_soon_tokens));
    }
}

/// Removes what lies after `keep`, after saving it. False = the whole sequence was removed.
bool truncate_to(tier_t &tier, const request &of, size_t keep) {
    sequence_t &has = tier.sequences[of.seq];
    if (has.tokens.size() > keep) {
        check_saved(tier, has);
        save(tier, of.seq, now_ns() + pending_wait_ns, true);
        keep_tail(tier, of.seq);
    }
    bool kept = keep != 0 && llama_memory_seq_rm(tier.memory, of.seq, of.prompt.position(keep), -1);
    if (!kept) {
        llama_memory_seq_rm(tier.memory, of.seq, -1, -1);
        keep = 0;
    }
    has.shorten(keep);
    has.saved = std::min(has.saved, full_chunks(tier, keep));
    has.state_saved = std::min(has.state_saved, keep);
    return kept;
}

void record_tokens(tier_t &tier, const request &of, size_t count) {
    sequence_t &has = tier.sequences[of.seq];
    has.assign(of.prompt.prefix(count));
    has.saved = full_chunks(tier, count);
    has.state_saved = count;
    has.forgotten = false;
}

void refuse(tier_t &tier, request &of, kvt_status_t status) {
    of.out->refused = status;
    tier.stats.refused_restores++;
}

/// Empties a sequence in which a restore left KV that decoding cannot continue from.
size_t discard_sequence(tier_t &tier, const request &of) {
    llama_memory_seq_rm(tier.memory, of.seq, -1, -1);
    record_tokens(tier, of, 0);
    return 0;
}

/// Restores [from, to), and the tail after it if there is one. Returns the tokens that the sequence
/// has.
size_t restore_prefix(tier_t &tier, request &of, const lookup_result &cached, size_t from, size_t to,
                      const tail_t *tail) {
    const prompt_t prefix = of.prompt.prefix(to);
    const session held(tier, prefix);
    const bool alone = !tier.shape.has_attention();
    const bool with_state = !tail && tier.shape.has_states();
    restored_t done;
    if (alone) {
        // Only the state at the end is needed: one piece, or the tail alone.
        done = tail ? restored_t{uint32_t(to), 0, KVT_OK}
                    : restore(tier, held, prefix, of.seq, uint32_t(to) - tier.chunk, uint32_t(to), true);
    } else {
        const prefetched ahead(tier, held, from, to, is_on_disk(cached));
        done = restore(tier, held, prefix, of.seq, uint32_t(from), uint32_t(to), with_state);
    }
    of.out->bytes += done.bytes;
    const bool needs_end = tier.shape.has_states() || tier.shape.has_windows();
    if (done.refused != KVT_OK) {
        refuse(tier, of, done.refused);
    }
    if (done.tokens < to && needs_end) {
        return discard_sequence(tier, of);
    }
    count_tiers(cached, from, std::max<size_t>(done.tokens, from), of.out);
    size_t end = done.tokens;
    if (tail && end == to) {
        const bool empty = alone || to == 0;
        if (splice(tier, of.seq, empty, tail->blob.data(), tail->blob.size())) {
            end = tail->tokens.size();
            of.out->bytes += tail->blob.size();
            of.out->host_tokens += uint32_t(end - to);
        } else if (tier.shape.has_states()) {
            refuse(tier, of, KVT_E_STATE);
            return discard_sequence(tier, of);
        }
    }
    if (llama_memory_seq_pos_max(tier.memory, of.seq) + 1 != of.prompt.end_position(end)) {
        refuse(tier, of, KVT_E_STATE);
        return discard_sequence(tier, of);
    }
    record_tokens(tier, of, end);
    return end;
}

/// A tail whose prefix is available, or may be: with states only the restore shows that.
std::shared_ptr<const tail_t> usable_tail(const tier_t &tier, const request &of, size_t reusable) {
    std::shared_ptr<const tail_t> tail = find_tail(tier, of.prompt, std::max(reusable, of.keep));
    if (!tail || (tier.scratch < 0 && tier.shape.has_attention())) {
        return nullptr;
    }
    const size_t before = full_chunks(tier, tail->tokens.size());
    const bool available = before <= reusable || before <= of.keep || tier.shape.has_states();
    return available ? tail : nullptr;
}

size_t attach_prefix(tier_t &tier, request &of) {
    size_t limit = whole_chunks(tier, of, of.prompt.count);
    // A get may find less than the lookup did, since that can be stale. Then look up a shorter
    // prefix.
    for (int attempt = 0; attempt < 3; attempt++) {
        const lookup_result cached = lookup(tier, of, limit);
        std::shared_ptr<const tail_t> tail;
        if (attempt == 0) {
            tail = usable_tail(tier, of, cached.reusable);
        }
        const size_t to = tail ? full_chunks(tier, tail->tokens.size()) : cached.reusable;
        if (!tail && to <= of.keep) {
            break;
        }
        // A state replaces the one before it, so that nothing has to be removed from a sequence that grows.
        const size_t held = tier.sequences[of.seq].tokens.size();
        const bool grows = of.keep == held && full_chunks(tier, held) == held;
        const bool from_start =
            tier.scratch < 0 || (tier.shape.has_states() && !grows) || tier.shape.has_windows();
        const size_t keep = from_start ? 0 : std::min(full_chunks(tier, of.keep), to);
        of.keep = truncate_to(tier, of, keep) ? keep : 0;
        of.out->host_tokens = of.out->disk_tokens = 0;
        const uint64_t refused = tier.stats.refused_restores;
        const size_t end = restore_prefix(tier, of, cached, of.keep, to, tail.get());
        if (tail && to > cached.reusable && end == 0) {
            // The lookup did not promise the tail's prefix, so its absence is not a failure.
            tier.stats.refused_restores = refused;
            of.out->refused = KVT_OK;
        }
        if (end > of.keep || end == limit) {
            return end;
        }
        limit = std::min(limit, tail ? limit : whole_chunks(tier, of, to - 1));
    }
    of.out->host_tokens = of.out->disk_tokens = 0;
    const size_t keep = std::min(of.keep, tier.sequences[of.seq].tokens.size());
    of.keep = truncate_to(tier, of, keep) ? keep : 0;
    return of.keep;
}

/// Records what a sequence has now. Tokens that were recomputed, or kept unsaved, are not in the
/// store.
void record_holes(tier_t &tier, const request &of, size_t count) {
    sequence_t &has = tier.sequences[of.seq];
    const size_t stored = has.saved;
    record_tokens(tier, of, count);
    if (of.out->recomputed_tokens != 0 || stored < full_chunks(tier, of.keep)) {
        has.saved = std::min(stored, has.saved);
    }
}

/// The end of what a plan restores: before the first media that would have to be computed, which only the
/// caller can, and before trailing holes.
size_t end_of_plan(const tier_t &tier, const request &of, const std::vector<kvt_plan_step_t> &plan,
                   uint64_t count) {
    size_t last = 0;
    for (uint64_t i = 0; i < count; i++) {
        const size_t first = plan[i].first_token, end = first + plan[i].tokens;
        if (plan[i].kind != KVT_PLAN_RECOMPUTE) {
            last = end;
        } else if (of.prompt.has_media(first, end)) {
            break;
        }
    }
    return whole_chunks(tier, of, last);
}

/// Like attach_prefix, with holes: decodes what is missing between resident ranges, in order.
size_t attach_holes(tier_t &tier, request &of) {
    const size_t limit = whole_chunks(tier, of, of.prompt.count);
    const lookup_result cached = lookup(tier, of, limit);
    const prompt_t prefix = of.prompt.prefix(limit);
    const session held(tier, prefix);
    std::vector<kvt_plan_step_t> plan(limit / tier.chunk + 1);
    uint64_t count = 0;
    if (limit != 0) {
        kvt_error_t *error = nullptr;
        const kvt_status_t status = kvt_session_plan(held.handle, nullptr, plan.data(), plan.size(),
                                                     sizeof plan[0], &count, nullptr, &error);
        demand(status, error, "planning the restore");
    }
    const size_t last = end_of_plan(tier, of, plan, count);
    const size_t keep = last > of.keep ? full_chunks(tier, of.keep) : of.keep;
    of.keep = truncate_to(tier, of, keep) ? keep : 0;
    size_t end = of.keep;
    for (uint64_t i = 0; i < count; i++) {
        const size_t to = std::min<size_t>(plan[i].first_token + plan[i].tokens, last);
        if (to <= end) {
            continue;
        }
        if (plan[i].kind == KVT_PLAN_RECOMPUTE) {
            if (decode(tier, of.seq, of.prompt, end, to, false) != 0) {
                return discard_sequence(tier, of);
            }
            of.out->recomputed_tokens += uint32_t(to - end);
        } else {
            const restored_t done = restore(tier, held, prefix, of.seq, uint32_t(end), uint32_t(to), false);
            count_tiers(cached, end, done.tokens, of.out);
            of.out->bytes += done.bytes;
            if (done.tokens < to) {
                refuse(tier, of, done.refused);
                record_holes(tier, of, done.tokens);
                return done.tokens;
            }
        }
        end = to;
    }
    if (end > of.keep) {
        record_holes(tier, of, end);
    }
    return end;
}

const char *restore_error_text(kvt_status_t refused) {
    switch (refused) {
    case KVT_OK: return "";
    case KVT_E_NOT_FOUND: return "a chunk was evicted from the store, or is damaged; the rest is decoded";
    case KVT_E_STATE: return "the context refused the state: its KV cache has no free cells";
    case KVT_E_AGAIN: return "no buffer became free in time: raise buffer_bytes";
    case KVT_E_TIMEOUT: return "the disk did not answer in time; the rest is decoded";
    default: return kvt_status_str(refused);
    }
}

void attach(tier_t &tier, request &of) {
    check_scratch(tier);
    check_held(tier, of);
    of.keep = reusable_length(tier, of);
    const size_t end = tier.holes ? attach_holes(tier, of) : attach_prefix(tier, of);
    kvt_llama_attached_t &out = *of.out;
    out.reused_tokens = uint32_t(end);
    out.next_position = of.prompt.position(end);
    out.kept_tokens = uint32_t(std::min(of.keep, end));
    kvt_llama_tier_stats_t &stats = tier.stats;
    stats.reused_tokens += out.reused_tokens;
    stats.kept_tokens += out.kept_tokens;
    stats.host_tokens += out.host_tokens;
    stats.disk_tokens += out.disk_tokens;
    stats.recomputed_tokens += out.recomputed_tokens;
}

} // namespace

void adopt(tier_t &tier, llama_seq_id seq, const prompt_t &of) {
    sequence_t &has = tier.sequences[seq];
    has = sequence_t{};
    has.assign(of);
    // What is still in the store is not copied again; with states and windows the lookup does not tell.
    const bool plain = !tier.shape.has_states() && !tier.shape.has_windows();
    has.saved = plain ? full_chunks(tier, of.count) : 0;
    check_saved(tier, has);
}

void attach_prompt(tier_t &tier, llama_seq_id seq, const prompt_t &prompt, kvt_llama_attached_t *out,
                   kvt_llama_why_t *why) {
    const uint64_t start = now_ns();
    request of{seq, prompt.prefix(prompt.cut(prompt.count - 1)), 0, out};
    const kvt_status_t status = guarded(why, [&] {
        attach(tier, of);
        return KVT_OK;
    });
    if (status != KVT_OK) {
        // The store or memory failed half way: the request is decoded from its start.
        discard_sequence(tier, of);
        *out = kvt_llama_attached_t{};
        refuse(tier, of, status);
    } else {
        set_why(why, restore_error_text(out->refused));
    }
    out->ns = now_ns() - start;
    tier.stats.attaches++;
    tier.stats.attach_ns += out->ns;
}

} // namespace kvtier_llama

using namespace kvtier_llama;

extern "C" kvt_status_t kvt_llama_attach_prompt(kvt_llama_tier_t *tier, llama_seq_id seq,
                                                const kvt_llama_prompt_t *prompt, kvt_llama_attached_t *out,
                                                kvt_llama_why_t *why) {
    kvt_llama_attached_t unseen;
    kvt_llama_attached_t *report = out ? out : &unseen;
    *report = kvt_llama_attached_t{};
    return guarded(why, [&] {
        if (!tier || !prompt || !prompt->tokens || prompt->n_tokens == 0) {
            fail(KVT_E_INVALID, "tier, prompt or tokens is null, or n_tokens is 0: a prompt is required");
        }
        check_sequence(*tier, seq);
        const given_t given(*tier, *prompt);
        attach_prompt(*tier, seq, given.prompt, report, why);
        return KVT_OK;
    });
}

extern "C" kvt_status_t kvt_llama_attach(kvt_llama_tier_t *tier, llama_seq_id seq,
                                         const llama_token *tokens, size_t n_tokens,
                                         kvt_llama_attached_t *out, kvt_llama_why_t *why) {
    const kvt_llama_prompt_t prompt = {tokens, n_tokens, nullptr, 0};
    return kvt_llama_attach_prompt(tier, seq, &prompt, out, why);
}
