#include "watch/watch.hpp"

#include <algorithm>
#include <chrono>
#include <new>

using namespace kvt_llama;

namespace {

constexpr uint32_t evict_roles = role_attention | role_mask | role_k_idxs | role_cache_k;
constexpr uint32_t select_roles = evict_roles | role_q;

uint64_t now_ns() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return (uint64_t) std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// Adds the duration of a scope.
class timed {
  public:
    explicit timed(uint64_t &sum_ns) : sum_ns_(sum_ns), from_ns_(now_ns()) {}
    ~timed() { sum_ns_ += now_ns() - from_ns_; }

  private:
    uint64_t &sum_ns_;
    uint64_t from_ns_;
};

} // namespace

kvt_llama_watch_t::kvt_llama_watch_t(const llama_model *model, const kvt_llama_watch_opts_t &opts)
    : model_(model), opts_(opts),
      may_lack_attention_(llama_model_is_hybrid(model) || llama_model_is_recurrent(model)),
      roles_(llama_model_n_layer(model)) {}

// No exception may pass through the scheduler. A failure here ends the policy, not the graph.
bool kvt_llama_watch_t::on_node(ggml_tensor *node, bool is_ask, void *user_data) {
    kvt_llama_watch_t &watch = *static_cast<kvt_llama_watch_t *>(user_data);
    try {
        if (is_ask) {
            watch.user_wants_ = watch.user_eval_ && watch.user_eval_(node, true, watch.user_eval_data_);
            const bool wants = watch.before_node(node) || watch.user_wants_;
            if (wants) {
                watch.roles_.mark_computed();
            }
            return wants;
        }
        watch.after_node(node);
        return !watch.user_wants_ || watch.user_eval_(node, false, watch.user_eval_data_);
    } catch (const std::bad_alloc &) {
        watch.fail(KVT_E_NOMEM, -1, "out of memory for a policy's metadata: the policy ends");
    } catch (...) {
        watch.fail(KVT_E_PANIC, -1, "internal error in a policy: the policy ends");
    }
    return is_ask ? watch.user_wants_ : true;
}

bool kvt_llama_watch_t::before_node(ggml_tensor *node) {
    if (policies_.empty() && !opts_.on_layer) {
        return false;
    }
    const int before = open_layer_;
    const node_info s = roles_.visit(node);
    if (s.new_graph) {
        end_graph();
        begin_graph();
    } else if (s.first && before >= 0) {
        check_layer(before);
    }
    if (s.first) {
        open_layer_ = s.layer;
        if (opts_.on_layer) {
            opts_.on_layer(opts_.on_layer_data, s.layer, 0);
        }
    }
    bool wants = false;
    switch (s.what) {
    case step::write_k:
        wants = active_ && active_->select && is_single_;
        break;
    case step::attention:
        attentions_++;
        wants = at_attention(s.layer);
        break;
    case step::layer_end:
        check_layer(s.layer);
        open_layer_ = -1;
        wants = opts_.on_layer != nullptr;
        break;
    case step::change:
        at_shift();
        break;
    case step::write_v:
    case step::other:
        break;
    }
    stats_.stops += wants;
    return wants;
}

// The scheduler has computed up to this node, because the callback requested a stop.
void kvt_llama_watch_t::after_node(ggml_tensor *node) {
    if (observed_ >= 0 && roles_.layer(observed_).attention == node) {
        timed time(stats_.policy_ns);
        const layer_roles &layer = roles_.layer(observed_);
        if (active_ && active_->evict) {
            active_->evict->after_soft_max(layer);
        } else if (active_ && active_->select) {
            active_->select->after_soft_max(layer);
        }
    }
    observed_ = -1;
    if (opts_.on_layer) {
        for (int il = 0; il < roles_.n_layers(); il++) {
            if (roles_.layer(il).end == node) {
                opts_.on_layer(opts_.on_layer_data, il, 1);
            }
        }
    }
}

void kvt_llama_watch_t::begin_graph() {
    is_in_graph_ = true;
    attentions_ = 0;
    open_layer_ = -1;
    stats_.graphs++;
    for (auto &entry : policies_) {
        sequence_policy &of = entry.second;
        const bool is_own = &of == active_;
        if (of.evict && is_own) {
            of.evict->begin_graph();
        }
        if (of.select) {
            of.select->begin_graph(is_own && is_single_, is_own && is_audit_);
        }
    }
}

void kvt_llama_watch_t::end_graph() {
    if (!is_in_graph_) {
        return;
    }
    is_in_graph_ = false;
    if (open_layer_ >= 0) {
        check_layer(open_layer_);
    }
    if (active_ && active_->evict) {
        active_->evict->end_graph();
    }
    if (active_ && (active_->evict || active_->select) && !attentions_) {
        fail(KVT_E_UNSUPPORTED, -1, std::string("no layer of this graph has ") +
                                        role_name(role_attention) + ": the policy ends");
    }
    open_layer_ = -1;
}

