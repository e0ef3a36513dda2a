// Decodes batches of the program: what the store has is restored in place of being computed.
#include "run/context.hpp"

#include "run/process.hpp"
#include "run/settings.hpp"
#include "tier/tier.hpp"

#include <algorithm>

namespace kvtier_run {

namespace {

/// Fewer tokens than this are faster to decode than to look up.
constexpr size_t min_restored = 32;
/// Batches with fewer new tokens are not cut for the sake of recurrent states.
constexpr size_t min_cut = 64;

constexpr uint32_t special_cells = special_attention | special_warmup;

} // namespace

context_t::context_t(llama_context *of, const llama_context_params &with, uint32_t count, bool scratch)
    : sequences(count), ctx(of), memory(engine().llama_get_memory(of)), params(with), has_scratch(scratch) {
    const llama_model *model = llama_get_model(of);
    const llama_rope_type rope = llama_model_rope_type(model);
    width = size_t(llama_model_n_embd_inp(model));
    positions = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE ? 4 : 1;
}

context_t::~context_t() {
    close_tiers();
    report();
}

/// The engine refuses batches with other sequences.
bool context_t::is_valid(const batch_t &batch) const {
    return std::all_of(batch.entries.begin(), batch.entries.end(), [&](const entry_t &entry) {
        const auto known_id = [&](llama_seq_id seq) { return seq >= 0 && uint32_t(seq) < sequences; };
        return !entry.sequences.empty() && std::all_of(entry.sequences.begin(), entry.sequences.end(), known_id);
    });
}

context_t::runs_t context_t::runs_of(const batch_t &batch) const {
    runs_t runs;
    for (const entry_t &entry : batch.entries) {
        for (const llama_seq_id seq : entry.sequences) {
            run_t &run = runs[seq];
            const auto found = known.find(seq);
            const sequence_t none, &has = found == known.end() ? none : found->second;
            const llama_pos wanted = has.prompt().position(has.program) + llama_pos(run.tokens.size());
            const bool next = entry.pos[0] < 0 || entry.pos[0] == wanted;
            run.follows = run.follows && next;
            run.alone = run.alone && entry.sequences.size() == 1;
            if (!entry.output && run.first_output == run.tokens.size()) {
                run.first_output++;
            }
            run.tokens.push_back(entry.token);
        }
    }
    return runs;
}

/// Compares what is known of the sequences with what the engine has.
void context_t::check(const runs_t &runs) {
    for (const auto &one : runs) {
        sequence_t &has = known[one.first];
        const llama_pos real = engine().llama_memory_seq_pos_max(memory, one.first) + 1;
        if (real == 0 && (has.unknown || has.engine != 0)) {
            reset(one.first);
        } else if (!has.unknown && real != has.prompt().end_position(has.engine)) {
            rewind(one.first, std::min(has.engine, has.program));
            changed(one.first);
        }
    }
}

/// Makes the engine hold no more of a sequence than the first tokens.
void context_t::rewind(llama_seq_id seq, size_t tokens) {
    if (known[seq].engine > tokens) {
        remove_after(seq, tokens);
    }
}

/// Removes the engine's cells after the first tokens, or all cells if it cannot continue from there.
void context_t::remove_after(llama_seq_id seq, size_t tokens) {
    sequence_t &has = known[seq];
    const llama_pos end = has.prompt().position(tokens);
    const llama_pos window = llama_model_n_swa(llama_get_model(ctx));
    const bool removed = engine().llama_memory_seq_rm(memory, seq, end, -1);
    // A window that had moved on has forgotten cells that the new end needs.
    const llama_pos first = engine().llama_memory_seq_pos_min(memory, seq);
    if (removed && (window <= 0 || tokens == 0 || (first >= 0 && first <= std::max(0, end - window)))) {
        has.engine = tokens;
    } else {
        // Recurrent states cannot be shortened.
        engine().llama_memory_seq_rm(memory, seq, -1, -1);
        has.engine = 0;
    }
    has.text.shorten(std::max(has.engine, has.program));
}

/// Restores what the store has of the sequence's tokens and those of the batch, up to `limit`.
void context_t::attach(llama_seq_id seq, const run_t &run, size_t limit) {
    sequence_t &has = known[seq];
    kvt_llama_tier_t *tier = current();
    if (!tier || limit < has.engine + min_restored || !can_lose_engine(has)) {
        return;
    }
    // A scratch sequence that is in use would cost what the sequence holds.
    const kvt_status_t usable = kvtier_llama::guarded(nullptr, [&] {
        kvtier_llama::check_scratch(*tier);
        return KVT_OK;
    });
    if (usable != KVT_OK) {
        return;
    }
    if (tier->sequences[seq].tokens.size() != has.engine) {
        commit(seq, false);
    }
    // An attach leaves the last token of its prompt to decode.
    kvtier_llama::text_t text;
    text.assign(has.prompt().prefix(has.program));
    text.tokens.insert(text.tokens.end(), run.tokens.begin(), run.tokens.end());
    text.tokens.resize(limit);
    text.tokens.push_back(0);
    kvt_llama_attached_t out{};
    const size_t before = has.engine;
    kvtier_llama::attach_prompt(*tier, seq, text.prompt(), &out, nullptr);
    has.engine = out.reused_tokens;
    text.shorten(std::max(has.engine, has.program));
    has.text = text;
    reused_tokens += has.engine > before ? has.engine - before : 0;
}

/// Makes the engine hold as much as possible of what the batch adds to a sequence, and nothing else.
void context_t::prepare(llama_seq_id seq, const run_t &run, bool restore) {
    sequence_t &has = known[seq];
    if (has.unknown) {
        return;
    }
    const size_t limit = has.program + (restore && run.simple() ? run.first_output : 0);
    size_t same = has.program;
    while (same < has.engine && same < limit && has.text.tokens[same] == run.tokens[same - has.program]) {
        same++;
    }
    rewind(seq, same);
    if (restore && run.simple() && special == 0) {
        attach(seq, run, limit);
    }
}

/// Where a batch is cut, as tokens of the sequence: a recurrent state can be saved only where a batch ends,
/// and windows forget cells after a batch of the engine.
std::vector<size_t> context_t::cuts(llama_seq_id seq, const run_t &run) const {
    std::vector<size_t> out;
    const kvt_llama_tier_t *tier = current();
    const sequence_t &has = known.at(seq);
    const size_t limit = has.program + run.first_output;
    if (!tier || special != 0 || !run.simple() || has.unknown || limit < has.engine + min_cut) {
        return out;
    }
    const size_t end = has.program + run.tokens.size();
    // A copy of a whole sequence has the window of its end only.
    if (tier->shape.has_states() || (tier->shape.has_windows() && tier->scratch < 0)) {
        for (size_t at = (has.engine / tier->checkpoint + 1) * tier->checkpoint; at <= limit;
             at += tier->checkpoint) {
            out.push_back(at);
        }
        const size_t last = limit / tier->chunk * tier->chunk;
        if (last > has.engine && (out.empty() || out.back() < last)) {
            out.push_back(last);
        }
    } else if (tier->shape.has_windows()) {
        const size_t step = llama_n_ubatch(ctx);
        for (size_t at = has.engine + step; at <= limit; at += step) {
            out.push_back(at);
        }
    }
    // The last part ends there anyway.
    if (!out.empty() && out.back() == end) {
        out.pop_back();
    }
    return out;
}

/// Decodes text of one sequence up to `end`, without outputs, and saves it.
int32_t context_t::decode_part(llama_seq_id seq, const run_t &run, size_t end) {
    sequence_t &has = known[seq];
    while (has.engine < end) {
        const size_t next = std::min<size_t>(end, has.engine + llama_n_batch(ctx));
        batch_arrays part;
        for (size_t at = has.engine; at < next; at++) {
            const llama_token token = at < has.program ? has.text.tokens[at] : run.tokens[at - has.program];
            part.add({token, {has.prompt().position(at), 0, 0, 0}, false, {seq}});
        }
        if (const int32_t status = engine().llama_decode(ctx, part.view())) {
            return status;
        }
        for (size_t at = has.text.tokens.size(); at < next; at++) {
            has.text.tokens.push_back(run.tokens[at - has.program]);
        }
        has.engine = next;
        commit(seq, true);
    }
    return 0;
}

/// Decodes what of a batch is left, in its order.
int32_t context_t::decode_rest(const batch_t &batch, const runs_t &runs) {
    batch_arrays rest;
    std::map<llama_seq_id, size_t> seen;
    indices.assign(batch.entries.size(), INT32_MAX);
    indices_changed = true;
    for (size_t i = 0; i < batch.entries.size(); i++) {
        entry_t entry = batch.entries[i];
        const llama_seq_id seq = entry.sequences.front();
        const sequence_t &has = known[seq];
        if (runs.at(seq).simple() && !has.unknown) {
            const size_t at = has.program + seen[seq]++;
            if (at < has.engine) {
                continue;
            }
            entry.pos[0] = has.prompt().position(at);
        }
        indices[i] = int32_t(rest.size());
        rest.add(entry);
    }
    return rest.size() == 0 ? 0 : engine().llama_decode(ctx, rest.view());
}

/// Decodes what the program believes to be there and the engine does not hold.
int32_t context_t::decode_missing(llama_seq_id seq) {
    sequence_t &has = known[seq];
    while (!has.unknown && has.engine < has.program) {
        size_t end = has.program;
        int32_t status = 0;
        const std::vector<kvtier_llama::media_t> media = has.text.media;
        const auto next = std::find_if(media.begin(), media.end(),
                                       [&](const auto &one) { return one.end() > has.engine; });
        if (next != media.end() && next->first == has.engine) {
            status = decode_embeddings(seq, *next);
        } else {
            end = next != media.end() ? std::min(end, next->first) : end;
            status = decode_part(seq, run_t{}, end);
        }
        if (status != 0) {
            return status;
        }
    }
    return 0;
}

int32_t context_t::decode_in_parts(const batch_t &batch, const runs_t &runs) {
    for (const auto &one : runs) {
        for (const size_t end : cuts(one.first, one.second)) {
            if (const int32_t status = decode_part(one.first, one.second, end)) {
                return status;
            }
        }
    }
    return decode_rest(batch, runs);
}

/// Tells whether the engine can take the batch unchanged.
bool context_t::as_given(const runs_t &runs) const {
    for (const auto &one : runs) {
        const sequence_t &has = known.at(one.first);
        if (!has.unknown && (has.engine != has.program || !cuts(one.first, one.second).empty())) {
            return false;
        }
    }
    return true;
}

/// Records a batch that was decoded, and saves it.
void context_t::decoded(const batch_t &batch, const runs_t &runs) {
    for (const auto &one : runs) {
        sequence_t &has = known[one.first];
        if (!batch.plain || !one.second.follows || (special & special_cells) != 0) {
            changed(one.first);
        }
        if (has.unknown) {
            continue;
        }
        has.text.shorten(has.program);
        has.text.tokens.insert(has.text.tokens.end(), one.second.tokens.begin(), one.second.tokens.end());
        has.program = has.engine = has.text.tokens.size();
        decoded_tokens += one.second.tokens.size();
        commit(one.first, one.second.tokens.size() > 1);
    }
}

/// After a failed decode: removes cells that the engine holds and the record of the sequence lacks.
void context_t::failed(const runs_t &runs) {
    for (const auto &one : runs) {
        sequence_t &has = known[one.first];
        const llama_pos real = engine().llama_memory_seq_pos_max(memory, one.first) + 1;
        if (!has.unknown && real > has.prompt().end_position(has.engine)) {
            remove_after(one.first, has.engine);
        }
    }
}

int32_t context_t::decode_known(const batch_t &batch, const decode_t &as_it_is) {
    check(runs_of(batch));
    // The check may have found sequences empty.
    const runs_t runs = runs_of(batch);
    open_tier();
    if (batch.media) {
        return decode_media(batch, runs, as_it_is);
    }
    bool in_place = batch.plain;
    for (const auto &one : runs) {
        in_place = in_place && (one.second.follows || known[one.first].unknown);
    }
    int32_t status = 0;
    for (const auto &one : runs) {
        prepare(one.first, one.second, in_place);
        status = status == 0 ? decode_missing(one.first) : status;
    }
    if (status == 0) {
        status = in_place && !as_given(runs) ? decode_in_parts(batch, runs) : as_it_is();
    }
    if (status == 0) {
        decoded(batch, runs);
        drop_embeddings();
    } else {
        failed(runs);
    }
    return status;
}

int32_t context_t::decode(const batch_t *batch, const decode_t &as_it_is) noexcept {
    indices_changed = false;
    const inside_scope scope;
    bool was_called = false;
    const decode_t counted = [&] {
        was_called = true;
        return as_it_is();
    };
    try {
        if (batch) {
            // The engine refuses what is not valid.
            return is_valid(*batch) ? decode_known(*batch, counted) : as_it_is();
        }
    } catch (...) {
        // Out of memory. What the sequences hold is not known any more.
        warn("out of memory: the context is computed without kvtier until its sequences are empty");
    }
    changed(-1);
    return was_called ? -2 : as_it_is();
}

int32_t context_t::index(int32_t at) const {
    return indices_changed && at >= 0 && size_t(at) < indices.size() ? indices[size_t(at)] : at;
}

void context_t::commit(llama_seq_id seq, bool state) {
    kvt_llama_tier_t *tier = current();
    const sequence_t &has = known[seq];
    if (!tier || has.unknown) {
        return;
    }
    kvtier_llama::guarded(nullptr, [&] {
        kvtier_llama::commit(*tier, seq, has.prompt().prefix(has.engine), state);
        return KVT_OK;
    });
}

} // namespace kvtier_run
