// The weights of a model in one of the plugin's buffers.
//
// Layers, their experts, and large matrices outside layers in pieces are units of a streamer. Units stay in
// memory as far as the budget allows; others are read from their file ahead of their use. Small tensors
// outside layers are resident. All functions that are not const must be called under weights_lock().
#ifndef KVTIER_PLUGIN_WEIGHTS_H
#define KVTIER_PLUGIN_WEIGHTS_H

#include "inner_device.h"
#include "memory.h"
#include "routing.h"
#include "source.h"

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvtier_plugin {

// One graph at a time computes with streamed weights: all contexts share one placement of them, and the
// same processor.
std::mutex & weights_lock();

class Weights;

// The plugin's data of a tensor. It is not found by `extra`: kernels take that for a layout of their
// own.
struct Record {
    Weights * owner = nullptr;
    ggml_tensor * tensor = nullptr;
    // The tensor's reserved address while it is not in memory. Reading it ends the process instead of
    // giving zeros.
    char * reserved = nullptr;
    uint64_t bytes = 0;
    Place place;
    // False: the tensor is resident at its reserved address.
    bool streams = false;
    // Its unit, or the units of its pieces, and the tensor's offset in each.
    std::vector<uint32_t> units;
    std::vector<uint64_t> at;
    // Rows of each piece except the last; 0 = not in pieces.
    int64_t piece_rows = 0;
    // True: `units` are the layer's experts, each with its share of the tensor.
    bool is_experts = false;
    // Its place in the inner device's memory, if that device has its own; no buffer while it is not
    // there.
    InnerPlace inner;
};

// Bytes of a tensor that a unit has.
struct Range {
    Record * record = nullptr;
    uint64_t from = 0;
    uint64_t bytes = 0;
    // Index of the unit in the record's units.
    size_t index = 0;
};

struct Unit {
    std::string name;
    uint32_t layer = KVT_NONE;
    uint32_t expert = KVT_NONE;
    std::vector<Range> ranges;
};

// The outcome of an attempt to lease an expert.
enum class Leased { ready, not_loaded, failed };

// Describes the units to kvtier as a model; fills in `at` of the records.
bool table_open(const Source & source, std::vector<Unit> & units, kvt_model_t ** out, std::string & why);
// Slots for streamed layers.
constexpr uint32_t LEAST_SLOTS = 2;
// The number of slots that suits this much memory.
uint32_t table_slots(const kvt_model_t * table, uint64_t bytes);
// The least memory in which the model can be streamed.
bool table_floor(const kvt_model_t * table, uint32_t slots, uint64_t & out, std::string & why);
// Tells whether these tensors are a model's weights, with layers, rather than KV or an adapter.
bool are_weights(ggml_tensor * const * tensors, int count);
// Terms of the streamer's plan. No memory is reserved for KV, because the budget covers KV too.
kvt_stream_terms_t table_terms(uint32_t slots);
// Sets the number of expert slots for this much memory. Layers become resident first, because each pass
// uses them; `used` experts and one more have slots before that. False if the machine has less memory: the
// number is that for the machine.
bool table_expert_terms(const kvt_model_t * table, const std::vector<Unit> & units, uint32_t used,
                        uint64_t bytes, kvt_stream_terms_t & terms);

class Weights {
public:
    // Null without a text if these tensors are not weights, or no file has them.
    static std::unique_ptr<Weights> make(ggml_tensor * const * tensors, int count, std::string & why);
    ~Weights();
    Weights(const Weights &) = delete;
    Weights & operator=(const Weights &) = delete;

    // Addresses that the weights take, and the memory in use from the beginning on.
    uint64_t span_bytes() const { return span_bytes_; }
    uint64_t resident_bytes() const { return resident_bytes_; }
    uint64_t floor_bytes() const { return floor_bytes_; }
    uint64_t streamed_bytes() const { return streamed_bytes_; }

    // Charges and allocates resident weights, and reserves memory for streaming.
    bool allocate(char * base, std::string & why);
    Record & record(size_t number) { return *records_[number]; }
    // For any thread: the map does not change. Null for a tensor of another owner.
    Record * find(const ggml_tensor * tensor) const;
    // Finds a tensor by a copy of it, by name: the engine passes copies when it saves a model.
    Record * find_like(const ggml_tensor * tensor) const;

    void put(Record & record, const void * data, uint64_t from, uint64_t bytes);
    bool get(const Record & record, void * out, uint64_t from, uint64_t bytes) const;
    // Makes a tensor resident for good, because it is used in a way that streaming cannot serve.
    bool materialise(Record & record, std::string & why);

    // Leases exactly these units from now on; releases all others.
    bool lease_units(const std::vector<uint32_t> & units, std::string & why);
    bool has(uint32_t unit) const { return leases_.count(unit) != 0; }
    const char * address(uint32_t unit) const;
    // Loads experts ahead of their use, as far as slots are free; keeps the ones of them that are loaded.
    void hint_experts(const std::vector<uint32_t> & units);
    // Leases an expert beside other units; it is released with them, or by release_experts.
    Leased lease_expert(uint32_t unit, bool waits, std::string & why);
    void release_experts(const std::vector<uint32_t> & units);
    // Begins to read an expert that is not in memory. True if it does.
    bool read_ahead(uint32_t unit);
    // Leases the unit of a tensor if it is resident, until release_borrowed. Returns the tensor's address,
    // or null.
    const char * borrow(const Record & record);
    void release_borrowed();
    Routing & routing() { return routing_; }
    // Experts that can be leased at once.
    size_t expert_slots() const;
    // Ends a graph, and with the last unit also a pass. False if a file was changed during the pass.
    bool end_graph(std::string & why);
    // Rebalances the streamer after other owners released memory.
    void rebalance();

    bool stats(kvt_stream_stats_t & out, kvt_stream_plan_t & plan) const;
    size_t unit_count() const { return units_.size(); }

private:
    Weights() = default;
    bool classify(ggml_tensor * const * tensors, int count, std::string & why);
    void add_record(ggml_tensor * tensor);
    void add_units();
    void add_routed(uint32_t layer, uint32_t first_unit, uint32_t experts,
                    const std::vector<Record *> & records);
    void add_to_units(Record & record, uint32_t first, uint32_t count);
    uint64_t largest_unit() const;
    void split_large(uint64_t most_bytes);
    bool open_stream(std::string & why);
    bool acquire(uint32_t unit, std::string & why);
    bool is_expert(uint32_t unit) const { return units_[unit].expert != KVT_NONE; }
    void release(uint32_t unit);
    bool begin_pass(std::string & why);
    bool continue_pass(uint32_t unit, std::string & why);
    void point_tensors(uint32_t unit, const char * address);
    static uint64_t resident_size(const Record & record);
    bool allocate_resident(Record & record, std::string & why);
    bool place_on_inner(uint32_t unit, const char * address, std::string & why);

    std::unique_ptr<Source> source_;
    std::vector<std::unique_ptr<Record>> records_;
    std::unordered_map<const ggml_tensor *, Record *> by_tensor_;
    std::vector<Unit> units_;
    // Records of each layer.
    std::map<std::pair<std::string, uint32_t>, std::vector<Record *>> layers_;
    std::vector<Record *> large_;
    // Places of streamed tensors.
    std::set<std::pair<uint32_t, uint64_t>> taken_;
    uint64_t span_bytes_ = 0, resident_bytes_ = 0, streamed_bytes_ = 0, floor_bytes_ = 0;
    char * base_ = nullptr;
    uint64_t charged_bytes_ = 0, reserved_bytes_ = 0;
    std::string broken_;

    kvt_model_t * table_ = nullptr;
    kvt_stream_t * stream_ = nullptr;
    std::map<uint32_t, kvt_unit_lease_t> leases_;
    // On the inner device: resident tensors, and the buffer for tensors that need zeros after them,
    // with the unit that uses it.
    std::vector<ggml_backend_buffer_t> inner_buffers_;
    ggml_backend_buffer_t padded_ = nullptr;
    uint64_t padded_bytes_ = 0;
    uint32_t padded_unit_ = KVT_NONE;
    Routing routing_;
    std::vector<uint32_t> borrowed_;
    // The plan's residency of units, as of a recent pass.
    std::vector<kvt_unit_residency_t> residency_;
    uint32_t passes_ = 0;
    bool is_passing_ = false;
    // The last unit of this pass, and of every pass; experts do not count.
    uint32_t last_unit_ = 0, final_unit_ = 0;
};

} // namespace kvtier_plugin

#endif
