"""From tensors and options to what the extension module sends: header, inputs, and room for the results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringattn._arrays import Array, floats, integers, take
from ringattn._errors import invalid
from ringattn._options import Document, Window


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
    plan: dict[str, Any] = {name: options.get(name) for name in ("layout", "schedule", "world_size", "stripe")}
    tuning = {name: options[name] for name in ("tile_q", "tile_kv", "key_splits") if options.get(name) is not None}
    return plan | {"members": list(options.get("members") or ()), "tuning": tuning or None}


def _call_dict(options: Mapping[str, Any]) -> dict[str, Any]:
    deadline = options.get("deadline")
    if deadline is not None and not 0 < deadline < math.inf:
        raise invalid("deadline", f"is {deadline}, must be a positive number of seconds")
    return {"request_id": options.get("request_id"), "streams": options.get("streams", 1), "deadline": deadline,
            "timeline": options.get("timeline", False), "traceparent": options.get("traceparent")}


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


def _make_room(request: Request, shapes: dict[str, tuple[tuple[int, ...], str]]) -> Request:
    for name, (shape, dtype) in shapes.items():
        request.results[name], request.outputs[name] = request.library.empty(shape, dtype)
    return request


def forward_request(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Request:
    """Raises InvalidArgumentError, naming the field, for what does not fit together."""
    query = take(q, "q")
    request, shape = _build(True, query, take(k, "k"), take(v, "v"), options)
    result = options.get("output_dtype") or query.dtype
    return _make_room(request, {"out": (shape.out, result), "lse": (shape.lse, "float32")})


def backward_request(dout: Any, q: Any, k: Any, v: Any, out: Any | None, lse: Any | None,
                     options: Mapping[str, Any]) -> Request:
    """As forward_request. `out` and `lse`: both, or neither to have them computed again."""
    query, key, value = take(q, "q"), take(k, "k"), take(v, "v")
    request, shape = _build(False, query, key, value, options)
    result = options.get("output_dtype") or query.dtype
    if (out is None) != (lse is None):
        raise invalid("out" if lse is None else "lse", "out and lse go together")
    wanted = {"dout": (dout, shape.out, query.dtype), "out": (out, shape.out, result),
              "lse": (lse, shape.lse, "float32"), "dlse": (options.get("dlse"), shape.lse, "float32")}
    for name, (tensor, expected, dtype) in wanted.items():
        if tensor is None:
            if name == "dout":
                raise TypeError("dout is None")
            continue
        taken = take(tensor, name)
        shape.require(name, taken, expected, (dtype,))
        request.inputs[name] = taken.memory
    results = {"dq": (query.shape, result), "dk": (key.shape, result), "dv": (value.shape, result)}
    if "sinks" in request.inputs:
        results["dsinks"] = ((shape.heads,), "float32")
    if options.get("bias_gradient"):
        bias = take(options["bias"], "bias")
        results["dbias"] = (bias.shape, bias.dtype)
    return _make_room(request, results)
