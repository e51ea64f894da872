"""Residuals: a forward's state on the workers, deleted when its owner in this process is gone."""

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

# Time to delete residuals at exit, for all together.
_EXIT_SECONDS = 2.0
# Number of handles that a Keeper remembers after their owners are gone.
_MAX_REMEMBERED = 4096


@dataclass(frozen=True)
class Residual:
    """q, k, v, out and lse of one forward, kept by the workers (`forward(..., retain=...)`).

    `Client.backward(dout, residual=...)` reads it and sends only dout. A successful backward consumes it, unless it has
    `keep_residual`.
    """

    handle: str  #: a capability: every holder can compute the gradients
    header: Mapping[str, Any] = field(repr=False)  #: the forward's request
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)  #: shapes of q, k, v, out, lse and, if given, bias
    dtypes: Mapping[str, str] = field(repr=False)  #: types of "q", "out" and "bias"
    library: Any = field(repr=False)  #: creates the gradients
    tail: Any = field(default=None, repr=False)  #: tokens that the forward did not send (_tail.Tail)


def handle_of(residual: Residual | str) -> str:
    """Returns the handle of a `residual` argument."""
    handle = residual.handle if isinstance(residual, Residual) else residual
    if not isinstance(handle, str) or not handle:
        raise TypeError(f"residual: is {residual!r}; must be forward(..., retain=...).report.residual or its handle")
    return handle


def _release(client: Any, handle: str) -> None:
    try:
        client.release_residuals([handle])
    except RuntimeError:
        pass  # the client is closed


def _delete(client: Any, handle: str, deadline: float) -> None:
    with contextlib.suppress(RingattnError, RuntimeError):  # otherwise it expires
        client.delete_residual(handle, deadline=deadline)


class Keeper:
    """Residuals with owners in this process. A thread deletes a residual when its owner is gone. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Residual, Any, weakref.finalize]] = {}
        # Finalizers of owners may run at any time; a SimpleQueue is reentrant.
        self._dropped: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._remembered: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._process: int | None = None

    def keep(self, owner: Any, client: Any, residual: Residual) -> None:
        """Holds the residual until `owner` is gone or `forget` is called."""
        finalizer = weakref.finalize(owner, self._dropped.put, residual.handle)
        finalizer.atexit = False
        # The backward may come later than the service's default lifetime.
        client.hold_residuals([residual])
        with self._lock:
            self._kept[residual.handle] = (residual, client, finalizer)
            if self._process == os.getpid():
                return
            self._process = os.getpid()
        threading.Thread(target=self._delete_dropped, name="ringattn-residuals", daemon=True).start()
        atexit.register(self._delete_all)

    def find(self, handle: str) -> Residual | None:
        """Returns the residual if it is kept and its owner is alive."""
        with self._lock:
            kept = self._kept.get(handle)
        return kept[0] if kept and kept[2].alive else None

    def was_dropped(self, handle: str) -> bool:
        """Whether the owner was destroyed before a backward used the residual."""
        with self._lock:
            kept = self._kept.get(handle)
            return handle in self._remembered or (kept is not None and not kept[2].alive)

    def forget(self, handle: str) -> None:
        """Stops keeping a residual that was consumed or lost."""
        with self._lock:
            kept = self._kept.pop(handle, None)
        if kept is not None:
            kept[2].detach()
            _release(kept[1], handle)

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    def _release_kept(self, handle: str) -> Any:
        """Stops holding the residual, which then expires. Returns its client, or None if it is not kept."""
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
        """Waits for dropped residuals and returns all of them with their clients. None of them is held any more, so they
        expire within a minute even if the service answers slowly."""
        handles = [self._dropped.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                handles.append(self._dropped.get_nowait())
        return [(handle, client) for handle in handles if (client := self._release_kept(handle)) is not None]

    def _delete_dropped(self) -> None:
        while True:
            try:
                dropped = self._take_dropped()
                while dropped:
                    handle, client = dropped.pop(0)
                    _delete(client, handle, 5.0)
                    del client  # may be the last reference, which closes the connection
            except Exception as error:  # the thread must continue, or later residuals would not be deleted
                warnings.warn(f"residuals could not be deleted and will expire: {error!r}", RuntimeWarning, stacklevel=1)

    def _delete_all(self) -> None:
        if self._process != os.getpid():
            return
        end = time.monotonic() + _EXIT_SECONDS
        with self._lock:
            handles = list(self._kept)
        for handle in handles:
            if (left := end - time.monotonic()) <= 0:
                return
            if (client := self._release_kept(handle)) is not None:
                _delete(client, handle, left)
