"""The window of lmdeploy's versions, and interfaces that have changed."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
import warnings
from typing import Any

import kvtier
import kvtier_lmdeploy
import pytest
from kvtier import _probe
from kvtier_lmdeploy import _activate, _engine, _versions
from lmdeploy.pytorch.kv_connector import base, factory


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the version of lmdeploy."""
    monkeypatch.setattr(_probe, "_warned", set())

    def changed(text: str) -> None:
        for module in (_engine, _activate):
            monkeypatch.setattr(module, "version", lambda: text)

    return changed


def test_untested_versions_with_the_same_interfaces_give_a_warning(version: Any) -> None:
    version("0.19.0")
    with pytest.warns(UserWarning, match="lmdeploy 0.19.0 .* lmdeploy 0.17 and 0.18") as caught:
        _engine.require()
        _engine.require()
    assert len(caught) == 1


def test_the_tested_version_gives_no_warning(version: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _engine.require()


def test_versions_before_the_window_are_rejected_at_activation(version: Any) -> None:
    kvtier_lmdeploy.deactivate()
    version("0.16.0")
    with pytest.raises(kvtier.UnsupportedError, match="0.17 and newer.*lmdeploy==0.18.0"):
        kvtier_lmdeploy.activate()
    version("")
    with pytest.raises(kvtier.UnavailableError, match="pip install lmdeploy==0.18.0"):
        kvtier_lmdeploy.activate()
    assert not kvtier_lmdeploy.activated()


def test_a_missing_method_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    version("0.19.0")
    monkeypatch.delattr(base.KVConnectorBase, "cancel_lookup")
    with pytest.raises(kvtier.UnsupportedError, match="KVConnectorBase has no method cancel_looku"):
        _engine.require()


def test_a_renamed_parameter_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    version("0.19.0")
    monkeypatch.setattr(base.KVConnectorBase, "update_connector_output", lambda self, output: None)
    with pytest.raises(kvtier.UnsupportedError, match="update_connector_output takes .output., "):
        _engine.require()


def test_a_missing_field_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                             ) -> None:
    version("0.19.0")
    monkeypatch.setattr(base, "KVConnectorOutput", dataclasses.make_dataclass(
        "KVConnectorOutput", [("finished_receiving", Any, None), ("invalid_block_ids", Any, None)]))
    with pytest.raises(kvtier.UnsupportedError, match="KVConnectorOutput has no completed_save_id"):
        _engine.require()


def test_a_missing_enum_member_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    version("0.19.0")
    monkeypatch.setattr(base, "KVConnectorRole", enum.Enum("KVConnectorRole", ["SCHEDULER"]))
    with pytest.raises(kvtier.UnsupportedError, match="KVConnectorRole has no WORKER"):
        _engine.require()


def test_a_factory_with_other_parameters_is_rejected_at_activation(
        version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kvtier_lmdeploy.deactivate()
    version("0.19.0")
    monkeypatch.setattr(factory, "build_kv_connector", lambda role, config, rank: None)
    with pytest.raises(kvtier.UnsupportedError,
                       match="build_kv_connector takes .role, config, rank., this connector impl"):
        kvtier_lmdeploy.activate()
    assert not kvtier_lmdeploy.activated()


def test_the_step_of_0_17_is_read_from_the_schedulers_output(version: Any,
                                                             monkeypatch: pytest.MonkeyPatch
                                                             ) -> None:
    version("0.17.0")
    monkeypatch.delattr(base, "KVConnectorStepInput")
    with pytest.raises(kvtier.UnsupportedError, match="no module lmdeploy.pytorch.paging"):
        _engine.require()

    class Old:
        num_valid_ids = 33

    assert _versions.candidate_step(Old()) == 32


def test_a_missing_module_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    version("0.19.0")
    real = importlib.import_module

    def missing(name: str, *more: Any) -> Any:
        if name == base.__name__:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *more)

    monkeypatch.setattr(sys.modules["importlib"], "import_module", missing)
    with pytest.raises(kvtier.UnsupportedError, match="no module lmdeploy.pytorch.kv_connector"):
        _engine.require()
