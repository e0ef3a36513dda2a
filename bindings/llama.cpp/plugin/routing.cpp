#include "routing.h"

#include "stats.h"

#include <algorithm>
#include <cinttypes>

namespace kvtier_plugin {

namespace {

// Of the bytes that are read for guesses, at most 2 in 7 may be wasted: 0.4 for each useful one.
constexpr uint32_t NEEDED = 5, OF = 7;
// Reads before a rank is judged, and after which older ones count half.
constexpr uint32_t FEW = 8, MANY = 256;
// Every so many tokens, all ranks are tried: the text may have changed.
constexpr uint64_t TRY_EVERY = 64;

std::FILE * trace_file = nullptr;
uint32_t traced_models = 0;

} // namespace

bool routing_trace_open(const char * path) {
    trace_file = std::fopen(path, "we");
    if (trace_file) {
        std::fputs("kvtier-routing 1\n", trace_file);
    }
    return trace_file != nullptr;
}

bool Precision::is_worthwhile(uint32_t rank) {
    if (rank >= RANKS) {
        return false;
    }
    const Count & count = counts_[rank];
    return count.reads < FEW || count.needed * OF >= count.reads * NEEDED || tokens_ % TRY_EVERY == 0;
}

void Precision::note(uint32_t rank, bool was_needed) {
    Count & count = counts_[rank];
    count.reads++;
    count.needed += was_needed ? 1 : 0;
    if (count.reads >= MANY) {
        count.reads /= 2;
        count.needed /= 2;
    }
}

RoutedLayer * Routing::at(uint32_t first_unit) {
    const auto found = layers_.find(first_unit);
    return found == layers_.end() ? nullptr : &found->second;
}

RoutedLayer * Routing::after(uint32_t first_unit) {
    const auto found = layers_.upper_bound(first_unit);
    return found == layers_.end() ? nullptr : &found->second;
}

void Routing::note_use(RoutedLayer & layer, int64_t tokens, const std::vector<uint32_t> & used) {
    trace(layer, tokens, used);
    if (&layer == &layers_.begin()->second) {
        precision.advance();
    }
    for (const RoutedLayer::Guess & guess : layer.guesses) {
        const bool was_needed = std::find(used.begin(), used.end(), guess.expert) != used.end();
        if (guess.is_read) {
            precision.note(guess.rank, was_needed);
            totals().guessed_reads++;
            totals().guessed_needed += was_needed ? 1 : 0;
        }
    }
    layer.guesses.clear();
}

// One line for each layer of a model, before its first use, and one for each use in a batch.
void Routing::trace(const RoutedLayer & layer, int64_t tokens, const std::vector<uint32_t> & used) {
    if (!trace_file) {
        return;
    }
    if (traced_ == 0) {
        traced_ = ++traced_models;
        for (const auto & [unit, one] : layers_) {
            std::fprintf(trace_file, "layer %u %u %u %" PRIu64 "\n", traced_, one.layer, one.experts,
                         one.expert_bytes);
        }
    }
    std::fprintf(trace_file, "use %u %u %" PRId64, traced_, layer.layer, tokens);
    for (size_t i = 0; i < used.size(); i++) {
        std::fprintf(trace_file, "%c%u", i ? ',' : ' ', used[i]);
    }
    for (size_t i = 0; i < layer.guesses.size(); i++) {
        std::fprintf(trace_file, "%c%u", i ? ',' : ' ', layer.guesses[i].expert);
    }
    std::fputc('\n', trace_file);
    std::fflush(trace_file);
}

} // namespace kvtier_plugin
