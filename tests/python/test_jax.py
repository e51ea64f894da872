"""Attention for JAX: outputs and gradients of drawn cases against jax.grad of a plain fp64 reference, and JAX's
transformations."""
import os
import subprocess
import sys

import numpy as np
import pytest
import reference

jax = pytest.importorskip("jax", reason=os.environ.get("RINGATTN_NO_JAX") or None)
jax.config.update("jax_num_cpu_devices", 4)  # as test_jax_axis.py

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import ringattn  # noqa: E402
import ringattn.jax as ours  # noqa: E402
from jax_reference import BOUNDS, check_gradients, exact_gradients, normal  # noqa: E402
from ringattn import _jax_calls  # noqa: E402
from ringattn.jax import ring_flash_attention  # noqa: E402

FAILURES = (jax.errors.JaxRuntimeError, ValueError)  # of small calls in the caller's thread, JAX makes a ValueError
SEED = 0x1234567_89ABCDEF

pytestmark = pytest.mark.usefixtures("default_client")


def tensors(rng, dtype="float32", batch=2, queries=13, keys=17, heads=4, kv_heads=2, dim=8, dim_v=8):
    return {"query": normal(rng, dtype, batch, queries, heads, dim), "key": normal(rng, dtype, batch, keys, kv_heads, dim),
            "value": normal(rng, dtype, batch, keys, kv_heads, dim_v)}


def drawn(case):
    """The differentiable arguments of one case, and its others."""
    rng = np.random.default_rng(case)
    batch, queries, keys = (int(n) for n in (rng.integers(1, 4), rng.integers(1, 40), rng.integers(1, 40)))
    heads = int(rng.integers(1, 7))
    kv_heads = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    dtype = ["float32", "float32", "bfloat16", "float16"][case % 4]
    arrays = tensors(rng, dtype, batch, queries, keys, heads, kv_heads, *(int(n) for n in rng.choice([8, 16, 24], 2)))
    pairs = (int(rng.choice([1, batch])), int(rng.choice([1, heads])), queries, keys)
    options = {"causal": bool(rng.integers(2))}
    if rng.integers(3) == 0:
        arrays["bias"] = normal(rng, [dtype, "float32"][case // 4 % 2], *pairs)
    if rng.integers(3) == 0:
        arrays["softmax_aux"] = normal(rng, "float32", *[(3,), (heads, 1), (heads, 2)][case % 3])
    if rng.integers(3) == 0:
        mask = rng.random(pairs) < 0.6
        options["attention_mask"] = jax.device_put(mask if case % 2 else 2 * mask.astype(np.int32))
    if rng.integers(3) == 0:
        options |= {"dropout_prob": 0.25, "dropout_seed": SEED + case}
    if rng.integers(3) == 0:
        options["sliding_window"] = [5, (3, 2), (0, 0), 0, (0, 7), (9, 0)][case % 6]
    if rng.integers(3) == 0:
        options["logits_soft_cap"] = 1.5
    if rng.integers(3) == 0:
        options["softmax_scale"] = 0.4
    return arrays, options


CASES = 64


@pytest.mark.parametrize("case", range(CASES))
def test_drawn_cases(case):
    arrays, options = drawn(case)
    dtype = arrays["query"].dtype
    bound = BOUNDS[dtype.name]

    def of_ours(arrays):
        return ring_flash_attention(**arrays, **options)

    out, pull = jax.vjp(jax.jit(of_ours) if case % 2 else of_ours, arrays)
    dout = normal(np.random.default_rng(1000 + case), dtype, *out.shape)
    gradients = pull(dout)[0]
    exact, expected = exact_gradients(arrays, dout, options)
    assert out.dtype == dtype and isinstance(out, jax.Array)
    reference.close(out, exact, bound)
    check_gradients(gradients, expected, arrays)


def test_drawn_cases_have_what_they_must():
    cases = [drawn(case) for case in range(CASES)]
    for name in ("bias", "softmax_aux"):
        assert sum(name in arrays for arrays, _ in cases) > 15, name
    for name in ("attention_mask", "dropout_prob", "sliding_window", "logits_soft_cap", "softmax_scale"):
        assert sum(name in options for _, options in cases) > 15, name


def equal(ours, theirs):
    return all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))


