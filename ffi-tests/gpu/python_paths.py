#!/usr/bin/env python3
"""Tests the Python package and its connectors with tensors on a GPU:

    python_paths.py [--package FOLDER] [--device cuda|cpu] [--quick] [PART...]

Prints a table row for each part: passed, skipped with the reason, or failed. FOLDER has the package
`kvtier` and the connectors (an unpacked wheel); the default are those of the interpreter. The engines
are the stubs of bindings/*/tests, the tensors are torch's. `--device cpu` uses tensors in host memory
as far as possible; `--quick` transfers less. Each part runs in a separate process, so a crash ends
only that part. The exit status is the number of failed parts.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

BINDINGS = pathlib.Path(__file__).resolve().parents[2] / "bindings"
SKIPPED = 77
HANG_SECONDS = 300.0  # a longer wait counts as a hang


class Skip(Exception):
    """A part cannot run here; the message is the reason."""


def need(condition, words):
    """Like `assert`, but python -O does not remove it."""
    if not condition:
        raise AssertionError(words)


class Bench:
    """Environment of a part: torch, the tensors' device, and a runtime, device and store."""

    def __init__(self, where, quick):
        import torch
        self.torch, self.on_gpu, self.quick = torch, where == "cuda", quick
        self.where = where
        if self.on_gpu and not torch.cuda.is_available():
            raise Skip("torch sees no GPU")
        import kvtier
        self.kvtier, self.opened = kvtier, []

    def open(self, spec="store(host=64MiB)"):
        """Opens a runtime, its device (None on a CPU) and a store."""
        runtime = self.kvtier.Runtime()
        device = self.kvtier.Device(runtime, "cuda") if self.on_gpu else None
        store = self.kvtier.Store(runtime, spec, device=device)
        self.opened = [one for one in (store, device, runtime) if one is not None]
        return runtime, device, store

    def close(self):
        for one in self.opened:
            one.close(HANG_SECONDS)

    def noise(self, *shape):
        """Random bytes as a host tensor, and a copy of it on the device."""
        host = self.torch.randint(0, 256, shape, dtype=self.torch.uint8)
        return host, host.clone().to(self.where)

    def zeros(self, *shape):
        return self.torch.zeros(shape, dtype=self.torch.uint8, device=self.where)

    def same(self, one, other):
        """Whether the bytes of two tensors on any devices are equal."""
        self.synchronize()
        return self.torch.equal(one.cpu(), other.cpu())

    def synchronize(self):
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def stream(self):
        """A stream that is not the default one; None on a CPU."""
        return self.torch.cuda.Stream() if self.on_gpu else None

    def late(self, stream, work, device):
        """Submits delayed work to a stream; returns torch's event and the imported one behind it."""
        if not self.on_gpu:
            work()
            return None, None
        with self.torch.cuda.stream(stream):
            # A tenth of a second, so that code that does not wait for the event fails.
            self.torch.cuda._sleep(200_000_000)
            work()
            event = self.torch.cuda.Event()
            event.record()
        return event, device.import_event(int(event.cuda_event))


