"""KvtierSpec on stubs of vLLM."""

from typing import Any

import pytest
from spec_cases import *  # noqa: F403


@pytest.fixture
def create() -> Any:
    from kvtier_vllm.spec import KvtierSpec

    return KvtierSpec
