// The backend of a context. It cuts a graph where another layer begins, acquires that layer's weights,
// and has the inner backend compute the piece.
#include "buffer.h"
#include "experts.h"
#include "stats.h"

#include <ggml-impl.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace kvtier_plugin {

namespace {

struct Backend {
    ggml_backend_t inner = nullptr;
    // The last logged error, so that it is not logged again for every token.
    std::string last_error;
    // Result buffer for products of rows on an inner device with its own memory. It grows, and is not
    // charged.
    ggml_backend_buffer_t product = nullptr;

    ~Backend() {
        ggml_backend_buffer_free(product);
        ggml_backend_free(inner);
    }

    ggml_backend_buffer_t product_buffer(size_t bytes) {
        if (!product || ggml_backend_buffer_get_size(product) < bytes) {
            ggml_backend_buffer_free(product);
            product = ggml_backend_buft_alloc_buffer(buffer_type(), bytes);
        }
        return product;
    }
};

Backend & of(ggml_backend_t backend) {
    return *static_cast<Backend *>(backend->context);
}

bool is_computed(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return false;
        default:
            return true;
    }
}

// Points tensors of weights to the inner device's memory while it computes; the destructor restores
// them.
class InnerRedirect {
public:
    InnerRedirect() = default;
    ~InnerRedirect() {
        for (auto saved = saved_.rbegin(); saved != saved_.rend(); ++saved) {
            saved->tensor->buffer = saved->buffer;
            saved->tensor->data = saved->data;
        }
    }
    InnerRedirect(const InnerRedirect &) = delete;
    InnerRedirect & operator=(const InnerRedirect &) = delete;

    // Records a tensor before any is redirected: only then can the owner of a view be found.
    bool record(ggml_tensor * tensor, std::string & why) {
        const Record * record = tensor ? record_of(tensor) : nullptr;
        record = record && record->bytes > 0 ? record : nullptr;
        if (record && !record->inner.buffer) {
            why = std::string(ggml_get_name(record->tensor)) +
                  " is used while it is not in memory: this is a defect of kvtier";
            return false;
        }
        if (record) {
            wanted_.push_back({tensor, record});
        }
        return true;
    }

    void apply() {
        for (const auto & [tensor, record] : wanted_) {
            set(record->tensor, *record, 0);
            set(tensor, *record, tensor == record->tensor ? 0 : tensor->view_offs);
        }
    }

private:
    struct Saved {
        ggml_tensor * tensor;
        ggml_backend_buffer_t buffer;
        void * data;
    };

    void set(ggml_tensor * tensor, const Record & record, size_t offset) {
        if (tensor->buffer != record.inner.buffer || tensor->data != record.inner.data + offset) {
            saved_.push_back({tensor, tensor->buffer, tensor->data});
            tensor->buffer = record.inner.buffer;
            tensor->data = record.inner.data + offset;
        }
    }

    std::vector<std::pair<ggml_tensor *, const Record *>> wanted_;
    std::vector<Saved> saved_;
};

// The computation of one graph.
class GraphRun {
public:
    GraphRun(Backend & backend, ggml_cgraph * graph)
        : backend_(backend), graph_(graph), experts_(backend.inner, graph) {}

    ggml_status all() {
        for (int i = 0; i < graph_->n_nodes; i++) {
            const ggml_status status = i < begin_ ? GGML_STATUS_SUCCESS : node(i);
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
        }
        const ggml_status status = compute(graph_->n_nodes);
        if (status == GGML_STATUS_SUCCESS) {
            for (const Needs & one : used_) {
                if (!one.weights->end_graph(why_)) {
                    return GGML_STATUS_FAILED;
                }
            }
        }
        return status;
    }

    const std::string & why() const { return why_; }

private:
    struct Needs {
        Weights * weights = nullptr;
        std::vector<uint32_t> units;
    };

