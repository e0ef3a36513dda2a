/// @file
/// kvtier: tiered KV-cache storage, weight streaming, eviction and sparse policies for LLM engines.
///
/// This header includes all others. Read base.h first: it has the rules of all functions.
///
/// | header      | what it has                                          | an engine reads it to         |
/// |-------------|------------------------------------------------------|-------------------------------|
/// | base.h      | statuses, errors, versions, logs, specs              | do anything                   |
/// | runtime.h   | runtimes, operations, completion queues              | do anything asynchronously    |
/// | memory.h    | budgets, buffers, views of tensors                   | describe its tensors          |
/// | store.h     | stores, namespaces, remotes, statistics              | keep KV                       |
/// | session.h   | sessions, transfers, plans, named blocks             | keep KV                       |
/// | policy.h    | eviction policies                                    | choose victims itself         |
/// | attention.h | attention on the processor                           | compute on the processor      |
/// | sparse.h    | sparse policies                                      | choose keys itself            |
/// | offload.h   | layer-wise offload                                   | decode beyond its memory      |
/// | stream.h    | models and weight streaming                          | run weights beyond its memory |
/// | device.h    | devices, copies, events, kernels                     | use a GPU or a custom device  |
/// | trace.h     | traces and replay                                    | compare policies              |
///
/// The core path, in the order of the calls. `examples/c/hello_kv.c` is the least program.
///
/// | call                 |                                                                |
/// |----------------------|----------------------------------------------------------------|
/// | kvt_abi_check        | header and library fit                                         |
/// | kvt_open             | a store, from one spec string; finds what an earlier run wrote |
/// | kvt_layout_gqa       | the sizes of a model's KV (or _mla, _window)                   |
/// | kvt_namespace_open   | model, weights, layout and tenant: who shares KV with whom     |
/// | kvt_namespace_lookup | how long a stored prefix these tokens have                     |
/// | kvt_session_open     | a sequence                                                     |
/// | kvt_session_append   | its tokens, which name its KV                                  |
/// | kvt_session_plan     | what to load and what to compute                               |
/// | kvt_session_get      | load KV into the engine's tensors; kvt_session_get_wait waits  |
/// | kvt_session_put      | store KV that was computed; kvt_session_put_wait waits         |
/// | kvt_queue_open       | where completions of many transfers arrive                     |
/// | kvt_queue_wait       | takes them; or kvt_op_wait for one op                          |
/// | kvt_op_info          | the result of an op; kvt_op_error explains a failure           |
/// | kvt_op_free          | after its release                                              |
/// | kvt_session_hint     | what the request's end says about its next use                 |
/// | kvt_store_stats      | counters; kvt_store_metrics as text for Prometheus             |
/// | kvt_session_close    | chunks may be evicted then                                     |
/// | kvt_namespace_close  |                                                                |
/// | kvt_queue_close      |                                                                |
/// | kvt_store_close      | writes back what is in memory only                             |
///
///     if (kvt_open("store(host=1GiB)", KVT_NUL_TERMINATED, &store, &err) != KVT_OK) {
///         fprintf(stderr, "%s\n", kvt_error_message(err));
///         kvt_error_free(&err);
///         return 1;
///     }

#ifndef KVTIER_H
#define KVTIER_H

#include <kvtier/base.h>
#include <kvtier/runtime.h>
#include <kvtier/memory.h>
#include <kvtier/store.h>
#include <kvtier/session.h>
#include <kvtier/policy.h>
#include <kvtier/attention.h>
#include <kvtier/sparse.h>
#include <kvtier/offload.h>
#include <kvtier/stream.h>
#include <kvtier/device.h>
#include <kvtier/trace.h>

#endif /* KVTIER_H */
