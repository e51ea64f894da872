"""What a forward left with the workers, and how it is let go of when nobody can ask for it any more."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringattn._errors import RingattnError

# For all of them together, when the interpreter ends.
_EXIT_SECONDS = 2.0


@dataclass(frozen=True)
class Residual:
    """q, k, v, out and lse of one forward, kept by the workers (`forward(..., retain=...)`).

    `Client.backward(dout, residual=...)` reads it and sends dout alone. A backward that succeeds uses it up, unless it
    has `keep_residual`.
    """

    handle: str  #: a capability: whoever has it can read the gradients
    header: Mapping[str, Any] = field(repr=False)  #: the forward's request
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)  #: of q, k, v, out, lse, and bias where there is one
    dtypes: Mapping[str, str] = field(repr=False)  #: of "q", "out" and "bias"
    library: Any = field(repr=False)  #: what gradients are made of


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


class Keeper:
    """Residuals that belong to something: deleted, by a thread of its own, when that is gone. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Residual, Any, weakref.finalize]] = {}
        # Owners die in the middle of anything: a SimpleQueue takes that.
        self._dropped: queue.SimpleQueue[str] = queue.SimpleQueue()
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
        """One that is kept."""
        with self._lock:
            kept = self._kept.get(handle)
        return kept[0] if kept else None

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

    def _delete(self, handle: str, deadline: float) -> None:
        with self._lock:
            kept = self._kept.pop(handle, None)
        if kept is None:
            return
        _release(kept[1], handle)
        try:
            kept[1].delete_residual(handle, deadline=deadline)
        except (RingattnError, RuntimeError):
            pass  # its time passes without us, too

    def _delete_dropped(self) -> None:
        while True:
            self._delete(self._dropped.get(), 5.0)

    def _delete_all(self) -> None:
        if self._process != os.getpid():
            return
        end = time.monotonic() + _EXIT_SECONDS
        with self._lock:
            handles = list(self._kept)
        for handle in handles:
            if (left := end - time.monotonic()) <= 0:
                return
            self._delete(handle, left)
