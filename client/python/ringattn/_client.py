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
from ringattn._arguments import flag, sizes_of, whole_number
from ringattn._cuda import CudaLibrary, CudaTensor
from ringattn._cuda_regions import CudaArena
from ringattn._dtypes import service_dtype
from ringattn._errors import FORKED, OfOneProcess, error_of, invalid
from ringattn._kv_cache import DEFAULT_BLOCK_TOKENS, LayerGroup, WorkerCache, cache_spec
from ringattn._options import (BACKWARD_NAMES, FORWARD_NAMES, ArrayLike, BackwardOptions, ForwardOptions, Progress,
                               check_names)
from ringattn._prepared import PreparedCall, prepare
from ringattn._regions import Arena, Region
from ringattn._report import Report, report_of
from ringattn._request import Request, backward_request, forward_request
from ringattn._residuals import Residual, handle_of

# The process that first connected. gRPC's threads and locks do not survive a fork.
_process: int | None = None


class _ForwardTuple(NamedTuple):
    out: Any  #: [batch, seq_len_q, heads, head_dim_v]; packed [tokens, heads, head_dim_v]
    lse: Any  #: fp32, natural logarithm, [batch, heads, seq_len_q]; packed [heads, tokens], or by `lse_format`
    report: Report


class ForwardResult(_ForwardTuple):
    """(out, lse, report). Results are of q's library: numpy arrays, PyTorch tensors on q's device, or `CudaArray` for
    other libraries on a GPU."""

    #: Not part of the tuple. fp32 [rows, heads, largest number of keys of the rows], 0 where masked; None without
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
    """(dq, dk, dv, dsinks, dbias, report). A gradient has the shape of its tensor; it is None if that was not given."""

    #: Not part of the tuple: the gradients of qkv and kv; None if these were not given.
    dqkv: Any = None
    dkv: Any = None


def _values(pair: tuple[Any, Any]) -> Any:
    """Returns the value of (value, error), or raises the error."""
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


