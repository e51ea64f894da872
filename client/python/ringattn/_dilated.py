"""Dilated attention (LongNet) with the definition and the argument names of torchscale, on the default client.

A level is a segment length w and a dilation rate r. It divides the sequence into segments of w tokens. Within a segment,
a head sees every r-th token, from its own offset on. The output is the mean of the levels' outputs, weighted by the
exponential of their lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ringattn._arguments import flag, number, type_name, whole_number
from ringattn._default import ResidualMode
from ringattn._errors import invalid
from ringattn._options import DilationLevel
from ringattn._torch_arguments import check_axes, check_not_differentiated, check_tensor, seed_tensor
from ringattn.torch_ops import attention

_UNSUPPORTED = {
    "attn_mask": "an additive mask is not supported; use key_padding_mask or is_causal",
    "rel_pos": "relative positions are not supported, as in torchscale's dilated attention",
    "incremental_state": "decoding against a cache is not supported; pass as many queries as keys",
    "is_first_step": "decoding against a cache is not supported; pass as many queries as keys",
    "seq_parallel": "functions that are called on every rank with that rank's shard are not supported; call "
                    "dilated_attention from one process with the whole sequence",
}


def _numbers(values: Any, name: str) -> list[int]:
    try:
        numbers = [whole_number(value, f"{name}[{index}]") for index, value in enumerate(values)]
    except TypeError:
        raise invalid(name, f"is {type_name(values)}; must be a sequence of whole numbers") from None
    for index, value in enumerate(numbers):
        if value < 1:
            raise invalid(f"{name}[{index}]", f"is {value}; must be at least 1")
    return numbers


def _parts(length: int, rate: int, heads: int, head_offsets: str) -> list[DilationLevel]:
    """Returns one of torchscale's levels as the service's levels: one for each offset and its heads."""
    per_offset = -(-heads // rate)
    if head_offsets == "modulo" or rate == 1 or per_offset <= 1:
        return [DilationLevel(length, rate)]  # an offset of the head's number modulo the rate
    return [DilationLevel(length, rate, begin // per_offset, begin, min(begin + per_offset, heads))
            for begin in range(0, heads, per_offset)]


def _levels(segment_lengths: Any, dilation_rates: Any, heads: int, head_offsets: str) -> list[list[DilationLevel]]:
    lengths, rates = _numbers(segment_lengths, "segment_lengths"), _numbers(dilation_rates, "dilation_rates")
    if not lengths:
        raise invalid("segment_lengths", "is empty; must have one number for each level")
    if len(lengths) != len(rates):
        raise invalid("dilation_rates", f"has {len(rates)} numbers; must have {len(lengths)}, as segment_lengths")
    if head_offsets not in ("blocks", "modulo"):
        raise invalid("head_offsets", f"is {head_offsets!r}; must be blocks or modulo")
    return [_parts(length, rate, heads, head_offsets) for length, rate in zip(lengths, rates)]


def _merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Returns the mean of `outs`, weighted by exp(lse). The weights are constants for autograd."""
    with torch.no_grad():
        stacked = torch.stack(list(lses))  # [levels, batch, heads, seq_len]
        total = stacked.logsumexp(0)
        weights = (stacked - total.masked_fill(torch.isneginf(total), 0.0)).exp().transpose(-1, -2).unsqueeze(-1)
    merged = sum(out.float() * weight for out, weight in zip(outs, weights))
    return merged.to(outs[0].dtype)  # type: ignore[union-attr]


def dilated_attention(q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *,
                      is_causal: bool = False, key_padding_mask: Tensor | None = None, dropout: float = 0.0,
                      dropout_seed: Tensor | int | None = None, softmax_scale: float | None = None,
                      attn_mask: None = None, rel_pos: None = None, incremental_state: None = None,
                      is_first_step: bool = False, seq_parallel: bool = False,
                      head_offsets: Literal["blocks", "modulo"] = "blocks", differentiate_weights: bool = False,
                      deterministic: bool = False, residual: ResidualMode | None = None) -> Tensor:
    """Dilated attention of q over k and v, differentiable in all three.

    q: [batch, seq_len, heads, head_dim]; k: [batch, seq_len, kv_heads, head_dim]; v: as k, with its own head_dim.
    kv_heads divides heads. seq_len need not be a multiple of any segment length.

    Args:
        segment_lengths, dilation_rates: one of each per level: torchscale's segment_length and dilated_ratio.
        key_padding_mask: [batch, seq_len], true for keys that no query sees.
        dropout: the probability with which a softmax weight is dropped. A pair of two levels is dropped in both or in
            neither.
        dropout_seed: as for `attention`.
        head_offsets: the first token that head h of H sees in a segment. "blocks", as torchscale: h // ceil(H / r).
            "modulo", as the paper: h % r.
        differentiate_weights: False, as torchscale: gradients treat the levels' weights as constants, and a
            differentiated call sends one request per level. True: gradients are those of the function that is computed,
            and all levels are one request.
        deterministic, residual: as for `attention`.

    Returns:
        out, in q's shape with v's head_dim. Rows that no level selects are 0.

    Raises:
        NotImplementedError: attn_mask, rel_pos, incremental_state, is_first_step or seq_parallel is set.
        Others: as `attention`.
    """
    given = {"attn_mask": attn_mask, "rel_pos": rel_pos, "incremental_state": incremental_state,
             "is_first_step": is_first_step, "seq_parallel": seq_parallel}
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: {_UNSUPPORTED[name]}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_axes(tensor, name, "batch, seq_len, heads, head_dim")
    levels = _levels(segment_lengths, dilation_rates, q.shape[2], head_offsets)
    check_not_differentiated("dropout", dropout)
    dropout = number(dropout, "dropout")
    options: dict[str, Any] = {
        "causal": flag(is_causal, "is_causal"), "softmax_scale": softmax_scale, "dropout_p": dropout,
        "dropout_seed": seed_tensor(dropout_seed, dropout), "deterministic": deterministic, "residual": residual}
    if key_padding_mask is not None:
        options |= _padding(key_padding_mask, q, k)
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    if flag(differentiate_weights, "differentiate_weights") or not differentiated or len(levels) == 1:
        return attention(q, k, v, dilation_levels=sum(levels, []), **options)[0]
    results = [attention(q, k, v, dilation_levels=level, **options) for level in levels]
    return _merge(*zip(*results))


def _padding(mask: Tensor, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Returns segment ids that hide padding keys."""
    check_tensor(mask, "key_padding_mask")
    if mask.shape != k.shape[:2] or mask.is_floating_point() or mask.is_complex():
        raise invalid("key_padding_mask", f"is {mask.dtype} {list(mask.shape)}; must be boolean {list(k.shape[:2])}")
    return {"q_segment_ids": torch.zeros(q.shape[:2], dtype=torch.int32, device=mask.device),
            "kv_segment_ids": -mask.bool().int()}
