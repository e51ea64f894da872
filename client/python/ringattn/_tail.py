"""Tokens after the last packed document: `cu_seqlens[-1]` may be less than the number of tokens.

Buffers of a fixed size (torch.compile, CUDA graphs) end with padding. These tokens are not sent. Their outputs and
gradients are 0, and their lse is -inf, as for a query without keys.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringattn import _cuda
from ringattn._errors import invalid

# The axis of the tokens, of tensors of queries and of keys. lse [heads, tokens] has it unless it is per document.
_OF_QUERIES = {"q": 0, "qkv": 0, "out": 0, "dout": 0, "dq": 0, "dqkv": 0, "q_segment_ids": 0, "lse": 1, "dlse": 1,
               "bias": 2, "mask": 2, "dbias": 2}
_OF_KEYS = {"k": 0, "v": 0, "kv": 0, "dk": 0, "dv": 0, "dkv": 0, "kv_segment_ids": 0}
_FILL = {"lse": -math.inf}


@dataclass(frozen=True)
class Tail:
    """Where the documents of a call end, and where its tensors do."""

    used_q: int  #: cu_seqlens_q[-1]
    total_q: int  #: tokens of q
    used_k: int
    total_k: int
    lse_has_tokens: bool  #: False: lse is per document

    def _place(self, name: str) -> tuple[int, int, int]:
        """(axis, used, total) of a tensor; an axis of -1: it has no tail."""
        if name in ("lse", "dlse") and not self.lse_has_tokens:
            return -1, 0, 0
        if name in _OF_QUERIES and self.used_q < self.total_q:
            return _OF_QUERIES[name], self.used_q, self.total_q
        if name in _OF_KEYS and self.used_k < self.total_k:
            return _OF_KEYS[name], self.used_k, self.total_k
        return -1, 0, 0

    def cut(self, name: str, value: Any) -> Any:
        """An input without its tail. An input of another length is returned as it is, for later checks."""
        axis, used, total = self._place(name)
        shape = getattr(value, "shape", ())
        if axis < 0 or len(shape) <= axis or shape[axis] != total:
            return value
        return value[(slice(None),) * axis + (slice(used),)]

    def fill(self, name: str, tensor: Any) -> Any:
        """A result with its tail."""
        axis, used, total = self._place(name)
        if axis < 0:
            return tensor
        shape = (*tensor.shape[:axis], total, *tensor.shape[axis + 1:])
        if isinstance(tensor, np.ndarray):
            whole = np.full(shape, _FILL.get(name, 0), tensor.dtype)
        else:
            whole = tensor.new_full(shape, _FILL.get(name, 0))
        whole[(slice(None),) * axis + (slice(used),)] = tensor
        return whole


def tail_of(tensors: Mapping[str, Any], cu_q: list[int] | None, cu_k: list[int] | None,
            lse_format: str | None) -> Tail | None:
    """The tail of a call's q, k, v, qkv and kv; None: there is none.

    Raises:
        InvalidArgumentError: cu_seqlens are no rising sequence from 0 to at most the number of tokens.
    """
    if cu_q is None or cu_k is None:
        return None
    first, last = next(iter(tensors)), next(reversed(tensors))
    totals = [getattr(tensors[name], "shape", ()) for name in (first, last)]
    if not all(totals):
        return None  # no array, which is an error later
    total_q, total_k = (shape[0] for shape in totals)
    for name, cu, total, of in (("cu_seqlens_q", cu_q, total_q, first), ("cu_seqlens_k", cu_k, total_k, last)):
        if not cu or cu[0] != 0 or any(b < a for a, b in zip(cu, cu[1:])):
            raise invalid(name, f"is {_shown(cu)}; must begin with 0 and not decrease")
        if cu[-1] > total:
            raise invalid(name, f"ends with {cu[-1]}; {of} has {total} tokens")
    tail = Tail(cu_q[-1], total_q, cu_k[-1], total_k, lse_format in (None, "flat"))
    if tail.used_q == total_q and tail.used_k == total_k:
        return None
    if "qkv" in tensors and tail.used_q != tail.used_k:
        raise invalid("cu_seqlens_k", f"ends with {tail.used_k}, cu_seqlens_q with {tail.used_q}; with qkv they must "
                                      "end with the same")
    torch = sys.modules.get("torch")
    of_torch = torch is not None and isinstance(tensors[first], torch.Tensor)
    if not of_torch and _cuda.is_cuda(tensors[first]):
        raise NotImplementedError(f"cu_seqlens_q: ends with {tail.used_q} of {total_q} tokens; on a GPU, only PyTorch's "
                                  "tensors may have more")
    return tail


def _shown(cu: list[int]) -> str:
    return str(cu) if len(cu) <= 8 else f"[{', '.join(map(str, cu[:6]))}, ..., {cu[-1]}]"
