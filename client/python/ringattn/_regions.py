"""Memory that a client shares with the workers of its machine, and allocators of arrays and tensors in it.

A `Region` is one piece of shared memory. An `Arena` creates regions when they are needed. An allocation ends with the
last array, tensor or view of it; then its bytes are reused.
"""

from __future__ import annotations

import bisect
import collections
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringattn import _core
from ringattn._arguments import sizes_of
from ringattn._arrays import tensor_in
from ringattn._dtypes import numpy_dtype, service_dtype
from ringattn._errors import OfOneProcess, error_of

_ALIGNMENT = 64
_MIN_REGION_BYTES = 64 << 20
# A region without allocations is released after this time.
_IDLE_SECONDS = 20.0


class _Block:
    """An allocation in a region, which lasts as long as this object. numpy's arrays of it keep it alive."""

    __slots__ = ("__array_interface__", "__weakref__", "_region")

    def __init__(self, region: Region, offset: int, nbytes: int) -> None:
        self._region = region
        self.__array_interface__ = {"data": (region.address + offset, False), "shape": (nbytes,), "typestr": "|u1",
                                    "version": 3}


class Region(OfOneProcess):
    """Memory that this client shares with the workers of its machine, created by `Client.region`.

    `empty` allocates in it. If all tensors of a call are in regions, workers copy them directly, and the client neither
    copies nor sends them. `workers` lists the workers that share the region. Without any (another machine, a service
    without `--local_memory`) it is ordinary memory, and `trouble` states why. Thread safe. A child of fork() does not
    have the memory.
    """

    def __init__(self, core: _core.Region) -> None:
        self._core = core
        self.address: int = core.address
        self.nbytes: int = core.nbytes
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # (offset, size), by offset, never adjacent
        # Finalizers of blocks may run at any time, also inside this class.
        self._given_back: collections.deque[tuple[int, int]] = collections.deque()
        self._idle_since = time.monotonic()
        self._process = os.getpid()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"shared with {len(self.workers)} workers"
        return f"<ringattn.Region of {self.nbytes} bytes, {state}>"

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def workers(self) -> list[str]:
        """The workers that share the region. A restarted worker attaches it again within seconds."""
        return self._core.workers

    @property
    def trouble(self) -> str:
        """Why some workers do not share the region; empty if no reason is known."""
        return self._core.trouble

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._core.closed

    def close(self) -> None:
        """Stops sharing. Calls that use the region end with CANCELLED. Arrays in it stay valid. Idempotent."""
        self._core.close()

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """Returns an uninitialized tensor in this region.

        The tensor is PyTorch's if `dtype` is, else a numpy array ("bfloat16" needs ml_dtypes).

        Raises:
            MemoryError: the region has not enough free bytes.
            InvalidArgumentError: the service does not support the type.
        """
        return _new(shape, dtype, self._room_or_error)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are in the region, and the region is shared."""
        return not self.closed and self.address <= address and address + nbytes <= self.address + self.nbytes

    def _room_or_error(self, nbytes: int) -> _Block:
        block = self.take(nbytes)
        if block is None:
            raise MemoryError(f"the region of {self.nbytes} bytes has no room for {nbytes} more")
        return block

    def take(self, nbytes: int) -> _Block | None:
        """Allocates `nbytes`, or returns None."""
        if os.getpid() != self._process:
            raise RuntimeError("a region cannot be used in a forked process; create one after the fork")
        wanted = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        with self._lock:
            self._collect()
            for index, (offset, size) in enumerate(self._free):
                if size < wanted:
                    continue
                if size == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (offset + wanted, size - wanted)
                block = self._block_at(offset, nbytes)
                weakref.finalize(block, self._given_back.append, (offset, wanted)).atexit = False
                return block
        return None

    def _block_at(self, offset: int, nbytes: int) -> Any:
        return _Block(self, offset, nbytes)

    def idle_seconds(self) -> float:
        """Seconds without an allocation; 0 while there is one."""
        with self._lock:
            self._collect()
            if self._free != [(0, self.nbytes)]:
                return 0.0
            return time.monotonic() - self._idle_since

    def _collect(self) -> None:
        while self._given_back:
            offset, size = self._given_back.popleft()
            index = bisect.bisect(self._free, (offset, size))
            if index < len(self._free) and self._free[index][0] == offset + size:
                size += self._free.pop(index)[1]
            if index > 0 and sum(self._free[index - 1]) == offset:
                offset, before = self._free.pop(index - 1)
                size += before
                index -= 1
            self._free.insert(index, (offset, size))
            self._idle_since = time.monotonic()


class Arena:
    """A client's regions: its own, in which it allocates, and those that the user created."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  #: total bytes of the regions that it created
        self._lock = threading.Lock()
        self._own: list[Region] = []
        self._trimmed = time.monotonic()
        self._all: weakref.WeakSet[Region] = weakref.WeakSet()

    def make(self, core: _core.Client, nbytes: int) -> Region:
        """Creates a region, which lives until the last reference to it and to its allocations is gone."""
        if nbytes < 1:
            raise ValueError(f"nbytes: {nbytes} is not a valid size of a region")
        region, error = core.allocate_region(nbytes)
        if error is not None:
            raise error_of(error)
        made = Region(region)
        with self._lock:
            self._all.add(made)
        return made

    def hold(self, arrays: Sequence[np.ndarray]) -> bool:
        """Whether all arrays are in regions."""
        with self._lock:
            regions = list(self._all)
        return bool(regions) and all(
            array.nbytes == 0 or any(region.holds(array.ctypes.data, array.nbytes) for region in regions)
            for array in arrays)

    def take(self, core: _core.Client, nbytes: int) -> _Block | None:
        """Allocates in a separate region, created if needed. Returns None beyond the limit or without memory."""
        for region in self._kept():
            if (block := region.take(nbytes)) is not None:
                return block
        with self._lock:
            room = self.limit - sum(region.nbytes for region in self._own)
        size = max(nbytes + _ALIGNMENT, min(_MIN_REGION_BYTES, room))
        if size > room:
            return None
        region, error = core.allocate_region(size)
        if error is not None:
            return None
        made = Region(region)
        block = made.take(nbytes)
        with self._lock:
            self._all.add(made)
            self._own.append(made)
        return block

    def _kept(self) -> list[Region]:
        """Releases its own regions that have been idle, and returns the others."""
        now = time.monotonic()
        with self._lock:
            if now - self._trimmed > _IDLE_SECONDS / 4:
                self._trimmed = now
                self._own = [region for region in self._own if region.idle_seconds() < _IDLE_SECONDS]
            return list(self._own)

    def empty(self, core: _core.Client, shape: int | Sequence[int], dtype: Any) -> Any:
        """`Region.empty` in a separate region. Raises MemoryError beyond the limit."""
        def room(nbytes: int) -> _Block:
            block = self.take(core, nbytes)
            if block is None:
                raise MemoryError(f"no room for {nbytes} bytes in regions (region_bytes={self.limit}, or no memory)")
            return block

        return _new(shape, dtype, room)


def _new(shape: int | Sequence[int], dtype: Any, room: Any) -> Any:
    sizes = sizes_of(shape)
    torch = sys.modules.get("torch")
    of_torch = torch is not None and isinstance(dtype, torch.dtype)
    name = service_dtype(dtype)
    block = room(math.prod(sizes) * numpy_dtype(name).itemsize)
    if name == "uint8" and not of_torch and np.dtype(dtype) == np.bool_:
        name = "bool"
    return tensor_in(np.asarray(block), sizes, dtype if of_torch else name)
