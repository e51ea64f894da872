"""Differentiable attention for PyTorch.

Two operators, `ringattn::attention` and `ringattn::attention_backward`, that the dispatcher knows: torch.compile
traces them whole, activation checkpointing may save or recompute them. They run on the default client. A third result
of the first is a residual's handle: as a saved tensor it lives exactly as long as the graph that may ask for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn import _default
from ringattn._client import Client
from ringattn._default import ResidualMode, default_client, default_options
from ringattn._errors import FailedPreconditionError, invalid
from ringattn._report import Report
from ringattn._residuals import Keeper


# Residuals that graphs refer to.
_keeper = Keeper()
# A handle as an operator's result: its text, and zeros behind it. No handle: zeros.
_HANDLE_BYTES = 64


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


def _kept(client: Client, report: Report, residual: str) -> Tensor:
    """The handle as a tensor. When its memory goes, the graph is gone, and with it whoever could ask."""
    text = np.zeros(_HANDLE_BYTES, np.uint8)
    if report.residual is not None:
        handle = report.residual.handle.encode()
        text[:len(handle)] = np.frombuffer(handle, np.uint8)
        _keeper.keep(text, client, report.residual)
    elif residual == "remote":
        raise FailedPreconditionError(
            "FAILED_PRECONDITION", f"residual='remote': the workers keep nothing of this forward: "
                                   f"{report.residual_reason}", reason="RESIDUAL_NOT_KEPT")
    return torch.from_numpy(text)


def _handle(text: Tensor) -> str:
    return text.numpy().tobytes().rstrip(b"\0").decode()


@torch.library.custom_op("ringattn::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
               alibi_slopes: Tensor | None, bias: Tensor | None, mask: Tensor | None,
               q_segment_ids: Tensor | None, kv_segment_ids: Tensor | None, sinks: Tensor | None,
               dropout_seed: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
               window_left: int, window_right: int, softcap: float, deterministic: bool, residual: str,
               bias_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    options = _options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, q_segment_ids, kv_segment_ids, sinks,
                       dropout_seed, dropout_p, softmax_scale, causal, window_left, window_right, softcap,
                       deterministic)
    client = default_client()
    if options.get("streams", 1) > 1:
        if residual == "remote":
            raise NotImplementedError("residual='remote': beside streams; a residual is of one request")
        residual = "off"
    if residual != "off":
        options |= {"retain": True, "bias_gradient": bias_gradient}
    result = client.forward(q, k, v, **options)
    return result.out, result.lse, _kept(client, result.report, residual)


@_attention.register_fake
def _(q, k, v, *_):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])  # packed tensors have no batch axis
    return out, q.new_empty(lse_shape, dtype=torch.float32), torch.empty(_HANDLE_BYTES, dtype=torch.uint8)


# `out` and `lse` are None where q, k and v are shapes without contents: what is kept with the workers is all there is.
@torch.library.custom_op("ringattn::attention_backward", mutates_args=())
def _attention_backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None,
                        lse: Tensor | None, handle: Tensor, cu_seqlens_q: Tensor | None,
                        cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None,
                        bias: Tensor | None, mask: Tensor | None, q_segment_ids: Tensor | None,
                        kv_segment_ids: Tensor | None, sinks: Tensor | None, dropout_seed: Tensor | None,
                        dropout_p: float, softmax_scale: float | None, causal: bool, window_left: int,
                        window_right: int, softcap: float, deterministic: bool,
                        bias_gradient: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    client, residual = default_client(), _handle(handle)
    # retain_graph: the next backward of this graph asks for it again. Outside of a graph's backward: true.
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    if out is None:
        kept = _keeper.find(residual)
        if kept is None:
            raise FailedPreconditionError(
                "FAILED_PRECONDITION", "residual='remote': what the workers kept of this forward is used up",
                reason="RESIDUAL_CONSUMED")
        result = client.backward(dout, residual=kept, keep_residual=keep, dlse=dlse, **default_options())
    else:
        options = _options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, q_segment_ids, kv_segment_ids,
                           sinks, dropout_seed, dropout_p, softmax_scale, causal, window_left, window_right, softcap,
                           deterministic)
        if _keeper.find(residual) is not None:
            options |= {"residual": residual, "keep_residual": keep}
        result = client.backward(dout, q, k, v, out=out, lse=lse, dlse=dlse, bias_gradient=bias_gradient, **options)
    if not keep or result.report.residual_failure:
        _keeper.forget(residual)
    # An operator's results are tensors: what is not asked for is one without elements.
    nothing = q.new_empty(0)
    return (result.dq, result.dk, result.dv, nothing if result.dbias is None else result.dbias,
            nothing.clone() if result.dsinks is None else result.dsinks)


@_attention_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, handle, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, q_segment_ids,
      kv_segment_ids, sinks, dropout_seed, dropout_p, softmax_scale, causal, window_left, window_right, softcap,
      deterministic, bias_gradient):
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if bias_gradient else q.new_empty(0)
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(q.new_empty(tensor.shape) for tensor in (q, k, v)), dbias, dsinks)


def _save(ctx, inputs, output) -> None:
    tensors, rest, residual, bias_gradient = inputs[:12], inputs[12:19], inputs[19], inputs[20]
    out, lse, handle = output
    ctx.rest, ctx.bias_gradient = rest, bias_gradient
    ctx.is_remote = residual == "remote"
    if ctx.is_remote:
        ctx.shapes = [tensor.shape for tensor in (*tensors[:3], out)]
        ctx.like = (tensors[0].dtype, tensors[0].device)
        ctx.save_for_backward(*tensors[3:], handle)
    else:
        ctx.save_for_backward(*tensors, out, lse, handle)
    ctx.set_materialize_grads(False)


def _saved(ctx) -> tuple[list[Any], Any, Any, Any, Any]:
    """The operator's tensors, out, lse, the handle, and what a gradient of out looks like."""
    if not ctx.is_remote:
        *tensors, out, lse, handle = ctx.saved_tensors
        return tensors, out, lse, handle, out
    dtype, device = ctx.like
    *options, handle = ctx.saved_tensors
    # Shapes that take no memory.
    q, k, v, out = (torch.empty((), dtype=dtype, device=device).expand(shape) for shape in ctx.shapes)
    return [q, k, v, *options], None, None, handle, out