// A layer has ended: checks that all required roles were found in it.
void kvt_llama_watch_t::check_layer(int il) {
    uint32_t wanted = opts_.on_layer ? (uint32_t) role_layer_end : 0u;
    const bool has_any = roles_.layer(il).found & (role_attention | role_cache_k);
    if (active_ && (active_->evict || active_->select) && (has_any || !may_lack_attention_)) {
        wanted |= active_->select ? select_roles : evict_roles;
    }
    char message[400];
    if (roles_.is_missing(il, wanted, message, sizeof message)) {
        fail(KVT_E_UNSUPPORTED, -1, message);
    }
}

bool kvt_llama_watch_t::at_attention(int il) {
    timed time(stats_.policy_ns);
    std::string message;
    const uint32_t lacking = ~roles_.layer(il).found;
    for (auto &entry : policies_) {
        sequence_policy &of = entry.second;
        if (&of != active_ && of.select && !(lacking & evict_roles)) {
            of.select->at_attention(roles_, il, message);
        }
    }
    if (!active_ || (!active_->evict && !active_->select)) {
        return false;
    }
    char text[400];
    if (roles_.is_missing(il, active_->select ? select_roles : evict_roles, text, sizeof text)) {
        fail(KVT_E_UNSUPPORTED, -1, text);
        return false;
    }
    const kvt_status_t status = active_->evict ? active_->evict->at_attention(roles_, il, message)
                                            : active_->select->at_attention(roles_, il, message);
    active_->is_narrowed = active_->is_narrowed || (active_->select && active_->select->has_narrowed());
    if (status != KVT_OK) {
        fail(status, il, message);
        return false;
    }
    const bool is_soft_max = roles_.layer(il).attention->op == GGML_OP_SOFT_MAX;
    const bool wants =
        active_->evict ? active_->evict->wants_soft_max() : active_->select->is_audited_now();
    if (wants && !is_soft_max) {
        fail(KVT_E_UNSUPPORTED, il, std::string("it has no ") + role_name(role_soft_max));
        return false;
    }
    observed_ = wants ? il : -1;
    return wants;
}

// Records the failure and ends the policy of the batch's sequence.
void kvt_llama_watch_t::fail(kvt_status_t status, int il, const std::string &message) {
    const std::string text = il >= 0 ? "layer " + std::to_string(il) + ": " + message : message;
    if (batch_fault_ == KVT_OK) {
        batch_fault_ = status;
        batch_message_ = text;
    }
    if (fault_ == KVT_OK) {
        fault_ = status;
        fault_message_ = text;
    }
    if (active_) {
        end_policy(*active_);
    }
}

// The remaining layers of the graph see what the engine's mask shows.
void kvt_llama_watch_t::end_policy(sequence_policy &of) {
    if (!of.evict && !of.select) {
        return;
    }
    if (of.select && is_in_graph_) {
        of.select->restore_masks();
    }
    add_counts(of, stats_);
    of.evict.reset();
    of.select.reset();
    stats_.ended++;
}

// Keys were changed in place: tokens have other positions now.
void kvt_llama_watch_t::at_shift() {
    for (auto &entry : policies_) {
        sequence_policy &of = entry.second;
        if (of.select) {
            of.select->forget();
        }
        if (of.evict) {
            sequence_policy *before = active_;
            active_ = &of;
            fail(KVT_E_UNSUPPORTED, -1, "positions were shifted: the policy of sequence " +
                                            std::to_string(entry.first) + " ends");
            active_ = before;
        }
    }
}

// Adds a policy's counters.
void kvt_llama_watch_t::add_counts(const sequence_policy &of, kvt_llama_watch_stats_t &to) {
    if (of.evict) {
        to.observed_layers += of.evict->counts().observed_layers;
        to.observed_rows += of.evict->counts().observed_rows;
        to.evictions += of.evict->counts().evictions;
        to.evicted_tokens += of.evict->counts().evicted;
        to.rows_read += of.evict->rows_read();
    }
    if (of.select) {
        const select_counts &counts = of.select->counts();
        to.sparse_tokens += counts.tokens;
        to.sparse_layers += counts.layers;
        to.seen_cells += counts.seen_cells;
        to.kept_layers += counts.kept_layers;
        to.masked_cells += counts.masked_cells;
        to.rebuilds += counts.rebuilds;
        to.audited_layers += counts.audited_layers;
        to.audited_mass += (uint64_t) (counts.audited_mass * 1e6);
        to.rows_read += of.select->rows_read();
    }
}

void kvt_llama_watch_t::stats(kvt_llama_watch_stats_t &out) const {
    out = stats_;
    for (const auto &entry : policies_) {
        add_counts(entry.second, out);
    }
}

