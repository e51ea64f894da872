"""Functions with the names, arguments and defaults of nnscaler's ring attention example (microsoft/nnscaler).

Every rank of `process_group` calls with its contiguous shard of the sequence and receives that shard of the result, also
in `wrap_zigzag_attn_func`. `process_group` is a sequence of global ranks, as nnscaler passes it, or a process group.
Without one, and with one of one rank, the tensors are the whole sequence.

If nnscaler is installed, the functions are operators of its graphs: it partitions the batch, the sequence or the heads.

Results are those of attention over the whole sequence, with every option. `softcap`, `bias` and `dropout_seed` are
arguments of this package. `return_attn_probs` raises NotImplementedError.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from ringattn._optional import needed_by

with needed_by(__name__):
    import torch.distributed as dist
    from torch import Tensor

from ringattn._arguments import flag, window_pair
from ringattn._arrays import integers
from ringattn._errors import invalid
from ringattn._groups import Group, group_of, group_of_ranks, is_initialized
from ringattn._layouts import contiguous
from ringattn._llama3 import document_offsets
from ringattn._nnscaler_ops import register
from ringattn._sharded import Shard, sharded_attention
from ringattn._torch_arguments import check_axes
from ringattn.torch_ops import attention

__all__ = ["wrap_ring_attn_func", "wrap_ring_attn_varlen_func", "wrap_zigzag_attn_func"]

ProcessGroup = dist.ProcessGroup | Sequence[int]


def _group_of(process_group: ProcessGroup | None) -> Callable[[], Group] | None:
    """Returns a function that returns the group. None: this process has the whole tensors."""
    if process_group is None:
        return None
    try:
        ranks = list(process_group)  # type: ignore[arg-type]
    except TypeError:
        return lambda: group_of(process_group, "process_group")  # type: ignore[arg-type]
    if len(ranks) == 1 and not is_initialized():
        return None
    return lambda: group_of(group_of_ranks(ranks, "process_group"), "process_group")


def _call(q: Tensor, k: Tensor, v: Tensor, shard_of: Callable[[Group, Tensor, Tensor], Shard], softmax_scale: float | None,
          dropout_p: float, causal: bool, window_size: tuple[int, int], alibi_slopes: Tensor | None, deterministic: bool,
          return_attn_probs: bool, process_group: ProcessGroup | None, softcap: float, bias: Tensor | None,
          dropout_seed: int | None, cu_seqlens: tuple[Tensor, Tensor] | None = None) -> Tensor:
    if flag(return_attn_probs, "return_attn_probs"):
        raise NotImplementedError("return_attn_probs: is not supported; use ringattn.ring_flash_attn for lse")
    group = _group_of(process_group)
    if group is None:
        cu_q, cu_k = cu_seqlens or (None, None)
        return attention(q, k, v, softmax_scale=softmax_scale, dropout_p=dropout_p, causal=causal,
                         window=window_pair(window_size, "window_size"), alibi_slopes=alibi_slopes,
                         deterministic=deterministic, softcap=softcap, bias=bias, dropout_seed=dropout_seed,
                         cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)[0]
    return sharded_attention(q, k, v, shard_of=shard_of, group=group, dropout_p=dropout_p,
                             softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                             alibi_slopes=alibi_slopes, deterministic=deterministic, dropout_seed=dropout_seed,
                             bias=bias)[0]


def _dense_shard(group: Group, q: Tensor, k: Tensor) -> Shard:
    for name, tensor in (("q", q), ("k", k)):
        check_axes(tensor, name, "batch, tokens, heads, head_dim")
    return Shard(contiguous(group.rank, group.world_size, q.shape[1], "q"),
                 contiguous(group.rank, group.world_size, k.shape[1], "k"))


def wrap_ring_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, dropout_p: float = 0.0,
                        causal: bool = True, window_size: tuple[int, int] = (-1, -1),
                        alibi_slopes: Tensor | None = None, deterministic: bool = False,
                        return_attn_probs: bool = False, process_group: ProcessGroup | None = None, *,
                        softcap: float = 0.0, bias: Tensor | None = None, dropout_seed: int | None = None) -> Tensor:
    """Attention over [batch, tokens, heads, head_dim]. Rank r has the r-th of world_size pieces of the sequence.

    Args:
        bias: [batch or 1, heads or 1, queries of this rank, keys of the whole sequence]; differentiable.
        Others: see `ringattn.flash_attn_func`. They must be equal on all ranks.

    Raises:
        NotImplementedError: return_attn_probs.
        RingattnError: as `ringattn.flash_attn_func`.
    """
    return _call(q, k, v, _dense_shard, softmax_scale, dropout_p, causal, window_size, alibi_slopes, deterministic,
                 return_attn_probs, process_group, softcap, bias, dropout_seed)


def wrap_zigzag_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, dropout_p: float = 0.0,
                          causal: bool = True, window_size: tuple[int, int] = (-1, -1),
                          alibi_slopes: Tensor | None = None, deterministic: bool = False,
                          return_attn_probs: bool = False, process_group: ProcessGroup | None = None, *,
                          softcap: float = 0.0, bias: Tensor | None = None,
                          dropout_seed: int | None = None) -> Tensor:
    """`wrap_ring_attn_func`. nnscaler's ranks have contiguous pieces here too, and the service balances their work."""
    return _call(q, k, v, _dense_shard, softmax_scale, dropout_p, causal, window_size, alibi_slopes, deterministic,
                 return_attn_probs, process_group, softcap, bias, dropout_seed)


def wrap_ring_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                               dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                               window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
                               deterministic: bool = False, return_attn_probs: bool = False,
                               process_group: ProcessGroup | None = None, *, softcap: float = 0.0,
                               bias: Tensor | None = None, dropout_seed: int | None = None) -> Tensor:
    """`wrap_ring_attn_func` of packed documents, [tokens, heads, head_dim].

    Rank r has the r-th of world_size pieces of all tokens. `cu_seqlens_q` and `cu_seqlens_k` are the offsets of the
    documents in the whole sequence. `bias` is [1, heads or 1, queries of this rank, keys of the longest document].
    """
    def shard_of(group: Group, q: Tensor, k: Tensor) -> Shard:
        offsets = []
        for name, cu_seqlens, axis, tensor in (("cu_seqlens_q", cu_seqlens_q, "q", q),
                                               ("cu_seqlens_k", cu_seqlens_k, "k", k)):
            check_axes(tensor, axis, "tokens, heads, head_dim")
            offsets.append(document_offsets(integers(cu_seqlens, name), name))
            if offsets[-1][-1] != tensor.shape[0] * group.world_size:
                raise invalid(name, f"ends with {offsets[-1][-1]}; the {group.world_size} ranks have {tensor.shape[0]} "
                                    "tokens each")
        return Shard(contiguous(group.rank, group.world_size, q.shape[0], "q"),
                     contiguous(group.rank, group.world_size, k.shape[0], "k"), *offsets)

    return _call(q, k, v, shard_of, softmax_scale, dropout_p, causal, window_size, alibi_slopes, deterministic,
                 return_attn_probs, process_group, softcap, bias, dropout_seed, (cu_seqlens_q, cu_seqlens_k))


# A function that is not registered would be traced instead of partitioned.
if importlib.util.find_spec("nnscaler") is not None:
    register([wrap_ring_attn_func, wrap_zigzag_attn_func], [wrap_ring_attn_varlen_func])
