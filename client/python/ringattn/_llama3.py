"""Packed documents of which each rank has a contiguous piece, as ring_flash_attn's llama3 functions have them.

These functions get offsets of the rank's own piece. A request needs the offsets of the whole sequence, so
`llama3_flash_attn_prepare_cu_seqlens` leaves them at the tensor that it returns. If that tensor was replaced by a copy,
the ranks gather their pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn._arguments import flag, whole_number
from ringattn._arrays import integers
from ringattn._errors import invalid
from ringattn._groups import Group
from ringattn._layouts import contiguous
from ringattn._sharded import Shard
from ringattn._torch_arguments import check_axes, check_tensor

_ATTRIBUTE = "_ringattn_piece"


@dataclass(frozen=True)
class _Piece:
    """The offsets of the whole sequence, and what one rank passes to a llama3 function."""

    whole: tuple[int, ...]
    rank: int
    world_size: int
    causal: bool
    of_q: tuple[int, ...]
    of_k: tuple[int, ...]
    keys: slice


def document_offsets(offsets: list[int], name: str) -> list[int]:
    """Returns the offsets. Raises InvalidArgumentError unless they rise from 0."""
    if not offsets or offsets[0] != 0 or any(end < begin for begin, end in zip(offsets, offsets[1:])):
        raise invalid(name, "must begin with 0 and not decrease")
    return offsets


def _prepare(cu_seqlens: Tensor, causal: bool, rank: int,
             world_size: int) -> tuple[Tensor, Tensor, int, int, slice]:
    check_tensor(cu_seqlens, "cu_seqlens")
    whole = document_offsets(integers(cu_seqlens, "cu_seqlens"), "cu_seqlens")
    causal = flag(causal, "causal")
    rank, world_size = whole_number(rank, "rank"), whole_number(world_size, "world_size")
    if not 0 <= rank < world_size:
        raise invalid("rank", f"is {rank}; must be from 0 to {world_size - 1}")
    if whole[-1] == 0 or whole[-1] % world_size:
        raise invalid("cu_seqlens", f"ends with {whole[-1]}; must be a positive multiple of the {world_size} ranks")
    tokens = whole[-1] // world_size
    begin, end = rank * tokens, (rank + 1) * tokens
    first, last = bisect_left(whole, begin), bisect_left(whole, end)
    if whole[first] > begin:
        first -= 1  # the document began on an earlier rank
    offsets = whole[first:last + 1]
    of_q = [min(max(offset, begin), end) - begin for offset in offsets]
    of_k = [(min(offset, end) if causal else offset) - offsets[0] for offset in offsets]
    keys = slice(offsets[0], offsets[0] + of_k[-1])
    cu_q, cu_k = (torch.tensor(values, dtype=cu_seqlens.dtype, device=cu_seqlens.device) for values in (of_q, of_k))
    setattr(cu_q, _ATTRIBUTE, _Piece(tuple(whole), rank, world_size, causal, tuple(of_q), tuple(of_k), keys))
    longest_q, longest_k = (max(b - a for a, b in zip(values, values[1:])) for values in (of_q, of_k))
    return cu_q, cu_k, longest_q, longest_k, keys


_prepare_outside_of_graphs = torch._disable_dynamo(_prepare)


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens: Tensor, causal: bool, rank: int,
                                         world_size: int) -> tuple[Tensor, Tensor, int, int, slice]:
    """Returns what one rank passes to the llama3 functions.

    Args:
        cu_seqlens: integers [documents + 1], the offsets of the packed documents in the whole sequence. The last must be
            a multiple of world_size.
        causal: the last document's keys end with the rank's queries.

    Returns:
        cu_seqlens_q: the offsets of the rank's queries, [documents of the rank + 1]
        cu_seqlens_k: the offsets of the keys of these documents, counted from `local_k_slice.start`
        max_seqlen_q, max_seqlen_k: the longest document by each
        local_k_slice: the tokens of the whole sequence that hold these keys

    Raises:
        InvalidArgumentError: cu_seqlens decrease, or cannot be shared equally.
    """
    prepare = _prepare_outside_of_graphs if torch.compiler.is_compiling() else _prepare
    return prepare(cu_seqlens, causal, rank, world_size)


def _gathered(group: Group, offsets: list[int], local_k_slice: slice) -> list[int]:
    """Returns the offsets of the whole sequence. A collective of the group.

    A document begins within a rank's piece, or with it. Empty documents between two ranks are not found.
    """
    tokens = offsets[-1]
    begin = group.rank * tokens
    starts = [begin + offset for offset in offsets[1:-1]]
    if local_k_slice.start == begin:
        starts.insert(0, begin)
    pieces = group.gather((tokens, starts))
    if any(of_rank != tokens for of_rank, _ in pieces):
        raise invalid("cu_seqlens_q", f"ends with {[of_rank for of_rank, _ in pieces]} on the ranks; must be equal")
    return [*(start for _, starts in pieces for start in starts), tokens * group.world_size]


def _check_piece(piece: _Piece, group: Group, offsets: list[int], cu_seqlens_k: Tensor | Sequence[int],
                 local_k_slice: slice, causal: bool) -> None:
    """Raises InvalidArgumentError unless the arguments are those that were prepared for this rank and call."""
    if (piece.rank, piece.world_size) != (group.rank, group.world_size):
        raise invalid("cu_seqlens_q", f"is of rank {piece.rank} of {piece.world_size}; this is rank {group.rank} of "
                                      f"{group.world_size}")
    if piece.causal != causal:
        raise invalid("causal", f"is {causal}; the arguments were prepared with causal={piece.causal}")
    for name, given, prepared in (("cu_seqlens_q", offsets, list(piece.of_q)),
                                  ("cu_seqlens_k", integers(cu_seqlens_k, "cu_seqlens_k"), list(piece.of_k)),
                                  ("local_k_slice", local_k_slice, piece.keys)):
        if given != prepared:
            raise invalid(name, f"is {given}; llama3_flash_attn_prepare_cu_seqlens returned {prepared}")


def shard_by(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | Sequence[int], local_k_slice: slice,
             causal: bool) -> Callable[[Group, Tensor, Tensor], Shard]:
    """Returns the shard of a llama3 function's arguments, as a function of group, q and k."""
    def shard_of(group: Group, q: Tensor, k: Tensor) -> Shard:
        offsets = document_offsets(integers(cu_seqlens_q, "cu_seqlens_q"), "cu_seqlens_q")
        if not isinstance(local_k_slice, slice) or local_k_slice.start is None:
            raise TypeError(f"local_k_slice: is {local_k_slice!r}; must be the slice that "
                            "llama3_flash_attn_prepare_cu_seqlens returns")
        for name, tensor in (("q", q), ("k", k)):
            check_axes(tensor, name, "tokens, heads, head_dim")
            if tensor.shape[0] != offsets[-1]:
                raise invalid("cu_seqlens_q", f"ends with {offsets[-1]}; {name} has {tensor.shape[0]} tokens")
        piece = getattr(cu_seqlens_q, _ATTRIBUTE, None)
        if piece is None:
            whole = _gathered(group, offsets, local_k_slice)
        else:
            _check_piece(piece, group, offsets, cu_seqlens_k, local_k_slice, bool(causal))
            whole = list(piece.whole)
        spans = contiguous(group.rank, group.world_size, offsets[-1], "q")
        return Shard(spans, spans, whole, whole)
    return shard_of