def _gradients(ctx, dout: Tensor | None, dlse: Tensor | None, _dhandle: None):
    inputs = 12 + len(ctx.rest) + 2
    if dout is None and dlse is None:
        return (None,) * inputs
    tensors, out, lse, handle, like = _saved(ctx)
    if dout is None:
        dout = torch.zeros_like(like, memory_format=torch.contiguous_format)
    q, k, v, *options = tensors
    dq, dk, dv, dbias, dsinks = _attention_backward(
        dout.contiguous(), None if dlse is None else dlse.contiguous(), q, k, v, out, lse, handle, *options, *ctx.rest,
        ctx.bias_gradient)
    gradients = [None] * inputs
    gradients[:3] = dq, dk, dv
    gradients[6] = dbias if ctx.needs_input_grad[6] else None
    gradients[10] = dsinks if ctx.needs_input_grad[10] else None
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
              deterministic: bool = False, residual: ResidualMode | None = None) -> tuple[Tensor, Tensor]:
    """Attention on the default client, differentiable by q, k, v, bias, sinks, and through lse.

    q: [batch, seq_len_q, heads, head_dim], k: [batch, seq_len_k, kv_heads, head_dim], v: the same with its own
    head_dim; packed with cu_seqlens: without the batch axis. kv_heads divides heads.

    Args:
        window: (left, right) tokens beside a query's own position; -1: no limit.
        dropout_seed: an int64 tensor of one element; drawn from PyTorch's generator if it is not given.
        residual: whether q, k, v, out and lse stay with the workers for the backward, if there will be one.
            "auto": yes, and it then sends dout alone; where they are gone it sends the tensors. "remote": likewise,
            and this process lets go of them: less memory here, and what is lost is an error. "off": no. None: as
            `set_default_client` says. What a graph that is dropped, or recomputed by activation checkpointing, has
            left with the workers is deleted.
        The others are those of `ringattn.AttentionOptions`.

    Returns:
        out, in q's shape with v's head_dim, and lse, fp32 [batch, heads, seq_len_q] or [heads, tokens].

    Raises:
        RingattnError: as `Client.forward`, in the forward or the backward pass.
        FailedPreconditionError: with residual="remote", where nothing was kept, or what was is gone.
        RuntimeError: there is no default client.
    """
    if dropout_p != 0.0 and dropout_seed is None:
        # On the CPU and in one draw: checkpointing and a fixed seed then give the same pairs again.
        dropout_seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    left, right = (-1, -1) if window is None else window
    if bias is not None and bias.dim() != 4:
        raise invalid("bias", f"has {bias.dim()} axes, must be [batch or 1, heads or 1, queries, keys]")
    mode = _default.residual_mode if residual is None else residual
    _default.check_residual_mode(mode)
    differentiated = [tensor for tensor in (q, k, v, bias, sinks) if tensor is not None and tensor.requires_grad]
    if not (torch.is_grad_enabled() and differentiated):
        mode = "off"
    out, lse, _ = _attention(
        q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens_q, cu_seqlens_k, alibi_slopes,
        None if bias is None else bias.contiguous(), None if mask is None else mask.contiguous(), q_segment_ids,
        kv_segment_ids, sinks, dropout_seed if dropout_p != 0.0 else None, float(dropout_p),
        None if softmax_scale is None else float(softmax_scale), bool(causal), int(left), int(right),
        float(softcap or 0.0), bool(deterministic), mode, bias is not None and bias.requires_grad)
    return out, lse
