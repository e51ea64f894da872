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

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringattn import _default
from ringattn._arguments import number, whole_number, window_pair
from ringattn._client import BackwardResult, Client
from ringattn._default import ResidualMode, default_client, default_options
from ringattn._errors import FailedPreconditionError, invalid
from ringattn._options import PLAN_NAMES, DilationLevel, Document
from ringattn._report import Report
from ringattn._request import origin_of
from ringattn._residuals import Keeper
from ringattn._shape import PARTS


# Residuals that graphs refer to.
_keeper = Keeper()

_NO_FORWARD_MODE = ("forward-mode derivatives (torch.func.jvp, jacfwd, dual tensors) of ringattn's attention are not "
                    "supported; use reverse mode (torch.autograd.grad)")
# Length of a handle as an operator's result: its text, padded with zeros. All zeros: no handle.
_HANDLE_BYTES = 64


def _options(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None,
             bias: Tensor | None, mask: Tensor | None, q_segment_ids: Tensor | None, kv_segment_ids: Tensor | None,
             sinks: Tensor | None, dropout_seed: Tensor | None, dropout_p: float, softmax_scale: float | None,
             causal: bool, window_left: int, window_right: int, softcap: float, deterministic: bool,
             bias_before_softcap: bool, mask_bits: bool, documents: list[int], dilation_levels: list[int],
             dropout_origin: list[int], longest_query: int) -> dict[str, Any]:
    options = default_options()
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "alibi_slopes": alibi_slopes,
                "bias": bias, "mask": mask, "q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids,
                "sinks": sinks, "softmax_scale": softmax_scale, "causal": causal, "softcap": softcap,
                "deterministic": deterministic, "bias_before_softcap": bias_before_softcap, "mask_bits": mask_bits,
                "documents": [Document(bool(documents[i]), (documents[i + 1], documents[i + 2]))
                              for i in range(0, len(documents), 3)],
                "dilation_levels": [DilationLevel(*(None if value < 0 else value for value in dilation_levels[i:i + 5]))
                                    for i in range(0, len(dilation_levels), 5)],
                "lse_format": "per_document" if longest_query >= 0 else None}
    if window_left != -1 or window_right != -1:
        options["window"] = (window_left, window_right)
    if dropout_p != 0.0:
        options |= {"dropout_p": dropout_p, "dropout_seed": int(dropout_seed.item()) if dropout_seed is not None else 0,
                    "dropout_origin": tuple(dropout_origin)}
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


def _kept(client: Client, report: Report, residual: str) -> Tensor:
    """Returns the handle as a tensor. Its memory owns the residual: when it is freed, no graph can need it."""
    text = np.zeros(_HANDLE_BYTES, np.uint8)
    if report.residual is not None:
        handle = report.residual.handle.encode()
        text[:len(handle)] = np.frombuffer(handle, np.uint8)
        _keeper.keep(text, client, report.residual)
    elif residual == "remote":
        raise FailedPreconditionError(
            "FAILED_PRECONDITION", f"residual='remote': the workers could not keep this forward: "
                                   f"{report.residual_reason}", reason="RESIDUAL_NOT_KEPT")
    return torch.from_numpy(text)


def _handle(text: Tensor) -> str:
    return text.numpy().tobytes().rstrip(b"\0").decode()


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
    client = default_client()
    if residual != "off":
        options |= {"retain": True, "bias_gradient": bias_gradient}
    result = client.forward(**_inputs(q, k, v, packing), **options)
    if longest_query >= 0 and result.lse.shape[-1] != longest_query:
        raise invalid("max_seqlen_q", f"is {longest_query}; the longest document has {result.lse.shape[-1]} queries")
    return result.out, result.lse, _kept(client, result.report, residual)


def _fake_forward(q, k, v, cu_seqlens_q, *rest):
    if forward_ad._current_level >= 0:  # a compiled torch.func.jvp: the operator would drop the tangents
        raise NotImplementedError(_NO_FORWARD_MODE)
    longest_query, packing = rest[-4], rest[-3]
    if packing == "qkv":
        out = q.new_empty((*q.shape[:-3], *q.shape[-2:]))
    else:
        out = q.new_empty((*q.shape[:-1], (k if packing == "kv" else v).shape[-1]))
    lse_shape = (*out.shape[:-3], out.shape[-2], out.shape[-3])  # packed documents have no batch axis
    if longest_query >= 0:
        lse_shape = (cu_seqlens_q.shape[0] - 1, out.shape[-2], longest_query)
    return out, q.new_empty(lse_shape, dtype=torch.float32), torch.empty(_HANDLE_BYTES, dtype=torch.uint8)


