"""Builds requests from tensors and options: header, inputs, and memory for the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringattn import _core
from ringattn._arguments import flag, items_of, positive_seconds, seed_number, signed_number, whole_number, window_pair
from ringattn._arrays import Array, as_float32, as_int32, floats, integers, refuse_derivatives, take
from ringattn._dtypes import float_name
from ringattn._errors import invalid
from ringattn._options import ATTENTION_NAMES, DilationLevel, Document, Window
from ringattn._residuals import Residual, handle_of
from ringattn._shape import Shape, inputs_of, none_given
from ringattn._tail import Tail, tail_of
from ringattn._writer import Writer

#: Allocates bytes in shared memory; returns None if there is none.
Room = Callable[[int], "np.ndarray | None"]


@dataclass
class Request:
    """One call, ready to start. It keeps the memory of `inputs` and `outputs` alive until the call ends."""

    is_forward: bool
    header: dict[str, Any]
    inputs: dict[str, np.ndarray]
    call: dict[str, Any]
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)  #: tensors of the caller's library, which the call fills
    library: Any = None
    shapes: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  #: shapes and types of the results
    residual: Callable[[str], Residual] | None = None  #: creates the Residual of a handle
    on_progress: Callable[[Any], None] | None = None
    placement: Any = None  #: call on a GPU: _cuda_regions.Placement
    tail: Tail | None = None  #: tokens of the caller's tensors that are not sent

    def make_room(self, room: Room | None = None) -> None:
        """Allocates the results, with `room` if it has memory, else in the caller's library."""
        for name, (shape, dtype) in self.shapes.items():
            memory = None
            if room is not None:
                itemsize = 2 if dtype in ("bfloat16", "float16") else 4
                memory = room(math.prod(shape) * itemsize)
            self.results[name], self.outputs[name] = self.library.empty(shape, dtype, memory)

    def finish(self, name: str) -> Any:
        """Returns a result, or None if the call has none with this name."""
        if name not in self.results:
            return None
        result = self.library.finish(self.results[name])
        return result if self.tail is None else self.tail.fill(name, result)


def _window_dict(window: Window | None, name: str) -> dict[str, int] | None:
    if window is None:
        return None
    left, right = window_pair(window, name)
    return {"left": left, "right": right}


def _document_dict(document: Document, index: int) -> dict[str, Any]:
    window = _window_dict(document.window, f"documents[{index}].window")
    return {"causal": flag(document.causal, f"documents[{index}].causal"), "window": window}


def _plan_dict(options: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: whole_number(options[name], name)
               for name in ("world_size", "stripe", "heads_per_step", "group_size", "tile_q", "tile_kv",
                            "key_splits")
               if options.get(name) is not None}
    tuning = {name: numbers.pop(name) for name in ("tile_q", "tile_kv", "key_splits") if name in numbers}
    plan: dict[str, Any] = {name: None if options.get(name) == "auto" else options.get(name)
                            for name in ("layout", "schedule")}
    plan |= numbers
    return plan | {"members": list(options.get("members") or ()), "tuning": tuning or None}


def _call_dict(options: Mapping[str, Any]) -> dict[str, Any]:
    deadline = options.get("deadline")
    if deadline is not None:
        deadline = positive_seconds(deadline, "deadline")
    transport = options.get("transport") or "auto"
    if transport not in ("auto", "relay", "direct", "host_memory", "cuda_memory"):
        raise invalid("transport", f"is {transport!r}; must be auto, relay, direct, host_memory or cuda_memory")
    if transport not in _core.TRANSPORTS:
        raise NotImplementedError(f"transport: {transport!r} is not served by this version")
    writer = options.get("writer")
    retain = options.get("retain")
    if retain is None or retain is False:
        retain = None
    elif retain is True:
        retain = 0.0
    else:
        retain = positive_seconds(retain, "retain", ", or True")
    interval = positive_seconds(options.get("progress_interval", 0.2), "progress_interval")
    return {"progress_interval": interval if options.get("on_progress") is not None else 0.0,
            "crc32c": options.get("crc32c", True),
            "request_id": options.get("request_id"), "deadline": deadline,
            "timeline": options.get("timeline", False), "traceparent": options.get("traceparent"),
            "transport": transport, "retain": retain, "writer": writer if writer is None else writer.header()}


