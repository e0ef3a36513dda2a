'use strict';
// kvtier for Node.js: classes over the C interface. What is opened is closed by `close`, in any order.
// Moves are promises: they resolve when the library has let go of their memory, and until then hold it.

const { koffi, lib, make, TYPES, HEADER_VERSION, RELEASED, PLAN_COST } = require('./abi');
const { KvtError, check, invalid, wordsOf } = require('./errors');
const { Policy } = require('./policy');

const TIER = Object.freeze({ HOST: 1, DISK: 2 });
const LEVEL = Object.freeze({ RAM: 0, DISK: 1, DURABLE: 2 });
const DTYPE = Object.freeze({ BYTES: 0, F32: 1, F16: 2, BF16: 3 });
const STEP_KINDS = ['resident', 'load', 'recompute'];
const COMPLETIONS = 64;
const CLOSED = -9; // KVT_E_CLOSED

const bytesOf = (text) => Buffer.from(text, 'utf8');
/** A field of an identity: absent, or there and perhaps empty. */
function field(into, name, text) {
  if (text === undefined) return;
  const bytes = bytesOf(text);
  into[name] = bytes.length > 0 ? bytes : Buffer.alloc(1);
  into[`${name}_bytes`] = bytes.length;
}
function tokensOf(tokens) {
  if (tokens instanceof Uint32Array) return tokens;
  for (const t of tokens) {
    if (!Number.isInteger(t) || t < 0 || t > 0xffffffff) throw invalid('tokens', `${t} is no token`);
  }
  return Uint32Array.from(tokens);
}

/** Owns the library's threads, and a queue on which moves come to their end. */
class Runtime {
  constructor({ workers = 0 } = {}) {
    const err = [null];
    check('abi', lib.kvt_abi_check(HEADER_VERSION, err), err);
    const out = [null];
    check('runtime', lib.kvt_runtime_open(make('kvt_runtime_opts_t', { workers }), out, err), err);
    this.raw = out;
    this._queue = [null];
    this._pending = new Map(); // by tag: what is under way, and its memory
    this._nextTag = 1;
    this._isWaiting = false;
    this._isClosing = false;
    this._idle = [];
    this._lost = [];
    const status = lib.kvt_queue_open(this.raw[0], make('kvt_queue_opts_t', { capacity: 65536 }),
      this._queue, err);
    if (status !== 0) {
      lib.kvt_runtime_close(this.raw, 0, make('kvt_close_report_t'), [null]);
      check('queue', status, err);
    }
  }

  /** A store by its spec, such as `store(host=8GiB, disk=disk(path="kv", bytes=1TiB))`. */
  openStore(spec = 'store') { return new Store(this, spec); }

  /** Begins a move; `memory` is held until its release. */
  _submit(call, begin, memory, signal) {
    // Nobody would wait for it but the queue's close, which holds the event loop up.
    if (this._isClosing) return Promise.reject(new KvtError(call, CLOSED));
    if (signal?.aborted) return Promise.reject(signal.reason);
    const tag = this._nextTag++;
    const opts = make('kvt_submit_opts_t', { queue: this._queue[0], tag, notify: RELEASED });
    const op = [null];
    const err = [null];
    check(call, begin(opts, op, err), err);
    return new Promise((resolve, reject) => {
      const cancel = () => lib.kvt_op_cancel(op[0]);
      signal?.addEventListener('abort', cancel, { once: true });
      this._pending.set(tag, { op, memory, fail: reject, done: (completion) => {
        signal?.removeEventListener('abort', cancel);
        const failed = completion.status !== 0 ? [null] : null;
        if (failed) lib.kvt_op_error(op[0], failed);
        lib.kvt_op_free(op);
        if (!failed) return resolve(Number(completion.value));
        const error = new KvtError(call, completion.status, wordsOf(failed));
        error.value = Number(completion.value);
        return reject(signal?.aborted && error.code === 'KVT_E_CANCELLED' ? signal.reason : error);
      } });
      this._wait();
    });
  }

  /** One thread of koffi's waits for all moves, only while there are any; this one goes on. */
  _wait() {
    if (this._isWaiting || this._pending.size === 0) return;
    this._isWaiting = true;
    const size = koffi.sizeof(TYPES.kvt_completion_t);
    const rows = Buffer.alloc(size * COMPLETIONS);
    const count = new BigUint64Array(8);
    lib.kvt_queue_wait.async(this._queue[0], 0, rows, COMPLETIONS, size, count, (failure, status) => {
      this._isWaiting = false;
      if (failure || status !== 0) {
        // Nobody can say when the memory is free: it is held for ever.
        this._lost.push(...this._pending.values());
        this._pending.clear();
        for (const one of this._lost) one.fail(failure || new KvtError('wait', status));
        for (const resolve of this._idle.splice(0)) resolve();
        return;
      }
      for (let i = 0; i < Number(count[0]); i++) {
        const completion = koffi.decode(rows, i * size, 'kvt_completion_t');
        const tag = Number(completion.tag);
        const one = this._pending.get(tag);
        this._pending.delete(tag);
        one.done(completion);
      }
      if (this._pending.size === 0) for (const resolve of this._idle.splice(0)) resolve();
      this._wait();
    });
  }

