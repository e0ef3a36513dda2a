"""The versions of transformers that this package supports, and the interfaces that it uses."""

from __future__ import annotations

from typing import Dict

from kvtier._probe import Engine, Interface, Interfaces

ENGINE = Engine(name="transformers", tested=("5.23",), oldest="5.22",
                package="kvtier_transformers", install='torch "transformers>=5.22,<6"',
                modules=("torch", "transformers"), before="6")

_LAYER: Dict[str, str] = {"lazy_initialization": "key_states, value_states",
                          "update": "key_states, value_states, *args, **kwargs", "reset": ""}
#: What caches and layers of caches use.
INTERFACES: Interfaces = {"transformers.cache_utils": {
    "Cache": Interface(
        has=("layers",), calls={"__init__": "*, layers", "crop": "tokens_to_remove", "reset": ""},
        overrides={"update": "key_states, value_states, layer_idx, *args, **kwargs",
                   "crop": "tokens_to_remove", "reorder_cache": "beam_idx",
                   "batch_select_indices": "indices", "batch_repeat_interleave": "repeats",
                   "reset": ""}),
    "CacheLayerMixin": Interface(
        has=("is_initialized", "keys", "values"),
        overrides={**_LAYER, "get_mask_sizes": "query_length", "get_seq_length": "",
                   "get_max_length": ""}),
    "DynamicCache": Interface(has=("layers",), calls={"": "*, config"}),
    "DynamicLayer": Interface(
        has=("is_initialized", "keys", "values"), calls={"__init__": ""},
        overrides={**_LAYER, "get_seq_length": "", "crop": "tokens_to_remove"}),
    "DynamicSlidingWindowLayer": Interface(
        has=("sliding_window", "cumulative_length", "_sliding_window_tensor", "record_past"),
        calls={"__init__": "sliding_window"},
        overrides={**_LAYER, "activate_past_recording": "", "crop": "tokens_to_remove"}),
}}


def require() -> None:
    """Raises an error unless the installed transformers has these interfaces. ImportError if
    torch or transformers is missing. Caches change between minor versions."""
    ENGINE.needs.check()
    import transformers

    ENGINE.check_version(transformers.__version__)  # before the module of caches is imported
    ENGINE.check(transformers.__version__, INTERFACES)
