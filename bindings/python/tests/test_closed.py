"""Closed objects: every public method of every class raises. The tests inspect the classes."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import kvtier
import numpy as np
import pytest
from gate import HANG_S, Gate, until
from kvtier import Attention, SparseContext, Group, Identity, Sparse, View
from kvtier._resource import Closing, Resource
from test_process import run
from test_stream import content, write

KEYS = np.zeros((4, 2, 8), np.float32)
SHAPE = Attention(1, 2, 2, 8, 8, 4, 64)
PLANE = bytearray(64)
SPARSE = "h2o(sink=1,recent=1,budget=4)"

#: The argument for each parameter without a default, by the parameter's name.
ARGUMENTS: Dict[str, Any] = {
    "tokens": 4, "layer": 0, "first": 0, "tier": kvtier.TIER_HOST, "nbytes": 64, "limit": 1 << 20,
    "spec": "lru", "ids": [1], "rows": [1], "units": [1], "required_units": 1,
    "candidates": {"ids": [1]}, "required_blocks": 1, "batch": 8, "name": "n", "keys": KEYS,
    "block": 0, "queries": KEYS, "sums": [0.0] * 8, "scores": [0.0], "query": KEYS[:1],
    "at": SparseContext(4), "keep": kvtier.TokenLists.of([[0]]), "values": KEYS, "data": b"x",
    "unit": 0, "links": "disk=3", "buffer": 0, "positions": [0], "k": [View(PLANE, 16)],
    "capacity_blocks": 10, "specs": ["lru"], "sizes": [10], "identity": Identity(),
    "chunk_tokens": 4, "groups": [Group([0], 16)], "context_tokens": 0, "ns": 1, "cost": None,
    "reserved_bytes": 0, "used_bytes": 0, "address": 4096, "source": bytearray(64),
    "target": bytearray(64), "raw_event": 1, "raw_stream": 1, "event": None, "kernels": [],
    "names": [b"a"], "addresses": kvtier.BlockAddresses([4096]), "timeout": 1.0, "tenant": 1,
}
#: Arguments of parameters whose name has another meaning.
SPECIAL: Dict[Tuple[str, str], Any] = {
    ("Session", "append.tokens"): [1], ("Namespace", "lookup.tokens"): [1],
    ("Namespace", "lookup_keys.keys"): b"", ("Namespace", "exists.keys"): b"",
    ("Sparse", "seal_all.keys"): [KEYS], ("Offload", "put.k"): View(PLANE, 32),
    ("Sparse", "add_scores.scores"): [0.0], ("Sparse", "select.candidates"): [0],
    ("Runtime", "submit_each.work"): [],
}
#: Members that do not use the handle: a second close is allowed, the others need a running loop,
#: or return state of the Python object.
FINE = {"close", "aclose", "closed", "attach", "detach", "exported", "runtime"}


class World:
    """One open object of each class."""

    def __init__(self, where: Path) -> None:
        self.runtime = kvtier.Runtime(workers=1)
        self.queue = self.runtime.queue()
        self.buffer = self.runtime.buffer(4096)
        self.budget = self.runtime.budget(host_bytes=1 << 24)
        self.account = self.budget.account("a")
        self.op = self.runtime.submit(kvtier.Work.checksum(self.buffer))
        self.op.wait(HANG_S)
        self.event = kvtier.ReadyEvent()
        self.policy = kvtier.Policy("lru", max_objects=16)
        self.sparse = Sparse(SHAPE, SPARSE)
        self.trace = kvtier.Trace.generate("chat", duration_ns=60 * 10**9)
        self.lab = kvtier.Lab(self.trace)
        self.device = kvtier.Device(self.runtime, "simulated", memory_bytes=1 << 20)
        self.memory = self.device.alloc(4096)
        self.device_event = self.device.copy()
        self.user_event = self.device.create_event()
        self.opened = kvtier.open("store(host=1MiB)")
        self.store = kvtier.Store(self.runtime, "store(host=1MiB)")
        self.namespace = self.store.namespace(Identity(), chunk_tokens=4,
                                              groups=[Group([0], 64, 64, "f32", 2)])
        self.session = self.namespace.session()
        self.offload = kvtier.Offload(self.session, SHAPE, "f32", buffer_tokens=16)
        self.blocks = kvtier.Blocks(self.store, Identity(), [64])
        self.hold = self.blocks.hold([b"a"])
        write(where / "m.safetensors", {f"model.layers.{i}.w": ("U8", [4096], content(i, 4096))
                                        for i in range(3)})
        self.model = kvtier.Model(where / "m.safetensors")
        self.streamer = kvtier.Streamer(self.runtime, self.model)

    def objects(self) -> List[Any]:
        """The closable objects, in the order of closing."""
        return [self.op, self.offload, self.hold, self.blocks, self.session, self.namespace,
                self.store, self.opened, self.user_event, self.device_event, self.memory,
                self.device, self.streamer, self.model, self.lab, self.trace, self.sparse,
                self.policy, self.event, self.buffer, self.account, self.budget, self.queue,
                self.runtime]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for closable in world.objects():
        closable.close()


def public(closable: Any) -> Iterator[Tuple[str, Callable[[], Any]]]:
    """Uses of an object: its methods with arguments, and its properties."""
    kind = type(closable)
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") or name in FINE:
            continue
        if isinstance(member, property):
            yield name, lambda name=name: getattr(closable, name)
        elif inspect.isfunction(member) and not isinstance(
                inspect.getattr_static(kind, name), staticmethod):
            yield name, lambda name=name, member=member: getattr(closable, name)(
                **arguments(kind.__name__, name, member))


def arguments(kind: str, method: str, function: Any) -> Dict[str, Any]:
    """An argument for each required parameter."""
    given = {}
    for at, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if at == 0 or parameter.default is not parameter.empty or parameter.kind in (
                parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        key = kind, f"{method}.{name}"
        given[name] = SPECIAL[key] if key in SPECIAL else ARGUMENTS[name]
    return given


def close_all(world: World) -> None:
    for closable in world.objects():
        closable.close()
        closable.close()  # a second close has no effect
        assert closable.closed, closable


def test_every_closable_class_is_tested(world: World) -> None:
    """Fails if a new closable class is missing in `World`."""
    tested = {type(closable) for closable in world.objects()}
    existing = {value for value in vars(kvtier).values() if inspect.isclass(value)
                and issubclass(value, Resource)}
    assert existing <= tested, existing - tested


def test_every_use_of_a_closed_object_raises(world: World) -> None:
    # Some arguments need open objects, so they are created before the close.
    work = kvtier.Work.checksum(world.buffer)
    copy = kvtier.DeviceCopy(View(bytearray(64), 16), bytearray(64))
    more = {"work": work, "dst": world.buffer, "src": world.buffer, "queue": world.queue,
            "memory": world.memory, "session": world.session, "op": world.op, "copies": [copy]}
    ARGUMENTS.update(more)
    close_all(world)
    wrong = []
    for closable in world.objects():
        uses = dict(public(closable))
        few = (kvtier.ReadyEvent, kvtier.DeviceMemory, kvtier.Hold)
        assert len(uses) > 1 or isinstance(closable, few), closable
        for name, use in uses.items():
            try:
                found = use()
            except (kvtier.ClosedError, kvtier.HandleError):
                continue
            except Exception as error:  # noqa: BLE001: reported at the end
                found = error
            plain = (int, str, tuple, bool, type(None), dict, list)
            if isinstance(found, plain) and isinstance(getattr(type(closable), name), property):
                continue  # state of the Python object
            wrong.append(f"{type(closable).__name__}.{name}: {found!r}")
        if isinstance(closable, Resource):
            with pytest.raises((kvtier.ClosedError, kvtier.HandleError)):
                closable.__enter__()
    for name in more:
        del ARGUMENTS[name]
    assert not wrong, "\n".join(wrong)


def test_closing_classes_support_async_with(tmp_path: Path) -> None:
    async def main() -> None:
        async with kvtier.Runtime(workers=1) as runtime:
            async with kvtier.Store(runtime, "store(host=1MiB)") as store:
                async with kvtier.Device(runtime, "host") as device:
                    async with device.copy() as event:
                        event.wait(HANG_S)
                    assert event.closed
                assert device.closed and not store.closed
            assert store.closed
            with pytest.raises(kvtier.ClosedError):
                async with store:
                    pass
        assert runtime.closed

    asyncio.run(main())
    waiting = {name for name, kind in vars(kvtier).items() if inspect.isclass(kind)
               and issubclass(kind, Closing) for name in [kind.__name__]}
    assert waiting == {"Runtime", "Queue", "Store", "Device", "DeviceEvent", "UserEvent",
                       "Streamer"}


def test_a_cancelled_task_waits_for_the_end_of_aclose(single: kvtier.Runtime,
                                                      gate: Gate) -> None:
    async def main() -> None:
        queue = single.queue()
        single.post(gate.work, queue)
        gate.until_entered()
        closing = asyncio.ensure_future(queue.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        assert not closing.done() and not queue.closed
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert queue.closed and gate.buffer.info().in_flight == 0

    asyncio.run(main())


def forked_uses(where: Path) -> None:
    """Runs in a separate program, and prints every use that a forked child is not denied."""
    world = World(where)
    ARGUMENTS.update(work=kvtier.Work.checksum(world.buffer), dst=world.buffer, src=world.buffer,
                     queue=world.queue, memory=world.memory, session=world.session, op=world.op,
                     copies=[])
    pid = os.fork()
    if pid == 0:
        for closable in world.objects():
            for name, use in public(closable):
                try:
                    found: Any = use()
                except kvtier.ForkedError:
                    continue
                except Exception as error:  # noqa: BLE001: all are printed
                    found = error
                is_state = isinstance(getattr(type(closable), name), property)
                if not (is_state and isinstance(found, (int, str, tuple, dict, list, type(None)))):
                    print(f"{type(closable).__name__}.{name}: {found!r}", flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    close_all(world)
    print("parent continues")


def test_every_use_in_a_forked_child_raises(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), *sys.path]
    done = run(f"""
        import pathlib, sys, kvtier  # before the path contains the sources
        sys.path[:] = {paths!r}
        import test_closed
        test_closed.forked_uses(pathlib.Path({str(tmp_path)!r}))
    """)
    assert (done.returncode, done.stdout.strip()) == (0, "parent continues"), done


def test_aclose_works_after_the_executor_is_shut_down(tmp_path: Path) -> None:
    kept: List[Closing] = []

    async def main() -> None:
        async with kvtier.Runtime(workers=1) as runtime, runtime.queue() as queue:
            kept.extend((runtime, queue))
            await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(main())
    assert [closable.closed for closable in kept] == [True, True]


def test_a_queue_detaches_from_a_stopping_loop(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    with kvtier.Runtime(workers=1) as runtime:
        queue = runtime.queue()

        async def attach() -> None:
            queue.attach()

        loop.run_until_complete(attach())
        closing = threading.Thread(target=queue.close, daemon=True)

        def stop() -> None:
            closing.start()
            until(lambda: queue._loop is None)  # the stopping loop does not run the detach call
            loop.stop()

        loop.call_soon(stop)
        loop.run_forever()
        closing.join(HANG_S)
        assert not closing.is_alive() and queue.closed
        loop.run_until_complete(asyncio.sleep(0))  # now runs the detach call, without effect
        loop.close()
