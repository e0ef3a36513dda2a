#include "experts.h"

#include "buffer.h"
#include "stats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace kvtier_plugin {

namespace {

// Memory for the rows of a wave, unless one expert has more rows.
constexpr uint64_t WAVE_BYTES = 16 << 20;
// Larger batches use most experts of a layer anyway.
constexpr int64_t MOST_TOKENS = 4;

uint64_t padded(uint64_t bytes) {
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

const ggml_tensor * root_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src : tensor;
}

// Operations whose result at a place depends on their sources at the same row only.
bool is_row_by_row(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_UNARY:
        case GGML_OP_GLU:
        case GGML_OP_ADD:
        case GGML_OP_MUL:
        case GGML_OP_SQR:
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
            return true;
        default:
            return false;
    }
}

const char * place(const ggml_tensor * tensor, const void * data, int64_t at1, int64_t at2) {
    return static_cast<const char *>(data) + size_t(at1) * tensor->nb[1] + size_t(at2) * tensor->nb[2];
}

} // namespace

bool Experts::is_product(const ggml_tensor * node) {
    const ggml_tensor * stack = node->op == GGML_OP_MUL_MAT_ID ? node->src[0] : nullptr;
    const Record * record = stack && !stack->view_src ? record_of(stack) : nullptr;
    return record && record->streams && record->is_experts && node->type == GGML_TYPE_F32 &&
           !node->view_src && node->src[1]->type == GGML_TYPE_F32 && !record_of(node->src[1]) &&
           node->src[2]->type == GGML_TYPE_I32 && !record_of(node->src[2]) && node->ne[3] == 1 &&
           node->src[1]->nb[0] == sizeof(float) && node->src[1]->ne[3] == 1;
}

// Finding the segment.

bool Experts::is_row_shaped(const ggml_tensor * tensor) const {
    return tensor->type == GGML_TYPE_F32 && tensor->nb[0] == sizeof(float) && tensor->ne[1] == ids_->ne[0] &&
           tensor->ne[2] == ids_->ne[1] && tensor->ne[3] == 1;
}

bool Experts::accept_product(const ggml_tensor * node) {
    if (!is_product(node) || node->src[2] != ids_ || !is_row_shaped(node) ||
        record_of(node->src[0])->units != stack_->units || record_of(node->src[0])->owner != owner_) {
        return false;
    }
    const ggml_tensor * input = node->src[1];
    if (is_member(input)) {
        return true;
    }
    const bool is_outside = !is_member(root_of(input)) && input->ne[2] == ids_->ne[1] && input->data;
    if (is_outside && std::find(inputs_.begin(), inputs_.end(), input) == inputs_.end()) {
        inputs_.push_back(input);
    }
    return is_outside;
}

bool Experts::accept_view(const ggml_tensor * node) const {
    const ggml_tensor * root = node->view_src;
    return node->op == GGML_OP_VIEW && is_row_shaped(node) && node->nb[1] == root->nb[1] &&
           node->nb[2] == root->nb[2] && node->view_offs + size_t(node->ne[0]) * sizeof(float) <= root->nb[1];
}

// Adds a node to the segment, if its rows are independent.
bool Experts::accept(ggml_tensor * node) {
    if (node->view_src) {
        if (!is_member(node->view_src)) {
            return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE;
        }
        if (!accept_view(node)) {
            return false;
        }
    } else if (node->op == GGML_OP_MUL_MAT_ID) {
        if (!accept_product(node)) {
            return false;
        }
    } else {
        if (!is_row_shaped(node) || (node->op != GGML_OP_ADD_ID && !is_row_by_row(node))) {
            return false;
        }
        for (int i = 0; i < GGML_MAX_SRC && node->src[i]; i++) {
            const bool is_id = node->op == GGML_OP_ADD_ID && i > 0;
            if (is_id ? (i == 2 && node->src[i] != ids_) || is_member(root_of(node->src[i]))
                      : !is_member(node->src[i])) {
                return false;
            }
        }
    }
    members_.emplace(node, int(nodes_.size()));
    nodes_.push_back(node);
    return true;
}

int Experts::find(int first) {
    const ggml_tensor * begin = graph_->nodes[first];
    first_ = first;
    stack_ = record_of(begin->src[0]);
    owner_ = stack_->owner;
    ids_ = begin->src[2];
    nodes_.clear();
    members_.clear();
    inputs_.clear();
    int last = first;
    for (int i = first; i < graph_->n_nodes && accept(graph_->nodes[i]); i++) {
        last = graph_->nodes[i]->op == GGML_OP_MUL_MAT_ID ? i : last;
    }
    cut(last);
    find_outputs();
    return end_;
}

