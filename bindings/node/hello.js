'use strict';
// KV that survives a restart. Run it twice: the first run stores the KV of a prompt, the second one loads it.
const { open, Layout, DTYPE, LEVEL } = require('kvtier');

const LAYERS = 4, HEADS = 2, DIM = 64, TOKENS = 96;
const planes = () => Array.from({ length: LAYERS }, () => new Uint16Array(TOKENS * HEADS * DIM));
const k = planes(), v = planes(); // the engine's tensors of each layer

async function main() {
  const store = open('store(host=64MiB, disk=disk(path="hello-kv", bytes=256MiB))');
  const layout = Layout.gqa({ layers: LAYERS, kvHeads: HEADS, headDim: DIM, dtype: DTYPE.F16, chunkTokens: 32 });
  const namespace = store.namespace({ model: 'hello', weights: 'v1' }, layout);
  const session = namespace.session();
  session.append(Uint32Array.from({ length: TOKENS }, (_, i) => 1000 + i)); // token ids: they name the KV
  try {
    console.log(`loaded ${await session.get({ k, v })} tokens, the last number is ${v[3].at(-1)}`);
  } catch (error) {
    if (error.code !== 'KVT_E_NOT_FOUND') throw error;
    [...k, ...v].forEach((plane) => plane.fill(7)); // the engine computes the KV
    console.log(`stored ${await session.put({ k, v, level: LEVEL.DURABLE })} tokens`);
  }
  session.close();
  namespace.close();
  await store.close();
}

main();
