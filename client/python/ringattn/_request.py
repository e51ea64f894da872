"""From tensors and options to what the extension module sends: header, inputs, and room for the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringattn import _core
from ringattn._arrays import Array, floats, integers, take
from ringattn._errors import invalid
from ringattn._options import ATTENTION_NAMES, Document, Window
from ringattn._residuals import Residual, handle_of

#: Room for so many bytes where workers can write, as an array of them; None: there is none.
Room = Callable[[int], "np.ndarray | None"]


@dataclass
class Request:
    """One call, ready to be started. What `inputs` and `outputs` hold must live until its end; it does so here."""

    is_forward: bool
    header: dict[str, Any]
    inputs: dict[str, np.ndarray]
    call: dict[str, Any]
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)  #: tensors of the caller's library, filled by the call
    library: Any = None
    shapes: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  #: of the results, with their types
    residual: Callable[[str], Residual] | None = None  #: of the handle that a forward came back with

    def make_room(self, room: Room | None = None) -> None:
        """Memory for the results: `room`'s where there is some, else the caller's library's."""
        for name, (shape, dtype) in self.shapes.items():
            memory = None
            if room is not None:
                itemsize = 2 if dtype in ("bfloat16", "float16") else 4
                memory = room(math.prod(shape) * itemsize)
            self.results[name], self.outputs[name] = self.library.empty(shape, dtype, memory)

    def finish(self, name: str) -> Any:
        """A result, or None where the call has none of that name."""
        return self.library.finish(self.results[name]) if name in self.results else None


class _Shape:
    """What q, k and v say, dense or packed, checked against one another."""

    def __init__(self, q: Array, k: Array, v: Array, cu_q: list[int] | None, cu_k: list[int] | None) -> None:
        self.packed = cu_q is not None
        rank = 3 if self.packed else 4
        axes = "[tokens, heads, head_dim]" if self.packed else "[batch, tokens, heads, head_dim]"
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if len(tensor.shape) != rank:
                raise invalid(name, f"has the shape {list(tensor.shape)}, must be {axes}")
            if tensor.dtype != q.dtype:
                raise invalid(name, f"is {tensor.dtype}, q is {q.dtype}")
        if q.dtype not in ("float32", "bfloat16", "float16"):
            raise invalid("q", f"is {q.dtype}, must be float32, bfloat16 or float16")
        self.batch = 1 if self.packed else q.shape[0]
        self.seq_q, self.heads, self.dim = q.shape[-3:]
        self.seq_k, self.kv_heads, k_dim = k.shape[-3:]
        self.dim_v = v.shape[-1]
        self.leading = () if self.packed else (self.batch,)
        if k_dim != self.dim:
            raise invalid("k", f"has a head_dim of {k_dim}, q one of {self.dim}")
        self.require("k", k, (*self.leading, self.seq_k, self.kv_heads, self.dim))
        self.require("v", v, (*self.leading, self.seq_k, self.kv_heads, self.dim_v))
        self.longest_k = self.seq_k
        if cu_q is not None and cu_k is not None:
            self.longest_k = max((b - a for a, b in zip(cu_k, cu_k[1:])), default=0)
        self.documents = len(cu_q) - 1 if cu_q is not None else 0

    def require(self, name: str, tensor: Array, shape: tuple[int, ...], dtypes: tuple[str, ...] = ()) -> None:
        if tensor.shape != shape:
            raise invalid(name, f"has the shape {list(tensor.shape)}, must be {list(shape)}")
        if dtypes and tensor.dtype not in dtypes:
            raise invalid(name, f"is {tensor.dtype}, must be {' or '.join(dict.fromkeys(dtypes))}")

    def header(self, cu_q: list[int] | None, cu_k: list[int] | None,
               documents: list[dict[str, Any]]) -> dict[str, Any]:
        shape: dict[str, Any] = {
            "batch": self.batch, "seq_len_q": self.seq_q, "seq_len_kv": self.seq_k, "num_heads": self.heads,
            "num_kv_heads": self.kv_heads, "head_dim": self.dim, "head_dim_v": self.dim_v}
        if self.packed:
            shape["packed"] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "options": documents}
        return shape

    @property
    def out(self) -> tuple[int, ...]:
        return (*self.leading, self.seq_q, self.heads, self.dim_v)

    @property
    def lse(self) -> tuple[int, ...]:
        return (*self.leading, self.heads, self.seq_q)

    def pairs(self, name: str, tensor: Array, columns: int) -> None:
        """Of a bias or a mask: [batch or 1, heads or 1, queries, columns]."""
        shape = tensor.shape
        if (len(shape) != 4 or shape[0] not in (1, self.batch) or shape[1] not in (1, self.heads)
                or shape[2:] != (self.seq_q, columns)):
            batch = "1" if self.packed else f"{self.batch} or 1"
            raise invalid(name, f"has the shape {list(shape)}, must be [{batch}, {self.heads} or 1, {self.seq_q}, "
                                f"{columns}]")


