"""Differentiable attention for PyTorch.

The package defines two operators, `ringattn::attention` and `ringattn::attention_backward`. torch.compile traces them
whole, and activation checkpointing saves or recomputes them. They run on the default client. The third result of the
first operator is the handle of a residual. Autograd saves it, so it lives exactly as long as the graph that may need it.

The operators are defined by `torch.library.Library`, because a `torch.library.custom_op` imports torch._dynamo (two
seconds) when it is first called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringattn._optional import needed_by

with needed_by(__name__):
    import torch
    from torch import Tensor
    from torch.autograd import forward_ad

from ringattn import _default, _graph_calls
from ringattn._arguments import flag, number, seed_number, window_pair
from ringattn._client import BackwardResult
from ringattn._default import ResidualMode
from ringattn._errors import NO_FORWARD_MODE, invalid
from ringattn._options import DilationLevel, Document
from ringattn._request import origin_of
from ringattn._torch_arguments import (autocast, check_derivatives, check_values, flat_documents, flat_levels, form_of,
                                       longest_query_of, offsets_tensor, seed_tensor)


def _options(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None,
             bias: Tensor | None, mask: Tensor | None, q_segment_ids: Tensor | None, kv_segment_ids: Tensor | None,
             sinks: Tensor | None, dropout_seed: Tensor | None, dropout_p: float, softmax_scale: float | None,
             causal: bool, window_left: int, window_right: int, softcap: float, deterministic: bool,
             bias_before_softcap: bool, mask_bits: bool, documents: list[int], dilation_levels: list[int],
             dropout_origin: list[int], longest_query: int) -> dict[str, Any]:
    """Returns the options of a call from the operator's arguments."""
    options: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "alibi_slopes": alibi_slopes, "bias": bias,
        "mask": mask, "q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids, "sinks": sinks,
        "softmax_scale": softmax_scale, "causal": causal, "softcap": softcap, "deterministic": deterministic,
        "bias_before_softcap": bias_before_softcap, "mask_bits": mask_bits,
        "documents": [Document(bool(documents[i]), (documents[i + 1], documents[i + 2]))
                      for i in range(0, len(documents), 3)],
        "dilation_levels": [DilationLevel(*(None if value < 0 else value for value in dilation_levels[i:i + 5]))
                            for i in range(0, len(dilation_levels), 5)],
        "lse_format": "per_document" if longest_query >= 0 else None}
    if window_left != -1 or window_right != -1:
        options["window"] = (window_left, window_right)
    if dropout_p != 0.0:
        seed = 0 if dropout_seed is None else seed_number(dropout_seed.item(), "dropout_seed")
        options |= {"dropout_p": dropout_p, "dropout_seed": seed, "dropout_origin": tuple(dropout_origin)}
    return options


# Number of an operator's arguments that are tensors of the forward. They come first.
_TENSORS = 12


def _inputs(q: Tensor, k: Tensor | None, v: Tensor | None, packing: str) -> dict[str, Tensor]:
    """Returns the call's tensors by name. Packed tensors stay packed."""
    if packing == "":
        return {"q": q, "k": k, "v": v}
    return {"qkv": q} if packing == "qkv" else {"q": q, "kv": k}


