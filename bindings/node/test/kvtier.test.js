'use strict';

const assert = require('node:assert/strict');
const crypto = require('node:crypto');
const fs = require('node:fs');
const os = require('node:os');
const path = require('node:path');
const test = require('node:test');
const abi = require('../abi');
const { open, Layout, Runtime, Policy, KvtError, TIER, LEVEL, DTYPE } = require('kvtier');

const LAYERS = 3, CHUNK = 8, HEADS = 2, RUN = 32, MAX_TOKENS = 80, TOKEN = HEADS * RUN;
const LAYOUT = { chunkTokens: CHUNK, layers: LAYERS, dtype: DTYPE.F16, kvHeads: HEADS,
  kBytes: TOKEN, vBytes: TOKEN };
const code = (wanted) => (error) => error instanceof KvtError && error.code === wanted;

/** K and V of each layer: random bytes, or zeros. */
function tensors(isRandom) {
  const make = () => Array.from({ length: LAYERS }, () => (
    isRandom ? crypto.randomBytes(MAX_TOKENS * TOKEN) : Buffer.alloc(MAX_TOKENS * TOKEN)));
  return { k: make(), v: make() };
}
/** Asserts that the first tokens of both tensors are equal. */
function assertSame(a, b, tokens) {
  for (const plane of ['k', 'v']) {
    a[plane].forEach((from, i) => assert.ok(
      from.subarray(0, tokens * TOKEN).equals(b[plane][i].subarray(0, tokens * TOKEN))));
  }
}
const sequence = (seed, count) => Array.from({ length: count }, (_, i) => seed * 1000 + i);

async function withStore(spec, body) {
  const runtime = new Runtime({ workers: 2 });
  const store = runtime.openStore(spec);
  const namespace = store.namespace({ model: 'm', salt: 's' }, LAYOUT);
  try {
    await body({ runtime, store, namespace });
  } finally {
    namespace.close();
    await store.close();
    await runtime.close();
  }
}

test('structs and constants are those of a C compiler', () => {
  const layout = path.join(__dirname, '../../../ffi-tests/abi/layout.txt');
  const rows = new Map(fs.readFileSync(layout, 'utf8').trim().split('\n')
    .map((line) => line.split(' ')).map(([name, at, size]) => [name, [Number(at), Number(size)]]));
  let known = 0;
  for (const [name, { members }] of Object.entries(abi.TYPES)) {
    assert.equal(abi.koffi.sizeof(abi.TYPES[name]), rows.get(name)[0], name);
    for (const [field, { offset, type }] of Object.entries(members)) {
      assert.deepEqual([offset, type.size], rows.get(`${name}.${field}`), `${name}.${field}`);
    }
    known += 1 + Object.keys(members).length;
  }
  for (const [name, value] of Object.entries(abi.C)) assert.equal(value, rows.get(name)[0], name);
  assert.equal(known + Object.keys(abi.C).length, rows.size - 1); // KVT_NUL_TERMINATED
});

test('durable put survives a restart', async () => {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'kvtier-node-'));
  const spec = `store(host=1MiB, disk=disk(path="${folder}/kv", bytes=16MiB, segment=1MiB))`;
  const from = tensors(true);
  for (const round of [0, 1]) {
    await withStore(spec, async ({ store, namespace }) => {
      const session = namespace.session({ name: 'a session', tenant: 3 });
      session.append(sequence(1, 64));
      assert.equal(session.length, 64);
      if (round === 0) assert.equal(await session.put({ ...from, level: LEVEL.DURABLE }), 64);
      assert.equal(namespace.reusable(sequence(1, 70)), 64);
      const plan = session.plan({ alphaNs: 1, betaNs: 1e9 });
      assert.deepEqual(plan.map(({ firstToken, tokens, kind }) => [firstToken, tokens, kind]),
        [[0, 64, 'load']]);
      const to = tensors(false);
      assert.equal(await session.get(to), 64);
      assertSame(from, to, 64);
      // Some layers and tokens, into a typed array with gaps between heads.
      const gapped = new Uint32Array(MAX_TOKENS * TOKEN);
      const view = { data: gapped, offset: 8, heads: HEADS, tokenStride: 2 * TOKEN, headStride: TOKEN };
      assert.equal(await session.get({ k: [view], v: [to.v[1]], firstLayer: 1, firstToken: CHUNK,
        tokens: 2 * CHUNK }), 16);
      const bytes = Buffer.from(gapped.buffer);
      for (let t = 0; t < 16; t++) {
        for (let h = 0; h < HEADS; h++) {
          const at = 8 + t * 2 * TOKEN + h * TOKEN;
          const want = (CHUNK + t) * TOKEN + h * RUN;
          assert.ok(bytes.subarray(at, at + RUN).equals(from.k[1].subarray(want, want + RUN)));
        }
      }
      assert.match(store.metrics(), /kvtier_/);
      session.truncate(8);
      assert.equal(session.length, 8);
      session.close();
    });
  }
  fs.rmSync(folder, { recursive: true });
});

