"""Tensors of several libraries as memory that the extension module reads and writes.

numpy arrays and PyTorch tensors on the CPU are used in place if they are contiguous. Other objects with DLPack or
numpy's array protocol are read through numpy. `_cuda` handles tensors on CUDA devices.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ringattn import _cuda
from ringattn._arguments import sizes_of, type_name
from ringattn._dtypes import dtype_named, numpy_dtype, service_dtype
from ringattn._errors import NO_FORWARD_MODE, invalid


@dataclass(frozen=True, slots=True)
class Array:
    """An input tensor of a call."""

    shape: tuple[int, ...]
    dtype: str  #: of _dtypes.DTYPES
    memory: np.ndarray | _cuda.CudaTensor  #: contiguous, with an element type of numpy (bfloat16 as 16-bit integers)
    library: "Library"


@dataclass(frozen=True, init=False)
class TensorSpec:
    """Shape and element type of a tensor, in place of the tensor in `Client.prepare`."""

    shape: tuple[int, ...]
    dtype: str

    def __init__(self, shape: int | Sequence[int], dtype: Any = "float32") -> None:
        """`dtype`: of numpy or PyTorch, or its name."""
        object.__setattr__(self, "shape", sizes_of(shape))
        object.__setattr__(self, "dtype", service_dtype(dtype))

    def __getitem__(self, index: tuple[slice, ...]) -> TensorSpec:
        """The spec of the tensor's part, for slices."""
        sizes = [len(range(*part.indices(size))) for part, size in zip(index, self.shape)]
        return TensorSpec((*sizes, *self.shape[len(sizes):]), self.dtype)


class Library(Protocol):
    """Creates results of one tensor library on one device."""

    def empty(self, shape: Sequence[int], dtype: str, memory: np.ndarray | None = None) -> tuple[Any, np.ndarray]:
        """Returns a new tensor and its memory. The tensor uses `memory` if it is given, and keeps it alive."""

    def finish(self, tensor: Any) -> Any:
        """Returns the tensor for the caller, after its memory was filled."""


def _host_memory(array: np.ndarray) -> np.ndarray:
    """Returns a view of `array` with an element type of the buffer protocol."""
    if array.dtype.name == "bfloat16":  # of ml_dtypes
        return array.view(np.uint16)
    if array.dtype == np.bool_:
        return array.view(np.uint8)
    return array


def _shaped(memory: np.ndarray, shape: Sequence[int], dtype: Any) -> np.ndarray:
    return memory.view(dtype).reshape(tuple(shape))


def tensor_in(memory: np.ndarray, shape: Sequence[int], dtype: Any) -> Any:
    """Returns a PyTorch tensor if `dtype` is PyTorch's, else a numpy array, in these bytes. It keeps them alive."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(dtype, torch.dtype):
        return _shaped(memory, shape, numpy_dtype(dtype))
    of = {torch.bfloat16: np.int16, torch.bool: np.uint8}.get(dtype) or numpy_dtype(service_dtype(dtype))
    if memory.nbytes == 0:  # torch.from_numpy does not accept empty memory
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.from_numpy(_shaped(memory, shape, of)).view(dtype)


class _Numpy:
    def __init__(self, bfloat16: np.dtype | None = None) -> None:
        self._bfloat16 = bfloat16

    def empty(self, shape: Sequence[int], dtype: str,
              memory: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        of = self._bfloat16 if dtype == "bfloat16" and self._bfloat16 is not None else numpy_dtype(dtype)
        array: np.ndarray = np.empty(shape, of) if memory is None else _shaped(memory, shape, of)
        return array, _host_memory(array)

    def finish(self, tensor: np.ndarray) -> np.ndarray:
        return tensor


class _Torch:
    def __init__(self, device: Any) -> None:
        self._device = device

    def empty(self, shape: Sequence[int], dtype: str, memory: np.ndarray | None = None) -> tuple[Any, np.ndarray]:
        import torch

        of = getattr(torch, dtype)
        tensor = torch.empty(tuple(shape), dtype=of, device="cpu") if memory is None else tensor_in(memory, shape, of)
        return tensor, _torch_memory(tensor, dtype)

    def finish(self, tensor: Any) -> Any:
        return tensor.to(self._device)


class _Shown:
    """The memory of a contiguous PyTorch tensor on the CPU, for numpy. numpy's array of it keeps the tensor alive.

    Not `Tensor.numpy`, which makes the storage fixed in size: FSDP frees parameters by resizing their storage.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any, typestr: str) -> None:
        self._tensor = tensor
        self.__array_interface__ = {"data": (tensor.data_ptr(), False), "shape": tuple(tensor.shape),
                                    "typestr": typestr, "version": 3}


