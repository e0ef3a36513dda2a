"""Pins, on a real store."""

from __future__ import annotations

import logging
from typing import Any, Iterator, List

import pytest

import kvtier
from kvtier_lmcache._pins import Held, Pins

NAMES = [b"a", b"b", b"c"]


@pytest.fixture
def blocks() -> Iterator[kvtier.Blocks]:
    with kvtier.Runtime() as runtime, kvtier.Store(runtime, "store(host=16MiB)") as store:
        with kvtier.Blocks(store, kvtier.Identity(model=b"m"), [4096]) as found:
            found.put(NAMES, kvtier.Pool(bytearray(4096 * 3), 4096).at(range(3))).result()
            yield found


def held(blocks: kvtier.Blocks, names: List[bytes]) -> Held:
    return Held(blocks, names, blocks.hold(names))


def pinned(blocks: kvtier.Blocks) -> List[bool]:
    """Which blocks cannot be removed. Removes the others, and stores them again."""
    found = [blocks.drop([name]).referenced_chunks == 1 for name in NAMES]
    blocks.put(NAMES, kvtier.Pool(bytearray(4096 * 3), 4096).at(range(3))).result()
    return found


def test_a_lookups_chunks_are_released_with_its_last_pin(blocks: Any) -> None:
    pins = Pins(600.0)
    pins.add([held(blocks, NAMES[:2])], NAMES[:2])
    assert pinned(blocks) == [True, True, False]
    assert pins.remove(b"a") and pinned(blocks) == [True, True, False]
    assert not pins.remove(b"a") and not pins.remove(b"c")
    assert pins.remove(b"b") and pinned(blocks) == [False, False, False]
    pins.close()


def test_each_pin_of_a_chunk_counts(blocks: Any) -> None:
    pins = Pins(600.0)
    for _ in range(3):
        pins.add([held(blocks, [b"a"])], [b"a"])
    assert pins.remove(b"a") and pins.remove(b"a") and pinned(blocks)[0]
    assert pins.remove(b"a") and not pinned(blocks)[0]
    assert not pins.remove(b"a")
    pins.close()


def test_a_forced_removal_ends_every_pin_of_its_chunk_only(blocks: Any) -> None:
    pins = Pins(600.0)
    pins.add([held(blocks, NAMES)], NAMES)
    pins.add([held(blocks, [b"a"])], [b"a"])
    assert pins.remove(b"a", every=True) and pinned(blocks) == [False, True, True]
    assert not pins.remove(b"a") and pins.remove(b"b") and pinned(blocks)[2]
    assert pins.remove(b"c") and pinned(blocks) == [False, False, False]
    pins.close()


def test_the_end_of_a_lookup_ends_its_pins_only(blocks: Any) -> None:
    pins = Pins(600.0)
    pins.add([held(blocks, NAMES)], NAMES, "one")
    pins.add([held(blocks, NAMES[:1])], NAMES[:1], "two")
    pins.end_lookup("one", NAMES)
    assert pinned(blocks) == [True, False, False]
    pins.end_lookup("two", NAMES)
    assert pinned(blocks) == [False, False, False]
    pins.close()


def test_forgotten_pins_end_after_the_timeout(
        blocks: Any, caplog: pytest.LogCaptureFixture) -> None:
    pins = Pins(-1.0)
    pins.add([held(blocks, NAMES)], NAMES)
    with caplog.at_level(logging.WARNING, "kvtier_lmcache"):
        pins.add([held(blocks, [b"c"])], [b"c"])
    assert "3 pins of chunks ended" in caplog.text
    assert pinned(blocks) == [False, False, True]
    pins.close()
    assert pinned(blocks) == [False, False, False]
