'use strict';
// kvtier for Node.js: classes over the C interface. Close every object with `close`, in any order.
// Transfers return promises. A promise keeps the transfer's memory alive, and resolves when the library
// has released it.

const { koffi, lib, make, C, TYPES } = require('./abi');
const { KvtError, check, invalid, takeDetails } = require('./errors');
const { Policy } = require('./policy');

/** The constants `KVT_NAME_*` of C, by the rest of their names. */
const namesOf = (name) => Object.freeze(Object.fromEntries(Object.entries(C)
  .filter(([key]) => key.startsWith(`KVT_${name}_`))
  .map(([key, value]) => [key.slice(`KVT_${name}_`.length), value])));
const TIER = namesOf('TIER'), LEVEL = namesOf('LEVEL'), DTYPE = namesOf('DTYPE');
const STEP_KINDS = new Map([[C.KVT_PLAN_RESIDENT, 'resident'], [C.KVT_PLAN_LOAD, 'load'],
  [C.KVT_PLAN_RECOMPUTE, 'recompute']]);
const COMPLETIONS = 64; // read at once

const bytesOf = (text) => Buffer.from(text, 'utf8');
/** Sets a field of an identity. `undefined` is absent, which differs from empty. */
function setField(into, name, text) {
  if (text === undefined) return;
  const bytes = bytesOf(text);
  into[name] = bytes.length > 0 ? bytes : Buffer.alloc(1);
  into[`${name}_bytes`] = bytes.length;
}
/** Tokens as a Uint32Array. */
function tokensOf(tokens) {
  if (tokens instanceof Uint32Array) return tokens;
  for (const t of tokens) {
    if (!Number.isInteger(t) || t < 0 || t > 0xffffffff) {
      throw invalid('tokens', `${t} is no token: tokens are integers from 0 to 4294967295`);
    }
  }
  return Uint32Array.from(tokens);
}

/** Throws if the library is of another version than the declarations. */
function checkAbi() {
  const err = [null];
  check('abi', lib.kvt_abi_check(C.KVT_HEADER_VERSION, err), err);
}

/** The fields of a layout, by their names in C. */
const LAYOUT_FIELDS = { chunkTokens: 'chunk_tokens', layers: 'layers', dtype: 'dtype',
  kvHeads: 'kv_heads', windowTokens: 'window_tokens', fullEvery: 'full_every',
  fullFirst: 'full_first', kBytes: 'k_bytes', vBytes: 'v_bytes' };

function layoutForC(layout) {
  return make('kvt_layout_t', Object.fromEntries(Object.entries(LAYOUT_FIELDS)
    .map(([ours, theirs]) => [theirs, layout[ours] ?? 0])));
}
function layoutOf(native, ...numbers) {
  const c = make('kvt_layout_t'), err = [null];
  check('layout', native(c, ...numbers, err), err);
  return Object.fromEntries(Object.entries(LAYOUT_FIELDS)
    .map(([ours, theirs]) => [ours, Number(c[theirs])]));
}

/** Layouts of models whose layers are alike. `dtype` is a `DTYPE`. */
const Layout = {
  /** Grouped-query, multi-query or multi-head attention: K and V by head. */
  gqa: ({ layers, kvHeads, headDim, dtype, chunkTokens }) => (
    layoutOf(lib.kvt_layout_gqa, layers, kvHeads, headDim, dtype, chunkTokens)),
  /** Latent attention (MLA): one plane, K, of the latent and the rotated part of the key. */
  mla: ({ layers, latentDim, ropeDim, dtype, chunkTokens }) => (
    layoutOf(lib.kvt_layout_mla, layers, latentDim, ropeDim, dtype, chunkTokens)),
  /** Layers that attend to the last `windowTokens` tokens only, except each fullEvery-th: 6 for
   *  Gemma 3, 2 for gpt-oss, 0 = none. `fullFirst` of the result is the first one. */
  window: ({ layers, kvHeads, headDim, dtype, chunkTokens, windowTokens, fullEvery = 0 }) => (
    layoutOf(lib.kvt_layout_window, layers, kvHeads, headDim, dtype, chunkTokens, windowTokens,
      fullEvery)),
};

