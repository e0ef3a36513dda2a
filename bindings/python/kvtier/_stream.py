"""Weight streaming: models larger than memory are loaded unit by unit."""

from __future__ import annotations

import ctypes
import json
import os
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi, _reaper
from ._columns import Column, Columns
from ._errors import make
from ._lib import check, check_err, deadline_after, lib, text_pointer, u32, u64
from ._resource import Closing, Resource, byref, new_error
from ._view import MemoryRange

if TYPE_CHECKING:
    from ._budget import Budget
    from ._device import Device, DeviceEvent
    from ._runtime import Runtime

ROLE_OTHER = _abi.KVT_ROLE_OTHER
ROLE_LAYER = _abi.KVT_ROLE_LAYER
ROLE_EXPERT = _abi.KVT_ROLE_EXPERT
ROLE_EMBEDDING = _abi.KVT_ROLE_EMBEDDING
ROLE_NORM = _abi.KVT_ROLE_NORM
ROLE_HEAD = _abi.KVT_ROLE_HEAD

Path = Union[str, "os.PathLike[str]"]
#: An alias of bytes, for classes with a field of that name.
_Bytes = bytes

_COMPUTE = {"host": _abi.KVT_COMPUTE_HOST, "device": _abi.KVT_COMPUTE_DEVICE}
_PLACES = {"interleaved": _abi.KVT_PLACE_INTERLEAVED, "first": _abi.KVT_PLACE_FIRST,
           "last": _abi.KVT_PLACE_LAST}
_VERIFY = {"never": _abi.KVT_VERIFY_NEVER, "first": _abi.KVT_VERIFY_FIRST,
           "always": _abi.KVT_VERIFY_ALWAYS}
_RESIDENCIES = {_abi.KVT_RESIDENT_FILE: "file", _abi.KVT_RESIDENT_HOST: "host",
                _abi.KVT_RESIDENT_DEVICE: "device"}
_STAGES = {_abi.KVT_STAGE_READ: "read", _abi.KVT_STAGE_COPY: "copy", _abi.KVT_STAGE_USE: "use",
           _abi.KVT_STAGE_WAIT: "wait"}
#: The numpy types of numbers; bf16 is exposed as bits.
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
          "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
          "BOOL": "|b1"}


class ModelInfo(NamedTuple):
    """Properties of a model; numbers that its files do not contain are 0."""

    format: str
    bytes: int
    files: int
    units: int
    tensors: int
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    context: int
    vocabulary: int
    experts: int
    experts_used: int
    fingerprint: _Bytes


class ModelUnit(NamedTuple):
    """A unit of weights: bytes that are used and transferred together."""

    number: int
    name: str
    #: ROLE_*.
    role: int
    layer: Optional[int]
    expert: Optional[int]
    bytes: int
    image_bytes: int


class Tensor(NamedTuple):
    """A tensor in a model's file."""

    number: int
    name: str
    #: The type's name in the file format: "Q6_K", "BF16".
    dtype: str
    #: The outermost dimension first, as in numpy.
    shape: Tuple[int, ...]
    file: int
    offset: int
    bytes: int


class Part(NamedTuple):
    """The location of a tensor, or of an expert's part of a tensor, in its unit."""

    tensor: int
    unit: int
    #: The offset in the unit.
    at: int
    #: The offset in the tensor.
    start: int
    bytes: int


class UnitEntry(NamedTuple):
    """A unit that the caller defines: ranges are (file, offset, bytes)."""

    name: str
    ranges: Sequence[Tuple[int, int, int]]
    role: int = ROLE_OTHER
    layer: Optional[int] = None
    expert: Optional[int] = None


class StreamSpan(NamedTuple):
    """A timed stage of a unit: "read", "copy", "use" or "wait"."""

    stage: str
    unit: int
    begin_ns: int
    end_ns: int


class ExpertStats(NamedTuple):
    """Hits and misses of a layer's experts."""

    layer: int
    hits: int
    misses: int
    bytes: int


