'use strict';
// Declarations of the C interface for koffi: structs, functions, constants. Handles are numbers, not
// addresses; koffi represents a `void *` as a BigInt, which suits them. A test compares every struct
// with the layout of a C compiler.

const koffi = require('koffi');

const HEADER_VERSION = 65536;

const RELEASED = 4; // KVT_OP_RELEASED
const ROW_PARENT = 1; // KVT_OBJECT_HAS_PARENT
const POLICY_HOLES = 1; // KVT_POLICY_HOLES
const PLAN_COST = 4; // KVT_PLAN_COST
const E_INVALID = -1; // KVT_E_INVALID
const E_TOO_SMALL = -4; // KVT_E_TOO_SMALL
const E_CLOSED = -9; // KVT_E_CLOSED

/** Fields of each struct, in order. @type {Object<string, Object<string, string>>} */
const FIELDS = {
  kvt_error_info_t: {
    struct_size: 'uint64_t', message: 'void *', message_bytes: 'uint64_t', offset: 'uint64_t',
    status: 'int32_t', os_errno: 'int32_t',
  },
  kvt_runtime_opts_t: {
    struct_size: 'uint64_t', flags: 'uint64_t', workers: 'uint32_t', max_ops: 'uint32_t',
    name: 'void *', name_bytes: 'uint64_t', faults: 'void *', faults_bytes: 'uint64_t',
    on_thread: 'void *', user_data: 'void *', destroy: 'void *',
  },
  kvt_close_report_t: {
    struct_size: 'uint64_t', queues: 'uint64_t', buffers: 'uint64_t', budgets: 'uint64_t',
    accounts: 'uint64_t', ops: 'uint64_t', stores: 'uint64_t', namespaces: 'uint64_t',
    sessions: 'uint64_t', offloads: 'uint64_t', streamers: 'uint64_t', devices: 'uint64_t',
  },
  kvt_queue_opts_t: {
    struct_size: 'uint64_t', flags: 'uint64_t', capacity: 'uint64_t', callback: 'void *',
    user_data: 'void *', destroy: 'void *',
  },
  kvt_submit_opts_t: {
    struct_size: 'uint64_t', flags: 'uint64_t', queue: 'void *', tag: 'uint64_t',
    deadline_ns: 'uint64_t', notify: 'uint32_t', priority: 'uint32_t',
  },
  kvt_completion_t: {
    op: 'void *', tag: 'uint64_t', bytes_done: 'uint64_t', value: 'uint64_t', status: 'int32_t',
    events: 'uint32_t', items_failed: 'uint32_t', reserved: 'uint32_t',
  },
  kvt_store_opts_t: {
    struct_size: 'uint64_t', flags: 'uint64_t', spec: 'void *', spec_bytes: 'uint64_t',
    host_bytes: 'uint64_t', disk_bytes: 'uint64_t', disk_path: 'void *',
    disk_path_bytes: 'uint64_t', policy: 'void *', policy_bytes: 'uint64_t',
    disk_policy: 'void *', disk_policy_bytes: 'uint64_t', write: 'uint32_t',
    reserved: 'uint32_t', device: 'void *', secrets: 'void *', secret_count: 'uint64_t',
    secret_stride_bytes: 'uint64_t', remote: 'void *',
  },
  kvt_identity_t: {
    struct_size: 'uint64_t', model: 'void *', model_bytes: 'uint64_t', weights: 'void *',
    weights_bytes: 'uint64_t', lora: 'void *', lora_bytes: 'uint64_t', media: 'void *',
    media_bytes: 'uint64_t', salt: 'void *', salt_bytes: 'uint64_t', recipe: 'void *',
    recipe_bytes: 'uint64_t', shard_index: 'uint32_t', shard_count: 'uint32_t',
    extra: 'void *', extra_count: 'uint64_t', extra_stride_bytes: 'uint64_t',
    remote_tenant: 'uint64_t',
  },
  kvt_group_t: {
    rule: 'uint32_t', dtype: 'uint32_t', kv_heads: 'uint32_t', window_tokens: 'uint32_t',
    k_bytes: 'uint64_t', v_bytes: 'uint64_t', state_bytes: 'uint64_t', layers: 'void *',
    layer_count: 'uint64_t',
  },
  kvt_layout_t: {
    struct_size: 'uint64_t', chunk_tokens: 'uint32_t', reserved: 'uint32_t',
    groups: 'kvt_group_t *', group_count: 'uint64_t', stride_bytes: 'uint64_t',
  },
  kvt_lookup_t: {
    struct_size: 'uint64_t', tokens: 'uint64_t', reusable_tokens: 'uint64_t',
    reusable_soon_tokens: 'uint64_t', device_bytes: 'uint64_t', host_bytes: 'uint64_t',
    disk_bytes: 'uint64_t', remote_bytes: 'uint64_t', pending_bytes: 'uint64_t',
    load_ns: 'uint64_t',
  },
  kvt_session_opts_t: {
    struct_size: 'uint64_t', flags: 'uint64_t', name: 'void *', name_bytes: 'uint64_t',
    tenant: 'uint32_t', priority: 'uint32_t', max_tokens: 'uint32_t', reserved: 'uint32_t',
  },
  kvt_session_info_t: {
    struct_size: 'uint64_t', tokens: 'uint64_t', full_chunks: 'uint64_t',
    chunk_tokens: 'uint32_t', layers: 'uint32_t',
  },
  kvt_view_t: {
    address: 'void *', pages: 'void *', page_count: 'uint64_t', shift_bytes: 'int64_t',
    page_tokens: 'uint32_t', tokens: 'uint32_t', heads: 'uint32_t', memory: 'uint32_t',
    run_bytes: 'uint64_t', token_stride_bytes: 'uint64_t', head_stride_bytes: 'uint64_t',
  },
  kvt_transfer_t: {
    struct_size: 'uint64_t', flags: 'uint64_t', first_token: 'uint64_t', tokens: 'uint64_t',
    first_layer: 'uint32_t', layers: 'uint32_t', k: 'kvt_view_t *', v: 'kvt_view_t *',
    stride_bytes: 'uint64_t', level: 'uint32_t', reserved: 'uint32_t', ready: 'void *',
    chunks: 'void *', chunk_count: 'uint64_t', after: 'uint64_t',
  },
  kvt_plan_terms_t: {
    struct_size: 'uint64_t', flags: 'uint64_t', alpha_ns: 'double', beta_ns: 'double',
    priority: 'uint32_t', reserved: 'uint32_t',
  },
  kvt_plan_step_t: {
    first_token: 'uint64_t', tokens: 'uint64_t', kind: 'uint32_t', tier: 'uint32_t',
    host_bytes: 'uint64_t', disk_bytes: 'uint64_t', remote_bytes: 'uint64_t',
    predicted_ns: 'uint64_t', device_bytes: 'uint64_t',
  },
  kvt_plan_t: {
    struct_size: 'uint64_t', tokens: 'uint64_t', resident_tokens: 'uint64_t',
    load_tokens: 'uint64_t', recompute_tokens: 'uint64_t', total_ns: 'uint64_t',
    load_ns: 'uint64_t', compute_ns: 'uint64_t', without_ns: 'uint64_t',
  },
  kvt_policy_opts_t: {
    struct_size: 'uint64_t', flags: 'uint64_t', spec: 'void *', spec_bytes: 'uint64_t',
    max_objects: 'uint64_t', capacity_units: 'uint64_t', log_entries: 'uint64_t',
    remember: 'uint64_t', alpha: 'double', beta: 'double', custom: 'void *',
    predictor: 'void *',
  },
  kvt_policy_object_t: {
    id: 'uint64_t', parent: 'uint64_t', units: 'uint64_t', flags: 'uint64_t',
    next_use_ns: 'int64_t', cost: 'double', context: 'uint32_t', tokens: 'uint32_t',
    layer: 'uint32_t', layers: 'uint32_t', chunk: 'uint32_t', chunks: 'uint32_t',
  },
  kvt_policy_victim_t: { id: 'uint64_t', units: 'uint64_t' },
  kvt_policy_outcome_t: {
    struct_size: 'uint64_t', victims: 'uint64_t', freed_units: 'uint64_t',
    shortfall_units: 'uint64_t', decision_ns: 'uint64_t', decided_by: 'void *',
    decided_by_bytes: 'uint64_t',
  },
};