def _gone(handle: str) -> FailedPreconditionError:
    """Returns the error for a residual that is gone, with residual="remote"."""
    if _keeper.was_dropped(handle):
        return FailedPreconditionError(
            "FAILED_PRECONDITION",
            "residual='remote': the residual of this forward was deleted, because the tensor that owned it was replaced "
            "by a copy. Saved-tensor hooks (torch.autograd.graph.saved_tensors_hooks, save_on_cpu, activation "
            "offloading) do that. Use residual='auto' or 'off' inside such hooks", reason="RESIDUAL_DROPPED")
    return FailedPreconditionError(
        "FAILED_PRECONDITION", "residual='remote': an earlier backward consumed the residual of this forward; pass it "
                               "retain_graph=True", reason="RESIDUAL_CONSUMED")


# `out` and `lse` are None with residual="remote". q, k and v then have shapes but no contents.
def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor | None, lse: Tensor | None, handle: Tensor,
              q: Tensor, k: Tensor | None, v: Tensor | None, cu_seqlens_q: Tensor | None,
              cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, bias: Tensor | None, mask: Tensor | None,
              q_segment_ids: Tensor | None, kv_segment_ids: Tensor | None, sinks: Tensor | None,
              dropout_seed: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
              window_left: int, window_right: int, softcap: float, deterministic: bool, bias_before_softcap: bool,
              mask_bits: bool, documents: list[int], dilation_levels: list[int], dropout_origin: list[int],
              longest_query: int, packing: str, bias_gradient: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    client, residual = default_client(), _handle(handle)
    # retain_graph: the graph's next backward needs the residual too. True outside of a graph's backward.
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    if out is None:
        kept = _keeper.find(residual)
        if kept is None:
            raise _gone(residual)
        # The plan is the forward's, even if the default options have changed.
        options = {name: value for name, value in default_options().items() if name not in PLAN_NAMES}
        result = client.backward(dout, residual=kept, keep_residual=keep, dlse=dlse, **options)
    else:
        options = _options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, q_segment_ids, kv_segment_ids,
                           sinks, dropout_seed, dropout_p, softmax_scale, causal, window_left, window_right, softcap,
                           deterministic, bias_before_softcap, mask_bits, documents, dilation_levels, dropout_origin,
                           longest_query)
        options.pop("key_splits", None)  # applies to the forward only
        if _keeper.find(residual) is not None:
            options |= {"residual": residual, "keep_residual": keep}
        result = client.backward(dout, **_inputs(q, k, v, packing), out=out, lse=lse, dlse=dlse,
                                 bias_gradient=bias_gradient, **options)
    if not keep or result.report.residual_failure:
        _keeper.forget(residual)
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
    if dout is None:
        dout = torch.zeros_like(like, memory_format=torch.contiguous_format)
    *of_inputs, dbias, dsinks = _attention_backward(
        dout.contiguous(), None if dlse is None else dlse.contiguous(), out, lse, handle, *tensors, *ctx.rest)
    gradients[:3] = (gradient if tensor is not None else None for gradient, tensor in zip(of_inputs, tensors))
    gradients[6] = dbias if ctx.needs_input_grad[6] else None
    gradients[10] = dsinks if ctx.needs_input_grad[10] else None
    return tuple(gradients)


def _no_second_order(ctx, *_):
    raise NotImplementedError("double backward: gradients of ringattn's gradients are not supported")


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


