"""Differentiable attention over tensors that are sharded over the processes of a group.

Each process passes its own rows of q, k and v and receives its own rows of the results. The processes are the writers
of one request (`ringattn.Writer`), which computes attention over the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ringattn
from ringattn import _default
from ringattn._arguments import number, whole_number, window_pair
from ringattn._default import default_client, default_options
from ringattn._errors import invalid
from ringattn._groups import Group, seed_for
from ringattn._layouts import Span
from ringattn._options import PLAN_NAMES
from ringattn.torch_ops import (_autocast, _check_not_differentiated, _check_tensors, _gone, _handle, _keeper, _kept,
                                attention)


@dataclass(frozen=True)
class Shard:
    """The tokens of the whole sequence that this process has, in the order of its rows."""

    q: list[Span]
    kv: list[Span]
    #: Offsets of the packed documents in the whole sequence; None: tensors have a batch axis and no documents.
    cu_seqlens_q: list[int] | None = None
    cu_seqlens_k: list[int] | None = None


@dataclass(frozen=True)
class _Call:
    """One forward, and what its backwards need."""

    group: Group
    number: int
    writer: ringattn.Writer
    options: dict[str, Any]
    residual: _default.ResidualMode  #: "off" without a gradient

    def place(self, kind: str, *numbers: int) -> dict[str, Any]:
        """Returns the options that make a request one of this writer."""
        return {"writer": self.writer, "request_id": self.group.id_of(kind, self.number, *numbers)}


class _Gradients(torch.autograd.Function):
    """The backward, as a function that has no derivative."""

    @staticmethod
    def forward(ctx: Any, call: _Call, bias_gradient: bool, dout: Tensor, dlse: Tensor | None, handle: Tensor,
                *saved: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        residual = _handle(handle)
        kept = _keeper.find(residual)
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        earlier = call.group.begin_backward(call.number, is_last=not keeps_graph)
        options = default_options() | call.place("backward", earlier)
        options.pop("key_splits", None)  # applies to the forward only
        if call.residual == "remote":
            if kept is None:
                raise _gone(residual)
            # The plan is the forward's, even if the default options have changed.
            options = {name: value for name, value in options.items() if name not in PLAN_NAMES}
            result = default_client().backward(dout, residual=kept, keep_residual=keeps_graph, dlse=dlse, **options)
        else:
            q, k, v, bias, out, lse = saved
            if kept is not None:
                options |= {"residual": residual, "keep_residual": keeps_graph}
            result = default_client().backward(dout, q, k, v, out=out, lse=lse, dlse=dlse, bias=bias,
                                               bias_gradient=bias_gradient, **options, **call.options)
        if not keeps_graph or result.report.residual_failure:
            _keeper.forget(residual)
        return result.dq, result.dk, result.dv, result.dbias

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("double backward: gradients of ringattn's gradients are not supported")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        client = default_client()
        options = default_options() | call.options | call.place("forward")
        if call.residual != "off":
            options |= {"retain": True, "bias_gradient": ctx.needs_input_grad[4]}
        result = client.forward(q, k, v, bias=bias, **options)
        handle = _kept(client, result.report, call.residual)
        ctx.call, ctx.like = call, result.out.new_empty(()).expand(result.out.shape)  # takes no memory
        ctx.save_for_backward(handle, *(() if call.residual == "remote" else (q, k, v, bias, result.out, result.lse)))
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None, None
        if dout is None:
            dout = torch.zeros_like(ctx.like, memory_format=torch.contiguous_format)
        dlse = None if dlse is None else dlse.contiguous()
        return None, *_Gradients.apply(ctx.call, ctx.needs_input_grad[4], dout.contiguous(), dlse, *ctx.saved_tensors)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, shard_of: Callable[[Group, Tensor, Tensor], Shard],
            group: Callable[[], Group], dropout_seed: int | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    members = group()
    shard = shard_of(members, q, k)
    if options["dropout_p"] != 0.0:
        options["dropout_seed"] = (seed_for(members) if dropout_seed is None
                                   else whole_number(dropout_seed, "dropout_seed"))
    if options["alibi_slopes"] is not None:  # a copy, which the caller cannot change before the backward
        options["alibi_slopes"] = options["alibi_slopes"].detach().float().cpu().clone()
    options |= {"cu_seqlens_q": shard.cu_seqlens_q, "cu_seqlens_k": shard.cu_seqlens_k}
    if members.world_size == 1:
        return attention(q, k, v, bias=bias, **options)
    tensors = [None if tensor is None else tensor.contiguous() for tensor in _autocast(q, k, v, bias)]
    tokens_q, tokens_k = (members.world_size * tensor.shape[-3] for tensor in (q, k))
    writer = ringattn.Writer(members.rank, members.world_size, q=shard.q, kv=shard.kv, seq_len_q=tokens_q,
                             seq_len_kv=tokens_k)
    differentiated = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    mode = _default.residual_mode if torch.is_grad_enabled() and differentiated else "off"
    return _Attention.apply(_Call(members, members.begin_forward(), writer, options, mode), *tensors)


# Traced programs are interrupted here. The import of torch._dynamo, two seconds, is left to programs that compile.
_attend_outside_of_graphs = torch._disable_dynamo(_attend)


def sharded_attention(q: Tensor, k: Tensor, v: Tensor, *, shard_of: Callable[[Group, Tensor, Tensor], Shard],
                      group: Callable[[], Group], dropout_p: float, softmax_scale: float | None, causal: bool,
                      window_size: tuple[int, int], softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
                      dropout_seed: int | None, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over the whole sequence, of which this process has a shard. A collective of the group.

    q: [batch, tokens, heads, head_dim], or packed [tokens, heads, head_dim]; k and v: as q, with their own numbers of
    tokens and heads. They are this process's rows.

    Args:
        shard_of: returns the shard for the group and the tensors q and k.
        group: returns the group; called outside of traced programs.
        dropout_seed: equal on all ranks; None: the first rank draws one, which costs a broadcast.
        bias: [batch or 1, heads or 1, queries of this process, keys of the whole sequence]; differentiable.
        Others: see `ringattn.flash_attn_func`. They must be equal on all ranks.

    Returns:
        this process's rows of out; and of lse, fp32 [batch, heads, tokens] or packed [heads, tokens].
    """
    _check_tensors({"q": q, "k": k, "v": v, "bias": bias}, {"alibi_slopes": alibi_slopes})
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is None:
            raise TypeError(f"{name}: is missing")
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap), ("dropout_p", dropout_p)):
        _check_not_differentiated(name, value)
    left, right = window_pair(window_size, "window_size")
    options: dict[str, Any] = {
        "dropout_p": number(dropout_p, "dropout_p"), "causal": bool(causal), "softcap": number(softcap, "softcap"),
        "softmax_scale": None if softmax_scale is None else number(softmax_scale, "softmax_scale"),
        "window": None if (left, right) == (-1, -1) else (left, right), "alibi_slopes": alibi_slopes,
        "deterministic": bool(deterministic)}
    attend = _attend_outside_of_graphs if torch.compiler.is_compiling() else _attend
    return attend(q, k, v, bias, shard_of, group, dropout_seed, options)


def check_axes(q: Tensor, k: Tensor, axes: str) -> None:
    """Raises InvalidArgumentError unless q and k have these axes. Others' checks follow from theirs."""
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != len(axes.split(",")):
            raise invalid(name, f"has the shape {list(tensor.shape)}; must be [{axes}]")