@dataclass(frozen=True)
class StreamTerms:
    """Limits of memory, and known speeds of links. None, or 0, is the default."""

    #: "host" or "device": where the engine computes. A streamer with a device computes there.
    compute: Optional[str] = None
    #: No unit stays resident; all memory is used for slots.
    ring: bool = False
    #: "interleaved", "first" or "last".
    placement: str = "interleaved"
    slots: int = 0
    device_ceiling_bytes: Optional[int] = None
    host_ceiling_bytes: Optional[int] = None
    device_safety_bytes: Optional[int] = None
    host_reserve_bytes: Optional[int] = None
    context: int = 0
    sequences: int = 0
    kv_element_bytes: int = 0
    processor_layers: int = 0
    kv_bytes: Optional[int] = None
    workspace_bytes: int = 0
    hidden_bytes: int = 0
    expert_slots: Optional[int] = None
    staging_bytes: int = 0
    chunk_bytes: int = 0
    layer_compute_ns: int = 0
    disk_bytes_per_s: int = 0
    device_bytes_per_s: int = 0
    processor_bytes_per_s: int = 0
    #: Creates slots even if all units fit, so that `rebalance` can shrink the weights. A streamer
    #: with a budget always does so.
    shrinks: bool = False


class StreamMemory(NamedTuple):
    """The available memory, for plans."""

    host_free_bytes: int
    host_total_bytes: int
    device_free_bytes: int = 0
    lockable_bytes: int = 2**64 - 1


def _one_of(name: str, value: str, known: Dict[str, int]) -> int:
    if value not in known:
        raise make(_abi.KVT_E_INVALID, f"{name} {value!r} is unknown: it must be one of "
                                       f"{', '.join(known)}")
    return known[value]


def _terms(given: Optional[StreamTerms]) -> Any:
    given = given or StreamTerms()
    c = _abi.kvt_stream_terms_t(
        compute=0 if given.compute is None else _one_of("compute", given.compute, _COMPUTE),
        mode=_abi.KVT_STREAM_RING if given.ring else _abi.KVT_STREAM_TIERED,
        placement=_one_of("placement", given.placement, _PLACES))
    for name, flag in (("device_ceiling_bytes", _abi.KVT_TERMS_DEVICE_CEILING),
                       ("host_ceiling_bytes", _abi.KVT_TERMS_HOST_CEILING),
                       ("device_safety_bytes", _abi.KVT_TERMS_DEVICE_SAFETY),
                       ("host_reserve_bytes", _abi.KVT_TERMS_HOST_RESERVE),
                       ("kv_bytes", _abi.KVT_TERMS_KV),
                       ("expert_slots", _abi.KVT_TERMS_EXPERT_SLOTS)):
        value = getattr(given, name)
        if value is not None:
            setattr(c, name, u32(value) if name == "expert_slots" else u64(value))
            c.flags |= flag
    if given.shrinks:
        c.flags |= _abi.KVT_TERMS_SHRINKS
    for name in ("slots", "context", "sequences", "kv_element_bytes", "processor_layers"):
        setattr(c, name, u32(getattr(given, name)))
    for name in ("workspace_bytes", "hidden_bytes", "staging_bytes", "chunk_bytes",
                 "layer_compute_ns", "disk_bytes_per_s", "device_bytes_per_s",
                 "processor_bytes_per_s"):
        setattr(c, name, u64(getattr(given, name)))
    return c


def _memory(given: Optional[StreamMemory]) -> Any:
    if given is None:
        return None
    return byref(_abi.kvt_stream_memory_t(**{name: u64(value)
                                             for name, value in given._asdict().items()}))


def _paths(paths: Sequence[Path]) -> Tuple[Any, List[bytes]]:
    held = [os.fsencode(path) for path in paths]
    rows = (_abi.kvt_str_t * max(1, len(held)))()
    for row, text in zip(rows, held):
        row.text, row.bytes = text_pointer(text), len(text)
    return rows, held


def _text(pointer: Any, length: int) -> str:
    return ctypes.string_at(pointer, length).decode("utf-8", "replace") if length else ""


def _long_text(call: Any) -> str:
    room, n, err = 4096, ctypes.c_uint64(), new_error()
    while True:
        to = ctypes.create_string_buffer(room)
        status = call(to, room, byref(n), err)
        if status != _abi.KVT_E_TOO_SMALL:
            check_err(status, err)
            return to.raw[: n.value].decode()
        room = n.value + 256