    // Computes all nodes before `end` that were not computed yet.
    ggml_status compute(int end) {
        if (end <= begin_) {
            return GGML_STATUS_SUCCESS;
        }
        ggml_cgraph piece = ggml_graph_view(graph_, begin_, end);
        InnerRedirect redirect;
        for (int i = begin_; inner_has_memory() && i < end; i++) {
            ggml_tensor * node = graph_->nodes[i];
            if (!is_computed(node)) {
                continue;
            }
            bool is_present = redirect.record(node, why_);
            for (ggml_tensor * source : node->src) {
                is_present = is_present && redirect.record(source, why_);
            }
            if (!is_present) {
                return GGML_STATUS_FAILED;
            }
        }
        redirect.apply();
        begin_ = end;
        totals().runs++;
        return ggml_backend_graph_compute(backend_.inner, &piece);
    }

    ggml_status node(int number) {
        ggml_tensor * node = graph_->nodes[number];
        if (!is_computed(node)) {
            return GGML_STATUS_SUCCESS;
        }
        if (Experts::is_product(node)) {
            return compute_experts(number);
        }
        needs_.clear();
        if (node->view_src && !make_resident(node)) {
            return GGML_STATUS_FAILED;
        }
        for (ggml_tensor * source : node->src) {
            Record * record = source ? record_of(source) : nullptr;
            if (!record || !record->streams) {
                continue;
            }
            if (is_row_wise(node, source) && record->piece_rows > 0) {
                return compute_pieces(number, *record);
            }
            if (record->piece_rows == 0 && !record->is_experts && !is_written(node, source)) {
                require_unit(*record);
            } else if (!make_resident(source)) {
                return GGML_STATUS_FAILED;
            }
        }
        return needs_.empty() ? GGML_STATUS_SUCCESS : acquire_units(number);
    }

    ggml_status compute_experts(int number) {
        const ggml_status status = compute(number);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        const int end = experts_.find(number);
        const std::vector<uint32_t> & units = experts_.other_units();
        Weights & weights = experts_.owner();
        const bool is_leased =
            std::all_of(units.begin(), units.end(), [&](uint32_t unit) { return weights.has(unit); });
        if (!is_leased && !lease_units(weights, units)) {
            return GGML_STATUS_FAILED;
        }
        begin_ = end;
        return experts_.compute(why_);
    }

    void require_unit(const Record & record) {
        const auto same = [&](const Needs & one) { return one.weights == record.owner; };
        auto at = std::find_if(needs_.begin(), needs_.end(), same);
        if (at == needs_.end()) {
            at = needs_.insert(at, {record.owner, {}});
        }
        const uint32_t unit = record.units.front();
        if (std::find(at->units.begin(), at->units.end(), unit) == at->units.end()) {
            at->units.push_back(unit);
        }
    }

    // Acquires the units of a node. Earlier nodes are computed first, because their units may be
    // released.
    ggml_status acquire_units(int number) {
        for (const Needs & one : needs_) {
            const bool is_present = std::all_of(one.units.begin(), one.units.end(),
                                              [&](uint32_t unit) { return one.weights->has(unit); });
            if (!is_present) {
                const ggml_status status = compute(number);
                if (status != GGML_STATUS_SUCCESS) {
                    return status;
                }
                if (!lease_units(*one.weights, one.units)) {
                    return GGML_STATUS_FAILED;
                }
            }
        }
        for (ggml_tensor * source : graph_->nodes[number]->src) {
            if (source) {
                update_view(source);
            }
        }
        return GGML_STATUS_SUCCESS;
    }

    bool lease_units(Weights & weights, const std::vector<uint32_t> & units) {
        const auto same = [&](const Needs & one) { return one.weights == &weights; };
        if (std::none_of(used_.begin(), used_.end(), same)) {
            used_.push_back({&weights, {}});
        }
        return weights.lease_units(units, why_);
    }

    // Training steps write to their first source.
    static bool is_written(const ggml_tensor * node, const ggml_tensor * source) {
        return source == node->src[0] &&
               (node->op == GGML_OP_OPT_STEP_ADAMW || node->op == GGML_OP_OPT_STEP_SGD);
    }

