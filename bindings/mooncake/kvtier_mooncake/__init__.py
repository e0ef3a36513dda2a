"""A replacement for Mooncake's store that keeps objects in a kvtier store.

Engines with a Mooncake backend (lmdeploy, vLLM, SGLang, LMCache) use it without a change. There
are three ways: `install()` before the engine imports `mooncake.store`,
`python -m kvtier_mooncake -m lmdeploy ...`, or the folder `shim` on PYTHONPATH.
"""

from __future__ import annotations

from kvtier._needs import Needs

Needs("kvtier_mooncake", "engines with a Mooncake backend", "numpy", ("numpy",)).check()

from ._config import Settings, configure  # noqa: E402
from ._install import install, uninstall  # noqa: E402
from ._memory import MooncakeHostMemAllocator  # noqa: E402
from ._replicate import ReplicateConfig  # noqa: E402
from ._store import BufferHandle, MooncakeDistributedStore, ReplicaDescriptor  # noqa: E402

__all__ = [
    "BufferHandle",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ReplicaDescriptor",
    "ReplicateConfig",
    "Settings",
    "configure",
    "install",
    "uninstall",
]
