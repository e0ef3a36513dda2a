"""Where this package does something else for some versions of vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Dict

#: The label of a metric that names its tier. vLLM has a constant for it since 0.33.
TIER_LABEL = "tier"


class StoreContexts:
    """The request of each chunk that a cache policy inserts.

    vLLM passes it to `CachePolicy.insert` since 0.33. Before, a call of `on_store_miss` names the
    chunks and their request, once per request.
    """

    def __init__(self, policy: Any) -> None:
        self._needed = "req_context" not in inspect.signature(policy.insert).parameters
        self._contexts: Dict[bytes, Any] = {}
        self._last: Any = None

    def missed(self, keys: Iterable[bytes], context: Any) -> None:
        """Notes a request's chunks that are not in the cache."""
        if self._needed:
            self._contexts.update(dict.fromkeys(keys, context))
            self._last = context

    def of_insert(self, key: bytes, context: Any) -> Any:
        """The request of a chunk that is inserted. `context` is what vLLM passes, or None."""
        return self._contexts.get(key, self._last) if context is None else context

    def finished(self, keys: Iterable[bytes], context: Any) -> None:
        """Forgets the chunks of an ended request."""
        for key in keys if self._contexts else ():
            if self._contexts.get(key) is context:
                del self._contexts[key]
