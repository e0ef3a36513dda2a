// Appends tokens to the sequence. When cells run out, blocks leave the window for the store.
#include "watch/longer.hpp"

#include <algorithm>

using namespace kvt_llama;
using namespace kvt_llama::longer;

int kvt_llama_longer_t::run_batch(const llama_token *tokens, uint32_t n, llama_pos first,
                                  llama_seq_id seq, bool wants_logits) {
    llama_batch batch = llama_batch_init((int32_t) n, 0, 1);
    batch.n_tokens = (int32_t) n;
    for (uint32_t i = 0; i < n; i++) {
        batch.token[i] = tokens ? tokens[i] : 0;
        batch.pos[i] = first + (llama_pos) i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = wants_logits && i + 1 == n;
    }
    part_ = n;
    failure_ = KVT_OK;
    failure_why_.text[0] = 0;
    is_claimed_ = false;
    roles_->restart();
    const int rc = llama_decode(ctx_, batch);
    work_ = work::none;
    llama_batch_free(batch);
    return rc;
}

// Failures inside a graph are reported after it has ended.
kvt_status_t kvt_llama_longer_t::check_part(int rc, uint32_t n, kvt_llama_why_t *why) const {
    if (failure_ != KVT_OK) {
        return refuse(why, failure_, "%s", failure_why_.text);
    }
    if (rc == 1) {
        return refuse(why, KVT_E_BUSY,
                      "the engine has no free cells for %u tokens: remove other sequences from this "
                      "context",
                      n);
    }
    if (rc != 0) {
        return refuse(why, KVT_E_BUSY, "llama_decode returned %d: see the engine's log", rc);
    }
    return new_cells_.size() == n ? KVT_OK
                                  : refuse(why, KVT_E_UNSUPPORTED,
                                           "the graph does not show the cells of its tokens: this "
                                           "engine is not supported");
}

// Decodes one graph. If it or the append fails, its tokens are removed.
kvt_status_t kvt_llama_longer_t::decode_part(const llama_token *tokens, uint32_t n,
                                             bool wants_logits, kvt_llama_why_t *why) {
    const uint32_t before = cells_->tokens();
    const auto take_back = [&] {
        llama_memory_seq_rm(memory_, settings_.seq, (llama_pos) before, -1);
        if (cells_->tokens() > before) {
            cells_->truncate(before);
        }
        stats_.failed_parts++;
    };
    try {
        new_cells_.clear();
        work_ = work::run;
        const int rc = run_batch(tokens, n, (llama_pos) before, settings_.seq, wants_logits);
        kvt_status_t status = check_part(rc, n, why);
        if (status == KVT_OK) {
            cells_->append(new_cells_);
            status = store_.append(tokens, n, cells_->is_divided() ? 0 : n, why);
        }
        if (status != KVT_OK) {
            take_back();
            return status;
        }
    } catch (...) {
        work_ = work::none;
        take_back();
        throw;
    }
    (cells_->is_divided() ? stats_.sparse_tokens : stats_.dense_tokens) += n;
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::decode(const llama_token *tokens, size_t n, kvt_llama_why_t *why) {
    const stopwatch time(stats_.decode_ns);
    if (n > settings_.max_tokens - cells_->tokens()) {
        return refuse(why, KVT_E_LIMIT,
                      "%zu tokens after %u exceed max_tokens, %u: raise it, or truncate", n,
                      cells_->tokens(), settings_.max_tokens);
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx_)));
    if (std::any_of(tokens, tokens + n,
                    [n_vocab](llama_token t) { return t < 0 || t >= n_vocab; })) {
        return refuse(why, KVT_E_INVALID, "a token is not in the vocabulary: ids are 0 to %d",
                      n_vocab - 1);
    }
    for (size_t done = 0; done < n;) {
        // Before the cells are full: as many as the engine takes. After that: parts that share a
        // choice.
        const bool is_dense = !cells_->is_divided() && cells_->free_count() > 0;
        const uint32_t most = is_dense ? std::min(cells_->free_count(), batch_tokens_)
                                       : std::min(settings_.part_tokens, batch_tokens_);
        const uint32_t part = (uint32_t) std::min<size_t>(n - done, most);
        kvt_status_t status = free_cells(part, why);
        if (status == KVT_OK) {
            status = decode_part(tokens + done, part, done + part == n, why);
        }
        if (status != KVT_OK) {
            return status;
        }
        done += part;
    }
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::free_cells(uint32_t n, kvt_llama_why_t *why) {
    if (cells_->free_count() >= n) {
        return KVT_OK;
    }
    kvt_status_t status = cells_->is_divided() ? KVT_OK : divide(why);
    if (status != KVT_OK || cells_->free_count() >= n) {
        return status;
    }
    const uint32_t block = settings_.block_tokens, short_of = n - cells_->free_count();
    const uint32_t first = cells_->window_first() + (short_of + block - 1) / block * block;
    status = save_until(first, false, why);
    if (status != KVT_OK) {
        return status;
    }
    llama_memory_seq_rm(memory_, settings_.seq, (llama_pos) cells_->window_first(), (llama_pos) first);
    cells_->remove_from_window(first);
    return KVT_OK;
}

