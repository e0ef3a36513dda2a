"""The location of pages in device pools, by layer."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from ._config import invalid, unsupported


class LayerPages:
    """The location of a device pool's pages. A page has one part per buffer, in the order of the
    layers that use the buffers."""

    def __init__(self, entry: Any, name: str) -> None:
        self.entry = entry
        #: The parts that a layer uses: the first part, and the number of parts.
        self.layers: Dict[int, Tuple[int, int]] = {}
        order: List[Tuple[int, int, int]] = []
        for layer in sorted(entry.layer_mapping):
            mapped = entry.layer_mapping[layer]
            begin = len(order)
            for component in entry.buffer_meta:
                for at in [mapped] if isinstance(mapped, int) else mapped:
                    order.append(component[at])
            self.layers[layer] = (begin, len(order) - begin)
        if len(order) != sum(map(len, entry.buffer_meta)):
            raise unsupported(f"pool {name} has {sum(map(len, entry.buffer_meta))} buffers, but "
                              f"its layers use {len(order)}: each buffer must belong to one layer")
        self.parts = [int(size) for _, _, size in order]
        self._first = [np.uint64(address) for address, _, _ in order]
        self._step = [np.uint64(step) for _, step, _ in order]
        buffers = entry.get_hybrid_pool_buffer()
        kinds = {one.device.type for one in buffers}
        if len(kinds) != 1 or not kinds <= {"cpu", "cuda"}:
            raise unsupported(f"pool {name} is on {sorted(kinds)}: only CUDA memory, or host "
                              "memory, is supported")
        self.device = kinds == {"cuda"}
        self.gpu = (buffers[0].device.index or 0) if self.device else None
        description = {"pool": str(name), "how": "layers", "parts": self.parts,
                       "page": entry.page_size, "dtype": str(buffers[0].dtype)}
        self.recipe = json.dumps(description, sort_keys=True).encode()

    def rows(self, indices: Any, count: int) -> Any:
        """The rows of pages. The entry checks the indices."""
        rows = np.asarray(self.entry.prepare_locations(indices), np.uint64)
        if len(rows) != count:
            raise invalid(f"pool {self.entry.name} got {count} keys for {len(rows)} pages; the "
                          "numbers must be equal")
        return rows

    def tables(self, rows: Any, first: int = 0, count: Optional[int] = None) -> List[Any]:
        """The addresses of pages, one table for each of `count` parts from `first` on."""
        end = len(self.parts) if count is None else first + count
        return [self._first[at] + rows * self._step[at] for at in range(first, end)]
