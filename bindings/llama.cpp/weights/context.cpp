// The callbacks of contexts, and the errors of their decodes.
#include "weights/weights.hpp"

#include <algorithm>
#include <cstring>

namespace kvt_weights {

namespace {

kvt_status_t add_context(Weights &w, llama_context_params &params, kvt_llama_why_t *why) {
    if (w.contexts.size() >= w.contexts_at_once) {
        return set_error(why, KVT_E_LIMIT,
                   "%zu contexts exist already: open the weights with more `contexts`, or end one with "
                   "kvt_llama_weights_context_end",
                   w.contexts.size());
    }
    auto context = std::make_unique<Context>();
    context->weights = &w;
    context->user_eval = params.cb_eval;
    context->user_eval_data = params.cb_eval_user_data;
    context->user_abort = params.abort_callback;
    context->user_abort_data = params.abort_callback_data;
    context->markers.resize(w.groups);
    context->seen.resize(w.experts);
    params.cb_eval = on_node;
    params.cb_eval_user_data = context.get();
    params.abort_callback = on_abort;
    params.abort_callback_data = context.get();
    w.contexts.push_back(std::move(context));
    return KVT_OK;
}

} // namespace
} // namespace kvt_weights

using namespace kvt_weights;

kvt_status_t kvt_llama_weights_context(kvt_llama_weights_t *weights, struct llama_context_params *params,
                                       kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        if (!weights || !params) {
            return set_error(why, KVT_E_INVALID, "weights or params is null: both are required");
        }
        Weights &w = *weights;
        std::lock_guard<std::mutex> guard(w.lock);
        if (w.phase != Phase::bound) {
            return set_error(why, KVT_E_STATE, "no model is bound: load the model first, then bind it");
        }
        if (params->cb_eval == on_node || params->abort_callback == on_abort) {
            return set_error(why, KVT_E_INVALID,
                             "params were already used for another context: start from the default "
                             "parameters");
        }
        // All experts of a batch are needed at once.
        if (w.experts && w.experts_at_once < w.experts) {
            const uint32_t tokens = std::max(1u, w.experts_at_once / w.experts_used);
            // The engine takes 0 as n_batch.
            params->n_ubatch = params->n_ubatch ? std::min(params->n_ubatch, tokens) : tokens;
        }
        params->op_offload = false;
        return add_context(w, *params, why);
    });
}

kvt_status_t kvt_llama_weights_context_end(kvt_llama_weights_t *weights,
                                           const struct llama_context_params *params) {
    return guarded(nullptr, [&]() -> kvt_status_t {
        if (!weights || !params) {
            return KVT_E_INVALID;
        }
        std::unique_ptr<Context> ended;
        {
            std::lock_guard<std::mutex> guard(weights->lock);
            auto &all = weights->contexts;
            const auto found = std::find_if(all.begin(), all.end(), [&](const auto &context) {
                return context.get() == params->cb_eval_user_data;
            });
            if (found == all.end()) {
                return KVT_E_NOT_FOUND;
            }
            ended = std::move(*found);
            all.erase(found);
        }
        release_all(*ended);
        return KVT_OK;
    });
}

kvt_status_t kvt_llama_weights_error(kvt_llama_weights_t *weights, kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        if (!weights) {
            return set_error(why, KVT_E_INVALID, "weights is null: pass an open object");
        }
        std::vector<Context *> failed;
        {
            std::lock_guard<std::mutex> guard(weights->lock);
            for (auto &context : weights->contexts) {
                if (context->status != KVT_OK) {
                    failed.push_back(context.get());
                }
            }
            // Other contexts may still be in a failing decode, whose own thread asks for its error.
            const auto is_own = [](const Context *context) {
                return context->failed_by == std::this_thread::get_id();
            };
            const auto others = std::stable_partition(failed.begin(), failed.end(), is_own);
            if (others != failed.begin()) {
                failed.erase(others, failed.end());
            }
            if (failed.empty() && !weights->refusal.empty()) {
                set_error(why, KVT_E_IO, "%s", weights->refusal.c_str());
                weights->refusal.clear();
                return KVT_E_IO;
            }
        }
        kvt_status_t status = KVT_OK;
        for (Context *context : failed) {
            if (status == KVT_OK) {
                status = set_error(why, context->status, "%s", context->message);
            }
            release_all(*context);
            context->status = KVT_OK;
        }
        return status;
    });
}