def blocks(bench):
    """Pool, BlockAddresses, PartAddresses: every byte, also with ready events of torch's streams."""
    kvtier, (_, device, store) = bench.kvtier, bench.open()
    parts = [4096, 1024, 4096]
    each, count = sum(parts), 32
    with kvtier.Blocks(store, kvtier.Identity(model=b"gpu"), parts) as kept:
        names = [b"block %d" % at for at in range(count)]
        want, cache = bench.noise(count, each)
        back, order = bench.zeros(count, each), list(range(count))[::-1]
        need(kept.put(names, kvtier.Pool(cache, each).at(range(count))).result(HANG_SECONDS).value == count,
             "a put stored fewer blocks")
        kept.get(names, kvtier.Pool(back, each).at(order)).result(HANG_SECONDS)
        need(bench.same(back, want[order]), "Pool: a get returned wrong bytes")
        # The same by addresses: one address per block, then one per part.
        back = bench.zeros(count, each)
        at = [back.data_ptr() + each * n for n in range(count)]
        addresses = kvtier.BlockAddresses(at, device=bench.on_gpu, kept=back)
        kept.get(names, addresses).result(HANG_SECONDS)
        need(bench.same(back, want), "BlockAddresses: a get returned wrong bytes")
        planes = [bench.zeros(count, size) for size in parts]
        tables = [[plane.data_ptr() + size * n for n in range(count)]
                  for plane, size in zip(planes, parts)]
        addresses = kvtier.PartAddresses(tables, device=bench.on_gpu, kept=planes)
        kept.get(names, addresses).result(HANG_SECONDS)
        start = 0
        for plane, size in zip(planes, parts):
            need(bench.same(plane, want[:, start:start + size]),
                 "PartAddresses: a get returned wrong bytes")
            start += size
        kept.drop(names[:8])
        need(kept.exists(names)[:8] == bytes(8), "dropped blocks still exist")
        op = kept.get(names, kvtier.Pool(back, each).at(range(count)))
        op.wait(HANG_SECONDS)
        need(op.failed() == list(range(8)), f"missing blocks are {op.failed()}")
        op.close()
        # A put waits for a delayed write of a stream; a get waits for a delayed read.
        stream, late = bench.stream(), bench.zeros(count, each)
        bench.synchronize()
        raw, event = bench.late(stream, lambda: late.copy_(cache), device)
        others = [b"late " + name for name in names]
        kept.put(others, kvtier.Pool(late, each).at(range(count)), after=event).result(HANG_SECONDS)
        kept.get(others, kvtier.Pool(back, each).at(range(count))).result(HANG_SECONDS)
        need(bench.same(back, want), "a put did not wait for its stream's event")
        seen = bench.zeros(count, each)
        bench.synchronize()
        raw, event = bench.late(stream, lambda: seen.copy_(late), device)
        turned = kept.get(others, kvtier.Pool(late, each).at(order), after=event)
        if bench.on_gpu:
            # The stream continues after the get; no thread waits for either.
            final = bench.zeros(count, each)
            bench.synchronize()
            again = bench.stream()
            device.stream_wait_op(int(again.cuda_stream), turned)
            with bench.torch.cuda.stream(again):
                final.copy_(late)
            again.synchronize()
            need(bench.same(final, want[order]), "a held stream did not wait for the get")
        turned.result(HANG_SECONDS)
        need(bench.same(late, want[order]), "a get with a ready event returned wrong bytes")
        need(bench.same(seen, want), "a get did not wait for its stream's event")
        del raw, event
    return "Pool, BlockAddresses, PartAddresses, missing blocks" + bench.on_gpu * (
        ", puts and gets behind events, a stream behind a get")


def session(bench):
    """Views of tensors: strided, in pages, one layer at a time."""
    kvtier, (_, device, store) = bench.kvtier, bench.open()
    tokens, heads, run, layers = 64, 2, 32, 3
    groups = [kvtier.Group(list(range(layers)), heads * run, heads * run, "int8", heads)]
    with store.namespace(kvtier.Identity(model=b"views"), chunk_tokens=16, groups=groups) as space:
        want, kv = bench.noise(layers, 2, tokens, heads, run)
        with space.session() as writer:
            writer.append(list(range(tokens)))
            stream, late = bench.stream(), bench.zeros(layers, 2, tokens, heads, run)
            bench.synchronize()
            raw, event = bench.late(stream, lambda: late.copy_(kv), device)
            writer.put([kvtier.View(late[n, 0], run, heads) for n in range(layers)],
                       [kvtier.View(late[n, 1], run, heads) for n in range(layers)],
                       after=event).result(HANG_SECONDS)
        with space.session() as reader:
            reader.append(list(range(tokens)))
            # K and V of a token are adjacent; V also in pages in another order.
            mixed, paged = bench.zeros(layers, tokens, 2, heads, run), bench.zeros(
                layers, tokens, heads, run)
            page, step = 16, 2 * heads * run
            pages = [heads * run * page * at for at in (2, 0, 3, 1)]
            k = [kvtier.View(mixed[n], run, heads, token_stride=step) for n in range(layers)]
            v = [kvtier.View(paged[n], run, heads, pages=pages, page_tokens=page)
                 for n in range(layers)]
            for op in reader.get_each(k, v):
                op.result(HANG_SECONDS)
            need(bench.same(mixed[:, :, 0], want[:, 0]), "strided views: a get returned wrong bytes")
            for at, where in enumerate((2, 0, 3, 1)):
                got = paged[:, where * page:(where + 1) * page]
                need(bench.same(got, want[:, 1, at * page:(at + 1) * page]),
                     "pages: a get returned wrong bytes")
        if bench.on_gpu:
            try:
                kvtier.checksum(kv)
            except kvtier.InvalidError:
                pass
            else:
                raise AssertionError("kvtier.checksum accepted GPU memory")
        del raw, event
    return "strided views, pages, layers one by one" + bench.on_gpu * ", a put behind an event"


