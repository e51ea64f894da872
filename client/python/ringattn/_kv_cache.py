"""K/V caches: keys and values that stay with the workers, so that a decode step sends only new tokens.

    cache = client.create_cache(layers=2, heads=8, kv_heads=4, head_dim=64, tokens=1 << 17, dtype="float32")
    with cache.step([ringattn.Row(sequence=1, append=37)]) as step:      # prefill
        for layer in range(2):
            out = step.attend(layer, q[layer], k[layer], v[layer])       # [37, heads, head_dim]
    with cache.step([ringattn.Row(sequence=1, append=1)]) as step:       # decode
        ...

docs/inference.md is the guide.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ringattn import _core
from ringattn._arguments import flag, number, whole_number
from ringattn._arrays import Array, floats, refuse_derivatives, take_all_on_host
from ringattn._dtypes import service_dtype
from ringattn._errors import FORKED, OfOneProcess, StepRefusedError, error_of, invalid

if TYPE_CHECKING:
    from ringattn._client import Client

_FOREVER = math.inf
DEFAULT_BLOCK_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers of one shape and one mask."""

    layers: Sequence[int]  #: the model's layer numbers
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int | None = None  #: None: head_dim
    softmax_scale: float | None = None  #: None: 1/sqrt(head_dim)
    softcap: float | None = None
    window: int | None = None  #: entries that a query sees before its own; None: all
    causal: bool = True
    sinks: Any = None  #: [layers, heads], natural log

    def proto(self) -> dict[str, Any]:
        """The proto KvLayerGroup as a dict."""
        for name in ("softmax_scale", "softcap"):
            refuse_derivatives(getattr(self, name), name)
        heads, kv_heads, head_dim = (whole_number(getattr(self, name), name) for name in ("heads", "kv_heads", "head_dim"))
        group: dict[str, Any] = {
            "layers": [whole_number(layer, "layers") for layer in self.layers], "num_heads": heads,
            "num_kv_heads": kv_heads, "head_dim": head_dim,
            "head_dim_v": 0 if self.head_dim_v is None else whole_number(self.head_dim_v, "head_dim_v"),
            "softmax_scale": None if self.softmax_scale is None else number(self.softmax_scale, "softmax_scale"),
            "softcap": None if self.softcap is None else number(self.softcap, "softcap") or None,
            "window_left": None if self.window is None else whole_number(self.window, "window"),
            "non_causal": not flag(self.causal, "causal")}
        if self.sinks is not None:
            group["sinks"] = floats(self.sinks, "sinks").astype("<f4").tobytes()
        return group


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence's part of a step.

    The sequence keeps its first `keep` entries, forgets the others and appends `append` entries. Its `queries` are
    aligned with its end: the last query stands at the last entry.
    """

    sequence: int  #: the caller's number; a new number begins a sequence
    append: int = 1
    queries: int | None = None  #: None: as many as `append`
    keep: int | None = None  #: None: all entries
    #: Numbering "blocks" only: changed parts of block tables, (group, first, blocks).
    tables: Sequence[tuple[int, int, Sequence[int]]] = ()

    @property
    def q_tokens(self) -> int:
        return self.append if self.queries is None else self.queries


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Costs of one layer call."""

    device_time: float  #: seconds of the slowest worker for append and attention
    sent_bytes: int
    received_bytes: int