def _torch_memory(tensor: Any, dtype: str) -> np.ndarray:
    """`dtype`: the tensor's, of DTYPES."""
    kind = np.dtype(np.int16) if dtype == "bfloat16" else np.dtype(dtype)
    if tensor.numel() == 0:  # numpy reads no null pointer
        return np.empty(tuple(tensor.shape), kind)
    return np.asarray(_Shown(tensor, kind.str))


def _check_storage(tensor: Any, field: str) -> None:
    """Raises InvalidArgumentError if the tensor's storage ends before its last element."""
    if tensor.numel() == 0 or tensor.device.type not in ("cpu", "cuda"):
        return
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    needed, given = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if given < needed:
        raise invalid(field, f"needs {needed} bytes of storage, which has {given}; its memory was freed or resized")


def refuse_derivatives(value: Any, field: str) -> None:
    """Raises NotImplementedError for a PyTorch tensor whose gradient or tangent a call of the client would drop."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
        raise NotImplementedError(f"{field}: {NO_FORWARD_MODE}")
    if value.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{field}: requires a gradient, which calls of a client do not compute; use "
                                  "ringattn.attention, or make the call under torch.no_grad()")


def _plain(tensor: Any, field: str) -> Any:
    """Returns a PyTorch tensor without its graph, if its values are in one strided piece of memory.

    Raises:
        InvalidArgumentError: it wraps other tensors, is not strided, or has no values.
        NotImplementedError: it is a tensor of torch.func or torch.vmap, or something differentiates by it.
    """
    import torch

    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(f"{field}: is a tensor inside of torch.vmap or torch.func; use ringattn.attention, which "
                                  "torch.vmap can call")
    refuse_derivatives(tensor, field)
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise invalid(field, f"is a {type(tensor).__name__}, which wraps other tensors; pass a plain torch.Tensor")
    if tensor.is_nested:
        raise invalid(field, "is a nested tensor; pack its documents, with cu_seqlens_q and cu_seqlens_k")
    if tensor.layout != torch.strided:
        raise invalid(field, f"has the layout {tensor.layout}; must be strided")
    if tensor.is_meta:
        raise invalid(field, "is on the device meta, which holds no values")
    tensor = tensor.detach()
    if tensor._is_zerotensor():
        return tensor.clone()
    _check_storage(tensor, field)
    return tensor


def _from_torch(tensor: Any, field: str) -> Array:
    host = _plain(tensor, field).cpu().contiguous().resolve_conj().resolve_neg()
    dtype = dtype_named(str(host.dtype).removeprefix("torch."), field)
    return Array(tuple(host.shape), dtype, _torch_memory(host, dtype), _Torch(tensor.device))


def refuse_masked(value: Any, field: str) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise invalid(field, "is a numpy masked array, whose mask would be lost; use mask= or segment ids, and pass "
                             "array.data")


def _as_numpy(value: Any, field: str) -> np.ndarray:
    refuse_masked(value, field)
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            # numpy's DLPack has no bfloat16, but __array__ may return an array of ml_dtypes.
            if not hasattr(value, "__array__"):
                raise invalid(field, f"cannot be read by DLPack: {error}") from error
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        array = np.asanyarray(value)
        refuse_masked(array, field)
        return np.asarray(array)
    if value is None:
        raise TypeError(f"{field}: is missing")
    raise TypeError(f"{field}: is {type_name(value)}; must be an array (numpy, PyTorch or DLPack)")


def take(value: Any, field: str) -> Array:
    """Returns the input for `value`. Errors name `field`.

    Raises:
        TypeError: `value` is not an array.
        InvalidArgumentError: the element type or the memory is not supported.
    """
    if isinstance(value, TensorSpec):  # a call that has values notices that these have no bytes
        return Array(value.shape, value.dtype, np.empty(0, np.uint8), _Numpy())
    torch = sys.modules.get("torch")
    if _cuda.is_cuda(value):
        of_torch = torch is not None and isinstance(value, torch.Tensor)
        shape, kind, memory = _cuda.take(_plain(value, field) if of_torch else value, field)
        return Array(shape, kind, memory, _cuda.CudaLibrary(memory.device, of_torch))
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(value, field)
    source = _as_numpy(value, field)
    array = np.ascontiguousarray(source).reshape(source.shape)  # numpy makes vectors of scalars
    if array.dtype.byteorder == ">":
        raise invalid(field, "is big-endian; pass array.astype(array.dtype.newbyteorder('='))")
    dtype = dtype_named(array.dtype.name, field)
    library = _Numpy(array.dtype if dtype == "bfloat16" else None)
    return Array(array.shape, dtype, _host_memory(array), library)


def take_on_host(value: Any, field: str) -> Array:
    """`take`, but copies PyTorch tensors on other devices to the host. Results return to their device.

    Raises:
        InvalidArgumentError: an array on a GPU is not a PyTorch tensor.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(value, field)
    if _cuda.is_cuda(value):
        raise invalid(field, "is on a GPU; pass a PyTorch tensor or host memory")
    return take(value, field)


