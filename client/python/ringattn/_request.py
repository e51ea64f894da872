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
from ringattn._options import ATTENTION_NAMES, DilationLevel, Document, Window
from ringattn._residuals import Residual, handle_of
from ringattn._shape import Shape, none_given, take_inputs

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
    on_progress: Callable[[Any], None] | None = None
    placement: Any = None  #: of a call on a GPU (_cuda.Placement)

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
    if transport not in ("auto", "relay", "direct", "host_memory", "cuda_memory"):
        raise invalid("transport", f"is {transport!r}, must be auto, relay, host, direct or cuda")
    if transport not in _core.TRANSPORTS:
        raise NotImplementedError(f"transport: {transport!r} is not served by this version")
    retain = options.get("retain")
    if retain is None or retain is False:
        retain = None
    elif retain is True:
        retain = 0.0
    elif not 0 < retain < math.inf:
        raise invalid("retain", f"is {retain}, must be a positive number of seconds, or True")
    interval = options.get("progress_interval", 0.2)
    if not 0 < interval < math.inf:
        raise invalid("progress_interval", f"is {interval}, must be a positive number of seconds")
    return {"progress_interval": interval if options.get("on_progress") is not None else 0.0,
            "crc32c": options.get("crc32c", True),
            "request_id": options.get("request_id"), "deadline": deadline,
            "timeline": options.get("timeline", False), "traceparent": options.get("traceparent"),
            "transport": transport, "retain": retain}


def _score_terms(options: Mapping[str, Any], shape: Shape, header: dict[str, Any],
                 inputs: dict[str, np.ndarray]) -> None:
    """Bias, mask, segment ids, sinks, ALiBi, dropout: their fields and tensors."""
    bias = options.get("bias")
    if bias is not None:
        tensor = take(bias, "bias")
        shape.pairs("bias", tensor, shape.longest_k)
        if tensor.dtype not in (shape.dtype, "float32"):
            raise invalid("bias", f"is {tensor.dtype}, must be {shape.dtype} or float32")
        header["bias"] = {"per_batch": tensor.shape[0] > 1, "per_head": tensor.shape[1] > 1,
                          "dtype": None if tensor.dtype == shape.dtype else "float32",
                          "before_softcap": options.get("bias_before_softcap", False),
                          "gradient": options.get("bias_gradient", False)}
        inputs["bias"] = tensor.memory
    for name, of in (("bias_gradient", "bias"), ("bias_before_softcap", "bias"), ("mask_bits", "mask")):
        if options.get(name) and options.get(of) is None:
            raise invalid(name, f"there is no {of}")
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


def _level_dict(level: DilationLevel) -> dict[str, Any]:
    return {"segment_length": level.segment_length, "dilation_rate": level.dilation_rate, "offset": level.offset,
            "head_begin": level.head_begin, "head_end": level.head_end}


def _lse_format(options: Mapping[str, Any], shape: Shape) -> str | None:
    lse_format = options.get("lse_format")
    if lse_format in (None, "flat"):
        return None
    if lse_format != "per_document":
        raise invalid("lse_format", f"is {lse_format!r}, must be flat or per_document")
    if not shape.packed:
        raise invalid("lse_format", "per_document is of packed documents: there are no cu_seqlens_q")
    return lse_format


