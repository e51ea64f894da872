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

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ringattn._arrays import integers
from ringattn._errors import invalid
from ringattn._groups import Group, group_of
from ringattn._layouts import Layout, contiguous, packed, striped, zigzag
from ringattn._llama3 import document_offsets, llama3_flash_attn_prepare_cu_seqlens, shard_by
from ringattn._sharded import Shard, check_axes, sharded_attention

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
Functions = tuple[Callable[..., Result], Callable[..., Result], Callable[..., Result]]


def _split(packed_tensor: Tensor, name: str, axes: str) -> tuple[Tensor, ...]:
    """Returns the tensors of kv or qkv. `axes` are those of the packed tensor."""
    parts = int(axes.split(", ")[-3])
    if not isinstance(packed_tensor, Tensor):
        raise TypeError(f"{name}: is a {type(packed_tensor).__name__}; must be a torch.Tensor")
    if packed_tensor.dim() != len(axes.split(",")) or packed_tensor.shape[-3] != parts:
        raise invalid(name, f"has the shape {list(packed_tensor.shape)}; must be [{axes}]")
    return packed_tensor.unbind(-3)


def _call(q: Tensor, k: Tensor, v: Tensor, shard_of: Callable[[Group, Tensor, Tensor], Shard],
          group: dist.ProcessGroup | None, return_attn_probs: bool, **options: Any) -> Result:
    out, lse = sharded_attention(q, k, v, shard_of=shard_of, group=lambda: group_of(group), **options)
    return (out, lse, None) if return_attn_probs else out


def _named(prefix: str, form: str, layout: str, functions: Functions) -> Functions:
    """Gives the three functions of a layout their names and documentation."""
    tensors = ("q, k and v", "q, and k and v in one tensor", "q, k and v in one tensor")
    for function, packing, of in zip(functions, ("", "kvpacked_", "qkvpacked_"), tensors):
        function.__name__ = function.__qualname__ = f"{prefix}_flash_attn_{form}{packing}func"
        function.__doc__ = f"""Attention over the whole sequence; each rank passes its shard of {of}.

        {layout}

        Returns this rank's rows of out; with `return_attn_probs`, (out, lse, None). Gradients flow through both.
        Raises RingattnError, as `ringattn.flash_attn_func`, on every rank.
        """
    return functions


def _dense(layout: Layout) -> Functions:
    def shard_of(group: Group, q: Tensor, k: Tensor) -> Shard:
        check_axes(q, k, "batch, tokens, heads, head_dim")
        return Shard(layout(group.rank, group.world_size, q.shape[1], "q"),
                     layout(group.rank, group.world_size, k.shape[1], "k"))

    def func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
             causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
             deterministic: bool = False, return_attn_probs: bool = False, group: dist.ProcessGroup | None = None, *,
             softcap: float = 0.0, dropout_seed: int | None = None) -> Result:
        return _call(q, k, v, shard_of, group, return_attn_probs, dropout_p=dropout_p, softmax_scale=softmax_scale,
                     causal=causal, window_size=window_size, alibi_slopes=alibi_slopes, deterministic=deterministic,
                     softcap=softcap, dropout_seed=dropout_seed)

    def kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                      causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                      alibi_slopes: Tensor | None = None, deterministic: bool = False,
                      return_attn_probs: bool = False, group: dist.ProcessGroup | None = None, *,
                      softcap: float = 0.0, dropout_seed: int | None = None) -> Result:
        k, v = _split(kv, "kv", "batch, tokens, 2, kv_heads, head_dim")
        return func(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
                    return_attn_probs, group, softcap=softcap, dropout_seed=dropout_seed)

    def qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                       window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
                       deterministic: bool = False, return_attn_probs: bool = False,
                       group: dist.ProcessGroup | None = None, *, softcap: float = 0.0,
                       dropout_seed: int | None = None) -> Result:
        q, k, v = _split(qkv, "qkv", "batch, tokens, 3, heads, head_dim")
        return func(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
                    return_attn_probs, group, softcap=softcap, dropout_seed=dropout_seed)

    return func, kvpacked_func, qkvpacked_func