def kernels(bench):
    """The device's kernels on tensors give the results of the CPU kernels."""
    kvtier, torch = bench.kvtier, bench.torch
    import numpy
    tokens, heads, dim, page = 256, 2, 64, 16
    numbers = numpy.random.default_rng(5).standard_normal((tokens, heads, dim)).astype("float32")
    want = numpy.asarray(kvtier.kernels.page_boxes(numbers, page))
    if not bench.on_gpu:
        tensor = torch.from_numpy(numbers)
        need((numpy.asarray(kvtier.kernels.page_boxes(tensor, page)) == want).all(),
             "boxes of a tensor differ from those of an array")
        return "page boxes of tensors, on the CPU"
    _, device, _ = bench.open()
    tensor = torch.from_numpy(numbers).to(bench.where)
    boxes = torch.zeros(want.shape, dtype=torch.float32, device=bench.where)
    bench.synchronize()
    try:
        kvtier.kernels.page_boxes(tensor, page)
    except kvtier.InvalidError:
        pass
    else:
        raise AssertionError("the CPU kernel page_boxes accepted GPU memory")
    if kvtier.abi.KVT_DEVICE_KERNEL_PAGE_BOXES not in device.info.kernels:
        raise Skip("this device has no kernel KVT_DEVICE_KERNEL_PAGE_BOXES")
    kernel = kvtier.abi.kvt_kernel_t(
        kind=kvtier.abi.KVT_DEVICE_KERNEL_PAGE_BOXES, dtype=kvtier.abi.KVT_DTYPE_F32,
        other_dtype=kvtier.abi.KVT_DTYPE_F32, keys=tensor.data_ptr(), key_stride=heads * dim * 4,
        key_head_stride=dim * 4, out=boxes.data_ptr(), out_stride=heads * 2 * dim * 4,
        out_head_stride=2 * dim * 4, page_tokens=page, count=tokens, key_heads=heads, key_dim=dim)
    with device.launch([kernel]) as event:
        event.wait(HANG_SECONDS)
    need((boxes.cpu().numpy() == want).all(), "page boxes of the GPU differ from those of the CPU")
    return "page boxes of the GPU equal those of the CPU"


def transformers(bench):
    """TieredCache and eviction give the logits of the stock cache."""
    torch = bench.torch
    from transformers import DynamicCache
    sys.path.insert(0, str(BINDINGS / "transformers" / "tests"))
    import tiny_models
    from kvtier_transformers import Tiers, install_kv_eviction, remove_kv_eviction
    most, equal = 0.0, True
    for name, mode in (("llama", None), ("llama", 1), ("gemma3", None), ("deepseek_v3", 1)):
        model = tiny_models.make(name).to(bench.where)
        ids = torch.randint(1, tiny_models.VOCAB, (2, 37)).to(bench.where)
        with Tiers(model, "store(host=32MiB)") as tiers, torch.no_grad():
            ours, stock = tiers.cache(resident_layers=mode), DynamicCache(config=model.config)
            tokens, seen = ids, ids
            for _ in range(24):
                a = model(input_ids=tokens, past_key_values=ours).logits
                b = model(input_ids=tokens, past_key_values=stock).logits
                most, equal = max(most, float((a - b).abs().max())), equal and torch.equal(a, b)
                tokens = b[:, -1:].argmax(-1)
                seen = torch.cat([seen, tokens], 1)
            need(ours.unknown == "", ours.unknown)
            ours.save()
            need(ours.stats()["failed_puts"] == 0, "save: puts failed")
            again = tiers.cache(resident_layers=mode)
            resumed = again.resume(seen)
            need(resumed >= 48, f"resume returned {resumed} tokens, expected at least 48")
            a = model(input_ids=seen[:, resumed:], past_key_values=again).logits[:, -1]
            b = model(input_ids=seen, past_key_values=DynamicCache(config=model.config)).logits
            error = float((a - b[:, -1]).abs().max())
            need(error < 1e-4, f"after a resume, logits differ by {error} from the stock cache's")
        need(most < 1e-5, f"{name}, {mode}: logits differ by {most} from the stock cache's")
    model = tiny_models.make("llama").to(bench.where)
    prompt = torch.randint(1, tiny_models.VOCAB, (1, 40)).to(bench.where)
    options = {"max_new_tokens": 16, "do_sample": False}
    want = model.generate(prompt, **options)
    install_kv_eviction(model, budget=1024)
    need(torch.equal(model.generate(prompt, **options), want), "eviction with a sufficient budget changes tokens")
    remove_kv_eviction(model)
    install_kv_eviction(model, budget=8, n_recent=8)
    need(model.generate(prompt, **options).shape == want.shape, "eviction generates fewer tokens")
    remove_kv_eviction(model)
    bits = "bit for bit" if equal else f"within {most:.1e}"
    return f"whole and offloaded caches: logits of the stock cache {bits}; resume; eviction"


