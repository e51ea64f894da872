"""Tensors in CUDA memory as calls take and give them: PyTorch's, and those of anything that speaks DLPack (kDLCUDA)."""

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
#: What a consumer of DLPack names the legacy default stream. Never None, of which libraries think differently.
_LEGACY_STREAM = 1
# DLDataTypeCode and bits, by the service's names.
CODES = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32), "uint8": (1, 8)}
_NAMES = {code: name for name, code in CODES.items()} | {(6, 8): "uint8"}


def check(error: dict[str, Any] | None) -> None:
    if error is not None:
        raise error_of(error)


@dataclass(frozen=True, slots=True)
class CudaTensor:
    """An input on a GPU, whose producer's stream the legacy default stream waits for."""

    address: int
    nbytes: int
    device: int
    owner: Any  #: keeps it

    def to_host(self) -> np.ndarray:
        host = np.empty(self.nbytes, np.uint8)
        if self.nbytes:
            check(_core.cuda_copy_to_host(self.device, host, self.address))
        return host


def is_cuda(value: Any) -> bool:
    """Whether it is a tensor in the memory of a CUDA device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.device.type != "cuda":
        return False
    device = getattr(value, "__dlpack_device__", None)
    return device is not None and hasattr(value, "__dlpack__") and int(device()[0]) == _KDL_CUDA


def take(value: Any, field_name: str) -> tuple[tuple[int, ...], str, CudaTensor]:
    """Its shape, element type and memory. Raises InvalidArgumentError, naming the field."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        # On the current stream, which the next line has the legacy one wait for.
        value = value.detach().contiguous().resolve_conj().resolve_neg()
        if value.dtype == torch.bool:
            value = value.view(torch.uint8)
    shown = _core.DlpackTensor(value.__dlpack__(stream=_LEGACY_STREAM))
    code, bits, lanes = shown.dtype
    dtype = _NAMES.get((code, bits)) if lanes == 1 else None
    if dtype is None:
        raise invalid(field_name, f"is of DLPack's type (code {code}, {bits} bits, {lanes} lanes); the service has "
                                  f"{', '.join(CODES)}")
    if not shown.is_contiguous:
        raise invalid(field_name, "is not contiguous, and only PyTorch's tensors are made so here")
    shape = tuple(shown.shape)
    nbytes = math.prod(shape) * bits // 8
    return shape, dtype, CudaTensor(shown.address, nbytes, shown.device, (value, shown))


class Block(Protocol):
    """Some bytes of a region on a GPU, for as long as it lives."""

    address: int
    nbytes: int
    device: int

    def bytes(self) -> _core.CudaBytes:
        """As the extension module takes them."""


class CudaArray:
    """A tensor in memory on a GPU that the workers of this machine share, until the last view of it is gone.

    Its contents are complete: nothing has to be waited for. `torch.from_dlpack(array)`, `cupy.from_dlpack(array)` and
    their like are views of it; `numpy()` is a copy. A call of its client takes it where it is.
    """

    def __init__(self, block: Block, shape: Sequence[int], dtype: str) -> None:
        self._block = block
        self.shape = tuple(shape)
        self.dtype = dtype  #: "float32", "bfloat16", "float16", "int32" or "uint8"

    def __repr__(self) -> str:
        return f"<ringattn.CudaArray {list(self.shape)} {self.dtype} on CUDA device {self.device}>"

    @property
    def device(self) -> int:
        """The CUDA device, as this process counts them."""
        return self._block.device

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    @property
    def address(self) -> int:
        """On the GPU."""
        return self._block.address

    def __dlpack_device__(self) -> tuple[int, int]:
        return _KDL_CUDA, self.device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """A capsule of DLPack. `stream`, the consumer's, has nothing to wait for."""
        code, bits = CODES[self.dtype]
        return _core.make_cuda_dlpack(self._block, self._block.address, self.device, list(self.shape), code, bits)

    def numpy(self) -> np.ndarray:
        """Returns a copy in host memory ("bfloat16": of ml_dtypes), after all GPU work of this process so far."""
        host = np.empty(self.nbytes, np.uint8)
        check(_core.cuda_synchronize(self.device))
        if self.nbytes:
            check(_core.cuda_copy_to_host(self.device, host, self._block.address))
        return host.view(numpy_dtype(self.dtype)).reshape(self.shape)


class CudaLibrary:
    """Where results of a call on a GPU are made: PyTorch's tensors if its first tensor was one, else CudaArrays."""

    def __init__(self, device: int, of_torch: bool) -> None:
        self.device = device
        self.of_torch = of_torch

    def empty(self, shape: Sequence[int], dtype: str, memory: Any = None) -> tuple[Any, Any]:
        """In `memory`, a block; or in host memory, which `moved` takes to the GPU."""
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
        if not self.of_torch:  # Placement.moved has been there before
            raise RuntimeError("the result lies in host memory")
        import torch

        return torch.from_numpy(host).view(getattr(torch, dtype)).reshape(shape).to(f"cuda:{self.device}")
