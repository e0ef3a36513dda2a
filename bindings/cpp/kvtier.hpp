/// @file
/// kvtier for C++: tiered KV-cache storage, weight streaming, eviction and sparse policies for LLM
/// engines. C++17 or later, header-only.
///
/// This header includes all others. Read base.hpp first: errors, owners, enumerations, option structs.
///
/// | header        | what it has                                          | an engine reads it to         |
/// |---------------|------------------------------------------------------|-------------------------------|
/// | base.hpp      | errors, owners, spans, versions, logs, specs         | do anything                   |
/// | runtime.hpp   | runtimes, operations, completion queues, co_await    | do anything asynchronously    |
/// | memory.hpp    | budgets, buffers, views of tensors                   | describe its tensors          |
/// | store.hpp     | stores, namespaces, layouts, statistics              | keep KV                       |
/// | session.hpp   | sessions, transfers, plans, named blocks             | keep KV                       |
/// | policy.hpp    | eviction policies                                    | choose victims itself         |
/// | attention.hpp | attention on the processor                           | compute on the processor      |
/// | sparse.hpp    | sparse policies                                      | choose keys itself            |
/// | offload.hpp   | layer-wise offload                                   | decode beyond its memory      |
/// | stream.hpp    | models and weight streaming                          | run weights beyond its memory |
/// | device.hpp    | devices, copies, events, kernels                     | use a GPU or a custom device  |
/// | trace.hpp     | traces and replay                                    | compare policies              |
///
/// The core path, in the order of the calls. `examples/cpp` has programs.
///
/// | call                 |                                                                |
/// |----------------------|----------------------------------------------------------------|
/// | kvt::check_abi       | header and library fit                                         |
/// | kvt::store::open     | a store, from one spec string; finds what an earlier run wrote |
/// | kvt::layout::gqa     | the sizes of a model's KV (or mla, window)                     |
/// | store.open_namespace | model, weights, layout and tenant: who shares KV with whom     |
/// | ns.lookup            | how long a stored prefix these tokens have                     |
/// | ns.open_session      | a sequence                                                     |
/// | session.append       | its tokens, which name its KV                                  |
/// | session.plan         | what to load and what to compute                               |
/// | session.get          | load KV into the engine's tensors; get_wait waits              |
/// | session.put          | store KV that was computed; put_wait waits                     |
/// | runtime.open_queue   | where completions of many transfers arrive; store.runtime()    |
/// | queue.wait           | takes them; or op.wait for one op                              |
/// | op.finish            | the result of an op, or its failure as an exception            |
/// | session.hint         | what the request's end says about its next use                 |
/// | store.stats          | counters; store.metrics as text for Prometheus                 |
/// | destructors          | the store writes back what is in memory only                   |
///
///     const kvt::store store = kvt::store::open("store(host=1GiB)");
///     const kvt::namespace_ ns =
///         store.open_namespace(model, kvt::layout::gqa(32, 8, 128, KVT_DTYPE_F16, 64));
///     const kvt::session session = ns.open_session();
///     session.append(tokens);
///     session.put_wait(transfer); // throws kvt::exception on failure

#ifndef KVTIER_HPP
#define KVTIER_HPP

#include <kvtier/base.hpp>
#include <kvtier/runtime.hpp>
#include <kvtier/memory.hpp>
#include <kvtier/store.hpp>
#include <kvtier/session.hpp>
#include <kvtier/policy.hpp>
#include <kvtier/attention.hpp>
#include <kvtier/sparse.hpp>
#include <kvtier/offload.hpp>
#include <kvtier/stream.hpp>
#include <kvtier/device.hpp>
#include <kvtier/trace.hpp>

#endif  // KVTIER_HPP