def _rows(kind: Any, call: Any) -> List[Any]:
    room, n = 64, ctypes.c_uint64()
    while True:
        rows = (kind * room)()
        status = call(rows, room, ctypes.sizeof(kind), byref(n))
        if status != _abi.KVT_E_TOO_SMALL:
            check(status)
            return list(rows[: n.value])
        room = n.value


def _forecast(c: Any) -> Dict[str, Any]:
    names = {0: "", _abi.KVT_BINDING_COMPUTE: "compute", _abi.KVT_BINDING_DEVICE: "device",
             _abi.KVT_BINDING_DISK: "disk"}
    found = {name: getattr(c, name) for name, *_ in c._fields_
             if name not in ("struct_size", "reserved", "binding")}
    return {**found, "binding": names.get(c.binding, "")}


def _number(value: int) -> Optional[int]:
    return None if value == _abi.KVT_NONE else value


class ModelJob(_reaper.Job):
    """Closes a model."""

    __slots__ = ()
    nonblocking = True

    def attempt(self) -> int:
        return int(lib.kvt_model_close(byref(self.handle)))


class Model(Resource):
    """The contents of a model's files. It is immutable; any thread may use it.

    `paths` are a GGUF or safetensors file, the index of a sharded model, or a directory. For a
    split GGUF model they are any one file, or all files.

    >>> import kvtier, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as where:        # files of a custom format
    ...     path = pathlib.Path(where, "weights.bin")
    ...     _ = path.write_bytes(b"a" * 4096 + b"b" * 8192)
    ...     units = [kvtier.UnitEntry("first", [(0, 0, 4096)], kvtier.ROLE_LAYER, layer=0),
    ...              kvtier.UnitEntry("second", [(0, 4096, 8192)], kvtier.ROLE_LAYER, layer=1)]
    ...     with kvtier.Model.table([path], units) as model:
    ...         [(unit.name, unit.bytes) for unit in model.units]
    [('first', 4096), ('second', 8192)]
    """

    _type_name = "model"

    def __init__(self, *paths: Path) -> None:
        rows, held = _paths(paths)
        handle, err = _abi.kvt_model_p(), new_error()
        check_err(lib.kvt_model_open(rows, len(held), ctypes.sizeof(_abi.kvt_str_t),
                                     byref(handle), byref(err)), err)
        self._begin(handle)

    @classmethod
    def table(cls, paths: Sequence[Path], units: Sequence[UnitEntry]) -> "Model":
        """Opens a model from units that the caller defines, for files of any other format."""
        rows, held = _paths(paths)
        entries = (_abi.kvt_unit_entry_t * max(1, len(units)))()
        kept: List[Any] = []
        for entry, unit in zip(entries, units):
            name = unit.name.encode()
            ranges = (_abi.kvt_file_range_t * max(1, len(unit.ranges)))()
            for row, (file, offset, length) in zip(ranges, unit.ranges):
                row.file, row.offset, row.bytes = u32(file), u64(offset), u64(length)
            kept += [name, ranges]
            entry.name, entry.name_bytes = text_pointer(name), len(name)
            entry.role = u32(unit.role)
            entry.layer = _abi.KVT_NONE if unit.layer is None else u32(unit.layer)
            entry.expert = _abi.KVT_NONE if unit.expert is None else u32(unit.expert)
            entry.ranges = ctypes.cast(ranges, type(entry.ranges))
            entry.range_count = len(unit.ranges)
        c = _abi.kvt_model_table_t(
            path_count=len(held), path_stride_bytes=ctypes.sizeof(_abi.kvt_str_t),
            unit_count=len(units), unit_stride_bytes=ctypes.sizeof(_abi.kvt_unit_entry_t),
            range_stride_bytes=ctypes.sizeof(_abi.kvt_file_range_t))
        c.paths, c.units = ctypes.cast(rows, type(c.paths)), ctypes.cast(entries, type(c.units))
        handle, err = _abi.kvt_model_p(), new_error()
        check_err(lib.kvt_model_table(byref(c), byref(handle), byref(err)), err)
        model = cls.__new__(cls)
        model._begin(handle)
        return model

    def _begin(self, handle: Any) -> None:
        self._own(ModelJob(handle, _reaper.RANK_BUFFER))
        self._tensors: Optional[List[Tensor]] = None

    @property
    def info(self) -> ModelInfo:
        """The properties of the model."""
        c = _abi.kvt_model_info_t()
        check(lib.kvt_model_info(self._raw, byref(c)))
        formats = {_abi.KVT_FORMAT_GGUF: "gguf", _abi.KVT_FORMAT_SAFETENSORS: "safetensors",
                   _abi.KVT_FORMAT_TABLE: "table"}
        own = {name: getattr(c, name) for name in ModelInfo._fields}
        own.update(format=formats[c.format], fingerprint=bytes(c.fingerprint),
                   architecture=_text(c.architecture, c.architecture_bytes))
        return ModelInfo(**own)

    @property
    def units(self) -> List[ModelUnit]:
        """All units, in the order of a pass."""
        found = []
        for number in range(self.info.units):
            c = _abi.kvt_unit_t()
            check(lib.kvt_model_unit(self._raw, number, byref(c)))
            found.append(ModelUnit(number, _text(c.name, c.name_bytes), c.role, _number(c.layer),
                                   _number(c.expert), c.bytes, c.image_bytes))
        return found

    @property
    def tensors(self) -> List[Tensor]:
        """All tensors, in the order of files and offsets."""
        if self._tensors is None:
            found = []
            for number in range(self.info.tensors):
                c = _abi.kvt_tensor_t()
                check(lib.kvt_model_tensor(self._raw, number, byref(c)))
                shape = tuple(int(c.dims[i]) for i in reversed(range(c.dim_count)))
                found.append(Tensor(number, _text(c.name, c.name_bytes),
                                    _text(c.dtype, c.dtype_bytes), shape, c.file, c.offset,
                                    c.bytes))
            self._tensors = found
        return self._tensors

    def parts(self, unit: int) -> List[Part]:
        """Returns the parts of a unit, in the order of their offsets."""
        raw = self._raw
        rows = _rows(_abi.kvt_part_t, lambda to, room, each, n: lib.kvt_model_unit_parts(
            raw, u32(unit), to, room, each, n))
        return [Part(row.tensor, row.unit, row.at, getattr(row, "from"), row.bytes)
                for row in rows]

    def find_tensor(self, name: str) -> int:
        """Returns the number of the tensor with this name."""
        text, number = name.encode(), ctypes.c_uint32()
        check(lib.kvt_model_find_tensor(self._raw, text, len(text), byref(number)))
        return number.value

    def find_unit(self, layer: int, expert: Optional[int] = None) -> int:
        """Returns the number of a layer's unit, or of one of its experts."""
        number = ctypes.c_uint32()
        check(lib.kvt_model_find_unit(self._raw, u32(layer), _abi.KVT_NONE if expert is None
                                  else u32(expert), byref(number)))
        return number.value

    def plan(self, terms: Optional[StreamTerms] = None,
             memory: Optional[StreamMemory] = None) -> Dict[str, Any]:
        """Returns the residency of each unit, the predicted time of a pass, and the reasons. The
        call opens nothing."""
        plan: Dict[str, Any] = json.loads(self._plan(terms, memory, _abi.KVT_PLAN_JSON))
        return plan

    def plan_text(self, terms: Optional[StreamTerms] = None,
                  memory: Optional[StreamMemory] = None) -> str:
        """Returns the plan as readable text."""
        return self._plan(terms, memory, _abi.KVT_PLAN_TEXT)

    def _plan(self, terms: Optional[StreamTerms], memory: Optional[StreamMemory],
              kind: int) -> str:
        raw, c, m = self._raw, _terms(terms), _memory(memory)
        return _long_text(lambda to, room, n, err: lib.kvt_model_plan_describe(
            raw, byref(c), m, kind, to, room, n, byref(err)))

    def forecast(self, links: str, terms: Optional[StreamTerms] = None,
                 memory: Optional[StreamMemory] = None) -> Dict[str, Any]:
        """Predicts a pass with other link speeds in GB/s: "h2d=13,disk=3.3"."""
        text, c, err = links.encode(), _abi.kvt_forecast_t(), new_error()
        check_err(lib.kvt_model_forecast(self._raw, byref(_terms(terms)), _memory(memory), text,
                                        len(text), byref(c), byref(err)), err)
        return _forecast(c)

    def close(self) -> None:
        """Closes the model. Its streamers stay open."""
        if self.closed:
            return
        check(lib.kvt_model_close(byref(self._job.handle)))
        self._released()


