// The weights of a model that the engine has put into a buffer of ours.
//
// Layers, and the large matrices beside them in pieces, are units of a streamer: in memory as far as
// the budget goes, else in their file, and brought in time. What is small and belongs to no layer
// stays. Everything that is not const is called under weights_lock().
#ifndef KVTIER_PLUGIN_WEIGHTS_H
#define KVTIER_PLUGIN_WEIGHTS_H

#include "far.h"
#include "memory.h"
#include "source.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvtier_plugin {

// One computes at a time where weights are streamed: they have one place for all contexts, and the
// processor is the same.
std::mutex & weights_lock();

class Weights;

// What is known of a tensor. (Its `extra` cannot lead here: kernels take one for a layout of their own.)
struct Record {
    Weights * owner = nullptr;
    ggml_tensor * tensor = nullptr;
    // Its address while it is not there: reading it ends the process rather than giving zeros.
    char * home = nullptr;
    uint64_t bytes = 0;
    Place place;
    // False: it lies at home.
    bool streams = false;
    // Its unit, or the units of its pieces, and where in them it starts.
    std::vector<uint32_t> units;
    std::vector<uint64_t> at;
    // Rows of a piece but the last; 0 = it is not in pieces.
    int64_t piece_rows = 0;
    // Where it is for a device underneath that has memory of its own. No buffer while it is not there.
    FarPlace far;
};

// Bytes of a tensor that a unit has.
struct Range {
    Record * record = nullptr;
    uint64_t from = 0;
    uint64_t bytes = 0;
};

struct Unit {
    std::string name;
    uint32_t layer = KVT_NONE;
    std::vector<Range> ranges;
};

// The units as a model of kvtier's; fills in `at` of the records.
bool table_open(const Source & source, std::vector<Unit> & units, kvt_model_t ** out, std::string & why);
// The least memory that it can be streamed in.
bool table_floor(const kvt_model_t * table, uint32_t slots, uint64_t & out, std::string & why);
// Whether a list of tensors is the weights of a model, with layers, rather than KV or an adapter.
bool are_weights(ggml_tensor * const * tensors, int count);
// What is decided about memory: nothing is kept free for KV, which has the budget in common.
kvt_stream_terms_t table_terms(uint32_t slots);

class Weights {
public:
    // Null without words where these tensors are no weights, or no file has them.
    static std::unique_ptr<Weights> make(ggml_tensor * const * tensors, int count, std::string & why);
    ~Weights();
    Weights(const Weights &) = delete;
    Weights & operator=(const Weights &) = delete;

    // Addresses that it takes, and the memory of them that is used from the beginning on.
    uint64_t span_bytes() const { return span_bytes_; }
    uint64_t resident_bytes() const { return resident_bytes_; }
    uint64_t floor_bytes() const { return floor_bytes_; }
    uint64_t streamed_bytes() const { return streamed_bytes_; }

    // Pays for what is there from now on, takes its memory, and keeps room for streaming.
    bool settle(char * base, std::string & why);
    Record & record(size_t number) { return *records_[number]; }
    // Any thread: it does not change. Null of a tensor that is none of these.
    Record * find(const ggml_tensor * tensor) const;
    // The same of a copy of one, by its name: bytes are asked for so where a model is saved.
    Record * find_like(const ggml_tensor * tensor) const;

    void put(Record & record, const void * data, uint64_t from, uint64_t bytes);
    bool get(const Record & record, void * out, uint64_t from, uint64_t bytes) const;
    // Gives a tensor its memory for good: it is used in a way that streaming cannot serve.
    bool materialise(Record & record, std::string & why);

    // Has these units and no others from now on.
    bool hold(const std::vector<uint32_t> & units, std::string & why);
    bool has(uint32_t unit) const { return held_.count(unit) != 0; }
    const char * address(uint32_t unit) const;
    // A graph has ended. With the last unit of the order a pass has, too: false where a file of it was
    // changed meanwhile.
    bool rest(std::string & why);
    // There may be more memory than before.
    void spread();

    bool stats(kvt_stream_stats_t & out, kvt_stream_plan_t & plan) const;
    size_t unit_count() const { return units_.size(); }

private:
    Weights() = default;
    bool sort(ggml_tensor * const * tensors, int count, std::string & why);
    void cut_pieces(uint64_t most_bytes);
    bool open_stream(std::string & why);
    bool acquire(uint32_t unit, std::string & why);
    void release(uint32_t unit);
    bool begin(std::string & why);
    bool pass_to(uint32_t unit, std::string & why);
    void point(uint32_t unit, const char * address);
    static uint64_t staying_bytes(const Record & record);
    bool stay(Record & record, std::string & why);
    bool far_point(uint32_t unit, const char * address, std::string & why);

    std::unique_ptr<Source> source_;
    std::vector<std::unique_ptr<Record>> records_;
    std::unordered_map<const ggml_tensor *, Record *> by_tensor_;
    std::vector<Unit> units_;
    std::map<std::pair<std::string, uint32_t>, uint32_t> layers_;
    std::vector<Record *> large_;
    uint64_t span_bytes_ = 0, resident_bytes_ = 0, streamed_bytes_ = 0, floor_bytes_ = 0;
    char * base_ = nullptr;
    uint64_t charged_bytes_ = 0, promised_bytes_ = 0;
    std::string broken_;

    kvt_model_t * table_ = nullptr;
    kvt_stream_t * stream_ = nullptr;
    std::map<uint32_t, kvt_unit_lease_t> held_;
    // Of a device underneath: what stays, and the place of tensors that need zeros behind them, with whose it is.
    std::vector<ggml_backend_buffer_t> far_buffers_;
    ggml_backend_buffer_t padded_ = nullptr;
    uint64_t padded_bytes_ = 0;
    uint32_t padded_unit_ = KVT_NONE;
    bool is_passing_ = false;
    uint32_t last_unit_ = 0;
};

} // namespace kvtier_plugin

#endif