  /** Cancels what is under way, waits for it, and ends the threads. */
  async close() {
    if (this.raw[0] === null) return;
    this._isClosing = true;
    for (const one of this._pending.values()) lib.kvt_op_cancel(one.op[0]);
    if (this._pending.size > 0) await new Promise((resolve) => this._idle.push(resolve));
    if (this.raw[0] === null) return; // somebody else has closed it meanwhile
    const err = [null];
    check('queue close', lib.kvt_queue_close(this._queue, 0, err), err);
    check('close', lib.kvt_runtime_close(this.raw, 0, make('kvt_close_report_t'), err), err);
  }
}

/** KV in tiers. */
class Store {
  constructor(runtime, spec) {
    const text = bytesOf(spec);
    const err = [null];
    this.raw = [null];
    this._runtime = runtime;
    check('store', lib.kvt_store_open(runtime.raw[0], null,
      make('kvt_store_opts_t', { spec: text, spec_bytes: text.length }), this.raw, err), err);
  }

  /** Who may share: `{model, weights, salt, recipe}`, and what a token has:
   *  `{chunkTokens, layers, dtype, kvHeads, kBytes, vBytes}`. */
  namespace(identity, layout) { return new Namespace(this, identity, layout); }

  setPolicy(tier, spec) {
    const text = bytesOf(spec);
    const err = [null];
    check('set policy', lib.kvt_store_set_policy(this.raw[0], tier, text, text.length, err), err);
  }

  /** The text that Prometheus reads. */
  metrics() {
    for (let room = 1 << 16; ; room *= 2) {
      const to = Buffer.alloc(room);
      const bytes = [0];
      const status = lib.kvt_store_metrics(this.raw[0], to, room, bytes);
      if (status === -4) continue; // KVT_E_TOO_SMALL
      check('metrics', status);
      return to.toString('utf8', 0, Number(bytes[0]));
    }
  }