batch_facts kvt_llama_watch_t::facts_of(const llama_batch &batch) const {
    batch_facts facts;
    const size_t n = (size_t) std::max(batch.n_tokens, 0);
    facts.seq = 0;
    for (size_t i = 0; i < n && batch.seq_id; i++) {
        const bool is_one = !batch.n_seq_id || batch.n_seq_id[i] == 1;
        const llama_seq_id seq = is_one ? batch.seq_id[i][0] : -1;
        if (seq < 0 || (i > 0 && seq != facts.seq)) {
            facts.seq = -1;
            break;
        }
        facts.seq = seq;
    }
    facts.wants_logits = n && (!batch.logits || batch.logits[n - 1]);
    if (facts.seq >= 0) {
        const llama_pos first =
            batch.pos ? 0 : llama_memory_seq_pos_max(llama_get_memory(ctx_), facts.seq) + 1;
        for (size_t i = 0; i < n; i++) {
            facts.positions.push_back(batch.pos ? batch.pos[i] : first + (llama_pos) i);
        }
    }
    return facts;
}

kvt_status_t kvt_llama_watch_t::begin_batch(const llama_batch &batch, std::string &message) {
    const batch_facts facts = facts_of(batch);
    active_ = nullptr;
    if (facts.seq < 0) {
        // Eviction policies of its sequences would not observe these tokens, so they end.
        for (int32_t i = 0; i < batch.n_tokens; i++) {
            const int32_t n = batch.n_seq_id ? batch.n_seq_id[i] : 1;
            for (int32_t j = 0; j < n; j++) {
                const auto found = policies_.find(batch.seq_id[i][j]);
                if (found != policies_.end() && found->second.evict) {
                    active_ = &found->second;
                    message = "a batch of several sequences would leave tokens of sequence " +
                            std::to_string(found->first) + " unobserved: decode this sequence separately";
                    fail(KVT_E_UNSUPPORTED, -1, message);
                    active_ = nullptr;
                }
            }
        }
        return KVT_OK;
    }
    const auto found = policies_.find(facts.seq);
    if (found == policies_.end()) {
        return KVT_OK;
    }
    active_ = &found->second;
    active_seq_ = facts.seq;
    is_single_ = batch.n_tokens == 1;
    const uint32_t every = active_->audit_every;
    is_audit_ = active_->select && is_single_ && every && ++active_->n_steps % every == 0;
    llama_memory_t memory = llama_get_memory(ctx_);
    if (llama_memory_seq_pos_max(memory, facts.seq) < 0) {
        active_->evicted = 0;
        active_->is_narrowed = false;
    }
    if (!active_->evict) {
        return KVT_OK;
    }
    return active_->evict->begin_batch(memory, facts.seq, facts.positions.data(),
                                    facts.positions.size(), facts.wants_logits, message);
}

// Wraps the work around llama_decode; no exception passes it.
template <typename work> void kvt_llama_watch_t::guarded(work &&run) {
    kvt_status_t status = KVT_OK;
    std::string message;
    try {
        status = run(message);
    } catch (const std::bad_alloc &) {
        status = KVT_E_NOMEM;
        message = "out of memory for a policy's metadata: the policy ends";
    }
    if (status != KVT_OK) {
        fail(status, -1, message);
    }
}

kvt_status_t kvt_llama_watch_t::decode(llama_batch batch, int32_t &rc, std::string &message) {
    batch_fault_ = KVT_OK;
    batch_message_.clear();
    roles_.restart();
    is_in_graph_ = is_single_ = is_audit_ = false;
    guarded([&](std::string &why) { return begin_batch(batch, why); });
    rc = llama_decode(ctx_, batch);
    guarded([&](std::string &why) {
        timed time(stats_.policy_ns);
        end_graph();
        return active_ && active_->evict ? end_batch(rc, why) : KVT_OK;
    });
    roles_.restart();
    active_ = nullptr;
    is_single_ = is_audit_ = false;
    message = batch_message_;
    return batch_fault_;
}

kvt_status_t kvt_llama_watch_t::end_batch(int32_t rc, std::string &message) {
    if (rc != 0) {
        active_->evict->abandon_batch();
        return KVT_OK;
    }
    const uint64_t before = active_->evict->counts().evicted;
    const kvt_status_t status =
        active_->evict->end_batch(llama_get_memory(ctx_), active_seq_, message);
    active_->evicted += active_->evict->counts().evicted - before;
    return status;
}

kvt_status_t kvt_llama_watch_t::evicted(llama_seq_id seq, uint64_t &out) const {
    const auto found = policies_.find(seq);
    out = found == policies_.end() ? 0 : found->second.evicted;
    return KVT_OK;
}

bool kvt_llama_watch_t::is_exact(llama_seq_id seq) const {
    const auto found = policies_.find(seq);
    return found == policies_.end() || (!found->second.evicted && !found->second.is_narrowed);
}

void kvt_llama_watch_t::changed(llama_seq_id seq) {
    const auto found = policies_.find(seq);
    if (found != policies_.end() && found->second.select) {
        found->second.select->forget();
    }
}
