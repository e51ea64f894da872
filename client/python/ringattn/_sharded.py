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
from ringattn import _default, _graph_calls
from ringattn._arguments import flag, number, seed_number, window_pair
from ringattn._groups import Group, seed_for
from ringattn._layouts import Span
from ringattn._torch_arguments import autocast, check_derivatives, check_tensor
from ringattn.torch_ops import attention


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
        earlier = call.group.begin_backward(call.number, is_last=not _graph_calls.graph_is_kept())
        tensors = dict(zip(("q", "k", "v", "bias", "out", "lse"), saved, strict=True)) if saved else None
        result = _graph_calls.backward(dout, dlse, handle, tensors, call.options | {"bias_gradient": bias_gradient},
                                       call.place("backward", earlier))
        return result.dq, result.dk, result.dv, result.dbias

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_graph_calls.NO_SECOND_ORDER)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        result, handle = _graph_calls.forward({"q": q, "k": k, "v": v, "bias": bias}, call.options | call.place("forward"),
                                              call.residual, ctx.needs_input_grad[4])
        ctx.call, ctx.like = call, result.out.new_empty(()).expand(result.out.shape)  # takes no memory
        ctx.save_for_backward(handle, *(() if call.residual == "remote" else (q, k, v, bias, result.out, result.lse)))
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None, None
        return None, *_Gradients.apply(ctx.call, ctx.needs_input_grad[4],
                                       *_graph_calls.gradients_of_results(dout, dlse, ctx.like), *ctx.saved_tensors)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, shard_of: Callable[[Group, Tensor, Tensor], Shard],
            group: Callable[[], Group], dropout_seed: int | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    members = group()
    # All ranks count the call and draw its seed, also if one of them then rejects its own tensors: later calls match.
    number_of_call = members.begin_forward()
    if options["dropout_p"] != 0.0:
        options["dropout_seed"] = (seed_for(members) if dropout_seed is None
                                   else seed_number(dropout_seed, "dropout_seed"))
    shard = shard_of(members, q, k)
    if options["alibi_slopes"] is not None:  # a copy, which the caller cannot change before the backward
        options["alibi_slopes"] = options["alibi_slopes"].detach().float().cpu().clone()
    options |= {"cu_seqlens_q": shard.cu_seqlens_q, "cu_seqlens_k": shard.cu_seqlens_k}
    if members.world_size == 1:
        return attention(q, k, v, bias=bias, **options)
    tensors = [None if tensor is None else tensor.contiguous() for tensor in autocast(q, k, v, bias)]
    tokens_q, tokens_k = (members.world_size * tensor.shape[-3] for tensor in (q, k))
    writer = ringattn.Writer(members.rank, members.world_size, q=shard.q, kv=shard.kv, seq_len_q=tokens_q,
                             seq_len_kv=tokens_k)
    differentiated = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    mode = _default.residual_mode if torch.is_grad_enabled() and differentiated else "off"
    return _Attention.apply(_Call(members, number_of_call, writer, options, mode), *tensors)


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
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(tensor, name)
    check_derivatives({"q": q, "k": k, "v": v, "bias": bias}, {"alibi_slopes": alibi_slopes},
                      {"softmax_scale": softmax_scale, "softcap": softcap, "dropout_p": dropout_p})
    for name, tensor in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        if tensor is not None and torch._C._functorch.is_batchedtensor(tensor):
            raise NotImplementedError(f"{name}: torch.vmap of a function that every rank calls is not supported; pass a "
                                      "batch axis")
    left, right = window_pair(window_size, "window_size")
    options: dict[str, Any] = {
        "dropout_p": number(dropout_p, "dropout_p"), "causal": flag(causal, "causal"),
        "softcap": number(softcap, "softcap"),
        "softmax_scale": None if softmax_scale is None else number(softmax_scale, "softmax_scale"),
        "window": None if (left, right) == (-1, -1) else (left, right), "alibi_slopes": alibi_slopes,
        "deterministic": flag(deterministic, "deterministic")}
    attend = _attend_outside_of_graphs if torch.compiler.is_compiling() else _attend
    return attend(q, k, v, bias, shard_of, group, dropout_seed, options)