  /** Waits, off this thread, until what was given is written. */
  close() {
    if (this.raw[0] === null) return Promise.resolve();
    const raw = [this.raw[0]];
    this.raw[0] = null;
    const err = [null];
    return new Promise((resolve, reject) => {
      lib.kvt_store_close.async(raw, 0, err, (failure, status) => {
        if (failure) return reject(failure);
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

/** Who may share. */
class Namespace {
  constructor(store, identity, { chunkTokens, layers, dtype = DTYPE.BYTES, kvHeads = 0, kBytes,
    vBytes = 0 }) {
    const who = make('kvt_identity_t');
    for (const name of ['model', 'weights', 'lora', 'salt', 'recipe']) field(who, name, identity[name]);
    const numbers = Uint16Array.from({ length: layers }, (_, i) => i);
    const group = make('kvt_group_t', { dtype, kv_heads: kvHeads, k_bytes: kBytes, v_bytes: vBytes,
      layers: numbers, layer_count: layers });
    const what = make('kvt_layout_t', { chunk_tokens: chunkTokens, groups: [group], group_count: 1,
      stride_bytes: koffi.sizeof(TYPES.kvt_group_t) });
    const err = [null];
    this.raw = [null];
    this._runtime = store._runtime;
    this.tokenBytes = { k: kBytes, v: vBytes };
    check('namespace', lib.kvt_namespace_open(store.raw[0], who, what, 0, this.raw, err), err);
  }

  /** How many tokens of a sequence could be gone on from. Nothing is held. */
  reusable(tokens) {
    const list = tokensOf(tokens);
    const sum = make('kvt_lookup_t');
    const err = [null];
    check('lookup', lib.kvt_namespace_lookup(this.raw[0], list, list.length, null, 0, 0, null, sum,
      err), err);
    return Number(sum.reusable_tokens);
  }

  session({ name = '', tenant = 0 } = {}) { return new Session(this, name, tenant); }

  close() { check('namespace close', lib.kvt_namespace_close(this.raw)); }
}

/** A sequence of tokens whose KV is kept. */
class Session {
  constructor(space, name, tenant) {
    const text = bytesOf(name);
    const err = [null];
    this.raw = [null];
    this._runtime = space._runtime;
    this._tokenBytes = space.tokenBytes;
    check('session', lib.kvt_session_open(space.raw[0],
      make('kvt_session_opts_t', { name: text.length > 0 ? text : null, name_bytes: text.length,
        tenant }), this.raw, err), err);
  }

  append(tokens) {
    const list = tokensOf(tokens);
    const err = [null];
    check('append', lib.kvt_session_append(this.raw[0], list, list.length, err), err);
  }

  truncate(tokens) {
    const err = [null];
    check('truncate', lib.kvt_session_truncate(this.raw[0], tokens, err), err);
  }

  get length() {
    const info = make('kvt_session_info_t');
    check('info', lib.kvt_session_info(this.raw[0], info));
    return Number(info.tokens);
  }

  /** The cheapest way to have all of it; `cost` is `{alphaNs, betaNs}`, else what was observed. */
  plan(cost) {
    const terms = make('kvt_plan_terms_t', cost
      ? { flags: PLAN_COST, alpha_ns: cost.alphaNs, beta_ns: cost.betaNs } : {});
    const size = koffi.sizeof(TYPES.kvt_plan_step_t);
    for (let room = 16; ;) {
      const rows = Buffer.alloc(size * room);
      const count = [0];
      const sum = make('kvt_plan_t');
      const err = [null];
      const status = lib.kvt_session_plan(this.raw[0], terms, rows, room, size, count, sum, err);
      if (status === -4) { // KVT_E_TOO_SMALL
        wordsOf(err);
        room = Number(count[0]);
        continue;
      }
      check('plan', status, err);
      const steps = [];
      for (let i = 0; i < Number(count[0]); i++) {
        const r = koffi.decode(rows, i * size, 'kvt_plan_step_t');
        steps.push({ firstToken: Number(r.first_token), tokens: Number(r.tokens),
          kind: STEP_KINDS[r.kind], predictedNs: Number(r.predicted_ns) });
      }
      return steps;
    }
  }

  /** Stores. A promise of how many tokens from the first on are there without a gap.
   *
   *  `k` and `v` have a view for each layer: a Buffer or typed array, or `{data, offset, heads,
   *  tokenStride, headStride}` in bytes. They must not be written until the promise has ended. */
  put(move) { return this._move('put', lib.kvt_session_put, move); }

  /** Loads, into memory that must not be read before the promise has ended. Where something is
   *  missing it fails with KVT_E_NOT_FOUND; the rest came. */
  get(move) { return this._move('get', lib.kvt_session_get, move); }

  _move(call, native, { k, v = [], firstToken = 0, tokens = 0, firstLayer = 0, level = LEVEL.RAM,
    signal } = {}) {
    if (!Array.isArray(k) || k.length === 0 || (v.length !== 0 && v.length !== k.length)) {
      throw invalid(call, 'a view for each layer');
    }
    const count = tokens || this.length - firstToken;
    const memory = { held: [] };
    const lower = (bytes) => (view) => viewOf(call, view, bytes, count, memory.held);
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

/** C's view of memory, which never leads out of it. `held` keeps that memory where it is. */
function viewOf(call, view, tokenBytes, tokens, held) {
  const given = ArrayBuffer.isView(view) ? { data: view } : view;
  const { data, offset = 0, heads = 1 } = given;
  if (!ArrayBuffer.isView(data)) throw invalid(call, 'a view of a Buffer or a typed array');
  const run = tokenBytes / heads;
  // 0 is without gaps, as in C.
  const tokenStride = given.tokenStride || tokenBytes, headStride = given.headStride || run;
  const end = offset + (tokens - 1) * tokenStride + (heads - 1) * headStride + run;
  // C would cut what is no integer, and read elsewhere than was looked at here.
  if (![run, tokens, heads, offset, tokenStride, headStride].every(Number.isSafeInteger) ||
      run <= 0 || tokens <= 0 || heads <= 0 || offset < 0 || tokenStride < 0 || headStride < 0 ||
      !(end <= data.byteLength)) {
    throw invalid(call, `a view of ${tokens} tokens that leads out of ${data.byteLength} bytes`);
  }
  held.push(data, data.buffer); // asked for its buffer, a small array leaves the moving heap
  return make('kvt_view_t', { address: koffi.address(data) + BigInt(offset), run_bytes: run, heads,
    token_stride_bytes: tokenStride, head_stride_bytes: headStride });
}

module.exports = { Runtime, Store, Namespace, Session, Policy, KvtError, TIER, LEVEL, DTYPE };