def _form_of(q: Tensor | None, k: Tensor | None, v: Tensor | None, qkv: Tensor | None,
            kv: Tensor | None) -> tuple[str, tuple[Tensor, Tensor | None, Tensor | None]]:
    """Returns how the tensors are packed, and the operator's first three arguments."""
    form = "qkv" if qkv is not None else "kv" if kv is not None else ""
    wanted = {"qkv": ("qkv",), "kv": ("q", "kv"), "": ("q", "k", "v")}[form]
    given = {"q": q, "k": k, "v": v, "qkv": qkv, "kv": kv}
    for name, tensor in given.items():
        if (tensor is None) == (name in wanted):
            raise TypeError(f"{name}: is missing" if tensor is None else f"{name}: is given in addition to {form}")
    for name, parts in PARTS.items():
        tensor = given[name]
        if tensor is not None and (tensor.dim() < 4 or tensor.shape[-3] != parts):
            raise invalid(name, f"has the shape {list(tensor.shape)}; must be [.., tokens, {parts}, heads, head_dim]")
    return form, (given[wanted[0]], kv if form == "kv" else k, v)


def _flat(documents: Sequence[Document]) -> list[int]:
    """Returns causal, left and right of each document, as one list for the operator."""
    return [value for index, document in enumerate(documents)
            for value in (int(document.causal), *window_pair((-1, -1) if document.window is None else document.window,
                                                             f"documents[{index}].window"))]


def _flat_levels(levels: Sequence[DilationLevel]) -> list[int]:
    """Returns the five numbers of each level as one list for the operator. -1 stands for None."""
    flat: list[int] = []
    for index, level in enumerate(levels):
        for name in ("segment_length", "dilation_rate", "offset", "head_begin", "head_end"):
            value = getattr(level, name)
            field = f"dilation_levels[{index}].{name}"
            if value is not None and whole_number(value, field) < 0:
                raise invalid(field, f"is {value}; must not be negative")
            flat.append(-1 if value is None else whole_number(value, field))
    return flat


def _is_for_torch_func(tensor: Tensor) -> bool:
    """Whether torch.func's grad, vjp or jvp differentiates by it, inside or outside of a vmap."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _check_transforms(name: str, tensor: Tensor) -> None:
    """Raises NotImplementedError for a tensor by which something other than autograd's reverse mode differentiates."""
    if torch.compiler.is_compiling():
        return  # the operator's fake kernel refuses forward mode
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(f"{name}: {_NO_FORWARD_MODE}")
    if _is_for_torch_func(tensor):
        raise NotImplementedError(f"{name}: derivatives by torch.func (grad, vjp, jvp, ...) are not supported; use "
                                  "torch.autograd.grad or backward()")


def _check_not_differentiated(name: str, value: Any) -> None:
    """Raises NotImplementedError if an argument without a gradient requires one."""
    if not isinstance(value, Tensor):
        return
    _check_transforms(name, value)
    if torch.is_grad_enabled() and value.requires_grad:
        raise NotImplementedError(f"{name}: requires a gradient, which ringattn does not compute; pass {name}.detach() "
                                  "to treat it as a constant")