def _varlen(layout: Layout) -> Functions:
    def shard_of_documents(cu_seqlens: Tensor | Sequence[int]) -> Callable[[Group, Tensor, Tensor], Shard]:
        def shard_of(group: Group, q: Tensor, k: Tensor) -> Shard:
            check_axes(q, k, "tokens, heads, head_dim")
            offsets = document_offsets(integers(cu_seqlens, "cu_seqlens"), "cu_seqlens")
            for name, tensor in (("q", q), ("k", k)):
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

    def kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                      softmax_scale: float | None = None, causal: bool = False,
                      window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
                      deterministic: bool = False, return_attn_probs: bool = False,
                      group: dist.ProcessGroup | None = None, *, softcap: float = 0.0,
                      dropout_seed: int | None = None) -> Result:
        k, v = _split(kv, "kv", "tokens, 2, kv_heads, head_dim")
        return func(q, k, v, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                    deterministic, return_attn_probs, group, softcap=softcap, dropout_seed=dropout_seed)

    def qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                       softmax_scale: float | None = None, causal: bool = False,
                       window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
                       deterministic: bool = False, return_attn_probs: bool = False,
                       group: dist.ProcessGroup | None = None, *, softcap: float = 0.0,
                       dropout_seed: int | None = None) -> Result:
        q, k, v = _split(qkv, "qkv", "tokens, 3, heads, head_dim")
        return func(q, k, v, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                    deterministic, return_attn_probs, group, softcap=softcap, dropout_seed=dropout_seed)

    return func, kvpacked_func, qkvpacked_func


def _llama3() -> Functions:
    def func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
             max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
             softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
             alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
             group: dist.ProcessGroup | None = None, *, softcap: float = 0.0,
             dropout_seed: int | None = None) -> Result:
        return _call(q, k, v, shard_by(cu_seqlens_q, cu_seqlens_k, local_k_slice), group, return_attn_probs,
                     dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                     alibi_slopes=alibi_slopes, deterministic=deterministic, softcap=softcap, dropout_seed=dropout_seed)

    def kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                      max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
                      softmax_scale: float | None = None, causal: bool = False,
                      window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
                      deterministic: bool = False, return_attn_probs: bool = False,
                      group: dist.ProcessGroup | None = None, *, softcap: float = 0.0,
                      dropout_seed: int | None = None) -> Result:
        k, v = _split(kv, "kv", "tokens, 2, kv_heads, head_dim")
        return func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice,
                    dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs,
                    group, softcap=softcap, dropout_seed=dropout_seed)

    def qkvpacked_func(qkv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
                       heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
                       softmax_scale: float | None = None, causal: bool = False,
                       window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
                       deterministic: bool = False, return_attn_probs: bool = False,
                       group: dist.ProcessGroup | None = None, *, softcap: float = 0.0,
                       dropout_seed: int | None = None) -> Result:
        q, k, v = _split(qkv, "qkv", "tokens, 3, heads, head_dim")
        return func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice,
                    dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs,
                    group, softcap=softcap, dropout_seed=dropout_seed)

    return func, kvpacked_func, qkvpacked_func


_CONTIGUOUS = "Rank r has the r-th of world_size pieces of the sequence."
_ZIGZAG = "Rank r has the pieces r and 2 * world_size - 1 - r of 2 * world_size pieces of the sequence."
_DOCUMENTS = ("`cu_seqlens` are the offsets of the documents among the rank's own tokens; each document is sharded. "
              "In each document, ")

ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _named(
    "ring", "", _CONTIGUOUS, _dense(contiguous))
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _named(
    "zigzag_ring", "", _ZIGZAG, _dense(zigzag))
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _named(
    "stripe", "", "Rank r has the tokens r, r + world_size, r + 2 * world_size and so on.", _dense(striped))
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _named(
    "ring", "varlen_", _DOCUMENTS + _CONTIGUOUS[0].lower() + _CONTIGUOUS[1:], _varlen(contiguous))
(zigzag_ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_kvpacked_func,
 zigzag_ring_flash_attn_varlen_qkvpacked_func) = _named(
    "zigzag_ring", "varlen_", _DOCUMENTS + _ZIGZAG[0].lower() + _ZIGZAG[1:], _varlen(zigzag))
(llama3_flash_attn_varlen_func, llama3_flash_attn_varlen_kvpacked_func,
 llama3_flash_attn_varlen_qkvpacked_func) = _named(
    "llama3", "varlen_", "Rank r has the r-th of world_size pieces of the packed documents. `cu_seqlens_q`, "
    "`cu_seqlens_k` and `local_k_slice` are the results of `llama3_flash_attn_prepare_cu_seqlens`.", _llama3())


def __getattr__(name: str) -> Any:
    if name in ("substitute_hf_flash_attn", "update_ring_flash_attn_params"):  # these need transformers
        from ringattn import _ring_flash_huggingface

        return getattr(_ring_flash_huggingface, name)
    raise AttributeError(f"module 'ringattn.ring_flash_attn' has no attribute {name!r}")
