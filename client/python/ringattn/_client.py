"""Clients: calls over numpy arrays and PyTorch tensors, blocking or in an event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np

from ringattn import _core
from ringattn._cuda import CudaLibrary, CudaTensor
from ringattn._cuda_regions import CudaArena
from ringattn._dtypes import service_dtype
from ringattn._errors import error_of, invalid
from ringattn._kv_cache import DEFAULT_BLOCK_TOKENS, LayerGroup, WorkerCache, cache_spec
from ringattn._options import (BACKWARD_NAMES, FORWARD_NAMES, ArrayLike, BackwardOptions, ForwardOptions, Progress,
                               check_names)
from ringattn._regions import Arena, Region
from ringattn._report import Report, report_of
from ringattn._request import Request, backward_request, forward_request
from ringattn._residuals import Residual, handle_of

# The process that first had a client. gRPC's threads and locks do not survive a fork.
_process: int | None = None

_FORKED = ("this process was forked from one that has used ringattn, whose connections do not survive that: start "
           "workers by 'spawn' or 'forkserver', or connect only after the fork")


class _ForwardTuple(NamedTuple):
    out: Any  #: [batch, seq_len_q, heads, head_dim_v]; packed [tokens, heads, head_dim_v]
    lse: Any  #: fp32, natural logarithm, [batch, heads, seq_len_q]; packed [heads, tokens], or as `lse_format` says
    report: Report


class ForwardResult(_ForwardTuple):
    """(out, lse, report), of q's library: numpy arrays, PyTorch tensors on q's device, or for others on a GPU `CudaArray`."""

    #: Beside the tuple. fp32 [rows, heads, most keys of a row's batch row or document], 0 where masked; None without
    #: `probability_rows`.
    probabilities: Any = None


class _BackwardTuple(NamedTuple):
    dq: Any
    dk: Any
    dv: Any
    dsinks: Any  #: None without sinks
    dbias: Any  #: None without bias_gradient
    report: Report


class BackwardResult(_BackwardTuple):
    """(dq, dk, dv, dsinks, dbias, report): gradients in the shapes of what they are gradients of, None for what was not
    given."""

    #: Beside the tuple: the gradients of qkv and of kv, where they were given.
    dqkv: Any = None
    dkv: Any = None


def _values(pair: tuple[Any, Any]) -> Any:
    """The first of (value, error), or the error raised."""
    value, error = pair
    if error is not None:
        raise error_of(error)
    return value


def _report(request: Request, values: Any) -> Report:
    report, placement = report_of(values, request.residual), request.placement
    if placement is None:
        return report
    if placement.moved is not None:
        placement.moved()
    reason = "; ".join(words for words in (report.transport_reason, placement.reason) if words)
    return dataclasses.replace(report, transport_reason=reason,
                               staged_bytes=report.staged_bytes + placement.staged_bytes)


def _tell(request: Request, progress: dict[str, Any] | None) -> None:
    if progress is not None and request.on_progress is not None:
        request.on_progress(Progress(progress["state"], progress["fraction_done"]))


def _forward_result(request: Request, report: Report) -> ForwardResult:
    result = ForwardResult(request.finish("out"), request.finish("lse"), report)
    result.probabilities = request.finish("probabilities")
    return result


def _backward_result(request: Request, report: Report) -> BackwardResult:
    dq, dk, dv, dsinks, dbias = (request.finish(name) for name in ("dq", "dk", "dv", "dsinks", "dbias"))
    result = BackwardResult(dq, dk, dv, dsinks, dbias, report)
    result.dqkv, result.dkv = request.finish("dqkv"), request.finish("dkv")
    return result


class Client:
    """A connection to a coordinator, made by `connect`. Thread safe; calls may overlap.

    Tensors are [batch, seq_len, heads, head_dim], or [tokens, heads, head_dim] with cu_seqlens. While a call runs
    its inputs must not be changed. A blocking call gives up the interpreter's lock; Ctrl-C cancels it, the workers
    are free within a ring step, and KeyboardInterrupt is raised when nothing reads the tensors' memory any more.

    Not across fork(): a client, and the package once it has connected, are of the process that did so.
    """

    def __init__(self, core: _core.Client, target: str, region_bytes: int) -> None:
        self._core: _core.Client | None = core
        self._arena = Arena(region_bytes)
        self._cuda = CudaArena(region_bytes)
        self._target = target
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<ringattn.Client of {self._target}{'' if self._core else ', closed'}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection when the last call in flight has ended. Idempotent."""
        self._core = None

    def _connected(self) -> _core.Client:
        if os.getpid() != self._process:
            raise RuntimeError(_FORKED)
        if self._core is None:
            raise RuntimeError("the client is closed")
        return self._core

    # ------------------------------------------------------------------ attention

    def forward(self, q: ArrayLike | None = None, k: ArrayLike | None = None, v: ArrayLike | None = None, *,
                qkv: ArrayLike | None = None, kv: ArrayLike | None = None,
                **options: Unpack[ForwardOptions]) -> ForwardResult:
        """Exact attention of q over k and v. Options: `ForwardOptions`.

        `qkv` [batch, seq_len, 3, heads, head_dim] instead of q, k and v, or `kv` [batch, seq_len_k, 2, kv_heads,
        head_dim] instead of k and v, is sent as it is, on every way.

        Raises:
            RingattnError: by status code, see its subclasses. `InvalidArgumentError` names the field.
            TypeError: for an option that does not exist, or what is no array.
        """
        check_names(options, FORWARD_NAMES, "forward")
        request = forward_request(q, k, v, qkv, kv, options)
        return _forward_result(request, self._call(request))

    def backward(self, dout: ArrayLike, q: ArrayLike | None = None, k: ArrayLike | None = None,
                 v: ArrayLike | None = None, *, qkv: ArrayLike | None = None, kv: ArrayLike | None = None,
                 out: ArrayLike | None = None, lse: ArrayLike | None = None,
                 **options: Unpack[BackwardOptions]) -> BackwardResult:
        """Gradients of q, k and v from dout, the gradient of out. Options: `BackwardOptions`.

        Of `qkv` or `kv` the gradient is one tensor, too: `BackwardResult.dqkv`, `dkv`.

        Without `out` and `lse`, forward's results, the service computes them again. With `residual`, what a forward
        left with the workers, dout is all that is sent, and q, k, v need not be given. Raises as `forward` does;
        FailedPreconditionError or NotFoundError for a residual that is gone (`reason`: RESIDUAL_...), if there are no
        tensors to send instead.
        """
        check_names(options, BACKWARD_NAMES, "backward")
        request = backward_request(dout, q, k, v, qkv, kv, out, lse, options)
        return _backward_result(request, self._call(request))

    async def forward_async(self, q: ArrayLike | None = None, k: ArrayLike | None = None, v: ArrayLike | None = None,
                            *, qkv: ArrayLike | None = None, kv: ArrayLike | None = None,
                            **options: Unpack[ForwardOptions]) -> ForwardResult:
        """`forward` in an event loop.

        Cancelling the task cancels the operation; the await ends, with asyncio.CancelledError, when the workers
        were told and nothing reads or writes the tensors' memory any more.
        """
        check_names(options, FORWARD_NAMES, "forward_async")
        request = forward_request(q, k, v, qkv, kv, options)
        return _forward_result(request, await self._call_async(request))

    async def backward_async(self, dout: ArrayLike, q: ArrayLike | None = None, k: ArrayLike | None = None,
                             v: ArrayLike | None = None, *, qkv: ArrayLike | None = None,
                             kv: ArrayLike | None = None, out: ArrayLike | None = None, lse: ArrayLike | None = None,
                             **options: Unpack[BackwardOptions]) -> BackwardResult:
        """`backward` in an event loop; cancelled as `forward_async` is."""
        check_names(options, BACKWARD_NAMES, "backward_async")
        request = backward_request(dout, q, k, v, qkv, kv, out, lse, options)
        return _backward_result(request, await self._call_async(request))

    def _start(self, request: Request, with_event: bool) -> _core.Call:
        core = self._connected()
        if isinstance(request.library, CudaLibrary):
            request.placement = self._cuda.place(core, request)
        elif any(isinstance(memory, CudaTensor) for memory in request.inputs.values()):
            raise invalid(next(name for name, memory in request.inputs.items() if isinstance(memory, CudaTensor)),
                          "lies on a GPU, and the call's first tensor does not")
        else:
            request.make_room(self._room_of(request, core))
        return core.start(request.is_forward, request.header, request.inputs, request.outputs,
                                       request.call, with_event)

    def _room_of(self, request: Request, core: _core.Client) -> Any:
        """Results are born where workers can write, if host memory is what the call asks for or comes from."""
        transport = request.call["transport"]
        if transport == "host_memory" or (transport == "auto" and self._arena.hold(list(request.inputs.values()))):
            return lambda nbytes: None if (block := self._arena.take(core, nbytes)) is None else np.asarray(block)
        return None

    def _call(self, request: Request) -> Report:
        call = self._start(request, with_event=False)
        try:
            ended = False
            while not ended:
                call.wait()
                ended, progress = call.poll()
                _tell(request, progress)
        except BaseException:
            call.cancel()
            while not call.poll()[0]:  # until then the tensors' memory is in use
                call.wait()
            raise
        return _report(request, _values(call.result()))

    async def _call_async(self, request: Request) -> Report:
        loop = asyncio.get_running_loop()
        call = self._start(request, with_event=True)
        woken = asyncio.Event()
        # No thread of the library ever takes the interpreter's lock: it makes a descriptor readable.
        loop.add_reader(call.fileno(), woken.set)
        failure: BaseException | None = None
        ended = False
        try:
            while not ended:
                try:
                    await woken.wait()
                    woken.clear()
                    ended, progress = call.poll()
                    _tell(request, progress)
                except (asyncio.CancelledError, Exception) as error:
                    failure = error
                    call.cancel()
        finally:
            loop.remove_reader(call.fileno())
        outcome = call.result()
        if failure is not None:
            raise failure
        return _report(request, _values(outcome))

    # ------------------------------------------------------------------ memory

    def region(self, nbytes: int) -> Region:
        """Memory for tensors that the workers of this machine read and write themselves: allocate by `Region.empty`.

        At the cost of filling it (about 3 GB/s). Raises ResourceExhaustedError without memory or descriptors.
        """
        return self._arena.make(self._connected(), nbytes)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """An array or tensor, its contents undefined, in a region that is made if need be.

        A PyTorch tensor for a dtype of PyTorch's, else a numpy array. Its memory is used again when the last view of
        it is gone. Raises MemoryError beyond `region_bytes` of `connect`.
        """
        return self._arena.empty(self._connected(), shape, dtype)

    def cuda_empty(self, shape: int | Sequence[int], dtype: Any = "float32", device: int = 0) -> Any:
        """As `empty`, in memory of a GPU: calls whose tensors lie there have none of them copied or sent.

        A PyTorch tensor for a dtype of PyTorch's, else a `CudaArray`. Work that fills it is waited for when a call
        begins; its memory is used again when the last view of it is gone. Raises MemoryError beyond `region_bytes`,
        FailedPreconditionError without a CUDA driver.
        """
        sizes = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(size) for size in shape)
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape: {sizes} has a negative size")
        torch = sys.modules.get("torch")
        array = self._cuda.empty(self._connected(), sizes, service_dtype(dtype), device)
        if torch is None or not isinstance(dtype, torch.dtype):
            return array
        return torch.from_dlpack(array).view(dtype)

    # ------------------------------------------------------------------ residuals

    def delete_residual(self, residual: Residual | str, *, deadline: float = 10.0) -> None:
        """Has the workers let go of what a forward left. Raises NotFoundError for one that is unknown."""
        _values(self._connected().delete_residual(handle_of(residual), deadline))

    def renew_residuals(self, residuals: Sequence[Residual | str], seconds: float | None = None, *,
                        deadline: float = 10.0) -> list[str]:
        """Keeps them for so many seconds from now on; None: as long as the service thinks right.

        Returns for each an empty string, or the reason why it is gone. At most 1,024 at a time.
        """
        if seconds is not None and not seconds > 0:
            raise invalid("seconds", f"is {seconds}, must be positive")
        handles = [handle_of(residual) for residual in residuals]
        return _values(self._connected().renew_residuals(handles, seconds or 0.0, deadline))

    def hold_residuals(self, residuals: Sequence[Residual | str]) -> None:
        """Keeps them, whatever the seconds of their `retain`, until they are used up, deleted or released.

        By a stream to the service that this client keeps open: when the client or its process is gone, so are they, a
        few seconds later (`server_info()["limits"]["residual_hold_grace"]`). Does not wait; see `hold_trouble`.
        """
        self._connected().hold_residuals([handle_of(residual) for residual in residuals])

    def release_residuals(self, residuals: Sequence[Residual | str]) -> None:
        """Holds them no more: they last for the time that they have, a minute at most."""
        self._connected().release_residuals([handle_of(residual) for residual in residuals])

    @property
    def hold_trouble(self) -> Exception | None:
        """Why residuals are not held at the moment, and go when their own time is over. UnimplementedError, of an older
        service, is for good; others end when the connection is back."""
        error = self._connected().hold_trouble()
        return None if error is None else error_of(error)

    # ------------------------------------------------------------------ K/V caches

    def create_cache(self, *, layers: int | Sequence[int] | None = None, heads: int | None = None,
                     kv_heads: int | None = None, head_dim: int | None = None, head_dim_v: int | None = None,
                     softmax_scale: float | None = None, softcap: float | None = None, window: int | None = None,
                     causal: bool = True, sinks: Any = None, groups: Sequence[LayerGroup] | None = None,
                     dtype: Any = "bfloat16", tokens: int | None = None, blocks: int | None = None,
                     block_tokens: int = DEFAULT_BLOCK_TOKENS, numbering: str = "sequences", label: str = "",
                     ttl: float | None = None, world_size: int | None = None, members: Sequence[str] = (),
                     transport: str = "auto", hold: bool = True, request_id: str = "",
                     deadline: float = 30.0) -> WorkerCache:
        """Reserves a K/V cache on workers and opens it. docs/inference.md is the guide.

        Args:
            layers: the number of layers, or their numbers. With heads, kv_heads, head_dim, head_dim_v, softmax_scale,
                softcap, window, causal and sinks they make one group; see `LayerGroup`.
            groups: several groups of layers, in place of these.
            dtype: of q, k, v and out: float32, bfloat16 or float16.
            tokens: entries of all sequences together. Or
            blocks: the number of blocks of `block_tokens` entries, which all groups share.
            numbering: "sequences", or "blocks" if the caller allocates blocks.
            label: for people.
            ttl: seconds that the cache lives without a hold and without steps; None: 60.
            world_size: number of workers; None: the fewest that have room.
            members: workers by name; empty: any.
            transport: "direct", "relay", or "auto".
            hold: keeps the cache while this process lives.
            request_id: makes a repeated call return the same cache.
            deadline: seconds.

        Raises:
            InvalidArgumentError, UnimplementedError: naming the field.
            ResourceExhaustedError: no worker has room, or a quota is reached (`reason`: KV_MEMORY, KV_QUOTA,
                TOO_MANY_CACHES).
        """
        spec = cache_spec(layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v,
                          softmax_scale=softmax_scale, softcap=softcap, window=window, causal=causal, sinks=sinks,
                          groups=groups, dtype=dtype, tokens=tokens, blocks=blocks, block_tokens=block_tokens,
                          numbering=numbering, label=label)
        options = {"ttl": ttl, "world_size": world_size, "members": list(members), "transport": transport,
                   "hold": hold, "request_id": request_id, "deadline": deadline}
        return WorkerCache(_values(self._connected().create_cache(spec, options)), self, is_owner=True)

    def open_cache(self, cache_id: bytes, *, transport: str = "auto", hold: bool = True, answered_step: int = 0,
                   deadline: float = 30.0) -> WorkerCache:
        """Opens an existing cache and becomes its only writer.

        `answered_step` is the last step of which the caller has every result; 0: unknown.
        """
        options = {"transport": transport, "hold": hold, "answered_step": answered_step, "deadline": deadline}
        return WorkerCache(_values(self._connected().open_cache(cache_id, options)), self, is_owner=False)

    def list_caches(self, *, deadline: float = 10.0) -> list[dict[str, Any]]:
        """This client's caches: the protos KvCacheInfo as dicts. Without authentication, those of this object."""
        return _values(self._connected().list_caches(deadline))

    def delete_cache(self, cache_id: bytes, *, deadline: float = 10.0) -> None:
        """Frees a cache. Raises NotFoundError if it is unknown."""
        _values(self._connected().delete_cache(cache_id, deadline))

    # ------------------------------------------------------------------ operations and cluster

    def server_info(self, *, deadline: float = 10.0) -> dict[str, Any]:
        """Version, limits and what is served: the proto GetServerInfoResponse as a dict."""
        return _values(self._connected().server_info(deadline))

    def topology(self, *, deadline: float = 10.0) -> dict[str, Any]:
        """The workers and their ring: the proto Topology as a dict."""
        return _values(self._connected().topology(deadline))

    def get_operation(self, request_id: str, *, deadline: float = 10.0) -> dict[str, Any]:
        """The proto GetStatusResponse as a dict. Raises NotFoundError for one that is not known any more."""
        return _values(self._connected().get_operation(request_id, deadline))

    def cancel_operation(self, request_id: str, *, deadline: float = 10.0) -> None:
        """Asks for an operation to end, whoever has begun it. Raises NotFoundError for one that is not known."""
        _values(self._connected().cancel_operation(request_id, deadline))


