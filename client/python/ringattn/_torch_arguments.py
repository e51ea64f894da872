"""Arguments of the functions for PyTorch: their checks, and the form in which operators take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringattn._arguments import flag, items_of, seed_number, signed_number, type_name, whole_number, window_pair
from ringattn._arrays import refuse_masked
from ringattn._errors import NO_FORWARD_MODE, invalid
from ringattn._options import DilationLevel, Document
from ringattn._shape import PARTS


# ------------------------------------------------------------------ tensors

def check_tensor(value: Any, name: str, more: str = "") -> Tensor:
    """Returns `value`. Raises TypeError unless it is a PyTorch tensor, and InvalidArgumentError unless it is strided."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: is missing" if value is None else
                        f"{name}: is {type_name(value)}; must be a torch.Tensor{more}")
    if value.is_nested:
        raise invalid(name, "is a nested tensor; pack its documents, with cu_seqlens_q and cu_seqlens_k")
    if value.layout != torch.strided:
        raise invalid(name, f"has the layout {value.layout}; must be strided")
    return value


def check_axes(tensor: Any, name: str, axes: str) -> Tensor:
    """Returns `tensor`. Raises InvalidArgumentError unless it has these axes: names, or the number of a packed one."""
    names = axes.split(", ")
    shape = check_tensor(tensor, name).shape
    if len(shape) != len(names) or any(axis.isdigit() and size != int(axis) for axis, size in zip(names, shape)):
        raise invalid(name, f"has the shape {list(shape)}; must be [{axes}]")
    return tensor


def form_of(q: Tensor | None, k: Tensor | None, v: Tensor | None, qkv: Tensor | None,
            kv: Tensor | None) -> tuple[str, tuple[Tensor, Tensor | None, Tensor | None]]:
    """Returns how the tensors are packed, and the operator's first three arguments."""
    form = "qkv" if qkv is not None else "kv" if kv is not None else ""
    wanted = {"qkv": ("qkv",), "kv": ("q", "kv"), "": ("q", "k", "v")}[form]
    given = {"q": q, "k": k, "v": v, "qkv": qkv, "kv": kv}
    for name, tensor in given.items():
        if (tensor is None) == (name in wanted):
            raise TypeError(f"{name}: is missing" if tensor is None else f"{name}: is given in addition to {form}")
    for name, parts in PARTS.items():
        tensor = given[name]
        if tensor is not None and (tensor.dim() < 4 or tensor.shape[-3] != parts):
            raise invalid(name, f"has the shape {list(tensor.shape)}; must be [.., tokens, {parts}, heads, head_dim]")
    return form, (given[wanted[0]], kv if form == "kv" else k, v)


def check_values(tensors: dict[str, Tensor | None], options: dict[str, Any]) -> None:
    """Raises InvalidArgumentError if some tensors have no values (device meta) and others have: results would have none.

    Args:
        tensors: q, k and v, or packed forms of them. All may be on the device meta.
        options: other arguments. They may be anywhere if `tensors` are on the device meta.
    """
    on_meta = {name: tensor.is_meta for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(on_meta))
    if not on_meta[first]:
        on_meta |= {name: value.is_meta for name, value in options.items() if isinstance(value, Tensor)}
    for name, is_meta in on_meta.items():
        if is_meta != on_meta[first]:
            raise invalid(name, f"is {'on the device meta, which holds no values' if is_meta else 'in memory'}; "
                                f"{first} is {'in memory' if is_meta else 'on the device meta'}")


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Casts tensors under torch.autocast as scaled_dot_product_attention casts them. float64 is not cast."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor.to(dtype) if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
            else tensor for tensor in tensors]


# ------------------------------------------------------------------ derivatives

def _is_for_torch_func(tensor: Tensor) -> bool:
    """Whether torch.func's grad, vjp or jvp differentiates by it, inside or outside of a vmap."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _check_transforms(name: str, tensor: Tensor) -> None:
    """Raises NotImplementedError for a tensor by which something other than autograd's reverse mode differentiates."""
    if torch.compiler.is_compiling():
        return  # the operator's fake kernel refuses forward mode
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(f"{name}: {NO_FORWARD_MODE}")
    if _is_for_torch_func(tensor):
        raise NotImplementedError(f"{name}: derivatives by torch.func (grad, vjp, jvp, ...) are not supported; use "
                                  "torch.autograd.grad or backward()")