def take_all_on_host(values: dict[str, Any]) -> dict[str, Array]:
    """`take_on_host` for each field. PyTorch tensors of one GPU and dtype travel in one copy: each copy waits for the
    GPU.
    """
    torch = sys.modules.get("torch")
    tensors = list(values.values())
    if torch is None or len(tensors) < 2 or not all(
            type(tensor) is torch.Tensor and tensor.is_cuda and tensor.device == tensors[0].device
            and tensor.dtype == tensors[0].dtype and not tensor.is_conj() and not tensor.is_neg() for tensor in tensors):
        return {field: take_on_host(value, field) for field, value in values.items()}
    host = torch.cat([_plain(tensor, field).reshape(-1) for field, tensor in values.items()]).cpu()
    parts = host.split([tensor.numel() for tensor in tensors])
    library = _Torch(tensors[0].device)
    return {field: replace(_from_torch(part.view(tensor.shape), field), library=library)
            for (field, tensor), part in zip(values.items(), parts)}


def integers(value: Any, field: str) -> list[int]:
    """Returns the whole numbers of a sequence or array of any integer type."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = _plain(value, field).cpu().clone().resolve_neg().numpy()  # of a copy; see _Shown
    refuse_masked(value, field)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise invalid(field, f"must be one-dimensional, of whole numbers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise invalid(field, f"is of type {array.dtype} with {array.ndim} axes; must be one-dimensional, of whole "
                             "numbers")
    return array.tolist()


def as_int32(value: Any, field: str) -> Any:
    """Converts integers to int32 within the array's library. Other arrays are returned unchanged.

    Raises:
        InvalidArgumentError: a number is beyond int32.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.dtype not in (torch.int64, torch.int16, torch.int8, torch.uint8):
            return value
        limits = torch.iinfo(torch.int32)
        beyond = (value < limits.min) | (value > limits.max) if value.dtype == torch.int64 else None
        converted = value.to(torch.int32)
    else:
        if not isinstance(value, np.ndarray):
            return value
        refuse_masked(value, field)
        if value.dtype.kind not in "iu" or value.dtype == np.int32:
            return value
        limits = np.iinfo(np.int32)
        beyond = (value < limits.min) | (value > limits.max)
        converted = value.astype(np.int32)
    if beyond is not None and bool(beyond.any()):
        raise invalid(field, f"has {value[beyond].flatten()[0]}; must be within int32")
    return converted


def as_float32(value: Any, field: str) -> Any:
    """Converts 16-bit floating-point numbers to float32 within the array's library. Others are returned unchanged."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, np.ndarray) and value.dtype.name in ("bfloat16", "float16"):
        refuse_masked(value, field)
        return value.astype(np.float32)
    return value


def floats(value: Any, field: str) -> np.ndarray:
    """Returns a sequence or array of numbers in fp32."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = _plain(value, field).cpu().to(torch.float32, copy=True).resolve_neg().numpy()  # of a copy; see _Shown
    refuse_masked(value, field)
    try:
        return np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:
        raise invalid(field, f"must be numbers: {error}") from error
