"""Attention for JAX, with the arguments of ejkernel's `ring_flash_attention_call`, on the default client.

    import jax, ringattn
    from ringattn.jax import ring_flash_attention

    ringattn.set_default_client(ringattn.connect("127.0.0.1:7700"))
    out = jax.jit(ring_flash_attention, static_argnames=("causal",))(query, key, value, causal=True)

The functions work under `jit`, `grad`, `vmap`, `scan` and `jax.checkpoint`. With axis_name, the shards of a
`jax.shard_map` make one request together.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ringattn._optional import needed_by

with needed_by(__name__):
    import jax
    import jax.numpy as jnp

    from ringattn._jax_axis import axis_of
    from ringattn._jax_calls import Options, attention, axes_of, varying

from ringattn._arguments import flag, number, seed_number, type_name, whole_number, window_pair
from ringattn._errors import invalid

_DTYPES = ("float32", "bfloat16", "float16")


def _array(value: Any, name: str) -> Any:
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name}: is {type_name(value)}; must be a jax.Array")
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
        seed = dropout_seed
        if seed.ndim != 0 or not jnp.issubdtype(seed.dtype, jnp.integer):
            raise invalid("dropout_seed", f"is {seed.dtype} {list(seed.shape)}; must be a whole number")
        if not isinstance(seed, jax.Array):  # jax.numpy would cut 64 bits to 32, unless jax_enable_x64 is set
            bits = int(seed) & (2**64 if seed.dtype.itemsize == 8 else 2**32) - 1
            return jnp.asarray(np.array([bits & 0xFFFFFFFF, bits >> 32], np.uint32))
        high = (seed >> 32).astype(jnp.uint32) if seed.dtype.itemsize == 8 else jnp.uint32(0)
        return jnp.stack([seed.astype(jnp.uint32), high])
    seed = seed_number(dropout_seed, "dropout_seed")
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
        NotImplementedError: an option is traced, or a gradient is differentiated.
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
    options = Options(None if scale is None else number(scale, "softmax_scale"), rate, is_causal,
                       _window(_static(sliding_window, "sliding_window"), is_causal), softcap, axis)
    keys = key.shape[1] if axis is None else axis.size * key.shape[1]
    operands = (query, key, value, None if attention_mask is None else _mask(attention_mask, query, keys),
                None if bias is None else _bias(bias, query, keys),
                None if softmax_aux is None else _sinks(softmax_aux, query.shape[2]),
                _seed(dropout_seed) if rate else None)
    index = None if axis is None else jax.lax.axis_index(axis.name)  # results vary over the axis as it does
    return attention(options, *varying(operands, axes_of((operands, index))))


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
