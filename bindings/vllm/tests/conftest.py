"""By default vLLM is replaced by stubs (`stubs`); `pytest tests/engine` uses the installed vLLM."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any, Dict, List

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
sys.path.append(str(HERE.parents[1] / "python" / "tests"))  # handles.py
from handles import (  # noqa: E402, F401
    no_handles_left,
    on_left,
    pytest_runtest_makereport,
)

collect_ignore: List[str] = []


def pytest_configure(config: pytest.Config) -> None:
    paths = [(config.invocation_params.dir / arg.partition("::")[0]).resolve()
             for arg in config.args]
    if not any(HERE / "engine" in (path, *path.parents) for path in paths):
        sys.path.insert(0, str(HERE / "stubs"))
        collect_ignore.append("engine")
        import vllm  # noqa: F401: an engine is imported before the modules that it loads


@pytest.fixture
def make_config() -> Any:
    """Makes an `OffloadingConfig` as the engine does."""

    def made(extra: Dict[str, Any], *, groups: int = 1, page: int = 4096, world: int = 1,
             blocks_per_chunk: int = 1) -> Any:
        from vllm.v1.kv_offload import config as c

        return c.OffloadingConfig(
            groups=tuple(c.OffloadingGroupConfig(16, (f"layer.{n}",), n) for n in range(groups)),
            worker_kv_bytes_per_block=page, enable_kv_cache_events=True, extra_config=extra,
            engine_id=f"test-{uuid.uuid4().hex}", model=c.OffloadingModelConfig("tiny", "bf16"),
            cache=c.OffloadingCacheConfig(16, blocks_per_chunk),
            parallel=c.OffloadingParallelConfig(0, world, world, 1, 1, 1, 0, 1, None, False))

    return made


def _forget_stores() -> None:
    from kvtier_vllm import settings

    settings._stores.clear()


on_left.append(_forget_stores)
