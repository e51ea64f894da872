"""Functions with the names, arguments and defaults of ring_flash_attn (zhuzilin/ring-flash-attention).

Every rank of a torch.distributed process group calls with its own shard, in that package's layouts, and receives its
shard of the result. The workers of the default client compute attention over the whole sequence.

    from ringattn.ring_flash_attn import zigzag_ring_flash_attn_func

Results are those of attention over the whole sequence: windows cross ranks, ALiBi counts distances in the whole sequence,
and dropout draws once for each pair of the whole sequence. Packed documents have an ALiBi slope for each head, or for
each whole document and head. `softcap` and `dropout_seed` are arguments of this package. Only the hints `max_seqlen`,
`max_seqlen_q`, `max_seqlen_k` and `heads_k_stride` are ignored. docs/python.md lists the differences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ringattn._optional import needed_by

with needed_by(__name__):
    import torch.distributed as dist
    from torch import Tensor

from ringattn._arguments import flag
from ringattn._arrays import integers
from ringattn._errors import invalid
from ringattn._groups import Group, group_of
from ringattn._layouts import Layout, contiguous, packed, striped, zigzag
from ringattn._llama3 import document_offsets, llama3_flash_attn_prepare_cu_seqlens, shard_by
from ringattn._sharded import Shard, sharded_attention
from ringattn._torch_arguments import check_axes

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens", "llama3_flash_attn_varlen_func", "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func", "ring_flash_attn_func", "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func", "ring_flash_attn_varlen_func", "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func", "stripe_flash_attn_func", "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func", "substitute_hf_flash_attn", "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func", "zigzag_ring_flash_attn_kvpacked_func", "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func", "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

Result = Tensor | tuple[Tensor, Tensor, None]
Function = Callable[..., Result]
#: The functions of one layout: of q, k and v; of q and kv; of qkv.
Functions = tuple[Function, Function, Function]

_DENSE, _PACKED = "batch, tokens, ", "tokens, "  # axes before those of the heads


def _call(q: Tensor, k: Tensor, v: Tensor, shard_of: Callable[[Group, Tensor, Tensor], Shard],
          group: dist.ProcessGroup | None, return_attn_probs: bool, **options: Any) -> Result:
    with_lse = flag(return_attn_probs, "return_attn_probs")
    out, lse = sharded_attention(q, k, v, shard_of=shard_of, group=lambda: group_of(group), **options)
    return (out, lse, None) if with_lse else out


def _kvpacked(function: Function, leading: str) -> Function:
    """Returns `function` with k and v in one tensor. `leading`: the axes before the one that divides it."""
    def kvpacked(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Result:
        k, v = check_axes(kv, "kv", f"{leading}2, kv_heads, head_dim").unbind(-3)
        return function(q, k, v, *arguments, **options)

    return kvpacked


def _qkvpacked(function: Function, leading: str) -> Function:
    """Returns `function` with q, k and v in one tensor."""
    def qkvpacked(qkv: Tensor, *arguments: Any, **options: Any) -> Result:
        q, k, v = check_axes(qkv, "qkv", f"{leading}3, heads, head_dim").unbind(-3)
        return function(q, k, v, *arguments, **options)

    return qkvpacked


def _functions(function: Function, prefix: str, form: str, layout: str) -> Functions:
    """Returns a layout's function of q, k and v and its packed forms, with names, signatures and documentation."""
    leading = _PACKED if form else _DENSE
    plain = inspect.signature(function)
    options = list(plain.parameters.values())[3:]
    made = []
    for each, packing, tensors, described in (
            (function, "", ("q", "k", "v"), "q, k and v"),
            (_kvpacked(function, leading), "kvpacked_", ("q", "kv"), "q, and k and v in one tensor"),
            (_qkvpacked(function, leading), "qkvpacked_", ("qkv",), "q, k and v in one tensor")):
        each.__name__ = each.__qualname__ = f"{prefix}_flash_attn_{form}{packing}func"
        each.__signature__ = plain.replace(parameters=[  # type: ignore[attr-defined]
            *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Tensor") for name in tensors),
            *options])
        each.__doc__ = f"""Attention over the whole sequence; each rank passes its shard of {described}.

        {layout}

        Returns this rank's rows of out; with `return_attn_probs`, (out, lse, None). Gradients flow through both.
        Raises RingattnError, as `ringattn.flash_attn_func`, on every rank.
        """
        made.append(each)
    return made[0], made[1], made[2]