def use_stubs(engine):
    """Makes the stubs of an engine importable. Their stub of torch is not used: torch is loaded."""
    tests = BINDINGS / engine / "tests"
    if not tests.is_dir():
        raise Skip(f"bindings/{engine}/tests does not exist")
    sys.path[:0] = [str(tests / "stubs"), str(tests)]


def vllm(bench):
    """The connector between steps and layer by layer, and the offloading spec."""
    use_stubs("vllm")
    import mini
    import numpy
    import vllm  # noqa: F401: an engine is loaded before its connectors
    from kvtier_vllm import connector
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    class Engine(mini.Engine):
        def _cache(self):
            torch = bench.torch
            return torch.zeros((self.block_count, 2, mini.BLOCK, 8), dtype=torch.int16,
                               device=bench.where)

        def check(self, rank, layer, request, blocks, first, end):
            for token in range(first, end):
                block = self.caches[rank][layer][blocks[token // mini.BLOCK]]
                got = block[:, token % mini.BLOCK].cpu().numpy()
                need((got == mini.expected(layer, rank, request, token)).all(),
                     f"layer {layer}, token {token}: wrong numbers were loaded")

    for layerwise in (False, True):
        engine = Engine(lambda config, role, cache, rank: connector.KvtierConnector(
            config, role, cache), KVConnectorRole,
            extra={"host_bytes": "64MiB", "layerwise": layerwise}, engine=f"gpu-{layerwise}")
        prompt = list(range(100))
        loaded = [engine.run(mini.Request(name, prompt[:length])) for name, length in
                  (("a", 100), ("b", 100), ("c", 50))]
        need(loaded == [0, 96, 48], f"loaded tokens are {loaded}, expected [0, 96, 48]")
        engine.close()

    from types import SimpleNamespace

    from kvtier_vllm.spec import KvtierSpec
    from vllm.v1.kv_offload import base, config
    page, torch = 4096, bench.torch
    tensors = [torch.randint(0, 100, (32, page), dtype=torch.int8).to(bench.where)
               for _ in range(2)]
    caches = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(one, page) for one in tensors],
        [[base.CanonicalKVCacheRef(0, page), base.CanonicalKVCacheRef(1, 1024)]])
    spec = KvtierSpec(config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(16, ("layer.0",), 0),),
        worker_kv_bytes_per_block=page, enable_kv_cache_events=False,
        extra_config={"spec_name": "KvtierSpec", "spec_module_path": "kvtier_vllm.spec",
                      "host_bytes": "64MiB"}, engine_id="gpu-spec",
        model=config.OffloadingModelConfig("tiny", "bf16"),
        cache=config.OffloadingCacheConfig(16, 1),
        parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)))
    worker, manager = spec.get_worker(caches), spec.get_manager()
    keys = [base.make_offload_key(bytes([n]) * 32, 0) for n in range(8)]
    before = [one.clone().cpu() for one in tensors]

    def transfer(job, submit, *places):
        need(submit(job, *places), f"job {job} was refused")
        worker.wait({job})
        need([one.success for one in worker.get_finished()] == [True], f"job {job} failed")

    def place(blocks):
        return base.GPULoadStoreSpec(blocks, [len(blocks)], [0])

    context = base.ReqContext(req_id="r")
    manager.on_new_request(context)
    stored = manager.prepare_store(keys, context)
    transfer(1, worker.submit_store, place(list(range(8))), stored.store_spec)
    manager.complete_store(keys, context)
    manager.on_request_finished(context)
    context = base.ReqContext(req_id="s")
    manager.on_new_request(context)
    end = time.monotonic() + HANG_SECONDS
    for key in keys:
        while manager.lookup(key, context).name != "HIT":
            need(time.monotonic() < end, "a stored block is not a hit")
            manager.on_schedule_end(SimpleNamespace())
            time.sleep(0.001)
    transfer(2, worker.submit_load, manager.prepare_load(keys, context), place(list(range(20, 28))))
    manager.complete_load(set(keys), context)
    manager.on_request_finished(context)
    for one, was, size in zip(tensors, before, (page, 1024)):
        got = one.cpu().numpy()
        need(numpy.array_equal(got[20:28, :size], was.numpy()[:8, :size]), "a load returned wrong bytes")
        need(numpy.array_equal(got[:20], was.numpy()[:20]), "a load wrote other blocks")
    manager.shutdown()
    worker.shutdown()
    return "the connector between steps and by layers, the offloading spec"


