"""Memory that the workers of this machine read and write themselves, as an allocator of arrays and tensors.

A `Region` is one piece of such memory; an `Arena` makes them as they are needed. What is allocated in a region keeps
its memory until the last array, tensor or view of it is gone; then the place is given to somebody else.
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
from ringattn._arrays import tensor_in
from ringattn._dtypes import numpy_dtype, service_dtype
from ringattn._errors import error_of

_ALIGNMENT = 64
_MIN_REGION_BYTES = 64 << 20
# A region of which nothing was in use for so long goes back to the system.
_IDLE_SECONDS = 20.0


class _Block:
    """Some bytes of a region, for as long as this lives; numpy's arrays of it keep it."""

    __slots__ = ("__array_interface__", "__weakref__", "_region")

    def __init__(self, region: Region, offset: int, nbytes: int) -> None:
        self._region = region
        self.__array_interface__ = {"data": (region.address + offset, False), "shape": (nbytes,), "typestr": "|u1",
                                    "version": 3}


class Region:
    """Memory that lies where the workers of this machine can copy from and to, made by `Client.region`.

    `empty` allocates in it. A call whose tensors all lie in regions of its client has none of them copied or sent:
    workers take them from there. `workers` names those that have it; where none does (another machine, a service
    without `--local_memory`), it is memory like any other, and `trouble` says why. Thread safe. A child of fork()
    does not have the memory.
    """

    def __init__(self, core: _core.Region) -> None:
        self._core = core
        self.address: int = core.address
        self.nbytes: int = core.nbytes
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # (offset, size), by offset, never adjacent
        # Blocks die in the middle of anything, this class' own code included.
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
        """The workers that have it now. One that is started again gets it within seconds."""
        return self._core.workers

    @property
    def trouble(self) -> str:
        """Why some workers have not; empty: nothing is known."""
        return self._core.trouble

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._core.closed

    def close(self) -> None:
        """Has the workers let go of it; calls that use it end with CANCELLED. Arrays in it stay valid. Idempotent."""
        self._core.close()

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """An array or tensor in this region, its contents undefined.

        A PyTorch tensor for a dtype of PyTorch's, else a numpy array ("bfloat16": with ml_dtypes).

        Raises:
            MemoryError: the region has no room for it.
            InvalidArgumentError: for a type that the service has not.
        """
        return _new(shape, dtype, self._room_or_error)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes lie in it, and workers may be shown them."""
        return not self.closed and self.address <= address and address + nbytes <= self.address + self.nbytes

    def _room_or_error(self, nbytes: int) -> _Block:
        block = self.take(nbytes)
        if block is None:
            raise MemoryError(f"the region of {self.nbytes} bytes has no room for {nbytes} more")
        return block

    def take(self, nbytes: int) -> _Block | None:
        """Room for `nbytes`, or None."""
        if os.getpid() != self._process:
            raise RuntimeError("this process was forked from the one that has the region, and has not its memory")
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
        """Since when nothing of it is in use; 0 while something is."""
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
    """A client's regions: those that it made itself to allocate in, and those that the user asked for."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  #: of its own regions' bytes
        self._lock = threading.Lock()
        self._own: list[Region] = []
        self._trimmed = time.monotonic()
        self._all: weakref.WeakSet[Region] = weakref.WeakSet()

    def make(self, core: _core.Client, nbytes: int) -> Region:
        """A region that lives as long as somebody has it, or something in it."""
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
        """Whether all of them lie in regions."""
        with self._lock:
            regions = list(self._all)
        return bool(regions) and all(
            array.nbytes == 0 or any(region.holds(array.ctypes.data, array.nbytes) for region in regions)
            for array in arrays)

    def take(self, core: _core.Client, nbytes: int) -> _Block | None:
        """Room in a region, an own one made if need be; None beyond the limit, or without memory."""
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
        """Its own regions, without those that were idle for long."""
        now = time.monotonic()
        with self._lock:
            if now - self._trimmed > _IDLE_SECONDS / 4:
                self._trimmed = now
                self._own = [region for region in self._own if region.idle_seconds() < _IDLE_SECONDS]
            return list(self._own)

    def empty(self, core: _core.Client, shape: int | Sequence[int], dtype: Any) -> Any:
        """As Region.empty. Raises MemoryError beyond the limit."""
        def room(nbytes: int) -> _Block:
            block = self.take(core, nbytes)
            if block is None:
                raise MemoryError(f"no room for {nbytes} bytes in regions (region_bytes={self.limit}, or no memory)")
            return block

        return _new(shape, dtype, room)


def _new(shape: int | Sequence[int], dtype: Any, room: Any) -> Any:
    sizes = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape: {sizes} has a negative size")
    torch = sys.modules.get("torch")
    of_torch = torch is not None and isinstance(dtype, torch.dtype)
    name = service_dtype(dtype)
    block = room(math.prod(sizes) * numpy_dtype(name).itemsize)
    if not of_torch and dtype != "bfloat16" and np.dtype(dtype) == np.bool_:
        name = "bool"
    return tensor_in(np.asarray(block), sizes, dtype if of_torch else name)