/** Owns the library's threads, and the completion queue of all transfers. */
class Runtime {
  constructor({ workers = 0 } = {}) {
    const err = [null];
    checkAbi();
    this.raw = [null];
    check('runtime', lib.kvt_runtime_open(make('kvt_runtime_opts_t', { workers }), this.raw, err),
      err);
    this._begin((raw) => {
      const failed = [null];
      check('close', lib.kvt_runtime_close(raw, 0, make('kvt_close_report_t'), failed), failed);
    });
  }

  /** The runtime of a store of `open`. `closeStore` closes both. */
  static _of(store, closeStore) {
    const runtime = Object.create(Runtime.prototype);
    runtime.raw = [null];
    check('open', lib.kvt_store_runtime(store[0], runtime.raw));
    runtime._begin(closeStore);
    return runtime;
  }

  /** Opens the queue. `end` closes the runtime. */
  _begin(end) {
    this._end = end;
    this._queue = [null];
    this._pending = new Map(); // transfers in flight by tag, with their memory
    this._nextTag = 1;
    this._isWaiting = false;
    this._isClosing = false;
    this._onIdle = []; // resolve functions, called when no transfer is in flight
    this._lost = []; // transfers whose end is unknown, with their memory
    const err = [null];
    const status = lib.kvt_queue_open(this.raw[0], make('kvt_queue_opts_t', { capacity: 65536 }),
      this._queue, err);
    if (status !== 0) {
      end(this.raw);
      check('queue', status, err);
    }
  }

  /** Opens a store by its spec, such as `store(host=8GiB, disk=disk(path="kv", bytes=1TiB))`. */
  openStore(spec = 'store') { return new Store(this, spec); }

  /** Submits a transfer by `begin`; `memory` is kept alive until its release. */
  _submit(call, begin, memory, signal) {
    if (signal?.aborted) return Promise.reject(signal.reason);
    const tag = this._nextTag++;
    const opts = make('kvt_submit_opts_t', { queue: this._queue[0], tag, notify: C.KVT_OP_RELEASED });
    const op = [null];
    const err = [null];
    check(call, begin(opts, op, err), err);
    return new Promise((resolve, reject) => {
      const cancel = () => lib.kvt_op_cancel(op[0]);
      signal?.addEventListener('abort', cancel, { once: true });
      this._pending.set(tag, { op, memory, fail: reject, complete: (completion) => {
        signal?.removeEventListener('abort', cancel);
        const failed = completion.status !== 0 ? [null] : null;
        if (failed) lib.kvt_op_error(op[0], failed);
        lib.kvt_op_free(op);
        if (!failed) return resolve(Number(completion.value));
        const error = new KvtError(call, completion.status, takeDetails(failed));
        error.value = Number(completion.value);
        return reject(signal?.aborted && error.code === 'KVT_E_CANCELLED' ? signal.reason : error);
      } });
      this._wait();
    });
  }

  /** Lets one thread of koffi wait for completions, as long as transfers are in flight. */
  _wait() {
    if (this._isWaiting || this._pending.size === 0) return;
    this._isWaiting = true;
    const size = koffi.sizeof(TYPES.kvt_completion_t);
    const rows = Buffer.alloc(size * COMPLETIONS);
    const count = [0];
    lib.kvt_queue_wait.async(this._queue[0], 0, rows, COMPLETIONS, size, count, (failure, status) => {
      this._isWaiting = false;
      if (failure || status !== 0) {
        // It is unknown when the library releases the memory: keep it alive forever.
        this._lost.push(...this._pending.values());
        this._pending.clear();
        for (const transfer of this._lost) transfer.fail(failure || new KvtError('wait', status));
        for (const resolve of this._onIdle.splice(0)) resolve();
        return;
      }
      for (let i = 0; i < Number(count[0]); i++) {
        const completion = koffi.decode(rows, i * size, 'kvt_completion_t');
        const tag = Number(completion.tag);
        const transfer = this._pending.get(tag);
        this._pending.delete(tag);
        transfer.complete(completion);
      }
      if (this._pending.size === 0) for (const resolve of this._onIdle.splice(0)) resolve();
      this._wait();
    });
  }