def refuse_derivatives(**tensors: Tensor | None) -> None:
    """Raises NotImplementedError if anything differentiates by one of the tensors, which are used with a K/V cache."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: is a {type(tensor).__module__}.{type(tensor).__name__}; must be a torch.Tensor")
        _check_transforms(name, tensor)
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise NotImplementedError(f"requires_grad: {name} requires a gradient; K/V caches are for inference; use "
                                      "torch.no_grad()")


def _check_tensors(with_gradients: dict[str, Any], others: dict[str, Any]) -> None:
    """Checks the types of the tensor arguments, and that no unsupported derivative is requested."""
    for name, value in (*with_gradients.items(), *others.items()):
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: is a {type(value).__module__}.{type(value).__name__}; must be a torch.Tensor "
                            "(Client.forward takes other arrays)")
        _check_transforms(name, value)
    for name, value in others.items():
        _check_not_differentiated(name, value)


def _offsets(cu_seqlens: Any, name: str) -> Tensor | None:
    """Returns cu_seqlens, a tensor or a sequence of whole numbers, as a tensor."""
    if cu_seqlens is None or isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    try:
        return torch.tensor([whole_number(offset, name) for offset in cu_seqlens], dtype=torch.int64)
    except TypeError:
        raise invalid(name, f"is a {type(cu_seqlens).__name__}; must be a tensor of whole numbers") from None


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Casts tensors under torch.autocast as scaled_dot_product_attention casts them. float64 is not cast."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor.to(dtype) if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
            else tensor for tensor in tensors]


def _seed(dropout_seed: Any, dropout_p: float) -> Tensor | None:
    if dropout_p == 0.0:
        return None
    if dropout_seed is None:
        # One draw on the CPU, so that checkpointing and a fixed seed reproduce the dropped pairs.
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    if isinstance(dropout_seed, Tensor):
        return dropout_seed
    return torch.tensor([whole_number(dropout_seed, "dropout_seed")], dtype=torch.int64)


def _longest_query(cu_seqlens_q: Tensor | None, lse_format: str | None, max_seqlen_q: int | None) -> int:
    """Returns the length of the last axis of lse per document, or -1 for a flat lse."""
    if lse_format in (None, "flat"):
        return -1
    if lse_format != "per_document":
        raise invalid("lse_format", f"is {lse_format!r}; must be flat or per_document")
    if cu_seqlens_q is None:
        raise invalid("lse_format", "is per_document, which needs cu_seqlens_q and cu_seqlens_k")
    if max_seqlen_q is not None:
        return whole_number(max_seqlen_q, "max_seqlen_q")
    return int(cu_seqlens_q.diff().max()) if cu_seqlens_q.numel() > 1 else 0


def attention(q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, *,
              qkv: Tensor | None = None, kv: Tensor | None = None, causal: bool = False,
              window: tuple[int, int] | None = None, softmax_scale: float | None = None,
              softcap: float | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
              documents: Sequence[Document] = (), dilation_levels: Sequence[DilationLevel] = (),
              alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
              bias_before_softcap: bool = False, mask: Tensor | None = None, mask_bits: bool = False,
              q_segment_ids: Tensor | None = None, kv_segment_ids: Tensor | None = None,
              sinks: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: Tensor | None = None,
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
        dropout_seed: an int64 tensor of one element; default: drawn from PyTorch's generator.
        max_seqlen_q: with lse_format "per_document": the number of queries of the longest document. Without it, the
            number is computed, which torch.compile cannot trace whole.
        residual: whether the workers keep q, k, v, out and lse for a backward.
            "auto": they do, and the backward sends only dout, or the tensors if the residual is gone.
            "remote": they do, and this process frees its own tensors. A lost residual is an error.
            "off": they do not. None: the mode of `set_default_client`.
            The residual is deleted when its graph is dropped or recomputed by activation checkpointing.
        Others: see `ringattn.AttentionOptions`. `output_dtype` and `probability_rows` are available in
            `Client.forward` only.

    Returns:
        out, in q's shape with v's head_dim; lse, fp32 [batch, heads, seq_len_q] or packed [heads, tokens], or by
        `lse_format`.

    Raises:
        RingattnError: as `Client.forward`, in the forward or the backward pass.
        FailedPreconditionError: with residual="remote", the forward was not kept, or its residual is gone.
        RuntimeError: no default client is set.
    """
    _check_tensors(
        {"q": q, "k": k, "v": v, "qkv": qkv, "kv": kv, "bias": bias, "sinks": sinks},
        {"alibi_slopes": alibi_slopes, "mask": mask, "q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids})
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap), ("dropout_p", dropout_p)):
        _check_not_differentiated(name, value)
    if softmax_scale is not None:
        softmax_scale = number(softmax_scale, "softmax_scale")
    softcap = 0.0 if softcap is None else number(softcap, "softcap")
    dropout_p = number(dropout_p, "dropout_p")
    left, right = (-1, -1) if window is None else window_pair(window, "window")
    if bias is not None and bias.dim() != 4:
        raise invalid("bias", f"has {bias.dim()} axes; must be [batch or 1, heads or 1, queries, keys]")
    cu_seqlens_q, cu_seqlens_k = _offsets(cu_seqlens_q, "cu_seqlens_q"), _offsets(cu_seqlens_k, "cu_seqlens_k")
    packing, tensors = _form_of(q, k, v, qkv, kv)
    *tensors, bias = _autocast(*tensors, bias)
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
        q_segment_ids, kv_segment_ids, sinks, _seed(dropout_seed, dropout_p), dropout_p, softmax_scale, bool(causal),
        left, right, softcap, bool(deterministic), bool(bias_before_softcap), bool(mask_bits), _flat(documents),
        _flat_levels(dilation_levels), origin_of(dropout_origin), _longest_query(cu_seqlens_q, lse_format, max_seqlen_q),
        packing, bias is not None and bias.requires_grad, mode)
    return out, lse
