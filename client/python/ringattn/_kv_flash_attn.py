"""flash_attn_with_kvcache over a K/V cache that stays with the workers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ringattn._arguments import type_name
from ringattn._arrays import integers
from ringattn._kv_cache import LayerCache, WorkerCache
from ringattn._kv_passes import Passes, PassRow
from ringattn._torch_arguments import autocast, refuse_derivatives

_REFUSED = {
    "v_cache": "the cache holds keys and values; pass None",
    "rotary_cos": "keys and queries must be rotated before the call",
    "rotary_sin": "keys and queries must be rotated before the call",
    "cache_leftpad": "padding is not stored; sequences have lengths of their own",
    "block_table": "the cache has its own block tables; create it with numbering=\"blocks\" and use WorkerCache.step",
    "alibi_slopes": "ALiBi is not served with K/V caches",
}


def _layer_of(cache: Any) -> LayerCache:
    if isinstance(cache, LayerCache):
        return cache
    if isinstance(cache, WorkerCache):
        if len(cache.layers) > 1:
            raise ValueError(f"k_cache: the cache has {len(cache.layers)} layers; pass cache.layer(number)")
        return cache.layer(cache.layers[0])
    raise TypeError(f"k_cache: is {type_name(cache)}; pass WorkerCache.layer(number)")


def _check_group(group: dict[str, Any], queries: int, softmax_scale: float | None, causal: bool,
                 window_size: tuple[int, int], softcap: float) -> None:
    """The arguments must agree with the cache, which has them for all calls."""
    scale = 1 / math.sqrt(group["head_dim"]) if softmax_scale is None else softmax_scale
    if not math.isclose(scale, group["softmax_scale"], rel_tol=1e-6):
        raise ValueError(f"softmax_scale: is {scale}; the cache was created with {group['softmax_scale']}")
    if not math.isclose(softcap or 0.0, group.get("softcap", 0.0), rel_tol=1e-6):
        raise ValueError(f"softcap: is {softcap}; the cache was created with {group.get('softcap', 0.0)}")
    if queries > 1 and causal == group["non_causal"]:
        raise ValueError(f"causal: is {causal}; the cache was created with causal={not group['non_causal']}")
    left = None if window_size[0] < 0 else window_size[0]
    if left != group.get("window_left"):
        raise ValueError(f"window_size: is {window_size}; the cache was created with window={group.get('window_left')}")
    if window_size[1] >= 0 and not (window_size[1] == 0 and (causal or queries == 1)):
        raise NotImplementedError(f"window_size: is {window_size}; a K/V cache limits only the left side")


def _lengths_of(cache_seqlens: Any, batch: int) -> list[int] | None:
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, int):
        return [cache_seqlens] * batch
    lengths = integers(cache_seqlens, "cache_seqlens")
    if len(lengths) != batch:
        raise ValueError(f"cache_seqlens: has {len(lengths)} values; the batch has {batch}")
    return lengths


def flash_attn_with_kvcache(q: Tensor, k_cache: LayerCache | WorkerCache, v_cache: None = None,
                            k: Tensor | None = None, v: Tensor | None = None, rotary_cos: None = None,
                            rotary_sin: None = None, cache_seqlens: int | Tensor | None = None,
                            cache_batch_idx: Tensor | None = None, cache_leftpad: None = None,
                            block_table: None = None, softmax_scale: float | None = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: None = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attn's function with a cache on workers in place of `k_cache`.

    Call it once for every layer of a forward pass; a second call for a layer begins the next pass.

    Args:
        q: [batch, seqlen_q, heads, head_dim].
        k_cache: `WorkerCache.layer(number)`, or a cache with one layer.
        k, v: [batch, seqlen_new, kv_heads, head_dim], appended first. None: only reads.
        cache_seqlens: entries of each sequence before the new ones; None: all that the sequence has. With k and v, later
            entries are forgotten. Without, it must be the sequence's length.
        cache_batch_idx: the sequence of each batch row; None: 0, 1, ...
        softmax_scale, causal, window_size, softcap: must agree with the cache.
        rotary_interleaved, num_splits: have no effect.

    Returns:
        out [batch, seqlen_q, heads, head_dim_v], and with return_softmax_lse lse [batch, heads, seqlen_q].

    Raises:
        NotImplementedError: naming an argument that is not served (rotary_*, cache_leftpad, block_table, alibi_slopes).
        ValueError: for arguments that contradict the cache.
        StepRefusedError and the other errors of `Step.attend`.
    """
    for name, why in _REFUSED.items():
        if locals()[name] is not None:
            raise NotImplementedError(f"{name}: {why}")
    place = _layer_of(k_cache)
    cache, layer = place.cache, place.layer
    refuse_derivatives(q=q, k=k, v=v)
    q, k, v = autocast(q, k, v)
    batch, queries = q.shape[0], q.shape[1]
    new = 0 if k is None else k.shape[1]
    _check_group(cache.group_of(layer), queries, softmax_scale, causal, window_size, softcap)
    sequences = list(range(batch)) if cache_batch_idx is None else integers(cache_batch_idx, "cache_batch_idx")
    if len(sequences) != batch:
        raise ValueError(f"cache_batch_idx: has {len(sequences)} values; the batch has {batch}")
    passes = _passes_of(cache)
    known = [passes.length(layer, sequence) for sequence in sequences]
    lengths = _lengths_of(cache_seqlens, batch) or known
    for sequence, length, has in zip(sequences, lengths, known):
        if length > has:
            raise ValueError(f"cache_seqlens: is {length} for sequence {sequence}, which has {has} entries")
        if length < has and new == 0:
            raise NotImplementedError(f"cache_seqlens: is {length} for sequence {sequence}, which has {has} entries; "
                                      "a call without k and v reads all entries")
    rows = [PassRow(sequence, length, new, queries) for sequence, length in zip(sequences, lengths)]
    step = passes.step_of(layer, rows)
    try:
        out, lse = step.attend(layer, q.flatten(0, 1), None if k is None else k.flatten(0, 1),
                               None if v is None else v.flatten(0, 1), lse=True)
    except BaseException:
        passes.forget()
        raise
    passes.called(layer)
    out = out.view(batch, queries, *out.shape[1:])
    if not return_softmax_lse:
        return out
    return out, lse.view(-1, batch, queries).transpose(0, 1)


def _passes_of(cache: WorkerCache) -> Passes:
    passes = getattr(cache, "_passes", None)
    if passes is None:
        passes = cache._passes = Passes(cache)
    return passes
