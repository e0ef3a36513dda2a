"""Models in files and streamed weights: every byte is compared with the file."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any, Dict, List, Tuple

import kvtier
import pytest

LAYERS = 6
ALIGNMENT = 4096


def write(path: Path, tensors: Dict[str, Tuple[str, List[int], bytes]]) -> None:
    header: Dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def content(seed: int, length: int) -> bytes:
    return bytes((seed * 37 + i * i // 7) % 251 for i in range(length))


@pytest.fixture
def tensors() -> Dict[str, Tuple[str, List[int], bytes]]:
    named: Dict[str, Tuple[str, List[int], bytes]] = {}
    for layer in range(LAYERS):
        named[f"model.layers.{layer}.mlp.weight"] = ("F32", [50, 90], content(layer, 18000))
        named[f"model.layers.{layer}.norm.weight"] = ("F16", [64], content(layer + 9, 128))
        for expert in range(3 if layer == 4 else 0):
            named[f"model.layers.4.mlp.experts.{expert}.w"] = (
                "BF16", [40, 30], content(expert + 20, 2400))
    named["lm_head.weight"] = ("U8", [5000], content(30, 5000))
    return named


@pytest.fixture
def path(tmp_path: Path, tensors: Dict[str, Any]) -> Path:
    where = tmp_path / "model.safetensors"
    write(where, tensors)
    return where


def half() -> kvtier.StreamTerms:
    return kvtier.StreamTerms(host_ceiling_bytes=5 * 24576 + 6 * ALIGNMENT, host_reserve_bytes=0,
                              kv_bytes=0)


def test_a_model_describes_its_file(path: Path, tensors: Dict[str, Any]) -> None:
    with kvtier.Model(path) as model:
        info = model.info
        assert (info.format, info.files, info.tensors) == ("safetensors", 1, len(tensors))
        assert len(info.fingerprint) == 32
        for tensor in model.tensors:
            dtype, shape, data = tensors[tensor.name]
            assert (tensor.dtype, list(tensor.shape), tensor.bytes) == (dtype, shape, len(data))
            assert model.find_tensor(tensor.name) == tensor.number
        units = model.units
        assert [unit.name for unit in units][-1] == "head"
        assert units[model.find_unit(4, 1)].expert == 1
        assert units[model.find_unit(3)].layer == 3 and units[model.find_unit(3)].expert is None
        found = [part for unit in units for part in model.parts(unit.number)]
        assert sorted(part.tensor for part in found) == list(range(info.tensors))
        with pytest.raises(kvtier.NotFoundError):
            model.find_tensor("nothing")
    with pytest.raises(kvtier.ClosedError):
        model.find_tensor("lm_head.weight")
    with pytest.raises(kvtier.NotFoundError):
        kvtier.Model(path.parent / "none.safetensors")


def test_plans_explain_residency_and_predict_passes(path: Path) -> None:
    model = kvtier.Model(path)
    memory = kvtier.StreamMemory(host_free_bytes=1 << 40, host_total_bytes=1 << 40)
    plan = model.plan(half(), memory)
    assert plan["compute"] == "host" and plan["residency"]["file"]["units"] > 0 and plan["figures"]
    assert "host" in model.plan_text(half(), memory)
    slow, fast = model.forecast("disk=1", half(), memory), model.forecast("disk=2", half(), memory)
    assert fast["pass_ns"] < slow["pass_ns"] and slow["binding"] == "disk"
    with pytest.raises(kvtier.SpecError):
        model.forecast("tape=1", half(), memory)
    with pytest.raises(kvtier.BudgetError, match="at least"):
        model.plan(kvtier.StreamTerms(host_ceiling_bytes=0), memory)
    with pytest.raises(kvtier.InvalidError):
        model.plan(kvtier.StreamTerms(placement="anywhere"), memory)


@pytest.mark.parametrize("in_place", [False, True])
def test_units_have_the_bytes_of_the_file(runtime: kvtier.Runtime, path: Path, in_place: bool,
                                          tensors: Dict[str, Any]) -> None:
    model = kvtier.Model(path)
    units = model.units
    with kvtier.Streamer(runtime, model, half(), in_place=in_place, marks=50) as streamer:
        model.close()
        streamer.wait_resident()
        assert streamer.progress()["missing"] == 0
        for _ in range(3):
            streamer.pass_begin()
            streamer.hint([unit.number for unit in units if unit.expert == 2])
            for unit in units:
                with streamer.acquire(unit.number, timeout=600) as held:
                    for name in tensors:
                        try:
                            got = held.view(name)
                        except kvtier.NotFoundError:
                            continue
                        assert bytes(got) == tensors[name][2]
                    if in_place:
                        assert streamer.unit_address(unit.number)[0] == held.address
                    del got  # a view keeps the lease
            streamer.pass_end()
        stats = streamer.stats()
        assert stats["passes"] == 3 and stats["failed"] == 0
        assert [count.layer for count in streamer.layers()] == [4]
        assert {mark.stage for mark in streamer.marks()} <= {"read", "copy", "use", "wait"}
        assert len(streamer.residency()) == len(units) and "file" in streamer.residency()
        assert streamer.plan()["compute"] == "host" and streamer.plan_text()
        assert streamer.describe_io()
        assert streamer.verify(0) == streamer.verify(0)


def test_unit_arrays_are_views_that_keep_the_lease(runtime: kvtier.Runtime, path: Path,
                                                   tensors: Dict[str, Any]) -> None:
    numpy = pytest.importorskip("numpy")
    model = kvtier.Model(path)
    with kvtier.Streamer(runtime, model, half()) as streamer:
        held = streamer.acquire(model.find_unit(2))
        array = held.array("model.layers.2.mlp.weight")
        want = numpy.frombuffer(tensors["model.layers.2.mlp.weight"][2], numpy.float32)
        assert array.shape == (50, 90) and not array.flags.writeable
        assert numpy.array_equal(array.view("u4"), want.reshape(50, 90).view("u4"))
        assert held.array("model.layers.2.norm.weight").dtype == numpy.float16
        with streamer.acquire(model.find_unit(4, 1)) as expert:
            assert expert.array("model.layers.4.mlp.experts.1.w").dtype == numpy.uint16
            with pytest.raises(kvtier.NotFoundError):
                expert.array("lm_head.weight")
        held.release()
        assert held.released
        with pytest.raises(kvtier.StateError):
            held.view("model.layers.2.mlp.weight")
        # A view keeps the lease.
        with pytest.raises(kvtier.BusyError):
            streamer.close()
        assert numpy.array_equal(array.view("u4"), want.reshape(50, 90).view("u4"))
        del array
        gc.collect()
        streamer.close()
        assert streamer.closed


def test_rebalance_shrinks_the_resident_set(runtime: kvtier.Runtime, path: Path) -> None:
    model = kvtier.Model(path)
    with kvtier.Streamer(runtime, model, half()) as streamer:
        before = streamer.residency().count("host")
        plan = streamer.rebalance(host_bytes=4 * 24576 + 6 * ALIGNMENT)
        assert plan["host_units"] < before
        with pytest.raises(kvtier.BudgetError):
            streamer.rebalance(host_bytes=0)
        for unit in range(LAYERS):
            held = streamer.poll(unit)
            if held is None:
                held = streamer.acquire(unit)
            held.release()
        with pytest.raises(kvtier.InvalidError):
            streamer.acquire(1000)
    with pytest.raises(kvtier.UnsupportedError):
        kvtier.Streamer(runtime, model, kvtier.StreamTerms(compute="device"))


def test_a_streamer_whose_units_all_fit_can_shrink(runtime: kvtier.Runtime, path: Path) -> None:
    plenty = dataclasses.replace(half(), host_ceiling_bytes=1 << 26)
    with kvtier.Model(path) as model:
        assert model.plan(plenty)["slots"]["count"] == 0
        lean = dataclasses.replace(plenty, shrinks=True)
        assert model.plan(lean)["slots"]["count"] == 2
        with kvtier.Streamer(runtime, model, lean) as streamer:
            plan = streamer.rebalance(host_bytes=half().host_ceiling_bytes)
            assert 0 < plan["file_units"] and plan["host_bytes"] <= half().host_ceiling_bytes
            for unit in range(LAYERS):
                streamer.acquire(unit).release()


def test_a_table_model_has_the_callers_units(runtime: kvtier.Runtime, path: Path) -> None:
    data = path.read_bytes()
    model = kvtier.Model.table([path], [
        kvtier.UnitEntry("one", [(0, 100, 5000), (0, 6000, 10)]),
        kvtier.UnitEntry("two", [(0, 20000, 1)], kvtier.ROLE_LAYER, 0)])
    with kvtier.Streamer(runtime, model, order=[1, 0], sidecar=path.parent / "sums",
                         verify="first") as streamer:
        with streamer.acquire(0) as held:
            assert bytes(held.view("one#0")) == data[100:5100]
            assert bytes(held.view("one#1")) == data[6000:6010]
        with streamer.acquire(model.find_unit(0)) as held:
            assert bytes(held.view(model.find_tensor("two#0"))) == data[20000:20001]
    with pytest.raises(kvtier.InvalidError):
        kvtier.Model.table([path], [kvtier.UnitEntry("one", [(0, len(data), 1)])])
