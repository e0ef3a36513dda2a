"""Without arguments the engine is a miniature (`stubs`); `pytest tests/engine` has the real one."""

from __future__ import annotations

import gc
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
collect_ignore: List[str] = []
#: What tests have left open.
_blamed: List[Any] = []


def pytest_configure(config: pytest.Config) -> None:
    asked = [(config.invocation_params.dir / arg.partition("::")[0]).resolve()
             for arg in config.args]
    if not any(HERE / "engine" in (path, *path.parents) for path in asked):
        sys.path.insert(0, str(HERE / "stubs"))
        collect_ignore.append("engine")
        import vllm  # noqa: F401: as an engine is there before what it loads


@pytest.fixture
def make_config() -> Any:
    """An `OffloadingConfig` as the engine makes it."""

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


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every handle is given up after a test."""
    from kvtier import _reaper

    yield
    end = time.monotonic() + 600.0
    while True:
        gc.collect()
        assert _reaper.flush(600.0)
        left = [job for job in list(_reaper._live.values())
                if job.handle.value and job not in _blamed]
        if not left:
            return
        if time.monotonic() > end:
            break
        time.sleep(0.001)
    # Theirs alone: the tests that follow are not to be blamed for it.
    from kvtier_vllm import settings

    _blamed.extend(left)
    settings._open.clear()
    raise AssertionError(f"left open: {left}")