    // Makes a tensor resident that is written to, or that is in pieces but used as a whole.
    bool make_resident(ggml_tensor * tensor) {
        Record * record = record_of(tensor);
        if (record && record->streams && !record->owner->materialise(*record, why_)) {
            return false;
        }
        update_view(tensor);
        return true;
    }

    // Updates a view, which was created from the address that the weights had then.
    static void update_view(ggml_tensor * source) {
        if (source->view_src && record_of(source)) {
            source->data = static_cast<char *>(source->view_src->data) + source->view_offs;
        }
    }

    // Tells whether rows of the product depend on the same rows of the matrix only.
    static bool is_row_wise(const ggml_tensor * node, const ggml_tensor * source) {
        return node->op == GGML_OP_MUL_MAT && node->src[0] == source && node->src[1] != source &&
               !source->view_src && !node->view_src && source->ne[2] == 1 && source->ne[3] == 1 &&
               node->type == GGML_TYPE_F32 && !record_of(node->src[1]);
    }

    ggml_status compute_pieces(int number, const Record & record) {
        const ggml_status status = compute(number);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        const ggml_tensor * node = graph_->nodes[number];
        for (size_t i = 0; i < record.units.size(); i++) {
            if (!lease_units(*record.owner, {record.units[i]})) {
                return GGML_STATUS_FAILED;
            }
            const int64_t row = int64_t(i) * record.piece_rows;
            ggml_tensor rows = *record.tensor, product = *node;
            rows.ne[1] = std::min(record.piece_rows, record.tensor->ne[1] - row);
            rows.nb[2] = rows.nb[3] = rows.nb[1] * size_t(rows.ne[1]);
            if (inner_has_memory()) {
                rows.buffer = record.inner.buffer;
                rows.data = record.inner.data;
            } else {
                rows.data = const_cast<char *>(record.owner->address(record.units[i])) + record.at[i];
            }
            product.ne[0] = rows.ne[1];
            product.data = static_cast<char *>(node->data) + size_t(row) * node->nb[0];
            product.src[0] = &rows;
            const bool has_gaps = inner_has_memory() && !ggml_is_contiguous(&product);
            const ggml_status done = has_gaps ? compute_strided(number, product) : compute_single(number,
                product);
            if (done != GGML_STATUS_SUCCESS) {
                return done;
            }
        }
        begin_ = number + 1;
        return GGML_STATUS_SUCCESS;
    }

    // Computes one node in place of that of the graph.
    ggml_status compute_single(int number, ggml_tensor & node) {
        ggml_tensor * only = &node;
        ggml_cgraph piece = ggml_graph_view(graph_, number, number + 1);
        piece.nodes = &only;
        totals().runs++;
        return ggml_backend_graph_compute(backend_.inner, &piece);
    }

    // GPUs write products without gaps between columns. Such a product is computed in another buffer,
    // then copied.
    ggml_status compute_strided(int number, const ggml_tensor & product) {
        ggml_tensor dense = product;
        for (int i = 1; i < GGML_MAX_DIMS; i++) {
            dense.nb[i] = dense.nb[i - 1] * size_t(dense.ne[i - 1]);
        }
        dense.buffer = backend_.product_buffer(inner_bytes(&dense));
        if (!dense.buffer) {
            why_ = "the device has no memory for a product of rows: lower KVTIER_DEVICE_BUDGET";
            return GGML_STATUS_ALLOC_FAILED;
        }
        dense.data = ggml_backend_buffer_get_base(dense.buffer);
        const ggml_status status = compute_single(number, dense);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        ggml_tensor target = product, copy = product;
        target.op = GGML_OP_NONE;
        std::fill(target.src, target.src + GGML_MAX_SRC, nullptr);
        copy.op = GGML_OP_CPY;
        std::fill(copy.src, copy.src + GGML_MAX_SRC, nullptr);
        std::memset(copy.op_params, 0, sizeof copy.op_params);
        copy.src[0] = &dense;
        copy.src[1] = &target;
        return compute_single(number, copy);
    }

