"""Writers: several processes that share one request, each with its own rows of the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ringattn._arguments import whole_number
from ringattn._errors import invalid

#: (first token, number of tokens, stride), or (first token, number of tokens).
TokenSpan = Sequence[int]


@dataclass(frozen=True)
class Writer:
    """This process among those that make one call together, the ranks of a training job for example.

    All of them make the call with the same `request_id`, which must be unguessable if clients are not authenticated,
    and with equal options. Each passes its own rows of the tensors and receives its own rows of the results. Tensors
    without a token axis (sinks) are equal in all calls. cu_seqlens, documents and dropout_origin are those of the whole
    request. A bias or mask has this process's queries and all keys.

    The calls return when all results are complete, or raise the same error in all processes (docs/python.md). The relay
    is not available.
    """

    index: int  #: of this process
    count: int  #: of processes
    #: The tokens of this process's rows, in the order of the rows. If one stride is above 1, all spans of all processes
    #: have it and begin below it.
    q: Iterable[TokenSpan]
    kv: Iterable[TokenSpan]
    seq_len_q: int  #: of the whole request; the sum over documents when packed
    seq_len_kv: int

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError for spans that are not spans, and for numbers that are not whole."""
        for name in ("index", "count", "seq_len_q", "seq_len_kv"):
            object.__setattr__(self, name, whole_number(getattr(self, name), f"writer.{name}"))
        for axis in ("q", "kv"):
            object.__setattr__(self, axis, _spans(getattr(self, axis), f"writer.{axis}"))

    def header(self) -> dict[str, Any]:
        """The message Writer (attention.proto)."""
        spans = {axis: [dict(zip(("begin", "count", "stride"), span)) for span in getattr(self, axis)]
                 for axis in ("q", "kv")}
        return {"index": self.index, "count": self.count, **spans}

    def rows(self, axis: str) -> int:
        """Number of rows of axis "q" or "kv"."""
        return sum(span[1] for span in getattr(self, axis))


def _spans(spans: Any, field: str) -> tuple[tuple[int, int, int], ...]:
    """Returns (begin, count, stride) of each span."""
    try:
        given = [tuple(span) for span in spans]
    except TypeError:
        raise invalid(field, f"is {spans!r}; must be a sequence of (begin, count) or (begin, count, stride)") from None
    checked = []
    for index, span in enumerate(given):
        name = f"{field}[{index}]"
        if len(span) not in (2, 3):
            raise invalid(name, f"is {span!r}; must be (begin, count) or (begin, count, stride)")
        begin, count, stride = (*(whole_number(number, name) for number in span), 1)[:3]
        if begin < 0 or count < 1 or stride < 1:
            raise invalid(name, f"is {span!r}; begin must be at least 0, count and stride at least 1")
        checked.append((begin, count, stride))
    return tuple(checked)