class _Release:
    """A lease and its views hold this object; its end releases the unit."""


def _release_unit(stream: int, lease: Any) -> None:
    if not _reaper.forked():
        lib.kvt_stream_release(_abi.kvt_stream_p(stream), byref(lease), 0, None)


#: The statuses of a release that did not release the unit.
_NOT_RELEASED = (_abi.KVT_E_UNSUPPORTED, _abi.KVT_E_INVALID, _abi.KVT_E_HANDLE, _abi.KVT_E_STATE,
                 _abi.KVT_E_FORKED)


class UnitLease(MemoryRange):
    """The right to use a unit, and its memory. `release`, the end of a `with` block, or dropping
    the lease ends it, but not before the end of its last view. A unit in device memory has no
    views; copy it with `Device.download`."""

    def __init__(self, streamer: "Streamer", lease: Any) -> None:
        self._streamer, self._c = streamer, lease
        #: The address of the unit's bytes.
        self.address: int = int(lease.address)
        self.nbytes: int = lease.bytes
        #: The unit's number.
        self.unit: int = lease.unit
        #: Whether the unit is in device memory, without views.
        self.on_device: bool = lease.memory == _abi.KVT_MEMORY_DEVICE
        #: The number of the device event after which the bytes are complete; 0 = they are.
        self.event: int = lease.event
        self._held: Optional[_Release] = _Release()
        self._finalizer = weakref.finalize(self._held, _release_unit, streamer._raw.value, lease)

    @property
    def released(self) -> bool:
        """Whether the unit was released."""
        return self._held is None

    def release(self, after: "Optional[DeviceEvent]" = None) -> None:
        """Releases the unit. A second call has no effect. The streamer reuses device memory after
        the event `after`, if given, and takes ownership of the event."""
        if after is not None:
            if self._held is None:
                raise make(_abi.KVT_E_STATE, "the unit was released: acquire it again")
            if not self.on_device:
                raise make(_abi.KVT_E_UNSUPPORTED, "release takes an event for units in device "
                                                   "memory only: this unit is in host memory")
            err = new_error()
            status = lib.kvt_stream_release(self._streamer._raw, byref(self._c),
                                            after.number, byref(err))
            if status not in _NOT_RELEASED:  # another status is the error of a copy
                self._finalizer.detach()
                self._held = None
                after._hand_over()
            check_err(status, err)
        self._held = None

    def __enter__(self) -> "UnitLease":
        self._check(False)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check(self, writable: bool) -> None:
        if self._held is None:
            raise make(_abi.KVT_E_STATE, "the unit was released: acquire it again")
        if writable:
            raise make(_abi.KVT_E_INVALID, "a unit is read-only: copy it to other memory to "
                                           "change it")

    def _memory(self, at: int, length: int) -> Any:
        self._check(False)
        if self.on_device:
            raise make(_abi.KVT_E_UNSUPPORTED, "the unit is in device memory: copy it with "
                                               "Device.download")
        memory: Any = (ctypes.c_ubyte * length).from_address(self.address + at)
        memory.owner = self._held
        return memoryview(memory).cast("B").toreadonly()

    @property
    def data(self) -> memoryview:
        """All bytes of the unit, read-only, without a copy."""
        view: memoryview = self._memory(0, self.nbytes)
        return view

    def view(self, tensor: Union[int, str]) -> memoryview:
        """Returns the bytes of a tensor, or of this expert's part of it, read-only, without a
        copy."""
        part = self._streamer._part(self.unit, tensor)
        view: memoryview = self._memory(part.at, part.bytes)
        return view

    def array(self, tensor: Union[int, str]) -> Any:
        """Returns these bytes as a numpy array in the tensor's shape. bf16 is exposed as bits
        (uint16), quantised types as bytes."""
        import numpy

        part = self._streamer._part(self.unit, tensor)
        about = self._streamer._tensors[part.tensor]
        code = _NUMPY.get(about.dtype)
        flat = numpy.frombuffer(self._memory(part.at, part.bytes), dtype=code or numpy.uint8)
        if code is None:
            return flat
        if part.bytes == about.bytes:
            return flat.reshape(about.shape)
        return flat.reshape((-1, *about.shape[1:]))