def check_not_differentiated(name: str, value: Any) -> None:
    """Raises NotImplementedError if an argument without a gradient requires one."""
    if not isinstance(value, Tensor):
        return
    _check_transforms(name, value)
    if torch.is_grad_enabled() and value.requires_grad:
        raise NotImplementedError(f"{name}: requires a gradient, which ringattn does not compute; pass {name}.detach() "
                                  "to treat it as a constant")


def refuse_derivatives(**tensors: Tensor | None) -> None:
    """Raises NotImplementedError if anything differentiates by one of the tensors, which are used with a K/V cache."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        _check_transforms(name, check_tensor(tensor, name))
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise NotImplementedError(f"requires_grad: {name} requires a gradient; K/V caches are for inference; use "
                                      "torch.no_grad()")


def check_derivatives(with_gradients: dict[str, Any], others: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Checks that the tensor arguments are tensors, and that no unsupported derivative is requested.

    Args:
        with_gradients: tensors by which the functions are differentiable. None: not given.
        others: tensors without a gradient.
        numbers: arguments that are numbers, or tensors of one number.
    """
    for name, value in (*with_gradients.items(), *others.items()):
        if value is not None:
            _check_transforms(name, check_tensor(value, name, " (Client.forward takes other arrays)"))
    for name, value in (*others.items(), *numbers.items()):
        check_not_differentiated(name, value)


# ------------------------------------------------------------------ options

def flat_documents(documents: Sequence[Document] | None) -> list[int]:
    """Returns causal, left and right of each document, as one list for the operator."""
    return [value for index, document in enumerate(items_of(documents, Document, "documents"))
            for value in (int(flag(document.causal, f"documents[{index}].causal")), *window_pair((-1, -1) if document.window is None else document.window,
                                                             f"documents[{index}].window"))]


def flat_levels(levels: Sequence[DilationLevel] | None) -> list[int]:
    """Returns the five numbers of each level as one list for the operator. -1 stands for None."""
    flat: list[int] = []
    for index, level in enumerate(items_of(levels, DilationLevel, "dilation_levels")):
        for name in ("segment_length", "dilation_rate", "offset", "head_begin", "head_end"):
            value = getattr(level, name)
            field = f"dilation_levels[{index}].{name}"
            if value is not None and signed_number(value, field) < 0:
                raise invalid(field, f"is {value}; must not be negative")
            flat.append(-1 if value is None else signed_number(value, field))
    return flat


def offsets_tensor(cu_seqlens: Any, name: str) -> Tensor | None:
    """Returns cu_seqlens, a tensor or a sequence of whole numbers, as a tensor."""
    if cu_seqlens is None or isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    refuse_masked(cu_seqlens, name)
    try:
        return torch.tensor([whole_number(offset, name) for offset in cu_seqlens], dtype=torch.int64, device="cpu")
    except TypeError:
        raise invalid(name, f"is {type_name(cu_seqlens)}; must be a tensor of whole numbers") from None


def longest_query_of(cu_seqlens_q: Tensor | None, lse_format: str | None, max_seqlen_q: int | None) -> int:
    """Returns the length of the last axis of lse per document, or -1 for a flat lse."""
    if lse_format in (None, "flat"):
        return -1
    if lse_format != "per_document":
        raise invalid("lse_format", f"is {lse_format!r}; must be flat or per_document")
    if cu_seqlens_q is None:
        raise invalid("lse_format", "is per_document, which needs cu_seqlens_q and cu_seqlens_k")
    if max_seqlen_q is not None:
        return whole_number(max_seqlen_q, "max_seqlen_q")
    return int(cu_seqlens_q.diff().max()) if cu_seqlens_q.numel() > 1 else 0


def seed_tensor(value: Any, dropout_p: float) -> Tensor | None:
    """Returns `dropout_seed` as a tensor of one whole number. Without one, PyTorch's generator draws it. None: no dropout.
    """
    if dropout_p == 0.0:
        return None
    if value is None:
        # One draw on the CPU, so that checkpointing and a fixed seed reproduce the dropped pairs.
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    if isinstance(value, Tensor):
        check_not_differentiated("dropout_seed", value)
        if value.numel() != 1 or value.is_floating_point() or value.is_complex():
            raise invalid("dropout_seed", f"is {value.dtype} of the shape {list(value.shape)}; must be one whole number")
        return value
    seed = seed_number(value, "dropout_seed")
    return torch.tensor([seed], dtype=torch.int64 if seed < 2**63 else torch.uint64, device="cpu")