def _gradients_of_inputs(result: BackwardResult, packing: str, nothing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients as results of the operator. `nothing`, an empty tensor, stands for a missing one."""
    if packing == "":
        return result.dq, result.dk, result.dv
    if packing == "qkv":
        packed = torch.stack([result.dq, result.dk, result.dv], -3) if result.dqkv is None else result.dqkv
        return packed, nothing, nothing.clone()
    return result.dq, torch.stack([result.dk, result.dv], -3) if result.dkv is None else result.dkv, nothing


def _forward(q: Tensor, k: Tensor | None, v: Tensor | None, cu_seqlens_q: Tensor | None,
             cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, bias: Tensor | None, mask: Tensor | None,
             q_segment_ids: Tensor | None, kv_segment_ids: Tensor | None, sinks: Tensor | None,
             dropout_seed: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
             window_left: int, window_right: int, softcap: float, deterministic: bool, bias_before_softcap: bool,
             mask_bits: bool, documents: list[int], dilation_levels: list[int], dropout_origin: list[int],
             longest_query: int, packing: str, bias_gradient: bool, residual: str) -> tuple[Tensor, Tensor, Tensor]:
    options = _options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, q_segment_ids, kv_segment_ids, sinks,
                       dropout_seed, dropout_p, softmax_scale, causal, window_left, window_right, softcap,
                       deterministic, bias_before_softcap, mask_bits, documents, dilation_levels, dropout_origin,
                       longest_query)
    result, handle = _graph_calls.forward(_inputs(q, k, v, packing), options, residual, bias_gradient)
    if longest_query >= 0 and result.lse.shape[-1] != longest_query:
        raise invalid("max_seqlen_q", f"is {longest_query}; the longest document has {result.lse.shape[-1]} queries")
    return result.out, result.lse, handle


def _fake_forward(q, k, v, cu_seqlens_q, *rest):
    if forward_ad._current_level >= 0:  # a compiled torch.func.jvp: the operator would drop the tangents
        raise NotImplementedError(NO_FORWARD_MODE)
    longest_query, packing = rest[-4], rest[-3]
    if packing == "qkv":
        out = q.new_empty((*q.shape[:-3], *q.shape[-2:]))
    else:
        out = q.new_empty((*q.shape[:-1], (k if packing == "kv" else v).shape[-1]))
    lse_shape = (*out.shape[:-3], out.shape[-2], out.shape[-3])  # packed documents have no batch axis
    if longest_query >= 0:
        lse_shape = (cu_seqlens_q.shape[0] - 1, out.shape[-2], longest_query)
    handle = torch.empty(_graph_calls.HANDLE_BYTES, dtype=torch.uint8, device="cpu")
    return out, q.new_empty(lse_shape, dtype=torch.float32), handle


# `out` and `lse` are None with residual="remote". q, k and v then have shapes but no contents.
def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor | None, lse: Tensor | None, handle: Tensor,
              q: Tensor, k: Tensor | None, v: Tensor | None, cu_seqlens_q: Tensor | None,
              cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, bias: Tensor | None, mask: Tensor | None,
              q_segment_ids: Tensor | None, kv_segment_ids: Tensor | None, sinks: Tensor | None,
              dropout_seed: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
              window_left: int, window_right: int, softcap: float, deterministic: bool, bias_before_softcap: bool,
              mask_bits: bool, documents: list[int], dilation_levels: list[int], dropout_origin: list[int],
              longest_query: int, packing: str, bias_gradient: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = None if out is None else {**_inputs(q, k, v, packing), "out": out, "lse": lse}
    options = _options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, q_segment_ids, kv_segment_ids, sinks,
                       dropout_seed, dropout_p, softmax_scale, causal, window_left, window_right, softcap,
                       deterministic, bias_before_softcap, mask_bits, documents, dilation_levels, dropout_origin,
                       longest_query) | {"bias_gradient": bias_gradient}
    result = _graph_calls.backward(dout, dlse, handle, tensors, options)
    nothing = q.new_empty(0)
    return (*_gradients_of_inputs(result, packing, nothing.clone()),
            nothing if result.dbias is None else result.dbias,
            nothing.clone() if result.dsinks is None else result.dsinks)


def _fake_backward(dout, dlse, out, lse, handle, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask,
                   q_segment_ids, kv_segment_ids, sinks, *rest):
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if rest[-1] else q.new_empty(0)
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(q.new_empty(0 if tensor is None else tensor.shape) for tensor in (q, k, v)), dbias, dsinks)


def _save(ctx, inputs, output) -> None:
    tensors = inputs[:_TENSORS]
    out, lse, handle = output
    ctx.rest = inputs[_TENSORS:-1]
    ctx.is_remote = inputs[-1] == "remote"
    if ctx.is_remote:
        ctx.shapes = [None if tensor is None else tensor.shape for tensor in (*tensors[:3], out)]
        ctx.like = (tensors[0].dtype, tensors[0].device)
        ctx.save_for_backward(*tensors[3:], handle)
    else:
        ctx.save_for_backward(*tensors, out, lse, handle)
    ctx.set_materialize_grads(False)


def _saved(ctx) -> tuple[list[Any], Any, Any, Any, Any]:
    """Returns the operator's tensors, out, lse, the handle, and a tensor in the shape of out."""
    if not ctx.is_remote:
        *tensors, out, lse, handle = ctx.saved_tensors
        return tensors, out, lse, handle, out
    dtype, device = ctx.like
    *options, handle = ctx.saved_tensors
    # Expanded scalars: tensors of these shapes that take no memory.
    q, k, v, out = (None if shape is None else torch.empty((), dtype=dtype, device=device).expand(shape)
                    for shape in ctx.shapes)
    return [q, k, v, *options], None, None, handle, out


def _gradients(ctx, dout: Tensor | None, dlse: Tensor | None, _dhandle: None):
    gradients: list[Tensor | None] = [None] * (_TENSORS + len(ctx.rest) + 1)
    if dout is None and dlse is None:
        return tuple(gradients)
    tensors, out, lse, handle, like = _saved(ctx)
    *of_inputs, dbias, dsinks = _attention_backward(
        *_graph_calls.gradients_of_results(dout, dlse, like), out, lse, handle, *tensors, *ctx.rest)
    gradients[:3] = (gradient if tensor is not None else None for gradient, tensor in zip(of_inputs, tensors))
    gradients[6] = dbias if ctx.needs_input_grad[6] else None
    gradients[10] = dsinks if ctx.needs_input_grad[10] else None
    return tuple(gradients)


def _no_second_order(ctx, *_):
    raise NotImplementedError(_graph_calls.NO_SECOND_ORDER)


_library = torch.library.Library("ringattn", "DEF")


def _define(name: str, kernel: Any, fake: Any, gradients: Any, save: Any = None) -> torch._ops.OpOverload:
    schema = torch.library.infer_schema(kernel, mutates_args=())
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringattn::{name}", fake, lib=_library)
    torch.library.register_autograd(f"ringattn::{name}", gradients, setup_context=save, lib=_library)
    return getattr(torch.ops.ringattn, name).default


_attention = _define("attention", _forward, _fake_forward, _gradients, _save)
_attention_backward = _define("attention_backward", _backward, _fake_backward, _no_second_order)


def attention(q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, *,
              qkv: Tensor | None = None, kv: Tensor | None = None, causal: bool = False,
              window: tuple[int, int] | None = None, softmax_scale: float | None = None,
              softcap: float | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
              documents: Sequence[Document] = (), dilation_levels: Sequence[DilationLevel] = (),
              alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
              bias_before_softcap: bool = False, mask: Tensor | None = None, mask_bits: bool = False,
              q_segment_ids: Tensor | None = None, kv_segment_ids: Tensor | None = None,
              sinks: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: Tensor | int | None = None,
              dropout_origin: tuple[int, int, int, int] = (0, 0, 0, 0), deterministic: bool = False,
              lse_format: str | None = None, max_seqlen_q: int | None = None,
              residual: ResidualMode | None = None) -> tuple[Tensor, Tensor]:
    """Attention on the default client, differentiable in q, k, v, bias and sinks, and through lse.

    q: [batch, seq_len_q, heads, head_dim]; k: [batch, seq_len_k, kv_heads, head_dim]; v: as k, with its own head_dim.
    With cu_seqlens, tensors are packed and have no batch axis. kv_heads divides heads. `qkv` [batch, seq_len, 3, heads,
    head_dim] replaces q, k and v, and `kv` [batch, seq_len_k, 2, kv_heads, head_dim] replaces k and v. They and their
    gradients are sent without being split.

    Args:
        window: (left, right) tokens that a query sees in addition to its own position; -1: no limit.
        dropout_seed: a whole number, or a tensor of one, which torch.compile can trace. None: drawn from PyTorch's
            generator.
        max_seqlen_q: with lse_format "per_document": the number of queries of the longest document. Without it, the
            number is computed, which torch.compile cannot trace whole.
        residual: whether the workers keep q, k, v, out and lse for a backward.
            "auto": they do, and the backward sends only dout, or the tensors if the residual is gone.
            "remote": they do, and this process frees its own tensors. A lost residual is an error.
            "off": they do not. None: the mode of `set_default_client`.
            The residual is deleted when its graph is dropped or recomputed by activation checkpointing.
        Others: see `ringattn.AttentionOptions`. `compute_dtype`, `output_dtype` and `probability_rows` are available
            in `Client.forward` only.

    Returns:
        out, in q's shape with v's head_dim; lse, fp32 [batch, heads, seq_len_q] or packed [heads, tokens], or by
        `lse_format`.

    Raises:
        RingattnError: as `Client.forward`, in the forward or the backward pass.
        FailedPreconditionError: with residual="remote", the forward was not kept, or its residual is gone.
        RuntimeError: no default client is set.
    """
    check_derivatives(
        {"q": q, "k": k, "v": v, "qkv": qkv, "kv": kv, "bias": bias, "sinks": sinks},
        {"alibi_slopes": alibi_slopes, "mask": mask, "q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids},
        {"softmax_scale": softmax_scale, "softcap": softcap, "dropout_p": dropout_p})
    if softmax_scale is not None:
        softmax_scale = number(softmax_scale, "softmax_scale")
    softcap = 0.0 if softcap is None else number(softcap, "softcap")
    dropout_p = number(dropout_p, "dropout_p")
    left, right = (-1, -1) if window is None else window_pair(window, "window")
    if bias is not None and bias.dim() != 4:
        raise invalid("bias", f"has {bias.dim()} axes; must be [batch or 1, heads or 1, queries, keys]")
    cu_seqlens_q, cu_seqlens_k = (offsets_tensor(cu_seqlens_q, "cu_seqlens_q"),
                                  offsets_tensor(cu_seqlens_k, "cu_seqlens_k"))
    packing, tensors = form_of(q, k, v, qkv, kv)
    check_values({"qkv": qkv, "q": q, "k": k, "v": v, "kv": kv},
                 {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "alibi_slopes": alibi_slopes, "bias": bias,
                  "mask": mask, "q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids, "sinks": sinks,
                  "dropout_seed": dropout_seed})
    *tensors, bias = autocast(*tensors, bias)
    if sinks is not None and sinks.dtype in (torch.bfloat16, torch.float16):
        sinks = sinks.float()
    mode = _default.residual_mode if residual is None else residual
    _default.check_residual_mode(mode)
    differentiated = [tensor for tensor in (*tensors, bias, sinks) if tensor is not None and tensor.requires_grad]
    if not (torch.is_grad_enabled() and differentiated):
        mode = "off"
    out, lse, _ = _attention(
        *(None if tensor is None else tensor.contiguous() for tensor in tensors), cu_seqlens_q, cu_seqlens_k,
        alibi_slopes, None if bias is None else bias.contiguous(), None if mask is None else mask.contiguous(),
        q_segment_ids, kv_segment_ids, sinks, seed_tensor(dropout_seed, dropout_p), dropout_p, softmax_scale,
        flag(causal, "causal"), left, right, softcap, flag(deterministic, "deterministic"),
        flag(bias_before_softcap, "bias_before_softcap"), flag(mask_bits, "mask_bits"), flat_documents(documents),
        flat_levels(dilation_levels), origin_of(dropout_origin), longest_query_of(cu_seqlens_q, lse_format, max_seqlen_q),
        packing, bias is not None and bias.requires_grad, mode)
    return out, lse
