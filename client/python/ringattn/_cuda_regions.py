"""GPU memory that a client shares with workers, and the placement of calls' tensors in it.

Tensors in regions of this client (results of earlier calls, `Client.cuda_empty`) are used in place. All others are
first copied, on their GPU, into a region. Workers cannot map them, because no library reports when it frees an
allocation.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringattn import _core
from ringattn._cuda import CODES, CudaArray, CudaTensor, check
from ringattn._errors import ResourceExhaustedError
from ringattn._regions import Region

_MIN_REGION_BYTES = 256 << 20
_PAGE = 2 << 20
# A region without allocations is released after this time.
_IDLE_SECONDS = 20.0
# Sharing memory of a GPU that no worker accepted is tried again after this time.
_RETRY_SECONDS = 10.0


class _Block:
    """An allocation in a region on a GPU, which lasts as long as this object."""

    __slots__ = ("__weakref__", "_region", "address", "device", "nbytes")

    def __init__(self, region: Region, offset: int, nbytes: int) -> None:
        self._region = region
        self.address = region.address + offset
        self.nbytes = nbytes
        self.device: int = region._core.device

    def bytes(self) -> _core.CudaBytes:
        return _core.CudaBytes(self.address, self.nbytes)


class _Region(Region):
    def _block_at(self, offset: int, nbytes: int) -> _Block:
        return _Block(self, offset, nbytes)

    @property
    def closed(self) -> bool:
        return False

    def close(self) -> None:
        """Does nothing: regions on a GPU are released after their last allocation."""


@dataclass
class Placement:
    """Where the tensors of a call on a GPU are."""

    staged_bytes: int = 0
    reason: str = ""
    moved: Callable[[], None] | None = None  #: moves results from host memory to the GPU
    held: list[Any] = field(default_factory=list)


class CudaArena:
    """A client's shared memory on GPUs: at most `limit` bytes on each GPU."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._own: list[_Region] = []
        self._all: weakref.WeakSet[_Region] = weakref.WeakSet()
        self._refused: dict[int, tuple[float, str]] = {}  # by device: time of the next attempt, and the reason

    def _holds(self, tensor: CudaTensor) -> bool:
        with self._lock:
            regions = list(self._all)
        return any(region.holds(tensor.address, tensor.nbytes) for region in regions)

    def take(self, core: _core.Client, device: int, nbytes: int) -> _Block | None:
        """Allocates on the device; None beyond the limit. Raises the driver's error."""
        with self._lock:
            self._own = [region for region in self._own if region.idle_seconds() < _IDLE_SECONDS]
            own = [region for region in self._own if region._core.device == device]
        for region in own:
            if (block := region.take(nbytes)) is not None:
                return block
        room = self.limit - sum(region.nbytes for region in own)
        size = -(-max(nbytes, min(_MIN_REGION_BYTES, room)) // _PAGE) * _PAGE
        if size > room:
            return None
        shared, error = core.allocate_cuda_region(device, size)
        check(error)
        made = _Region(shared)
        block = made.take(nbytes)
        with self._lock:
            self._own.append(made)
            self._all.add(made)
        return block

    def empty(self, core: _core.Client, shape: Sequence[int], dtype: str, device: int) -> CudaArray:
        block = self.take(core, device, math.prod(shape) * CODES[dtype][1] // 8)
        if block is None:
            raise MemoryError(f"CUDA device {device}: no space left in region_bytes={self.limit}")
        return CudaArray(block, shape, dtype)

    def _why_not(self, core: _core.Client, device: int, transport: str) -> str:
        """Returns why a call's tensors on this GPU must be copied through host memory; empty if they need not be."""
        if transport not in ("auto", "cuda_memory"):
            return f"transport is {transport!r}"
        refused = self._refused.get(device)
        if refused is not None and time.monotonic() < refused[0]:
            return refused[1]
        try:
            block = self.take(core, device, 1)
        except Exception as error:  # no driver or no memory
            why: str = str(error)
        else:
            if block is None or block._region.workers:
                self._refused.pop(device, None)
                return ""
            why = block._region.trouble or "no worker has attached memory of the GPU"
            del block
            with self._lock:  # releases the regions that no worker shares
                self._own = [region for region in self._own if region.idle_seconds() == 0 or region.workers]
        self._refused[device] = time.monotonic() + _RETRY_SECONDS, why
        return why

    def place(self, core: _core.Client, request: Any) -> Placement:
        """Copies the request's tensors to where its transport needs them, and allocates its results."""
        library, transport = request.library, request.call["transport"]
        devices = {library.device} | {memory.device for memory in request.inputs.values()
                                      if isinstance(memory, CudaTensor)}
        why = self._why_not(core, library.device, transport)
        blocks = None
        if not why or transport == "cuda_memory":
            try:
                blocks = self._blocks_for(core, request)
            except ResourceExhaustedError as error:  # of GPU memory or descriptors
                why = str(error)
            if blocks is None and transport == "cuda_memory":
                raise ResourceExhaustedError(
                    "RESOURCE_EXHAUSTED", f"transport='cuda_memory': {why or self._no_room()}")
        # Waits for all writers of the inputs and all readers of the blocks' earlier contents.
        for device in devices:
            check(_core.cuda_synchronize(device))
        if blocks is None:
            return self._on_host(core, request, why or self._no_room())
        placement = self._on_gpu(request, blocks)
        if placement.staged_bytes:
            for device in devices:
                check(_core.cuda_synchronize(device))
        return placement

    def _no_room(self) -> str:
        return f"the GPU regions have no space left in region_bytes={self.limit}"

    def _blocks_for(self, core: _core.Client, request: Any) -> dict[str, _Block] | None:
        """Allocates blocks for the results and for inputs outside regions. Returns None without space."""
        wanted = {f"in {name}": (memory.device if isinstance(memory, CudaTensor) else request.library.device,
                                 memory.nbytes)
                  for name, memory in request.inputs.items()
                  if not (isinstance(memory, CudaTensor) and self._holds(memory))}
        wanted |= {name: (request.library.device, math.prod(shape) * CODES[dtype][1] // 8)
                   for name, (shape, dtype) in request.shapes.items()}
        blocks = {}
        for name, (device, nbytes) in wanted.items():
            if (block := self.take(core, device, nbytes)) is None:
                return None
            blocks[name] = block
        return blocks

    @staticmethod
    def _on_gpu(request: Any, blocks: dict[str, _Block]) -> Placement:
        placement, inputs = Placement(), {}
        for name, memory in request.inputs.items():
            placement.held.append(memory)
            block = blocks.get(f"in {name}")
            if block is None:
                inputs[name] = _core.CudaBytes(memory.address, memory.nbytes)
                continue
            if memory.nbytes and isinstance(memory, CudaTensor):
                check(_core.cuda_start_copy(block.device, block.address, memory.address, memory.nbytes))
            elif memory.nbytes:
                check(_core.cuda_copy_from_host(block.device, block.address, memory))
            placement.staged_bytes += memory.nbytes
            placement.held.append(block)
            inputs[name] = block.bytes()
        for name, (shape, dtype) in request.shapes.items():
            request.results[name], request.outputs[name] = request.library.empty(shape, dtype, blocks[name])
        if placement.staged_bytes:
            placement.reason = (f"{placement.staged_bytes} bytes of inputs outside the client's regions were copied on "
                                "their GPU")
        request.inputs = inputs
        return placement

    def _on_host(self, core: _core.Client, request: Any, why: str) -> Placement:
        placement = Placement()
        for name, memory in request.inputs.items():
            if isinstance(memory, CudaTensor):
                placement.staged_bytes += memory.nbytes
                placement.held.append(memory)
                request.inputs[name] = memory.to_host()
        for name, (shape, dtype) in request.shapes.items():
            request.results[name], request.outputs[name] = request.library.empty(shape, dtype)
            placement.staged_bytes += request.outputs[name].nbytes
        placement.reason = f"tensors on a GPU were copied through host memory: {why}"
        if not request.library.of_torch:  # allocates the GPU memory before the call, so that it cannot fail after it
            arrays = {name: self.empty(core, shape, dtype, request.library.device)
                      for name, (shape, dtype) in request.shapes.items()}
            placement.moved = lambda: self._move(request, arrays)
        return placement

    @staticmethod
    def _move(request: Any, arrays: dict[str, CudaArray]) -> None:
        check(_core.cuda_synchronize(request.library.device))
        for name, array in arrays.items():
            if array.nbytes:
                check(_core.cuda_copy_from_host(array.device, array.address, request.results[name][0]))
            request.results[name] = array
