"""Functions that need no runtime: versions, features, specs, checksums, logging."""

from __future__ import annotations

import ctypes
import logging
from typing import Any, Dict, List, NamedTuple, Optional, Union

from . import _abi, _callbacks
from ._lib import check, check_err, lib
from ._pybuffer import Export
from ._resource import byref, new_error

#: A level below logging.DEBUG, for the most detailed messages.
TRACE = 5

_LEVELS: Dict[int, int] = {
    _abi.KVT_LOG_ERROR: logging.ERROR,
    _abi.KVT_LOG_WARN: logging.WARNING,
    _abi.KVT_LOG_INFO: logging.INFO,
    _abi.KVT_LOG_DEBUG: logging.DEBUG,
    _abi.KVT_LOG_TRACE: TRACE,
}


class Feature(NamedTuple):
    """An optional feature: whether this library was built with it, and this machine has it."""

    name: str
    note: str
    built: bool
    present: bool


def version() -> str:
    """Returns the library's version."""
    return str(lib.kvt_version_str().decode())


def _feature(out: Any) -> Feature:
    name = ctypes.string_at(out.name, out.name_bytes).decode()
    note = ctypes.string_at(out.note, out.note_bytes).decode()
    return Feature(name, note, bool(out.built), bool(out.present))


def features() -> List[Feature]:
    """Returns all optional features."""
    count = ctypes.c_uint64()
    check(lib.kvt_feature_count(byref(count)))
    found = []
    for index in range(count.value):
        out = _abi.kvt_feature_t()
        check(lib.kvt_feature_at(index, byref(out)))
        found.append(_feature(out))
    return found


def feature(name: str) -> Feature:
    """Returns a feature by its name, such as "cuda"; `NotFoundError` names the most similar
    one."""
    text, out, err = name.encode(), _abi.kvt_feature_t(), new_error()
    check_err(lib.kvt_feature_find(text, len(text), byref(out), byref(err)), err)
    return _feature(out)


def spec_check(spec: str) -> str:
    """Returns the canonical form of a spec string. The `offset` of a `SpecError` is the position
    of the error in bytes of UTF-8.

    >>> import kvtier
    >>> kvtier.spec_check("store( host = 8GiB )")
    'store(host=8GiB)'
    """
    text = spec.encode()
    room = max(64, 2 * len(text))
    while True:
        out = ctypes.create_string_buffer(room)
        size, err = ctypes.c_uint64(), new_error()
        status = lib.kvt_spec_check(text, len(text), out, room, byref(size), byref(err))
        if status != _abi.KVT_E_TOO_SMALL:
            check_err(status, err)
            return out.raw[: size.value].decode()
        lib.kvt_error_free(byref(err))
        room = size.value


def checksum(data: Any) -> int:
    """Returns the checksum of a bytes-like object or a tensor, as ops compute it.

    >>> import kvtier
    >>> kvtier.checksum(b"kv") == kvtier.checksum(bytearray(b"kv")) != kvtier.checksum(b"vk")
    True
    """
    value = ctypes.c_uint64()
    with Export(data, writable=False) as export:
        check(lib.kvt_checksum(export.address, export.nbytes, byref(value)))
    return value.value


def log_to(logger: Union[logging.Logger, str, None] = "kvtier",
           level: Optional[int] = None) -> None:
    """Forwards the library's messages to `logging`; None stops it.

    The target of a message is the child logger's name. `level` is the most detailed level that is
    forwarded, by default the logger's effective level.
    """
    err = new_error()
    if logger is None:
        check_err(lib.kvt_log_set(_abi.KVT_LOG_OFF, _abi.kvt_log_fn(), None,
                                  _abi.kvt_destroy_fn(), byref(err)), err)
        return
    target = logging.getLogger(logger) if isinstance(logger, str) else logger
    if level is None:
        level = target.getEffectiveLevel()
    wanted = [ours for ours, theirs in _LEVELS.items() if theirs >= level]
    number = _callbacks.register(target)
    status = lib.kvt_log_set(max(wanted, default=_abi.KVT_LOG_OFF), on_log, number,
                             _callbacks.on_destroy, byref(err))
    if status != _abi.KVT_OK:
        _callbacks.forget(number)
    check_err(status, err)


def _forward(logger: logging.Logger, level: int, target: str, message: str) -> None:
    suffix = target.replace("::", ".")
    if suffix == "kvtier" or suffix.startswith("kvtier."):
        suffix = suffix[len("kvtier."):]
    child = logger.getChild(suffix) if suffix else logger
    child.log(_LEVELS.get(level, TRACE), "%s", message)


def _on_log(number: int, level: int, target: Any, target_bytes: int, message: Any,
            message_bytes: int) -> None:
    logger = _callbacks.find(number)
    if logger is None:
        return
    name = ctypes.string_at(target, target_bytes).decode("utf-8", "replace")
    text = ctypes.string_at(message, message_bytes).decode("utf-8", "replace")
    _callbacks.call(_forward, logger, level, name, text)


on_log = _abi.kvt_log_fn(_on_log)
