"""Tensors in CUDA memory as inputs and results: PyTorch's, and those of other libraries with DLPack (kDLCUDA)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringattn import _core
from ringattn._dtypes import numpy_dtype
from ringattn._errors import error_of, invalid

#: DLDeviceType.
_KDL_CUDA = 2
#: The legacy default stream in DLPack. Libraries interpret None differently, so None is never passed.
_LEGACY_STREAM = 1
# (DLDataTypeCode, bits) by the service's type names.
CODES = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32), "uint8": (1, 8)}
_NAMES = {code: name for name, code in CODES.items()} | {(6, 8): "uint8"}


def check(error: dict[str, Any] | None) -> None:
    if error is not None:
        raise error_of(error)


@dataclass(frozen=True, slots=True)
class CudaTensor:
    """An input on a GPU. The legacy default stream waits for its producer's stream."""

    address: int
    nbytes: int
    device: int
    owner: Any  #: keeps the memory alive

    def to_host(self) -> np.ndarray:
        host = np.empty(self.nbytes, np.uint8)
        if self.nbytes:
            check(_core.cuda_copy_to_host(self.device, host, self.address))
        return host


def is_cuda(value: Any) -> bool:
    """Whether `value` is a tensor in the memory of a CUDA device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.device.type != "cuda":
        return False
    device = getattr(value, "__dlpack_device__", None)
    return device is not None and hasattr(value, "__dlpack__") and int(device()[0]) == _KDL_CUDA


def take(value: Any, field_name: str) -> tuple[tuple[int, ...], str, CudaTensor]:
    """Returns shape, element type and memory. Raises InvalidArgumentError, naming the field."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        # Runs on the current stream. The export below makes the legacy stream wait for it.
        value = value.detach().contiguous().resolve_conj().resolve_neg()
        if value.dtype == torch.bool:
            value = value.view(torch.uint8)
    shown = _core.DlpackTensor(value.__dlpack__(stream=_LEGACY_STREAM))
    code, bits, lanes = shown.dtype
    dtype = _NAMES.get((code, bits)) if lanes == 1 else None
    if dtype is None:
        raise invalid(field_name, f"is of DLPack type (code {code}, {bits} bits, {lanes} lanes); the service supports "
                                  f"{', '.join(CODES)}")
    if not shown.is_contiguous:
        raise invalid(field_name, "is not contiguous; only PyTorch's tensors on a GPU may be strided")
    shape = tuple(shown.shape)
    nbytes = math.prod(shape) * bits // 8
    return shape, dtype, CudaTensor(shown.address, nbytes, shown.device, (value, shown))


class Block(Protocol):
    """An allocation in a region on a GPU, which lasts as long as this object."""

    address: int
    nbytes: int
    device: int

    def bytes(self) -> _core.CudaBytes:
        """Returns the argument for the extension module."""


class CudaArray:
    """A tensor in GPU memory that the client shares with workers. The memory is released after the last view is gone.

    Its contents are complete, so consumers need not synchronize. `from_dlpack` of PyTorch, CuPy and others returns a
    view; `numpy()` returns a copy. As an input of a call of the same client, it is not copied.
    """

    def __init__(self, block: Block, shape: Sequence[int], dtype: str) -> None:
        self._block = block
        self.shape = tuple(shape)
        self.dtype = dtype  #: "float32", "bfloat16", "float16", "int32" or "uint8"

    def __repr__(self) -> str:
        return f"<ringattn.CudaArray {list(self.shape)} {self.dtype} on CUDA device {self.device}>"

    @property
    def device(self) -> int:
        """The index of the CUDA device in this process."""
        return self._block.device

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    @property
    def address(self) -> int:
        """The device address."""
        return self._block.address

    def __dlpack_device__(self) -> tuple[int, int]:
        return _KDL_CUDA, self.device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """Returns a DLPack capsule. `stream` is ignored, because the contents are complete."""
        code, bits = CODES[self.dtype]
        return _core.make_cuda_dlpack(self._block, self._block.address, self.device, list(self.shape), code, bits)

    def numpy(self) -> np.ndarray:
        """Returns a copy in host memory, after all earlier GPU work of this process. "bfloat16" needs ml_dtypes."""
        host = np.empty(self.nbytes, np.uint8)
        check(_core.cuda_synchronize(self.device))
        if self.nbytes:
            check(_core.cuda_copy_to_host(self.device, host, self._block.address))
        return host.view(numpy_dtype(self.dtype)).reshape(self.shape)


class CudaLibrary:
    """Creates the results of a call on a GPU: PyTorch tensors if its first tensor was one, else CudaArrays."""

    def __init__(self, device: int, of_torch: bool) -> None:
        self.device = device
        self.of_torch = of_torch

    def empty(self, shape: Sequence[int], dtype: str, memory: Any = None) -> tuple[Any, Any]:
        """Returns a result and its memory: in the block `memory`, or in host memory, from which it is moved later."""
        if memory is not None:
            return CudaArray(memory, shape, dtype), memory.bytes()
        host = np.empty(math.prod(shape) * CODES[dtype][1] // 8, np.uint8)
        return (host, tuple(shape), dtype), host

    def finish(self, tensor: Any) -> Any:
        if not isinstance(tensor, CudaArray):
            return self._on_host(*tensor)
        if not self.of_torch:
            return tensor
        import torch

        return torch.from_dlpack(tensor)

    def _on_host(self, host: np.ndarray, shape: tuple[int, ...], dtype: str) -> Any:
        if not self.of_torch:  # Placement.moved has replaced these results
            raise RuntimeError("the result is still in host memory")
        import torch

        return torch.from_numpy(host).view(getattr(torch, dtype)).reshape(shape).to(f"cuda:{self.device}")
