"""ringattn.nnscaler's functions as operators of nnscaler's graphs, which nnscaler partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _annotation(sequence: str) -> Callable[..., str]:
    """Returns nnscaler's annotation of a function. `sequence`: the axes before the heads."""
    def annotate(query: Any, key: Any, value: Any, *more: Any, **_: Any) -> str:
        heads, kv_heads = query.shape[-2], key.shape[-2]
        of_q, of_kv = ("h", "h") if heads == kv_heads else (f"(g {heads // kv_heads})", "g")
        offsets = ", e^" * sum(tensor is not None for tensor in more[:2]) if sequence == "l" else ""
        return f"{sequence} {of_q} d^, {sequence} {of_kv} d^, {sequence} {of_kv} v^{offsets} -> {sequence} {of_q} v^"

    return annotate


def _emitter(sequence_axis: int) -> Callable[..., str]:
    """Returns nnscaler's code generator of a function: the process group follows from the partitioned axis of q."""
    def emit(node: Any, args: list[str], kwargs: dict[str, str], runtime_devid: int, plan_ndevs: int,
             runtime_ndevs: int) -> str:
        part = node.inputs()[0]
        cuts = {axis: whole // size for axis, (size, whole) in enumerate(zip(part.shape, part.parent.shape))
                if size != whole}
        ranks = None
        if sequence_axis in cuts:
            if cuts != {sequence_axis: plan_ndevs}:
                raise ValueError(f"{node.signature}: q is partitioned into {cuts} (axis: pieces); the sequence must be "
                                 f"partitioned alone, into {plan_ndevs} pieces, one for each device")
            first = runtime_devid // plan_ndevs * plan_ndevs
            ranks = list(range(first, first + plan_ndevs))
        keywords = kwargs | {"process_group": repr(ranks)}
        return f"{node.signature}({', '.join([*args, *(f'{name}={value}' for name, value in keywords.items())])})"

    return emit


def register(dense: list[Callable[..., Any]], packed: list[Callable[..., Any]]) -> None:
    """Registers functions of [batch, tokens, heads, head_dim], and of [tokens, heads, head_dim] with cu_seqlens."""
    from nnscaler.graph.parser.register import register_op

    for functions, sequence, axis in ((dense, "b l", 1), (packed, "l", 0)):
        for function in functions:
            register_op(_annotation(sequence), emit_fn=_emitter(axis))(function)