const TYPES = {};
for (const [name, fields] of Object.entries(FIELDS)) TYPES[name] = koffi.struct(name, fields);

/** A struct with the given values; other fields are zero, struct_size is set. */
function make(name, values = {}) {
  const value = {};
  for (const [field, type] of Object.entries(FIELDS[name])) {
    value[field] = field in values ? values[field] : type.endsWith('*') ? null : 0;
  }
  if ('struct_size' in FIELDS[name]) value.struct_size = koffi.sizeof(TYPES[name]);
  return value;
}

const ERR = '_Inout_ void **err';
const FUNCTIONS = [
  `int32_t kvt_abi_check(uint32_t version, ${ERR})`,
  'const char *kvt_status_name(int32_t status)',
  'const char *kvt_status_str(int32_t status)',
  'int32_t kvt_error_info(void *error, _Inout_ kvt_error_info_t *out)',
  'int32_t kvt_error_free(_Inout_ void **error)',
  `int32_t kvt_runtime_open(kvt_runtime_opts_t *opts, _Inout_ void **out, ${ERR})`,
  'int32_t kvt_runtime_close(_Inout_ void **h, uint64_t deadline, ' +
    `_Inout_ kvt_close_report_t *r, ${ERR})`,
  'int32_t kvt_runtime_now(void *h, _Out_ uint64_t *ns)',
  `int32_t kvt_queue_open(void *runtime, kvt_queue_opts_t *opts, _Inout_ void **out, ${ERR})`,
  `int32_t kvt_queue_close(_Inout_ void **h, uint64_t deadline, ${ERR})`,
  'int32_t kvt_queue_wait(void *h, uint64_t deadline, void *out, uint64_t capacity, ' +
    'uint64_t stride, void *count)',
  'int32_t kvt_op_cancel(void *op)',
  'int32_t kvt_op_error(void *op, _Inout_ void **out)',
  'int32_t kvt_op_free(_Inout_ void **op)',
  'int32_t kvt_store_open(void *runtime, void *budget, kvt_store_opts_t *opts, ' +
    `_Inout_ void **out, ${ERR})`,
  `int32_t kvt_store_close(_Inout_ void **h, uint64_t deadline, ${ERR})`,
  `int32_t kvt_store_set_policy(void *h, uint32_t tier, void *spec, uint64_t bytes, ${ERR})`,
  'int32_t kvt_store_metrics(void *h, void *out, uint64_t capacity, _Out_ uint64_t *bytes)',
  'int32_t kvt_namespace_open(void *store, kvt_identity_t *identity, kvt_layout_t *layout, ' +
    `uint64_t flags, _Inout_ void **out, ${ERR})`,
  'int32_t kvt_namespace_close(_Inout_ void **h)',
  'int32_t kvt_namespace_lookup(void *h, void *tokens, uint64_t count, void *ranges, ' +
    `uint64_t capacity, uint64_t stride, void *out_count, _Inout_ kvt_lookup_t *out, ${ERR})`,
  `int32_t kvt_session_open(void *ns, kvt_session_opts_t *opts, _Inout_ void **out, ${ERR})`,
  'int32_t kvt_session_close(_Inout_ void **h)',
  `int32_t kvt_session_append(void *h, void *tokens, uint64_t count, ${ERR})`,
  `int32_t kvt_session_truncate(void *h, uint64_t tokens, ${ERR})`,
  'int32_t kvt_session_info(void *h, _Inout_ kvt_session_info_t *out)',
  'int32_t kvt_session_put(void *h, kvt_transfer_t *transfer, kvt_submit_opts_t *opts, ' +
    `_Inout_ void **op, ${ERR})`,
  'int32_t kvt_session_get(void *h, kvt_transfer_t *transfer, kvt_submit_opts_t *opts, ' +
    `_Inout_ void **op, ${ERR})`,
  'int32_t kvt_session_plan(void *h, kvt_plan_terms_t *terms, void *rows, ' +
    'uint64_t capacity, uint64_t stride, _Out_ uint64_t *count, _Inout_ kvt_plan_t *out, ' +
    `${ERR})`,
  `int32_t kvt_policy_open(kvt_policy_opts_t *opts, _Inout_ void **out, ${ERR})`,
  'int32_t kvt_policy_close(_Inout_ void **h)',
  'int32_t kvt_policy_insert(void *h, int64_t now, void *context, kvt_policy_object_t *rows, ' +
    `uint64_t count, uint64_t stride, ${ERR})`,
  'int32_t kvt_policy_lookup(void *h, int64_t now, void *context, void *ids, uint64_t count, ' +
    `void *found, _Out_ uint64_t *out, ${ERR})`,
  'int32_t kvt_policy_evict(void *h, int64_t now, uint64_t units, void *rows, ' +
    `uint64_t capacity, uint64_t stride, _Inout_ kvt_policy_outcome_t *out, ${ERR})`,
  `int32_t kvt_policy_switch(void *h, void *spec, uint64_t bytes, ${ERR})`,
  'int32_t kvt_policy_spec(void *h, void *out, uint64_t capacity, _Out_ uint64_t *bytes)',
];

/** The library at the path in KVTIER_LIBRARY, else the one that the loader finds. */
const shared = koffi.load(process.env.KVTIER_LIBRARY || 'libkvtier.so.0.1');
const lib = {};
for (const prototype of FUNCTIONS) {
  lib[prototype.match(/(kvt_\w+)\(/)[1]] = shared.func(prototype);
}

module.exports = { koffi, lib, make, FIELDS, TYPES, HEADER_VERSION, RELEASED, ROW_PARENT,
  POLICY_HOLES, PLAN_COST, E_INVALID, E_TOO_SMALL, E_CLOSED };