def _window_dict(window: Window | None, name: str) -> dict[str, int] | None:
    if window is None:
        return None
    try:
        left, right = (int(side) for side in window)
    except (TypeError, ValueError) as error:
        raise invalid(name, "must be (left, right)") from error
    return {"left": left, "right": right}


def _document_dict(document: Document, index: int) -> dict[str, Any]:
    window = _window_dict(document.window, f"documents[{index}].window")
    return {"causal": document.causal, "window": window}


def _plan_dict(options: Mapping[str, Any]) -> dict[str, Any]:
    plan: dict[str, Any] = {
        name: options.get(name) for name in ("layout", "schedule", "world_size", "stripe", "heads_per_step")}
    tuning = {name: options[name] for name in ("tile_q", "tile_kv", "key_splits") if options.get(name) is not None}
    return plan | {"members": list(options.get("members") or ()), "tuning": tuning or None}


def _call_dict(options: Mapping[str, Any]) -> dict[str, Any]:
    deadline = options.get("deadline")
    if deadline is not None and not 0 < deadline < math.inf:
        raise invalid("deadline", f"is {deadline}, must be a positive number of seconds")
    transport = options.get("transport") or "auto"
    if transport not in ("auto", "relay", "host", "direct"):
        raise invalid("transport", f"is {transport!r}, must be auto, relay, host or direct")
    if transport not in _core.TRANSPORTS:
        raise NotImplementedError(f"transport: {transport!r} is not served by this version")
    retain = options.get("retain")
    if retain is None or retain is False:
        retain = None
    elif retain is True:
        retain = 0.0
    elif not 0 < retain < math.inf:
        raise invalid("retain", f"is {retain}, must be a positive number of seconds, or True")
    return {"request_id": options.get("request_id"), "streams": options.get("streams", 1), "deadline": deadline,
            "timeline": options.get("timeline", False), "traceparent": options.get("traceparent"),
            "transport": transport, "retain": retain}


