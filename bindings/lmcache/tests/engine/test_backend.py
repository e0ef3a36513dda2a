"""The plugin in LMCache's storage manager: chunks, pins, references, limits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, List

import pytest
import torch
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat
from sites import CHUNK_BYTES, bytes_of, config, key, metadata

import kvtier
from kvtier_lmcache import KvtierBackend, _chunks

KEYS = [key(number) for number in range(8)]


def run(site: Any, work: Any) -> Any:
    """Runs a coroutine in the storage manager's loop."""
    return asyncio.run_coroutine_threadsafe(work, site.manager.loop).result(600)


def test_chunks_come_back_equal_and_every_reference_is_returned(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    assert site.manager.batched_contains(KEYS) == (0, {})
    content = site.put(range(8))
    assert site.used_bytes == 0
    assert site.manager.batched_contains([*KEYS, key(9)]) == (8, {"kvtier": KEYS})
    assert site.manager.contains(KEYS[3]) == "kvtier"
    assert site.get([*KEYS[::-1], key(9)]) == [*content[::-1], None]
    assert site.used_bytes == 0 and site.manager.memcheck()


def test_shape_type_and_format_come_back(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    cases: List[Any] = [
        ([torch.Size([2, 4, 16, 128])], [torch.bfloat16], MemoryFormat.KV_2LTD),
        ([torch.Size([2, 4, 7, 128])], [torch.bfloat16], MemoryFormat.KV_2LTD),
        ([torch.Size([16, 2, 128])], [torch.float16], MemoryFormat.KV_T2D),
        ([torch.Size([2, 16, 128])], [torch.float16], MemoryFormat.KV_2TD),
        ([torch.Size([1, 4, 16, 576])], [torch.float8_e4m3fn], MemoryFormat.KV_MLA_FMT),
        ([torch.Size([2, 3, 16, 128]), torch.Size([2, 1, 16, 64])],
         [torch.bfloat16, torch.float32], MemoryFormat.KV_2LTD),
    ]
    content = [site.put([at], shapes=shapes, dtypes=dtypes, fmt=fmt)[0]
               for at, (shapes, dtypes, fmt) in enumerate(cases)]
    for again in (site, None):
        if again is None:
            site.close()
            site = opened(tmp_path)
        loaded = site.manager.batched_get(KEYS[:len(cases)], location="kvtier")
        for obj, given, (shapes, dtypes, fmt) in zip(loaded, content, cases):
            assert (obj.get_shapes(), obj.get_dtypes(), obj.get_memory_format()) == (
                shapes, dtypes, fmt)
            assert bytes_of(obj) == given
            obj.ref_count_down()


def test_keys_differ_by_model_rank_type_layer_and_tags(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    one = key(1)
    keys = [one, key(1, model_name="other"), key(1, world_size=2), key(1, worker_id=1),
            key(1, dtype=torch.float16), key(1, request_configs={"lmcache.tag.user": "a"}),
            key(1, request_configs={"lmcache.tag.user": "b"}), *one.split_layers(2)]
    content = site.put(range(len(keys)), keys=keys)
    assert site.get(keys) == content and len(set(content)) == len(keys)
    assert site.backend.contains(key(1, request_configs={"other": 1}))


def test_a_stored_chunk_is_not_stored_again(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    content = site.put([1])
    site.put([2], keys=[key(1)])
    assert site.get([key(1)]) == content
    assert site.backend.batched_submit_put_task([key(1)], []) is None
    [obj] = site.objects([3])
    assert site.backend.batched_submit_put_task([key(1)], [obj]) is None
    assert obj.get_ref_count() == 1
    obj.ref_count_down()


def test_each_completed_put_is_reported_once(opened: Any, tmp_path: Any) -> None:
    site, reported = opened(tmp_path), []

    def report(one: Any) -> None:
        reported.append(one)
        raise ValueError("an error of the callback is not one of the store")

    objects = site.objects(range(4))
    futures = site.backend.batched_submit_put_task(KEYS[:4], objects, on_complete_callback=report)
    for future in futures:
        future.result(600)
    assert sorted(one.chunk_hash for one in reported) == [0, 1, 2, 3]
    assert not any(map(site.backend.exists_in_put_tasks, KEYS))
    for obj in objects:
        assert obj.get_ref_count() == 1
        obj.ref_count_down()


def test_a_chunk_that_is_given_twice_is_stored_once(opened: Any, tmp_path: Any) -> None:
    site, reported = opened(tmp_path), []
    objects = site.objects([5, 5])
    [future] = site.backend.batched_submit_put_task([KEYS[5], KEYS[5]], objects,
                                                    on_complete_callback=reported.append)
    future.result(600)
    assert reported == [KEYS[5]] and [obj.get_ref_count() for obj in objects] == [1, 1]
    for obj in objects:
        obj.ref_count_down()


def test_threads_put_and_get_the_same_chunks(opened: Any, tmp_path: Any) -> None:
    site, wrong = opened(tmp_path), []
    expected = [bytes_of(obj) for obj in site.objects(range(8))]  # freed with the last reference

    def work(offset: int) -> None:
        for _ in range(20):
            at = [(offset + one) % 8 for one in range(8)]
            objects = site.objects(at)
            site.manager.batched_put([KEYS[one] for one in at], objects)
            found = site.manager.batched_get([KEYS[one] for one in at], location="kvtier")
            for one, obj in zip(at, found):
                if obj is not None:
                    if bytes_of(obj) != expected[one]:
                        wrong.append(one)
                    obj.ref_count_down()

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    site.backend._puts.drain()
    assert not wrong and site.used_bytes == 0 and site.get(KEYS) == expected


def test_removed_chunks_are_gone(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    content = site.put(range(8))
    assert site.manager.remove(KEYS[2]) == 1 and site.manager.remove(KEYS[2]) == 0
    assert site.manager.batched_contains(KEYS)[0] == 2
    assert site.get(KEYS) == [*content[:2], None, *content[3:]]
    assert site.manager.batched_remove(KEYS) == 7
    assert site.manager.batched_contains(KEYS)[0] == 0


def test_clear_removes_all_but_pinned_chunks_and_counts_tokens(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    content = site.put(range(8))
    assert site.backend.pin(KEYS[0])
    assert site.manager.clear(["kvtier"]) == 7 * 16
    assert site.get(KEYS[:2]) == [content[0], None]
    assert site.backend.unpin(KEYS[0]) and site.manager.clear(["kvtier"]) == 16


def test_pinned_chunks_survive_a_full_store(opened: Any) -> None:
    site = opened(None, host_bytes="16MiB")
    content = site.put(range(8))
    assert site.manager.batched_contains(KEYS, pin=True)[0] == 8
    for first in range(100, 1700, 100):  # 50 MiB
        site.put(range(first, first + 100))
    assert site.get(KEYS) == content
    site.manager.batched_unpin(KEYS)
    for first in range(2000, 3600, 100):
        site.put(range(first, first + 100))
    assert site.manager.batched_contains(KEYS)[0] == 0
    assert not site.backend.unpin(KEYS[0]) and not site.backend.pin(KEYS[0])


def test_a_forced_removal_ends_the_pins(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    site.put(range(8))
    assert site.manager.batched_contains(KEYS, pin=True)[0] == 8
    assert not site.backend.remove(KEYS[0], force=False)
    assert site.backend.remove(KEYS[0]) and not site.backend.contains(KEYS[0])
    assert not site.backend.remove(KEYS[1], force=False)  # the others stay pinned


def test_a_full_disk_evicts_without_an_error(
        opened: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    site = opened(tmp_path, host_bytes="16MiB", disk_bytes="64MiB")
    for first in range(0, 3200, 100):  # 100 MiB
        content = site.put(range(first, first + 100))
    assert site.get([key(number) for number in range(3100, 3200)]) == content
    assert not site.backend.contains(key(0))
    assert site.backend.store.stats()["disk_used_bytes"] <= 64 << 20
    assert "not stored" not in caplog.text


def test_lookups_in_the_loop_pin_until_the_chunks_are_loaded(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    content = site.put(range(8))
    backend = site.backend
    assert run(site, backend.batched_async_contains("a", [*KEYS, key(9)], True)) == 8
    assert not backend.remove(KEYS[0], force=False)
    loaded = run(site, backend.batched_get_non_blocking("a", KEYS))
    assert [bytes_of(obj) for obj in loaded] == content
    for obj in loaded:
        obj.ref_count_down()
    assert backend.remove(KEYS[0], force=False)
    assert run(site, backend.batched_async_contains("b", KEYS)) == 0
    [obj] = run(site, backend.batched_get_non_blocking("b", [KEYS[1], KEYS[0], KEYS[2]]))
    # The chunk behind the gap was released; the one before it is the caller's.
    assert bytes_of(obj) == content[1] and site.used_bytes == CHUNK_BYTES
    obj.ref_count_down()


def test_the_storage_manager_prefetches(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path, {"enable_async_loading": True})
    content, answers = site.put(range(4)), []

    class Server:
        def send_response_to_scheduler(self, lookup: str, tokens: int) -> None:
            answers.append((lookup, tokens))
            answered.set()

    answered = threading.Event()
    site.manager.async_lookup_server = Server()
    run(site, site.manager.async_lookup_and_prefetch(
        "request", [*KEYS[:4], key(99)], [0, 16, 32, 48, 64, 80], pin=True))
    assert answered.wait(600) and answers == [("request", 64)]
    from lmcache.v1.event_manager import EventType
    [found] = site.events.pop_event(EventType.LOADING, "request").result()
    assert [(one, bytes_of(obj)) for one, obj in found] == list(zip(KEYS, content))
    for _, obj in found:
        obj.ref_count_down()


def test_layers_are_got_one_by_one(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path, {"use_layerwise": True})
    layers = [list(row) for row in zip(*(one.split_layers(4) for one in KEYS[:3]))]
    shape, content = [torch.Size([16, 2, 128])], []
    for at, row in enumerate(layers):
        content.append(site.put(range(at * 3, at * 3 + 3), keys=row, shapes=shape,
                                fmt=MemoryFormat.KV_T2D))
    for task, given in zip(site.manager.layerwise_batched_get(layers, "kvtier"), content):
        found = task.result(600)
        assert [bytes_of(obj) for obj in found] == given
        assert {obj.get_memory_format() for obj in found} == {MemoryFormat.KV_T2D}
        for obj in found:
            obj.ref_count_down()


def test_loaded_chunks_are_kept_in_lmcaches_memory(opened: Any, tmp_path: Any) -> None:
    opened(tmp_path).put(range(4))
    site = opened(tmp_path / "other", {"local_cpu": True})
    content = site.put(range(4))
    site.manager.storage_backends["LocalCPUBackend"].clear()
    assert site.manager.batched_contains(KEYS[:4])[1] == {"kvtier": KEYS[:4]}
    for obj in site.manager.batched_get(KEYS[:4], location="kvtier"):
        obj.ref_count_down()
    assert site.manager.batched_contains(KEYS[:4])[1] == {"LocalCPUBackend": KEYS[:4]}
    loaded = site.manager.batched_get(KEYS[:4])
    assert [bytes_of(obj) for obj in loaded] == content
    for obj in loaded:
        obj.ref_count_down()


def test_without_memory_the_leading_chunks_are_loaded(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path, {"max_local_cpu_size": 6 * CHUNK_BYTES / 2**30})
    content = [*site.put(range(4)), *site.put(range(4, 8))]
    assert site.get(KEYS) == [*content[:6], None, None]
    assert site.used_bytes == 0


def test_more_shapes_than_the_store_has_room_for_are_not_stored(
        opened: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    site = opened(tmp_path)
    shapes = [[torch.Size([2, 1, 1, 64 * (at + 1)])] for at in range(_chunks.MAX_KINDS + 2)]
    keys = [key(at) for at in range(len(shapes))]
    content = [site.put([at], shapes=shape)[0] for at, shape in enumerate(shapes)]
    found = site.get(keys)
    assert found[:_chunks.MAX_KINDS] == content[:_chunks.MAX_KINDS]
    assert found[_chunks.MAX_KINDS:] == [None, None] and site.used_bytes == 0
    assert not any(map(site.backend.exists_in_put_tasks, keys))
    assert "save_unfull_chunk" in caplog.text
    site.close()
    assert opened(tmp_path).get(keys) == found


def test_bytes_without_a_tensor_are_not_stored(
        opened: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    site = opened(tmp_path)
    assert site.backend.batched_submit_put_task([key(1)], [BytesBufferMemoryObj(b"packed")]) is None
    [narrow] = site.objects([2])
    narrow.set_used_size(100)
    assert site.backend.batched_submit_put_task([key(2)], [narrow]) is None
    assert narrow.get_ref_count() == 1
    narrow.ref_count_down()
    assert "BINARY_BUFFER is not stored" in caplog.text


def test_closing_waits_for_puts_before_lmcaches_memory_is_freed(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    for first in range(0, 800, 100):
        numbers = range(first, first + 100)
        site.manager.batched_put([key(one) for one in numbers], site.objects(numbers))
    site.close()
    again = opened(tmp_path)
    keys = [key(one) for one in range(800)]
    for first in range(0, 800, 100):
        objects = again.objects(range(first, first + 100))
        expected = [bytes_of(obj) for obj in objects]
        for obj in objects:
            obj.ref_count_down()
        assert again.get(keys[first:first + 100]) == expected


def test_a_get_does_not_use_memory_that_closed_meanwhile(
        opened: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site = opened(tmp_path)
    site.put([1])
    backend, count = site.backend, site.backend._puts.using_memory

    def close_and_count() -> Any:
        backend._close_local_cpu()
        return count()

    with monkeypatch.context() as patched:
        patched.setattr(backend, "_close_memory", lambda: None)
        patched.setattr(backend._puts, "using_memory", close_and_count)
        assert backend.get_blocking(key(1)) is None


def test_a_format_that_lmcache_lacks_is_not_a_kind(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    kind = _chunks.Kind(((2, 4, 16, 128),), ("bfloat16",), "KV_2LTD")
    assert _chunks.from_page(_chunks.to_page(kind)) == kind
    assert _chunks.from_page(_chunks.to_page(kind._replace(fmt="KV_NEW"))) is None
    # Its page stays, and a store with such a page works.
    other = kind._replace(fmt="KV_NEW")
    site.backend._kinds._write_page(other)
    site.close()
    again = opened(tmp_path)
    content = again.put(range(4))
    assert again.get(KEYS[:4]) == content and again.backend._kinds.known()[0][0].fmt == "KV_2LTD"


def test_a_closed_backend_has_nothing_and_raises_nothing(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    site.put(range(4))
    [obj] = site.objects([5])
    assert site.manager.close_backend("kvtier")
    backend = site.backend
    backend.close()
    assert not backend.contains(KEYS[0], True) and backend.batched_contains(KEYS) == 0
    assert backend.batched_get_blocking(KEYS[:2]) == [None, None]
    assert backend.batched_submit_put_task([key(5)], [obj]) is None
    assert not backend.remove(KEYS[0]) and backend.clear() == 0 and not backend.unpin(KEYS[0])
    assert obj.get_ref_count() == 1
    obj.ref_count_down()


def test_lmcache_closes_and_creates_the_backend_while_it_runs(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    content = site.put(range(4))
    assert site.manager.recreate_backend("kvtier") == {"kvtier": "KvtierBackend"}
    assert site.manager.storage_backends["kvtier"] is not site.backend
    assert site.get(KEYS[:4]) == content


@pytest.mark.parametrize("meta, engine, text", [
    ({"role": "scheduler"}, {}, "scheduler"),
    ({}, {"enable_blending": True}, "positions"),
])
def test_what_is_not_supported_is_rejected(meta: Any, engine: Any, text: str,
                                           tmp_path: Any) -> None:
    with pytest.raises(kvtier.UnsupportedError, match=text):
        KvtierBackend(config(tmp_path, engine), metadata(**meta), object())


def test_without_lmcaches_memory_it_is_rejected(tmp_path: Any) -> None:
    with pytest.raises(kvtier.UnsupportedError, match="max_local_cpu_size"):
        KvtierBackend(config(tmp_path), metadata(), None)


def test_lmcache_goes_on_without_a_backend_that_cannot_open(opened: Any, tmp_path: Any) -> None:
    """LMCache logs the error, and has no such backend."""
    site = opened(tmp_path, plcy="lru")
    assert site.backend is None and site.manager.batched_contains(KEYS) == (0, {})
    with pytest.raises(kvtier.InvalidError, match="did you mean 'policy'"):
        KvtierBackend(config(tmp_path, plcy="lru"), metadata(), object())
