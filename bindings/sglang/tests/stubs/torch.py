"""The parts of torch that host pools need, over numpy, so that the tests run without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class dtype:
    def __init__(self, name: str) -> None:
        self.name, self.numpy = name, np.dtype(name)
        self.itemsize = self.numpy.itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


int64, int32, float16, float32, uint8 = (
    dtype(name) for name in ("int64", "int32", "float16", "float32", "uint8"))
_BY_NAME = {one.name: one for one in (int64, int32, float16, float32, uint8)}


@dataclass(frozen=True)
class device:
    type: str = "cpu"

    def __str__(self) -> str:
        return self.type


class Tensor:
    def __init__(self, array: np.ndarray, where: str = "cpu") -> None:
        self._array, self.device = array, device(where)
        self.dtype = _BY_NAME[array.dtype.name]

    shape = property(lambda self: self._array.shape)
    nbytes = property(lambda self: self._array.nbytes)

    def numpy(self):
        return self._array

    def detach(self):
        return self

    def cpu(self):
        return Tensor(self._array)

    def numel(self):
        return self._array.size

    def element_size(self):
        return self._array.itemsize

    def data_ptr(self):
        return self._array.ctypes.data

    def is_contiguous(self):
        return self._array.flags.c_contiguous

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self._array))

    def stride(self, at=None):
        steps = tuple(step // self._array.itemsize for step in self._array.strides)
        return steps if at is None else steps[at]

    def tolist(self):
        return self._array.tolist()

    def flatten(self):
        return Tensor(self._array.reshape(-1))

    def reshape(self, *shape):
        return Tensor(self._array.reshape(*shape))

    def transpose(self, a, b):
        return Tensor(self._array.swapaxes(a, b))

    def __len__(self):
        return len(self._array)

    def __getitem__(self, at):
        got = self._array[at]
        return Tensor(got) if isinstance(got, np.ndarray) else got

    def __setitem__(self, at, value):
        self._array[at] = value._array if isinstance(value, Tensor) else value

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def from_numpy(array):
    return Tensor(array)


def as_tensor(values, dtype=None):
    return Tensor(np.asarray(values, None if dtype is None else dtype.numpy))


def arange(first, end=None, dtype=int64):
    return Tensor(np.arange(*((0, first) if end is None else (first, end)), dtype=dtype.numpy))


def empty(shape, dtype=float32):
    return Tensor(np.empty(shape, dtype.numpy))


def zeros(shape, dtype=float32):
    return Tensor(np.zeros(shape, dtype.numpy))


def cat(tensors):
    return Tensor(np.concatenate([one._array for one in tensors]))


class distributed:
    @staticmethod
    def is_available():
        return False
