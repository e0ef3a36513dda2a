"""The window of vLLM's versions, and interfaces that have changed."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
import warnings
from typing import Any, Dict

import kvtier
import pytest

PARTS = ("tier", "policy", "spec", "connector")
BASE = "vllm.v1.kv_offload.base"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of the package's modules with a version of vLLM."""
    from kvtier import _probe

    monkeypatch.setattr(_probe, "_warned", set())

    def loaded(name: str, version: str) -> Any:
        import vllm

        monkeypatch.setattr(vllm, "__version__", version)
        monkeypatch.delitem(sys.modules, f"kvtier_vllm.{name}", raising=False)
        return importlib.import_module(f"kvtier_vllm.{name}")

    return loaded


def changed(base: Any, members: Dict[str, Any]) -> Any:
    return type(base.__name__, (base,), members)


@pytest.mark.parametrize("version", ["0.30.9", "0.3", ""])
@pytest.mark.parametrize("name", PARTS)
def test_versions_before_the_window_are_rejected(load: Any, version: str, name: str) -> None:
    with pytest.raises(kvtier.UnsupportedError, match="0.31 and newer.*'vllm==0.33.\\*'"):
        load(name, version)


@pytest.mark.parametrize("version", ["0.34.0", "0.330.0", "1.0"])
@pytest.mark.parametrize("name", PARTS)
def test_untested_versions_with_the_same_interfaces_give_a_warning(load: Any, version: str,
                                                                   name: str) -> None:
    with pytest.warns(UserWarning, match=f"vLLM {version} .* 0.31, 0.32 and 0.33") as caught:
        load(name, version)
    assert len(caught) == 1


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.1.dev3+gabc"])
@pytest.mark.parametrize("name", PARTS)
def test_tested_versions_give_no_warning(load: Any, version: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(name, version)


def test_a_renamed_parameter_is_rejected_by_name(load: Any, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    module = importlib.import_module(CONNECTOR)
    monkeypatch.setattr(module, "KVConnectorBase_V1", changed(module.KVConnectorBase_V1, {
        "get_num_new_matched_tokens": lambda self, request, x: (0, False)}))
    with pytest.raises(kvtier.UnsupportedError) as error:
        load("connector", "0.34.0")
    assert str(error.value).startswith(
        "vLLM 0.34.0: KVConnectorBase_V1.get_num_new_matched_tokens takes (request, x), this "
        "connector implements (request, num_computed_tokens): run pip install 'vllm==0.33.*', or "
        "install a newer kvtier")


def test_a_missing_method_is_rejected_by_name(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(BASE)
    monkeypatch.setattr(module, "OffloadingManager", changed(
        module.OffloadingManager, {"reset_cache": None}))
    with pytest.raises(kvtier.UnsupportedError, match="OffloadingManager has no method reset_cach"):
        load("spec", "0.34.0")


def test_a_missing_field_is_rejected_by_name(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("vllm.v1.kv_offload.tiering.base")
    monkeypatch.setattr(module, "TransferJob", dataclasses.make_dataclass(
        "TransferJob", ["job_id", "keys", "block_ids", "req_context"]))
    with pytest.raises(kvtier.UnsupportedError, match="TransferJob has no chunk_ids"):
        load("tier", "0.34.0")


def test_a_missing_enum_member_is_rejected_by_name(load: Any, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    module = importlib.import_module(BASE)
    monkeypatch.setattr(module, "LookupResult", enum.Enum("LookupResult", ["MISS", "HIT"]))
    with pytest.raises(kvtier.UnsupportedError, match="LookupResult has no RETRY"):
        load("tier", "0.34.0")
    load("policy", "0.33.0")  # does not use it


def test_a_policy_without_the_context_of_inserts_takes_that_of_the_miss(
        load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM before 0.33, whose `CachePolicy.insert` has no request."""
    base = importlib.import_module("vllm.v1.kv_offload.cpu.policies.base")
    request = importlib.import_module(BASE).ReqContext
    old = changed(base.CachePolicy, {"insert": lambda self, key, chunk: None})
    monkeypatch.setattr(base, "CachePolicy", old)
    policy = load("policy", "0.32.0").KvtierPolicy(4)
    one, two = (request(name, {"kvtier": {"tenant": tenant, "session": name}})
                for name, tenant in (("one", 1), ("two", 2)))
    keys = [bytes([n]) * 36 for n in range(3)]
    policy.on_store_miss(keys[:2], one)
    policy.on_store_miss(keys[2:], two)
    for key in keys:
        policy.insert(key, base.ChunkStatus(0))
    assert [context for _, context in policy._pending_inserts] == [one, one, two]
    policy.on_request_finished([keys[:2]], set(), set(), one)
    policy.on_request_finished([keys[2:]], set(), set(), two)
    assert not policy._contexts._contexts
    policy.policy.close()
