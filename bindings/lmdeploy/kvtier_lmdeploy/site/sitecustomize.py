"""Activates the connector in child processes of `python -m kvtier_lmdeploy`.

A child activates it when it first imports lmdeploy's connectors; other children load nothing. The
next `sitecustomize` on the path runs too, because this file hides it."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _ActivateOnImport:
    """Activates when lmdeploy's connector package is imported. It finds no modules itself."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "lmdeploy.pytorch.kv_connector":
            sys.meta_path.remove(self)
            import kvtier_lmdeploy

            kvtier_lmdeploy.activate()
        return None


def _run_hidden_sitecustomize() -> None:
    paths = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and isinstance(spec.loader, importlib.abc.Loader):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("KVTIER_LMDEPLOY_CHILDREN") == "1":
    sys.meta_path.insert(0, _ActivateOnImport())
_run_hidden_sitecustomize()