def lmdeploy(bench):
    """The worker: saves and loads of blocks, ordered with the engine's stream."""
    use_stubs("lmdeploy")
    import stubs
    from kvtier_lmdeploy import _names
    from kvtier_lmdeploy._meta import Load, Save, StepMeta
    for sizes in ((512, 512), (512, 96, 512)):
        rows, want = {}, {}
        for at, size in enumerate(sizes):
            want[f"row{at}"], rows[f"row{at}"] = bench.noise(8, size)
        worker = stubs.worker(stubs.cache_config({"host_bytes": 64 << 20}), rows)
        names = []
        _names.extend(names, list(range(64)), 16, "", 4)

        def step(meta, done):
            worker.bind_connector_metadata(meta)
            worker.start_load_kv()
            worker.start_save_kv()
            end, bad = time.monotonic() + HANG_SECONDS, set()
            while True:
                output = worker.get_finished()
                bad |= output.invalid_block_ids
                if done(output):
                    break
                need(time.monotonic() < end, f"a step did not end in {HANG_SECONDS:.0f} s")
                time.sleep(0.001)
            worker.clear_connector_metadata()
            need(not bad, f"blocks were not loaded: {bad}")

        step(StepMeta(saves=(Save(0, 1, (0, 3, 5, 7), (0, 1, 2, 3), tuple(names)),)),
             lambda output: output.completed_save_ids)
        for row in rows.values():
            row.fill_(0xEE)
        step(StepMeta(loads=(Load(9, 2, (1, 2, 4, 6), tuple(names)),)),
             lambda output: output.finished_receiving)
        for name, row in rows.items():
            got, was = row.cpu().numpy(), want[name].numpy()
            need((got[[1, 2, 4, 6]] == was[[0, 3, 5, 7]]).all(), f"{name}: a load returned wrong bytes")
            need((got[[0, 3, 5, 7]] == 0xEE).all(), f"{name}: a load wrote other blocks")
        worker.shutdown()
    return "a worker's saves and loads, rows of one size and of several"