VMAPPED = {
    "plain": {},
    "mask and bias": {"attention_mask": np.arange(13 * 17).reshape(1, 1, 13, 17) % 5 != 0,
                      "bias": np.linspace(-1, 1, 13 * 17, dtype=np.float32).reshape(1, 1, 13, 17)},
    "bias per row": {"bias": np.linspace(-1, 1, 2 * 13 * 17, dtype=np.float32).reshape(2, 1, 13, 17)},
    "dropout": {"dropout_prob": 0.3, "dropout_seed": 7},
    "sinks": {"softmax_aux": np.linspace(-1, 1, 4, dtype=np.float32).reshape(4, 1)},
}


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_equals_a_loop(rng, name):
    """Also with operands that are not mapped, and with gradients of shared ones."""
    many = [tensors(rng) for _ in range(3)]
    query = jnp.stack([arrays["query"] for arrays in many])
    key, value = many[0]["key"], jnp.stack([arrays["value"] for arrays in many], 1)
    options = {option: jnp.asarray(given) if isinstance(given, np.ndarray) else given
               for option, given in VMAPPED[name].items()}
    shared = {option: options.pop(option) for option in ("bias", "softmax_aux") if option in options}

    def one(query, key, value, shared):
        return ring_flash_attention(query, key, value, causal=True, **shared, **options)

    def gradients(query, key, value, shared):
        return jax.grad(lambda *given: one(*given).astype(jnp.float32).sum() ** 2, argnums=(0, 1, 2, 3))(
            query, key, value, shared)

    axes = (0, None, 1, None)
    for function in (one, gradients):
        mapped = jax.jit(jax.vmap(function, axes))(query, key, value, shared)
        looped = [function(query[i], key, value[:, i], shared) for i in range(3)]
        for ours, theirs in zip(jax.tree.leaves(mapped), jax.tree.leaves(jax.tree.map(lambda *x: jnp.stack(x), *looped)),
                                strict=True):
            assert ours.shape == theirs.shape
            reference.close(ours, theirs, 2e-5)


def test_nested_vmap(rng):
    query = normal(rng, "float32", 2, 3, 1, 9, 2, 8)
    key = normal(rng, "float32", 3, 1, 9, 2, 8)
    bias = normal(rng, "float32", 2, 1, 2, 9, 9)

    def one(query, key, bias):
        return ring_flash_attention(query, key, key, bias=bias)

    mapped = jax.vmap(jax.vmap(one, (0, 0, None)), (0, None, 0))(query, key, bias)
    looped = jnp.stack([jnp.stack([one(query[i, j], key[j], bias[i]) for j in range(3)]) for i in range(2)])
    assert mapped.shape == looped.shape
    reference.close(mapped, looped, 2e-5)


@pytest.mark.parametrize("options, requests", [({}, 1), ({"dropout_prob": 0.5}, 3)], ids=["one request", "a request each"])
def test_requests_of_vmap(rng, default_client, monkeypatch, options, requests):
    calls = []
    forward = type(default_client).forward
    monkeypatch.setattr(type(default_client), "forward", lambda *a, **o: calls.append(1) or forward(*a, **o))
    x = normal(rng, "float32", 3, 1, 9, 2, 8)
    jax.vmap(lambda x: ring_flash_attention(x, x, x, **options))(x).block_until_ready()
    assert len(calls) == requests


def test_checkpoint_and_scan(rng):
    x = normal(rng, "float32", 1, 20, 2, 8)

    def layer(x, _=None):
        return x + ring_flash_attention(jnp.sin(x), x, x, causal=True), None

    def deep(layer):
        return jax.jit(jax.grad(lambda x: (jax.lax.scan(layer, x, None, length=3)[0] ** 2).sum()))(x)

    assert equal(deep(jax.checkpoint(layer)), deep(layer))


def test_bias_gradient_only_if_needed(rng, default_client, monkeypatch):
    wanted = []
    backward = type(default_client).backward
    monkeypatch.setattr(type(default_client), "backward",
                        lambda *a, **o: wanted.append(o["bias_gradient"]) or backward(*a, **o))
    arrays, bias = tensors(rng), normal(rng, "float32", 1, 1, 13, 17)

    def loss(query, bias):
        return ring_flash_attention(query, arrays["key"], arrays["value"], bias=bias).sum()

    jax.grad(loss, argnums=0)(arrays["query"], bias).block_until_ready()
    jax.grad(loss, argnums=1)(arrays["query"], bias).block_until_ready()
    assert wanted == [False, True]