    Backend & backend_;
    ggml_cgraph * graph_;
    Experts experts_;
    int begin_ = 0;
    std::vector<Needs> needs_, used_;
    std::string why_;
};

// Tells whether the graph uses streamed weights; with an inner device of its own memory, any weights.
bool is_streamed(const ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        for (const ggml_tensor * source : graph->nodes[i]->src) {
            const Record * record = source ? record_of(source) : nullptr;
            if (record && (record->streams || inner_has_memory())) {
                return true;
            }
        }
    }
    return false;
}

ggml_status graph_compute(ggml_backend_t wrapped, ggml_cgraph * graph) {
    Backend & backend = of(wrapped);
    try {
        totals().graphs++;
        std::unique_lock<std::mutex> guard(weights_lock());
        if (!is_streamed(graph)) {
            guard.unlock();
            return ggml_backend_graph_compute(backend.inner, graph);
        }
        totals().streamed_graphs++;
        GraphRun run(backend, graph);
        const ggml_status status = run.all();
        if (!run.why().empty() && run.why() != backend.last_error) {
            log_line(run.why());
            backend.last_error = run.why();
        }
        return status;
    } catch (...) {
        log_line("out of memory while a graph is computed: lower KVTIER_BUDGET, or free memory");
        return GGML_STATUS_ALLOC_FAILED;
    }
}

const char * backend_name(ggml_backend_t) {
    return "KVTIER";
}

void backend_free(ggml_backend_t wrapped) {
    delete &of(wrapped);
    delete wrapped;
}

ggml_guid_t guid() {
    static ggml_guid id = {0x6b, 0x76, 0x74, 0x69, 0x65, 0x72, 0x2d, 0x70,
                           0x6c, 0x75, 0x67, 0x69, 0x6e, 0x2d, 0x30, 0x31};
    return &id;
}

// A function of the backend that computes, by its name.
void * inner_proc(const char * name) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(inner_device()), name);
}

void set_threads(ggml_backend_t wrapped, int threads) {
    const auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(inner_proc("ggml_backend_set_n_threads"));
    if (set && backend_is_ours(wrapped)) {
        const uint32_t own_threads = settings().threads;
        set(of(wrapped).inner, own_threads ? int(own_threads) : threads);
    }
}

void set_abort(ggml_backend_t wrapped, ggml_abort_callback callback, void * data) {
    const auto set =
        reinterpret_cast<ggml_backend_set_abort_callback_t>(inner_proc("ggml_backend_set_abort_callback"));
    if (set && backend_is_ours(wrapped)) {
        set(of(wrapped).inner, callback, data);
    }
}

} // namespace

bool backend_is_ours(ggml_backend_t backend) {
    return backend && backend->iface.get_name == backend_name;
}

void * backend_proc(const char * name) {
    const std::string asked = name;
    if (asked == "ggml_backend_set_n_threads") {
        return reinterpret_cast<void *>(set_threads);
    }
    if (asked == "ggml_backend_set_abort_callback") {
        return reinterpret_cast<void *>(set_abort);
    }
    return nullptr;
}

// No asynchronous work and no events: a graph is complete when the call returns.
ggml_backend_t backend_open(ggml_backend_dev_t device) {
    std::unique_ptr<Backend> backend(new Backend);
    std::unique_ptr<ggml_backend> wrapped(new ggml_backend{});
    backend->inner = ggml_backend_dev_init(inner_device(), nullptr);
    if (!backend->inner) {
        log_line("the device KVTIER_UNDER=" + settings().inner + " cannot be opened: see the engine's log");
        return nullptr;
    }
    wrapped->guid = guid();
    wrapped->iface.get_name = backend_name;
    wrapped->iface.free = backend_free;
    wrapped->iface.graph_compute = graph_compute;
    wrapped->device = device;
    wrapped->context = backend.release();
    ggml_backend_t opened = wrapped.release();
    if (settings().threads) {
        set_threads(opened, int(settings().threads));
    }
    return opened;
}

} // namespace kvtier_plugin
