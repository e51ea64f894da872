"""The definition of ringattn.jax's attention in jax.numpy, and its exact gradients."""
import jax
import jax.numpy as jnp
import numpy as np
import reference

BOUNDS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def plain(query, key, value, attention_mask=None, bias=None, softmax_scale=None, dropout_prob=0.0, causal=False,
          dropout_seed=None, sliding_window=None, logits_soft_cap=None, softmax_aux=None):
    """The definition in jax.numpy, in the type of its arguments."""
    batch, queries, heads, dim = query.shape
    keys, group = key.shape[1], heads // key.shape[2]
    key, value = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
    s = jnp.einsum("bihd,bjhd->bhij", query, key) * (dim ** -0.5 if softmax_scale is None else softmax_scale)
    if bias is not None:
        s = s + bias
    if logits_soft_cap:
        s = logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    window = sliding_window
    if isinstance(window, int):
        window = (window, 0 if causal else window)
    seen = jnp.asarray(reference.visible(queries, keys, causal, None if window in (None, (0, 0)) else window))
    if attention_mask is not None:
        seen = seen & (attention_mask != 0)
    s = jnp.where(seen, s, -jnp.inf)
    logits = s
    if softmax_aux is not None:
        aux = jnp.broadcast_to(softmax_aux, (heads, softmax_aux.shape[-1]))[None, :, None]
        logits = jnp.concatenate([s, jnp.broadcast_to(aux, (batch, heads, queries, aux.shape[-1]))], -1)
    blind = jnp.isneginf(logits).all(-1, keepdims=True)
    p = jax.nn.softmax(jnp.where(blind, 0.0, logits), -1)[..., :keys]
    p = jnp.where(blind | ~jnp.broadcast_to(seen, p.shape), 0.0, p)
    if dropout_prob:
        p = p * jnp.asarray(reference.kept_pairs(dropout_prob, dropout_seed or 0, batch, heads, queries, keys))
    return jnp.einsum("bhij,bjhd->bihd", p, value)


def normal(rng, dtype, *shape):
    return jax.device_put(rng.standard_normal(shape, np.float32).astype(dtype))  # jnp.asarray compiles for each shape


#: Most of the time of a case goes into the compilation of its reference.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def exact_gradients(arrays, dout, options):
    """fp64 out of the plain reference, and its jax.grad by name. Compiled whole: single operators take longer."""
    def loss(arrays, dout):
        out = plain(**arrays, **options)
        return (out * dout).sum(), out

    with jax.enable_x64(True):
        exact = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        expected, out = jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK)(exact, np.asarray(dout, np.float64))
        return jax.tree.map(np.asarray, (out, expected))


def check_gradients(gradients, expected, arrays):
    """dq, dk and those of bias and sinks are differences that may cancel. Their size is that of dv."""
    bound, least = BOUNDS[arrays["query"].dtype.name], 0.05 * np.linalg.norm(expected["value"])
    for name, theirs in expected.items():
        assert gradients[name].dtype == arrays[name].dtype
        error = np.linalg.norm(np.asarray(gradients[name], np.float64) - theirs)
        assert error <= bound * max(np.linalg.norm(theirs), least) + 2e-6, (name, error, np.linalg.norm(theirs))
