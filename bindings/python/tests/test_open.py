"""Stores that open their own runtime, and the layouts of models whose layers are alike."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import subprocess
import sys
from pathlib import Path
from typing import List, Tuple

import kvtier
import numpy as np
import pytest
from gate import HANG_S
from kvtier import Group, Identity, Layout, View
from test_process import run

LAYERS, HEADS, DIM, TOKENS = 2, 2, 8, 32
LAYOUT = Layout.gqa(LAYERS, HEADS, DIM, "f16", chunk_tokens=16)
PROMPT = np.arange(TOKENS, dtype=np.uint32)


def planes(value: float) -> Tuple[np.ndarray, List[List[View]]]:
    """K and V of all layers, and their views."""
    kv = np.full((2, LAYERS, TOKENS, HEADS, DIM), value, np.float16)
    return kv, [[View(layer, DIM * 2, HEADS) for layer in plane] for plane in kv]


def opened(store: kvtier.Store) -> kvtier.Session:
    session = store.namespace(Identity(model=b"m"), LAYOUT).session()
    session.append(PROMPT)
    return session


def test_an_opened_store_closes_its_runtime(tmp_path: Path) -> None:
    spec = f'store(host=1MiB, disk=disk(path="{tmp_path}/kv", bytes=16MiB, segment=1MiB))'
    stored, views = planes(0.5)
    with kvtier.open(spec) as store, opened(store) as session:
        done = session.put(*views, level=kvtier.LEVEL_DURABLE).result(HANG_S)
        assert done.value == TOKENS and store.runtime.stats().workers > 0
        runtime = store.runtime
        with pytest.raises(kvtier.StateError, match="close the store"):
            runtime.close()
    assert store.closed and runtime.closed and runtime.close() == (0,) * 11
    with pytest.raises(kvtier.ClosedError):
        runtime.queue()
    with kvtier.open(spec) as store, opened(store) as session:
        loaded, views = planes(0)
        assert session.get(*views).result(HANG_S).value == TOKENS
        assert np.array_equal(loaded, stored)


def test_specs_set_the_runtime_and_the_budget() -> None:
    with kvtier.open() as store:
        assert store.stats()["host_limit_bytes"] == 1 << 30
    spec = "kvtier(workers=3, budget=budget(host=64MiB), store=store(host=32MiB))"
    with kvtier.open(spec) as store:
        assert store.runtime.stats().workers == 3
        assert store.stats()["host_limit_bytes"] == 32 << 20
    for wrong in ("kvtier(worker=3)", "store(", "runtime"):
        with pytest.raises(kvtier.SpecError):
            kvtier.open(wrong)
    with pytest.raises(kvtier.Error):
        kvtier.open("")


def test_transfers_of_an_opened_store_can_be_awaited() -> None:
    async def main() -> None:
        _, views = planes(1)
        async with kvtier.open("store(host=1MiB)") as store:
            async with store.runtime.queue() as queue:
                with opened(store) as session:
                    assert (await session.put(*views, queue=queue)).value == TOKENS
                    assert (await session.get(*views, queue=queue)).value == TOKENS
        assert store.closed

    asyncio.run(main())


def test_objects_on_its_runtime_keep_an_opened_store_open() -> None:
    store = kvtier.open("store(host=1MiB)")
    buffer = store.runtime.buffer(4096)
    job = store._job
    del store
    gc.collect()
    assert job.handle.value
    with buffer:
        buffer.view()[:1] = b"x"
    del buffer
    gc.collect()  # the fixture checks that the store is closed now


def test_the_interpreter_exits_cleanly_with_an_opened_store() -> None:
    done = run("""
        import kvtier
        store = kvtier.open("store(host=1MiB)")
        queue = store.runtime.queue(callback=print)
        print("opened")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "opened\n", "")


@pytest.mark.parametrize("page", ["bindings/python/README.md", "docs/start/python.md"])
def test_the_example_of_a_page_stores_and_then_loads(page: str, tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[3] / page).read_text(encoding="utf-8")
    program = text.partition("```python\n")[2].partition("```")[0]
    for printed in ("stored 96 tokens\n", "loaded 96 tokens, sum 49152.0\n"):
        done = subprocess.run([sys.executable, "-X", "dev", "-c", program], cwd=tmp_path,
                              capture_output=True, text=True, timeout=600)
        assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def key(store: kvtier.Store, layout: Layout) -> bytes:
    with store.namespace(Identity(model=b"m"), layout) as namespace:
        return namespace.key


def test_layouts_equal_their_groups() -> None:
    with kvtier.open("store(host=1MiB)") as store:
        assert (LAYOUT.k_bytes, LAYOUT.v_bytes) == (32, 32)
        full = Group(range(LAYERS), 32, 32, "f16", HEADS)
        assert key(store, LAYOUT) == key(store, Layout(16, [full]))

        latent = Layout.mla(3, latent_dim=512, rope_dim=64, dtype="bf16", chunk_tokens=8)
        assert (latent.k_bytes, latent.v_bytes) == (1152, 0)
        assert key(store, latent) == key(store, Layout(8, [Group(range(3), 1152, 0, "bf16",
                                                                 latent.kv_heads)]))

        mixed = Layout.window(6, 4, 16, "f16", 8, window_tokens=64, full_every=3)
        assert mixed.full_first == 2
        for layout, whole in ((mixed, [2, 5]), (dataclasses.replace(mixed, full_first=0), [0, 3]),
                              (dataclasses.replace(mixed, full_every=0, full_first=0), [])):
            groups = [Group([n for n in range(6) if n not in whole], 128, 128, "f16", 4,
                            kvtier.RULE_WINDOW, 64)]
            if whole:
                groups.append(Group(whole, 128, 128, "f16", 4))
            assert key(store, layout) == key(store, Layout(8, groups)), layout


def test_invalid_layouts_are_rejected() -> None:
    for wrong in (lambda: Layout.gqa(0, 1, 8, "f16", 16), lambda: Layout.gqa(2, 1, 8, "f8", 16),
                  lambda: Layout.mla(2, 0, 0, "f16", 16), lambda: Layout.gqa(2, -1, 8, "f16", 16),
                  lambda: Layout.window(2, 1, 8, "f16", 16, window_tokens=0)):
        with pytest.raises(kvtier.InvalidError):
            wrong()
    with pytest.raises(kvtier.LimitError):
        Layout.gqa(5000, 1, 8, "f16", 16)
    with kvtier.open("store(host=1MiB)") as store:
        groups = [Group(range(LAYERS), 32, 32)]
        for call in (lambda: store.namespace(Identity(), LAYOUT, chunk_tokens=16),
                     lambda: store.namespace(Identity(), LAYOUT, groups=groups),
                     lambda: store.namespace(Identity(), Layout(16, groups, layers=LAYERS)),
                     lambda: store.namespace(Identity())):
            with pytest.raises(kvtier.InvalidError):
                call()