def origin_of(origin: Any) -> list[int]:
    """Returns `dropout_origin` as four whole numbers."""
    try:
        numbers = list(origin)
    except TypeError:
        numbers = []
    if len(numbers) != 4:
        raise invalid("dropout_origin", f"is {origin!r}; must be (batch row or document, head, query, key)")
    return [whole_number(value, f"dropout_origin[{index}]") for index, value in enumerate(numbers)]


def _score_terms(options: Mapping[str, Any], shape: Shape, header: dict[str, Any],
                 inputs: dict[str, np.ndarray]) -> None:
    """Adds the fields and tensors of bias, mask, segment ids, sinks, ALiBi and dropout."""
    bias = options.get("bias")
    if bias is not None:
        tensor = take(bias, "bias")
        shape.pairs("bias", tensor, shape.longest_k)
        if tensor.dtype not in (shape.dtype, "float32"):
            dtypes = "" if shape.dtype == "float32" else f"{shape.dtype} or "
            raise invalid("bias", f"is {tensor.dtype}; must be {dtypes}float32")
        header["bias"] = {"per_batch": tensor.shape[0] != 1, "per_head": tensor.shape[1] > 1,
                          "dtype": None if tensor.dtype == shape.dtype else "float32",
                          "before_softcap": options.get("bias_before_softcap", False),
                          "gradient": options.get("bias_gradient", False)}
        inputs["bias"] = tensor.memory
    for name, of in (("bias_gradient", "bias"), ("bias_before_softcap", "bias"), ("mask_bits", "mask")):
        if options.get(name) and options.get(of) is None:
            raise invalid(name, f"is set without {of}")
    mask = options.get("mask")
    if mask is not None:
        tensor = take(mask, "mask")
        bits = options.get("mask_bits", False)
        shape.pairs("mask", tensor, -(-shape.longest_k // 8) if bits else shape.longest_k)
        if tensor.dtype != "uint8":
            raise invalid("mask", f"is {tensor.dtype}; must be boolean or uint8")
        header["mask"] = {"per_batch": tensor.shape[0] != 1, "per_head": tensor.shape[1] > 1,
                          "encoding": "bits" if bits else "bytes"}
        inputs["mask"] = tensor.memory
    ids = {"q_segment_ids": shape.seq_q, "kv_segment_ids": shape.seq_k}
    given = [name for name in ids if options.get(name) is not None]
    if len(given) == 1:
        raise invalid(given[0], "q_segment_ids and kv_segment_ids go together")
    for name in given:
        tensor = take(as_int32(options[name], name), name)
        shape.require(name, tensor, (*shape.leading, ids[name]), ("int32",))
        header["segment_ids"] = {}
        inputs[name] = tensor.memory
    if options.get("sinks") is not None:
        tensor = take(as_float32(options["sinks"], "sinks"), "sinks")
        shape.require("sinks", tensor, (shape.heads,), ("float32",))
        header["sinks"] = {}
        inputs["sinks"] = tensor.memory
    if options.get("alibi_slopes") is not None:
        slopes = floats(options["alibi_slopes"], "alibi_slopes")
        rows = shape.documents if shape.packed else shape.batch
        if slopes.shape not in ((shape.heads,), (rows, shape.heads)):
            raise invalid("alibi_slopes", f"has the shape {list(slopes.shape)}; must be [{shape.heads}] or "
                                          f"[{rows}, {shape.heads}]")
        header["alibi"] = {"slopes": slopes.ravel().tolist()}
    rate = options.get("dropout_p", 0.0)
    if rate != 0.0:
        batch, head, query, key = origin_of(options.get("dropout_origin", (0, 0, 0, 0)))
        header["dropout"] = {"rate": rate, "seed": seed_number(options.get("dropout_seed", 0), "dropout_seed"),
                             "first_batch": batch, "first_head": head, "first_query": query, "first_key": key}


def _level_dict(level: DilationLevel, index: int) -> dict[str, Any]:
    return {name: None if (value := getattr(level, name)) is None
            else signed_number(value, f"dilation_levels[{index}].{name}")
            for name in ("segment_length", "dilation_rate", "offset", "head_begin", "head_end")}


def _lse_format(options: Mapping[str, Any], shape: Shape) -> str | None:
    lse_format = options.get("lse_format")
    if lse_format in (None, "flat"):
        return None
    if lse_format != "per_document":
        raise invalid("lse_format", f"is {lse_format!r}; must be flat or per_document")
    if not shape.packed:
        raise invalid("lse_format", "is per_document, which needs cu_seqlens_q and cu_seqlens_k")
    return lse_format


_CUT_OPTIONS = ("bias", "mask", "q_segment_ids", "kv_segment_ids", "dlse")


def _build(is_forward: bool, values: Mapping[str, Any],
           options: Mapping[str, Any]) -> tuple[Request, Shape, Mapping[str, Array], Mapping[str, Any]]:
    """The request; its shape; its q, k, v, qkv and kv; and its options, whose tensors have no tail either."""
    cu_q, cu_k = (None if options.get(name) is None else integers(options[name], name)
                  for name in ("cu_seqlens_q", "cu_seqlens_k"))
    if (cu_q is None) != (cu_k is None):
        raise invalid("cu_seqlens_q", "cu_seqlens_q and cu_seqlens_k go together")
    documents = [_document_dict(document, index)
                 for index, document in enumerate(items_of(options.get("documents"), Document, "documents"))]
    if documents and cu_q is None:
        raise invalid("documents", "are given without cu_seqlens_q and cu_seqlens_k")
    writer = options.get("writer")
    if writer is not None and not isinstance(writer, Writer):
        raise TypeError(f"writer: is {type(writer).__name__}; must be ringattn.Writer")
    # A writer's tensors have other tokens than cu_seqlens.
    tail = tail_of(values, cu_q, cu_k, options.get("lse_format")) if writer is None else None
    if tail is not None:
        values = {name: tail.cut(name, value) for name, value in values.items()}
        options = {**options, **{name: tail.cut(name, options[name]) for name in _CUT_OPTIONS if name in options}}
    tensors = {name: take(value, name) for name, value in values.items()}
    shape = Shape(tensors, cu_q, cu_k, writer)
    for name in ("softmax_scale", "softcap", "dropout_p"):
        refuse_derivatives(options.get(name), name)
    softcap, deterministic = options.get("softcap"), options.get("deterministic")
    attention: dict[str, Any] = {
        "softmax_scale": options.get("softmax_scale"), "softcap": None if softcap == 0 else softcap,
        "causal": options.get("causal", False), "window": _window_dict(options.get("window"), "window"),
        "dilation_levels": [_level_dict(level, index) for index, level in enumerate(
            items_of(options.get("dilation_levels"), DilationLevel, "dilation_levels"))],
        "deterministic": "same_ring" if deterministic is not None and flag(deterministic, "deterministic") else None,
        "compute_dtype": float_name(options.get("compute_dtype"), "compute_dtype", "float8_e4m3")}
    inputs = {name: tensor.memory for name, tensor in tensors.items()}
    _score_terms(options, shape, attention, inputs)
    header = {"shape": shape.header(cu_q, cu_k, documents), "dtype": shape.dtype,
              "output_dtype": float_name(options.get("output_dtype"), "output_dtype", "float32"),
              "lse_format": _lse_format(options, shape),
              "options": attention, "plan": _plan_dict(options)}
    library = next(iter(tensors.values())).library
    request = Request(is_forward, header, inputs, _call_dict(options), library=library,
                      on_progress=options.get("on_progress"), tail=tail)
    return request, shape, tensors, options


def _known_shapes(tensors: Mapping[str, Array], request: Request, shape: Shape,
                  options: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Returns the shapes by tensor, and the types of "q", "out" and "bias", from which those of gradients follow."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    shapes |= {"out": shape.out, "lse": shape.lse(request.header["lse_format"])}
    dtypes = {"q": shape.dtype, "out": request.header["output_dtype"] or shape.dtype}
    if options.get("bias_gradient"):
        bias = take(options["bias"], "bias")
        shapes["bias"], dtypes["bias"] = bias.shape, bias.dtype
    if "sinks" in request.inputs:
        shapes["sinks"] = (shape.heads,)
    return shapes, dtypes


def _gradient_shapes(shapes: Mapping[str, tuple[int, ...]],
                     dtypes: Mapping[str, str]) -> dict[str, tuple[tuple[int, ...], str]]:
    results = {f"d{name}": (shapes[name], dtypes["out"]) for name in ("q", "k", "v", "qkv", "kv") if name in shapes}
    if "sinks" in shapes:
        results["dsinks"] = (shapes["sinks"], "float32")
    if "bias" in shapes:
        results["dbias"] = (shapes["bias"], dtypes["bias"])
    return results


def _probability_rows(options: Mapping[str, Any]) -> list[dict[str, int]]:
    given, rows = options.get("probability_rows"), []
    for index, row in enumerate(() if given is None else given):
        try:
            batch, position = row
        except (TypeError, ValueError):
            raise invalid(f"probability_rows[{index}]",
                          f"is {row!r}; must be (batch row or document, position)") from None
        batch, position = (whole_number(value, f"probability_rows[{index}]") for value in (batch, position))
        if position < 0:
            raise invalid(f"probability_rows[{index}]", f"has position {position}; must not be negative")
        rows.append({"batch": batch, "position": position})
    return rows


def forward_request(q: Any, k: Any, v: Any, qkv: Any, kv: Any, options: Mapping[str, Any]) -> Request:
    """Builds a forward. Raises InvalidArgumentError, naming the field, if arguments contradict each other."""
    request, shape, tensors, options = _build(True, inputs_of(q, k, v, qkv, kv), options)
    shapes, dtypes = _known_shapes(tensors, request, shape, options)
    request.shapes = {"out": (shapes["out"], dtypes["out"]), "lse": (shapes["lse"], "float32")}
    if request.call["retain"] is not None:
        header = {name: value for name, value in request.header.items() if name != "plan"}
        request.residual = lambda handle: Residual(handle, header, shapes, dtypes, request.library, request.tail)
    if rows := _probability_rows(options):
        request.shapes["probabilities"] = (shape.probabilities(rows), "float32")
        request.header["probability_rows"] = rows
    return request


def _take_as(request: Request, name: str, value: Any, expected: tuple[int, ...], dtype: str) -> None:
    tensor = take(value if request.tail is None else request.tail.cut(name, value), name)
    if tensor.shape != expected:
        raise invalid(name, f"has the shape {list(tensor.shape)}; must be {list(expected)}")
    if tensor.dtype != dtype:
        raise invalid(name, f"is {tensor.dtype}; must be {dtype}")
    request.inputs[name] = tensor.memory


def _backward_of_residual(dout: Any, options: Mapping[str, Any]) -> Request:
    """Builds a backward without q, k and v. Their shapes and types come from the residual."""
    residual = options["residual"]
    if not isinstance(residual, Residual):
        raise TypeError("residual: is a handle, which requires q, k and v; pass Report.residual to omit them")
    for name in sorted(ATTENTION_NAMES & set(options)):
        if options[name] is not None and options[name] is not False:
            raise invalid(name, "is determined by the residual's forward; pass q, k and v to set it")
    header = {**residual.header, "plan": _plan_dict(options), "residual_handle": residual.handle,
              "keep_residual": options.get("keep_residual", False)}
    request = Request(False, header, {}, _call_dict(options), library=residual.library,
                      on_progress=options.get("on_progress"), tail=residual.tail)
    _take_as(request, "dout", dout, residual.shapes["out"], residual.dtypes["q"])
    if options.get("dlse") is not None:
        _take_as(request, "dlse", options["dlse"], residual.shapes["lse"], "float32")
    request.shapes = _gradient_shapes(residual.shapes, residual.dtypes)
    return request


def backward_request(dout: Any, q: Any, k: Any, v: Any, qkv: Any, kv: Any, out: Any, lse: Any,
                     options: Mapping[str, Any]) -> Request:
    """Builds a backward. `out` and `lse` are both given, or neither, and are then recomputed."""
    if dout is None:
        raise TypeError("dout: is missing")
    residual = options.get("residual")
    if residual is None and options.get("keep_residual"):
        raise invalid("keep_residual", "is set without residual")
    if (out is None) != (lse is None):
        raise invalid("out" if lse is None else "lse", "out and lse go together")
    if residual is not None and none_given(q, k, v, qkv, kv, out):
        return _backward_of_residual(dout, options)
    request, shape, tensors, options = _build(False, inputs_of(q, k, v, qkv, kv), options)
    shapes, dtypes = _known_shapes(tensors, request, shape, options)
    _take_as(request, "dout", dout, shapes["out"], dtypes["q"])
    if out is not None:
        _take_as(request, "out", out, shapes["out"], dtypes["out"])
        _take_as(request, "lse", lse, shapes["lse"], "float32")
    if options.get("dlse") is not None:
        _take_as(request, "dlse", options["dlse"], shapes["lse"], "float32")
    if residual is not None:
        request.header |= {"residual_handle": handle_of(residual),
                           "keep_residual": options.get("keep_residual", False)}
    request.shapes = _gradient_shapes(shapes, dtypes)
    return request
