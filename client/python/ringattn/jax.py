"""Attention for JAX, with the arguments of ejkernel's `ring_flash_attention_call`, on the default client.

    import jax, ringattn
    from ringattn.jax import ring_flash_attention

    ringattn.set_default_client(ringattn.connect("127.0.0.1:7700"))
    out = jax.jit(ring_flash_attention, static_argnames=("causal",))(query, key, value, causal=True)

Forward and backward are callbacks without side effects, which work under `jit`, `grad`, `vmap` and `jax.checkpoint`: a
request depends on its inputs only and leaves nothing on the workers, so JAX may drop a call or repeat it. An
`io_callback` would promise that each call runs once, which nothing here needs, and `vmap` cannot batch an ordered one.
For the same reason no residual is kept: JAX does not report when a forward's backward will never run. The backward sends
the tensors.

With axis_name, one collective gives the shards of the axis the id of their request (`_jax_axis`). It is a part of the
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

from ringattn._arguments import flag, number, whole_number, window_pair
from ringattn._default import default_client, default_options
from ringattn._errors import invalid
from ringattn._jax_axis import TICKET_WORDS, Axis, axis_of, call_together, draw

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class _Options:
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
class _Callback:
    """One host callback. Equal callbacks share JAX's compiled programs."""

    options: _Options
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


def _shapes_of_results(callback: _Callback, operands: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    query, value = operands["query"], operands["value"]
    if "dout" in operands:
        names = ["query", "key", "value", *(["bias"] if callback.bias_gradient else []),
                 *(["sinks"] if operands["sinks"] is not None else [])]
        return {name: jax.ShapeDtypeStruct(operands[name].shape, operands[name].dtype) for name in names}
    batch, queries, heads, _ = query.shape
    return {"out": jax.ShapeDtypeStruct((batch, queries, heads, value.shape[-1]), query.dtype),
            "lse": jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)}


def _in_place(callback: _Callback, operands: dict[str, Any]) -> dict[str, Any]:
    """The call on CPUs: the callback reads and writes XLA's own buffers.

    `jax.pure_callback` would copy large operands in a thread of XLA's pool, and wait for that thread in another. With
    one thread for each core, callbacks on all of them wait forever (jax-ml/jax issue 25861).
    """
    return buffer_callback(callback.fill, _shapes_of_results(callback, operands), vmap_method="expand_dims")(**operands)


def _through_host(callback: _Callback, operands: dict[str, Any]) -> dict[str, Any]:
    """The call on other platforms: JAX copies the operands to the host and the results back."""
    return jax.pure_callback(callback, _shapes_of_results(callback, operands), **operands, vmap_method="expand_dims")


_DRAWN = jax.ShapeDtypeStruct((TICKET_WORDS,), np.uint32)


def _draw_in_place(callback: _Callback, operands: dict[str, Any]) -> Any:
    return buffer_callback(callback.fill_draw, _DRAWN, vmap_method="expand_dims")(**operands)


def _draw_through_host(callback: _Callback, operands: dict[str, Any]) -> Any:
    # Sums depend on the operands as the operands do, and are small.
    sums = {name: None if array is None or name == "index" else jnp.sum(array, dtype=jnp.float32).reshape(
        (1,) * _AXES[name]) for name, array in operands.items()}
    return jax.pure_callback(callback.draw, _DRAWN, **{**sums, "index": operands["index"]}, vmap_method="expand_dims")


def _place(callback: _Callback, operands: dict[str, Any]) -> dict[str, Any]:
    """Returns the operands that make a call one of the axis's shards: its index, and the shards' ticket.

    The draw depends on all operands. XLA therefore cannot move it out of a loop, or share it between calls, unless the
    operands of these calls are equal.
    """
    index = jax.lax.axis_index(callback.options.axis.name)
    operands = {**operands, "index": index}
    drawn = jax.lax.platform_dependent(operands, cpu=functools.partial(_draw_in_place, callback),
                                       default=functools.partial(_draw_through_host, callback))
    ticket = jax.lax.psum(_varying(drawn, _axes_of(operands)), callback.options.axis.name)
    return {"index": index, "ticket": ticket}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def _call(callback: _Callback, operands: dict[str, Any]) -> dict[str, Any]:
    """Returns out and lse, or the gradients by the names of their operands if there is a dout."""
    if callback.options.axis is not None:
        operands = {**operands, **_place(callback, operands)}
    results = jax.lax.platform_dependent(operands, cpu=functools.partial(_in_place, callback),
                                         default=functools.partial(_through_host, callback))
    return _varying(results, _axes_of(operands))