const SMALL = 'store(host=1MiB)';

test('an opened store owns its runtime', async () => {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'kvtier-node-'));
  const spec = `store(host=1MiB, disk=disk(path="${folder}/kv", bytes=16MiB, segment=1MiB))`;
  const layout = Layout.gqa({ layers: LAYERS, kvHeads: HEADS, headDim: RUN / 2, dtype: DTYPE.F16,
    chunkTokens: CHUNK });
  const from = tensors(true), to = tensors(false);
  for (const [method, transfer] of [['put', { ...from, level: LEVEL.DURABLE }], ['get', to]]) {
    const store = open(spec);
    const session = store.namespace({ model: 'm' }, layout).session();
    session.append(sequence(1, 64));
    assert.equal(await session[method](transfer), 64);
    const last = session.get(to).catch((error) => assert.equal(error.code, 'KVT_E_CANCELLED'));
    await Promise.all([store.close(), store.close()]);
    await last;
    await assert.rejects(session.put(from), code('KVT_E_CLOSED'));
    session.close();
  }
  assertSame(from, to, 64);
  fs.rmSync(folder, { recursive: true });
  assert.throws(() => open('stroe'), code('KVT_E_SPEC'));
  const store = open(`kvtier(workers=1, store=${SMALL})`);
  assert.match(store.metrics(), /kvtier_host_limit_bytes.* 1048576/);
  await store.close();
});

test('layouts have the sizes of their shapes', () => withStore(SMALL, async ({ store }) => {
  const common = { layers: 6, dtype: DTYPE.BF16, chunkTokens: 16 };
  const latent = Layout.mla({ ...common, latentDim: 512, ropeDim: 64 });
  assert.deepEqual([latent.kBytes, latent.vBytes], [1152, 0]);
  const window = Layout.window({ ...common, kvHeads: 4, headDim: 16, windowTokens: 64, fullEvery: 3 });
  assert.deepEqual([window.kBytes, window.windowTokens, window.fullFirst], [128, 64, 2]);
  for (const layout of [latent, window, { ...window, fullFirst: 0 }]) {
    store.namespace({ model: 'm' }, layout).close();
  }
  assert.throws(() => Layout.gqa({ ...common, layers: 0, kvHeads: 1, headDim: 8 }),
    code('KVT_E_INVALID'));
  assert.throws(() => store.namespace({}, { chunkTokens: 16 }), code('KVT_E_INVALID'));
}));

test('a get of missing KV rejects and leaves memory unchanged', () => (
  withStore(SMALL, async ({ namespace }) => {
    const session = namespace.session();
    session.append(sequence(2, 16));
    const to = tensors(false);
    await assert.rejects(session.get(to),
      (error) => code('KVT_E_NOT_FOUND')(error) && error.value === 0);
    assertSame(to, tensors(false), MAX_TOKENS);
    session.close();
  })));

test('invalid arguments throw', () => withStore(SMALL, async ({ runtime, store, namespace }) => {
  assert.throws(() => runtime.openStore('stroe'),
    (error) => code('KVT_E_SPEC')(error) && error.offset === 0);
  assert.throws(() => store.setPolicy(TIER.HOST, 'lruu'), code('KVT_E_SPEC'));
  store.setPolicy(TIER.HOST, 'arc');
  assert.throws(() => namespace.reusable([-1]), code('KVT_E_INVALID'));
  const session = namespace.session();
  session.append(new Uint32Array(sequence(1, 90)));
  const { k, v } = tensors(true);
  assert.throws(() => session.put({ k, v }), code('KVT_E_INVALID')); // 90 tokens, memory for 80
  assert.throws(() => session.put({ k: [], v: [] }), code('KVT_E_INVALID'));
  assert.throws(() => session.put({ k, v: [v[0]] }), code('KVT_E_INVALID'));
  for (const view of [{ data: [1, 2] }, { data: k[0], heads: 3 }, { data: k[0], offset: -1 },
    { data: k[0], offset: 0.5 }, { data: k[0], heads: 0 }]) {
    assert.throws(() => session.put({ k: [view], tokens: 1 }), code('KVT_E_INVALID'));
  }
  // A stride of 0 means no gaps. C would truncate 0.5 to 0.
  for (const tokenStride of [0, 0.5]) {
    const data = Buffer.alloc(TOKEN);
    assert.throws(() => session.get({ k: [{ data, tokenStride }], v: [{ data, tokenStride }],
      tokens: 8 }), code('KVT_E_INVALID'));
  }
  assert.throws(() => session.put({ k: [{ data: Buffer.alloc(TOKEN), heads: 2, headStride: 0.5 }],
    tokens: 1 }), code('KVT_E_INVALID'));
  session.close();
  session.close();
  assert.throws(() => session.append([1]), code('KVT_E_HANDLE'));
  assert.throws(() => session.put({ k, v, tokens: 8 }), code('KVT_E_HANDLE'));
}));