def test_seeds(rng):
    """A traced seed selects the pairs of the same number. A changed one needs no new compilation."""
    arrays = tensors(rng)
    traces = []

    @jax.jit
    def call(seed):
        traces.append(1)
        return ring_flash_attention(**arrays, dropout_prob=0.5, dropout_seed=seed)

    fixed = [ring_flash_attention(**arrays, dropout_prob=0.5, dropout_seed=seed) for seed in (None, 5, 2**32 - 1, 5 << 32)]
    traced = [call(jnp.int32(seed)) for seed in (0, 5, -1)]
    assert len(traces) == 1
    assert equal(fixed[:3], traced)
    assert not equal(fixed[1], fixed[3]) and not equal(fixed[0], fixed[1])


def test_sinks_of_nothing(rng):
    """Sinks of -inf change nothing and have no gradient."""
    arrays, aux = tensors(rng), jnp.full((4, 2), -jnp.inf)
    call = jax.value_and_grad(lambda aux: ring_flash_attention(**arrays, softmax_aux=aux).sum())
    total, gradient = call(aux)
    assert total == ring_flash_attention(**arrays).sum() and not gradient.any()


def test_positions_of_ejkernel(rng):
    arrays = tensors(rng)
    mask = jnp.ones((1, 1, 13, 17), bool).at[..., 3].set(False)
    call = ours.ring_flash_attention_call(*arrays.values(), mask, None, 0.3, 0.5, True, 9, object(), object(), (4, 0), 2.0,
                                          None)
    expected = ring_flash_attention(**arrays, attention_mask=mask, softmax_scale=0.3, dropout_prob=0.5, causal=True,
                                    dropout_seed=9, sliding_window=(4, 0), logits_soft_cap=2.0)
    assert equal(call, expected)


