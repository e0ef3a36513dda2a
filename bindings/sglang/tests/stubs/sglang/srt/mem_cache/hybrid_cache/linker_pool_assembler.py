"""Device pools for linkers."""

from __future__ import annotations

import dataclasses

import numpy as np


class DevicePoolEntry:
    def __init__(self, *, name, indices_from_pool, device_pool, components, layer_mapping,
                 page_size, rows_are_pages, packed=True, index_mapper=None):
        self.name, self.indices_from_pool, self.device_pool = name, indices_from_pool, device_pool
        self.components, self.layer_mapping, self.page_size = components, layer_mapping, page_size
        self.packed, self._tokens_a_row = packed, page_size if rows_are_pages else 1
        self.kv_buffer = sum(map(list, components), [])
        self._span = 1 if rows_are_pages else page_size

        def meta(one):
            row = one.nbytes // one.shape[0]
            return one.data_ptr(), row, row * self._span

        self.buffer_meta = [[meta(one) for one in those] for those in components]

    def get_hybrid_pool_buffer(self):
        return self.kv_buffer

    def prepare_locations(self, indices):
        pages = indices.numpy().reshape(-1, self.page_size)
        rows = pages[:, 0] // self._tokens_a_row
        if (pages != pages[:, :1] + np.arange(self.page_size)).any() or (
                len(rows) and (rows.min() < 0 or rows.max() + self._span > min(
                    one.shape[0] for one in self.kv_buffer))):
            raise ValueError(f"pool {self.name}: not its pages")
        return rows.tolist()


class DevicePoolGroup:
    def __init__(self, entries, num_layers, page_size, *, rank_replicated=False):
        self.entries, self.num_layers, self.page_size = list(entries), num_layers, page_size
        self.entry_map = {one.name: one for one in entries}
        self.rank_replicated = rank_replicated

    def resolve_transfers(self, transfers, *, allow_partial=False, allow_missing_kv=False):
        by_name = {str(one.name): one for one in transfers if one.keys}
        wanted = {str(one.indices_from_pool) for one in self.entries}
        if not by_name or (not allow_missing_kv and "kv" not in by_name) or (
                not allow_partial and wanted - set(by_name)):
            return []
        return [dataclasses.replace(by_name[str(one.indices_from_pool)], name=one.name,
                                    host_indices=by_name[str(one.indices_from_pool)]
                                    .device_indices)
                for one in self.entries if str(one.indices_from_pool) in by_name]


def resolve_hybrid_device_pool_group(*, kvcache, page_size, params, components):
    return kvcache