test('transfers keep their memory alive', () => (
  withStore('store(host=32MiB)', async ({ namespace }) => {
    const collect = setInterval(() => globalThis.gc?.(), 2); // with --expose-gc
    const transfers = Array.from({ length: 400 }, async (_, i) => {
      const tokens = CHUNK * (1 + i % 10);
      const session = namespace.session({ tenant: i % 5 });
      session.append(sequence(i + 10, tokens));
      const from = tensors(true);
      assert.equal(await session.put({ k: from.k.map((b) => Buffer.from(b)),
        v: from.v.map((b) => Buffer.from(b)) }), tokens);
      const to = tensors(false);
      assert.equal(await session.get(to), tokens);
      assertSame(from, to, tokens);
      session.close();
    });
    await Promise.all(transfers);
    clearInterval(collect);
  })));

test('transfers do not block the event loop', () => withStore(SMALL, async ({ namespace }) => {
  const session = namespace.session();
  session.append(sequence(1, MAX_TOKENS));
  let ticks = 0;
  const timer = setInterval(() => { ticks++; }, 1);
  // Timers run only while puts are awaited. If puts blocked the main thread, none would run.
  const end = Date.now() + 600_000;
  for (let i = 0; i < 50 || ticks <= 3; i++) {
    assert.ok(Date.now() < end);
    await session.put(tensors(true));
  }
  clearInterval(timer);
  session.close();
}));

test('an abort signal cancels a transfer', () => (
  withStore('store(host=8MiB)', async ({ namespace }) => {
    for (let i = 0; i < 100; i++) {
      const session = namespace.session();
      session.append(sequence(i, MAX_TOKENS));
      const stop = new AbortController();
      const put = session.put({ ...tensors(true), signal: stop.signal });
      stop.abort();
      await put.catch((error) => assert.equal(error.name, 'AbortError'));
      await assert.rejects(session.put({ ...tensors(true), signal: stop.signal }),
        { name: 'AbortError' });
      session.close();
    }
  })));

test('closing settles every promise', async () => {
  for (let i = 0; i < 10; i++) {
    const runtime = new Runtime({ workers: 2 });
    const store = runtime.openStore('store(host=8MiB)');
    const namespace = store.namespace({}, LAYOUT);
    const session = namespace.session();
    session.append(sequence(i, MAX_TOKENS));
    const transfers = Array.from({ length: 8 }, () => session.put(tensors(true)));
    const closes = i % 2 === 0 ? [runtime.close(), store.close()]
      : [store.close(), runtime.close(), runtime.close()];
    const results = await Promise.allSettled(transfers);
    for (const result of results) {
      if (result.status === 'rejected') assert.match(result.reason.code, /CANCELLED|CLOSED/);
    }
    await Promise.all(closes);
    session.close();
    namespace.close();
  }
});

test('transfers are rejected once the runtime closes', async () => {
  const runtime = new Runtime({ workers: 2 });
  const store = runtime.openStore('store(host=8MiB)');
  const namespace = store.namespace({}, LAYOUT);
  const session = namespace.session();
  session.append(sequence(7, MAX_TOKENS));
  // Submitted when the last transfer in flight ends, before `close` continues.
  const last = session.put(tensors(true)).catch(() => 0).then(() => session.put(tensors(true)));
  const closed = runtime.close();
  await assert.rejects(session.put(tensors(true)), code('KVT_E_CLOSED'));
  await assert.rejects(last, code('KVT_E_CLOSED'));
  await closed;
  session.close();
  namespace.close();
  await store.close();
});

test('a policy evicts, and switches to another one', () => {
  const policy = new Policy('lru', { capacity: 100 });
  for (const id of [1, 2, 3, 4, 5]) policy.insert([{ id }], id);
  policy.insert([{ id: 6n, units: 2, parent: 5 }], 6);
  assert.throws(() => policy.insert([{ id: 6 }], 7), code('KVT_E_INVALID'));
  assert.equal(policy.lookup([1, 2, 99], 8), 2);
  assert.deepEqual(policy.evict(3, { now: 9 }),
    { victims: [{ id: 3, units: 1 }, { id: 6, units: 2 }], short: 0 });
  policy.switchTo('qos(inner=s3fifo)');
  assert.match(policy.spec, /^qos/);
  const rest = policy.evict(100, { now: 10 });
  assert.equal(rest.victims.length, 4);
  assert.equal(rest.short, 96);
  assert.throws(() => policy.switchTo('arcc'), code('KVT_E_SPEC'));
  policy.close();
  policy.close();
  assert.throws(() => policy.switchTo('arc'), code('KVT_E_HANDLE'));
});
