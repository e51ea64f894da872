"""Calls of JAX programs: host callbacks that make the requests, and the rules for gradients.

Forward and backward are callbacks without side effects, which work under `jit`, `grad`, `vmap` and `jax.checkpoint`: a
request depends on its inputs only and leaves nothing on the workers, so JAX may drop a call or repeat it. An
`io_callback` would promise that each call runs once, which nothing here needs, and `vmap` cannot batch an ordered one.
For the same reason no residual is kept: JAX does not report when a forward's backward will never run. The backward sends
the tensors.

With an axis, one collective gives the shards of the axis the id of their request (`_jax_axis`). It is a part of the
program that makes the request, so JAX drops or repeats both on all shards alike.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental.buffer_callback import buffer_callback

from ringattn._default import default_client, default_options
from ringattn._jax_axis import TICKET_WORDS, Axis, call_together, draw


@dataclass(frozen=True)
class Options:
    """What is computed, apart from the arrays. Hashable: a part of JAX's compilation keys."""

    softmax_scale: float | None
    dropout_prob: float
    causal: bool
    window: tuple[int, int] | None
    softcap: float
    axis: Axis | None = None  #: whose shards make the call together; None: each call is a request

    def of_call(self, mask: Any, bias: Any, sinks: Any, seed: Any) -> dict[str, Any]:
        """Returns the options of a client's call."""
        options = {**default_options(), "softmax_scale": self.softmax_scale, "causal": self.causal,
                   "window": self.window, "softcap": self.softcap, "mask": mask, "bias": bias, "sinks": sinks,
                   "bias_before_softcap": bias is not None}
        if seed is not None:
            options |= {"dropout_p": self.dropout_prob, "dropout_seed": int(seed[0]) | int(seed[1]) << 32}
        return options


# ------------------------------------------------------------------ callbacks
#
# vmap adds leading axes to the operands of a callback. Their size is 1 for operands that it does not map.

#: Axes of each operand without those that vmap adds.
_AXES = {"query": 4, "key": 4, "value": 4, "mask": 4, "bias": 4, "sinks": 1, "seed": 1, "out": 4, "lse": 3, "dout": 4,
         "index": 0, "ticket": 1}


def _leading(operands: dict[str, np.ndarray]) -> tuple[int, ...]:
    """Returns the sizes of the axes that vmap added."""
    return np.broadcast_shapes(*(array.shape[:array.ndim - _AXES[name]] for name, array in operands.items()))


def _slice(array: np.ndarray, axes: int, index: tuple[int, ...]) -> np.ndarray:
    """Returns the operand of one mapped call."""
    return array[tuple(0 if size == 1 else i for i, size in zip(index, array.shape[:array.ndim - axes]))]


def _fold(array: np.ndarray, leading: tuple[int, ...], batch: int) -> np.ndarray:
    """Merges the axes that vmap added into the batch axis. A bias or mask that all rows share stays one row."""
    added = len(leading)
    if array.shape[:added + 1] == (1,) * (added + 1) and math.prod(leading) * batch != 1:
        return array.reshape(1, *array.shape[added + 1:])
    rest = array.shape[added + 1:]
    return np.broadcast_to(array, (*leading, batch, *rest)).reshape(-1, *rest)


