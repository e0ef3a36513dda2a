"""The stand-ins of the other tests match lmdeploy 0.18, which builds our connector."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

harness = pytest.importorskip("harness")
if not importlib.metadata.version("lmdeploy").startswith("0.18."):
    pytest.skip("the stand-ins are those of lmdeploy 0.18", allow_module_level=True)
import kvtier_lmdeploy  # noqa: E402
from lmdeploy.messages import KVTransferConfig  # noqa: E402
from lmdeploy.pytorch.kv_connector import base, factory  # noqa: E402

STUBS = Path(__file__).resolve().parents[1] / "stubs"


def stub(name: str) -> Any:
    path = STUBS / "lmdeploy" / "pytorch" / "kv_connector" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"stub_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def signature(function: Any) -> Any:
    """Returns names, kinds and defaults of the parameters, without annotations."""
    return [(one.name, one.kind, one.default)
            for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", [
    name for name, value in vars(stub("base")).items()
    if inspect.isclass(value) and value.__module__ == "stub_base"])
def test_stand_in_classes_match(name: str) -> None:
    ours, theirs = getattr(stub("base"), name), getattr(base, name)
    if dataclasses.is_dataclass(ours):
        def fields(of: Any) -> Any:
            return [(one.name, one.default is dataclasses.MISSING,
                     one.default_factory is dataclasses.MISSING) for one in dataclasses.fields(of)]
        assert fields(ours) == fields(theirs)
    for member, function in vars(theirs).items():
        if inspect.isfunction(function) and not dataclasses.is_dataclass(theirs):
            assert signature(getattr(ours, member)) == signature(function), member
    abstract = getattr(theirs, "__abstractmethods__", frozenset())
    assert getattr(ours, "__abstractmethods__", frozenset()) == abstract


def test_stand_in_roles_match() -> None:
    assert [one.name for one in stub("base").KVConnectorRole] == [
        one.name for one in base.KVConnectorRole]


@pytest.mark.parametrize("name", ["build_kv_connector", "prepare_kv_connector_config"])
def test_stand_in_factory_matches_and_is_replaced(name: str) -> None:
    from kvtier_lmdeploy import _activate

    assert signature(getattr(stub("factory"), name)) == signature(_activate._originals[name])
    assert getattr(factory, name).__module__ == "kvtier_lmdeploy._activate"


def test_connector_overrides_the_whole_interface() -> None:
    """A method that a new lmdeploy adds to the interface fails this test."""
    inherited = {"bind_connector_metadata", "clear_connector_metadata", "_get_connector_metadata"}
    theirs = {name for name, value in vars(base.KVConnectorBase).items()
              if inspect.isfunction(value)}
    assert theirs - inherited <= set(vars(kvtier_lmdeploy.KvtierConnector))
    for name in theirs - inherited - {"__init__"}:
        assert signature(getattr(kvtier_lmdeploy.KvtierConnector, name)) == signature(
            getattr(base.KVConnectorBase, name)), name


@pytest.mark.parametrize("module", ["engine/engine.py", "engine/model_agent/agent.py"])
def test_engine_modules_import_the_factory_by_name(module: str) -> None:
    """Reads the sources: these modules cannot be imported on a machine without a GPU."""
    root = Path(inspect.getfile(base)).parents[1]
    tree = ast.parse((root / module).read_text(encoding="utf-8"))
    taken = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
             and (node.module or "").endswith("kv_connector") for alias in node.names}
    calls = {node.func.id: {one.arg for one in node.keywords} for node in ast.walk(tree)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
             and node.func.id == "build_kv_connector"}
    assert "build_kv_connector" in taken
    assert calls["build_kv_connector"] <= {"global_rank", "tp_rank", "tp_size",
                                           "kv_head_replica_num"}


def test_other_connectors_use_the_original_factory() -> None:
    config = harness.cache_config({}, connector="SomebodysConnector")
    with pytest.raises(ValueError, match="SomebodysConnector"):
        factory.build_kv_connector(base.KVConnectorRole.SCHEDULER, config)
    config.kv_transfer_config = KVTransferConfig()
    assert factory.build_kv_connector(base.KVConnectorRole.SCHEDULER, config) is None


@pytest.mark.parametrize("more", [{"window_size": 4096}, {"states_shapes": [((1,), "f")]}])
def test_hybrid_configurations_are_rejected(more: Any) -> None:
    import kvtier

    config = harness.cache_config({"host_bytes": 1 << 26}, **more)
    with pytest.raises(kvtier.UnsupportedError):
        factory.prepare_kv_connector_config(config, model_path="m")