def _axes_of(operands: Any) -> frozenset[str]:
    """Returns the axes of a shard_map over which an operand varies. Callbacks do not pass them on to their results."""
    return frozenset().union(*(_axes_of_one(array) for array in jax.tree.leaves(operands)))


def _axes_of_one(array: Any) -> frozenset[str]:
    kind = jax.typeof(array)
    # Releases of JAX before 0.10.2 may have `vma` instead.
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def _varying(arrays: Any, axes: frozenset[str]) -> Any:
    """Marks arrays as varying over axes. The gradient of an array that does not vary is then the sum over them."""
    def mark(array: Any) -> Any:
        missing = tuple(sorted(axes - _axes_of_one(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(mark, arrays)


@_call.defjvp
def _no_second_order(*_: Any) -> Any:
    # First derivatives go through _attention's rules, which do not differentiate _call.
    raise NotImplementedError("double backward: gradients of ringattn's gradients are not supported")


# ------------------------------------------------------------------ the function and its gradients

_NAMES = ("query", "key", "value", "mask", "bias", "sinks", "seed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any, seed: Any) -> Any:
    return _call(_Callback(options), dict(zip(_NAMES, (query, key, value, mask, bias, sinks, seed))))["out"]


def _attention_forward(options: _Options, *primals: Any) -> tuple[Any, Any]:
    operands = {name: None if primal is None else primal.value for name, primal in zip(_NAMES, primals)}
    results = _call(_Callback(options), operands)
    bias = primals[_NAMES.index("bias")]
    # JAX saves a pytree of arrays. An empty tuple in it states that the bias has a gradient.
    return results["out"], (operands, results, () if bias is not None and bias.perturbed else None)


def _attention_backward(options: _Options, saved: Any, dout: Any) -> tuple[Any, ...]:
    operands, results, bias_has_gradient = saved
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    gradients = _call(_Callback(options, bias_has_gradient is not None), {**operands, **results, "dout": dout})
    return tuple(gradients.get(name) for name in _NAMES)


_attention.defvjp(_attention_forward, _attention_backward, symbolic_zeros=True)


# ------------------------------------------------------------------ arguments

def _array(value: Any, name: str) -> Any:
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name}: is a {type(value).__module__}.{type(value).__name__}; must be a jax.Array")
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _static(value: Any, name: str) -> Any:
    """Returns an argument that must be known while JAX traces."""
    if isinstance(value, jax.core.Tracer):
        raise NotImplementedError(f"{name}: is traced and would have a gradient or change between calls, which is not "
                                  "supported; pass a Python value (static_argnames of jax.jit)")
    return value


def _check_shapes(query: Any, key: Any, value: Any) -> None:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise invalid(name, f"has the shape {list(array.shape)}; must be [batch, seq_len, heads, head_dim]")
        if array.dtype.name not in _DTYPES:
            raise invalid(name, f"is {array.dtype.name}; must be float32, bfloat16 or float16")
        if array.dtype != query.dtype:
            raise invalid(name, f"is {array.dtype.name}; must be {query.dtype.name}, as query")
    batch, _, heads, head_dim = query.shape
    expected = (batch, key.shape[1], key.shape[2], head_dim)
    if key.shape != expected:
        raise invalid("key", f"has the shape {list(key.shape)}; must be {list(expected)}")
    if key.shape[2] == 0 or heads % key.shape[2]:
        raise invalid("key", f"has {key.shape[2]} heads, which do not divide the {heads} heads of query")
    if value.shape[:3] != expected[:3]:
        raise invalid("value", f"has the shape {list(value.shape)}; must be [{batch}, {key.shape[1]}, {key.shape[2]}, "
                               "head_dim]")


def _check_pairs(array: Any, name: str, query: Any, keys: int) -> None:
    batch, queries, heads, _ = query.shape
    shape = array.shape
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != (queries, keys):
        raise invalid(name, f"has the shape {list(shape)}; must be [{batch} or 1, {heads} or 1, {queries}, {keys}]")


def _mask(mask: Any, query: Any, keys: int) -> Any:
    mask = _array(mask, "attention_mask")
    _check_pairs(mask, "attention_mask", query, keys)
    if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise invalid("attention_mask", f"is {mask.dtype.name}; must be boolean or integer, nonzero for visible pairs")
    return mask.astype(jnp.bool_)


def _bias(bias: Any, query: Any, keys: int) -> Any:
    bias = _array(bias, "bias")
    _check_pairs(bias, "bias", query, keys)
    if bias.dtype not in (query.dtype, jnp.float32):
        raise invalid("bias", f"is {bias.dtype.name}; must be {query.dtype.name} or float32")
    return bias


@functools.partial(jax.jit, static_argnums=1)
def _joined(sinks: Any, heads: int) -> Any:
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32), (heads, sinks.shape[-1]))
    nothing = jnp.isneginf(sinks).all(-1)
    total = jax.nn.logsumexp(jnp.where(nothing[:, None], 0.0, sinks), axis=-1)
    return jnp.where(nothing, -jnp.inf, total)


def _sinks(softmax_aux: Any, heads: int) -> Any:
    """Returns one sink per head, whose exponential is the sum of those of the head's sinks."""
    sinks = _array(softmax_aux, "softmax_aux")
    if sinks.ndim not in (1, 2) or sinks.ndim == 2 and sinks.shape[0] != heads or sinks.shape[-1] == 0:
        raise invalid("softmax_aux", f"has the shape {list(sinks.shape)}; must be [num_sinks] or [{heads}, num_sinks]")
    if sinks.dtype.name not in _DTYPES:
        raise invalid("softmax_aux", f"is {sinks.dtype.name}; must be float32, bfloat16 or float16")
    return _joined(sinks, heads)


def _window(sliding_window: Any, causal: bool) -> tuple[int, int] | None:
    if sliding_window is None:
        return None
    if isinstance(sliding_window, (tuple, list)):
        window = window_pair(sliding_window, "sliding_window")
    else:
        left = whole_number(sliding_window, "sliding_window")
        window = (left, 0 if causal else left)
    if min(window) < 0:
        raise invalid("sliding_window", f"is {sliding_window}; must not be negative")
    return None if window == (0, 0) else window


def _seed(dropout_seed: Any) -> Any:
    """Returns the seed as two halves. A traced seed may change without a new compilation."""
    if dropout_seed is None:
        dropout_seed = 0
    if isinstance(dropout_seed, (jax.Array, np.ndarray, np.generic)):
        seed = jnp.asarray(dropout_seed)
        if seed.ndim != 0 or not jnp.issubdtype(seed.dtype, jnp.integer):
            raise invalid("dropout_seed", f"is {seed.dtype} {list(seed.shape)}; must be a whole number")
        high = (seed >> 32).astype(jnp.uint32) if seed.dtype.itemsize == 8 else jnp.uint32(0)
        return jnp.stack([seed.astype(jnp.uint32), high])
    seed = whole_number(dropout_seed, "dropout_seed")
    if not 0 <= seed < 2**64:
        raise invalid("dropout_seed", f"is {seed}; must be at least 0 and below 2**64")
    return jnp.asarray(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32))


