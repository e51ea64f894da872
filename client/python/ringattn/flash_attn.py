"""Functions with the names, arguments and defaults of flash-attn 2, on the default client.

Results differ from flash-attn's by rounding and in the pairs that dropout drops. `return_softmax_lse` is an argument of
this package: it returns (out, lse), and gradients flow through lse. `return_attn_probs` returns (out, lse, None), as
flash-attn does without dropout. An argument that is not supported raises NotImplementedError with its name. Only the
hints `max_seqlen_q` and `max_seqlen_k` are ignored.
"""

from __future__ import annotations

from typing import Any

from ringattn._optional import needed_by

with needed_by(__name__):
    from torch import Tensor

from ringattn._arguments import flag, window_pair
from ringattn._torch_arguments import check_axes
from ringattn.torch_ops import attention

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]


def _call(*tensors: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
          window_size: tuple[int, int], softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
          return_attn_probs: bool, return_softmax_lse: bool, **more: Any) -> Result:
    with_probs, with_lse = flag(return_attn_probs, "return_attn_probs"), flag(return_softmax_lse, "return_softmax_lse")
    if with_probs and dropout_p != 0.0:
        raise NotImplementedError("return_attn_probs: with dropout_p, the matrix of probabilities is not returned; "
                                  "use return_softmax_lse, or Client.forward(probability_rows=...) for some rows")
    out, lse = attention(*tensors, causal=causal, window=window_pair(window_size, "window_size"),
                         softmax_scale=softmax_scale, softcap=softcap,
                         alibi_slopes=alibi_slopes, dropout_p=dropout_p, deterministic=deterministic, **more)
    if with_probs:
        return out, lse, None
    return (out, lse) if with_lse else out


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False, *, return_softmax_lse: bool = False) -> Result:
    """Attention over [batch, seq_len, heads, head_dim]; k and v may have fewer heads, and another length.

    `causal` and `window_size` are aligned to the bottom right corner: the last query sees the last key.
    """
    return _call(q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                 softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
                 return_attn_probs=return_attn_probs, return_softmax_lse=return_softmax_lse)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                             causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Tensor | None = None, deterministic: bool = False,
                             return_attn_probs: bool = False, *, return_softmax_lse: bool = False) -> Result:
    """`flash_attn_func` with k and v in one tensor, [batch, seq_len, 2, kv_heads, head_dim]."""
    check_axes(kv, "kv", "batch, seq_len, 2, kv_heads, head_dim")
    return _call(q, kv=kv, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                 softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
                 return_attn_probs=return_attn_probs, return_softmax_lse=return_softmax_lse)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Tensor | None = None, deterministic: bool = False,
                              return_attn_probs: bool = False, *, return_softmax_lse: bool = False) -> Result:
    """`flash_attn_func` with q, k and v in one tensor, [batch, seq_len, 3, heads, head_dim]."""
    check_axes(qkv, "qkv", "batch, seq_len, 3, heads, head_dim")
    return _call(qkv=qkv, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                 softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
                 return_attn_probs=return_attn_probs, return_softmax_lse=return_softmax_lse)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Tensor | None = None, *,
                           return_softmax_lse: bool = False) -> Result:
    """Attention inside documents that are packed after one another, [tokens, heads, head_dim].

    `cu_seqlens_q`, `cu_seqlens_k`: [documents + 1], each document's first token and, last, the end of the last. Tokens
    after that belong to no document: their outputs and gradients are 0.
    """
    if block_table is not None:
        raise NotImplementedError("block_table: paged keys and values are not supported")
    return _call(q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                 softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
                 return_attn_probs=return_attn_probs, return_softmax_lse=return_softmax_lse,
                 cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                                    softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                    return_attn_probs: bool = False, *, return_softmax_lse: bool = False) -> Result:
    """`flash_attn_varlen_func` with k and v in one tensor, [tokens, 2, kv_heads, head_dim]."""
    check_axes(kv, "kv", "tokens, 2, kv_heads, head_dim")
    return _call(q, kv=kv, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                 softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
                 return_attn_probs=return_attn_probs, return_softmax_lse=return_softmax_lse,
                 cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                                     softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                     return_attn_probs: bool = False, *,
                                     return_softmax_lse: bool = False) -> Result:
    """`flash_attn_varlen_func` with q, k and v in one tensor, [tokens, 3, heads, head_dim]."""
    check_axes(qkv, "qkv", "tokens, 3, heads, head_dim")
    return _call(qkv=qkv, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                 softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
                 return_attn_probs=return_attn_probs, return_softmax_lse=return_softmax_lse,
                 cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)


def __getattr__(name: str) -> Any:
    if name == "flash_attn_with_kvcache":
        from ringattn._kv_flash_attn import flash_attn_with_kvcache

        return flash_attn_with_kvcache
    raise AttributeError(f"module 'ringattn.flash_attn' has no attribute {name!r}")
