"""Versions, features, specs, checksums, logging, errors."""

from __future__ import annotations

import logging
import pickle
import random
import struct
from typing import List

import kvtier
import numpy as np
import pytest
import xxhash
from gate import HANG_S


def oracle(data: bytes) -> int:
    """Returns the checksum from another implementation."""
    sums = [xxhash.xxh3_64_intdigest(data[at : at + 4096]) for at in range(0, len(data), 4096)]
    return int(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(sums)}Q", *sums)))


@pytest.mark.parametrize("size", [1, 7, 4095, 4096, 4097, 8192, 100_000, 1 << 20, (1 << 20) + 3])
def test_checksum_matches_the_oracle(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert kvtier.checksum(data) == oracle(data)
    assert kvtier.checksum(bytearray(data)) == oracle(data)
    assert kvtier.checksum(memoryview(data)) == oracle(data)


def test_checksum_takes_arrays_and_rejects_gaps_and_text() -> None:
    array = np.arange(6000, dtype=np.float32).reshape(60, 100)
    assert kvtier.checksum(array) == oracle(array.tobytes())
    assert kvtier.checksum(b"") == oracle(b"")
    with pytest.raises((ValueError, BufferError)):
        kvtier.checksum(array[:, ::2])
    with pytest.raises(TypeError):
        kvtier.checksum("text")


def test_checksum_of_an_op_matches_the_oracle(runtime: kvtier.Runtime) -> None:
    data = random.Random(1).randbytes(300_000)
    buffer = runtime.buffer(len(data))
    buffer.view()[:] = data
    assert runtime.submit(kvtier.Work.checksum(buffer)).result().value == oracle(data)
    part = kvtier.Work.checksum(buffer, 10_000, src_offset=5_000)
    assert runtime.submit(part).result().value == oracle(data[5_000:15_000])


def test_features_are_listed_and_found_by_name() -> None:
    assert kvtier.version() == kvtier.__version__
    listed = kvtier.features()
    assert listed and all(f.name and f.note for f in listed)
    assert kvtier.feature(listed[0].name).name == listed[0].name
    with pytest.raises(kvtier.NotFoundError, match=listed[0].name) as caught:
        kvtier.feature(listed[0].name + "x")
    assert isinstance(caught.value, LookupError)


def test_spec_check_returns_the_canonical_form_or_the_offset_of_the_error() -> None:
    assert kvtier.spec_check("qos( inner = s3fifo(small=10%) )") == "qos(inner=s3fifo(small=10%))"
    with pytest.raises(kvtier.SpecError) as caught:
        kvtier.spec_check("a(b=")
    error = caught.value
    assert error.offset == 4 and error.name == "KVT_E_SPEC" and error.status == -21
    assert "offset 4" in error.message and "[KVT_E_SPEC]" in str(error)
    assert isinstance(error, ValueError) and error.errno is None


def test_errors_can_be_pickled() -> None:
    with pytest.raises(kvtier.SpecError) as caught:
        kvtier.spec_check("a(b=")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is kvtier.SpecError
    assert (again.offset, again.message, str(again)) == (4, caught.value.message, str(caught.value))


def test_errors_derive_from_the_builtin_exceptions() -> None:
    assert issubclass(kvtier.TimeoutError, TimeoutError)
    assert issubclass(kvtier.NoMemoryError, MemoryError)
    assert issubclass(kvtier.IoError, OSError)
    for name in kvtier.__all__:
        made = getattr(kvtier, name)
        if isinstance(made, type) and issubclass(made, kvtier.Error):
            error = made("words", -1, "KVT_E_INVALID", 3, 5)
            assert (error.offset, error.errno, error.message) == (3, 5, "words")
            assert str(error) == "words [KVT_E_INVALID]"


def test_arguments_out_of_range_are_rejected(runtime: kvtier.Runtime) -> None:
    for size in (-1, 2**64, 2**64 + 4096):
        with pytest.raises(kvtier.InvalidError):
            runtime.buffer(size)
    with pytest.raises(TypeError):
        runtime.buffer("big")  # type: ignore[arg-type]
    with pytest.raises(kvtier.Error):
        kvtier.Runtime(workers=100_000)
    with pytest.raises(kvtier.InvalidError, match="10 bytes"):
        kvtier.Runtime(name="a name much too long")


def test_a_misspelt_fault_names_the_similar_one() -> None:
    with pytest.raises(kvtier.SpecError, match="worker") as caught:
        kvtier.Runtime(faults="faults(wroker=at(panic=1))")
    assert caught.value.offset is not None


class Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__(5)
        self.records: List[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_messages_are_forwarded_to_logging() -> None:
    logger, keep = logging.getLogger("kvtier-test"), Keep()
    logger.addHandler(keep)
    logger.setLevel(5)
    try:
        kvtier.log_to(logger)
        provoke()
        errors = [r for r in keep.records if r.levelno == logging.ERROR]
        assert any("injected panic" in r.getMessage() for r in errors)
        assert all(r.name.startswith("kvtier-test") for r in keep.records)
        kvtier.log_to(None)
        keep.records.clear()
        provoke()
        assert not keep.records
    finally:
        kvtier.log_to(None)
        logger.removeHandler(keep)


def test_an_exception_of_a_logger_goes_to_the_unraisable_hook(
        unraisable: List[BaseException]) -> None:
    class Broken(logging.Logger):
        def getChild(self, suffix: str) -> logging.Logger:
            raise RuntimeError("no child")

    try:
        kvtier.log_to(Broken("broken"), logging.DEBUG)
        provoke()
        assert unraisable and "no child" in str(unraisable[0])
    finally:
        kvtier.log_to(None)


def provoke() -> None:
    """Makes the library log an error."""
    with kvtier.Runtime(workers=1, faults="faults(worker=at(panic=1))") as runtime:
        with runtime.buffer(4096) as buffer, runtime.submit(kvtier.Work.prefault(buffer)) as op:
            with pytest.raises(kvtier.PanicError):
                op.result(HANG_S)
