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

    def header(self) -> dict[str, Any]:
        """The message Writer (attention.proto)."""
        return {"index": whole_number(self.index, "writer.index"), "count": whole_number(self.count, "writer.count"),
                "q": self._spans("q"), "kv": self._spans("kv")}

    def rows(self, axis: str) -> int:
        """Number of rows of axis "q" or "kv"."""
        return sum(span["count"] for span in self._spans(axis))

    def _spans(self, axis: str) -> list[dict[str, int]]:
        spans = []
        for index, span in enumerate(getattr(self, axis)):
            field = f"writer.{axis}[{index}]"
            numbers = [whole_number(number, field) for number in span]
            if len(numbers) not in (2, 3):
                raise invalid(field, f"is {tuple(span)!r}; must be (begin, count) or (begin, count, stride)")
            begin, count, stride = (*numbers, 1)[:3]
            if begin < 0 or count < 1 or stride < 1:
                raise invalid(field, f"is {tuple(span)!r}; begin must be at least 0, count and stride at least 1")
            spans.append({"begin": begin, "count": count, "stride": stride})
        return spans