// Nodes after the last product are computed as usual.
void Experts::cut(int last) {
    end_ = last + 1;
    while (!nodes_.empty() && nodes_.back() != graph_->nodes[last]) {
        members_.erase(nodes_.back());
        nodes_.pop_back();
    }
    other_units_.clear();
    for (const ggml_tensor * node : nodes_) {
        const Record * bias = node->op == GGML_OP_ADD_ID ? record_of(node->src[1]) : nullptr;
        if (bias && bias->streams && bias->owner == owner_ && bias->piece_rows == 0) {
            other_units_.push_back(bias->units.front());
        }
    }
    std::sort(other_units_.begin(), other_units_.end());
    other_units_.erase(std::unique(other_units_.begin(), other_units_.end()), other_units_.end());
}

void Experts::count_uses() {
    for (int i = 0; i < graph_->n_nodes; i++) {
        for (const ggml_tensor * source : graph_->nodes[i]->src) {
            const ggml_tensor * root = source ? root_of(source) : nullptr;
            if (root && (is_row_by_row(root) || root->op == GGML_OP_MUL_MAT_ID || root->op == GGML_OP_ADD_ID)) {
                last_use_[root] = i;
            }
        }
    }
}

// Results that later nodes, or no node of this graph, use.
void Experts::find_outputs() {
    if (last_use_.empty()) {
        count_uses();
    }
    outputs_.clear();
    for (const ggml_tensor * node : nodes_) {
        const auto use = last_use_.find(node);
        const bool is_inside = use != last_use_.end() && use->second < end_;
        if (!node->view_src && (!is_inside || (node->flags & GGML_TENSOR_FLAG_OUTPUT))) {
            outputs_.push_back(node);
        }
    }
}

// Computing it.

bool Experts::read_ids(std::string & why) {
    std::vector<int> at(stack_->units.size(), -1);
    experts_.clear();
    for (int64_t token = 0; token < ids_->ne[1]; token++) {
        for (int64_t used = 0; used < ids_->ne[0]; used++) {
            int32_t id = 0;
            std::memcpy(&id, static_cast<const char *>(ids_->data) + size_t(token) * ids_->nb[1] +
                                 size_t(used) * ids_->nb[0], sizeof id);
            if (id < 0 || size_t(id) >= at.size()) {
                why = std::string(ggml_get_name(ids_)) + " chooses expert " + std::to_string(id) + " of " +
                      std::to_string(at.size());
                return false;
            }
            if (at[size_t(id)] < 0) {
                at[size_t(id)] = int(experts_.size());
                experts_.push_back({uint32_t(id), stack_->units[size_t(id)], {}});
            }
            experts_[size_t(at[size_t(id)])].rows.push_back({used, token});
        }
    }
    return true;
}

void Experts::copy_inputs() {
    copies_.clear();
    for (const ggml_tensor * input : inputs_) {
        const size_t row = size_t(input->ne[0]) * sizeof(float);
        std::vector<char> & copy = copies_[input];
        copy.resize(row * size_t(input->ne[1] * input->ne[2]));
        char * out = copy.data();
        for (int64_t token = 0; token < input->ne[2]; token++) {
            for (int64_t used = 0; used < input->ne[1]; used++, out += row) {
                std::memcpy(out, place(input, input->data, used, token), row);
            }
        }
    }
}

// Compares the choice with what was guessed.
void Experts::note_use() {
    totals().expert_uses += experts_.size();
    RoutedLayer * layer = owner_->routing().at(stack_->units.front());
    // A layer may have several segments: only the first one's choice is new.
    if (!layer || noted_ == ids_) {
        return;
    }
    noted_ = ids_;
    std::vector<uint32_t> used;
    for (const ExpertRows & expert : experts_) {
        used.push_back(expert.expert);
    }
    owner_->routing().note_use(*layer, ids_->ne[1], used);
}