def ring_flash_attention(query: jax.Array, key: jax.Array, value: jax.Array, attention_mask: jax.Array | None = None,
                         bias: jax.Array | None = None, softmax_scale: float | None = None, dropout_prob: float = 0.0,
                         causal: bool = False, dropout_seed: int | jax.Array | None = None,
                         sliding_window: int | tuple[int, int] | None = None, logits_soft_cap: float | None = None,
                         axis_name: str | None = None, softmax_aux: jax.Array | None = None, *,
                         fwd_params: Any = None, bwd_params: Any = None) -> jax.Array:
    """Attention of query over key and value, differentiable in these, in bias and in softmax_aux.

    Args:
        query: [batch, seq_len_q, num_heads, head_dim], fp32, bf16 or fp16.
        key: [batch, seq_len_k, num_kv_heads, head_dim]; num_kv_heads divides num_heads.
        value: as key, with its own head_dim.
        attention_mask: [batch or 1, num_heads or 1, seq_len_q, seq_len_k], boolean or integer; nonzero means visible.
        bias: [batch or 1, num_heads or 1, seq_len_q, seq_len_k], of query's type or fp32. Added to the scaled scores
            before the soft cap.
        softmax_scale: None: 1 / sqrt(head_dim).
        dropout_prob: the probability with which a softmax weight is dropped.
        causal: the last query sees all keys, each earlier query one key less.
        dropout_seed: selects the dropped pairs; None: 0. An array may be traced. A negative one counts as unsigned.
        sliding_window: (left, right) tokens that a query sees in addition to its own position. A number w means (w, 0)
            if causal, else (w, w). None, 0 and (0, 0) mean no limit.
        logits_soft_cap: None or 0: none.
        axis_name: an axis of an enclosing `jax.shard_map`, under `jit`, whose shards make the call together. Shard r
            has piece r of the tokens of query, key and value. attention_mask and bias have this shard's queries and
            all keys; seq_len_k is then the number of all keys. Positions are those of the whole sequence. Other
            arguments are equal on all shards. None: the arrays are whole.
        softmax_aux: [num_sinks], for every head, or [num_heads, num_sinks]: logits that join the softmax of each row
            without a value. They are neither scaled nor capped.
        fwd_params, bwd_params: ignored: block sizes of ejkernel's kernels.

    Returns:
        [batch, seq_len_q, num_heads, head_dim of value], of query's type. Rows without visible keys are 0.

    Raises:
        InvalidArgumentError: an argument is not valid. Raised while JAX traces.
        NotImplementedError: axis_name is set and JAX runs in several processes, an option is traced, or a gradient is
            differentiated.
        jax.errors.JaxRuntimeError, ValueError: the call failed in the service. JAX raises one or the other, with the
            text of the RingattnError.
    """
    axis = axis_of(axis_name)
    query, key, value = _array(query, "query"), _array(key, "key"), _array(value, "value")
    _check_shapes(query, key, value)
    scale, cap = _static(softmax_scale, "softmax_scale"), _static(logits_soft_cap, "logits_soft_cap")
    rate = number(_static(dropout_prob, "dropout_prob"), "dropout_prob")
    if not 0 <= rate < 1:
        raise invalid("dropout_prob", f"is {rate}; must be at least 0 and below 1")
    softcap = 0.0 if cap is None else number(cap, "logits_soft_cap")
    if not 0 <= softcap < math.inf:
        raise invalid("logits_soft_cap", f"is {softcap}; must be positive and finite")
    is_causal = flag(_static(causal, "causal"), "causal")
    options = _Options(None if scale is None else number(scale, "softmax_scale"), rate, is_causal,
                       _window(_static(sliding_window, "sliding_window"), is_causal), softcap, axis)
    keys = key.shape[1] if axis is None else axis.size * key.shape[1]
    operands = (query, key, value, None if attention_mask is None else _mask(attention_mask, query, keys),
                None if bias is None else _bias(bias, query, keys),
                None if softmax_aux is None else _sinks(softmax_aux, query.shape[2]),
                _seed(dropout_seed) if rate else None)
    index = None if axis is None else jax.lax.axis_index(axis.name)  # results vary over the axis as it does
    return _attention(options, *_varying(operands, _axes_of((operands, index))))


def ring_flash_attention_call(query: jax.Array, key: jax.Array, value: jax.Array,
                              attention_mask: jax.Array | None = None, bias: jax.Array | None = None,
                              softmax_scale: float | None = None, dropout_prob: float = 0.0, causal: bool = False,
                              dropout_seed: int | jax.Array | None = None, fwd_params: Any = None,
                              bwd_params: Any = None, sliding_window: int | tuple[int, int] | None = None,
                              logits_soft_cap: float | None = None, axis_name: str | None = None) -> jax.Array:
    """`ring_flash_attention` with the positions of ejkernel's arguments."""
    return ring_flash_attention(query, key, value, attention_mask, bias, softmax_scale, dropout_prob, causal,
                                dropout_seed, sliding_window, logits_soft_cap, axis_name, fwd_params=fwd_params,
                                bwd_params=bwd_params)
