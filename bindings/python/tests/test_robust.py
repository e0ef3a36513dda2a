"""Concurrent and early ends: threads, processes, shutdown, cancellation, exit."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, List

import kvtier
import numpy as np
import pytest
from gate import HANG_S, until
from kvtier import Group, Identity, View
from test_process import run

CHUNK, PLANE, CHUNKS = 4, 64, 32
TOKENS = CHUNK * CHUNKS


def open_namespace(store: kvtier.Store) -> kvtier.Namespace:
    return store.namespace(Identity(model=b"m"), chunk_tokens=CHUNK,
                           groups=[Group([0, 1], PLANE, PLANE)])


def planes(seed: int) -> np.ndarray:
    numbers = np.random.default_rng(seed)
    return numbers.integers(0, 256, (2, 2, TOKENS * PLANE), dtype=np.uint8)


def views(memory: np.ndarray) -> List[List[View]]:
    return [[View(layer, PLANE) for layer in which] for which in memory]


#: The beginning of the programs below: the same namespace, and puts and gets of known KV.
HEAD = """
    import os, sys, threading
    import kvtier
    from kvtier import Group, Identity, View
    def open_namespace(store):
        return store.namespace(Identity(model=b"m"), chunk_tokens=4,
                               groups=[Group([0, 1], 64, 64)])
    def full(session):
        return bytes((session * 31 + i * i // 7) % 251 for i in range(128 * 64))
    def put(namespace, number, **how):
        session = namespace.session()
        session.append(range(number * 1000, number * 1000 + 128))
        memory = bytearray(full(number))
        view = [View(memory, 64)] * 2
        return session, session.put(view, view, **how)
    def get(namespace, number):
        session = namespace.session()
        session.append(range(number * 1000, number * 1000 + 128))
        memory = bytearray(128 * 64)
        view = [View(memory, 64), View(bytearray(128 * 64), 64)]
        session.get(view, view[::-1]).result(600)
        return bytes(memory) == full(number)
"""


def test_eight_threads_share_a_store(tmp_path: Path) -> None:
    spec = f'store(host=256KiB, disk=disk(path="{tmp_path}/kv", bytes=64MiB, segment=1MiB))'
    wrong: List[Any] = []
    with kvtier.Runtime(workers=2) as runtime, kvtier.Store(runtime, spec) as store:
        with open_namespace(store) as namespace:
            def work(number: int) -> None:
                try:
                    for turn in range(4):
                        with namespace.session() as session:
                            session.append(range(number * 10_000 + turn * 1000,
                                                 number * 10_000 + turn * 1000 + TOKENS))
                            memory, back = planes(number * 10 + turn), np.zeros_like(planes(0))
                            session.put(*views(memory), level=kvtier.LEVEL_DISK).result(HANG_S)
                            ops = session.get_each(*views(back))
                            assert [op.result(HANG_S).value for op in ops] == [TOKENS] * 2
                            assert np.array_equal(memory, back)
                            assert session.plan().tokens == TOKENS and store.stats()
                except BaseException as error:  # noqa: BLE001: reported by the test
                    wrong.append(error)

            threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not wrong, wrong


ENDINGS = (kvtier.ClosedError, kvtier.CancelledError, kvtier.HandleError, kvtier.NotFoundError,
           kvtier.StateError)


@pytest.mark.parametrize("what", ["store", "runtime"])
def test_acknowledged_puts_survive_a_close_during_transfers(what: str, tmp_path: Path) -> None:
    """Each op succeeds or has an error; acknowledged puts are in the store afterwards."""
    spec = f'store(host=1MiB, disk=disk(path="{tmp_path}/kv", bytes=64MiB, segment=1MiB))'
    for turn in range(4):
        stored: List[int] = []
        wrong: List[Any] = []
        begun = threading.Barrier(5)
        runtime = kvtier.Runtime(workers=2)
        store = kvtier.Store(runtime, spec)
        namespace = open_namespace(store)

        def work(number: int, namespace: kvtier.Namespace = namespace,
                 begun: threading.Barrier = begun, stored: List[int] = stored,
                 wrong: List[Any] = wrong) -> None:
            name = number
            memory = planes(number)
            begun.wait(HANG_S)
            try:
                while True:
                    with namespace.session() as session:
                        session.append(range(name * 1000, name * 1000 + TOKENS))
                        session.put(*views(memory), level=kvtier.LEVEL_DISK).result(HANG_S)
                        stored.append(name)
                        name += 100
            except ENDINGS:
                pass
            except BaseException as error:  # noqa: BLE001: reported by the test
                wrong.append(error)

        first = 1 + turn * 10_000
        threads = [threading.Thread(target=work, args=(first + i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        begun.wait(HANG_S)
        # Waits for the first acknowledged put.
        until(lambda: stored or not any(thread.is_alive() for thread in threads))
        (store if what == "store" else runtime).close(HANG_S)
        for thread in threads:
            thread.join(HANG_S)
            assert not thread.is_alive()
        for closable in (namespace, store, runtime):
            closable.close()
        assert not wrong, wrong
        assert stored
        with kvtier.Runtime(workers=2) as again, kvtier.Store(again, spec) as store:
            with open_namespace(store) as namespace:
                for name in stored:
                    with namespace.session() as session:
                        session.append(range(name * 1000, name * 1000 + TOKENS))
                        back = np.zeros_like(planes(0))
                        session.get(*views(back)).result(HANG_S)
                        seed = first + (name - first) % 100
                        assert np.array_equal(back, planes(seed)), name


def test_a_cancelled_get_does_not_write_its_memory(runtime: kvtier.Runtime) -> None:
    async def main() -> None:
        async with kvtier.Store(runtime, "store(host=1MiB)") as store, runtime.queue() as queue:
            with open_namespace(store) as namespace, namespace.session() as session:
                session.append(range(TOKENS))
                memory, back = planes(1), np.full_like(planes(0), 0xA5)
                await session.put(*views(memory), queue=queue)
                # The get begins after the event, which is signalled after the cancellation.
                with kvtier.ReadyEvent() as ready:
                    op = session.get(*views(back), queue=queue, ready=ready)

                    async def wait() -> None:
                        await op

                    task = asyncio.ensure_future(wait())
                    await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    assert op.info().released
                    ready.signal()
                assert (back == 0xA5).all()
                op.close()
                await asyncio.wait_for(get(session, back, queue), HANG_S)
                assert np.array_equal(memory, back)

    async def get(session: kvtier.Session, back: np.ndarray, queue: kvtier.Queue) -> None:
        await session.get(*views(back), queue=queue)

    asyncio.run(main())


def test_a_loop_may_end_with_ops_in_flight(runtime: kvtier.Runtime) -> None:
    """asyncio.run cancels the remaining tasks: all ops end, and no object stays referenced."""
    async def main() -> None:
        store, queue = kvtier.Store(runtime, "store(host=1MiB)"), runtime.queue().attach()
        namespace = open_namespace(store)
        session = namespace.session()
        session.append(range(TOKENS))

        async def put(seed: int) -> None:
            await session.put(*views(planes(seed)), queue=queue)

        left = [asyncio.ensure_future(put(seed)) for seed in range(20)]
        await asyncio.sleep(0)
        assert left

    asyncio.run(main())
    gc.collect()


def test_acknowledged_writes_survive_an_interpreter_exit(tmp_path: Path) -> None:
    """The program exits with open objects and pending writes. The next process finds the writes
    that were acknowledged as on disk."""
    spec = f"""store(host=4MiB, disk=disk(path='{tmp_path}/kv', bytes=64MiB, segment=1MiB))"""
    spec = spec.replace("'", '\\"')
    for ending in ("pass", "sys.exit(0)"):
        done = run(HEAD + f"""
    runtime = kvtier.Runtime(workers=2)
    seen = []
    queue = runtime.queue(callback=seen.extend)
    polled = runtime.queue()
    store = kvtier.Store(runtime, "{spec}")
    namespace = open_namespace(store)
    kept = []
    for number in range(8):
        session, op = put(namespace, number, level=kvtier.LEVEL_DISK)
        op.result(600)
        kept += [session, op]
    for number in range(100, 160):
        used = queue if number % 2 else polled
        kept += put(namespace, number, level=kvtier.LEVEL_DISK, queue=used)
    helper = threading.Thread(target=polled.wait, daemon=True)
    helper.start()
    {ending}
        """)
        assert done.returncode == 0 and not done.stderr, done
        done = run(HEAD + f"""
    with kvtier.Runtime(workers=2) as runtime, kvtier.Store(runtime, "{spec}") as store:
        with open_namespace(store) as namespace:
            print(all(get(namespace, number) for number in range(8)))
        """)
        assert (done.returncode, done.stdout.strip()) == (0, "True"), done


def test_the_interpreter_exits_cleanly_while_callbacks_raise() -> None:
    done = run("""
        import sys, kvtier
        sys.unraisablehook = lambda info: None  # receives every exception
        def fails(*args):
            raise RuntimeError("mine")
        runtime = kvtier.Runtime(workers=2, on_thread=fails)
        queue = runtime.queue(callback=fails)
        budget = runtime.budget(host_bytes=1 << 20)
        account = budget.account("a", reclaim=fails)
        account.reserve(kvtier.TIER_HOST, 1 << 19)
        waits = budget.account("b").reserve_later(kvtier.TIER_HOST, 1 << 20)
        policy = kvtier.Policy("lru", max_objects=8, predict=fails)
        custom = kvtier.Policy("custom", max_objects=8, score=fails)
        custom.insert([1, 2, 3])
        try:
            custom.evict(1)
        except kvtier.StateError as error:
            assert isinstance(error.__cause__, RuntimeError)
        policy.insert([1, 2], kvtier.PolicyContext(session=1, length=1, max_length=9))
        policy.evict(1)
        class Failing:
            submit = query = wait = release = fails
        device = kvtier.Device(runtime, Failing())
        try:
            device.copy()
        except kvtier.StateError:
            print("raised")
        buffer = runtime.buffer(4096)
        for _ in range(500):
            runtime.post(kvtier.Work.checksum(buffer), queue)
    """)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "raised", ""), done


def test_spawned_processes_use_the_library_independently(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text('''
import multiprocessing, sys
import kvtier

SPEC = 'store(host=1MiB, disk=disk(path="{}", bytes=16MiB, segment=1MiB))'

def child(path, number, results):
    with kvtier.Runtime(workers=1) as runtime:
        try:
            kvtier.Store(runtime, SPEC.format(path))
            results.put((number, "shared"))
        except kvtier.BusyError:
            pass
        with kvtier.Store(runtime, SPEC.format(f"{path}-{number}")) as store:
            group = kvtier.Group([0], 16)
            with store.namespace(kvtier.Identity(), chunk_tokens=4, groups=[group]) as namespace:
                with namespace.session() as session:
                    session.append([1, 2, 3, 4])
                    data, back = bytearray(range(64)), bytearray(64)
                    session.put([kvtier.View(data, 16)], level=kvtier.LEVEL_DISK).result(600)
                    session.get([kvtier.View(back, 16)]).result(600)
                    results.put((number, data == back))

if __name__ == "__main__":
    path = sys.argv[1]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with kvtier.Runtime(workers=1) as runtime:
        with kvtier.Store(runtime, SPEC.format(path)):
            children = [spawn.Process(target=child, args=(path, i, results)) for i in range(3)]
            for process in children:
                process.start()
            received = sorted(results.get(timeout=600) for _ in children)
            for process in children:
                process.join(600)
    print(received, [process.exitcode for process in children])
''')
    done = subprocess.run([sys.executable, "-X", "dev", str(program), str(tmp_path / "kv")],
                          capture_output=True, text=True, timeout=600, cwd="/")
    assert done.returncode == 0, done
    assert done.stdout.strip() == "[(0, True), (1, True), (2, True)] [0, 0, 0]", done


def test_pickled_errors_keep_all_fields() -> None:
    """An error of a worker process arrives with its status and message."""
    import pickle

    for error in (kvtier.BufferError("w", -1, "KVT_E_INVALID"), kvtier.SpecError(
            "w", -20, "KVT_E_SPEC", 4)):
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error) and vars(back) == vars(error)
