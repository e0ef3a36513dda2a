"""asyncio: hundreds of ops at once, and cancellation that waits for the release."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any, Callable, List

import kvtier
import pytest
from conftest import no_ops_left
from gate import HANG_S, Gate, released
from kvtier import TIER_HOST, Work


async def until(holds: Callable[[], Any]) -> None:
    """Waits until `holds` returns true, without blocking the loop."""
    async def poll() -> None:
        while not holds():
            await asyncio.sleep(0.0005)

    await asyncio.wait_for(poll(), HANG_S)


def test_hundreds_of_ops_are_awaited_at_once(runtime: kvtier.Runtime) -> None:
    async def main() -> None:
        async with runtime.queue() as queue:
            source = runtime.buffer(800 * 1024)
            source.view()[:] = random.Random(5).randbytes(800 * 1024)
            target = runtime.buffer(800 * 1024)

            async def copy(i: int) -> int:
                at = i * 1024
                work = Work.copy(target, source, 1024, dst_offset=at, src_offset=at, checksum=True)
                result = await runtime.submit(work, queue=queue, timeout=HANG_S)
                assert bytes(target.view()[at : at + 1024]) == bytes(source.view()[at : at + 1024])
                return result.value

            values = await asyncio.gather(*(copy(i) for i in range(800)))
            expected = [kvtier.checksum(source.view()[i * 1024 : (i + 1) * 1024])
                        for i in range(800)]
            assert values == expected
            # Awaiting a released op does not wait, so its completion may still be in the queue
            # until the loop drains it.
            await until(lambda: not queue._state.known)

    asyncio.run(main())
    no_ops_left(runtime)


def test_several_tasks_and_a_late_one_await_one_op(runtime: kvtier.Runtime) -> None:
    async def main() -> None:
        async with runtime.queue() as queue:
            buffer = runtime.buffer(1 << 20)
            op = runtime.submit(Work.checksum(buffer), queue=queue)

            async def wait() -> Any:
                return await op

            results = await asyncio.gather(*(wait() for _ in range(5)))
            assert len(set(results)) == 1 and await op == results[0]

    asyncio.run(main())


def test_await_raises_the_error_of_the_op(single: kvtier.Runtime, gate: Gate) -> None:
    async def main() -> None:
        async with single.queue() as queue:
            buffer = single.buffer(4096)
            with pytest.raises(kvtier.CorruptError):
                await single.submit(Work.verify(buffer, 1), queue=queue)
            op = single.submit([gate.work] * 25, queue=queue, timeout=0.001)
            await until(lambda: op.info().resolved)
            gate.open()
            with pytest.raises(TimeoutError):
                await op
            assert op.info().released
            op = single.submit(Work.prefault(buffer), queue=queue)
            op.cancel()
            try:
                await op
            except kvtier.CancelledError:
                pass  # an op that has begun may also succeed

    asyncio.run(main())


def test_cancelling_a_task_waits_for_the_release(single: kvtier.Runtime, gate: Gate) -> None:
    async def main() -> None:
        async with single.queue() as queue:
            op = single.submit([gate.work] * 50, queue=queue)

            async def wait() -> Any:
                return await op

            task = asyncio.ensure_future(wait())
            await asyncio.sleep(0)  # the task must have begun to await
            await until(gate.entered.is_set)
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done(), "the worker still uses the memory"
            task.cancel()  # a second cancellation changes nothing
            await asyncio.sleep(0)
            assert not task.done() and not released(op)
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert op.info().released and gate.buffer.info().in_flight == 0
            # Only the item that had begun was executed.
            assert op.info().items_failed == 49

    asyncio.run(main())


def test_wait_for_cancels_the_op_and_waits_for_its_release(single: kvtier.Runtime,
                                                           gate: Gate) -> None:
    async def main() -> None:
        async with single.queue() as queue:
            op = single.submit([gate.work] * 50, queue=queue)
            seen: List[bool] = []

            async def open_after_cancel() -> None:
                await until(lambda: op.info().state & kvtier.abi.KVT_OP_CANCEL)
                seen.append(released(op))
                gate.open()

            await until(gate.entered.is_set)
            opener = asyncio.ensure_future(open_after_cancel())
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(op, 0.02)
            assert op.info().released
            await opener
            assert seen == [False]

    asyncio.run(main())


def test_reservations_can_be_awaited(runtime: kvtier.Runtime) -> None:
    async def main() -> None:
        async with runtime.queue() as queue:
            with runtime.budget(host_bytes=1 << 20) as budget, budget.account("a") as account:
                await account.reserve_later(TIER_HOST, 1 << 20, queue=queue)
                later = account.reserve_later(TIER_HOST, 1 << 19, queue=queue)
                asyncio.get_running_loop().call_later(
                    0.01, account.commit, TIER_HOST, 1 << 20, 0)
                await later
                account.commit(TIER_HOST, 1 << 19, 0)
                later.close()

    asyncio.run(main())


def test_await_needs_an_attached_queue(runtime: kvtier.Runtime) -> None:
    async def main() -> None:
        buffer = runtime.buffer(4096)
        with runtime.queue() as queue:
            for op in (slow_op(queue), slow_op(None)):
                with pytest.raises(RuntimeError, match="attached"):
                    await op._wait_released()
            queue.attach()
            with pytest.raises(kvtier.StateError):
                queue.poll()
            with pytest.raises(kvtier.StateError):
                queue.wait(0)
            await runtime.submit(Work.checksum(buffer), queue=queue)
            queue.detach()
            queue.poll()

    def slow_op(queue: Any) -> kvtier.Op:
        return runtime.submit(Work.prefault(runtime.buffer(4096)), queue=queue)

    asyncio.run(main())


def test_closing_the_queue_wakes_its_awaiters(single: kvtier.Runtime, gate: Gate) -> None:
    async def main() -> None:
        queue = single.queue().attach()
        buffer = single.buffer(4096)
        ops = single.submit_each([gate.work] + [Work.prefault(buffer)] * 9, queue=queue)

        async def wait(op: kvtier.Op) -> Any:
            return await op

        tasks = [asyncio.ensure_future(wait(op)) for op in ops]
        await asyncio.sleep(0)  # all tasks have begun to await
        await until(gate.entered.is_set)
        closing = asyncio.ensure_future(queue.aclose())
        await until(lambda: all(released(op) for op in ops[1:]))
        assert not closing.done()
        gate.open()
        await closing
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_S)
        assert sum(isinstance(r, kvtier.CancelledError) for r in results) == 9

    asyncio.run(main())


def test_another_thread_can_close_an_attached_queue(runtime: kvtier.Runtime) -> None:
    async def main() -> None:
        queue = runtime.queue().attach()
        buffer = runtime.buffer(4096)
        await runtime.submit(Work.checksum(buffer), queue=queue)
        thread = threading.Thread(target=queue.close)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        assert queue.closed

    asyncio.run(main())


def test_ops_submitted_by_threads_are_awaited_in_the_loop(runtime: kvtier.Runtime) -> None:
    async def main() -> None:
        async with runtime.queue() as queue:
            buffer = runtime.buffer(65_536)
            loop = asyncio.get_running_loop()

            def submit() -> List[kvtier.Op]:
                return [runtime.submit(Work.checksum(buffer), queue=queue) for _ in range(100)]

            batches = await asyncio.gather(*(loop.run_in_executor(None, submit) for _ in range(4)))
            for ops in batches:
                for op in ops:
                    await op

    asyncio.run(main())


def test_a_queue_can_be_closed_after_its_loop(runtime: kvtier.Runtime) -> None:
    queue = runtime.queue()

    async def main() -> None:
        queue.attach()
        await runtime.submit(Work.checksum(runtime.buffer(4096)), queue=queue)

    asyncio.run(main())
    queue.close(HANG_S)