class StreamJob(_reaper.Job):
    """Closes a streamer."""

    __slots__ = ()

    def attempt(self) -> int:
        return int(lib.kvt_stream_close(byref(self.handle), _reaper.slice_deadline(), None))


class Streamer(Closing):
    """Loads units of weights ahead of their use. Resident units stay in memory; the others pass
    through a few slots. Any thread may use it.

    >>> import kvtier, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as where, kvtier.Runtime() as runtime:
    ...     path = pathlib.Path(where, "weights.bin")
    ...     _ = path.write_bytes(b"a" * 4096 + b"b" * 4096)
    ...     units = [kvtier.UnitEntry(f"layer {n}", [(0, n * 4096, 4096)], kvtier.ROLE_LAYER,
    ...                               layer=n) for n in (0, 1)]
    ...     with kvtier.Model.table([path], units) as model:
    ...         with kvtier.Streamer(runtime, model) as streamer:
    ...             for unit in model.units:
    ...                 with streamer.acquire(unit.number, timeout=5) as lease:
    ...                     print(unit.name, bytes(lease.data[:2]))
    layer 0 b'aa'
    layer 1 b'bb'
    """

    _type_name = "streamer"

    def __init__(self, runtime: "Runtime", model: Model, terms: Optional[StreamTerms] = None, *,
                 budget: "Optional[Budget]" = None, priority: int = 0,
                 order: Optional[Sequence[int]] = None, once: bool = False,
                 in_place: bool = False, measure: bool = False, policy: str = "",
                 expert_policy: str = "", pinned_percent: Optional[int] = None,
                 verify: str = "never", sidecar: Optional[Path] = None, readers: int = 0,
                 depth: int = 0, buffered: bool = False, uring: bool = True,
                 mapped: bool = False, direct: bool = False, marks: int = 0,
                 device: "Optional[Device]" = None) -> None:
        """`sidecar` is the path of the checksums; "" = beside the model. With a `device` the
        engine computes there, and units are loaded to its memory. With `direct` the device reads
        the files itself; opening fails if it cannot."""
        flags = {_abi.KVT_STREAM_ONCE: once, _abi.KVT_STREAM_IN_PLACE: in_place,
                 _abi.KVT_STREAM_MEASURE: measure, _abi.KVT_STREAM_BUFFERED: buffered,
                 _abi.KVT_STREAM_NO_URING: not uring, _abi.KVT_STREAM_MAPPED: mapped,
                 _abi.KVT_STREAM_DIRECT: direct,
                 _abi.KVT_STREAM_SIDECAR: sidecar is not None,
                 _abi.KVT_STREAM_SET_PINNED_PERCENT: pinned_percent is not None}
        terms_c = _terms(terms)
        opts = _abi.kvt_stream_opts_t(
            flags=sum(flag for flag, is_set in flags.items() if is_set), priority=priority,
            verify=_one_of("verify", verify, _VERIFY), readers=u32(readers), depth=u32(depth),
            marks=u32(marks), pinned_percent=u32(pinned_percent or 0))
        opts.model, opts.terms = model._raw.value, ctypes.pointer(terms_c)
        opts.budget = None if budget is None else budget._raw.value
        if device is not None:
            opts.device = device._raw.value
        self._device = device
        texts = {"policy": policy.encode(), "expert_policy": expert_policy.encode(),
                 "sidecar": os.fsencode(sidecar or "")}
        for name, text in texts.items():
            setattr(opts, name, text_pointer(text, empty_is_none=True))
            setattr(opts, f"{name}_bytes", len(text))
        if order is not None:
            numbers = (ctypes.c_uint32 * max(1, len(order)))(*(u32(unit) for unit in order))
            opts.order, opts.order_count = ctypes.cast(numbers, type(opts.order)), len(order)
        self._runtime, self._tensors = runtime, model.tensors
        self._names = {tensor.name: tensor.number for tensor in self._tensors}
        self._parts: Dict[Tuple[int, int], Part] = {
            (unit, part.tensor): part
            for unit in range(model.info.units) for part in model.parts(unit)}
        handle, err = _abi.kvt_stream_p(), new_error()
        check_err(lib.kvt_stream_open(runtime._raw, byref(opts), byref(handle), byref(err)), err)
        self._own(StreamJob(handle, _reaper.RANK_STORE))

    def _part(self, unit: int, tensor: Union[int, str]) -> Part:
        number = self._names.get(tensor) if isinstance(tensor, str) else tensor
        part = None if number is None else self._parts.get((unit, number))
        if part is None:
            raise make(_abi.KVT_E_NOT_FOUND, f"unit {unit} has no part of tensor {tensor!r}: "
                                             "Model.parts returns its tensors")
        return part

    def _end(self, timeout: Optional[float]) -> int:
        return deadline_after(time.monotonic_ns(), timeout)

    def wait_resident(self, timeout: Optional[float] = None) -> None:
        """Waits until all resident units are in memory."""
        err = new_error()
        check_err(lib.kvt_stream_wait_resident(self._raw, self._end(timeout), byref(err)),
                  err)

    def progress(self) -> Dict[str, int]:
        """Returns the progress of that load."""
        return self._numbers(_abi.kvt_stream_progress_t, lib.kvt_stream_progress)

    def pass_begin(self) -> None:
        """Begins a pass."""
        err = new_error()
        check_err(lib.kvt_stream_pass_begin(self._raw, byref(err)), err)

    def pass_end(self) -> None:
        """Ends a pass."""
        err = new_error()
        check_err(lib.kvt_stream_pass_end(self._raw, byref(err)), err)

    def acquire(self, unit: int, timeout: Optional[float] = None, *,
                submitted: bool = False) -> UnitLease:
        """Waits for a unit and leases it. `submitted`: on a device returns the lease during the
        copies; `UnitLease.event` is the event after which the bytes are complete."""
        lease, err = _abi.kvt_unit_lease_t(), new_error()
        flags = _abi.KVT_ACQUIRE_SUBMITTED if submitted else 0
        check_err(lib.kvt_stream_acquire(self._raw, u32(unit), flags, self._end(timeout),
                                         byref(lease), byref(err)), err)
        return UnitLease(self, lease)

    def poll(self, unit: int) -> Optional[UnitLease]:
        """Leases a unit if it is available; None: it is still being loaded."""
        lease, err = _abi.kvt_unit_lease_t(), new_error()
        status = lib.kvt_stream_acquire(self._raw, u32(unit), _abi.KVT_ACQUIRE_POLL, 0,
                                        byref(lease), byref(err))
        if status == _abi.KVT_E_AGAIN:
            lib.kvt_error_free(byref(err))
            return None
        check_err(status, err)
        return UnitLease(self, lease)

    def hint(self, units: Column) -> None:
        """Announces that the engine will use these units."""
        raw, err = self._raw, new_error()
        with Columns() as columns:
            given, length = columns.take("units", "u32", units)
            check_err(lib.kvt_stream_hint(raw, given, length, byref(err)), err)

    def rebalance(self, host_bytes: Optional[int] = None, device_bytes: Optional[int] = None,
                  context: int = 0) -> Dict[str, int]:
        """Changes the memory limits of the weights; returns the new plan in numbers."""
        limits, plan, err = _abi.kvt_stream_limits_t(), _abi.kvt_stream_plan_t(), new_error()
        limits.context = u32(context)
        if host_bytes is not None:
            limits.host_bytes, limits.flags = u64(host_bytes), _abi.KVT_LIMIT_HOST
        if device_bytes is not None:
            limits.device_bytes = u64(device_bytes)
            limits.flags |= _abi.KVT_LIMIT_DEVICE
        check_err(lib.kvt_stream_rebalance(self._raw, byref(limits), byref(plan), byref(err)), err)
        return _fields(plan)

    def plan(self) -> Dict[str, Any]:
        """Returns the current residency of each unit, and the reasons."""
        plan: Dict[str, Any] = json.loads(self._plan(_abi.KVT_PLAN_JSON))
        return plan

    def plan_text(self) -> str:
        """Returns the plan as readable text."""
        return self._plan(_abi.KVT_PLAN_TEXT)

    def _plan(self, kind: int) -> str:
        raw = self._raw
        return _long_text(lambda to, room, n, err: lib.kvt_stream_plan_describe(
            raw, kind, to, room, n))

    def residency(self) -> List[str]:
        """Returns the current residency of each unit: "host", "device" or "file"."""
        count = self._model_units()
        rows = (_abi.kvt_unit_residency_t * max(1, count))()
        check(lib.kvt_stream_plan(self._raw, None, None, rows, count,
                                  ctypes.sizeof(_abi.kvt_unit_residency_t)))
        return [_RESIDENCIES[row.residency] for row in rows[:count]]

    def _model_units(self) -> int:
        plan = _abi.kvt_stream_plan_t()
        check(lib.kvt_stream_plan(self._raw, byref(plan), None, None, 0, 0))
        return int(plan.device_units + plan.host_units + plan.file_units)

    def forecast(self, links: str) -> Dict[str, Any]:
        """Predicts a pass with other link speeds in GB/s: "disk=3.3"."""
        text, c, err = links.encode(), _abi.kvt_forecast_t(), new_error()
        check_err(lib.kvt_stream_forecast(self._raw, text, len(text), byref(c), byref(err)), err)
        return _forecast(c)

    def stats(self) -> Dict[str, int]:
        """Returns counters."""
        return self._numbers(_abi.kvt_stream_stats_t, lib.kvt_stream_stats)

    def _numbers(self, kind: Any, call: Any) -> Dict[str, int]:
        c = kind()
        check(call(self._raw, byref(c)))
        return _fields(c)

    def layers(self) -> List[ExpertStats]:
        """Returns the counts of experts by layer."""
        raw = self._raw
        rows = _rows(_abi.kvt_expert_stats_t, lambda to, room, each, n: lib.kvt_stream_layers(
            raw, to, room, each, n))
        return [ExpertStats(row.layer, row.hits, row.misses, row.bytes) for row in rows]

    def marks(self) -> List[StreamSpan]:
        """Returns the last timed stages, the oldest first."""
        raw = self._raw
        rows = _rows(_abi.kvt_stream_span_t, lambda to, room, each, n: lib.kvt_stream_marks(
            raw, to, room, each, n))
        return [StreamSpan(_STAGES[row.stage], row.unit, row.begin_ns, row.end_ns)
                for row in rows]

    def describe_io(self) -> str:
        """Returns how files are read, and why no faster way is used."""
        raw = self._raw
        return _long_text(lambda to, room, n, err: lib.kvt_stream_describe_io(raw, to, room, n))

    def verify(self, unit: int) -> int:
        """Reads a unit again and compares it with its checksums, or records them."""
        total, err = ctypes.c_uint64(), new_error()
        check_err(lib.kvt_stream_verify(self._raw, u32(unit), byref(total), byref(err)), err)
        return total.value

    def unit_address(self, unit: Optional[int] = None) -> Tuple[int, int]:
        """Returns the address and length of a unit with a fixed address (`in_place`), or of
        all."""
        address, length = ctypes.c_void_p(), ctypes.c_uint64()
        check(lib.kvt_stream_unit_address(self._raw, _abi.KVT_NONE if unit is None else u32(unit),
                                   byref(address), byref(length)))
        return int(address.value or 0), length.value

    def close(self, timeout: Optional[float] = None) -> None:
        """Closes the streamer; raises `BusyError` while units, or views of them, are in use."""
        if self.closed:
            return
        err = new_error()
        check_err(lib.kvt_stream_close(byref(self._job.handle), self._end(timeout),
                                       byref(err)), err)
        self._released()


def _fields(c: Any) -> Dict[str, int]:
    return {name: int(getattr(c, name)) for name, *_ in c._fields_
            if name not in ("struct_size", "reserved")}