def cache_spec(*, layers: int | Sequence[int] | None, heads: int | None, kv_heads: int | None, head_dim: int | None,
               head_dim_v: int | None, softmax_scale: float | None, softcap: float | None, window: int | None,
               causal: bool, sinks: Any, groups: Sequence[LayerGroup] | None, dtype: Any, tokens: int | None,
               blocks: int | None, block_tokens: int, numbering: str, label: str) -> dict[str, Any]:
    """The proto KvCacheSpec as a dict, from the arguments of `Client.create_cache`."""
    if groups is None:
        if layers is None or heads is None or head_dim is None:
            raise invalid("groups", "is missing; give layers, heads and head_dim, or groups")
        numbers = layers if isinstance(layers, Iterable) else range(whole_number(layers, "layers"))
        groups = [LayerGroup(list(numbers), heads, kv_heads or heads, head_dim, head_dim_v, softmax_scale, softcap,
                             window, causal, sinks)]
    elif any(value is not None for value in (layers, heads, kv_heads, head_dim, head_dim_v, softmax_scale, softcap,
                                             window, sinks)):
        raise invalid("groups", "excludes layers, heads and the other fields of a group")
    if (tokens is None) == (blocks is None):
        raise invalid("tokens", "or blocks must be given, and not both")
    block_tokens = whole_number(block_tokens, "block_tokens")
    if tokens is not None:
        tokens = whole_number(tokens, "tokens")
        # Groups share the blocks, and each group needs as many.
        blocks = len(groups) * max(1, -(-tokens // block_tokens) if block_tokens > 0 else 1)
    return {"groups": [group.proto() for group in groups], "dtype": service_dtype(dtype), "block_tokens": block_tokens,
            "blocks": blocks, "numbering": numbering, "label": label}


class Step(OfOneProcess):
    """One forward pass over a cache, made by `WorkerCache.step`. Sends its description with the first `attend`."""

    def __init__(self, cache: "WorkerCache", rows: Sequence[Row]) -> None:
        self._cache = cache
        self._rows = tuple(rows)
        self.reports: list[LayerReport] = []  #: of the calls, in order

    @property
    def rows(self) -> tuple[Row, ...]:
        return self._rows

    @property
    def q_tokens(self) -> int:
        return sum(row.q_tokens for row in self._rows)

    @property
    def append_tokens(self) -> int:
        return sum(row.append for row in self._rows)

    def __enter__(self) -> "Step":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def attend(self, layer: int, q: Any, k: Any = None, v: Any = None, *, lse: bool = False, partial: bool = False,
               deadline: float = _FOREVER) -> Any:
        """Appends k and v to a layer and attends with q. Rows follow one another in every tensor.

        Args:
            q: [q_tokens, heads, head_dim], of the cache's dtype.
            k, v: [append_tokens, kv_heads, head_dim]; None: only reads, after the layer's append in this step.
            lse: returns (out, lse) with lse [heads, q_tokens] in fp32, natural logarithm.
            partial: returns (out, lse) with out in fp32 and without sinks, to be merged with other partial results.
            deadline: seconds.

        Returns:
            out [q_tokens, heads, head_dim_v], of q's library and on q's device.

        Raises:
            StepRefusedError: naming the rows. The cache is unchanged; `WorkerCache.step` may describe another step.
            CacheLostError, CacheExpiredError, CacheFencedError: this cache can no longer be used.
        """
        arrays = self._take(layer, {"q": q, "k": k, "v": v})
        kind = "partial" if partial else "out_and_lse" if lse else "out"
        group, library = self._cache.group_of(layer), arrays["q"].library
        out, out_memory = library.empty((self.q_tokens, group["num_heads"], group["head_dim_v"]),
                                        "float32" if partial else arrays["q"].dtype)
        lse_out = lse_memory = None
        if kind != "out":
            lse_out, lse_memory = library.empty((group["num_heads"], self.q_tokens), "float32")
        self._call(layer, kind, arrays, out_memory, lse_memory, deadline)
        out = library.finish(out)
        return out if kind == "out" else (out, library.finish(lse_out))

    def append(self, layer: int, k: Any, v: Any, *, deadline: float = _FOREVER) -> None:
        """Appends without attending. The step's rows must have `queries=0`."""
        if self.q_tokens:
            raise invalid("queries", f"is {self.q_tokens} in total; append() needs rows with queries=0")
        self._call(layer, "none", self._take(layer, {"k": k, "v": v}), None, None, deadline)

    def _take(self, layer: int, tensors: dict[str, Any]) -> dict[str, Array]:
        """The arrays of a layer call, checked."""
        group = self._cache.group_of(layer)
        if (tensors.get("k") is None) != (tensors.get("v") is None):
            raise invalid("v", "is missing" if tensors.get("v") is None else "is given without k")
        arrays = self._cache._take({field: tensor for field, tensor in tensors.items()
                                    if tensor is not None or field == "q"})
        shapes = {"q": (self.q_tokens, group["num_heads"], group["head_dim"]),
                  "k": (self.append_tokens, group["num_kv_heads"], group["head_dim"]),
                  "v": (self.append_tokens, group["num_kv_heads"], group["head_dim_v"])}
        for field, array in arrays.items():
            if array.shape != shapes[field]:
                raise invalid(field, f"has the shape {list(array.shape)}; the step needs {list(shapes[field])}")
        return arrays

    def _call(self, layer: int, kind: str, arrays: dict[str, Array], out: Any, lse: Any, deadline: float) -> None:
        cache = self._cache
        memory = {field: array.memory for field, array in arrays.items()}
        report, error = cache._wait(cache._writer().call, layer, kind, memory.get("q"), memory.get("k"),
                                    memory.get("v"), out, lse, deadline)
        if error is not None:
            raise cache._error(error)
        cache._sequences = None
        self.reports.append(LayerReport(**report))


class WorkerCache(OfOneProcess):
    """The writer of a K/V cache, made by `Client.create_cache` or `Client.open_cache`. Thread safe.

    Opening a cache makes this object its only writer: an earlier writer gets CacheFencedError. The cache is kept until
    `close`, `delete` or the end of the process. As a context manager it ends with `delete` if this client created it,
    otherwise with `close`. A signal handler cannot use the cache while its thread is in a call of it: RuntimeError.
    """

    def __init__(self, core: _core.KvCache, client: "Client", is_owner: bool) -> None:
        self._is_owner = is_owner
        self._core: _core.KvCache | None = core
        self._client = client
        self._id = core.id
        self._spec = core.spec
        self._placement = core.placement
        self._groups = {layer: group for group in self._spec["groups"] for layer in group["layers"]}
        self._sequences: dict[int, int] | None = None  # of the core; None: to be asked for
        self._waiting: set[int] = set()  # threads in a call that holds the core's lock

    def __repr__(self) -> str:
        return f"<ringattn.WorkerCache of {len(self._groups)} layers{'' if self._core else ', closed'}>"

    def __enter__(self) -> "WorkerCache":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_owner and not self._client._is_forked:
            self.delete()
        else:
            self.close()

    def _writer(self) -> _core.KvCache:
        self._client._connected()
        self._check_thread()
        if self._core is None:
            raise RuntimeError("the cache is closed")
        return self._core

    def _check_thread(self) -> None:
        if threading.get_ident() in self._waiting:
            raise RuntimeError("the cache is in a call of this thread; what runs during the call, such as a signal handler, "
                               "cannot use the cache")

    def _wait(self, call: Callable[..., Any], *args: Any) -> Any:
        """Runs a call of the core during which signal handlers run."""
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            return call(*args)
        finally:
            self._waiting.discard(thread)

    def _error(self, details: dict[str, Any]) -> Exception:
        if details["reason"] == "STEP_REFUSED":
            return StepRefusedError.of(details, self._writer().refusal.get("rows", []))
        return error_of(details)

    def _raise(self, details: dict[str, Any] | None) -> None:
        self._sequences = None
        if details is not None:
            raise self._error(details)

    def _take(self, values: dict[str, Any]) -> dict[str, Array]:
        arrays = take_all_on_host(values)
        for field, array in arrays.items():
            if array.dtype != self.dtype:
                raise invalid(field, f"is of type {array.dtype}; the cache's is {self.dtype}")
        return arrays

    # ------------------------------------------------------------------ state

    @property
    def id(self) -> bytes:
        """For `Client.open_cache`. Any anonymous client that knows the id of an anonymous client's cache can open it."""
        return self._id

    @property
    def spec(self) -> dict[str, Any]:
        """The proto KvCacheSpec as a dict, with defaults resolved."""
        return self._spec

    @property
    def dtype(self) -> str:
        return self._spec["dtype"]

    @property
    def layers(self) -> list[int]:
        return sorted(self._groups)

    @property
    def placement(self) -> dict[str, Any]:
        """The proto KvPlacement as a dict: members, head_parts, position_parts, block_tokens, reason."""
        return self._placement

    @property
    def epoch(self) -> int:
        return self._writer().epoch

    @property
    def transport(self) -> str:
        """"host_memory", "direct" or "relay"."""
        return self._writer().transport

    @property
    def transport_reason(self) -> str:
        return self._writer().transport_reason

    @property
    def bytes_per_worker(self) -> int:
        return self._writer().bytes_per_worker

    @property
    def sequences(self) -> dict[int, int]:
        """The length of every sequence after the last accepted step."""
        if self._sequences is None:
            self._sequences = self._writer().sequences
        return dict(self._sequences)

    @property
    def blocks_free(self) -> int:
        """After the last accepted step."""
        return self._writer().blocks_free

    @property
    def leaving(self) -> bool:
        """As of the last accepted step: a worker of the cache was ordered to end. The cache is lost
        when the worker ends; prefill another one before that."""
        return self._writer().leaving

    def length(self, sequence: int) -> int:
        """0 for a sequence that does not exist."""
        if self._sequences is None:
            self._sequences = self._writer().sequences
        return self._sequences.get(sequence, 0)

    def group_of(self, layer: int) -> dict[str, Any]:
        """The proto KvLayerGroup of a layer, as a dict. Raises InvalidArgumentError for an unknown layer."""
        if layer not in self._groups:
            raise invalid("layer", f"is {layer}; the cache has layers {self.layers}")
        return self._groups[layer]

    def layer(self, layer: int) -> "LayerCache":
        """One layer, for `flash_attn_with_kvcache`."""
        self.group_of(layer)
        return LayerCache(self, layer)

    # ------------------------------------------------------------------ steps

    def step(self, rows: Iterable[Row], *, fork: Iterable[tuple[int, int, int]] = (),
             drop: Iterable[int] = ()) -> Step:
        """Describes the next step: one forward pass of the model, to be called once for every layer.

        Args:
            rows: one for each sequence of the batch.
            fork: (source, target, length): the target begins with the source's first entries. Runs before the rows.
            drop: sequences to free. Runs after the forks.

        Raises:
            FailedPreconditionError: STEP_ORDER, while layers of the step before have not been called.
        """
        rows = tuple(rows)
        is_blocks = self._spec["numbering"] == "blocks"
        lengths = self._lengths_after(fork := list(fork), drop := list(drop))
        begin: dict[str, Any] = {"commands": _commands(fork, drop), "rows": []}
        for row in rows:
            length = lengths.get(row.sequence, 0)
            keep = length if row.keep is None else row.keep
            if is_blocks and row.keep is None:
                raise invalid("keep", "is missing; with numbering \"blocks\" the caller keeps lengths")
            begin["rows"].append({
                "sequence": row.sequence, "expected_length": keep if is_blocks else length, "keep_length": keep,
                "append_tokens": row.append, "q_tokens": row.q_tokens,
                "tables": [{"group": group, "first": first, "blocks": list(blocks)}
                           for group, first, blocks in row.tables]})
        self._raise(self._writer().begin(begin))
        return Step(self, rows)

    def _lengths_after(self, fork: list[tuple[int, int, int]], drop: list[int]) -> dict[int, int]:
        lengths = self.sequences
        lengths.update({target: length for _, target, length in fork})
        for sequence in drop:
            lengths.pop(sequence, None)
        return lengths

    def commit(self, *, deadline: float = _FOREVER) -> None:
        """Commits the step in progress. The next step does so, too."""
        self._raise(self._wait(self._writer().commit, deadline))

    def fork(self, source: int, target: int, length: int | None = None, *, deadline: float = _FOREVER) -> None:
        """Makes `target` a copy of the first entries of `source`. Shares their memory until one of them writes."""
        length = self.length(source) if length is None else length
        self._raise(self._wait(self._writer().run_commands, _commands([(source, target, length)], []), deadline))

    def drop(self, *sequences: int, deadline: float = _FOREVER) -> None:
        """Frees sequences."""
        self._raise(self._wait(self._writer().run_commands, _commands([], sequences), deadline))

    def round_trip(self, *, deadline: float = _FOREVER) -> None:
        """Exchanges a small message on the streams of `attend`, for measurements."""
        self._raise(self._wait(self._writer().round_trip, deadline))

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Stops writing and holding the cache, which ends with its ttl. Idempotent.

        In a child of fork(), the parent remains the writer.
        """
        self._check_thread()
        core, self._core = self._core, None
        if core is not None and not self._client._is_forked:
            core.close()

    def delete(self, *, deadline: float = 10.0) -> None:
        """Frees the cache's memory. Raises NotFoundError if the cache is unknown."""
        if self._core is None:
            return
        if self._client._is_forked:
            raise RuntimeError(FORKED)
        self._check_thread()
        core, self._core = self._core, None
        error = core.delete(deadline)
        if error is not None:
            raise error_of(error)


def _commands(fork: Iterable[tuple[int, int, int]], drop: Iterable[int]) -> list[dict[str, Any]]:
    commands: list[dict[str, Any]] = [{"fork": {"source": source, "target": target, "length": length}}
                                      for source, target, length in fork]
    if dropped := [whole_number(sequence, "drop") for sequence in drop]:
        commands.append({"drop": {"sequences": dropped}})
    return commands


class LayerCache(OfOneProcess):
    """One layer of a cache, in place of flash-attn's k_cache. Made by `WorkerCache.layer`."""

    def __init__(self, cache: WorkerCache, layer: int) -> None:
        self.cache = cache
        self.layer = layer

    def __repr__(self) -> str:
        return f"<ringattn.LayerCache of layer {self.layer}>"
