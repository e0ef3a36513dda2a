"""The module `mooncake.store` for programs with this folder on PYTHONPATH."""

from kvtier_mooncake import MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig

__all__ = ["MooncakeDistributedStore", "MooncakeHostMemAllocator", "ReplicateConfig"]
__kvtier__ = True
