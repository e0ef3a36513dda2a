// What the process has: one store for all models, and the contexts of the program.
#pragma once

#include "run/context.hpp"

#include <kvtier/kvtier.h>

#include <memory>

namespace kvtier_run {

/// False = the functions of this library only call the engine's.
bool active();

/// Opens the store on the first call; null = it cannot be opened, which was told.
const kvt_store_t *store();

/// `has_scratch`: the context has one more sequence than the program asked for.
void add_context(llama_context *ctx, const llama_context_params &params, uint32_t sequences, bool has_scratch);
/// Closes what belongs to a context, before the engine frees it.
void remove_context(llama_context *ctx);
void remove_contexts_of(const llama_model *model);
/// Null = not one whose cells are watched. A context belongs to one thread at a time.
context_t *find_context(const llama_context *ctx);
context_t *find_context(llama_memory_t memory);

} // namespace kvtier_run
