'use strict';
// Keeps the KV of a conversation on disk, plans how to go on with it, and loads it again.

const fs = require('node:fs');
const os = require('node:os');
const path = require('node:path');
const { Runtime, Policy, LEVEL, DTYPE } = require('./kvtier');

const LAYERS = 4, HEADS = 2, RUN = 64, TOKENS = 96, PLANE = TOKENS * HEADS * RUN;
const LAYOUT = { chunkTokens: 16, layers: LAYERS, dtype: DTYPE.F16, kvHeads: HEADS,
  kBytes: HEADS * RUN, vBytes: HEADS * RUN };

/** Tensors that lie one after the other: K and V of each layer. */
function views(tensors, which) {
  return Array.from({ length: LAYERS }, (_, layer) => (
    { data: tensors, offset: (2 * layer + which) * PLANE, heads: HEADS }));
}

async function turn(runtime, folder, prompt) {
  const store = runtime.openStore(
    `store(host=4MiB, disk=disk(path="${folder}", bytes=64MiB, segment=1MiB))`);
  const space = store.namespace({ model: 'example', weights: '1' }, LAYOUT);
  const session = space.session({ name: 'a conversation', tenant: 1 });
  session.append(prompt);
  const tensors = Buffer.alloc(2 * LAYERS * PLANE);
  const move = { k: views(tensors, 0), v: views(tensors, 1) };
  for (const part of session.plan({ alphaNs: 1e3, betaNs: 1e6 })) {
    console.log(`  tokens ${part.firstToken} to ${part.firstToken + part.tokens}: ${part.kind}`);
    if (part.kind === 'load') {
      await session.get({ ...move, tokens: part.tokens });
      if (!tensors.every((byte, i) => byte === (i * 31) % 256)) throw new Error('other bytes');
      console.log('  loaded: every byte is as it was');
    } else {
      tensors.forEach((_, i) => { tensors[i] = i * 31; }); // the model computes
      const kept = await session.put({ ...move, level: LEVEL.DURABLE });
      console.log(`  computed, and ${kept} tokens are durable`);
    }
  }
  session.close();
  space.close();
  await store.close();
}

async function main() {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'kvtier-node-'));
  const runtime = new Runtime({ workers: 2 });
  try {
    const prompt = Uint32Array.from({ length: TOKENS }, (_, i) => i * i);
    console.log('first turn:');
    await turn(runtime, path.join(folder, 'kv'), prompt);
    console.log('after a restart:');
    await turn(runtime, path.join(folder, 'kv'), prompt);
    const policy = new Policy('arc', { capacity: 100 });
    for (const id of [1, 2, 3, 4]) policy.insert([{ id }], id);
    policy.lookup([1], 5);
    console.log('a policy alone:\n  who leaves first:',
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
