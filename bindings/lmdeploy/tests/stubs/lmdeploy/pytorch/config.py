"""Stand-in for the configuration of lmdeploy 0.18.0: what the connector reads."""

from typing import Any


class CacheConfig:
    kv_transfer_config: Any
    num_gpu_blocks: int
    block_size: int
    kernel_block_size: int
    num_cpu_blocks: int
    window_size: int
    states_shapes: Any
    quant_policy: Any
