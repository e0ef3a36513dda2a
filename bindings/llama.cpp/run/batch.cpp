// Reads batches of the program, and builds those that replace them.
#include "run/batch.hpp"

#include <mutex>
#include <unordered_map>

namespace kvtier_run {

batch_t read_batch(const llama_batch &of) {
    batch_t out;
    out.plain = of.token && !of.embd;
    out.entries.resize(size_t(of.n_tokens > 0 ? of.n_tokens : 0));
    for (size_t i = 0; i < out.entries.size(); i++) {
        entry_t &entry = out.entries[i];
        entry.token = of.token ? of.token[i] : LLAMA_TOKEN_NULL;
        entry.pos = of.pos ? of.pos[i] : -1;
        // Without this array the engine gives the logits of the last token.
        entry.output = of.logits ? of.logits[i] != 0 : i + 1 == out.entries.size();
        if (of.n_seq_id && of.seq_id) {
            entry.sequences.assign(of.seq_id[i], of.seq_id[i] + of.n_seq_id[i]);
        } else {
            entry.sequences.assign(1, 0);
        }
    }
    return out;
}

void batch_arrays::add(const entry_t &entry) {
    tokens.push_back(entry.token);
    positions.push_back(entry.pos);
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

std::mutex lock;
std::unordered_map<const llama_batch_ext *, batch_t> records;

/// The entry that a call of the program changed; null = an invalid index, or an unknown batch.
entry_t *entry_of(const llama_batch_ext *batch, int32_t at) {
    const auto found = records.find(batch);
    if (found == records.end() || at < 0 || size_t(at) >= found->second.entries.size()) {
        return nullptr;
    }
    return &found->second.entries[size_t(at)];
}

} // namespace

void record_init(const llama_batch_ext *batch) {
    const std::lock_guard<std::mutex> held(lock);
    records[batch] = batch_t{};
}

void record_free(const llama_batch_ext *batch) {
    const std::lock_guard<std::mutex> held(lock);
    records.erase(batch);
}

void record_clear(const llama_batch_ext *batch) { record_init(batch); }

void record_add(const llama_batch_ext *batch, int32_t at, llama_seq_id sequence, llama_token token,
                bool embd) {
    const std::lock_guard<std::mutex> held(lock);
    const auto found = records.find(batch);
    if (found == records.end() || at < 0) {
        return;
    }
    batch_t &of = found->second;
    of.plain = of.plain && !embd && token != LLAMA_TOKEN_NULL && size_t(at) == of.entries.size();
    of.entries.resize(size_t(at) + 1);
    of.entries[size_t(at)].token = token;
    of.entries[size_t(at)].sequences.assign(1, sequence);
}

void record_sequence(const llama_batch_ext *batch, int32_t at, llama_seq_id sequence) {
    const std::lock_guard<std::mutex> held(lock);
    if (entry_t *entry = entry_of(batch, at)) {
        entry->sequences.push_back(sequence);
    }
}

void record_position(const llama_batch_ext *batch, int32_t at, llama_pos pos) {
    const std::lock_guard<std::mutex> held(lock);
    if (entry_t *entry = entry_of(batch, at)) {
        entry->pos = pos;
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
    const auto found = records.find(batch);
    if (found != records.end()) {
        found->second.plain = false;
    }
}

const batch_t *recorded(const llama_batch_ext *batch) {
    const std::lock_guard<std::mutex> held(lock);
    const auto found = records.find(batch);
    // References to elements stay valid, and a batch belongs to one thread at a time.
    return found == records.end() ? nullptr : &found->second;
}

#endif

} // namespace kvtier_run