  /** Cancels transfers in flight, waits for them, and ends the threads. */
  async close() {
    if (this.raw[0] === null) return;
    this._isClosing = true;
    for (const transfer of this._pending.values()) lib.kvt_op_cancel(transfer.op[0]);
    if (this._pending.size > 0) await new Promise((resolve) => this._onIdle.push(resolve));
    if (this.raw[0] === null) return; // another call has closed it meanwhile
    const err = [null];
    check('queue close', lib.kvt_queue_close(this._queue, 0, err), err);
    await this._end(this.raw);
  }
}

/** A store: keeps KV in tiers. */
class Store {
  constructor(runtime, spec) {
    const text = bytesOf(spec);
    const err = [null];
    this.raw = [null];
    this._runtime = runtime;
    check('store', lib.kvt_store_open(runtime.raw[0], null,
      make('kvt_store_opts_t', { spec: text, spec_bytes: text.length }), this.raw, err), err);
  }

  static _open(spec) {
    checkAbi();
    const text = spec === undefined ? null : bytesOf(spec);
    const err = [null];
    const store = Object.create(Store.prototype);
    store.raw = [null];
    check('open', lib.kvt_open(text, text?.length ?? 0, store.raw, err), err);
    store._runtime = Runtime._of(store.raw, (raw) => {
      raw[0] = null;
      return store._closeRaw();
    });
    store._ownsRuntime = true;
    return store;
  }

  /** Opens a namespace. The identity is `{model, weights, lora, salt, recipe}`. The layout is that of
   *  `Layout`, or `{chunkTokens, layers, dtype, kvHeads, kBytes, vBytes}` with bytes per token and
   *  layer. */
  namespace(identity, layout) { return new Namespace(this, identity, layout); }

  /** Switches the eviction policy of TIER.HOST or TIER.DISK. */
  setPolicy(tier, spec) {
    const text = bytesOf(spec);
    const err = [null];
    check('set policy', lib.kvt_store_set_policy(this.raw[0], tier, text, text.length, err), err);
  }

  /** The statistics of the store as Prometheus text. */
  metrics() {
    for (let capacity = 1 << 16; ; capacity *= 2) {
      const to = Buffer.alloc(capacity);
      const bytes = [0];
      const status = lib.kvt_store_metrics(this.raw[0], to, capacity, bytes);
      if (status === C.KVT_E_TOO_SMALL) continue;
      check('metrics', status);
      return to.toString('utf8', 0, Number(bytes[0]));
    }
  }

  /** Closes the store. Waits on another thread until KV in memory is written to disk. A store of
   *  `open` first cancels its transfers, and also closes its runtime. */
  close() { return this._ownsRuntime ? this._runtime.close() : this._closeRaw(); }

  _closeRaw() {
    if (this.raw[0] === null) return Promise.resolve();
    const raw = [this.raw[0]];
    this.raw[0] = null;
    const err = [null];
    return new Promise((resolve, reject) => {
      lib.kvt_store_close.async(raw, 0, err, (failure, status) => {
        if (failure) return reject(failure);
        // The disk failed, and the store is closed nevertheless: a second call frees its handle and runtime.
        if (status === C.KVT_E_IO) lib.kvt_store_close(raw, 0, null);
        try {
          check('store close', status, err);
          return resolve();
        } catch (error) {
          return reject(error);
        }
      });
    });
  }
}

