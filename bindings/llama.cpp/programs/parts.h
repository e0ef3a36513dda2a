// Adapters that this build may or may not have. A flag of one that is left out does not exist.
#pragma once

#include "json.h"
#include "options.h"
#include "store.h"

#include <llama.h>

#include <memory>
#include <string>
#include <vector>

class engine;
class keeper;

// What an adapter does to a model and its context while they are made. Throws failure.
class part {
  public:
    virtual ~part() = default;

    // Loads the model instead of the engine; null: the engine does it.
    virtual llama_model *load(const llama_model_params &) { return nullptr; }
    // Changes the params of the context that is made next.
    virtual void prepare(llama_model *, llama_context_params &) {}
    // That context.
    virtual void bind(llama_context *) {}
    // The context is going.
    virtual void unbind() {}
    // Decodes instead of the engine; false: the engine does it. `status`: what llama_decode gives.
    virtual bool decode(const llama_batch &, int32_t *) { return false; }
    // Who keeps the KV, instead of the tier; null: the tier does.
    virtual std::unique_ptr<keeper> make_keeper(engine &);
    // Why a decode failed, if it was because of this; empty otherwise.
    virtual std::string trouble() { return ""; }
    // Lines of the closing table, and fields of the summary.
    virtual std::string rows() const { return ""; }
    virtual void fields(json_object &) const {}
};

using parts_t = std::vector<std::unique_ptr<part>>;

// Those that the options ask for, in the order in which they are asked. `store` is null without one.
parts_t open_parts(const options &o, const std::shared_ptr<kv_store> &store);

std::string longer_help();
std::string sparse_help();

bool has_stream();
std::string stream_help();
