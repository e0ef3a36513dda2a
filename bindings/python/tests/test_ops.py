"""Ops and queues: results, deadlines, cancellation, callbacks, threads."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any, List

import kvtier
import pytest
from conftest import no_ops_left
from gate import HANG_S, Gate, handled, released, until
from kvtier import Work, _reaper


def test_result_and_info(runtime: kvtier.Runtime) -> None:
    source, target = runtime.buffer(8192), runtime.buffer(8192)
    op = runtime.submit(Work.copy(target, source, checksum=True), tag={"any": "object"})
    result = op.result(HANG_S)
    assert result.bytes_done == 8192 and result.value == kvtier.checksum(bytes(8192))
    info = op.info()
    assert info.released and info.resolved and (info.items, info.items_done) == (1, 1)
    assert op.tag == {"any": "object"} and op.error() is None
    op.close()
    op.close()
    with pytest.raises(kvtier.ClosedError, match="this op is closed"):
        op.info()


def test_corrupt_bytes_fail_verification(runtime: kvtier.Runtime) -> None:
    data = bytearray(random.Random(3).randbytes(100_000))
    expect = kvtier.checksum(data)
    buffer = runtime.wrap(data)
    runtime.submit(Work.verify(buffer, expect)).result(HANG_S)
    data[77_777] ^= 1
    op = runtime.submit(Work.verify(buffer, expect))
    with pytest.raises(kvtier.CorruptError) as caught:
        op.result(HANG_S)
    assert caught.value.status == kvtier.abi.KVT_E_CORRUPT
    assert op.items()[0].value == kvtier.checksum(data) != expect
    with pytest.raises(kvtier.CorruptError):
        runtime.submit(Work.copy(runtime.buffer(100_000), buffer, expect=expect)).result(HANG_S)
    buffer.close()


def test_one_failed_item_does_not_fail_the_others(runtime: kvtier.Runtime) -> None:
    buffer = runtime.buffer(40_960)
    good = kvtier.checksum(bytes(4096))
    work = [Work.verify(buffer, good + (i == 3), 4096, src_offset=i * 4096) for i in range(10)]
    op = runtime.submit(work)
    with pytest.raises(kvtier.CorruptError):
        op.result(HANG_S)
    items = op.items()
    assert [i for i, item in enumerate(items) if item.status] == [3]
    assert op.info().items_failed == 1 and op.info().bytes_done == 9 * 4096
    assert [item.value for item in op.items(8)] == [good, good]
    with pytest.raises(kvtier.InvalidError):
        op.items(11, 1)


def test_wait_can_be_repeated_after_a_timeout(single: kvtier.Runtime, gate: Gate) -> None:
    op = single.submit([gate.work] * 25)
    assert op.wait(0) is False and op.wait(-5) is False
    with pytest.raises(TimeoutError):
        op.result(0.001)
    with pytest.raises(kvtier.BusyError):
        op.close()
    gate.open()
    assert op.wait(float("inf")) is True
    with pytest.raises(ValueError):
        op.wait(float("nan"))


def test_a_deadline_resolves_before_the_release(single: kvtier.Runtime, gate: Gate) -> None:
    timeout, shown = 0.005, False
    while not shown:  # repeats with a later deadline if it passed before the worker began
        start = time.monotonic()
        op = single.submit([gate.work] * 25, timeout=timeout)
        assert op.wait(HANG_S, kvtier.RESOLVED)
        resolved = time.monotonic() - start
        assert resolved >= timeout
        shown = gate.entered.is_set()
        assert not (shown and released(op)), "the worker still reads its memory"
        if not shown:
            timeout *= 2
    gate.open()
    with pytest.raises(kvtier.TimeoutError) as caught:
        op.result(HANG_S)
    assert op.info().released and caught.value.name == "KVT_E_TIMEOUT"


def test_cancelled_ops_raise_cancelled_error(single: kvtier.Runtime, gate: Gate) -> None:
    buffer = single.buffer(4096)
    first = single.submit([gate.work] * 25)
    ops = single.submit_each([Work.prefault(buffer)] * 20)
    for op in ops:
        op.cancel()
    for op in ops:
        with pytest.raises(kvtier.CancelledError):
            op.result(HANG_S)
    gate.open()
    first.result(HANG_S)


def test_with_cancels_and_waits(single: kvtier.Runtime, gate: Gate) -> None:
    # The gate opens after the op is cancelled: without the cancellation this would hang.
    op = single.submit([gate.work] * 100)
    gate.until_entered()
    opener = threading.Thread(target=lambda: (
        until(lambda: op.info().state & kvtier.abi.KVT_OP_CANCEL), seen.append(released(op)),
        gate.open()))
    seen: List[bool] = []
    opener.start()
    with op:
        pass
    opener.join()
    assert op.closed and gate.buffer.info().in_flight == 0
    assert seen == [False]


def test_submit_each_is_all_or_none(runtime: kvtier.Runtime) -> None:
    buffer = runtime.buffer(4096)
    with runtime.queue(capacity=8) as queue:
        work = [Work.checksum(buffer)] * 9
        with pytest.raises(kvtier.AgainError):
            runtime.submit_each(work, queue=queue)
        assert queue.stats().refused == 1 and not queue._state.known
        ops = runtime.submit_each(work[:8], queue=queue, tags=list("abcdefgh"))
        got: List[kvtier.Completion] = []
        while len(got) < 8:
            got += queue.wait(HANG_S)
        assert sorted(str(c.tag) for c in got) == list("abcdefgh")
        assert {c.op for c in got} == set(ops) and all(c.ok for c in got)
        assert queue.poll() == [] and queue.wait(0.01) == []
        with pytest.raises(ValueError, match="tags"):
            runtime.submit_each(work, tags=[1])


def test_post_needs_no_handle(runtime: kvtier.Runtime) -> None:
    buffer = runtime.buffer(4096)
    with runtime.queue() as queue:
        tag = object()
        runtime.post(Work.checksum(buffer), queue, tag=tag)
        done, = queue.wait(HANG_S)
        assert done.op is None and done.tag is tag
        assert done.value == kvtier.checksum(bytes(4096))
        runtime.post(Work.verify(buffer, 1), queue)
        bad, = queue.wait(HANG_S)
        assert not bad.ok and isinstance(bad.error, kvtier.CorruptError)
    no_ops_left(runtime)


def test_requested_moments_are_posted(single: kvtier.Runtime) -> None:
    buffer = single.buffer(4096)
    with single.queue() as queue:
        op = single.submit(Work.prefault(buffer), queue=queue, notify=kvtier.ISSUED, tag=1)
        events = 0
        while not events & kvtier.RELEASED:
            for done in queue.wait(HANG_S):
                assert done.op is op and done.tag == 1
                events |= done.events
        assert events & kvtier.ISSUED


def test_a_callback_receives_all_completions_on_one_thread(runtime: kvtier.Runtime) -> None:
    buffer, lock, seen = runtime.buffer(1 << 16), threading.Lock(), []
    threads = set()

    def called(batch: List[kvtier.Completion]) -> None:
        threads.add(threading.get_ident())
        with lock:
            for done in batch:
                assert done.op is not None and done.op.info().released
                seen.append((done.tag, done.value))
                done.op.close()  # possibly before submit returns

    with runtime.queue(callback=called) as queue:
        for i in range(500):
            runtime.submit(Work.checksum(buffer), queue=queue, tag=i)
        until(lambda: len(seen) == 500)  # a close would cancel ops that have not begun
        with pytest.raises(kvtier.StateError):
            queue.poll()
        with pytest.raises(kvtier.StateError):
            queue.fileno()
    assert sorted(tag for tag, _ in seen) == list(range(500))
    assert {value for _, value in seen} == {kvtier.checksum(bytes(1 << 16))}
    assert len(threads) == 1 and threading.get_ident() not in threads
    no_ops_left(runtime)


def test_an_exception_of_a_callback_goes_to_the_unraisable_hook(
    runtime: kvtier.Runtime, unraisable: List[Any]
) -> None:
    buffer = runtime.buffer(4096)

    def called(batch: List[kvtier.Completion]) -> None:
        raise KeyError(batch[0].tag)

    with runtime.queue(callback=called) as queue:
        runtime.submit(Work.checksum(buffer), queue=queue, tag="mine").wait(HANG_S)
    assert len(unraisable) == 1 and unraisable[0].args == ("mine",)
    assert not runtime.stats().poisoned


def test_waiting_in_a_callback_is_rejected(runtime: kvtier.Runtime) -> None:
    buffer, caught = runtime.buffer(4096), []

    def called(batch: List[kvtier.Completion]) -> None:
        for attempt in (lambda: batch[0].op.wait(1), queue.close, runtime.close):
            try:
                attempt()
            except kvtier.ReentrantError as error:
                caught.append(error.name)

    queue = runtime.queue(callback=called)
    runtime.submit(Work.checksum(buffer), queue=queue)
    until(lambda: len(caught) == 3)
    queue.close()
    assert caught == ["KVT_E_REENTRANT"] * 3


def test_a_callback_may_drop_the_last_reference() -> None:
    dropped, collected = threading.Event(), threading.Event()
    holder: List[Any] = [kvtier.Runtime(workers=1)]
    buffer = holder[0].buffer(4096)

    def called(batch: List[kvtier.Completion]) -> None:
        holder.clear()
        gc.collect()
        dropped.set()
        assert collected.wait(HANG_S)  # the batch still holds the runtime

    holder.append(holder[0].queue(callback=called))
    holder[0].submit(Work.checksum(buffer), queue=holder[1])
    assert dropped.wait(HANG_S)
    del buffer
    gc.collect()
    collected.set()


def test_closing_a_queue_cancels_its_ops(single: kvtier.Runtime, gate: Gate) -> None:
    buffer = single.buffer(4096)
    queue = single.queue()
    ops = single.submit_each([gate.work] + [Work.prefault(buffer)] * 9, queue=queue)
    gate.until_entered()
    with pytest.raises(kvtier.BusyError):
        queue.close(timeout=0)
    gate.open()
    queue.close(timeout=HANG_S)
    assert queue.closed
    states = [op.info() for op in ops]
    assert all(s.released for s in states)
    assert sum(s.status == kvtier.abi.KVT_E_CANCELLED for s in states) == 9
    with pytest.raises(kvtier.ClosedError, match="this queue is closed"):
        single.submit(Work.prefault(buffer), queue=queue)


def test_a_dropped_op_runs_to_its_end(single: kvtier.Runtime, gate: Gate) -> None:
    source, target = single.buffer(4096), single.buffer(4096)
    source.view()[:] = b"\7" * 4096
    first = single.submit(gate.work)
    single.copy(target, source)  # dropped while the gate blocks it
    gc.collect()
    assert bytes(target.view()) == bytes(4096)
    gate.open()
    first.result(HANG_S)
    assert _reaper.flush(HANG_S)
    assert bytes(target.view()) == b"\7" * 4096
    first.close()
    no_ops_left(single)


def test_an_injected_panic_poisons_only_its_runtime(runtime: kvtier.Runtime) -> None:
    with kvtier.Runtime(workers=1, faults="faults(worker=at(panic=1))") as poisoned:
        with poisoned.queue() as queue, poisoned.buffer(4096) as buffer:
            op = poisoned.submit(Work.checksum(buffer), queue=queue, tag="t")
            done, = queue.wait(HANG_S)
            assert done.tag == "t" and isinstance(done.error, kvtier.PanicError)
            with pytest.raises(kvtier.PanicError, match="injected panic at worker"):
                op.result(HANG_S)
            stats = poisoned.stats()
            assert stats.poisoned and stats.ops_submitted == 1
            with pytest.raises(kvtier.PanicError):
                poisoned.submit(Work.checksum(buffer))
            op.close()
            no_ops_left(poisoned)
        report = poisoned.close(timeout=HANG_S)
        assert report.ops == 0 and poisoned.closed
    other = runtime.buffer(4096)
    runtime.submit(Work.checksum(other)).result(HANG_S)  # another runtime is not affected


def test_close_reports_what_was_open() -> None:
    runtime = kvtier.Runtime(workers=1)
    queue, buffer, budget = runtime.queue(), runtime.buffer(4096), runtime.budget()
    account = budget.account("a")
    op = runtime.submit(Work.checksum(buffer))
    op.wait()
    assert runtime.close(HANG_S) == kvtier.CloseReport(1, 1, 1, 1, 1)
    assert runtime.close() == kvtier.CloseReport(0, 0, 0, 0, 0)
    assert op.result().bytes_done == 4096  # results outlive the runtime
    with pytest.raises(kvtier.ClosedError):
        runtime.buffer(4096)
    with pytest.raises(kvtier.ClosedError):
        runtime.stats()
    for thing in (op, buffer, account, budget, queue):
        thing.close()


def test_runtime_close_that_times_out_can_be_repeated() -> None:
    other = kvtier.Runtime(workers=1)
    with handled(), Gate(other) as gate:
        op = other.submit(gate.work)
        gate.until_entered()
        with pytest.raises(kvtier.BusyError):
            other.close(timeout=0)
        assert not other.closed
        gate.open()
        other.close(timeout=HANG_S)
        op.close()


def test_thread_hook_sees_every_thread(unraisable: List[Any]) -> None:
    seen = []

    def hook(role: str, index: int) -> None:
        seen.append((role, index))
        if index == 1:
            raise OSError("no such core")

    with kvtier.Runtime(workers=3, on_thread=hook) as runtime:
        with runtime.buffer(4096) as buffer:
            runtime.submit(Work.checksum(buffer)).result(HANG_S)
    assert sorted(seen) == [("notifier", 0), ("worker", 0), ("worker", 1), ("worker", 2)]
    assert [str(e) for e in unraisable] == ["no such core"]


def test_threads_hammer_one_runtime(runtime: kvtier.Runtime) -> None:
    queue = runtime.queue(capacity=4096)
    per_thread, n_threads = 300, 8
    failures: List[BaseException] = []
    got: List[Any] = []
    stop = threading.Event()

    def produce(seed: int) -> None:
        try:
            rng = random.Random(seed)
            data = rng.randbytes(16_384)
            source, target = runtime.buffer(16_384), runtime.buffer(16_384)
            source.view()[:] = data
            expect = kvtier.checksum(data)
            for i in range(per_thread):
                op = runtime.submit(Work.copy(target, source, expect=expect), queue=queue,
                                    tag=(seed, i))
                choice = rng.random()
                if choice < 0.3:
                    op.cancel()
                elif choice < 0.6:
                    op.result(HANG_S)
                assert op.wait(HANG_S)
                if choice >= 0.3:
                    assert bytes(target.view()) == data
        except BaseException as error:  # noqa: BLE001: reported by the main thread
            failures.append(error)

    def consume() -> None:
        while not stop.is_set() or queue.stats().pending:
            got.extend(c.tag for c in queue.wait(0.05))

    producers = [threading.Thread(target=produce, args=(i,)) for i in range(n_threads)]
    consumers = [threading.Thread(target=consume) for _ in range(2)]
    for thread in producers + consumers:
        thread.start()
    for thread in producers:
        thread.join(HANG_S)
    stop.set()
    for thread in consumers:
        thread.join(HANG_S)
    queue.close(HANG_S)
    assert not failures
    assert sorted(got) == [(s, i) for s in range(n_threads) for i in range(per_thread)]


def test_reference_cycles_of_all_objects_are_closed() -> None:
    for _ in range(5):
        runtime = kvtier.Runtime(workers=1)
        queue, buffer, budget = runtime.queue(), runtime.buffer(1 << 16), runtime.budget()
        account = budget.account("gone")
        account.reserve(kvtier.TIER_HOST, 100)
        paid = runtime.buffer(8192, account=account)
        ops = [runtime.submit(Work.checksum(buffer), queue=queue) for _ in range(20)]
        cycle: List[Any] = [runtime, queue, buffer, budget, account, paid, ops]
        cycle.append(cycle)
        del runtime, queue, buffer, budget, account, paid, ops, cycle
        gc.collect()
        assert _reaper.flush(HANG_S)
