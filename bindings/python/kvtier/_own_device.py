"""Custom devices: the functions that C calls, and the conversion of results and exceptions."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, List, NamedTuple, Tuple

from . import _abi, _callbacks
from ._errors import Error
from ._lib import u32, u64


class CopyRows(NamedTuple):
    """Runs of bytes to copy, at constant strides in source and target."""

    #: Addresses of the first run.
    source: int
    target: int
    #: Bytes from a run to the next.
    source_stride: int
    target_stride: int
    #: Bytes per run.
    run_bytes: int
    #: The number of runs.
    runs: int
    #: `abi.KVT_MEMORY_*`.
    source_memory: int
    target_memory: int


_ROW_FIELDS = [name for name, *_ in _abi.kvt_copy_rows_t._fields_]


def _status(call: Callable[[], Any]) -> int:
    """Calls a method of the user's device, and converts its exception to a status."""
    try:
        call()
        return _abi.KVT_OK
    except Error as error:
        return error.status
    except MemoryError:
        return _abi.KVT_E_NOMEM
    except BaseException as error:  # noqa: BLE001: no exception may cross into C
        _callbacks.report(error)
        return _abi.KVT_E_STATE


def _entries(kind: Any, first: Any, count: int, stride: int) -> List[Any]:
    """Copies entries from C, which may be longer than this package knows."""
    size = ctypes.sizeof(kind)
    start = ctypes.cast(first, ctypes.c_void_p).value or 0
    return [kind.from_buffer_copy(ctypes.string_at(start + i * stride, size))
            for i in range(count)]


def _put(out: Any, value: Any) -> None:
    out[0] = u64(value)


def _submit(number: int, stream: int, after: int, copies: Any, count: int, stride: int,
            out: Any) -> int:
    def body() -> None:
        rows = [CopyRows(*(getattr(row, name) for name in _ROW_FIELDS))
                for row in _entries(_abi.kvt_copy_rows_t, copies, count, stride)]
        _put(out, _callbacks.find(number).submit(stream, after, rows))
    return _status(body)


def _launch(number: int, stream: int, after: int, kernels: Any, count: int, stride: int,
            out: Any) -> int:
    return _status(lambda: _put(out, _callbacks.find(number).launch(
        stream, after, _entries(_abi.kvt_kernel_t, kernels, count, stride))))


def _query(number: int, event: int) -> int:
    try:
        return _abi.KVT_OK if _callbacks.find(number).query(event) else _abi.KVT_E_AGAIN
    except Error as error:
        return error.status
    except BaseException as error:  # noqa: BLE001: no exception may cross into C
        # The query failed, but the batch may still run and use its memory.
        _callbacks.report(error)
        return _abi.KVT_E_AGAIN


def _wait(number: int, event: int, deadline_ns: int) -> int:
    return _status(lambda: _callbacks.find(number).wait(event, deadline_ns))


def _release(number: int, event: int) -> None:
    with _callbacks.Restricted():
        _status(lambda: _callbacks.find(number).release(event))


def _allocate(number: int, nbytes: int, out: Any) -> int:
    with _callbacks.Restricted():
        return _status(lambda: _put(out, _callbacks.find(number).allocate(nbytes)))


def _free(number: int, address: int, nbytes: int) -> None:
    with _callbacks.Restricted():
        _status(lambda: _callbacks.find(number).free(address, nbytes))


def _free_bytes(number: int, out: Any) -> int:
    with _callbacks.Restricted():
        return _status(lambda: _put(out, _callbacks.find(number).free_bytes()))


def _register_host(number: int, address: int, nbytes: int) -> int:
    return _status(lambda: _callbacks.find(number).register_host(address, nbytes))


def _import_event(number: int, raw: int, out: Any) -> int:
    return _status(lambda: _put(out, _callbacks.find(number).import_event(raw)))


def _stream_wait(number: int, raw_stream: int, event: int) -> int:
    return _status(lambda: _callbacks.find(number).stream_wait(raw_stream, event))


def _create_event(number: int, out: Any) -> int:
    return _status(lambda: _put(out, _callbacks.find(number).create_event()))


def _signal_event(number: int, event: int) -> int:
    return _status(lambda: _callbacks.find(number).signal_event(event))


_FUNCTIONS = {
    "submit": _abi.kvt_device_submit_fn(_submit), "query": _abi.kvt_device_query_fn(_query),
    "wait": _abi.kvt_device_wait_fn(_wait), "release": _abi.kvt_device_release_fn(_release),
    "allocate": _abi.kvt_device_allocate_fn(_allocate), "free": _abi.kvt_device_free_fn(_free),
    "free_bytes": _abi.kvt_device_free_bytes_fn(_free_bytes),
    "register_host": _abi.kvt_device_register_host_fn(_register_host),
    "import_event": _abi.kvt_device_import_event_fn(_import_event),
    "stream_wait": _abi.kvt_device_stream_wait_fn(_stream_wait),
    "launch": _abi.kvt_device_launch_fn(_launch),
    "create_event": _abi.kvt_device_create_event_fn(_create_event),
    "signal_event": _abi.kvt_device_signal_event_fn(_signal_event),
}


def table_for_c(device: Any) -> Tuple[Any, int]:
    """Returns the C table of a custom device, and its callback number. C owns the number only if
    the open succeeds."""
    table = _abi.kvt_device_custom_t(destroy=_callbacks.on_destroy)
    for name, flag in (("has_memory", _abi.KVT_DEVICE_HAS_MEMORY),
                       ("wants_pinned", _abi.KVT_DEVICE_WANTS_PINNED)):
        table.flags |= flag if getattr(device, name, False) else 0
    table.streams = u32(getattr(device, "streams", 1))
    for kind in getattr(device, "kernels", ()):
        table.kernels |= u64(1 << kind)
    for name, function in _FUNCTIONS.items():
        if getattr(device, name, None) is not None:
            setattr(table, name, function)
    number = _callbacks.register(device)
    table.user_data = number
    return table, number
