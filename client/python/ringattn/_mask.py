"""Attention masks of Hugging Face models that are a few numbers instead of a matrix.

transformers creates a model's mask in one place and uses it in another. Between the two the model may slice the mask or
compute with it, and some models add it to scores of their own. A `Mask` is a tensor that travels this way.
`huggingface.attention_forward` reads its fields. Every other operation on it gets the matrix that eager attention has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Questions for a mask's type and shape, which its storage answers.
_METADATA = frozenset({
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.layout.__get__, Tensor.ndim.__get__,
    Tensor.requires_grad.__get__, Tensor.grad_fn.__get__, Tensor.is_leaf.__get__, Tensor.is_sparse.__get__,
    Tensor.is_cuda.__get__, Tensor.is_meta.__get__, Tensor.is_quantized.__get__, Tensor.is_nested.__get__,
    Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.storage_offset,
    Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.element_size,
    Tensor.is_inference, Tensor.__len__, Tensor.__hash__, torch.is_floating_point, torch.is_complex, torch.numel,
})


# Operations that change their first argument.
_IN_PLACE = frozenset(
    {getattr(Tensor, name) for name in dir(Tensor)
     if (name.endswith("_") and not name.endswith("__")) or name in (
         "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
         "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")} | {Tensor.data.__set__})


class Mask(Tensor):
    """An additive mask [batch, 1, queries, keys]: 0 where a query sees a key, else the type's smallest number.

    Positions are aligned to the bottom right corner: the last query is at the last key. A query sees the keys from
    `left` before its own position to `right` after it (-1: no limit), of those with its own segment id and where
    `visible` is true. A key whose id is negative is seen by no query.
    """

    left: int
    right: int
    q_ids: Tensor | None  #: int32 [batch, queries], with kv_ids; None: one segment
    kv_ids: Tensor | None  #: int32 [batch, keys]
    visible: Tensor | None  #: booleans [batch, 1, queries, keys]; None: all true

    def seen(self, rows: Tensor | None = None) -> Tensor:
        """Booleans [batch, 1, queries, keys]. `rows`: of these queries alone."""
        batch, _, queries, keys = self.shape
        if rows is None:
            rows = torch.arange(queries, device=self.device)
        distance = torch.arange(keys, device=self.device)[None, :] - rows[:, None] - (keys - queries)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left >= 0:
            seen = seen & (distance >= -self.left)
        if self.right >= 0:
            seen = seen & (distance <= self.right)
        seen = seen[None, None].expand(batch, 1, -1, keys)
        if self.q_ids is not None:
            kv_ids = self.kv_ids[:, None, None, :]
            seen = seen & (self.q_ids[:, rows][:, None, :, None] == kv_ids) & (kv_ids >= 0)
        return seen if self.visible is None else seen & self.visible[:, :, rows]

    def matrix(self) -> Tensor:
        """What every operation but the attention function computes with."""
        seen = self.seen()
        return torch.where(seen, torch.zeros((), dtype=self.dtype, device=self.device), torch.finfo(self.dtype).min)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_PLACE and isinstance(args[0], Mask) or isinstance((kwargs or {}).get("out"), Mask):
            raise NotImplementedError("attention_mask: is changed in place, which ringattn's masks do not support; change a "
                                      "copy (mask.clone())")
        if func not in _METADATA:
            args, kwargs = _as_matrices(args), _as_matrices(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _as_matrices(value: Any) -> Any:
    if isinstance(value, Mask):
        return value.matrix()
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Mask, list, tuple)) for item in value):
        return type(value)([_as_matrices(item) for item in value])
    if isinstance(value, dict):
        return {key: _as_matrices(item) for key, item in value.items()}
    return value


def make_mask(batch: int, queries: int, keys: int, *, left: int = -1, right: int = -1, q_ids: Tensor | None = None,
              kv_ids: Tensor | None = None, visible: Tensor | None = None, dtype: torch.dtype = torch.float32,
              device: torch.device | str = "cpu") -> Mask:
    """A Mask, whose fields say what the arguments mean."""
    storage = torch.zeros((1, 1, 1, 1), dtype=dtype, device=device)
    mask = storage.expand(batch, 1, queries, keys).as_subclass(Mask)
    mask.left, mask.right = left, right
    mask.q_ids, mask.kv_ids, mask.visible = q_ids, kv_ids, visible
    return mask