def sglang(bench):
    """The linker: pages of device pools are offloaded and loaded layer by layer."""
    use_stubs("sglang")
    from types import SimpleNamespace

    import numpy
    from kvtier_sglang import linker as module
    from mini import names
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
        DevicePoolEntry,
        DevicePoolGroup,
    )
    from sglang.srt.mem_cache.unified_cache import unified_cache_linker
    torch, page, pages, layers = bench.torch, 4, 32, 5
    made = [bench.noise(page * pages, 16) for _ in range(2 * layers)]
    want, pool = [one.numpy() for one, _ in made], [one for _, one in made]
    entry = DevicePoolEntry(
        name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=None, components=[pool],
        page_size=page, rows_are_pages=False,
        layer_mapping={layer: (layer, layers + layer) for layer in range(layers)})
    group = DevicePoolGroup([entry], layers, page)
    module.resolve_hybrid_device_pool_group = lambda **_: group
    module.get_parallel = lambda: SimpleNamespace(tp_size=1, attn_dp_rank=0)
    module.get_model = lambda: SimpleNamespace(model_path="some/model")
    if bench.on_gpu:  # as the real engine does
        module.get_device_module = lambda: torch.cuda
        unified_cache_linker.get_device_module = lambda: torch.cuda
    params = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: group), page_size=page,
        pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, attn_tp_cache_group=None,
        tp_cache_group=None)
    linker = module.KvtierLinker(SimpleNamespace(), params, components=set(),
                                 extra_config={"host_bytes": 64 << 20})

    def kv(keys, places):
        first = numpy.asarray(places, numpy.int64)[:, None] * page
        slots = torch.from_numpy((first + numpy.arange(page)).reshape(-1))
        return PoolTransfer(PoolName.KV, device_indices=slots, keys=keys)

    keys, source, target = names(4), (0, 1, 2, 3), (9, 20, 5, 30)
    need(linker.offload([kv(keys, source)]), "an offload was refused")
    end = time.monotonic() + HANG_SECONDS
    while not linker.num_completed_offloads():
        need(time.monotonic() < end, f"an offload did not end in {HANG_SECONDS:.0f} s")
        time.sleep(0.001)
    need(linker.pop_completed_offload(), "an offload failed")
    need(linker.load("r", [kv(keys, target)]), "a load was refused")
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    for layer in range(layers):
        linker.layer_done_counter.wait_until(layer)
        for at in (layer, layers + layer):
            got = pool[at].cpu().numpy()
            for before, after in zip(source, target):
                need((got[after * page:(after + 1) * page]
                      == want[at][before * page:(before + 1) * page]).all(),
                     f"layer {layer}: a load returned wrong bytes")
    need(linker.finish_layer_wise_loading(index), "a load failed")
    linker.close()
    return "pages offloaded, and loaded layer by layer"


def mooncake(bench):
    """Transfers with registered device memory."""
    from kvtier_mooncake import MooncakeDistributedStore, ReplicateConfig
    store = MooncakeDistributedStore()
    settings = {"host_bytes": 64 << 20, **({"device": "cuda"} if bench.on_gpu else {})}
    os.environ["KVTIER_MOONCAKE_CONFIG"] = json.dumps(settings)
    need(store.setup("localhost") == 0, "setup was refused")
    (want, cache), back = bench.noise(8, 4096), bench.zeros(8, 4096)
    for one in (cache, back):
        need(store.register_buffer(one.data_ptr(), 8 * 4096) == 0, "a buffer was refused")
    bench.synchronize()
    keys = [f"key {n}" for n in range(8)]

    def places(tensor):
        return [[tensor.data_ptr() + 4096 * n, tensor.data_ptr() + 4096 * n + 1024]
                for n in range(8)]

    sizes = [[1024, 3072]] * 8
    codes = store.batch_put_from_multi_buffers(keys, places(cache), sizes, ReplicateConfig())
    need(list(codes) == [0] * 8, f"puts: {codes}")
    codes = store.batch_get_into_multi_buffers(keys, places(back), sizes)
    need(list(codes) == [4096] * 8, f"gets: {codes}")
    need(bench.same(back, want), "a get returned wrong bytes")
    for one in (cache, back):
        need(store.unregister_buffer(one.data_ptr()) == 0, "unregister_buffer failed")
    store.close()
    return "registered buffers, objects in several of them"