@dataclass(frozen=True)
class Callback:
    """One host callback. Equal callbacks share JAX's compiled programs."""

    options: Options
    bias_gradient: bool = False

    def __call__(self, **given: Any) -> dict[str, np.ndarray]:
        operands = {name: np.asarray(value) for name, value in given.items() if value is not None}
        leading = _leading(operands)
        if not leading:
            return self._request(operands)
        # Mapped calls are one request with more batch rows. What depends on the call or sums over its rows cannot be.
        if not self.bias_gradient and not {"sinks", "seed"} & set(operands):
            batch = operands["query"].shape[len(leading)]
            shared = {name: array for name, array in operands.items() if name in ("mask", "bias")}
            place = {name: array for name, array in operands.items() if name in ("index", "ticket")}
            rows = {name: np.broadcast_to(array, (*leading, *array.shape[len(leading):])).reshape(
                -1, *array.shape[len(leading) + 1:]) for name, array in operands.items()
                if name not in shared and name not in place}
            rows |= {name: _slice(array, _AXES[name], (0,) * len(leading)) for name, array in place.items()}
            rows |= {name: _fold(array, leading, batch) for name, array in shared.items()}
            return {name: array.reshape(*leading, batch, *array.shape[1:])
                    for name, array in self._request(rows).items()}
        results = [self._request({name: _slice(array, _AXES[name], index) for name, array in operands.items()})
                   for index in np.ndindex(leading)]
        return {name: np.stack([result[name] for result in results]).reshape(*leading, *array.shape)
                for name, array in results[0].items()}

    def fill(self, _: Any, results: dict[str, Any], **given: Any) -> None:
        """Writes the results into JAX's buffers."""
        for name, array in self(**given).items():
            np.asarray(results[name])[...] = array

    def draw(self, **given: Any) -> np.ndarray:
        """Returns this shard's summand of the ticket of each mapped call."""
        operands = {name: np.asarray(value) for name, value in given.items() if value is not None}
        return draw(operands["index"], _leading(operands))

    def fill_draw(self, _: Any, result: Any, **given: Any) -> None:
        """Writes the summand into JAX's buffer."""
        np.asarray(result)[...] = self.draw(**given)

    def _request(self, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        axis = self.options.axis
        if axis is None:
            return self._results(operands, {})
        index = int(operands["index"])
        writer = axis.writer(index, operands["query"].shape[1], operands["key"].shape[1])
        what = f"{'backward' if 'dout' in operands else 'forward'} {self!r}"
        results = call_together(axis, operands["ticket"], what, index,
                                lambda name: self._results(operands, {"writer": writer, "request_id": name}))
        if index and "sinks" in results:
            # Each writer receives the whole gradient. The gradient of the argument is the sum over the shards.
            results["sinks"] = np.zeros_like(results["sinks"])
        return results

    def _results(self, operands: dict[str, np.ndarray], place: dict[str, Any]) -> dict[str, np.ndarray]:
        options = self.options.of_call(*(operands.get(name) for name in ("mask", "bias", "sinks", "seed"))) | place
        inputs = [operands[name] for name in ("query", "key", "value")]
        if "dout" not in operands:
            out, lse, _ = default_client().forward(*inputs, **options)
            return {"out": out, "lse": lse}
        options.pop("key_splits", None)  # applies to the forward only
        result = default_client().backward(operands["dout"], *inputs, out=operands["out"], lse=operands["lse"],
                                           bias_gradient=self.bias_gradient, **options)
        gradients = {"query": result.dq, "key": result.dk, "value": result.dv, "bias": result.dbias,
                     "sinks": result.dsinks}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def _shapes_of_results(callback: Callback, operands: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    query, value = operands["query"], operands["value"]
    if "dout" in operands:
        names = ["query", "key", "value", *(["bias"] if callback.bias_gradient else []),
                 *(["sinks"] if operands["sinks"] is not None else [])]
        return {name: jax.ShapeDtypeStruct(operands[name].shape, operands[name].dtype) for name in names}
    batch, queries, heads, _ = query.shape
    return {"out": jax.ShapeDtypeStruct((batch, queries, heads, value.shape[-1]), query.dtype),
            "lse": jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)}


def _in_place(callback: Callback, operands: dict[str, Any]) -> dict[str, Any]:
    """The call on CPUs: the callback reads and writes XLA's own buffers.

    `jax.pure_callback` would copy large operands in a thread of XLA's pool, and wait for that thread in another. With
    one thread for each core, callbacks on all of them wait forever (jax-ml/jax issue 25861).
    """
    return buffer_callback(callback.fill, _shapes_of_results(callback, operands), vmap_method="expand_dims")(**operands)


def _through_host(callback: Callback, operands: dict[str, Any]) -> dict[str, Any]:
    """The call on other platforms: JAX copies the operands to the host and the results back."""
    return jax.pure_callback(callback, _shapes_of_results(callback, operands), **operands, vmap_method="expand_dims")


_DRAWN = jax.ShapeDtypeStruct((TICKET_WORDS,), np.uint32)


def _draw_in_place(callback: Callback, operands: dict[str, Any]) -> Any:
    return buffer_callback(callback.fill_draw, _DRAWN, vmap_method="expand_dims")(**operands)


def _draw_through_host(callback: Callback, operands: dict[str, Any]) -> Any:
    # Sums depend on the operands as the operands do, and are small.
    sums = {name: None if array is None or name == "index" else jnp.sum(array, dtype=jnp.float32).reshape(
        (1,) * _AXES[name]) for name, array in operands.items()}
    return jax.pure_callback(callback.draw, _DRAWN, **{**sums, "index": operands["index"]}, vmap_method="expand_dims")


def _place(callback: Callback, operands: dict[str, Any]) -> dict[str, Any]:
    """Returns the operands that make a call one of the axis's shards: its index, and the shards' ticket.

    The draw depends on all operands. XLA therefore cannot move it out of a loop, or share it between calls, unless the
    operands of these calls are equal.
    """
    index = jax.lax.axis_index(callback.options.axis.name)
    operands = {**operands, "index": index}
    drawn = jax.lax.platform_dependent(operands, cpu=functools.partial(_draw_in_place, callback),
                                       default=functools.partial(_draw_through_host, callback))
    ticket = jax.lax.psum(varying(drawn, axes_of(operands)), callback.options.axis.name)
    return {"index": index, "ticket": ticket}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def _call(callback: Callback, operands: dict[str, Any]) -> dict[str, Any]:
    """Returns out and lse, or the gradients by the names of their operands if there is a dout."""
    if callback.options.axis is not None:
        operands = {**operands, **_place(callback, operands)}
    results = jax.lax.platform_dependent(operands, cpu=functools.partial(_in_place, callback),
                                         default=functools.partial(_through_host, callback))
    return varying(results, axes_of(operands))


def axes_of(operands: Any) -> frozenset[str]:
    """Returns the axes of a shard_map over which an operand varies. Callbacks do not pass them on to their results."""
    return frozenset().union(*(_axes_of_one(array) for array in jax.tree.leaves(operands)))


def _axes_of_one(array: Any) -> frozenset[str]:
    kind = jax.typeof(array)
    # Releases of JAX before 0.10.2 may have `vma` instead.
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def varying(arrays: Any, axes: frozenset[str]) -> Any:
    """Marks arrays as varying over axes. The gradient of an array that does not vary is then the sum over them."""
    def mark(array: Any) -> Any:
        missing = tuple(sorted(axes - _axes_of_one(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(mark, arrays)


@_call.defjvp
def _no_second_order(*_: Any) -> Any:
    # First derivatives go through the rules of `attention`, which do not differentiate _call.
    raise NotImplementedError("double backward: gradients of ringattn's gradients are not supported")


# ------------------------------------------------------------------ the function and its gradients

_NAMES = ("query", "key", "value", "mask", "bias", "sinks", "seed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(options: Options, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any, seed: Any) -> Any:
    return _call(Callback(options), dict(zip(_NAMES, (query, key, value, mask, bias, sinks, seed))))["out"]


def _attention_forward(options: Options, *primals: Any) -> tuple[Any, Any]:
    operands = {name: None if primal is None else primal.value for name, primal in zip(_NAMES, primals)}
    results = _call(Callback(options), operands)
    bias = primals[_NAMES.index("bias")]
    # JAX saves a pytree of arrays. An empty tuple in it states that the bias has a gradient.
    return results["out"], (operands, results, () if bias is not None and bias.perturbed else None)


def _attention_backward(options: Options, saved: Any, dout: Any) -> tuple[Any, ...]:
    operands, results, bias_has_gradient = saved
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    gradients = _call(Callback(options, bias_has_gradient is not None), {**operands, **results, "dout": dout})
    return tuple(gradients.get(name) for name in _NAMES)


attention.defvjp(_attention_forward, _attention_backward, symbolic_zeros=True)
