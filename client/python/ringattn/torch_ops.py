"""Differentiable attention for PyTorch.

Two operators, `ringattn::attention` and `ringattn::attention_backward`, that the dispatcher knows: torch.compile
traces them whole, activation checkpointing may save or recompute them. They run on the default client.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringattn._default import default_client, default_options
from ringattn._errors import invalid


def _options(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None,
             bias: Tensor | None, mask: Tensor | None, q_segment_ids: Tensor | None, kv_segment_ids: Tensor | None,
             sinks: Tensor | None, dropout_seed: Tensor | None, dropout_p: float, softmax_scale: float | None,
             causal: bool, window_left: int, window_right: int, softcap: float,
             deterministic: bool) -> dict[str, Any]:
    options = default_options()
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "alibi_slopes": alibi_slopes,
                "bias": bias, "mask": mask, "q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids,
                "sinks": sinks, "softmax_scale": softmax_scale, "causal": causal, "softcap": softcap,
                "deterministic": deterministic}
    if window_left != -1 or window_right != -1:
        options["window"] = (window_left, window_right)
    if dropout_p != 0.0:
        options |= {"dropout_p": dropout_p, "dropout_seed": int(dropout_seed.item()) if dropout_seed is not None else 0}
    return options


@torch.library.custom_op("ringattn::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
               alibi_slopes: Tensor | None, bias: Tensor | None, mask: Tensor | None,
               q_segment_ids: Tensor | None, kv_segment_ids: Tensor | None, sinks: Tensor | None,
               dropout_seed: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
               window_left: int, window_right: int, softcap: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    options = _options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, q_segment_ids, kv_segment_ids, sinks,
                       dropout_seed, dropout_p, softmax_scale, causal, window_left, window_right, softcap,
                       deterministic)
    result = default_client().forward(q, k, v, **options)
    return result.out, result.lse


@_attention.register_fake
def _(q, k, v, *_):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])  # packed tensors have no batch axis
    return out, q.new_empty(lse_shape, dtype=torch.float32)


@torch.library.custom_op("ringattn::attention_backward", mutates_args=())
def _attention_backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None,
                        bias: Tensor | None, mask: Tensor | None, q_segment_ids: Tensor | None,
                        kv_segment_ids: Tensor | None, sinks: Tensor | None, dropout_seed: Tensor | None,
                        dropout_p: float, softmax_scale: float | None, causal: bool, window_left: int,
                        window_right: int, softcap: float, deterministic: bool,
                        bias_gradient: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = _options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, q_segment_ids, kv_segment_ids, sinks,
                       dropout_seed, dropout_p, softmax_scale, causal, window_left, window_right, softcap,
                       deterministic)
    result = default_client().backward(dout, q, k, v, out=out, lse=lse, dlse=dlse, bias_gradient=bias_gradient,
                                       **options)
    # An operator's results are tensors: what is not asked for is one without elements.
    nothing = q.new_empty(0)
    return (result.dq, result.dk, result.dv, nothing if result.dbias is None else result.dbias,
            nothing.clone() if result.dsinks is None else result.dsinks)


@_attention_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, q_segment_ids,
      kv_segment_ids, sinks, dropout_seed, dropout_p, softmax_scale, causal, window_left, window_right, softcap,
      deterministic, bias_gradient):
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if bias_gradient else q.new_empty(0)
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v)), dbias, dsinks)


def _save(ctx, inputs, output) -> None:
    tensors, rest = inputs[:12], inputs[12:]
    ctx.save_for_backward(*tensors, *output)
    ctx.rest = rest
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout: Tensor | None, dlse: Tensor | None):
    *tensors, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (len(tensors) + len(ctx.rest))
    if dout is None:
        dout = torch.zeros_like(out)
    needs_bias, needs_sinks = ctx.needs_input_grad[6], ctx.needs_input_grad[10]
    q, k, v, *options = tensors
    dq, dk, dv, dbias, dsinks = _attention_backward(
        dout.contiguous(), None if dlse is None else dlse.contiguous(), q, k, v, out, lse, *options, *ctx.rest,
        needs_bias)
    gradients = [None] * (len(tensors) + len(ctx.rest))
    gradients[:3] = dq, dk, dv
    gradients[6] = dbias if needs_bias else None
    gradients[10] = dsinks if needs_sinks else None
    return tuple(gradients)


_attention.register_autograd(_gradients, setup_context=_save)


def _no_second_order(ctx, *_):
    raise NotImplementedError("double backward: gradients of ringattn's gradients are not served")


_attention_backward.register_autograd(_no_second_order)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False,
              window: tuple[int, int] | None = None, softmax_scale: float | None = None,
              softcap: float | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
              alibi_slopes: Tensor | None = None, bias: Tensor | None = None, mask: Tensor | None = None,
              q_segment_ids: Tensor | None = None, kv_segment_ids: Tensor | None = None,
              sinks: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: Tensor | None = None,
              deterministic: bool = False) -> tuple[Tensor, Tensor]:
    """Attention on the default client, differentiable by q, k, v, bias, sinks, and through lse.

    q: [batch, seq_len_q, heads, head_dim], k: [batch, seq_len_k, kv_heads, head_dim], v: the same with its own
    head_dim; packed with cu_seqlens: without the batch axis. kv_heads divides heads.

    Args:
        window: (left, right) tokens beside a query's own position; -1: no limit.
        dropout_seed: an int64 tensor of one element; drawn from PyTorch's generator if it is not given.
        The others are those of `ringattn.AttentionOptions`.

    Returns:
        out, in q's shape with v's head_dim, and lse, fp32 [batch, heads, seq_len_q] or [heads, tokens].

    Raises:
        RingattnError: as `Client.forward`, in the forward or the backward pass.
        RuntimeError: there is no default client.
    """
    if dropout_p != 0.0 and dropout_seed is None:
        # On the CPU and in one draw: checkpointing and a fixed seed then give the same pairs again.
        dropout_seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    left, right = (-1, -1) if window is None else window
    if bias is not None and bias.dim() != 4:
        raise invalid("bias", f"has {bias.dim()} axes, must be [batch or 1, heads or 1, queries, keys]")
    return _attention(q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens_q, cu_seqlens_k, alibi_slopes,
                      None if bias is None else bias.contiguous(), None if mask is None else mask.contiguous(),
                      q_segment_ids, kv_segment_ids, sinks, dropout_seed if dropout_p != 0.0 else None,
                      float(dropout_p), None if softmax_scale is None else float(softmax_scale), bool(causal),
                      int(left), int(right), float(softcap or 0.0), bool(deterministic))
