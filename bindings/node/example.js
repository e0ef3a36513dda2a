'use strict';
// An example: stores the KV of a prompt on disk, reopens the store, plans, and loads the KV.

const fs = require('node:fs');
const os = require('node:os');
const path = require('node:path');
const { Layout, Runtime, Policy, LEVEL, DTYPE } = require('kvtier');

const LAYERS = 4, HEADS = 2, DIM = 32, TOKENS = 96, PLANE = TOKENS * HEADS * DIM * 2;
const LAYOUT = Layout.gqa({ layers: LAYERS, kvHeads: HEADS, headDim: DIM, dtype: DTYPE.F16,
  chunkTokens: 16 });

/** Views of K (`part` 0) or V (1) of each layer, in tensors that lie one after the other. */
function views(tensors, part) {
  return Array.from({ length: LAYERS }, (_, layer) => (
    { data: tensors, offset: (2 * layer + part) * PLANE, heads: HEADS }));
}

/** Opens the store. Loads the prompt's KV if the plan says so, else computes and stores it. */
async function storeOrLoad(runtime, folder, prompt) {
  const store = runtime.openStore(
    `store(host=4MiB, disk=disk(path="${folder}", bytes=64MiB, segment=1MiB))`);
  const namespace = store.namespace({ model: 'example', weights: '1' }, LAYOUT);
  const session = namespace.session({ name: 'example', tenant: 1 });
  session.append(prompt);
  const tensors = Buffer.alloc(2 * LAYERS * PLANE);
  const transfer = { k: views(tensors, 0), v: views(tensors, 1) };
  for (const step of session.plan({ alphaNs: 1e3, betaNs: 1e6 })) {
    console.log(`  tokens ${step.firstToken} to ${step.firstToken + step.tokens}: ${step.kind}`);
    if (step.kind === 'load') {
      await session.get({ ...transfer, tokens: step.tokens });
      if (!tensors.every((byte, i) => byte === (i * 31) % 256)) {
        throw new Error('the loaded bytes differ from the stored bytes');
      }
      console.log('  loaded: every byte is equal');
    } else {
      tensors.forEach((_, i) => { tensors[i] = i * 31; }); // stands for the model
      const stored = await session.put({ ...transfer, level: LEVEL.DURABLE });
      console.log(`  computed; ${stored} tokens are durable`);
    }
  }
  session.close();
  namespace.close();
  await store.close();
}

async function main() {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'kvtier-node-'));
  const runtime = new Runtime({ workers: 2 });
  try {
    const prompt = Uint32Array.from({ length: TOKENS }, (_, i) => i * i);
    console.log('first run:');
    await storeOrLoad(runtime, path.join(folder, 'kv'), prompt);
    console.log('after a restart:');
    await storeOrLoad(runtime, path.join(folder, 'kv'), prompt);
    const policy = new Policy('arc', { capacity: 100 });
    for (const id of [1, 2, 3, 4]) policy.insert([{ id }], id);
    policy.lookup([1], 5);
    console.log('a policy without a store:\n  victims:',
      policy.evict(2, { now: 6 }).victims.map((victim) => victim.id));
    policy.close();
  } finally {
    await runtime.close();
    fs.rmSync(folder, { recursive: true });
  }
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