/** A namespace, the unit of sharing: its sessions share the KV of common prefixes. */
class Namespace {
  constructor(store, identity, layout) {
    const fields = make('kvt_identity_t');
    for (const name of ['model', 'weights', 'lora', 'salt', 'recipe']) {
      setField(fields, name, identity[name]);
    }
    const err = [null];
    this.raw = [null];
    this._runtime = store._runtime;
    this.tokenBytes = { k: layout.kBytes, v: layout.vBytes ?? 0 };
    check('namespace', lib.kvt_namespace_open(store.raw[0], fields, layoutForC(layout), 0, this.raw,
      err), err);
  }

  /** The number of leading tokens of a sequence whose KV can be reused. References nothing: chunks may
   *  be evicted before the next call. */
  reusable(tokens) {
    const list = tokensOf(tokens);
    const totals = make('kvt_lookup_t');
    const err = [null];
    check('lookup', lib.kvt_namespace_lookup(this.raw[0], list, list.length, null, 0, 0, null, totals,
      err), err);
    return Number(totals.reusable_tokens);
  }

  /** Opens a session without tokens. Name and tenant are for statistics. */
  session({ name = '', tenant = 0 } = {}) { return new Session(this, name, tenant); }

  close() { check('namespace close', lib.kvt_namespace_close(this.raw)); }
}

/** A sequence of tokens in a namespace. While it is open, its chunks stay in at least one tier. */
class Session {
  constructor(namespace, name, tenant) {
    const text = bytesOf(name);
    const err = [null];
    this.raw = [null];
    this._runtime = namespace._runtime;
    this._tokenBytes = namespace.tokenBytes;
    check('session', lib.kvt_session_open(namespace.raw[0],
      make('kvt_session_opts_t', { name: text.length > 0 ? text : null, name_bytes: text.length,
        tenant }), this.raw, err), err);
  }

  /** Appends tokens. */
  append(tokens) {
    const list = tokensOf(tokens);
    const err = [null];
    check('append', lib.kvt_session_append(this.raw[0], list, list.length, err), err);
  }

  /** Truncates the session to its first `tokens` tokens. */
  truncate(tokens) {
    const err = [null];
    check('truncate', lib.kvt_session_truncate(this.raw[0], tokens, err), err);
  }

  /** The number of tokens. */
  get length() {
    const info = make('kvt_session_info_t');
    check('info', lib.kvt_session_info(this.raw[0], info));
    return Number(info.tokens);
  }

  /** Computes the cheapest way to get the KV of all tokens, as steps `{firstToken, tokens, kind,
   *  predictedNs}`. `cost` is the cost of prefill, `{alphaNs, betaNs}`; default: the observed one. */
  plan(cost) {
    const terms = make('kvt_plan_terms_t', cost
      ? { flags: C.KVT_PLAN_COST, alpha_ns: cost.alphaNs, beta_ns: cost.betaNs } : {});
    const size = koffi.sizeof(TYPES.kvt_plan_step_t);
    for (let capacity = 16; ;) {
      const rows = Buffer.alloc(size * capacity);
      const count = [0];
      const totals = make('kvt_plan_t');
      const err = [null];
      const status = lib.kvt_session_plan(this.raw[0], terms, rows, capacity, size, count, totals, err);
      if (status === C.KVT_E_TOO_SMALL) {
        takeDetails(err); // frees the error
        capacity = Number(count[0]);
        continue;
      }
      check('plan', status, err);
      const steps = [];
      for (let i = 0; i < Number(count[0]); i++) {
        const r = koffi.decode(rows, i * size, 'kvt_plan_step_t');
        steps.push({ firstToken: Number(r.first_token), tokens: Number(r.tokens),
          kind: STEP_KINDS.get(r.kind), predictedNs: Number(r.predicted_ns) });
      }
      return steps;
    }
  }

