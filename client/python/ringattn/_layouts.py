"""Tokens of a whole sequence that one rank of a process group has, in the layouts of libraries for sharded attention.

A span is (begin, count, stride): `count` tokens from `begin` on, each `stride` after the one before. A rank's rows are in
the order of its spans. Every rank has the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringattn._errors import invalid

Span = tuple[int, int, int]
#: (rank, world_size, tokens of the rank, name of the tensor for errors) to the spans of one sequence.
Layout = Callable[[int, int, int, str], list[Span]]


def contiguous(rank: int, world_size: int, tokens: int, name: str) -> list[Span]:
    """Rank r has the r-th of world_size pieces."""
    return [(rank * tokens, tokens, 1)] if tokens else []


def zigzag(rank: int, world_size: int, tokens: int, name: str) -> list[Span]:
    """Rank r has the pieces r and 2 * world_size - 1 - r of 2 * world_size.

    Raises:
        InvalidArgumentError: the number of tokens is odd.
    """
    if tokens % 2:
        raise invalid(name, f"has {tokens} tokens of a sequence on each rank; zigzag needs an even number")
    piece = tokens // 2
    return [(index * piece, piece, 1) for index in (rank, 2 * world_size - 1 - rank)] if piece else []


def striped(rank: int, world_size: int, tokens: int, name: str) -> list[Span]:
    """Rank r has the tokens r, r + world_size, r + 2 * world_size and so on."""
    return [(rank, tokens, world_size)] if tokens else []


def packed(layout: Layout, rank: int, world_size: int, offsets: Sequence[int], name: str) -> list[Span]:
    """The spans of packed documents, each of which is sharded by `layout`.

    Args:
        offsets: the first token of each document among the rank's tokens, then the end of the last.
    """
    return [(begin * world_size + first, count, stride)
            for begin, end in zip(offsets, offsets[1:])
            for first, count, stride in layout(rank, world_size, end - begin, name)]
