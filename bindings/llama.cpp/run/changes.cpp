// Keeps what is known of sequences true when the program changes their cells itself.
#include "run/context.hpp"

#include "run/settings.hpp"
#include "tier/tier.hpp"

#include <algorithm>

namespace kvtier_run {

namespace {

constexpr size_t max_states = 256;

uint64_t sum_of(const uint8_t *data, size_t bytes) {
    uint64_t sum = 0;
    kvt_checksum(data, bytes, &sum);
    return sum;
}

} // namespace

/// The sequence is empty.
void context_t::reset(llama_seq_id seq) {
    known[seq] = sequence_t{};
    for (const auto &one : tiers) {
        if (one.second) {
            one.second->sequences[seq] = kvtier_llama::sequence_t{};
        }
    }
}

void context_t::settle(llama_seq_id seq) {
    const inside_scope scope;
    for (auto &one : known) {
        if (seq >= 0 && seq != one.first) {
            continue;
        }
        rewind(one.first, one.second.unknown ? one.second.engine : one.second.program);
        if (decode_missing(one.first) != 0) {
            changed(one.first);
        }
    }
}

void context_t::leaving(llama_seq_id seq, llama_pos first) {
    const inside_scope scope;
    kvt_llama_tier_t *tier = current();
    for (const auto &one : known) {
        if ((seq >= 0 && seq != one.first) || one.second.unknown) {
            continue;
        }
        // What the engine holds beyond is not the program's to remove.
        rewind(one.first, one.second.program);
        if (!tier) {
            continue;
        }
        const kvtier_llama::sequence_t &record = tier->sequences[one.first];
        const size_t chunks = kvtier_llama::full_chunks(*tier, record.tokens.size());
        if (chunks > record.saved && record.prompt().length_before(std::max(first, 0)) < chunks) {
            kvtier_llama::guarded(nullptr, [&] {
                kvtier_llama::save(*tier, one.first, kvtier_llama::now_ns() + tier->save_wait_ns, true);
                return KVT_OK;
            });
        }
    }
}

void context_t::changed(llama_seq_id seq) {
    if (seq < 0) {
        for (auto &one : known) {
            changed(one.first);
        }
        return;
    }
    sequence_t &has = known[seq];
    has = sequence_t{};
    has.unknown = true;
    for (const auto &one : tiers) {
        if (one.second) {
            kvtier_llama::sequence_t &record = one.second->sequences[seq];
            record = kvtier_llama::sequence_t{};
            record.forgotten = true;
        }
    }
    if (!told_unknown && current()) {
        told_unknown = true;
        tell("a sequence has cells that its tokens do not describe (a shifted context, a loaded state, "
             "mixed embeddings): it is computed without kvtier until it is empty");
    }
}

void context_t::removed(llama_seq_id seq, llama_pos first, llama_pos end) {
    if (seq < 0) {
        for (auto &one : known) {
            removed(one.first, first, end);
        }
        return;
    }
    sequence_t &has = known[seq];
    const kvtier_llama::prompt_t text = has.prompt();
    const bool to_end = end < 0 || (!has.unknown && end >= text.end_position(text.count));
    const size_t length = text.length_before(std::max(first, 0));
    if (first <= 0 && to_end) {
        reset(seq);
    } else if (has.unknown || length == text.count) {
        // The engine tells when an unknown sequence is empty.
    } else if (to_end && text.cut(length) == length) {
        has.program = std::min(has.program, length);
        has.engine = std::min(has.engine, length);
        has.text.shorten(std::max(has.program, has.engine));
        has.embeddings.erase(has.embeddings.lower_bound(has.program), has.embeddings.end());
    } else {
        changed(seq);
    }
}

void context_t::copied(llama_seq_id from, llama_seq_id to, llama_pos first, llama_pos end) {
    if (from == to) {
        return;
    }
    const sequence_t source = known[from];
    const sequence_t &target = known[to];
    const kvtier_llama::prompt_t text = source.prompt();
    const bool whole = first <= 0 && (end < 0 || end >= text.end_position(text.count));
    if (source.unknown || target.unknown || target.engine != 0 || target.program != 0 || !whole) {
        changed(to);
        return;
    }
    known[to] = source;
    for (const auto &one : tiers) {
        if (one.second) {
            one.second->sequences[to] = one.second->sequences[from];
        }
    }
}

void context_t::cleared() {
    for (auto &one : known) {
        reset(one.first);
    }
}

void context_t::kept_only(llama_seq_id seq) {
    for (auto &one : known) {
        if (one.first != seq) {
            reset(one.first);
        }
    }
}

void context_t::state_taken(llama_seq_id seq, const uint8_t *data, size_t bytes,
                            llama_state_seq_flags flags) {
    const sequence_t &has = known[seq];
    if (has.unknown || has.engine != has.program || bytes == 0 || flags > LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) {
        return;
    }
    states.push_front({sum_of(data, bytes), bytes, flags, has.text});
    if (states.size() > max_states) {
        states.pop_back();
    }
}

void context_t::state_given(llama_seq_id seq, const uint8_t *data, size_t bytes,
                            llama_state_seq_flags flags) {
    const auto alike = [&](const copied_state &one) { return one.bytes == bytes && one.flags == flags; };
    const bool any = std::any_of(states.begin(), states.end(), alike);
    const uint64_t sum = any ? sum_of(data, bytes) : 0;
    const auto found = std::find_if(states.begin(), states.end(),
                                    [&](const copied_state &one) { return alike(one) && one.sum == sum; });
    const sequence_t has = known[seq];
    // A partial state replaces windows and recurrent states. The other cells stay.
    const bool fits = found != states.end() &&
                      (flags == 0 || (!has.unknown && has.prompt().prefix(has.engine).common(found->text.prompt()) ==
                                                          found->text.tokens.size()));
    if (!fits) {
        changed(seq);
        return;
    }
    const kvtier_llama::text_t text = found->text;
    reset(seq);
    known[seq].text = text;
    known[seq].engine = known[seq].program = text.tokens.size();
    if (kvt_llama_tier_t *tier = current()) {
        kvtier_llama::guarded(nullptr, [&] {
            kvtier_llama::adopt(*tier, seq, text.prompt());
            return KVT_OK;
        });
    }
}

llama_pos context_t::last_position(llama_seq_id seq, llama_pos real) const {
    const auto found = known.find(seq);
    const bool differs = found != known.end() && !found->second.unknown &&
                         found->second.engine != found->second.program;
    return differs ? found->second.prompt().end_position(found->second.program) - 1 : real;
}

llama_pos context_t::first_position(llama_seq_id seq, llama_pos real) const {
    const auto found = known.find(seq);
    const bool waits = found != known.end() && found->second.engine == 0 && found->second.program != 0;
    return waits ? 0 : real;
}

void context_t::set_special(special_t which, bool on) { special = on ? special | which : special & ~which; }

} // namespace kvtier_run
