"""The service's element types, and their names in numpy, PyTorch and the command line."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ringattn._errors import invalid
from ringattn._optional import needed_by

#: The service's element types.
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8")


def numpy_dtype(name: str) -> np.dtype:
    """Returns the numpy type for one of DTYPES. bfloat16 is ml_dtypes'."""
    if name != "bfloat16":
        return np.dtype(name)
    with needed_by("bfloat16 in numpy"):
        import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


#: Names of floating-point types in numpy, PyTorch and the command line.
_FLOAT_NAMES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
                "float16": "float16", "fp16": "float16", "float8_e4m3": "float8_e4m3", "fp8_e4m3": "float8_e4m3",
                "float8_e4m3fn": "float8_e4m3"}


def float_name(dtype: Any, field: str, *allowed: str) -> str | None:
    """Returns the protocol's name of a floating-point type, given by name or as a dtype of numpy or PyTorch. None for
    None and "input", the type of the inputs.

    Raises:
        InvalidArgumentError: the type is not one of `allowed`.
    """
    if dtype is None or isinstance(dtype, str) and dtype == "input":
        return None
    text = dtype if isinstance(dtype, str) else str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    name = _FLOAT_NAMES.get(text)
    if name not in allowed:
        raise invalid(field, f"is {dtype!r}; must be {' or '.join(allowed)}")
    return name


def dtype_named(name: str, field: str) -> str:
    """Returns the entry of DTYPES for a type's name in numpy or PyTorch; bool becomes uint8.

    Raises:
        InvalidArgumentError: for other types, naming `field`.
    """
    name = "uint8" if name == "bool" else name
    if name not in DTYPES:
        raise invalid(field, f"is of type {name}; the service supports {', '.join(DTYPES)}")
    return name


def service_dtype(dtype: Any) -> str:
    """`dtype_named` for a dtype of numpy or PyTorch, or its name there or in the command line."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return dtype_named(str(dtype).removeprefix("torch."), "dtype")
    if isinstance(dtype, str) and dtype in _FLOAT_NAMES:
        return dtype_named(_FLOAT_NAMES[dtype], "dtype")
    try:
        name = np.dtype(dtype).name
    except TypeError:
        raise invalid("dtype", f"is {dtype!r}; the service supports {', '.join(DTYPES)}") from None
    return dtype_named(name, "dtype")