def test_sharded_arrays(rng):
    """One process with two devices: arrays that are sharded over the batch, and each device's rows in a shard_map."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("rows")
    arrays = tensors(rng, batch=4)
    sharded = {name: jax.device_put(array, NamedSharding(mesh, spec)) for name, array in arrays.items()}

    def loss(arrays):
        return (ring_flash_attention(**arrays, causal=True) ** 2).sum()

    def by_shards(arrays):
        out = jax.shard_map(lambda arrays, bias: ring_flash_attention(**arrays, bias=bias, causal=True), mesh=mesh,
                            in_specs=({name: spec for name in ("query", "key", "value")}, PartitionSpec()),
                            out_specs=spec)({name: arrays[name] for name in ("query", "key", "value")}, arrays["bias"])
        return (out ** 2).sum()

    bias = normal(rng, "float32", 1, 4, 13, 17)  # the same for both devices: its gradient is the sum of theirs
    expected = jax.grad(loss)({**arrays, "bias": bias})
    for function in (loss, by_shards):
        gradients = jax.jit(jax.grad(function))({**sharded, "bias": bias})
        for name, theirs in expected.items():
            reference.close(gradients[name], theirs, 2e-5)
    by_heads = PartitionSpec(None, None, "rows")
    mapped = jax.shard_map(lambda arrays: ring_flash_attention(**arrays, causal=True), mesh=mesh, in_specs=(by_heads,),
                           out_specs=by_heads)
    reference.close(jax.jit(mapped)(arrays), ring_flash_attention(**arrays, causal=True), 2e-5)


def test_other_platforms(rng):
    """The call through the host, which platforms other than CPUs use."""
    arrays = tensors(rng)
    operands = {**arrays, **dict.fromkeys(("mask", "bias", "sinks", "seed"))}
    callback = _jax_calls.Callback(_jax_calls.Options(None, 0.0, True, None, 0.0))
    results = _jax_calls._through_host(callback, operands)
    assert equal(results["out"], ring_flash_attention(**arrays, causal=True))
    dout = jnp.ones_like(results["out"])
    gradients = jax.jit(lambda operands: _jax_calls._through_host(callback, operands))({**operands, **results, "dout": dout})
    expected = jax.grad(lambda arrays: ring_flash_attention(**arrays, causal=True).sum())(arrays)
    for name in arrays:
        reference.close(gradients[name], expected[name], 2e-5)


def test_large_arrays_on_one_core(address):
    """A callback waits for no other thread of XLA: calls on one core neither hang nor differ."""
    program = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, ringattn
from ringattn.jax import ring_flash_attention
ringattn.set_default_client(ringattn.connect(sys.argv[1]))
x = jnp.ones((1, 8192, 4, 32))
loss = lambda x: (x + ring_flash_attention(jnp.sin(x), x * 2, x + 1, causal=True, sliding_window=4)).sum()
for _ in range(3):
    print(jax.grad(loss)(x).block_until_ready().shape, flush=True)
"""
    run = subprocess.run([sys.executable, "-c", program, address], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.count("(1, 8192, 4, 32)") == 3, run.stdout + run.stderr


def test_errors_of_the_service(rng):
    x = normal(rng, "float32", 1, 3, 1, 600)
    with pytest.raises(FAILURES, match="InvalidArgumentError.*head_dim: is 600"):
        ring_flash_attention(x, x, x).block_until_ready()
    ringattn.set_default_client(ringattn.connect("127.0.0.1:1"), deadline=0.5)
    with pytest.raises(FAILURES, match="UnavailableError: UNAVAILABLE"):
        ring_flash_attention(*tensors(rng).values()).block_until_ready()


def call_with(rng, **given):
    return ring_flash_attention(**{**tensors(rng), **given})


@pytest.mark.parametrize("name, given, text", [
    ("query", np.zeros((13, 4, 8), np.float32), r"has the shape \[13, 4, 8\]"),
    ("query", np.zeros((2, 13, 4, 8), np.int32), "is int32"),
    ("key", np.zeros((2, 17, 2, 9), np.float32), r"has the shape \[2, 17, 2, 9\]; must be \[2, 17, 2, 8\]"),
    ("key", np.zeros((2, 17, 2, 8), np.float16), "is float16; must be float32"),
    ("key", np.zeros((2, 17, 3, 8), np.float32), "has 3 heads"),
    ("value", np.zeros((2, 16, 2, 8), np.float32), "has the shape"),
    ("attention_mask", np.zeros((13, 17), bool), "has the shape"),
    ("attention_mask", np.zeros((1, 1, 13, 17), np.float32), "is float32"),
    ("bias", np.zeros((3, 1, 13, 17), np.float32), "has the shape"),
    ("bias", np.zeros((1, 1, 13, 17), np.float16), "is float16"),
    ("softmax_aux", np.zeros((3, 1), np.float32), "has the shape"),
    ("softmax_aux", np.zeros((4, 1), np.int32), "is int32"),
    ("softmax_scale", "big", "is 'big'"),
    ("dropout_prob", 1.0, "is 1.0"),
    ("dropout_seed", -1, "is -1"),
    ("dropout_seed", 2.5, "is 2.5"),
    ("dropout_seed", np.zeros(2, np.int32), "is int32"),
    ("causal", "no", "is 'no'"),
    ("sliding_window", -3, "is -3"),
    ("sliding_window", (1, 2, 3), "is "),
    ("logits_soft_cap", -1.0, "is -1.0"),
])
def test_invalid_arguments(rng, name, given, text):
    more = {"dropout_prob": 0.5} if name == "dropout_seed" else {}
    with pytest.raises(ringattn.InvalidArgumentError, match=f"{name}: {text}"):
        call_with(rng, **more, **{name: given})
    if isinstance(given, np.ndarray):
        with pytest.raises(ringattn.InvalidArgumentError, match=f"{name}: {text}"):
            jax.jit(lambda given: call_with(rng, **more, **{name: given}))(given)


def test_what_is_not_supported(rng):
    arrays = tensors(rng)

    def loss(query):
        return (ring_flash_attention(query, arrays["key"], arrays["value"]) ** 2).sum()

    for name in ("softmax_scale", "dropout_prob", "causal", "sliding_window", "logits_soft_cap"):
        with pytest.raises(NotImplementedError, match=f"^{name}: is traced"):
            jax.jit(lambda value: call_with(rng, **{name: value}))(jnp.float32(0.5))
    with pytest.raises(NotImplementedError, match="double backward"):
        jax.grad(lambda query: jax.grad(loss)(query).sum())(arrays["query"])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (arrays["query"],), (arrays["query"],))
    with pytest.raises(TypeError, match="query: is a list"):
        call_with(rng, query=[1.0])
