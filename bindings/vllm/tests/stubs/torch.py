"""The parts of torch that these tests need for tensors in host memory, over numpy."""

from types import SimpleNamespace

import numpy as np

int8, int16, uint8, float32 = np.int8, np.int16, np.uint8, np.float32


class _Storage:
    def __init__(self, data):
        self.data = data


class Tensor:
    """A view of an array, with torch's names."""

    def __init__(self, array, device="cpu"):
        self._array, self.device = array, SimpleNamespace(type=device, index=None)

    shape = property(lambda self: self._array.shape)

    def dim(self):
        return self._array.ndim

    def numel(self):
        return self._array.size

    def element_size(self):
        return self._array.itemsize

    def stride(self, dim=None):
        all_ = tuple(step // self._array.itemsize for step in self._array.strides)
        return all_ if dim is None else all_[dim]

    def _whole(self):
        whole = self._array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        return whole

    def data_ptr(self):
        return self._array.__array_interface__["data"][0]

    def storage_offset(self):
        begin = self._whole().__array_interface__["data"][0]
        return (self.data_ptr() - begin) // self._array.itemsize

    def untyped_storage(self):
        return _Storage(self._whole().reshape(-1).view(np.uint8))

    def set_(self, storage):
        return Tensor(storage.data)

    def numpy(self):
        return self._array

    def is_contiguous(self):
        return self._array.flags.c_contiguous

    def unflatten(self, dim, sizes):
        array = self._array
        return Tensor(array.reshape(sizes[0], array.shape[0] // sizes[0], *array.shape[1:]))

    def transpose(self, a, b):
        return Tensor(self._array.swapaxes(a, b))

    def clone(self):
        return Tensor(self._array.copy())

    def all(self):
        return bool(self._array.all())

    def __eq__(self, other):
        return Tensor(self._array == other._array)

    __hash__ = None

    def __getitem__(self, at):
        return Tensor(self._array[at])

    def __setitem__(self, at, value):
        self._array[at] = value._array if isinstance(value, Tensor) else value

    def __array__(self, dtype=None, copy=None):
        return self._array


class Generator:
    def manual_seed(self, seed):
        self.rng = np.random.default_rng(seed)
        return self


def zeros(shape, dtype=float32, device="cpu"):
    sizes = (shape,) if isinstance(shape, int) else shape
    return Tensor(np.zeros(sizes, dtype), device)


def empty(size, dtype=float32):
    return Tensor(np.empty(size, dtype))


def randint(low, high, size, generator, dtype):
    return Tensor(generator.rng.integers(low, high, size).astype(dtype))
