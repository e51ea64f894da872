"""The description of a tensor without values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringattn._arguments import sizes_of
from ringattn._dtypes import service_dtype


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