def _build(is_forward: bool, tensors: Mapping[str, Array], options: Mapping[str, Any]) -> tuple[Request, Shape]:
    cu_q, cu_k = (None if options.get(name) is None else integers(options[name], name)
                  for name in ("cu_seqlens_q", "cu_seqlens_k"))
    if (cu_q is None) != (cu_k is None):
        raise invalid("cu_seqlens_q", "cu_seqlens_q and cu_seqlens_k go together")
    documents = [_document_dict(document, index) for index, document in enumerate(options.get("documents") or ())]
    if documents and cu_q is None:
        raise invalid("documents", "there are none without cu_seqlens_q and cu_seqlens_k")
    shape = Shape(tensors, cu_q, cu_k)
    softcap = options.get("softcap")
    attention: dict[str, Any] = {
        "softmax_scale": options.get("softmax_scale"), "softcap": None if softcap == 0 else softcap,
        "causal": options.get("causal", False), "window": _window_dict(options.get("window"), "window"),
        "dilation_levels": [_level_dict(level) for level in options.get("dilation_levels") or ()],
        "deterministic": "same_ring" if options.get("deterministic") else None,
        "compute_dtype": options.get("compute_dtype")}
    inputs = {name: tensor.memory for name, tensor in tensors.items()}
    _score_terms(options, shape, attention, inputs)
    header = {"shape": shape.header(cu_q, cu_k, documents), "dtype": shape.dtype,
              "output_dtype": options.get("output_dtype"), "lse_format": _lse_format(options, shape),
              "options": attention, "plan": _plan_dict(options)}
    library = next(iter(tensors.values())).library
    return Request(is_forward, header, inputs, _call_dict(options), library=library,
                   on_progress=options.get("on_progress")), shape


def _known_shapes(tensors: Mapping[str, Array], request: Request, shape: Shape,
                  options: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Of what gradients are like: shapes by tensor, and types by "q", "out" and "bias"."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    shapes |= {"out": shape.out, "lse": shape.lse(request.header["lse_format"])}
    dtypes = {"q": shape.dtype, "out": options.get("output_dtype") or shape.dtype}
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
            batch, position = (int(number) for number in row)
        except (TypeError, ValueError) as error:
            raise invalid(f"probability_rows[{index}]", "must be (batch row or document, position)") from error
        if position < 0:
            raise invalid(f"probability_rows[{index}]", f"is of position {position}")
        rows.append({"batch": batch, "position": position})
    return rows


def forward_request(q: Any, k: Any, v: Any, qkv: Any, kv: Any, options: Mapping[str, Any]) -> Request:
    """Raises InvalidArgumentError, naming the field, for what does not fit together."""
    tensors = take_inputs(q, k, v, qkv, kv)
    request, shape = _build(True, tensors, options)
    shapes, dtypes = _known_shapes(tensors, request, shape, options)
    request.shapes = {"out": (shapes["out"], dtypes["out"]), "lse": (shapes["lse"], "float32")}
    if request.call["retain"] is not None:
        header = {name: value for name, value in request.header.items() if name != "plan"}
        request.residual = lambda handle: Residual(handle, header, shapes, dtypes, request.library)
    if rows := _probability_rows(options):
        request.shapes["probabilities"] = (shape.probabilities(rows), "float32")
        request.header["probability_rows"] = rows
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
    header = {**residual.header, "plan": _plan_dict(options), "residual_handle": residual.handle,
              "keep_residual": options.get("keep_residual", False)}
    request = Request(False, header, {}, _call_dict(options), library=residual.library,
                      on_progress=options.get("on_progress"))
    _take_as(request, "dout", dout, residual.shapes["out"], residual.dtypes["q"])
    if options.get("dlse") is not None:
        _take_as(request, "dlse", options["dlse"], residual.shapes["lse"], "float32")
    request.shapes = _gradient_shapes(residual.shapes, residual.dtypes)
    return request


def backward_request(dout: Any, q: Any, k: Any, v: Any, qkv: Any, kv: Any, out: Any, lse: Any,
                     options: Mapping[str, Any]) -> Request:
    """As forward_request. `out` and `lse`: both, or neither to have them computed again."""
    if dout is None:
        raise TypeError("dout is None")
    residual = options.get("residual")
    if residual is None and options.get("keep_residual"):
        raise invalid("keep_residual", "there is no residual")
    if (out is None) != (lse is None):
        raise invalid("out" if lse is None else "lse", "out and lse go together")
    if residual is not None and none_given(q, k, v, qkv, kv, out):
        return _backward_of_residual(dout, options)
    tensors = take_inputs(q, k, v, qkv, kv)
    request, shape = _build(False, tensors, options)
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
