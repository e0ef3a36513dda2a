"""A store of the shape of Mooncake's, over kvtier.

Engines that have a Mooncake backend (lmdeploy, vLLM, SGLang, LMCache) keep their KV in kvtier's
tiers with it, without a line of theirs changed: `install()` before they import `mooncake.store`,
`python -m kvtier_mooncake -m lmdeploy ...`, or the folder `shim` on PYTHONPATH.
"""

from __future__ import annotations

from ._config import Settings, configure
from ._install import install, uninstall
from ._memory import MooncakeHostMemAllocator
from ._replicate import ReplicateConfig
from ._store import BufferHandle, MooncakeDistributedStore, ReplicaDescriptor

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
