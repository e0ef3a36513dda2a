// What the routers of a model chose, and what they are expected to choose next.
//
// The hidden state changes little from one layer to the next. So the router of the next layer, applied to
// this layer's hidden state, names most of the experts that it will choose. Experts that are not in memory
// are read while this layer's experts and the next layer's attention are computed. The share of these reads
// that were needed is measured for each rank of the prediction; a rank that wastes too much is not read.
#ifndef KVTIER_PLUGIN_ROUTING_H
#define KVTIER_PLUGIN_ROUTING_H

#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <vector>

namespace kvtier_plugin {

struct Record;

// A layer with experts.
struct RoutedLayer {
    uint32_t layer = 0;
    uint32_t first_unit = 0;
    uint32_t experts = 0;
    uint64_t expert_bytes = 0;
    // The router's matrix, its bias, and the bias of the choice; null if the model has none.
    Record * router = nullptr;
    Record * bias = nullptr;
    Record * choice_bias = nullptr;

    // The experts that are expected next, the likeliest first, each with its rank.
    struct Guess {
        uint32_t expert = 0;
        uint32_t rank = 0;
        bool is_read = false;
    };
    std::vector<Guess> guesses;
};

// The measured precision of guesses by rank.
class Precision {
public:
    static constexpr uint32_t RANKS = 16;

    // Tells whether experts of this rank are worth a read. From time to time any rank is tried.
    bool is_worthwhile(uint32_t rank);
    void note(uint32_t rank, bool was_needed);
    // Begins the next token.
    void advance() { tokens_++; }

private:
    struct Count {
        uint32_t reads = 0, needed = 0;
    };
    std::array<Count, RANKS> counts_;
    uint64_t tokens_ = 0;
};

class Routing {
public:
    void add(const RoutedLayer & layer) { layers_[layer.first_unit] = layer; }
    // The layer whose experts begin at this unit, and the one after it; null if there is none.
    RoutedLayer * at(uint32_t first_unit);
    RoutedLayer * after(uint32_t first_unit);
    // Compares guesses with the experts that were chosen, writes the trace, and forgets the guesses.
    void note_use(RoutedLayer & layer, int64_t tokens, const std::vector<uint32_t> & used);

    Precision precision;

private:
    void trace(const RoutedLayer & layer, int64_t tokens, const std::vector<uint32_t> & used);

    std::map<uint32_t, RoutedLayer> layers_;
    // The model's number in the trace; 0 = not written yet.
    uint32_t traced_ = 0;
};

// Opens the file of KVTIER_ROUTING_TRACE. False if it cannot be written.
bool routing_trace_open(const char * path);

} // namespace kvtier_plugin

#endif
