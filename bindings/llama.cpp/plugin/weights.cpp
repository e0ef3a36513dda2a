#include "weights.h"

#include "plugin.h"
#include "stats.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace kvtier_plugin {

namespace {

constexpr uint64_t PAGE_BYTES = 4096;
// Smaller tensors outside layers are resident.
constexpr uint64_t LARGE_BYTES = 1 << 20;
// Size of a piece if the model has no streamed layers.
constexpr uint64_t PIECE_BYTES = 8 << 20;
// Kernels work in tiles of this many rows. Pieces are whole tiles, so that results equal those without
// pieces.
constexpr int64_t TILE_ROWS = 256;
constexpr int64_t MIN_ROWS = 32;
// A unit that the disk does not deliver within this time fails the decode, not the process.
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

// The tensor with its place on the inner device.
ggml_tensor inner_tensor(const Record & record) {
    ggml_tensor there = *record.tensor;
    there.buffer = record.inner.buffer;
    there.data = record.inner.data;
    return there;
}

// The tensor, or the rows of it, that a unit has; not allocated yet.
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

// Kernels may read past the end of such a tensor and need zeros there. In a slot the next tensor
// follows.
bool is_padded(const ggml_tensor & part) {
    return ggml_backend_buft_get_alloc_size(inner_buffer_type(), &part) != ggml_nbytes(&part);
}

// Tells whether a tensor has one matrix for each expert of its layer. On a device with its own memory,
// experts pass with their layer.
bool is_stack(const ggml_tensor & tensor) {
    constexpr int64_t MAX_EXPERTS = 65535;
    return !inner_has_memory() && std::strstr(ggml_get_name(&tensor), "_exps.") && tensor.ne[2] > 1 &&
           tensor.ne[2] <= MAX_EXPERTS && tensor.ne[3] == 1 && ggml_is_contiguous(&tensor);
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
    return made->classify(tensors, count, why) ? std::move(made) : nullptr;
}

void Weights::add_record(ggml_tensor * tensor) {
    records_.emplace_back(new Record);
    Record & record = *records_.back();
    record.owner = this;
    record.tensor = tensor;
    by_tensor_[tensor] = &record;
    record.bytes = ggml_nbytes(tensor);
    span_bytes_ += pages(resident_size(record));
    std::pair<std::string, uint32_t> key;
    const bool is_layer = layer_of(ggml_get_name(tensor), key);
    const bool is_large = record.bytes >= LARGE_BYTES && ggml_n_dims(tensor) == 2;
    // Tied weights have the same bytes twice: only the first tensor is streamed.
    record.streams = record.bytes > 0 && (is_layer || is_large) && source_->place(tensor, record.place) &&
                     taken_.insert({record.place.file, record.place.offset}).second;
    if (!record.streams) {
        resident_bytes_ += resident_size(record);
        return;
    }
    streamed_bytes_ += record.bytes;
    if (is_layer) {
        layers_[key].push_back(&record);
    } else {
        large_.push_back(&record);
    }
}

// Experts are units of their own, after their layer, if all of the layer's experts' tensors have the same
// number of them.
void Weights::add_units() {
    uint32_t layer = 0;
    for (const auto & [key, records] : layers_) {
        std::set<int64_t> counts;
        for (const Record * record : records) {
            if (is_stack(*record->tensor)) {
                counts.insert(record->tensor->ne[2]);
            }
        }
        const uint32_t experts = counts.size() == 1 ? uint32_t(*counts.begin()) : 0;
        const bool has_others = std::any_of(records.begin(), records.end(),
                                            [](const Record * record) { return !is_stack(*record->tensor); });
        const std::string name = key.first + std::to_string(key.second);
        uint32_t unit = uint32_t(units_.size());
        if (has_others || experts == 0) {
            final_unit_ = unit++;
            units_.push_back({name, layer, KVT_NONE, {}});
        }
        for (uint32_t expert = 0; expert < experts; expert++) {
            units_.push_back({name + " expert " + std::to_string(expert), layer, expert, {}});
        }
        for (Record * record : records) {
            const bool is_divided = experts > 0 && is_stack(*record->tensor);
            add_to_units(*record, is_divided ? unit : final_unit_, is_divided ? experts : 1);
            record->is_experts = is_divided;
        }
        if (experts > 0) {
            add_routed(layer, unit, experts, records);
        }
        layer++;
    }
}

void Weights::add_routed(uint32_t layer, uint32_t first_unit, uint32_t experts,
                         const std::vector<Record *> & records) {
    RoutedLayer made;
    made.layer = layer;
    made.first_unit = first_unit;
    made.experts = experts;
    for (const Range & range : units_[first_unit].ranges) {
        made.expert_bytes += range.bytes;
    }
    for (Record * record : records) {
        const char * name = ggml_get_name(record->tensor);
        if (ends_with(name, ".ffn_gate_inp.weight") && record->tensor->ne[1] == experts) {
            made.router = record;
        } else if (ends_with(name, ".ffn_gate_inp.bias")) {
            made.bias = record;
        } else if (ends_with(name, ".exp_probs_b.bias")) {
            made.choice_bias = record;
        }
    }
    routing_.add(made);
}

void Weights::add_to_units(Record & record, uint32_t first, uint32_t count) {
    const uint64_t bytes = record.bytes / count;
    for (uint32_t i = 0; i < count; i++) {
        units_[first + i].ranges.push_back({&record, i * bytes, bytes, i});
        record.units.push_back(first + i);
        record.at.push_back(0);
    }
}

uint64_t Weights::largest_unit() const {
    uint64_t largest = 0;
    for (const Unit & unit : units_) {
        uint64_t bytes = 0;
        for (const Range & range : unit.ranges) {
            bytes += range.bytes;
        }
        largest = std::max(largest, bytes);
    }
    return largest;
}

bool Weights::classify(ggml_tensor * const * tensors, int count, std::string & why) {
    for (int i = 0; i < count; i++) {
        add_record(tensors[i]);
    }
    add_units();
    const uint64_t largest = largest_unit();
    split_large(largest > 0 ? largest : PIECE_BYTES);
    for (uint32_t unit = 0; inner_has_memory() && unit < units_.size(); unit++) {
        uint64_t bytes = 0;
        for (const Range & range : units_[unit].ranges) {
            const ggml_tensor part = part_of(range);
            bytes += is_padded(part) ? inner_bytes(&part) : 0;
        }
        padded_bytes_ = std::max(padded_bytes_, bytes);
    }
    resident_bytes_ += padded_bytes_;
    if (units_.empty()) {
        return true;
    }
    return table_open(*source_, units_, &table_, why) &&
           table_floor(table_, std::max(settings().slots, LEAST_SLOTS), floor_bytes_, why);
}

uint64_t Weights::resident_size(const Record & record) {
    return inner_has_memory() ? inner_bytes(record.tensor) : pages(record.bytes);
}

bool Weights::allocate_resident(Record & record, std::string & why) {
    if (record.bytes == 0) {
        return true;
    }
    if (!inner_has_memory()) {
        const bool is_present = mprotect(record.reserved, pages(record.bytes), PROT_READ | PROT_WRITE) == 0;
        why = is_present ? why : "the resident weights' memory cannot be made writable: free memory";
        return is_present;
    }
    inner_buffers_.reserve(inner_buffers_.size() + 1);
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(inner_buffer_type(), resident_size(record));
    // A copy of the tensor: the device may have to prepare the bytes after it.
    ggml_tensor there = *record.tensor;
    there.buffer = nullptr;
    there.data = nullptr;
    if (!buffer ||
        ggml_backend_tensor_alloc(buffer, &there,
                                  ggml_backend_buffer_get_base(buffer)) != GGML_STATUS_SUCCESS) {
        why = std::string("the device has no memory for ") + ggml_get_name(record.tensor) +
              ": lower KVTIER_DEVICE_BUDGET";
        ggml_backend_buffer_free(buffer);
        return false;
    }
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    inner_buffers_.push_back(buffer);
    record.inner = {buffer, static_cast<char *>(there.data)};
    return true;
}

// A matrix as large as many layers would need a slot of its size. Its rows are independent, so it is
// split.
void Weights::split_large(uint64_t most_bytes) {
    for (Record * record : large_) {
        const uint64_t row_bytes = record->tensor->nb[1];
        int64_t rows = int64_t(most_bytes / row_bytes);
        rows -= rows % (rows > TILE_ROWS ? TILE_ROWS : MIN_ROWS);
        rows = std::max(rows, MIN_ROWS);
        record->piece_rows = rows;
        for (int64_t row = 0; row < record->tensor->ne[1]; row += rows) {
            const uint64_t from = uint64_t(row) * row_bytes;
            const uint64_t bytes = std::min(uint64_t(rows) * row_bytes, record->bytes - from);
            const size_t index = record->units.size();
            final_unit_ = uint32_t(units_.size());
            record->units.push_back(final_unit_);
            record->at.push_back(0);
            units_.push_back({std::string(ggml_get_name(record->tensor)) + " row " + std::to_string(row),
                              KVT_NONE, KVT_NONE, {{record, from, bytes, index}}});
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
        if (is_alike && (tensor->data == record->reserved || tensor->data == record->tensor->data)) {
            return record.get();
        }
        if (is_alike && tensor->name[0]) {
            found = record.get();
        }
    }
    return found;
}

bool Weights::allocate(char * base, std::string & why) {
    Memory * memory = Memory::get(why);
    if (!memory || !memory->charge(resident_bytes_, "resident weights", why)) {
        return false;
    }
    charged_bytes_ = resident_bytes_;
    if (!memory->reserve_ahead(floor_bytes_, "streaming weights", why)) {
        return false;
    }
    reserved_bytes_ = floor_bytes_;
    base_ = base;
    for (const std::unique_ptr<Record> & record : records_) {
        record->reserved = base;
        base += pages(resident_size(*record));
        if (!record->streams && !allocate_resident(*record, why)) {
            return false;
        }
    }
    if (padded_bytes_ > 0) {
        padded_ = ggml_backend_buft_alloc_buffer(inner_buffer_type(), padded_bytes_);
        if (!padded_) {
            why = "the device has no memory for a layer's padding: lower KVTIER_DEVICE_BUDGET";
            return false;
        }
        inner_buffers_.push_back(padded_);
        ggml_backend_buffer_set_usage(padded_, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    totals().add(*this);
    return true;
}

Weights::~Weights() {
    const std::lock_guard<std::mutex> guard(weights_lock());
    totals().remove(*this);
    while (!leases_.empty()) {
        release(leases_.begin()->first);
    }
    kvt_stream_close(&stream_, deadline_in(CLOSE_SECONDS), nullptr);
    kvt_model_close(&table_);
    for (ggml_backend_buffer_t buffer : inner_buffers_) {
        ggml_backend_buffer_free(buffer);
    }
    if (Memory * memory = Memory::opened()) {
        memory->unreserve(reserved_bytes_);
        memory->release(charged_bytes_);
    }
}

void Weights::put(Record & record, const void * data, uint64_t from, uint64_t bytes) {
    std::string why;
    if (!broken_.empty()) {
        return;
    }
    if (record.streams) {
        if (source_->accept(record.place, from, data, bytes, why)) {
            return;
        }
        // The engine's bytes differ from the file's. The plugin cannot tell which are right; the
        // engine's count.
        if (!why.empty() || !materialise(record, why)) {
            broken_ = why;
            log_line(why);
            return;
        }
    }
    if (inner_has_memory()) {
        ggml_tensor there = inner_tensor(record);
        ggml_backend_tensor_set(&there, data, from, bytes);
    } else {
        std::memcpy(record.reserved + from, data, bytes);
    }
}

bool Weights::get(const Record & record, void * out, uint64_t from, uint64_t bytes) const {
    if (record.streams) {
        return source_->read(record.place, from, out, bytes);
    }
    if (inner_has_memory()) {
        const ggml_tensor there = inner_tensor(record);
        ggml_backend_tensor_get(&there, out, from, bytes);
    } else {
        std::memcpy(out, record.reserved + from, bytes);
    }
    return true;
}

bool Weights::materialise(Record & record, std::string & why) {
    const uint64_t bytes = resident_size(record);
    const std::string unread = std::string(ggml_get_name(record.tensor)) + " cannot be read from its file";
    std::vector<char> read(inner_has_memory() ? record.bytes : 0);
    if (inner_has_memory() && !source_->read(record.place, 0, read.data(), record.bytes)) {
        why = unread;
        return false;
    }
    Memory * memory = Memory::get(why);
    if (!memory || !memory->charge(bytes, ggml_get_name(record.tensor), why)) {
        return false;
    }
    const bool has_place = allocate_resident(record, why);
    if (!has_place || (!inner_has_memory() && !source_->read(record.place, 0, record.reserved,
        record.bytes))) {
        why = has_place ? unread : why;
        memory->release(bytes);
        return false;
    }
    charged_bytes_ += bytes;
    record.streams = false;
    if (inner_has_memory()) {
        put(record, read.data(), 0, record.bytes);
    } else {
        record.tensor->data = record.reserved;
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
    memory->unreserve(reserved_bytes_);
    reserved_bytes_ = 0;
    const uint64_t bytes = memory->report().free_bytes;
    kvt_stream_terms_t terms = table_terms(settings().slots > 0 ? settings().slots : table_slots(table_, bytes));
    const bool has_experts = std::any_of(units_.begin(), units_.end(),
                                         [](const Unit & unit) { return unit.expert != KVT_NONE; });
    if (has_experts) {
        const uint32_t used = source_->experts_used();
        kvt_stream_terms_t first = terms;
        if (!table_expert_terms(table_, units_, used, bytes, first)) {
            source_->drop_cache();
            table_expert_terms(table_, units_, used, bytes, terms);
        } else {
            terms = first;
        }
    }
    kvt_stream_opts_t opts = KVT_STREAM_OPTS_INIT;
    opts.model = table_;
    opts.terms = &terms;
    opts.budget = memory->budget();
    opts.device = memory->device();
    opts.expert_policy = settings().expert_policy.c_str();
    opts.expert_policy_bytes = settings().expert_policy.size();
    // The policy alone decides: a share of slots for the most used experts would not count as free ones.
    opts.flags = KVT_STREAM_SET_PINNED_PERCENT;
    Failure failure;
    const kvt_status_t status = kvt_stream_open(memory->runtime(), &opts, &stream_, failure.out());
    if (status != KVT_OK) {
        why = failure.text("opening the streamer", status);
        std::string ignored;
        reserved_bytes_ = memory->reserve_ahead(floor_bytes_, "streaming weights",
                                                ignored) ? floor_bytes_ : 0;
    }
    return status == KVT_OK;
}

bool Weights::lease_units(const std::vector<uint32_t> & units, std::string & why) {
    if (!broken_.empty()) {
        why = broken_;
        return false;
    }
    for (auto at = leases_.begin(); at != leases_.end();) {
        const uint32_t unit = (at++)->first;
        if (std::find(units.begin(), units.end(), unit) == units.end()) {
            release(unit);
        }
    }
    return std::all_of(units.begin(), units.end(),
                       [&](uint32_t unit) { return has(unit) || acquire(unit, why); });
}

bool Weights::begin_pass(std::string & why) {
    Failure failure;
    const kvt_status_t status = kvt_stream_pass_begin(stream_, failure.out());
    if (status != KVT_OK) {
        why = failure.text("checking the model's files", status);
    }
    constexpr uint32_t LOOK_EVERY = 16;
    if (passes_++ % LOOK_EVERY == 0) {
        residency_.resize(units_.size());
        kvt_stream_plan(stream_, nullptr, nullptr, residency_.data(), residency_.size(), sizeof residency_[0]);
    }
    return status == KVT_OK;
}

// Units are acquired in the order of the model. A unit before the last one belongs to another pass.
bool Weights::continue_pass(uint32_t unit, std::string & why) {
    if (is_passing_ && unit < last_unit_) {
        kvt_stream_pass_end(stream_, nullptr);
        is_passing_ = false;
    }
    if (!is_passing_ && !begin_pass(why)) {
        return false;
    }
    is_passing_ = true;
    last_unit_ = unit;
    return true;
}

bool Weights::acquire(uint32_t unit, std::string & why) {
    if (!open_stream(why) || !continue_pass(unit, why)) {
        return false;
    }
    kvt_unit_lease_t lease = KVT_UNIT_LEASE_INIT;
    Failure failure;
    const kvt_status_t status =
        kvt_stream_acquire(stream_, unit, 0, deadline_in(UNIT_SECONDS), &lease, failure.out());
    if (status != KVT_OK) {
        why = failure.text(units_[unit].name.c_str(), status);
        if (status == KVT_E_BUSY) {
            why += " (raise KVTIER_RING, the number of slots)";
        }
        return false;
    }
    leases_.emplace(unit, lease);
    if (inner_has_memory()) {
        const bool is_placed = place_on_inner(unit, static_cast<const char *>(lease.address), why);
        if (!is_placed) {
            release(unit);
        }
        return is_placed;
    }
    point_tensors(unit, static_cast<const char *>(lease.address));
    return true;
}

void Weights::hint_experts(const std::vector<uint32_t> & units) {
    // A hint that fails is a read that begins later, with its error.
    std::string why;
    if (open_stream(why)) {
        kvt_stream_hint(stream_, units.data(), units.size(), nullptr);
    }
}

Leased Weights::lease_expert(uint32_t unit, bool waits, std::string & why) {
    if (has(unit)) {
        return Leased::ready;
    }
    if (!broken_.empty() || !open_stream(why)) {
        why = broken_.empty() ? why : broken_;
        return Leased::failed;
    }
    kvt_unit_lease_t lease = KVT_UNIT_LEASE_INIT;
    Failure failure;
    const kvt_status_t status = kvt_stream_acquire(stream_, unit, waits ? 0 : KVT_ACQUIRE_POLL,
                                                   deadline_in(UNIT_SECONDS), &lease, failure.out());
    if (status == KVT_OK) {
        leases_.emplace(unit, lease);
        return Leased::ready;
    }
    if (!waits && (status == KVT_E_AGAIN || status == KVT_E_BUSY)) {
        return Leased::not_loaded;
    }
    why = failure.text(units_[unit].name.c_str(), status);
    return Leased::failed;
}

void Weights::release_experts(const std::vector<uint32_t> & units) {
    for (uint32_t unit : units) {
        release(unit);
    }
}

bool Weights::read_ahead(uint32_t unit) {
    kvt_unit_lease_t lease = KVT_UNIT_LEASE_INIT;
    const kvt_status_t status =
        stream_ && !has(unit) ? kvt_stream_acquire(stream_, unit, KVT_ACQUIRE_POLL, 0, &lease, nullptr)
                              : KVT_E_STATE;
    if (status == KVT_OK) {
        // The policy takes the lease for a use, so that the expert stays until it is needed.
        kvt_stream_release(stream_, &lease, 0, nullptr);
    }
    return status == KVT_E_AGAIN;
}

const char * Weights::borrow(const Record & record) {
    if (!record.streams) {
        return record.reserved;
    }
    const uint32_t unit = record.units.front();
    const bool is_resident = unit < residency_.size() && residency_[unit].residency != KVT_RESIDENT_FILE;
    if (!has(unit)) {
        kvt_unit_lease_t lease = KVT_UNIT_LEASE_INIT;
        if (!is_resident ||
            kvt_stream_acquire(stream_, unit, KVT_ACQUIRE_POLL, 0, &lease, nullptr) != KVT_OK) {
            return nullptr;
        }
        leases_.emplace(unit, lease);
        borrowed_.push_back(unit);
    }
    return address(unit) + record.at.front();
}

void Weights::release_borrowed() {
    release_experts(borrowed_);
    borrowed_.clear();
}

size_t Weights::expert_slots() const {
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    const bool is_known = stream_ && kvt_stream_plan(stream_, &plan, nullptr, nullptr, 0,
                                                     sizeof(kvt_unit_residency_t)) == KVT_OK;
    // Without slots all experts are resident.
    return is_known && plan.expert_slots > 0 ? plan.expert_slots : SIZE_MAX;
}

// Tensors that need zeros after them are copied to a buffer of their own. One buffer serves all layers,
// because only one layer is used at a time.
bool Weights::place_on_inner(uint32_t unit, const char * address, std::string & why) {
    uint64_t used_bytes = 0;
    for (const Range & range : units_[unit].ranges) {
        Record & record = *range.record;
        if (!record.streams) {
            continue;
        }
        record.inner = inner_place(address + record.at[range.index]);
        if (!record.inner.buffer) {
            why = units_[unit].name + " is not at its address: this is a defect of kvtier";
            return false;
        }
        ggml_tensor there = part_of(range);
        if (!is_padded(there)) {
            continue;
        }
        if (padded_unit_ != KVT_NONE && padded_unit_ != unit) {
            why = units_[unit].name + " and " + units_[padded_unit_].name +
                  " are used in one node, but the padding buffer holds one: run this model without KVTIER";
            return false;
        }
        padded_unit_ = unit;
        ggml_tensor source = inner_tensor(record);
        std::copy(there.ne, there.ne + GGML_MAX_DIMS, source.ne);
        std::copy(there.nb, there.nb + GGML_MAX_DIMS, source.nb);
        char * at = static_cast<char *>(ggml_backend_buffer_get_base(padded_)) + used_bytes;
        if (ggml_backend_tensor_alloc(padded_, &there, at) != GGML_STATUS_SUCCESS) {
            why = std::string(ggml_get_name(record.tensor)) +
                  " cannot be placed in the device's padding buffer";
            return false;
        }
        used_bytes += inner_bytes(&there);
        ggml_backend_tensor_copy(&source, &there);
        record.inner = {padded_, at};
    }
    return true;
}

void Weights::release(uint32_t unit) {
    const auto at = leases_.find(unit);
    point_tensors(unit, nullptr);
    padded_unit_ = padded_unit_ == unit ? KVT_NONE : padded_unit_;
    kvt_stream_release(stream_, &at->second, 0, nullptr);
    leases_.erase(at);
}

// No code writes to weights, although ggml's pointer is not const. With an inner device of its own
// memory, tensors are changed only while it computes.
void Weights::point_tensors(uint32_t unit, const char * address) {
    for (const Range & range : units_[unit].ranges) {
        Record & record = *range.record;
        if (inner_has_memory() && record.streams) {
            record.inner = {};
        } else if (record.streams && record.piece_rows == 0 && !record.is_experts) {
            record.tensor->data = address ? const_cast<char *>(address) + record.at.front() : record.reserved;
        }
    }
}

const char * Weights::address(uint32_t unit) const {
    return static_cast<const char *>(leases_.at(unit).address);
}

bool Weights::end_graph(std::string & why) {
    if (!is_passing_ || last_unit_ != final_unit_) {
        return true;
    }
    while (!leases_.empty()) {
        release(leases_.begin()->first);
    }
    kvt_stream_pass_end(stream_, nullptr);
    is_passing_ = false;
    // Beginning a pass checks the files, so that all results come from one version of them. The next
    // pass begins again.
    return begin_pass(why);
}

void Weights::rebalance() {
    if (stream_) {
        const kvt_stream_limits_t limits = KVT_STREAM_LIMITS_INIT;
        kvt_stream_rebalance(stream_, &limits, nullptr, nullptr);
    }
}

bool Weights::stats(kvt_stream_stats_t & out, kvt_stream_plan_t & plan) const {
    return stream_ && kvt_stream_stats(stream_, &out) == KVT_OK &&
           kvt_stream_plan(stream_, &plan, nullptr, nullptr, 0, sizeof(kvt_unit_residency_t)) == KVT_OK;
}

} // namespace kvtier_plugin