  /** Submits a put. The promise resolves to the number of tokens, from the first on, that were stored
   *  without a gap.
   *
   *  `k` and `v` have a view per layer: a Buffer or typed array, or `{data, offset, heads, tokenStride,
   *  headStride}` in bytes. Do not write to them until the promise has settled. */
  put(transfer) { return this._transfer('put', lib.kvt_session_put, transfer); }

  /** Submits a get. Do not touch the memory until the promise has settled. If KV is missing, the
   *  promise rejects with KVT_E_NOT_FOUND; the rest has arrived. */
  get(transfer) { return this._transfer('get', lib.kvt_session_get, transfer); }

  _transfer(call, native, { k, v = [], firstToken = 0, tokens = 0, firstLayer = 0, level = LEVEL.RAM,
    signal } = {}) {
    if (!Array.isArray(k) || k.length === 0 || (v.length !== 0 && v.length !== k.length)) {
      throw invalid(call, `the transfer has ${k?.length ?? 0} views of K and ${v.length} of V: ` +
        'pass arrays with one view per layer, or none of V');
    }
    // Only closing the queue would wait for a later transfer, which blocks the event loop.
    if (this._runtime._isClosing) return Promise.reject(new KvtError(call, C.KVT_E_CLOSED));
    const count = tokens || this.length - firstToken;
    const memory = [];
    const lower = (bytes) => (view) => viewOf(call, view, bytes, count, memory);
    const rows = k.map(lower(this._tokenBytes.k));
    const values = v.map(lower(this._tokenBytes.v));
    const c = make('kvt_transfer_t', { first_token: firstToken, tokens: count, first_layer: firstLayer,
      layers: rows.length, k: rows, v: values.length > 0 ? values : null,
      stride_bytes: koffi.sizeof(TYPES.kvt_view_t), level });
    return this._runtime._submit(call, (opts, op, err) => native(this.raw[0], c, opts, op, err),
      memory, signal);
  }

  close() { check('session close', lib.kvt_session_close(this.raw)); }
}

/** Converts a view for C. Rejects views that exceed their array. Adds the array to `memory`, which
 *  keeps it alive. */
function viewOf(call, view, tokenBytes, tokens, memory) {
  const given = ArrayBuffer.isView(view) ? { data: view } : view;
  const { data, offset = 0, heads = 1 } = given;
  if (!ArrayBuffer.isView(data)) {
    throw invalid(call, 'the data of a view is no memory: pass a Buffer or a typed array');
  }
  const run = tokenBytes / heads;
  // A stride of 0 means no gaps, as in C.
  const tokenStride = given.tokenStride || tokenBytes, headStride = given.headStride || run;
  const end = offset + (tokens - 1) * tokenStride + (heads - 1) * headStride + run;
  // C would truncate a number that is no integer, and access other memory than was checked here.
  if (![run, tokens, heads, offset, tokenStride, headStride].every(Number.isSafeInteger) ||
      run <= 0 || tokens <= 0 || heads <= 0 || offset < 0 || tokenStride < 0 || headStride < 0 ||
      !(end <= data.byteLength)) {
    throw invalid(call, `a view of ${tokens} tokens does not fit its array of ${data.byteLength} ` +
      'bytes: check offset, heads and the strides, which must be integers');
  }
  // Reading `buffer` moves the data of a small array out of the heap, where it could be relocated.
  memory.push(data, data.buffer);
  return make('kvt_view_t', { address: koffi.address(data) + BigInt(offset), run_bytes: run, heads,
    token_stride_bytes: tokenStride, head_stride_bytes: headStride });
}

/** Opens a store with a runtime and a budget of its own, which `close` closes, too. The spec is
 *  "store(...)", or "kvtier(workers=4, budget=budget(host=8GiB), store=store(...))" with parameters of
 *  the runtime and the budget; `undefined` is "store(host=1GiB)". */
function open(spec) { return Store._open(spec); }

module.exports = { open, Layout, Runtime, Store, Namespace, Session, Policy, KvtError, TIER, LEVEL, DTYPE };
