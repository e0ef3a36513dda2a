// Reads batches of the program, and builds the batches that replace them.
#include "run/batch.hpp"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace kvtier_run {

batch_t read_batch(const llama_batch &of, size_t width, size_t positions) {
    batch_t out;
    const size_t count = size_t(of.n_tokens > 0 ? of.n_tokens : 0);
    out.plain = of.token && !of.embd;
    out.media = of.embd && !of.token && of.pos;
    out.entries.resize(count);
    for (size_t i = 0; i < count; i++) {
        entry_t &entry = out.entries[i];
        entry.token = of.token ? of.token[i] : LLAMA_TOKEN_NULL;
        for (size_t j = 0; of.pos && j < (out.media ? positions : 1); j++) {
            entry.pos[j] = of.pos[j * count + i];
        }
        // Without this array the engine gives the logits of the last token.
        entry.output = of.logits ? of.logits[i] != 0 : i + 1 == count;
        if (of.n_seq_id && of.seq_id) {
            entry.sequences.assign(of.seq_id[i], of.seq_id[i] + of.n_seq_id[i]);
        } else {
            entry.sequences.assign(1, 0);
        }
    }
    if (out.media) {
        out.rows.assign(of.embd, of.embd + count * width);
    }
    return out;
}

void batch_arrays::add(const entry_t &entry) {
    tokens.push_back(entry.token);
    positions.push_back(entry.pos[0]);
    counts.push_back(int32_t(entry.sequences.size()));
    sequences.push_back(entry.sequences);
    outputs.push_back(entry.output);
}

llama_batch batch_arrays::view() {
    pointers.clear();
    for (std::vector<llama_seq_id> &one : sequences) {
        pointers.push_back(one.data());
    }
    llama_batch out{};
    out.n_tokens = int32_t(tokens.size());
    out.token = tokens.data();
    out.pos = positions.data();
    out.n_seq_id = counts.data();
    out.seq_id = pointers.data();
    out.logits = outputs.data();
    return out;
}

#ifdef KVTIER_LLAMA_BATCH_EXT

namespace {

struct record_t {
    batch_t batch;
    size_t positions = 1;
};

/// Never destroyed: batches of the program may be freed after the objects of this library.
std::mutex &lock = *new std::mutex;
auto &records = *new std::unordered_map<const llama_batch_ext *, record_t>;

batch_t *batch_of(const llama_batch_ext *batch) {
    const auto found = records.find(batch);
    return found == records.end() ? nullptr : &found->second.batch;
}

/// The entry that a call of the program changed; null = an invalid index, or an unknown batch.
entry_t *entry_of(const llama_batch_ext *batch, int32_t at) {
    batch_t *of = batch_of(batch);
    return !of || at < 0 || size_t(at) >= of->entries.size() ? nullptr : &of->entries[size_t(at)];
}

} // namespace

void record_init(const llama_batch_ext *batch, size_t positions) {
    const std::lock_guard<std::mutex> held(lock);
    records[batch] = {batch_t{}, positions};
}

void record_free(const llama_batch_ext *batch) {
    const std::lock_guard<std::mutex> held(lock);
    records.erase(batch);
}

void record_clear(const llama_batch_ext *batch) {
    const std::lock_guard<std::mutex> held(lock);
    if (batch_t *of = batch_of(batch)) {
        *of = batch_t{};
    }
}

void record_add(const llama_batch_ext *batch, int32_t at, llama_seq_id sequence, llama_token token,
                const llama_embd *embd) {
    const std::lock_guard<std::mutex> held(lock);
    batch_t *of = batch_of(batch);
    if (!of || at < 0) {
        return;
    }
    const bool next = size_t(at) == of->entries.size();
    of->plain = of->plain && next && !embd && token != LLAMA_TOKEN_NULL;
    of->media = of->media && next && embd && embd->data;
    of->entries.resize(size_t(at) + 1);
    of->entries[size_t(at)].token = token;
    of->entries[size_t(at)].sequences.assign(1, sequence);
    if (of->media) {
        of->rows.insert(of->rows.end(), embd->data, embd->data + embd->n_rows * embd->n_embd);
    }
}

void record_sequence(const llama_batch_ext *batch, int32_t at, llama_seq_id sequence) {
    const std::lock_guard<std::mutex> held(lock);
    if (entry_t *entry = entry_of(batch, at)) {
        entry->sequences.push_back(sequence);
    }
}

void record_position(const llama_batch_ext *batch, int32_t at, const llama_pos *pos) {
    const std::lock_guard<std::mutex> held(lock);
    if (entry_t *entry = entry_of(batch, at)) {
        // A token has one position with M-RoPE, too.
        const size_t count = entry->token == LLAMA_TOKEN_NULL ? records.at(batch).positions : 1;
        std::copy_n(pos, count, entry->pos.begin());
    }
}

void record_output(const llama_batch_ext *batch, int32_t at, bool value) {
    const std::lock_guard<std::mutex> held(lock);
    if (entry_t *entry = entry_of(batch, at)) {
        entry->output = value;
    }
}

void record_special(const llama_batch_ext *batch) {
    const std::lock_guard<std::mutex> held(lock);
    if (batch_t *of = batch_of(batch)) {
        of->plain = of->media = false;
    }
}

const batch_t *recorded(const llama_batch_ext *batch) {
    const std::lock_guard<std::mutex> held(lock);
    // References to elements stay valid, and a batch belongs to one thread at a time.
    return batch_of(batch);
}

#endif

} // namespace kvtier_run