def connect(target: str, *, tls_ca: str | os.PathLike[str] | None = None,
            tls_cert: str | os.PathLike[str] | None = None, tls_key: str | os.PathLike[str] | None = None,
            tls_server_name: str | None = None, token_file: str | os.PathLike[str] | None = None,
            channels: int = 4, max_chunk_bytes_up: int = 0, max_replays: int = 10,
            connect_timeout: float = 5.0, staging_bytes: int = 4 << 30, region_bytes: int = 8 << 30) -> Client:
    """A client of the coordinator at `target`, "host:port". Does not dial yet.

    Args:
        tls_ca: authorities that the server's certificate must lead to, a PEM file; plain text without it.
        tls_cert: the client's own certificate, where the server asks for one, and
        tls_key: its key. Files are read again when they change.
        tls_server_name: the name that the server's certificate is for, where that is not the target's host.
        token_file: a file with the bearer token that every call shows. Not in plain text, but to loopback.
        channels: connections; calls go round them.
        max_chunk_bytes_up: 0: as the server recommends.
        max_replays: how often a call is sent again, under one request id, after a worker was lost.
        connect_timeout: seconds after which a server that has never answered is given up.
        staging_bytes: memory shared with workers that tensors pass through which do not lie in any; no more than half
            of what is free is taken, and what is idle for 20 s is given back. 0: none.
        region_bytes: memory shared with workers that `empty` and results may take.

    Raises:
        InvalidArgumentError: for a target, a file or a token of no use.
        RuntimeError: in a process that was forked from one that has used ringattn.
    """
    global _process
    if _process is not None and _process != os.getpid():
        raise RuntimeError(_FORKED)
    files = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key, "token_file": token_file}
    options: dict[str, Any] = {name: os.fspath(path) for name, path in files.items() if path is not None}
    options |= {"tls_server_name": tls_server_name, "channels": channels, "max_chunk_bytes_up": max_chunk_bytes_up,
                "max_replays": max_replays, "connect_timeout": connect_timeout, "staging_bytes": staging_bytes}
    client = Client(_values(_core.connect(target, options)), target, region_bytes)
    _process = os.getpid()
    return client
