"""Where this package does something else for some versions of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers.cache_utils import DummyLayer
else:
    try:
        from transformers.cache_utils import DummyLayer
    except ImportError:
        from transformers.cache_utils import DynamicLayer

        class DummyLayer(DynamicLayer):
            """Stands for a layer without a cache. transformers has a class for it since 5.23;
            before, `Tiers` rejects models that have such layers."""

__all__ = ["DummyLayer"]
