#include "weights.h"

#include "plugin.h"
#include "stats.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace kvtier_plugin {

namespace {

constexpr uint64_t PAGE_BYTES = 4096;
// Smaller ones that belong to no layer stay.
constexpr uint64_t LARGE_BYTES = 1 << 20;
// Of a piece where no layer says what is usual.
constexpr uint64_t PIECE_BYTES = 8 << 20;
// Kernels go by tiles of so many rows: whole ones, so that they do the same as without pieces.
constexpr int64_t TILE_ROWS = 256;
constexpr int64_t LEAST_ROWS = 32;
// What a unit may take to come: a disk that does not answer ends a decode, not the process.
constexpr uint64_t UNIT_SECONDS = 300;
constexpr uint64_t CLOSE_SECONDS = 30;

uint64_t pages(uint64_t bytes) {
    return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

bool ends_with(const std::string & text, const char * end) {
    const size_t length = std::strlen(end);
    return text.size() >= length && text.compare(text.size() - length, length, end) == 0;
}

// "blk.7.attn_q.weight" and "enc.blk.7.x" belong to layer 7 of "blk." and "enc.blk.".
bool layer_of(const std::string & name, std::pair<std::string, uint32_t> & out) {
    const size_t found = name.find("blk.");
    if (found == std::string::npos || (found > 0 && name[found - 1] != '.')) {
        return false;
    }
    size_t at = found + 4;
    uint64_t number = 0;
    const size_t first = at;
    for (; at < name.size() && name[at] >= '0' && name[at] <= '9' && number < 65536; at++) {
        number = number * 10 + uint64_t(name[at] - '0');
    }
    if (at == first || at == name.size() || name[at] != '.' || number >= 65536) {
        return false;
    }
    out = {name.substr(0, first), uint32_t(number)};
    return true;
}

// The tensor as the device underneath has it.
ggml_tensor far_tensor(const Record & record) {
    ggml_tensor there = *record.tensor;
    there.buffer = record.far.buffer;
    there.data = record.far.data;
    return there;
}

// What a unit has of a tensor: all, or rows. It is nowhere yet.
ggml_tensor part_of(const Range & range) {
    ggml_tensor part = *range.record->tensor;
    part.buffer = nullptr;
    part.data = nullptr;
    if (range.record->piece_rows > 0) {
        part.ne[1] = int64_t(range.bytes / part.nb[1]);
        part.nb[2] = part.nb[3] = range.bytes;
    }
    return part;
}

// Kernels may read behind the end of it, and have to find zeros there. In a slot the next tensor follows.
bool is_padded(const ggml_tensor & part) {
    return ggml_backend_buft_get_alloc_size(far_type(), &part) != ggml_nbytes(&part);
}

} // namespace

std::mutex & weights_lock() {
    static std::mutex lock;
    return lock;
}

bool are_weights(ggml_tensor * const * tensors, int count) {
    bool has_layers = false;
    for (int i = 0; i < count; i++) {
        const std::string name = ggml_get_name(tensors[i]);
        std::pair<std::string, uint32_t> key;
        if (ends_with(name, ".lora_a") || ends_with(name, ".lora_b") || tensors[i]->view_src) {
            return false;
        }
        has_layers = has_layers || layer_of(name, key);
    }
    return has_layers;
}

std::unique_ptr<Weights> Weights::make(ggml_tensor * const * tensors, int count, std::string & why) {
    if (!are_weights(tensors, count)) {
        return nullptr;
    }
    std::unique_ptr<Weights> made(new Weights);
    if (!settings().spills) {
        made->source_ = Source::of_open_files(tensors, count);
    }
    if (!made->source_ && !settings().directory.empty()) {
        made->source_ = Source::of_directory(settings().directory, why);
    }
    if (!made->source_) {
        return nullptr;
    }
    return made->sort(tensors, count, why) ? std::move(made) : nullptr;
}

bool Weights::sort(ggml_tensor * const * tensors, int count, std::string & why) {
    std::set<std::pair<uint32_t, uint64_t>> taken;
    std::vector<std::pair<Record *, uint32_t>> of_layers;
    for (int i = 0; i < count; i++) {
        records_.emplace_back(new Record);
        Record & record = *records_.back();
        record.owner = this;
        record.tensor = tensors[i];
        by_tensor_[tensors[i]] = &record;
        record.bytes = ggml_nbytes(tensors[i]);
        span_bytes_ += pages(staying_bytes(record));
        std::pair<std::string, uint32_t> key;
        const bool is_layer = layer_of(ggml_get_name(tensors[i]), key);
        const bool is_large = record.bytes >= LARGE_BYTES && ggml_n_dims(tensors[i]) == 2;
        // The same bytes twice, as where weights are tied: only the first ones are streamed.
        record.streams = record.bytes > 0 && (is_layer || is_large) &&
                         source_->place(tensors[i], record.place) &&
                         taken.insert({record.place.file, record.place.offset}).second;
        if (!record.streams) {
            resident_bytes_ += staying_bytes(record);
            continue;
        }
        streamed_bytes_ += record.bytes;
        if (is_layer) {
            layers_.emplace(key, 0);
        } else {
            large_.push_back(&record);
        }
    }
    for (auto & [key, number] : layers_) {
        number = uint32_t(units_.size());
        units_.push_back({key.first + std::to_string(key.second), number, {}});
    }
    uint64_t largest = 0;
    for (const std::unique_ptr<Record> & record : records_) {
        std::pair<std::string, uint32_t> key;
        if (record->streams && layer_of(ggml_get_name(record->tensor), key)) {
            const uint32_t unit = layers_.at(key);
            units_[unit].ranges.push_back({record.get(), 0, record->bytes});
            record->units = {unit};
            record->at = {0};
        }
    }
    for (const Unit & unit : units_) {
        uint64_t bytes = 0;
        for (const Range & range : unit.ranges) {
            bytes += range.bytes;
        }
        largest = std::max(largest, bytes);
    }
    cut_pieces(largest > 0 ? largest : PIECE_BYTES);
    for (uint32_t unit = 0; is_far() && unit < units_.size(); unit++) {
        uint64_t bytes = 0;
        for (const Range & range : units_[unit].ranges) {
            const ggml_tensor part = part_of(range);
            bytes += is_padded(part) ? far_bytes(&part) : 0;
        }
        padded_bytes_ = std::max(padded_bytes_, bytes);
    }
    resident_bytes_ += padded_bytes_;
    if (units_.empty()) {
        return true;
    }
    return table_open(*source_, units_, &table_, why) &&
           table_floor(table_, settings().slots, floor_bytes_, why);
}

uint64_t Weights::staying_bytes(const Record & record) {
    return is_far() ? far_bytes(record.tensor) : pages(record.bytes);
}

bool Weights::stay(Record & record, std::string & why) {
    if (record.bytes == 0) {
        return true;
    }
    if (!is_far()) {
        const bool is_there = mprotect(record.home, pages(record.bytes), PROT_READ | PROT_WRITE) == 0;
        why = is_there ? why : "there is no memory for weights";
        return is_there;
    }
    far_buffers_.reserve(far_buffers_.size() + 1);
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(far_type(), staying_bytes(record));
    // A copy of the tensor: the device may have to prepare what lies behind it.
    ggml_tensor there = *record.tensor;
    there.buffer = nullptr;
    there.data = nullptr;
    if (!buffer ||
        ggml_backend_tensor_alloc(buffer, &there, ggml_backend_buffer_get_base(buffer)) != GGML_STATUS_SUCCESS) {
        why = std::string("the device has no memory for ") + ggml_get_name(record.tensor);
        ggml_backend_buffer_free(buffer);
        return false;
    }
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    far_buffers_.push_back(buffer);
    record.far = {buffer, static_cast<char *>(there.data)};
    return true;
}

// A matrix as large as many layers would need a slot as large as that. Its rows are independent.
void Weights::cut_pieces(uint64_t most_bytes) {
    for (Record * record : large_) {
        const uint64_t row_bytes = record->tensor->nb[1];
        int64_t rows = int64_t(most_bytes / row_bytes);
        rows -= rows % (rows > TILE_ROWS ? TILE_ROWS : LEAST_ROWS);
        rows = std::max(rows, LEAST_ROWS);
        record->piece_rows = rows;
        for (int64_t row = 0; row < record->tensor->ne[1]; row += rows) {
            const uint64_t from = uint64_t(row) * row_bytes;
            const uint64_t bytes = std::min(uint64_t(rows) * row_bytes, record->bytes - from);
            record->units.push_back(uint32_t(units_.size()));
            record->at.push_back(0);
            units_.push_back({std::string(ggml_get_name(record->tensor)) + " row " + std::to_string(row),
                              KVT_NONE, {{record, from, bytes}}});
        }
    }
}

Record * Weights::find(const ggml_tensor * tensor) const {
    const auto at = by_tensor_.find(tensor);
    return at == by_tensor_.end() ? nullptr : at->second;
}

Record * Weights::find_like(const ggml_tensor * tensor) const {
    Record * found = nullptr;
    for (const std::unique_ptr<Record> & record : records_) {
        const bool is_alike = record->bytes == ggml_nbytes(tensor) && record->tensor->type == tensor->type &&
                              std::strcmp(record->tensor->name, tensor->name) == 0;
        if (is_alike && (tensor->data == record->home || tensor->data == record->tensor->data)) {
            return record.get();
        }
        if (is_alike && tensor->name[0]) {
            found = record.get();
        }
    }
    return found;
}

bool Weights::settle(char * base, std::string & why) {
    Memory * memory = Memory::get(why);
    if (!memory || !memory->charge(resident_bytes_, "weights that stay", why)) {
        return false;
    }
    charged_bytes_ = resident_bytes_;
    if (!memory->promise(floor_bytes_, "streaming weights", why)) {
        return false;
    }
    promised_bytes_ = floor_bytes_;
    base_ = base;
    for (const std::unique_ptr<Record> & record : records_) {
        record->home = base;
        base += pages(staying_bytes(*record));
        if (!record->streams && !stay(*record, why)) {
            return false;
        }
    }
    if (padded_bytes_ > 0) {
        padded_ = ggml_backend_buft_alloc_buffer(far_type(), padded_bytes_);
        if (!padded_) {
            why = "the device has no memory for a layer's padding";
            return false;
        }
        far_buffers_.push_back(padded_);
        ggml_backend_buffer_set_usage(padded_, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    totals().add(*this);
    return true;
}

Weights::~Weights() {
    const std::lock_guard<std::mutex> guard(weights_lock());
    totals().remove(*this);
    while (!held_.empty()) {
        release(held_.begin()->first);
    }
    kvt_stream_close(&stream_, deadline_in(CLOSE_SECONDS), nullptr);
    kvt_model_close(&table_);
    for (ggml_backend_buffer_t buffer : far_buffers_) {
        ggml_backend_buffer_free(buffer);
    }
    if (Memory * memory = Memory::opened()) {
        memory->forget_promise(promised_bytes_);
        memory->give_back(charged_bytes_);
    }
}

void Weights::put(Record & record, const void * data, uint64_t from, uint64_t bytes) {
    std::string why;
    if (!broken_.empty()) {
        return;
    }
    if (record.streams) {
        if (source_->take(record.place, from, data, bytes, why)) {
            return;
        }
        // Not what the file has: it is not ours to say which is right. The engine's bytes count.
        if (!why.empty() || !materialise(record, why)) {
            broken_ = why;
            say(why);
            return;
        }
    }
    if (is_far()) {
        ggml_tensor there = far_tensor(record);
        ggml_backend_tensor_set(&there, data, from, bytes);
    } else {
        std::memcpy(record.home + from, data, bytes);
    }
}

bool Weights::get(const Record & record, void * out, uint64_t from, uint64_t bytes) const {
    if (record.streams) {
        return source_->read(record.place, from, out, bytes);
    }
    if (is_far()) {
        const ggml_tensor there = far_tensor(record);
        ggml_backend_tensor_get(&there, out, from, bytes);
    } else {
        std::memcpy(out, record.home + from, bytes);
    }
    return true;
}

bool Weights::materialise(Record & record, std::string & why) {
    const uint64_t bytes = staying_bytes(record);
    const std::string unread = std::string(ggml_get_name(record.tensor)) + " cannot be read from its file";
    std::vector<char> read(is_far() ? record.bytes : 0);
    if (is_far() && !source_->read(record.place, 0, read.data(), record.bytes)) {
        why = unread;
        return false;
    }
    Memory * memory = Memory::get(why);
    if (!memory || !memory->charge(bytes, ggml_get_name(record.tensor), why)) {
        return false;
    }
    const bool has_place = stay(record, why);
    if (!has_place || (!is_far() && !source_->read(record.place, 0, record.home, record.bytes))) {
        why = has_place ? unread : why;
        memory->give_back(bytes);
        return false;
    }
    charged_bytes_ += bytes;
    record.streams = false;
    if (is_far()) {
        put(record, read.data(), 0, record.bytes);
    } else {
        record.tensor->data = record.home;
    }
    totals().materialised++;
    return true;
}

bool Weights::open_stream(std::string & why) {
    if (stream_) {
        return true;
    }
    Memory * memory = Memory::get(why);
    if (!memory) {
        return false;
    }
    memory->forget_promise(promised_bytes_);
    promised_bytes_ = 0;
    const kvt_stream_terms_t terms = table_terms(settings().slots);
    kvt_stream_opts_t opts = KVT_STREAM_OPTS_INIT;
    opts.model = table_;
    opts.terms = &terms;
    opts.budget = memory->budget();
    opts.device = memory->device();
    Failure failure;
    const kvt_status_t status = kvt_stream_open(memory->runtime(), &opts, &stream_, failure.out());
    if (status != KVT_OK) {
        why = failure.words("weights cannot be streamed", status);
        std::string ignored;
        promised_bytes_ = memory->promise(floor_bytes_, "streaming weights", ignored) ? floor_bytes_ : 0;
    }
    return status == KVT_OK;
}

bool Weights::hold(const std::vector<uint32_t> & units, std::string & why) {
    if (!broken_.empty()) {
        why = broken_;
        return false;
    }
    for (auto at = held_.begin(); at != held_.end();) {
        const uint32_t unit = (at++)->first;
        if (std::find(units.begin(), units.end(), unit) == units.end()) {
            release(unit);
        }
    }
    return std::all_of(units.begin(), units.end(),
                       [&](uint32_t unit) { return has(unit) || acquire(unit, why); });
}

bool Weights::begin(std::string & why) {
    Failure failure;
    const kvt_status_t status = kvt_stream_pass_begin(stream_, failure.out());
    if (status != KVT_OK) {
        why = failure.words("the model's file", status);
    }
    return status == KVT_OK;
}

// Units come in the order of the model. One that lies behind the last is of another pass.
bool Weights::pass_to(uint32_t unit, std::string & why) {
    if (is_passing_ && unit < last_unit_) {
        kvt_stream_pass_end(stream_, nullptr);
        is_passing_ = false;
    }
    if (!is_passing_ && !begin(why)) {
        return false;
    }
    is_passing_ = true;
    last_unit_ = unit;
    return true;
}

bool Weights::acquire(uint32_t unit, std::string & why) {
    if (!open_stream(why) || !pass_to(unit, why)) {
        return false;
    }
    kvt_unit_lease_t held = KVT_UNIT_LEASE_INIT;
    Failure failure;
    const kvt_status_t status =
        kvt_stream_acquire(stream_, unit, 0, deadline_in(UNIT_SECONDS), &held, failure.out());
    if (status != KVT_OK) {
        why = failure.words(units_[unit].name.c_str(), status);
        if (status == KVT_E_BUSY) {
            why += " (KVTIER_RING gives more slots)";
        }
        return false;
    }
    held_.emplace(unit, held);
    if (is_far()) {
        const bool is_placed = far_point(unit, static_cast<const char *>(held.address), why);
        if (!is_placed) {
            release(unit);
        }
        return is_placed;
    }
    point(unit, static_cast<const char *>(held.address));
    return true;
}

// Tensors that need zeros behind them have a place of their own: one for all layers, as one is used at once.
bool Weights::far_point(uint32_t unit, const char * address, std::string & why) {
    uint64_t used_bytes = 0;
    for (const Range & range : units_[unit].ranges) {
        Record & record = *range.record;
        if (!record.streams) {
            continue;
        }
        const size_t piece = record.piece_rows > 0 ? unit - record.units.front() : 0;
        record.far = far_place(address + record.at[piece]);
        if (!record.far.buffer) {
            why = units_[unit].name + " is not where it was put: this is a defect of kvtier";
            return false;
        }
        ggml_tensor there = part_of(range);
        if (!is_padded(there)) {
            continue;
        }
        if (padded_unit_ != KVT_NONE && padded_unit_ != unit) {
            why = units_[unit].name + " and " + units_[padded_unit_].name + " are used at once: they have to stay";
            return false;
        }
        padded_unit_ = unit;
        ggml_tensor source = far_tensor(record);
        std::copy(there.ne, there.ne + GGML_MAX_DIMS, source.ne);
        std::copy(there.nb, there.nb + GGML_MAX_DIMS, source.nb);
        char * at = static_cast<char *>(ggml_backend_buffer_get_base(padded_)) + used_bytes;
        if (ggml_backend_tensor_alloc(padded_, &there, at) != GGML_STATUS_SUCCESS) {
            why = std::string(ggml_get_name(record.tensor)) + " has no place on the device";
            return false;
        }
        used_bytes += far_bytes(&there);
        ggml_backend_tensor_copy(&source, &there);
        record.far = {padded_, at};
    }
    return true;
}

void Weights::release(uint32_t unit) {
    const auto at = held_.find(unit);
    point(unit, nullptr);
    padded_unit_ = padded_unit_ == unit ? KVT_NONE : padded_unit_;
    kvt_stream_release(stream_, &at->second, 0, nullptr);
    held_.erase(at);
}

// Nobody writes to weights; ggml's pointer says nothing of that. Where another device computes, tensors are
// changed only while it does.
void Weights::point(uint32_t unit, const char * address) {
    for (const Range & range : units_[unit].ranges) {
        Record & record = *range.record;
        if (is_far() && record.streams) {
            record.far = {};
        } else if (record.streams && record.piece_rows == 0) {
            record.tensor->data = address ? const_cast<char *>(address) + record.at.front() : record.home;
        }
    }
}

const char * Weights::address(uint32_t unit) const {
    return static_cast<const char *>(held_.at(unit).address);
}

bool Weights::rest(std::string & why) {
    if (!is_passing_ || last_unit_ + 1 != units_.size()) {
        return true;
    }
    while (!held_.empty()) {
        release(held_.begin()->first);
    }
    kvt_stream_pass_end(stream_, nullptr);
    is_passing_ = false;
    // Beginning looks at files: what was computed is of one state of them. The next pass begins once more.
    return begin(why);
}

void Weights::spread() {
    if (stream_) {
        const kvt_stream_limits_t room = KVT_STREAM_LIMITS_INIT;
        kvt_stream_rebalance(stream_, &room, nullptr, nullptr);
    }
}

bool Weights::stats(kvt_stream_stats_t & out, kvt_stream_plan_t & plan) const {
    return stream_ && kvt_stream_stats(stream_, &out) == KVT_OK &&
           kvt_stream_plan(stream_, &plan, nullptr, nullptr, 0, sizeof(kvt_unit_residency_t)) == KVT_OK;
}

} // namespace kvtier_plugin