def _score_terms(options: Mapping[str, Any], shape: _Shape, q: Array, header: dict[str, Any],
                 inputs: dict[str, np.ndarray]) -> None:
    """Bias, mask, segment ids, sinks, ALiBi, dropout: their fields and tensors."""
    bias = options.get("bias")
    if bias is not None:
        tensor = take(bias, "bias")
        shape.pairs("bias", tensor, shape.longest_k)
        if tensor.dtype not in (q.dtype, "float32"):
            raise invalid("bias", f"is {tensor.dtype}, must be {q.dtype} or float32")
        header["bias"] = {"per_batch": tensor.shape[0] > 1, "per_head": tensor.shape[1] > 1,
                          "dtype": None if tensor.dtype == q.dtype else "float32",
                          "before_softcap": options.get("bias_before_softcap", False),
                          "gradient": options.get("bias_gradient", False)}
        inputs["bias"] = tensor.memory
    elif options.get("bias_gradient"):
        raise invalid("bias_gradient", "there is no bias")
    mask = options.get("mask")
    if mask is not None:
        tensor = take(mask, "mask")
        bits = options.get("mask_bits", False)
        shape.pairs("mask", tensor, -(-shape.longest_k // 8) if bits else shape.longest_k)
        if tensor.dtype != "uint8":
            raise invalid("mask", f"is {tensor.dtype}, must be boolean or uint8")
        header["mask"] = {"per_batch": tensor.shape[0] > 1, "per_head": tensor.shape[1] > 1,
                          "encoding": "bits" if bits else "bytes"}
        inputs["mask"] = tensor.memory
    ids = {"q_segment_ids": shape.seq_q, "kv_segment_ids": shape.seq_k}
    given = [name for name in ids if options.get(name) is not None]
    if len(given) == 1:
        raise invalid(given[0], "q_segment_ids and kv_segment_ids go together")
    for name in given:
        tensor = take(options[name], name)
        shape.require(name, tensor, (*shape.leading, ids[name]), ("int32",))
        header["segment_ids"] = {}
        inputs[name] = tensor.memory
    if options.get("sinks") is not None:
        tensor = take(options["sinks"], "sinks")
        shape.require("sinks", tensor, (shape.heads,), ("float32",))
        header["sinks"] = {}
        inputs["sinks"] = tensor.memory
    if options.get("alibi_slopes") is not None:
        slopes = floats(options["alibi_slopes"], "alibi_slopes")
        rows = shape.documents if shape.packed else shape.batch
        if slopes.shape not in ((shape.heads,), (rows, shape.heads)):
            raise invalid("alibi_slopes", f"has the shape {list(slopes.shape)}, must be [{shape.heads}] or "
                                          f"[{rows}, {shape.heads}]")
        header["alibi"] = {"slopes": slopes.ravel().tolist()}
    rate = options.get("dropout_p", 0.0)
    if rate != 0.0:
        batch, head, query, key = options.get("dropout_origin", (0, 0, 0, 0))
        header["dropout"] = {"rate": rate, "seed": int(options.get("dropout_seed", 0)), "first_batch": batch,
                             "first_head": head, "first_query": query, "first_key": key}


def _build(is_forward: bool, q: Array, k: Array, v: Array, options: Mapping[str, Any]) -> tuple[Request, _Shape]:
    cu_q, cu_k = (None if options.get(name) is None else integers(options[name], name)
                  for name in ("cu_seqlens_q", "cu_seqlens_k"))
    if (cu_q is None) != (cu_k is None):
        raise invalid("cu_seqlens_q", "cu_seqlens_q and cu_seqlens_k go together")
    documents = [_document_dict(document, index) for index, document in enumerate(options.get("documents") or ())]
    if documents and cu_q is None:
        raise invalid("documents", "there are none without cu_seqlens_q and cu_seqlens_k")
    shape = _Shape(q, k, v, cu_q, cu_k)
    softcap = options.get("softcap")
    attention: dict[str, Any] = {
        "softmax_scale": options.get("softmax_scale"), "softcap": None if softcap == 0 else softcap,
        "causal": options.get("causal", False), "window": _window_dict(options.get("window"), "window"),
        "deterministic": "same_ring" if options.get("deterministic") else None}
    inputs = {"q": q.memory, "k": k.memory, "v": v.memory}
    _score_terms(options, shape, q, attention, inputs)
    header = {"shape": shape.header(cu_q, cu_k, documents), "dtype": q.dtype,
              "output_dtype": options.get("output_dtype"), "options": attention, "plan": _plan_dict(options)}
    request = Request(is_forward, header, inputs, _call_dict(options), library=q.library)
    return request, shape


def _residual_maker(request: Request, shape: _Shape, q: Array, k: Array, v: Array,
                    options: Mapping[str, Any]) -> Callable[[str], Residual]:
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape, "out": shape.out, "lse": shape.lse}
    dtypes = {"q": q.dtype, "out": request.header["output_dtype"] or q.dtype}
    if options.get("bias_gradient"):
        bias = take(options["bias"], "bias")
        shapes["bias"], dtypes["bias"] = bias.shape, bias.dtype
    if "sinks" in request.inputs:
        shapes["sinks"] = (shape.heads,)
    header = {name: value for name, value in request.header.items() if name != "plan"}
    return lambda handle: Residual(handle, header, shapes, dtypes, request.library)


def _gradient_shapes(shapes: Mapping[str, tuple[int, ...]],
                     dtypes: Mapping[str, str]) -> dict[str, tuple[tuple[int, ...], str]]:
    results = {f"d{name}": (shapes[name], dtypes["out"]) for name in ("q", "k", "v")}
    if "sinks" in shapes:
        results["dsinks"] = (shapes["sinks"], "float32")
    if "bias" in shapes:
        results["dbias"] = (shapes["bias"], dtypes["bias"])
    return results


def forward_request(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Request:
    """Raises InvalidArgumentError, naming the field, for what does not fit together."""
    query, key, value = take(q, "q"), take(k, "k"), take(v, "v")
    request, shape = _build(True, query, key, value, options)
    result = options.get("output_dtype") or query.dtype
    request.shapes = {"out": (shape.out, result), "lse": (shape.lse, "float32")}
    if request.call["retain"] is not None:
        request.residual = _residual_maker(request, shape, query, key, value, options)
    return request


def _take_as(request: Request, name: str, value: Any, expected: tuple[int, ...], dtype: str) -> None:
    tensor = take(value, name)
    if tensor.shape != expected:
        raise invalid(name, f"has the shape {list(tensor.shape)}, must be {list(expected)}")
    if tensor.dtype != dtype:
        raise invalid(name, f"is {tensor.dtype}, must be {dtype}")
    request.inputs[name] = tensor.memory


def _backward_of_residual(dout: Any, options: Mapping[str, Any]) -> Request:
    """Without the tensors: all that is known of them is in the residual."""
    residual = options["residual"]
    if not isinstance(residual, Residual):
        raise TypeError("residual: a handle alone is not enough without q, k and v: give Report.residual")
    for name in sorted(ATTENTION_NAMES & set(options)):
        if options[name] is not None and options[name] is not False:
            raise invalid(name, "is the forward's, which the residual has; give q, k and v beside it to say it again")
    header = {**residual.header, "plan": {}, "residual_handle": residual.handle,
              "keep_residual": options.get("keep_residual", False)}
    request = Request(False, header, {}, _call_dict(options), library=residual.library)
    _take_as(request, "dout", dout, residual.shapes["out"], residual.dtypes["q"])
    if options.get("dlse") is not None:
        _take_as(request, "dlse", options["dlse"], residual.shapes["lse"], "float32")
    request.shapes = _gradient_shapes(residual.shapes, residual.dtypes)
    return request


def backward_request(dout: Any, q: Any | None, k: Any | None, v: Any | None, out: Any | None, lse: Any | None,
                     options: Mapping[str, Any]) -> Request:
    """As forward_request. `out` and `lse`: both, or neither to have them computed again."""
    if dout is None:
        raise TypeError("dout is None")
    residual = options.get("residual")
    if residual is None and options.get("keep_residual"):
        raise invalid("keep_residual", "there is no residual")
    if (out is None) != (lse is None):
        raise invalid("out" if lse is None else "lse", "out and lse go together")
    if q is None and k is None and v is None and out is None and residual is not None:
        return _backward_of_residual(dout, options)
    query, key, value = take(q, "q"), take(k, "k"), take(v, "v")
    request, shape = _build(False, query, key, value, options)
    result = options.get("output_dtype") or query.dtype
    _take_as(request, "dout", dout, shape.out, query.dtype)
    if out is not None:
        _take_as(request, "out", out, shape.out, result)
        _take_as(request, "lse", lse, shape.lse, "float32")
    if options.get("dlse") is not None:
        _take_as(request, "dlse", options["dlse"], shape.lse, "float32")
    if residual is not None:
        request.header |= {"residual_handle": handle_of(residual),
                           "keep_residual": options.get("keep_residual", False)}
    shapes, dtypes = {"q": query.shape, "k": key.shape, "v": value.shape}, {"out": result}
    if "sinks" in request.inputs:
        shapes["sinks"] = (shape.heads,)
    if options.get("bias_gradient"):
        bias = take(options["bias"], "bias")
        shapes["bias"], dtypes["bias"] = bias.shape, bias.dtype
    request.shapes = _gradient_shapes(shapes, dtypes)
    return request
