"""Where the connector does something else for some versions of lmdeploy."""

from __future__ import annotations

import importlib
from typing import Any, Tuple

_BASE = "lmdeploy.pytorch.kv_connector.base"


def step_input() -> Tuple[str, str]:
    """The module and the class of what `build_connector_meta` gets. It is a class of its own since
    0.18."""
    base = importlib.import_module(_BASE)
    if hasattr(base, "KVConnectorMetadata") and not hasattr(base, "KVConnectorStepInput"):
        return "lmdeploy.pytorch.paging.scheduler", "SchedulerOutput"
    return _BASE, "KVConnectorStepInput"


def candidate_step(request: Any) -> int:
    """The tokens of a request that may be loaded, before the blocks that MTP computes again are
    left out. Before 0.18 lmdeploy has no method for it: all but the last token."""
    candidate = getattr(request, "get_prefix_cache_max_candidate_step", None)
    return int(request.num_valid_ids - 1 if candidate is None else candidate())
