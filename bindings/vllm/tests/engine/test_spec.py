"""KvtierSpec with vLLM's own classes, created by vLLM's factory."""

from typing import Any

import pytest
from spec_cases import *  # noqa: F403


@pytest.fixture
def create() -> Any:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    return OffloadingSpecFactory.create_spec