// Stores the first blocks after the sinks. They stay in their cells, which become slots.
kvt_status_t kvt_llama_longer_t::divide(kvt_llama_why_t *why) {
    const uint32_t sinks = cells_->sink_tokens(), end = sinks + cells_->slot_tokens();
    const kvt_status_t status = save_until(end, false, why);
    if (status != KVT_OK) {
        return status;
    }
    llama_memory_seq_cp(memory_, settings_.seq, settings_.held_seq, (llama_pos) sinks, (llama_pos) end);
    llama_memory_seq_rm(memory_, settings_.seq, (llama_pos) sinks, (llama_pos) end);
    cells_->divide();
    for (slots &layer : slots_) {
        for (uint32_t slot = 0; slot < cells_->slot_count(); slot++) {
            layer.set({sinks / settings_.block_tokens + slot, slot}, true);
        }
    }
    return KVT_OK;
}

// Stores and seals blocks up to `end`. A block that was stored but not sealed is stored again, at no
// cost.
kvt_status_t kvt_llama_longer_t::save_until(uint32_t end, bool is_durable, kvt_llama_why_t *why) {
    const stopwatch time(stats_.save_ns);
    while (saved_end_ < end) {
        const uint32_t n = std::min(end - saved_end_, group_tokens());
        kvt_status_t status = put_cells(saved_end_, n, is_durable, why);
        if (status == KVT_OK) {
            status = seal_cells(saved_end_, n, why);
        }
        if (status != KVT_OK) {
            return status;
        }
        if (is_durable && durable_end_ == saved_end_) {
            durable_end_ += n;
        }
        saved_end_ += n;
    }
    return KVT_OK;
}

// Blocks put during decoding are in memory for sure, but perhaps not durable: put them again, durably.
kvt_status_t kvt_llama_longer_t::make_durable(uint32_t end, kvt_llama_why_t *why) {
    const stopwatch time(stats_.save_ns);
    const uint32_t block = settings_.block_tokens;
    const size_t k_bytes = block * model_.k_row_bytes, v_bytes = block * model_.v_row_bytes;
    std::vector<uint8_t> rows(model_.layers * (k_bytes + v_bytes));
    std::vector<place> layers(model_.layers);
    for (; durable_end_ < end && store_.has_disk(); durable_end_ += block) {
        for (uint32_t il = 0; il < model_.layers; il++) {
            layers[il].k = rows.data() + il * (k_bytes + v_bytes);
            layers[il].v = rows.data() + il * (k_bytes + v_bytes) + k_bytes;
            const kvt_status_t status = store_.get(il, {durable_end_ / block}, layers[il], why);
            if (status != KVT_OK) {
                return status;
            }
        }
        const kvt_status_t status = store_.put(durable_end_, block, layers, true, why);
        if (status != KVT_OK) {
            return status;
        }
    }
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::save(kvt_llama_why_t *why) {
    const uint32_t end = cells_->tokens() / settings_.block_tokens * settings_.block_tokens,
                   before = saved_end_;
    const kvt_status_t status = make_durable(std::min(before, end), why);
    return status == KVT_OK ? save_until(end, true, why) : status;
}

kvt_status_t kvt_llama_longer_t::reset(kvt_llama_why_t *why) {
    llama_memory_seq_rm(memory_, settings_.seq, -1, -1);
    llama_memory_seq_rm(memory_, settings_.held_seq, -1, -1);
    cells_->truncate(0);
    for (slots &layer : slots_) {
        layer.reset();
    }
    for (std::vector<uint32_t> &blocks : chosen) {
        blocks.clear();
    }
    saved_end_ = durable_end_ = 0;
    return store_.truncate(0, 0, why);
}

kvt_status_t kvt_llama_longer_t::truncate(size_t tokens, kvt_llama_why_t *why) {
    if (tokens >= cells_->tokens()) {
        return tokens == cells_->tokens()
                   ? KVT_OK
                   : refuse(why, KVT_E_INVALID, "n_tokens is %zu, but the sequence has only %u", tokens,
                            cells_->tokens());
    }
    if (tokens == 0) {
        return reset(why);
    }
    if (cells_->is_divided() && tokens < cells_->window_first()) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "tokens before %u have left their cells: truncate to 0, then decode or "
                      "resume",
                      cells_->window_first());
    }
    const uint32_t left = (uint32_t) tokens;
    const uint32_t whole = std::min(saved_end_, left / settings_.block_tokens * settings_.block_tokens);
    const kvt_status_t status = store_.truncate(left, whole, why);
    if (status != KVT_OK) {
        return status;
    }
    llama_memory_seq_rm(memory_, settings_.seq, (llama_pos) left, -1);
    cells_->truncate(left);
    saved_end_ = whole;
    durable_end_ = std::min(durable_end_, whole);
    return KVT_OK;
}
