"""Residuals: a forward's state with the workers, and its deletion when no code can refer to it any longer."""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringattn._errors import RingattnError

# For all of them together, when the interpreter ends.
_EXIT_SECONDS = 2.0
# Handles that a Keeper remembers after their owners are gone.
_MAX_REMEMBERED = 4096


@dataclass(frozen=True)
class Residual:
    """q, k, v, out and lse of one forward, kept by the workers (`forward(..., retain=...)`).

    `Client.backward(dout, residual=...)` reads it and sends dout alone. A backward that succeeds uses it up, unless it
    has `keep_residual`.
    """

    handle: str  #: a capability: every holder can read the gradients
    header: Mapping[str, Any] = field(repr=False)  #: the forward's request
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)  #: of q, k, v, out, lse, and bias where there is one
    dtypes: Mapping[str, str] = field(repr=False)  #: of "q", "out" and "bias"
    library: Any = field(repr=False)  #: what gradients are made of
    tail: Any = field(default=None, repr=False)  #: tokens of the forward's tensors that were not sent (_tail.Tail)


def handle_of(residual: Residual | str) -> str:
    """Of what users give for a residual."""
    handle = residual.handle if isinstance(residual, Residual) else residual
    if not isinstance(handle, str) or not handle:
        raise TypeError(f"residual: {residual!r} is none: take forward(..., retain=...).report.residual")
    return handle


def _release(client: Any, handle: str) -> None:
    try:
        client.release_residuals([handle])
    except RuntimeError:
        pass  # the client is closed


def _delete(client: Any, handle: str, deadline: float) -> None:
    with contextlib.suppress(RingattnError, RuntimeError):  # its time passes without us, too
        client.delete_residual(handle, deadline=deadline)


class Keeper:
    """Residuals that belong to an owner: a thread deletes them when the owner is gone. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Residual, Any, weakref.finalize]] = {}
        # Owners die in the middle of anything: a SimpleQueue takes that.
        self._dropped: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._remembered: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._process: int | None = None

    def keep(self, owner: Any, client: Any, residual: Residual) -> None:
        """Until `owner` is gone, or `forget`."""
        finalizer = weakref.finalize(owner, self._dropped.put, residual.handle)
        finalizer.atexit = False
        # However long until the backward: not only for the time that the service thinks right.
        client.hold_residuals([residual])
        with self._lock:
            self._kept[residual.handle] = (residual, client, finalizer)
            if self._process == os.getpid():
                return
            self._process = os.getpid()
        threading.Thread(target=self._delete_dropped, name="ringattn-residuals", daemon=True).start()
        atexit.register(self._delete_all)

    def find(self, handle: str) -> Residual | None:
        """One that is kept, and whose owner lives."""
        with self._lock:
            kept = self._kept.get(handle)
        return kept[0] if kept and kept[2].alive else None

    def was_dropped(self, handle: str) -> bool:
        """Whether its owner went before anybody used it."""
        with self._lock:
            kept = self._kept.get(handle)
            return handle in self._remembered or (kept is not None and not kept[2].alive)

    def forget(self, handle: str) -> None:
        """It is used up, or gone."""
        with self._lock:
            kept = self._kept.pop(handle, None)
        if kept is not None:
            kept[2].detach()
            _release(kept[1], handle)

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    def _let_go(self, handle: str) -> Any:
        """Its client, unless it is gone already; from now on nothing but its time keeps it."""
        with self._lock:
            kept = self._kept.pop(handle, None)
            if kept is None:
                return None
            self._remembered[handle] = None
            if len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        _release(kept[1], handle)
        return kept[1]

    def _take_dropped(self) -> list[tuple[str, Any]]:
        """Waits for one. All there are, each with its client: a service that answers late keeps none but the one that
        it is asked to delete for longer than a minute."""
        handles = [self._dropped.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                handles.append(self._dropped.get_nowait())
        return [(handle, client) for handle in handles if (client := self._let_go(handle)) is not None]

    def _delete_dropped(self) -> None:
        while True:
            try:
                dropped = self._take_dropped()
                while dropped:
                    handle, client = dropped.pop(0)
                    _delete(client, handle, 5.0)
                    del client  # the last reference may be this one, which ends its connection
            except Exception as error:  # a thread that ends would keep all that is dropped from now on
                warnings.warn(f"residuals are left to their time: {error!r}", RuntimeWarning, stacklevel=1)

    def _delete_all(self) -> None:
        if self._process != os.getpid():
            return
        end = time.monotonic() + _EXIT_SECONDS
        with self._lock:
            handles = list(self._kept)
        for handle in handles:
            if (left := end - time.monotonic()) <= 0:
                return
            if (client := self._let_go(handle)) is not None:
                _delete(client, handle, left)
