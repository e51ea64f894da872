"""The shards of an axis of `jax.shard_map` as the writers of one request.

All shards of one execution need an equal request id that no other execution has. Each shard calls `draw`. The first
one draws random bytes and the others return zeros, so the sum over the axis gives the bytes to all. XLA runs this sum
once for each execution and for each group of shards that differ in the axis only.

The devices of one program run the callbacks in different threads, so that all writers of a request can join. XLA ends
the process if a device misses a collective. A call that fails on one device therefore fails on all devices of its
process. With jax.distributed, the service ends the call on the other processes.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ringattn._errors import invalid
from ringattn._writer import Writer

TICKET_WORDS = 4  #: uint32 numbers of one ticket, the random bytes that the shards share
_MAX_WRITERS = 64  # of one request
# Tickets whose uses are counted, and calls whose outcome not all shards have reported.
_MAX_KEPT = 4096


@dataclass(frozen=True)
class Axis:
    """An axis of a shard_map. Shard r has piece r of the tokens of queries and keys."""

    name: str
    size: int

    def writer(self, index: int, queries: int, keys: int) -> Writer:
        """Returns the writer of one shard, which has this many rows of queries and keys."""
        def spans(rows: int) -> list[tuple[int, int]]:
            return [(index * rows, rows)] if rows else []

        return Writer(index, self.size, q=spans(queries), kv=spans(keys), seq_len_q=self.size * queries,
                      seq_len_kv=self.size * keys)


def axis_of(name: Any) -> Axis | None:
    """Returns the axis of an `axis_name`, or None if one shard has the whole sequence. Called while JAX traces.

    Raises:
        InvalidArgumentError: no enclosing shard_map has the axis, or it has too many shards.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise invalid("axis_name", f"is {name!r}; must be the name of one axis")
    if name not in jax.sharding.get_abstract_mesh().manual_axes:
        raise invalid("axis_name", f"is {name!r}; must be an axis of an enclosing jax.shard_map, in its axis_names")
    size = jax.lax.axis_size(name)
    if size > _MAX_WRITERS:
        raise invalid("axis_name", f"has {size} shards; a request has at most {_MAX_WRITERS} writers")
    return None if size == 1 else Axis(name, size)


def draw(index: np.ndarray, leading: tuple[int, ...]) -> np.ndarray:
    """Returns this shard's summand of the tickets: [*leading, TICKET_WORDS] uint32."""
    tickets = np.zeros((*leading, TICKET_WORDS), np.uint32)
    if not index.any():  # the first shard; vmap does not change the index
        tickets[...] = np.frombuffer(secrets.token_bytes(tickets.nbytes), np.uint32).reshape(tickets.shape)
    return tickets


@dataclass
class _Outcome:
    """How a call ended on this process's shards."""

    joined: int = 0
    ended: int = 0
    failure: str = ""


_changed = threading.Condition()
_uses: OrderedDict[tuple[bytes, str], dict[int, int]] = OrderedDict()
_outcomes: OrderedDict[str, _Outcome] = OrderedDict()


def _request_id(ticket: bytes, what: str, index: int) -> str:
    """Returns the id of a shard's next call with this ticket.

    XLA may compute the ticket of equal calls with equal operands once. Each shard then numbers these calls.
    """
    with _changed:
        uses = _uses.setdefault((ticket, what), {})
        _uses.move_to_end((ticket, what))
        uses[index] = number = uses.get(index, 0) + 1
        if len(_uses) > _MAX_KEPT:
            _uses.popitem(last=False)
    return hashlib.blake2b(f"{what} {number}".encode(), key=ticket, digest_size=16).hexdigest()


def _join(request_id: str) -> _Outcome:
    """Counts a shard that is about to make the call."""
    with _changed:
        outcome = _outcomes.setdefault(request_id, _Outcome())
        outcome.joined += 1
        if len(_outcomes) > _MAX_KEPT:
            _outcomes.popitem(last=False)
        return outcome


def _report(request_id: str, outcome: _Outcome, failure: str) -> str:
    """Waits until the call has succeeded on all shards of this process or failed on one. Returns a failure, or "".

    A call succeeds on a shard after all shards have joined it. So `joined` is then their number in this process, and
    a shard without a failure waits only for calls that the service has completed, which end by its limits.
    """
    with _changed:
        outcome.ended += 1
        outcome.failure = outcome.failure or failure
        if outcome.ended == outcome.joined:
            _outcomes.pop(request_id, None)
        _changed.notify_all()
        _changed.wait_for(lambda: outcome.ended == outcome.joined or outcome.failure)
        return outcome.failure


def call_together(axis: Axis, ticket: np.ndarray, what: str, index: int, call: Callable[[str], Any]) -> Any:
    """Returns call(request id), made by all shards of the axis. It raises an error on all shards of a process or on none.

    what: identifies what is computed among the calls of one ticket; equal on all shards.
    """
    request_id = _request_id(ticket.tobytes(), what, index)
    outcome = _join(request_id)
    try:
        result = call(request_id)
    except BaseException as error:
        _report(request_id, outcome, f"{type(error).__name__}: {error}")
        raise
    if failure := _report(request_id, outcome, ""):
        raise RuntimeError(f"the call failed on another shard of axis {axis.name!r}: {failure}")
    return result