def bandwidth(bench):
    """1,000 blocks of 256 KiB to host memory and back, compared with torch's copies."""
    kvtier, torch = bench.kvtier, bench.torch
    count, each, rounds = (16, 4096, 2) if bench.quick else (1000, 256 << 10, 7)
    total = count * each
    _, device, store = bench.open(f"store(host={2 * total + (64 << 20)})")
    want, cache = bench.noise(count, each)
    pinned = torch.empty((count, each), dtype=torch.uint8, pin_memory=bench.on_gpu)

    # Warm-up rounds: memory is mapped and pinned in them.
    warm_up = 4

    def rate(call):
        """The median rate of the rounds in GB/s."""
        times = []
        for turn in range(warm_up + rounds):
            bench.synchronize()
            began = time.perf_counter()
            call(turn)
            bench.synchronize()
            times.append(time.perf_counter() - began)
        return total / sorted(times[warm_up:])[rounds // 2] / 1e9

    places = kvtier.Pool(cache, each).at(range(count))
    every = [[b"%d %d" % (turn, at) for at in range(count)] for turn in range(warm_up + rounds + 1)]
    names = every[-1]
    with kvtier.Blocks(store, kvtier.Identity(model=b"rate"), [each]) as kept:
        # Each put evicts the blocks of earlier rounds.
        put = rate(lambda turn: kept.put(every[turn], places).result(HANG_SECONDS))
        kept.put(names, places).result(HANG_SECONDS)
        cache.fill_(0)
        get = rate(lambda _: kept.get(names, places).result(HANG_SECONDS))
        need(bench.same(cache, want), "a get returned wrong bytes")
    out = rate(lambda _: pinned.copy_(cache, non_blocking=True))
    back = rate(lambda _: cache.copy_(pinned, non_blocking=True))
    del device
    return (f"{count} blocks of {each >> 10} KiB: put {put:.1f} GB/s, {put / out:.2f} of torch's "
            f"copy; get {get:.1f} GB/s, {get / back:.2f}")


#: Modules that each part needs besides torch and the package.
PARTS = {
    blocks: (), session: (), kernels: ("numpy",), transformers: ("transformers",),
    vllm: ("numpy",), lmdeploy: ("numpy",), sglang: ("numpy",), mooncake: ("numpy",),
    bandwidth: (),
}
BY_NAME = {part.__name__: part for part in PARTS}


def one_line(text):
    return str(text).replace("|", "/").replace("\n", " ")[:200]


def reason(error):
    return one_line(f"{type(error).__name__}: {error}")


def run_part(name, options):
    """Runs a part in this process; returns its exit status."""
    part, bench = BY_NAME[name], None
    try:
        for module in ("torch", "kvtier", *PARTS[part]):
            if importlib.util.find_spec(module) is None:
                raise Skip(f"module {module} is not installed")
        try:
            bench = Bench(options.device, options.quick)
        except (ImportError, OSError) as error:
            raise Skip(reason(error)) from error
        if part is transformers:
            try:
                import kvtier_transformers  # noqa: F401
            except (ImportError, bench.kvtier.UnsupportedError) as error:
                raise Skip(reason(error)) from error
        print(one_line(part(bench)))
        bench.close()
    except Skip as skip:
        print(one_line(skip))
        return SKIPPED
    return 0


def main():
    parser = argparse.ArgumentParser(description="Tests the Python package with tensors on a GPU.")
    parser.add_argument("--package", help="folder with the package and the connectors")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="transfers less")
    parser.add_argument("--alone", choices=BY_NAME, help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(BY_NAME))
    options = parser.parse_args()
    if options.alone:
        return run_part(options.alone, options)
    unknown = set(options.parts) - set(BY_NAME)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}: use {', '.join(BY_NAME)}")
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1",
                       PYTHONDONTWRITEBYTECODE="1")
    if options.package:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([options.package, *([before] if before else [])])
    failed = 0
    for name in options.parts or BY_NAME:
        command = [sys.executable, __file__, "--alone", name, "--device", options.device]
        began = time.monotonic()
        try:
            done = subprocess.run(command + ["--quick"] * options.quick, env=environment, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=480)
            code, out, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            code, out, errors = 124, "", "the part did not end in 480 s"
        last = (out.strip().splitlines() or [""])[-1]
        took = f" ({time.monotonic() - began:.0f} s)"
        if code == 0:
            outcome, note = "passed", last + took
        elif code == SKIPPED:
            outcome, note = "skipped", last
        else:
            failed += 1
            lines = errors.strip().splitlines()
            outcome, note = f"**failed ({code})**", one_line(lines[-1] if lines else last)
            print(f"---- python {name}\n{errors}", file=sys.stderr)
        print(f"| python {name} | {outcome} | {note} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
