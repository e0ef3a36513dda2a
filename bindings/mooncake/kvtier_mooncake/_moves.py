"""One batch of objects between registered buffers and the store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

import kvtier
from kvtier import Each, Pool

from . import _codes as codes
from ._memory import HOST, Fragments, Regions, bytes_at, check
from ._shapes import Shape, Shapes, check_shape

if TYPE_CHECKING:
    from ._memory import Table

log = logging.getLogger("kvtier.mooncake")

Row = Sequence[int]


class Mover:
    """A call's state: `run` says a code, or a number of bytes, for each object."""

    def __init__(self, what: str, shapes: Shapes, regions: Regions, level: int,
                 put: bool) -> None:
        self._what, self._shapes, self._regions = what, shapes, regions
        self._level, self._put = level, put
        self._results: List[int] = []

    def run(self, names: List[bytes], rows: Sequence[Row], sizes: Sequence[Row]) -> List[int]:
        """Moves objects of one shape in one native call."""
        self._results = [codes.RPC_FAIL] * len(names)
        for shape, which in self._by_shape(sizes).items():
            if len(which) == len(names):
                self._of_shape(shape, names, rows, which)
            else:
                self._of_shape(shape, names, [rows[at] for at in which], which)
        return self._results

    def _by_shape(self, sizes: Sequence[Row]) -> Dict[Shape, List[int]]:
        """Which objects have which shape; those that have none get their code."""
        found: Dict[Shape, List[int]] = {}
        groups: Dict[Tuple[int, ...], List[int]] = {}
        if sizes.count(sizes[0]) == len(sizes):
            groups[tuple(sizes[0])] = list(range(len(sizes)))
        else:
            for at, one in enumerate(sizes):
                groups.setdefault(tuple(one), []).append(at)
        for given, which in groups.items():
            try:
                found[check_shape(given)] = which
            except kvtier.Error as error:
                log.error("%s: %s", self._what, error)
                self._fail(which, codes.INVALID_PARAMS)
        return found

    def _of_shape(self, shape: Shape, names: List[bytes], rows: Sequence[Row],
                  which: List[int]) -> None:
        if set(map(len, rows)) != {len(shape)}:
            log.error("%s: objects of %d sizes with other numbers of buffers", self._what,
                      len(shape))
            self._fail(which, codes.INVALID_PARAMS)
            return
        for group in check(self._regions, rows, shape, which):
            if group.refused:
                log.error("%s: %d objects of %d lead out of the registered buffers", self._what,
                          len(group.refused), len(which))
                self._fail(group.refused, codes.INVALID_PARAMS)
            if not len(group.which):
                continue
            chosen = names if len(group.which) == len(names) else [names[i] for i in group.which]
            try:
                self._of_group(shape, chosen, group)
            except kvtier.Error as error:  # a shape that is refused is not the others' fault
                log.error("%s: %s", self._what, error)
                self._fail(group.which, codes.of_error(error))

    def _of_group(self, shape: Shape, names: List[bytes], group: Fragments) -> None:
        if self._put:
            self._put_group(shape, names, group)
            return
        missing = self._get_group(shape, names, group)
        if missing:
            self._elsewhere(shape, names, group, missing)

    def _put_group(self, shape: Shape, names: List[bytes], group: Fragments) -> None:
        places = Each(group.tables, group.device)
        with self._shapes.of(shape).put(names, places, level=self._level) as op:
            op.wait()
            self._set(group.which, codes.OK)
            self._note(op, group.which)
        self._shapes.noted(shape)

    def _get_group(self, shape: Shape, names: List[bytes], group: Fragments) -> List[int]:
        """Which of them are not there in this shape."""
        missing = self._get_some(shape, names, group.tables, group)
        # Engines look first. For who does not the remote is asked now.
        came = self._shapes.came(shape, [names[at] for at in missing]) if missing else []
        if came:
            again = [missing[at] for at in came]
            tables = [table[again] for table in group.tables]
            left = self._get_some(shape, [names[at] for at in again], tables, group, again)
            missing = sorted({*missing} - {*again} | {again[at] for at in left})
        return missing

    def _get_some(self, shape: Shape, names: List[bytes], tables: "Sequence[Table]",
                  group: Fragments, of: Optional[List[int]] = None) -> List[int]:
        """Which of them, by their place in `names`, are not there."""
        which = group.which if of is None else [group.which[at] for at in of]
        blocks = self._shapes.there(shape)
        if blocks is None:
            self._set(which, codes.OBJECT_NOT_FOUND)
            return list(range(len(names)))
        with blocks.get(names, Each(tables, group.device)) as op:
            op.wait()
            self._set(which, sum(shape))
            return self._note(op, which)

    def _note(self, op: kvtier.Op, which: Sequence[int]) -> List[int]:
        failed = op.failed()
        if failed:
            items = op.items()
            for at in failed:
                status = items[at].status if at < len(items) else 0
                self._results[which[at]] = codes.of_status(status) or codes.RPC_FAIL
        return [at for at in failed if self._results[which[at]] == codes.OBJECT_NOT_FOUND]

    def _elsewhere(self, shape: Shape, names: List[bytes], group: Fragments,
                   missing: List[int]) -> None:
        """Objects that were put from other buffers: they come into memory of this process, and
        from there into the buffers."""
        found = self._shapes.find([names[at] for at in missing], but=shape)
        for at, other in zip(missing, found):
            if other is not None:
                addresses = [int(table[at]) for table in group.tables]
                self._results[group.which[at]] = self._across(
                    other, names[at], addresses, shape, group.device)

    def _across(self, other: Shape, name: bytes, addresses: List[int], shape: Shape,
                device: bool) -> int:
        length = sum(other)
        if length > sum(shape):
            return codes.INVALID_PARAMS
        if device:
            log.error("%s: an object of %d buffers into %d of a device", self._what, len(other),
                      len(shape))
            return codes.INVALID_PARAMS
        data = fetched(self._shapes, other, name)
        if data is None:
            return codes.OBJECT_NOT_FOUND
        at = 0
        for address, size in zip(addresses, shape):
            part = data[at:at + size]
            # Registered buffers may have gone while the object came.
            if part and self._regions.kind(address, len(part)) != HOST:
                return codes.INVALID_PARAMS
            bytes_at(address, len(part))[:] = part
            at += size
        return length

    def _set(self, which: Sequence[int], code: int) -> None:
        if len(which) == len(self._results):
            self._results = [code] * len(which)
        else:
            self._fail(which, code)

    def _fail(self, which: Sequence[int], code: int) -> None:
        for at in which:
            self._results[at] = code


def fetched(shapes: Shapes, shape: Shape, name: bytes) -> Optional[bytearray]:
    """An object's bytes in memory of this process, or None when it is gone by now."""
    data, blocks = bytearray(sum(shape)), shapes.there(shape)
    if blocks is None:
        return None
    with blocks.get([name], Pool(data, len(data)).at([0])) as op:
        op.wait()
        return None if op.failed() else data