def _dense(layout: Layout) -> Function:
    def shard_of(group: Group, q: Tensor, k: Tensor) -> Shard:
        for name, tensor in (("q", q), ("k", k)):
            check_axes(tensor, name, "batch, tokens, heads, head_dim")
        return Shard(layout(group.rank, group.world_size, q.shape[1], "q"),
                     layout(group.rank, group.world_size, k.shape[1], "k"))

    def func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
             causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
             deterministic: bool = False, return_attn_probs: bool = False, group: dist.ProcessGroup | None = None, *,
             softcap: float = 0.0, dropout_seed: int | None = None) -> Result:
        return _call(q, k, v, shard_of, group, return_attn_probs, dropout_p=dropout_p, softmax_scale=softmax_scale,
                     causal=causal, window_size=window_size, alibi_slopes=alibi_slopes, deterministic=deterministic,
                     softcap=softcap, dropout_seed=dropout_seed)

    return func


def _varlen(layout: Layout) -> Function:
    def shard_of_documents(cu_seqlens: Tensor | Sequence[int]) -> Callable[[Group, Tensor, Tensor], Shard]:
        def shard_of(group: Group, q: Tensor, k: Tensor) -> Shard:
            offsets = document_offsets(integers(cu_seqlens, "cu_seqlens"), "cu_seqlens")
            for name, tensor in (("q", q), ("k", k)):
                check_axes(tensor, name, "tokens, heads, head_dim")
                if tensor.shape[0] != offsets[-1]:
                    raise invalid("cu_seqlens", f"ends with {offsets[-1]}; {name} has {tensor.shape[0]} tokens")
            spans = packed(layout, group.rank, group.world_size, offsets, "cu_seqlens")
            whole = [offset * group.world_size for offset in offsets]
            return Shard(spans, spans, whole, whole)
        return shard_of

    def func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
             softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
             alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
             group: dist.ProcessGroup | None = None, *, softcap: float = 0.0,
             dropout_seed: int | None = None) -> Result:
        return _call(q, k, v, shard_of_documents(cu_seqlens), group, return_attn_probs, dropout_p=dropout_p,
                     softmax_scale=softmax_scale, causal=causal, window_size=window_size, alibi_slopes=alibi_slopes,
                     deterministic=deterministic, softcap=softcap, dropout_seed=dropout_seed)

    return func


def _llama3() -> Function:
    def func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
             max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
             softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
             alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
             group: dist.ProcessGroup | None = None, *, softcap: float = 0.0,
             dropout_seed: int | None = None) -> Result:
        return _call(q, k, v, shard_by(cu_seqlens_q, cu_seqlens_k, local_k_slice, causal), group,
                     return_attn_probs, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
                     window_size=window_size, alibi_slopes=alibi_slopes, deterministic=deterministic,
                     softcap=softcap, dropout_seed=dropout_seed)

    return func


_CONTIGUOUS = "Rank r has the r-th of world_size pieces of the sequence."
_ZIGZAG = "Rank r has the pieces r and 2 * world_size - 1 - r of 2 * world_size pieces of the sequence."
_DOCUMENTS = ("`cu_seqlens` are the offsets of the documents among the rank's own tokens; each document is sharded. "
              "In each document, ")

ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _functions(
    _dense(contiguous), "ring", "", _CONTIGUOUS)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _functions(
    _dense(zigzag), "zigzag_ring", "", _ZIGZAG)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _functions(
    _dense(striped), "stripe", "", "Rank r has the tokens r, r + world_size, r + 2 * world_size and so on.")
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _functions(
    _varlen(contiguous), "ring", "varlen_", _DOCUMENTS + _CONTIGUOUS[0].lower() + _CONTIGUOUS[1:])
(zigzag_ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_kvpacked_func,
 zigzag_ring_flash_attn_varlen_qkvpacked_func) = _functions(
    _varlen(zigzag), "zigzag_ring", "varlen_", _DOCUMENTS + _ZIGZAG[0].lower() + _ZIGZAG[1:])
(llama3_flash_attn_varlen_func, llama3_flash_attn_varlen_kvpacked_func,
 llama3_flash_attn_varlen_qkvpacked_func) = _functions(
    _llama3(), "llama3", "varlen_", "Rank r has the r-th of world_size pieces of the packed documents. `cu_seqlens_q`, "
    "`cu_seqlens_k` and `local_k_slice` are the results of `llama3_flash_attn_prepare_cu_seqlens`.")


def __getattr__(name: str) -> Any:
    if name in ("substitute_hf_flash_attn", "update_ring_flash_attn_params"):  # these need transformers
        with needed_by(f"ringattn.ring_flash_attn.{name}"):
            from ringattn import _ring_flash_huggingface

        return getattr(_ring_flash_huggingface, name)
    raise AttributeError(f"module 'ringattn.ring_flash_attn' has no attribute {name!r}")
