// Optional adapters: --longer, --sparse, --stream-budget. A build without an adapter lacks its flag.
#pragma once

#include "json.h"
#include "options.h"
#include "store.h"

#include <llama.h>

#include <memory>
#include <string>
#include <vector>

class engine;
class kv_cache;

// Hooks of an adapter into loading, context creation and decoding. Functions throw failure.
class adapter {
  public:
    virtual ~adapter() = default;

    // Loads the model instead of the engine. Null: the engine loads it.
    virtual llama_model *load(const llama_model_params &) { return nullptr; }
    // Changes the params of the next context.
    virtual void prepare(llama_model *, llama_context_params &) {}
    // Receives the context that was created with those params.
    virtual void bind(llama_context *) {}
    // The context is about to be freed.
    virtual void unbind() {}
    // Decodes instead of the engine, with llama_decode's result in `status`. False: the engine decodes.
    virtual bool decode(const llama_batch &, int32_t *) { return false; }
    // Replaces the KV tier. Null: the tier is used.
    virtual std::unique_ptr<kv_cache> make_kv_cache(engine &);
    // The reason of a failed decode that this adapter caused; empty for other failures.
    virtual std::string failure_reason() { return ""; }
    // Lines for the closing table, and fields for the summary.
    virtual std::string rows() const { return ""; }
    virtual void fields(json_object &) const {}
};

using adapters_t = std::vector<std::unique_ptr<adapter>>;

// The adapters that the options request, in call order. `store` is null with --no-kv.
adapters_t open_adapters(const options &o, const std::shared_ptr<kv_store> &store);

std::string longer_help();
std::string sparse_help();

bool has_stream();
std::string stream_help();
