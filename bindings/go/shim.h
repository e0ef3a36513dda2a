/* Wrappers of the C functions for cgo.
 *
 * Go keeps handles as numbers: they are not addresses, and the garbage collector rejects pointers that
 * point nowhere. Structs with pointers are built here, on the C stack, so that no Go pointer is stored
 * in memory. Go pointers that are passed in are used during the call only. */

#ifndef KVTIER_GO_SHIM_H
#define KVTIER_GO_SHIM_H

#include <kvtier/kvtier.h>
#include <time.h>

typedef uint64_t handle;
/* Length of an absent text. */
#define NO_TEXT UINT64_MAX

#define RAW(type, h) ((type *)(uintptr_t)(h))
#define NUM(p) ((handle)(uintptr_t)(p))

typedef struct {
    kvt_status_t status;
    kvt_error_t *error;
} outcome;

/* The library's clock, CLOCK_MONOTONIC. */
static inline uint64_t clock_ns(void) {
    struct timespec t = {0, 0};
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static inline outcome check_abi(void) {
    outcome o = {KVT_OK, NULL};
    o.status = kvt_abi_check(KVT_HEADER_VERSION, &o.error);
    return o;
}

static inline outcome runtime_open(uint32_t workers, handle *out) {
    outcome o = {KVT_OK, NULL};
    kvt_runtime_opts_t c = KVT_RUNTIME_OPTS_INIT;
    kvt_runtime_t *raw = NULL;
    c.workers = workers;
    o.status = kvt_runtime_open(&c, &raw, &o.error);
    *out = NUM(raw);
    return o;
}
static inline outcome runtime_close(handle h, uint64_t deadline_ns, uint64_t *left) {
    outcome o = {KVT_OK, NULL};
    kvt_close_report_t r = KVT_CLOSE_REPORT_INIT;
    kvt_runtime_t *raw = RAW(kvt_runtime_t, h);
    o.status = kvt_runtime_close(&raw, deadline_ns, &r, &o.error);
    *left = r.queues + r.buffers + r.budgets + r.accounts + r.ops + r.stores + r.namespaces +
            r.sessions + r.offloads + r.streamers + r.devices;
    return o;
}

static inline outcome buffer_alloc(handle runtime, uint64_t bytes, handle *out, void **address) {
    outcome o = {KVT_OK, NULL};
    kvt_buffer_opts_t c = KVT_BUFFER_OPTS_INIT;
    kvt_buffer_t *raw = NULL;
    uint64_t size = 0;
    c.bytes = bytes;
    o.status = kvt_buffer_alloc(RAW(kvt_runtime_t, runtime), &c, &raw, &o.error);
    if (o.status == KVT_OK) {
        o.status = kvt_buffer_address(raw, address, &size);
        if (o.status != KVT_OK) (void)kvt_buffer_free(&raw); /* the caller gets no handle */
    }
    *out = NUM(raw);
    return o;
}
static inline outcome buffer_free(handle h) {
    outcome o = {KVT_OK, NULL};
    kvt_buffer_t *raw = RAW(kvt_buffer_t, h);
    o.status = kvt_buffer_free(&raw);
    return o;
}

static inline outcome store_open(handle runtime, const char *spec, uint64_t spec_bytes,
                                 handle *out) {
    outcome o = {KVT_OK, NULL};
    kvt_store_opts_t c = KVT_STORE_OPTS_INIT;
    kvt_store_t *raw = NULL;
    c.spec = spec;
    c.spec_bytes = spec_bytes;
    o.status = kvt_store_open(RAW(kvt_runtime_t, runtime), NULL, &c, &raw, &o.error);
    *out = NUM(raw);
    return o;
}
/* Opens a store with a runtime of its own. */
static inline outcome open_all(const char *spec, uint64_t spec_bytes, handle *out,
                               handle *runtime) {
    outcome o = {KVT_OK, NULL};
    kvt_store_t *raw = NULL;
    kvt_runtime_t *own = NULL;
    o.status = kvt_open(spec, spec_bytes, &raw, &o.error);
    if (o.status == KVT_OK) {
        o.status = kvt_store_runtime(raw, &own);
        if (o.status != KVT_OK) (void)kvt_store_close(&raw, 0, NULL); /* no handle is returned */
    }
    *out = NUM(raw);
    *runtime = NUM(own);
    return o;
}
static inline outcome store_close(handle h, uint64_t deadline_ns) {
    outcome o = {KVT_OK, NULL};
    kvt_store_t *raw = RAW(kvt_store_t, h);
    o.status = kvt_store_close(&raw, deadline_ns, &o.error);
    /* The disk failed, and the store is closed nevertheless: a second call frees its handle and its runtime. */
    if (o.status == KVT_E_IO) (void)kvt_store_close(&raw, 0, NULL);
    return o;
}
static inline outcome store_set_policy(handle h, uint32_t tier, const char *spec, uint64_t bytes) {
    outcome o = {KVT_OK, NULL};
    o.status = kvt_store_set_policy(RAW(kvt_store_t, h), tier, spec, bytes, &o.error);
    return o;
}
static inline outcome store_stats(handle h, kvt_store_stats_t *out) {
    outcome o = {KVT_OK, NULL};
    out->struct_size = sizeof *out;
    o.status = kvt_store_stats(RAW(kvt_store_t, h), out);
    return o;
}
static inline outcome store_metrics(handle h, char *to, uint64_t capacity, uint64_t *bytes) {
    outcome o = {KVT_OK, NULL};
    o.status = kvt_store_metrics(RAW(kvt_store_t, h), to, capacity, bytes);
    return o;
}

static inline void set_field(const void **at, uint64_t *bytes, const char *text, uint64_t length) {
    if (length == NO_TEXT) return;
    *at = length == 0 ? "" : text;
    *bytes = length;
}
static inline outcome namespace_open(handle store, const char *model, uint64_t model_bytes,
                                     const char *weights, uint64_t weights_bytes, const char *salt,
                                     uint64_t salt_bytes, const char *recipe, uint64_t recipe_bytes,
                                     const kvt_layout_t *layout, uint64_t flags, handle *out) {
    outcome o = {KVT_OK, NULL};
    kvt_identity_t id = KVT_IDENTITY_INIT;
    kvt_namespace_t *raw = NULL;
    set_field(&id.model, &id.model_bytes, model, model_bytes);
    set_field(&id.weights, &id.weights_bytes, weights, weights_bytes);
    set_field(&id.salt, &id.salt_bytes, salt, salt_bytes);
    set_field(&id.recipe, &id.recipe_bytes, recipe, recipe_bytes);
    o.status = kvt_namespace_open(RAW(kvt_store_t, store), &id, layout, flags, &raw, &o.error);
    *out = NUM(raw);
    return o;
}
static inline outcome layout_gqa(kvt_layout_t *out, uint32_t layers, uint32_t kv_heads,
                                 uint32_t head_dim, uint32_t dtype, uint32_t chunk_tokens) {
    outcome o = {KVT_OK, NULL};
    out->struct_size = sizeof *out;
    o.status = kvt_layout_gqa(out, layers, kv_heads, head_dim, dtype, chunk_tokens, &o.error);
    return o;
}
static inline outcome layout_mla(kvt_layout_t *out, uint32_t layers, uint32_t latent_dim,
                                 uint32_t rope_dim, uint32_t dtype, uint32_t chunk_tokens) {
    outcome o = {KVT_OK, NULL};
    out->struct_size = sizeof *out;
    o.status = kvt_layout_mla(out, layers, latent_dim, rope_dim, dtype, chunk_tokens, &o.error);
    return o;
}
static inline outcome layout_window(kvt_layout_t *out, uint32_t layers, uint32_t kv_heads,
                                    uint32_t head_dim, uint32_t dtype, uint32_t chunk_tokens,
                                    uint32_t window_tokens, uint32_t full_every) {
    outcome o = {KVT_OK, NULL};
    out->struct_size = sizeof *out;
    o.status = kvt_layout_window(out, layers, kv_heads, head_dim, dtype, chunk_tokens,
                                 window_tokens, full_every, &o.error);
    return o;
}
static inline outcome namespace_close(handle h) {
    outcome o = {KVT_OK, NULL};
    kvt_namespace_t *raw = RAW(kvt_namespace_t, h);
    o.status = kvt_namespace_close(&raw);
    return o;
}
static inline outcome namespace_lookup(handle h, const uint32_t *tokens, uint64_t count,
                                       kvt_lookup_t *out) {
    outcome o = {KVT_OK, NULL};
    out->struct_size = sizeof *out;
    o.status = kvt_namespace_lookup(RAW(kvt_namespace_t, h), tokens, count, NULL, 0, 0, NULL, out,
                                    &o.error);
    return o;
}

static inline outcome session_open(handle ns, const char *name, uint64_t name_bytes,
                                   uint32_t tenant, handle *out) {
    outcome o = {KVT_OK, NULL};
    kvt_session_opts_t c = KVT_SESSION_OPTS_INIT;
    kvt_session_t *raw = NULL;
    c.name = name_bytes ? name : NULL; /* an empty name means no name */
    c.name_bytes = name_bytes;
    c.tenant = tenant;
    o.status = kvt_session_open(RAW(kvt_namespace_t, ns), &c, &raw, &o.error);
    *out = NUM(raw);
    return o;
}
static inline outcome session_append(handle h, const uint32_t *tokens, uint64_t count) {
    outcome o = {KVT_OK, NULL};
    o.status = kvt_session_append(RAW(kvt_session_t, h), tokens, count, &o.error);
    return o;
}
static inline outcome session_truncate(handle h, uint64_t tokens) {
    outcome o = {KVT_OK, NULL};
    o.status = kvt_session_truncate(RAW(kvt_session_t, h), tokens, &o.error);
    return o;
}
static inline outcome session_info(handle h, kvt_session_info_t *out) {
    outcome o = {KVT_OK, NULL};
    out->struct_size = sizeof *out;
    o.status = kvt_session_info(RAW(kvt_session_t, h), out);
    return o;
}
static inline outcome session_plan(handle h, double alpha_ns, double beta_ns, int has_cost,
                                   kvt_plan_step_t *rows, uint64_t capacity, uint64_t *count,
                                   kvt_plan_t *out) {
    outcome o = {KVT_OK, NULL};
    kvt_plan_terms_t c = KVT_PLAN_TERMS_INIT;
    c.flags = has_cost ? KVT_PLAN_COST : 0;
    c.alpha_ns = alpha_ns;
    c.beta_ns = beta_ns;
    out->struct_size = sizeof *out;
    o.status = kvt_session_plan(RAW(kvt_session_t, h), &c, rows, capacity, sizeof *rows, count,
                                out, &o.error);
    return o;
}
/* The library copies the views, so they may be on Go's heap. Their addresses are memory of buffers. */
static inline outcome session_transfer(handle h, int is_put, uint64_t first_token, uint64_t tokens,
                                       uint32_t first_layer, const kvt_view_t *k,
                                       const kvt_view_t *v, uint32_t layers, uint32_t level,
                                       handle *out) {
    outcome o = {KVT_OK, NULL};
    kvt_transfer_t t = KVT_TRANSFER_INIT;
    kvt_op_t *raw = NULL;
    t.first_token = first_token;
    t.tokens = tokens;
    t.first_layer = first_layer;
    t.layers = layers;
    t.k = k;
    t.v = v;
    t.stride_bytes = sizeof(kvt_view_t);
    t.level = level;
    o.status = is_put ? kvt_session_put(RAW(kvt_session_t, h), &t, NULL, &raw, &o.error)
                      : kvt_session_get(RAW(kvt_session_t, h), &t, NULL, &raw, &o.error);
    *out = NUM(raw);
    return o;
}
static inline outcome session_close(handle h) {
    outcome o = {KVT_OK, NULL};
    kvt_session_t *raw = RAW(kvt_session_t, h);
    o.status = kvt_session_close(&raw);
    return o;
}

static inline kvt_status_t op_wait(handle h, uint64_t deadline_ns) {
    return kvt_op_wait(RAW(kvt_op_t, h), KVT_OP_RELEASED, deadline_ns);
}
static inline kvt_status_t op_cancel(handle h) { return kvt_op_cancel(RAW(kvt_op_t, h)); }
/* Reads the result of an op: its status and its error. */
static inline outcome op_result(handle h, kvt_op_info_t *info) {
    outcome o = {KVT_OK, NULL};
    info->struct_size = sizeof *info;
    o.status = kvt_op_info(RAW(kvt_op_t, h), info);
    if (o.status == KVT_OK && info->status != KVT_OK) {
        o.status = info->status;
        (void)kvt_op_error(RAW(kvt_op_t, h), &o.error);
    }
    return o;
}
static inline kvt_status_t op_free(handle h) {
    kvt_op_t *raw = RAW(kvt_op_t, h);
    return kvt_op_free(&raw);
}

static inline outcome policy_open(const char *spec, uint64_t spec_bytes, uint64_t capacity,
                                  uint64_t log_entries, uint64_t flags, handle *out) {
    outcome o = {KVT_OK, NULL};
    kvt_policy_opts_t c = KVT_POLICY_OPTS_INIT;
    kvt_policy_t *raw = NULL;
    c.spec = spec;
    c.spec_bytes = spec_bytes;
    c.capacity_units = capacity;
    c.log_entries = log_entries;
    c.flags = flags;
    o.status = kvt_policy_open(&c, &raw, &o.error);
    *out = NUM(raw);
    return o;
}
static inline outcome policy_close(handle h) {
    outcome o = {KVT_OK, NULL};
    kvt_policy_t *raw = RAW(kvt_policy_t, h);
    o.status = kvt_policy_close(&raw);
    return o;
}
static inline outcome policy_insert(handle h, int64_t now_ns, const kvt_policy_object_t *rows,
                                    uint64_t count) {
    outcome o = {KVT_OK, NULL};
    o.status = kvt_policy_insert(RAW(kvt_policy_t, h), now_ns, NULL, rows, count, sizeof *rows,
                                 &o.error);
    return o;
}
static inline outcome policy_lookup(handle h, int64_t now_ns, const uint64_t *ids, uint64_t count,
                                    uint64_t *out) {
    outcome o = {KVT_OK, NULL};
    o.status = kvt_policy_lookup(RAW(kvt_policy_t, h), now_ns, NULL, ids, count, NULL, out,
                                 &o.error);
    return o;
}
static inline outcome policy_evict(handle h, int64_t now_ns, uint64_t units,
                                   kvt_policy_victim_t *rows, uint64_t capacity, uint64_t *count,
                                   uint64_t *shortfall) {
    outcome o = {KVT_OK, NULL};
    kvt_policy_outcome_t c = KVT_POLICY_OUTCOME_INIT;
    o.status = kvt_policy_evict(RAW(kvt_policy_t, h), now_ns, units, rows, capacity, sizeof *rows,
                                &c, &o.error);
    *count = c.victims;
    *shortfall = c.shortfall_units;
    return o;
}
static inline outcome policy_switch(handle h, const char *spec, uint64_t bytes) {
    outcome o = {KVT_OK, NULL};
    o.status = kvt_policy_switch(RAW(kvt_policy_t, h), spec, bytes, &o.error);
    return o;
}
static inline outcome policy_spec(handle h, char *to, uint64_t capacity, uint64_t *bytes) {
    outcome o = {KVT_OK, NULL};
    o.status = kvt_policy_spec(RAW(kvt_policy_t, h), to, capacity, bytes);
    return o;
}

#endif