// Applies the next layer's router to this layer's hidden states. For each token, the experts by their score.
bool Experts::rank_next(const RoutedLayer & next, std::vector<std::vector<uint32_t>> & ranked) {
    const ggml_tensor * input = inputs_.front();
    const int64_t tokens = input->ne[2];
    const char * matrix = next.router && next.router->tensor->ne[0] == input->ne[0]
                              ? owner_->borrow(*next.router) : nullptr;
    if (!matrix || input->ne[1] != 1) {
        return false;
    }
    std::vector<float> scores(size_t(next.experts) * size_t(tokens));
    ggml_tensor router = *next.router->tensor, state = *input, product = *input;
    router.data = const_cast<char *>(matrix);
    state.data = copies_.at(input).data();
    product.data = scores.data();
    product.ne[0] = next.experts;
    for (ggml_tensor * tensor : {&state, &product}) {
        tensor->view_src = nullptr;
        tensor->ne[1] = tokens;
        tensor->ne[2] = 1;
        tensor->nb[1] = size_t(tensor->ne[0]) * sizeof(float);
        tensor->nb[2] = tensor->nb[3] = tensor->nb[1] * size_t(tokens);
    }
    product.op = GGML_OP_MUL_MAT;
    std::fill(product.op_params, product.op_params + GGML_MAX_OP_PARAMS / sizeof(int32_t), 0);
    std::fill(product.src, product.src + GGML_MAX_SRC, nullptr);
    product.src[0] = &router;
    product.src[1] = &state;
    ggml_tensor * node = &product;
    ggml_cgraph piece = ggml_graph_view(graph_, first_, first_ + 1);
    piece.nodes = &node;
    if (ggml_backend_graph_compute(inner_, &piece) != GGML_STATUS_SUCCESS) {
        return false;
    }
    add_biases(next, scores);
    ranked.assign(size_t(tokens), std::vector<uint32_t>(next.experts));
    const size_t most = std::min<size_t>(next.experts, size_t(ids_->ne[0]));
    for (size_t token = 0; token < size_t(tokens); token++) {
        const float * score = scores.data() + token * next.experts;
        std::vector<uint32_t> & all = ranked[token];
        std::iota(all.begin(), all.end(), 0u);
        std::partial_sort(all.begin(), all.begin() + long(most), all.end(),
                          [&](uint32_t a, uint32_t b) { return score[a] > score[b]; });
        all.resize(most);
    }
    return true;
}

void Experts::add_biases(const RoutedLayer & next, std::vector<float> & scores) {
    for (const Record * bias : {next.bias, next.choice_bias}) {
        const bool is_known = bias && bias->tensor->type == GGML_TYPE_F32 &&
                              bias->bytes == next.experts * sizeof(float);
        const char * values = is_known ? owner_->borrow(*bias) : nullptr;
        for (size_t i = 0; values && i < scores.size(); i++) {
            float value = 0;
            std::memcpy(&value, values + i % next.experts * sizeof value, sizeof value);
            // The bias of the choice is added to probabilities.
            scores[i] = (bias == next.choice_bias ? 1.0f / (1.0f + std::exp(-scores[i])) : scores[i]) + value;
        }
    }
}

// Begins to read experts that the next layer is expected to use. All experts of this layer are leased.
void Experts::guess_next() {
    RoutedLayer * next = owner_->routing().after(stack_->units.front());
    const bool is_short = ids_->ne[1] <= MOST_TOKENS && owner_->expert_slots() / 4 >= size_t(ggml_nelements(ids_));
    std::vector<std::vector<uint32_t>> ranked;
    if (!settings().predicts || !next || !is_short || inputs_.empty()) {
        return;
    }
    next->guesses.clear();
    const bool is_ranked = rank_next(*next, ranked);
    owner_->release_borrowed();
    if (!is_ranked) {
        return;
    }
    for (uint32_t rank = 0; rank < ranked.front().size(); rank++) {
        for (const std::vector<uint32_t> & experts : ranked) {
            const uint32_t expert = experts[rank];
            const auto is_same = [&](const RoutedLayer::Guess & guess) { return guess.expert == expert; };
            if (std::none_of(next->guesses.begin(), next->guesses.end(), is_same)) {
                const bool is_read = owner_->routing().precision.is_worthwhile(rank) &&
                                     owner_->read_ahead(next->first_unit + expert);
                next->guesses.push_back({expert, rank, is_read});
            }
        }
    }
}

// Bytes of a row in all tensors of a wave.
uint64_t Experts::row_bytes() const {
    uint64_t bytes = 2 * sizeof(int32_t);
    for (const ggml_tensor * input : inputs_) {
        bytes += uint64_t(input->ne[0]) * sizeof(float);
    }
    for (const ggml_tensor * node : nodes_) {
        bytes += node->view_src ? 0 : uint64_t(node->ne[0]) * sizeof(float);
    }
    return bytes;
}

