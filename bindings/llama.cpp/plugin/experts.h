// Computes a layer's experts in groups, as they arrive from the file.
//
// A segment is the run of nodes from a layer's first MUL_MAT_ID to its last, with the activations between.
// Each of its rows belongs to one token and one of the experts that this token uses, and depends on no
// other row. So the segment is computed for the rows of some experts at a time, in buffers of the plugin,
// with the same kernels. An expert is read once for a segment, even where few of them fit in memory.
#ifndef KVTIER_PLUGIN_EXPERTS_H
#define KVTIER_PLUGIN_EXPERTS_H

#include "weights.h"

#include <ggml-backend.h>
#include <ggml-impl.h>

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvtier_plugin {

// A place in the activations: a token, and the index of one of the experts that it uses.
struct Row {
    int64_t used = 0, token = 0;
};

// The rows of one expert.
struct ExpertRows {
    uint32_t expert = 0;
    uint32_t unit = 0;
    std::vector<Row> rows;
};

class Experts {
public:
    Experts(ggml_backend_t inner, ggml_cgraph * graph) : inner_(inner), graph_(graph) {}

    // Tells whether a node multiplies with a tensor that is divided between experts.
    static bool is_product(const ggml_tensor * node);
    // Finds the segment that begins at this node. Returns the number after its last node.
    int find(int first);
    // Units that the segment needs beside experts, such as the layer of their biases.
    const std::vector<uint32_t> & other_units() const { return other_units_; }
    Weights & owner() const { return *owner_; }
    // Computes the segment. All nodes before it were computed, and the other units are leased.
    ggml_status compute(std::string & why);

private:
    // A group of experts that are computed together.
    using Wave = std::vector<const ExpertRows *>;

    bool is_row_shaped(const ggml_tensor * tensor) const;
    bool is_member(const ggml_tensor * tensor) const { return members_.count(tensor) != 0; }
    bool accept(ggml_tensor * node);
    bool accept_product(const ggml_tensor * node);
    bool accept_view(const ggml_tensor * node) const;
    void cut(int last);
    void find_outputs();
    void count_uses();

    bool read_ids(std::string & why);
    void copy_inputs();
    void note_use();
    void guess_next();
    bool rank_next(const RoutedLayer & next, std::vector<std::vector<uint32_t>> & ranked);
    void add_biases(const RoutedLayer & next, std::vector<float> & scores);
    bool take_wave(std::vector<const ExpertRows *> & pending, Wave & wave, std::string & why);
    ggml_status compute_wave(const Wave & wave);
    void lay_out(const Wave & wave);
    void gather(const Wave & wave, const ggml_tensor * input, char * out) const;
    void scatter(const Wave & wave, const ggml_tensor * output) const;
    void add_node(ggml_tensor * node, const Wave & wave);
    void add_products(const ggml_tensor * node, const Wave & wave);
    ggml_tensor * compact(const ggml_tensor * tensor);
    char * allocate(size_t bytes);
    uint64_t row_bytes() const;

    ggml_backend_t inner_;
    ggml_cgraph * graph_;
    // Number of the last node that uses a tensor, or a view of it.
    std::unordered_map<const ggml_tensor *, int> last_use_;

    // The segment.
    int first_ = 0, end_ = 0;
    Weights * owner_ = nullptr;
    const Record * stack_ = nullptr;
    const ggml_tensor * ids_ = nullptr;
    std::vector<ggml_tensor *> nodes_;
    std::unordered_map<const ggml_tensor *, int> members_;
    std::vector<const ggml_tensor *> inputs_, outputs_;
    std::vector<uint32_t> other_units_;
    std::vector<ExpertRows> experts_;
    // Copies of the inputs: the engine may place a result of the segment in their memory.
    std::unordered_map<const ggml_tensor *, std::vector<char>> copies_;
    // The ids that were compared with guesses last.
    const ggml_tensor * noted_ = nullptr;

    // The wave.
    int64_t rows_ = 0;
    std::vector<char> memory_;
    size_t memory_used_ = 0;
    std::deque<ggml_tensor> tensors_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> compact_;
    std::vector<ggml_tensor *> wave_nodes_;
    ggml_tensor * wave_ids_ = nullptr;
    char * zeros_ = nullptr;
};

} // namespace kvtier_plugin

#endif
