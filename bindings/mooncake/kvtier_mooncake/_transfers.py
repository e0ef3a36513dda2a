"""Transfers of object batches between registered buffers and the store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

import kvtier
from kvtier import PartAddresses, Pool

from . import _codes as codes
from ._memory import HOST, Fragments, Regions, bytes_at, resolve
from ._shapes import Shape, Shapes, check_shape

if TYPE_CHECKING:
    from ._memory import Table

log = logging.getLogger("kvtier.mooncake")

Row = Sequence[int]


class Transfer:
    """One call's transfer. `run` returns a code, or a number of bytes, for each object."""

    def __init__(self, method: str, shapes: Shapes, regions: Regions, level: int,
                 put: bool) -> None:
        self._method, self._shapes, self._regions = method, shapes, regions
        self._level, self._put = level, put
        self._results: List[int] = []

    def run(self, names: List[bytes], rows: Sequence[Row], sizes: Sequence[Row]) -> List[int]:
        """Transfers the objects, with one native call per shape."""
        self._results = [codes.RPC_FAIL] * len(names)
        for shape, indexes in self._by_shape(sizes).items():
            if len(indexes) == len(names):
                self._transfer_shape(shape, names, rows, indexes)
            else:
                self._transfer_shape(shape, names, [rows[at] for at in indexes], indexes)
        return self._results

    def _by_shape(self, sizes: Sequence[Row]) -> Dict[Shape, List[int]]:
        """The indexes of the objects by shape. Objects with an invalid shape get their code."""
        found: Dict[Shape, List[int]] = {}
        groups: Dict[Tuple[int, ...], List[int]] = {}
        if sizes.count(sizes[0]) == len(sizes):
            groups[tuple(sizes[0])] = list(range(len(sizes)))
        else:
            for at, one in enumerate(sizes):
                groups.setdefault(tuple(one), []).append(at)
        for given, indexes in groups.items():
            try:
                found[check_shape(given)] = indexes
            except kvtier.Error as error:
                log.error("%s: %s", self._method, error)
                self._set_some(indexes, codes.INVALID_PARAMS)
        return found

    def _transfer_shape(self, shape: Shape, names: List[bytes], rows: Sequence[Row],
                        indexes: List[int]) -> None:
        if set(map(len, rows)) != {len(shape)}:
            log.error("%s: objects with %d sizes must have %d buffer addresses each, but some do "
                      "not", self._method, len(shape), len(shape))
            self._set_some(indexes, codes.INVALID_PARAMS)
            return
        for group in resolve(self._regions, rows, shape, indexes):
            if group.rejected:
                log.error("%s: %d of %d objects are outside of the registered buffers, or in host "
                          "and device memory at once: register their memory first", self._method,
                          len(group.rejected), len(indexes))
                self._set_some(group.rejected, codes.INVALID_PARAMS)
            if not len(group.indexes):
                continue
            chosen = names
            if len(group.indexes) != len(names):
                chosen = [names[i] for i in group.indexes]
            try:
                self._transfer_group(shape, chosen, group)
            except kvtier.Error as error:  # objects of other shapes are not affected
                log.error("%s: %s", self._method, error)
                self._set_some(group.indexes, codes.of_error(error))

    def _transfer_group(self, shape: Shape, names: List[bytes], group: Fragments) -> None:
        if self._put:
            self._put_group(shape, names, group)
            return
        missing = self._get_group(shape, names, group)
        if missing:
            self._get_from_other_shapes(shape, names, group, missing)

    def _put_group(self, shape: Shape, names: List[bytes], group: Fragments) -> None:
        places = PartAddresses(group.tables, group.device)
        with self._shapes.of(shape).put(names, places, level=self._level) as op:
            op.wait()
            self._set_codes(group.indexes, codes.OK)
            self._record_failures(op, group.indexes)
        self._shapes.wait_for_catalogue(shape)

    def _get_group(self, shape: Shape, names: List[bytes], group: Fragments) -> List[int]:
        """Gets objects, and returns the positions of those that are not stored in this shape."""
        missing = self._get_some(shape, names, group.tables, group)
        # Engines usually look up first. For those that did not, look up at the remote now.
        found = self._shapes.find_at_remote(shape, [names[at] for at in missing]) if missing else []
        if found:
            again = [missing[at] for at in found]
            tables = [table[again] for table in group.tables]
            left = self._get_some(shape, [names[at] for at in again], tables, group, again)
            missing = sorted({*missing} - {*again} | {again[at] for at in left})
        return missing

    def _get_some(self, shape: Shape, names: List[bytes], tables: "Sequence[Table]",
                  group: Fragments, subset: Optional[List[int]] = None) -> List[int]:
        """Gets objects, and returns the positions in `names` of those that are not stored."""
        indexes = group.indexes if subset is None else [group.indexes[at] for at in subset]
        blocks = self._shapes.try_open(shape)
        if blocks is None:
            self._set_codes(indexes, codes.OBJECT_NOT_FOUND)
            return list(range(len(names)))
        with blocks.get(names, PartAddresses(tables, group.device)) as op:
            op.wait()
            self._set_codes(indexes, sum(shape))
            return self._record_failures(op, indexes)

    def _record_failures(self, op: kvtier.Op, indexes: Sequence[int]) -> List[int]:
        failed = op.failed()
        if failed:
            items = op.items()
            for at in failed:
                status = items[at].status if at < len(items) else 0
                self._results[indexes[at]] = codes.of_status(status) or codes.RPC_FAIL
        return [at for at in failed if self._results[indexes[at]] == codes.OBJECT_NOT_FOUND]

    def _get_from_other_shapes(self, shape: Shape, names: List[bytes], group: Fragments,
                               missing: List[int]) -> None:
        """Gets objects that were put in other shapes, by a copy through memory of this process."""
        found = self._shapes.find([names[at] for at in missing], excluded=shape)
        for at, other in zip(missing, found):
            if other is not None:
                addresses = [int(table[at]) for table in group.tables]
                self._results[group.indexes[at]] = self._copy_from_shape(
                    other, names[at], addresses, shape, group.device)

    def _copy_from_shape(self, other: Shape, name: bytes, addresses: List[int], shape: Shape,
                         device: bool) -> int:
        length = sum(other)
        if length > sum(shape):
            return codes.INVALID_PARAMS
        if device:
            log.error("%s: an object that was put from %d buffers cannot be loaded into %d buffers "
                      "of a device: use the same sizes as for the put", self._method, len(other),
                      len(shape))
            return codes.INVALID_PARAMS
        data = fetch(self._shapes, other, name)
        if data is None:
            return codes.OBJECT_NOT_FOUND
        at = 0
        for address, size in zip(addresses, shape):
            part = data[at:at + size]
            # The buffers may have been unregistered while the object was fetched.
            if part and self._regions.kind(address, len(part)) != HOST:
                return codes.INVALID_PARAMS
            bytes_at(address, len(part))[:] = part
            at += size
        return length

    def _set_codes(self, indexes: Sequence[int], code: int) -> None:
        if len(indexes) == len(self._results):
            self._results = [code] * len(indexes)
        else:
            self._set_some(indexes, code)

    def _set_some(self, indexes: Sequence[int], code: int) -> None:
        for at in indexes:
            self._results[at] = code


def fetch(shapes: Shapes, shape: Shape, name: bytes) -> Optional[bytearray]:
    """An object's bytes in memory of this process; None if it was evicted by now."""
    data, blocks = bytearray(sum(shape)), shapes.try_open(shape)
    if blocks is None:
        return None
    with blocks.get([name], Pool(data, len(data)).at([0])) as op:
        op.wait()
        return None if op.failed() else data