// Takes experts that are loaded; waits for one if there is none.
bool Experts::take_wave(std::vector<const ExpertRows *> & pending, Wave & wave, std::string & why) {
    const size_t most = std::min(owner_->expert_slots(), pending.size());
    std::vector<uint32_t> units;
    for (size_t i = 0; i < most; i++) {
        units.push_back(pending[i]->unit);
    }
    owner_->hint_experts(units);
    const uint64_t most_rows = std::max<uint64_t>(1, WAVE_BYTES / row_bytes());
    uint64_t rows = 0;
    for (const bool waits : {false, true}) {
        for (size_t i = 0; i < most && wave.size() < (waits ? 1 : most); i++) {
            if (!wave.empty() && rows + pending[i]->rows.size() > most_rows) {
                break;
            }
            const Leased leased = owner_->lease_expert(pending[i]->unit, waits, why);
            if (leased == Leased::failed) {
                return false;
            }
            if (leased == Leased::ready) {
                wave.push_back(pending[i]);
                rows += pending[i]->rows.size();
            }
        }
    }
    const auto is_taken = [&](const ExpertRows * one) {
        return std::find(wave.begin(), wave.end(), one) != wave.end();
    };
    pending.erase(std::remove_if(pending.begin(), pending.end(), is_taken), pending.end());
    return true;
}

ggml_status Experts::compute(std::string & why) {
    if (!read_ids(why)) {
        return GGML_STATUS_FAILED;
    }
    copy_inputs();
    note_use();
    std::vector<const ExpertRows *> pending;
    for (const ExpertRows & expert : experts_) {
        pending.push_back(&expert);
    }
    ggml_status status = GGML_STATUS_SUCCESS;
    while (!pending.empty() && status == GGML_STATUS_SUCCESS) {
        Wave wave;
        const bool is_taken = take_wave(pending, wave, why);
        if (is_taken && pending.empty()) {
            guess_next();
        }
        status = is_taken ? compute_wave(wave) : GGML_STATUS_FAILED;
        std::vector<uint32_t> units;
        for (const ExpertRows * expert : wave) {
            units.push_back(expert->unit);
        }
        owner_->release_experts(units);
    }
    return status;
}

// A wave.

char * Experts::allocate(size_t bytes) {
    char * at = memory_.data() + memory_used_;
    memory_used_ += padded(bytes);
    return at;
}

// Adds the tensor with the rows of this wave in place of its own.
ggml_tensor * Experts::compact(const ggml_tensor * tensor) {
    tensors_.push_back(*tensor);
    ggml_tensor & made = tensors_.back();
    const size_t row = size_t(tensor->ne[0]) * sizeof(float);
    made.ne[1] = rows_;
    made.ne[2] = 1;
    made.view_src = nullptr;
    made.view_offs = 0;
    if (tensor->view_src && is_member(tensor->view_src)) {
        const ggml_tensor * root = compact_.at(tensor->view_src);
        made.nb[1] = root->nb[1];
        made.data = static_cast<char *>(root->data) + tensor->view_offs;
    } else {
        made.nb[1] = row;
        made.data = allocate(row * size_t(rows_));
    }
    made.nb[2] = made.nb[3] = made.nb[1] * size_t(rows_);
    compact_[tensor] = &made;
    return &made;
}

// Prepares memory, inputs and ids of the wave.
void Experts::lay_out(const Wave & wave) {
    rows_ = 0;
    for (const ExpertRows * expert : wave) {
        rows_ += int64_t(expert->rows.size());
    }
    tensors_.clear();
    compact_.clear();
    wave_nodes_.clear();
    memory_used_ = 0;
    const size_t bytes = size_t(row_bytes()) * size_t(rows_) + (nodes_.size() + inputs_.size() + 3) * ALIGNMENT;
    memory_.resize(std::max(memory_.size(), bytes + ALIGNMENT));
    memory_used_ = padded(reinterpret_cast<uintptr_t>(memory_.data())) -
                   reinterpret_cast<uintptr_t>(memory_.data());
    zeros_ = allocate(size_t(rows_) * sizeof(int32_t));
    std::memset(zeros_, 0, size_t(rows_) * sizeof(int32_t));
    tensors_.push_back(*ids_);
    wave_ids_ = &tensors_.back();
    wave_ids_->view_src = nullptr;
    wave_ids_->op = GGML_OP_NONE;
    wave_ids_->ne[0] = rows_;
    wave_ids_->ne[1] = 1;
    wave_ids_->nb[0] = sizeof(int32_t);
    wave_ids_->nb[1] = wave_ids_->nb[2] = wave_ids_->nb[3] = size_t(rows_) * sizeof(int32_t);
    wave_ids_->data = allocate(size_t(rows_) * sizeof(int32_t));
    int32_t * id = static_cast<int32_t *>(wave_ids_->data);
    for (const ExpertRows * expert : wave) {
        id = std::fill_n(id, expert->rows.size(), int32_t(expert->expert));
    }
    for (const ggml_tensor * input : inputs_) {
        gather(wave, input, static_cast<char *>(compact(input)->data));
    }
}