class Client(OfOneProcess):
    """A connection to a coordinator, created by `connect`. Thread safe; calls may overlap.

    Tensors are [batch, seq_len, heads, head_dim], or [tokens, heads, head_dim] with cu_seqlens. Inputs must not change
    while a call runs. A blocking call releases the interpreter lock. Ctrl-C cancels it and frees the workers within a
    ring step. KeyboardInterrupt is raised once nothing accesses the tensors' memory.

    A client cannot be used in a process that was forked from one that has connected.
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
        """Closes the connection after the last call in flight has ended. Idempotent."""
        self._core = None

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _connected(self) -> _core.Client:
        if self._is_forked:
            raise RuntimeError(FORKED)
        if self._core is None:
            raise RuntimeError("the client is closed")
        return self._core

    # ------------------------------------------------------------------ attention

    def forward(self, q: ArrayLike | None = None, k: ArrayLike | None = None, v: ArrayLike | None = None, *,
                qkv: ArrayLike | None = None, kv: ArrayLike | None = None,
                **options: Unpack[ForwardOptions]) -> ForwardResult:
        """Computes exact attention of q over k and v. Options: `ForwardOptions`.

        `qkv` [batch, seq_len, 3, heads, head_dim] replaces q, k and v. `kv` [batch, seq_len_k, 2, kv_heads, head_dim]
        replaces k and v. They are sent without being split.

        Raises:
            RingattnError: a subclass for each status code. `InvalidArgumentError` names the field.
            TypeError: an option does not exist, or an input is not an array.
        """
        check_names(options, FORWARD_NAMES, "forward")
        request = forward_request(q, k, v, qkv, kv, options)
        return _forward_result(request, self._call(request))

    def backward(self, dout: ArrayLike, q: ArrayLike | None = None, k: ArrayLike | None = None,
                 v: ArrayLike | None = None, *, qkv: ArrayLike | None = None, kv: ArrayLike | None = None,
                 out: ArrayLike | None = None, lse: ArrayLike | None = None,
                 **options: Unpack[BackwardOptions]) -> BackwardResult:
        """Computes the gradients of q, k and v from dout, the gradient of out. Options: `BackwardOptions`.

        The gradients of `qkv` and `kv` are `BackwardResult.dqkv` and `dkv`. `out` and `lse` are the forward's results;
        without them the service recomputes the forward. With `residual`, only dout is sent; q, k and v are optional.

        Raises:
            FailedPreconditionError, NotFoundError: the residual is gone (`reason`: RESIDUAL_...), and q, k and v were
                not given.
            Others: as `forward`.
        """
        check_names(options, BACKWARD_NAMES, "backward")
        request = backward_request(dout, q, k, v, qkv, kv, out, lse, options)
        return _backward_result(request, self._call(request))

    async def forward_async(self, q: ArrayLike | None = None, k: ArrayLike | None = None, v: ArrayLike | None = None,
                            *, qkv: ArrayLike | None = None, kv: ArrayLike | None = None,
                            **options: Unpack[ForwardOptions]) -> ForwardResult:
        """`forward` in an event loop.

        Cancelling the task cancels the request. The await ends with asyncio.CancelledError once nothing accesses the
        tensors' memory.
        """
        check_names(options, FORWARD_NAMES, "forward_async")
        request = forward_request(q, k, v, qkv, kv, options)
        return _forward_result(request, await self._call_async(request))

    async def backward_async(self, dout: ArrayLike, q: ArrayLike | None = None, k: ArrayLike | None = None,
                             v: ArrayLike | None = None, *, qkv: ArrayLike | None = None,
                             kv: ArrayLike | None = None, out: ArrayLike | None = None, lse: ArrayLike | None = None,
                             **options: Unpack[BackwardOptions]) -> BackwardResult:
        """`backward` in an event loop. Cancellation: as `forward_async`."""
        check_names(options, BACKWARD_NAMES, "backward_async")
        request = backward_request(dout, q, k, v, qkv, kv, out, lse, options)
        return _backward_result(request, await self._call_async(request))

    def prepare(self, q: Any = None, k: Any = None, v: Any = None, *, qkv: Any = None, kv: Any = None,
                dout: Any = None, out: Any = None, lse: Any = None, ttl: float | None = None,
                **options: Any) -> PreparedCall:
        """Prepares equal calls of `forward`, or of `backward` if `dout` is given, before the first of them.

        The workers build the program, reserve the memory and prepare the kernel calls. They keep this part until the
        result is closed, and calls over any transport find it:

            with client.prepare(q, k, v, causal=True):
                for ...:
                    client.forward(q, k, v, causal=True)

        Pass the arguments of the calls. Only shapes and types of tensors count, and a `TensorSpec` may replace each
        tensor except `alibi_slopes`. Nothing is sent or run. A backward with `out` and `lse`, or with `dlse`, is
        another one than without. Options that change only how a call is made, like `transport`, have no effect.

        The part is a cache, not a reservation: workers evict it if other requests need the memory. The next call then
        prepares it again, and so does the next renewal.

        Args:
            ttl: seconds for which the workers keep the part without a renewal, as after a crash; None: the service's
                default, 30. The library renews it three times as often.
            options: of `forward` or `backward`. `deadline`: of this call; default: 60. Ctrl-C is raised after it.

        Raises:
            InvalidArgumentError: naming the field; also for `retain` and `residual`, whose parts are not kept.
            FailedPreconditionError: a worker may not keep a part of this size (`reason`: NOT_KEPT).
            Others: as `forward`.
        """
        return prepare(self._connected(), q, k, v, qkv, kv, dout, out, lse, ttl, options)

    def _start(self, request: Request, with_event: bool) -> _core.Call:
        core = self._connected()
        if isinstance(request.library, CudaLibrary):
            request.placement = self._cuda.place(core, request)
        elif any(isinstance(memory, CudaTensor) for memory in request.inputs.values()):
            raise invalid(next(name for name, memory in request.inputs.items() if isinstance(memory, CudaTensor)),
                          "is on a GPU, but the call's first tensor is in host memory; pass all tensors in one memory")
        else:
            request.make_room(self._room_of(request, core))
        return core.start(request.is_forward, request.header, request.inputs, request.outputs,
                                       request.call, with_event)

    def _room_of(self, request: Request, core: _core.Client) -> Any:
        """Returns an allocator in shared regions for the results, if the call requires host memory or its inputs are in
        regions. None: ordinary memory."""
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
            while not call.poll()[0]:  # the call accesses the tensors' memory until it has ended
                call.wait()
            raise
        return _report(request, _values(call.result()))

    async def _call_async(self, request: Request) -> Report:
        loop = asyncio.get_running_loop()
        call = self._start(request, with_event=True)
        woken = asyncio.Event()
        # The library's threads never take the interpreter lock. They make a descriptor readable.
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
        """Creates memory that this client shares with the workers of its machine. Allocate tensors with `Region.empty`.

        Creating it takes as long as clearing it (about 3 GB/s). Raises ResourceExhaustedError if memory or file
        descriptors run out.
        """
        return self._arena.make(self._connected(), nbytes)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """Returns an uninitialized tensor in a shared region. Creates a region if needed.

        The tensor is PyTorch's if `dtype` is, else a numpy array. Its memory is reused after its last view is gone.
        Raises MemoryError beyond `region_bytes` of `connect`.
        """
        return self._arena.empty(self._connected(), shape, dtype)

    def cuda_empty(self, shape: int | Sequence[int], dtype: Any = "float32", device: int = 0) -> Any:
        """`empty` on a GPU. Workers' GPUs copy such tensors directly; the client neither copies nor sends them.

        The tensor is PyTorch's if `dtype` is, else a `CudaArray`. A call waits for GPU work that fills its inputs. The
        memory is reused after the last view is gone.

        Raises:
            MemoryError: beyond `region_bytes` of `connect`.
            FailedPreconditionError: there is no CUDA driver.
        """
        sizes = sizes_of(shape)
        torch = sys.modules.get("torch")
        array = self._cuda.empty(self._connected(), sizes, service_dtype(dtype), device)
        if torch is None or not isinstance(dtype, torch.dtype):
            return array
        return torch.from_dlpack(array).view(dtype)

    # ------------------------------------------------------------------ residuals

    def delete_residual(self, residual: Residual | str, *, deadline: float = 10.0) -> None:
        """Deletes a residual. Raises NotFoundError if it is unknown."""
        _values(self._connected().delete_residual(handle_of(residual), deadline))

    def renew_residuals(self, residuals: Sequence[Residual | str], seconds: float | None = None, *,
                        deadline: float = 10.0) -> list[str]:
        """Sets the remaining lifetime of up to 1,024 residuals, in seconds. None: the service's default.

        Returns for each residual an empty string, or the reason why it has ended.
        """
        if seconds is not None and not seconds > 0:
            raise invalid("seconds", f"is {seconds}; must be positive")
        handles = [handle_of(residual) for residual in residuals]
        return _values(self._connected().renew_residuals(handles, seconds or 0.0, deadline))

    def hold_residuals(self, residuals: Sequence[Residual | str]) -> None:
        """Keeps residuals beyond the lifetime of their `retain`, until they are consumed, deleted or released.

        The client keeps a stream to the service open. After the client or its process has ended, the residuals expire
        within `server_info()["limits"]["residual_hold_grace"]`. Does not block; see `hold_trouble`.
        """
        self._connected().hold_residuals([handle_of(residual) for residual in residuals])

    def release_residuals(self, residuals: Sequence[Residual | str]) -> None:
        """Stops holding residuals. They expire after their remaining lifetime, a minute at most."""
        self._connected().release_residuals([handle_of(residual) for residual in residuals])

    @property
    def hold_trouble(self) -> Exception | None:
        """The error that prevents residuals from being held at the moment, or None. UnimplementedError is permanent:
        the service has no HoldResiduals. Other errors end when the connection is restored."""
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
                     divide_blocks: bool | None = None, transport: str = "auto", hold: bool = True,
                     request_id: str = "", deadline: float = 30.0) -> WorkerCache:
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
            ttl: seconds after which the cache ends without a hold and without steps; None: 60.
            world_size: number of workers; None: the coordinator chooses.
            members: workers by name; empty: any.
            divide_blocks: position parts divide the blocks, so that `tokens` counts the entries of all of them. False:
                each part holds blocks of `block_tokens`, and without world_size and members there are no position
                parts. None: True unless world_size or members are given.
            transport: "host_memory", "direct", "relay", or "auto", the first of these that is available.
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
        options = {"ttl": ttl, "world_size": world_size, "members": list(members),
                   "divide_blocks": None if divide_blocks is None else flag(divide_blocks, "divide_blocks"),
                   "transport": transport, "hold": hold, "request_id": request_id, "deadline": deadline}
        return WorkerCache(_values(self._connected().create_cache(spec, options)), self, is_owner=True)

    def open_cache(self, cache_id: bytes, *, transport: str = "auto", hold: bool = True, answered_step: int = 0,
                   deadline: float = 30.0) -> WorkerCache:
        """Opens an existing cache and becomes its only writer.

        `answered_step` is the last step of which the caller has every result; 0: unknown.
        """
        options = {"transport": transport, "hold": hold, "answered_step": answered_step, "deadline": deadline}
        return WorkerCache(_values(self._connected().open_cache(cache_id, options)), self, is_owner=False)

    def list_caches(self, *, deadline: float = 10.0) -> list[dict[str, Any]]:
        """Returns the KvCacheInfo protos of this client's caches as dicts; without authentication, only those of this
        object."""
        return _values(self._connected().list_caches(deadline))

    def delete_cache(self, cache_id: bytes, *, deadline: float = 10.0) -> None:
        """Frees a cache. Raises NotFoundError if it is unknown."""
        _values(self._connected().delete_cache(cache_id, deadline))

    # ------------------------------------------------------------------ operations and cluster

    def server_info(self, *, deadline: float = 10.0) -> dict[str, Any]:
        """Returns version, limits and capabilities: the proto GetServerInfoResponse as a dict."""
        return _values(self._connected().server_info(deadline))

    def topology(self, *, deadline: float = 10.0) -> dict[str, Any]:
        """Returns the workers and their ring: the proto Topology as a dict."""
        return _values(self._connected().topology(deadline))

    def get_operation(self, request_id: str, *, deadline: float = 10.0) -> dict[str, Any]:
        """Returns the proto GetStatusResponse as a dict. Raises NotFoundError if the request is not known."""
        return _values(self._connected().get_operation(request_id, deadline))

    def cancel_operation(self, request_id: str, *, deadline: float = 10.0) -> None:
        """Cancels a request of this principal, also one of another process. Raises NotFoundError if it is unknown."""
        _values(self._connected().cancel_operation(request_id, deadline))


def connect(target: str, *, tls_ca: str | os.PathLike[str] | None = None,
            tls_cert: str | os.PathLike[str] | None = None, tls_key: str | os.PathLike[str] | None = None,
            tls_server_name: str | None = None, token_file: str | os.PathLike[str] | None = None,
            channels: int = 4, max_chunk_bytes_up: int = 0, max_replays: int = 10,
            connect_timeout: float = 5.0, staging_bytes: int = 4 << 30, region_bytes: int = 8 << 30) -> Client:
    """Returns a client of the coordinator at `target`, "host:port". The first call connects.

    Args:
        tls_ca: PEM file of the authorities that sign the server's certificate. Without it, plain text.
        tls_cert: PEM file of the client's certificate, if the server requires one.
        tls_key: PEM file of its private key. All files are reloaded when they change.
        tls_server_name: name in the server's certificate; default: the host of `target`.
        token_file: file with the bearer token for every call. The token is sent in plain text to loopback only.
        channels: number of connections. Calls use them in turn.
        max_chunk_bytes_up: size of upload chunks; 0: the server's recommendation.
        max_replays: how often a call is repeated, under one request id, after a worker was lost.
        connect_timeout: seconds after which calls fail if the server has never answered. An attempt in progress may
            take four times as long.
        staging_bytes: limit of the shared memory through which other tensors are copied. At most half of the free
            memory is used, and memory that is idle for 20 s is released. 0: none.
        region_bytes: limit of the shared memory for `empty` and for results.

    Raises:
        InvalidArgumentError: the target, a file or the token is invalid.
        RuntimeError: the process was forked from one that has used ringattn.
    """
    global _process
    if _process is not None and _process != os.getpid():
        raise RuntimeError(FORKED)
    files = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key, "token_file": token_file}
    options: dict[str, Any] = {name: os.fspath(path) for name, path in files.items() if path is not None}
    options |= {"tls_server_name": tls_server_name, "channels": channels, "max_chunk_bytes_up": max_chunk_bytes_up,
                "max_replays": max_replays, "connect_timeout": connect_timeout, "staging_bytes": staging_bytes}
    if whole_number(region_bytes, "region_bytes") < 0:
        raise invalid("region_bytes", f"is {region_bytes}; must not be negative")
    client = Client(_values(_core.connect(target, options)), target, region_bytes)
    _process = os.getpid()
    return client
