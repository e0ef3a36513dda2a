"""By default vLLM is replaced by stubs (`stubs`); `pytest tests/engine` uses the installed vLLM."""

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
#: Handles that a test has left open, and that were reported.
_reported: List[Any] = []


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


@pytest.fixture(autouse=True)
def no_handles_left() -> Iterator[None]:
    """Fails a test that leaves handles of the library open."""
    from kvtier import _reaper

    yield
    end = time.monotonic() + 600.0
    while True:
        gc.collect()
        assert _reaper.flush(600.0)
        left = [job for job in list(_reaper._live.values())
                if job.handle.value and job not in _reported]
        if not left:
            return
        if time.monotonic() > end:
            break
        time.sleep(0.001)
    # Report them for this test only, not for the tests that follow.
    from kvtier_vllm import settings

    _reported.extend(left)
    settings._stores.clear()
    raise AssertionError(f"handles left open: {left}")