void Experts::gather(const Wave & wave, const ggml_tensor * input, char * out) const {
    const size_t row = size_t(input->ne[0]) * sizeof(float);
    const std::vector<char> & copy = copies_.at(input);
    for (const ExpertRows * expert : wave) {
        for (const Row & at : expert->rows) {
            const int64_t from = at.token * input->ne[1] + at.used % input->ne[1];
            std::memcpy(out, copy.data() + row * size_t(from), row);
            out += row;
        }
    }
}

void Experts::scatter(const Wave & wave, const ggml_tensor * output) const {
    const size_t row = size_t(output->ne[0]) * sizeof(float);
    const char * from = static_cast<const char *>(compact_.at(output)->data);
    for (const ExpertRows * expert : wave) {
        for (const Row & at : expert->rows) {
            std::memcpy(const_cast<char *>(place(output, output->data, at.used, at.token)), from, row);
            from += row;
        }
    }
}

// One product for each expert: its matrix is where the expert was loaded, with no other expert beside.
void Experts::add_products(const ggml_tensor * node, const Wave & wave) {
    const Record & record = *record_of(node->src[0]);
    const ggml_tensor & input = *compact_.at(node->src[1]), & result = *compact(node);
    int64_t row = 0;
    for (const ExpertRows * expert : wave) {
        const int64_t count = int64_t(expert->rows.size());
        ggml_tensor * part[4];
        for (int i = 0; i < 4; i++) {
            const ggml_tensor & from = i == 0 ? *record.tensor : i == 1 ? input : i == 2 ? *wave_ids_ : result;
            tensors_.push_back(from);
            part[i] = &tensors_.back();
        }
        part[0]->ne[2] = 1;
        part[0]->nb[3] = part[0]->nb[2];
        part[0]->data = const_cast<char *>(owner_->address(expert->unit)) + record.at[expert->expert];
        part[2]->ne[0] = 1;
        part[2]->ne[1] = count;
        part[2]->nb[1] = sizeof(int32_t);
        part[2]->nb[2] = part[2]->nb[3] = size_t(count) * sizeof(int32_t);
        part[2]->data = zeros_;
        for (ggml_tensor * rows : {part[1], part[3]}) {
            rows->data = static_cast<char *>(rows->data) + size_t(row) * rows->nb[1];
            rows->ne[1] = 1;
            rows->ne[2] = count;
            rows->nb[2] = rows->nb[1];
            rows->nb[3] = rows->nb[1] * size_t(count);
        }
        std::copy(part, part + 3, part[3]->src);
        wave_nodes_.push_back(part[3]);
        row += count;
    }
}

void Experts::add_node(ggml_tensor * node, const Wave & wave) {
    if (node->op == GGML_OP_MUL_MAT_ID) {
        add_products(node, wave);
        return;
    }
    ggml_tensor * made = compact(node);
    if (node->view_src) {
        return;
    }
    for (int i = 0; i < GGML_MAX_SRC && node->src[i]; i++) {
        const bool is_bias = node->op == GGML_OP_ADD_ID && i > 0;
        made->src[i] = !is_bias ? compact_.at(node->src[i]) : i == 2 ? wave_ids_ : node->src[i];
    }
    wave_nodes_.push_back(made);
}

ggml_status Experts::compute_wave(const Wave & wave) {
    lay_out(wave);
    for (ggml_tensor * node : nodes_) {
        add_node(node, wave);
    }
    ggml_cgraph piece = ggml_graph_view(graph_, first_, first_ + 1);
    piece.nodes = wave_nodes_.data();
    piece.n_nodes = int(wave_nodes_.size());
    totals().runs++;
    const ggml_status status = ggml_backend_graph_compute(inner_, &piece);
    for (const ggml_tensor * output : outputs_) {
        if (status == GGML_STATUS_SUCCESS) {
            scatter(wave, output);
        }
    }
    return status;
}

} // namespace kvtier_plugin
