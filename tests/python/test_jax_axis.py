"""Attention for JAX with axis_name: the shards of a shard_map are the writers of one request. Drawn cases against
jax.grad of a plain fp64 reference of the whole sequence, JAX's transformations, and failures of one shard."""
import concurrent.futures
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import reference

jax = pytest.importorskip("jax", reason=os.environ.get("RINGATTN_NO_JAX") or None)
jax.config.update("jax_num_cpu_devices", 4)  # as test_jax.py

import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import ringattn  # noqa: E402
from jax_reference import BOUNDS, check_gradients, exact_gradients, normal  # noqa: E402
from ringattn import _jax_axis  # noqa: E402
from ringattn.jax import ring_flash_attention  # noqa: E402

FAILURES = (jax.errors.JaxRuntimeError, ValueError)
ROWS, PAIRS = P(None, "sp"), P(None, None, "sp")
#: Of each argument: tokens are sharded, as are the queries of pairs. Sinks are the same on all shards.
SPECS = {"query": ROWS, "key": ROWS, "value": ROWS, "bias": PAIRS, "attention_mask": PAIRS, "softmax_aux": P()}


@pytest.fixture(autouse=True)
def deadline(default_client):
    """Calls that wait for a shard end."""
    ringattn.set_default_client(default_client, deadline=60)


@pytest.fixture
def calls(default_client, monkeypatch):
    """(kind, request id, writer's index) of each call that has a writer."""
    made, lock = [], threading.Lock()
    for kind in ("forward", "backward"):
        def call(client, *tensors, kind=kind, inner=getattr(type(default_client), kind), **options):
            if "writer" in options:
                with lock:
                    made.append((kind, options["request_id"], options["writer"].index))
            return inner(client, *tensors, **options)

        monkeypatch.setattr(type(default_client), kind, call)
    return made


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def sharded(shards, options=None, check_vma=True):
    """Attention of whole arrays by name, computed by this number of shards."""
    def call(arrays):
        specs = ({name: SPECS[name] for name in arrays},)
        return jax.shard_map(lambda arrays: ring_flash_attention(**arrays, **(options or {}), axis_name="sp"),
                             mesh=mesh_of(sp=shards), in_specs=specs, out_specs=ROWS, check_vma=check_vma)(arrays)

    return jax.jit(call)


def tensors(rng, dtype="float32", batch=2, queries=16, keys=24, heads=4, kv_heads=2, dim=8, dim_v=8):
    return {"query": normal(rng, dtype, batch, queries, heads, dim),
            "key": normal(rng, dtype, batch, keys, kv_heads, dim),
            "value": normal(rng, dtype, batch, keys, kv_heads, dim_v)}


def whole(arrays, **options):
    """Attention by one device, without axis_name."""
    return jax.jit(lambda arrays: ring_flash_attention(**arrays, **options))(arrays)


CASES = 32


def drawn(case):
    """The number of shards, the differentiable arguments, the mask or nothing, and the options of one case."""
    rng = np.random.default_rng(case)
    shards = (2, 4)[case % 2]
    batch, queries, keys = int(rng.integers(1, 3)), *(shards * int(n) for n in rng.integers(1, 12, 2))
    heads = int(rng.integers(1, 7))
    kv_heads = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    dtype = ["float32", "float32", "bfloat16", "float16"][case // 2 % 4]
    arrays = tensors(rng, dtype, batch, queries, keys, heads, kv_heads, *(int(n) for n in rng.choice([8, 16, 24], 2)))
    pairs = (int(rng.choice([1, batch])), int(rng.choice([1, heads])), queries, keys)
    options, masks = {"causal": bool(rng.integers(2))}, {}
    if rng.integers(3) == 0:
        arrays["bias"] = normal(rng, "float32", *pairs)
    if rng.integers(3) == 0:
        arrays["softmax_aux"] = normal(rng, "float32", *[(3,), (heads, 1), (heads, 2)][case % 3])
    if rng.integers(3) == 0:
        masks["attention_mask"] = jax.device_put(rng.random(pairs) < 0.6)
    if rng.integers(3) == 0:
        options |= {"dropout_prob": 0.25, "dropout_seed": 0x1234567_89ABCDEF + case}
    if rng.integers(3) == 0:
        options["sliding_window"] = [5, (3, 2), (0, 7), (9, 0)][case % 4]
    if rng.integers(3) == 0:
        options["logits_soft_cap"] = 1.5
    if rng.integers(3) == 0:
        options["softmax_scale"] = 0.4
    return shards, arrays, masks, options


@pytest.mark.parametrize("case", range(CASES))
def test_drawn_cases(case):
    shards, arrays, masks, options = drawn(case)
    call = sharded(shards, options, check_vma=case % 5 != 4)
    out, pull = jax.vjp(jax.jit(lambda arrays: call({**arrays, **masks})), arrays)
    dout = normal(np.random.default_rng(1000 + case), out.dtype, *out.shape)
    gradients = pull(dout)[0]
    exact, expected = exact_gradients(arrays, dout, {**options, **masks})
    assert out.dtype == arrays["query"].dtype
    reference.close(out, exact, BOUNDS[out.dtype.name])
    check_gradients(gradients, expected, arrays)


def test_drawn_cases_have_what_they_must():
    cases = [drawn(case) for case in range(CASES)]
    for name in ("bias", "softmax_aux"):
        assert sum(name in arrays for _, arrays, _, _ in cases) > 5, name
    assert sum("attention_mask" in masks for _, _, masks, _ in cases) > 5
    for name in ("dropout_prob", "sliding_window", "logits_soft_cap", "softmax_scale"):
        assert sum(name in options for _, _, _, options in cases) > 5, name


def requests(calls, kind="forward"):
    """The request ids of one kind, each with its writers."""
    found = {}
    for called, request_id, index in calls:
        if called == kind:
            found.setdefault(request_id, []).append(index)
    return found


def one_request_each(calls, shards, forwards, backwards):
    for kind, count in (("forward", forwards), ("backward", backwards)):
        found = requests(calls, kind)
        assert len(found) == count and all(sorted(made) == list(range(shards)) for made in found.values()), (kind, found)


def test_each_execution_is_a_request(rng, calls):
    """Also if several executions of one program are in flight, and if one program has equal calls."""
    arrays, call = tensors(rng), sharded(4, {"causal": True})
    results = [call(arrays) for _ in range(5)]
    jax.block_until_ready(results)
    one_request_each(calls, 4, 5, 0)
    expected = whole(arrays, causal=True)
    for result in results:
        reference.close(result, expected, 2e-5)
    calls.clear()
    total = jax.jit(lambda arrays: call(arrays) + sharded(4, {"causal": True})(arrays) + sharded(4)(arrays))(arrays)
    reference.close(total, 2 * expected + whole(arrays), 2e-5)
    assert all(sorted(made) == [0, 1, 2, 3] for made in requests(calls).values())


def test_checkpoint_and_scan(rng, calls):
    """A repeated forward is a request of its own. Keys that do not change in a loop do not change the request's id."""
    x = normal(rng, "float32", 1, 16, 2, 8)

    def deep(wrap):
        def layer(x, _):
            return x + ring_flash_attention(jnp.sin(x), x, x, causal=True, axis_name="sp"), None

        def loss(x):
            return jax.lax.psum((jax.lax.scan(wrap(layer), x, None, length=3)[0] ** 2).sum(), "sp")

        gradient = jax.shard_map(jax.grad(loss), mesh=mesh_of(sp=2), in_specs=ROWS, out_specs=ROWS)
        return jax.jit(gradient)(x).block_until_ready()

    plain = deep(lambda layer: layer)
    one_request_each(calls, 2, 3, 3)
    calls.clear()
    repeated = deep(jax.checkpoint)
    one_request_each(calls, 2, 6, 3)
    assert bool((plain == repeated).all())


def test_loop_with_equal_operands(rng, calls):
    """XLA may compute what depends on the operands only once for all iterations."""
    arrays = tensors(rng)

    def loop(arrays):
        def body(_, total):
            return total + ring_flash_attention(**arrays, axis_name="sp")

        start = jnp.zeros_like(arrays["query"])
        return jax.lax.fori_loop(0, 3, body, start)

    total = jax.jit(jax.shard_map(loop, mesh=mesh_of(sp=2), in_specs=ROWS, out_specs=ROWS))(arrays)
    reference.close(total, 3 * whole(arrays), 2e-5)
    assert all(sorted(made) == [0, 1] for made in requests(calls).values())


@pytest.mark.parametrize("outside", [True, False], ids=["vmap of shard_map", "shard_map of vmap"])
@pytest.mark.parametrize("options, slices", [({}, 1), ({"dropout_prob": 0.5, "dropout_seed": 3}, 3)],
                         ids=["one request", "a request each"])
def test_vmap(rng, calls, options, slices, outside):
    many = [tensors(rng) for _ in range(3)]
    query, key = jnp.stack([arrays["query"] for arrays in many]), many[0]["key"]
    value = jnp.stack([arrays["value"] for arrays in many])

    def one(query, key, value):
        return ring_flash_attention(query, key, value, causal=True, axis_name="sp", **options)

    axes = (0, None, 0)
    batched = P(None, None, "sp")
    if outside:
        mapped = jax.vmap(jax.shard_map(one, mesh=mesh_of(sp=2), in_specs=ROWS, out_specs=ROWS), axes)
    else:
        mapped = jax.shard_map(jax.vmap(one, axes), mesh=mesh_of(sp=2), in_specs=(batched, ROWS, batched),
                               out_specs=batched)
    out, pull = jax.vjp(jax.jit(mapped), query, key, value)
    out.block_until_ready()
    one_request_each(calls, 2, slices, 0)
    gradients = jax.block_until_ready(pull(jnp.ones_like(out)))
    one_request_each(calls, 2, slices, slices)
    looped = [sharded(2, {"causal": True, **options})({"query": query[i], "key": key, "value": value[i]})
              for i in range(3)]
    reference.close(out, jnp.stack(looped), 2e-5)
    by_slice = [jax.grad(lambda q, k, v: sharded(2, {"causal": True, **options})(
        {"query": q, "key": k, "value": v}).sum(), (0, 1, 2))(query[i], key, value[i]) for i in range(3)]
    reference.close(gradients[0], jnp.stack([g[0] for g in by_slice]), 2e-5)
    reference.close(gradients[1], sum(g[1] for g in by_slice), 2e-5)
    reference.close(gradients[2], jnp.stack([g[2] for g in by_slice]), 2e-5)


@pytest.mark.parametrize("manual", [True, False], ids=["sharded batch", "axis of XLA"])
def test_several_axes(rng, calls, manual):
    """Each group of shards that differ in the axis only makes its own request."""
    arrays = tensors(rng)
    spec, axes = (P("dp", "sp"), {"dp", "sp"}) if manual else (ROWS, {"sp"})

    def loss(arrays):
        out = jax.shard_map(lambda arrays: ring_flash_attention(**arrays, causal=True, axis_name="sp"),
                            mesh=mesh_of(dp=2, sp=2), in_specs=spec, out_specs=spec, axis_names=axes)(arrays)
        return (out ** 2).sum(), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    exact, expected = exact_gradients(arrays, 2 * out, {"causal": True})
    reference.close(out, exact, 2e-5)
    check_gradients(gradients, expected, arrays)
    one_request_each(calls, 2, 2, 2)


def test_independent_calls(rng, calls):
    """Calls of one program that do not depend on each other run in an order that is the same on all shards."""
    arrays = tensors(rng)

    def many(arrays):
        return sum(ring_flash_attention(jnp.sin(i * arrays["query"]), arrays["key"], arrays["value"], axis_name="sp")
                   for i in range(12))

    out = jax.jit(jax.shard_map(many, mesh=mesh_of(sp=4), in_specs=ROWS, out_specs=ROWS))(arrays).block_until_ready()
    one_request_each(calls, 4, 12, 0)
    reference.close(out, sum(whole({**arrays, "query": jnp.sin(i * arrays["query"])})
                             for i in range(12)), 2e-5)


def test_threads(rng, calls):
    """Threads that run programs of the same devices at the same time."""
    arrays = [tensors(rng) for _ in range(3)]
    programs = [sharded(shards, {"causal": True}) for shards in (4, 4, 2)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda program, given: [program(given) for _ in range(8)], programs, arrays))
    for made, given in zip(results, arrays, strict=True):
        for result in made:
            reference.close(result, whole(given, causal=True), 2e-5)
    assert sorted(len(writers) for writers in requests(calls).values()) == [2] * 8 + [4] * 16


def test_one_core(address):
    """The callbacks of all devices wait for each other even if XLA's threads share one core."""
    program = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, ringattn
from jax.sharding import PartitionSpec as P
from ringattn.jax import ring_flash_attention
ringattn.set_default_client(ringattn.connect(sys.argv[1]), deadline=60)
def loss(x):
    attend = lambda f: ring_flash_attention(f(x), x * 2, x + 1, causal=True, sliding_window=4, axis_name="sp")
    return jax.lax.psum((x + sum(map(attend, (jnp.sin, jnp.cos, jnp.tanh)))).sum(), "sp")
mesh = jax.make_mesh((4,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
gradient = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp")))
x = jnp.ones((1, 8192, 4, 32))
for _ in range(3):
    print(gradient(x).block_until_ready().shape, flush=True)
"""
    run = subprocess.run([sys.executable, "-c", program, address], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.count("(1, 8192, 4, 32)") == 3, run.stdout + run.stderr


def test_unused_results(rng, calls):
    """A call without a consumer is dropped on all shards."""
    arrays = tensors(rng)

    def unused(arrays):
        ring_flash_attention(**arrays, axis_name="sp")
        return arrays["query"]

    jax.jit(jax.shard_map(unused, mesh=mesh_of(sp=2), in_specs=ROWS, out_specs=ROWS))(arrays).block_until_ready()
    assert not calls


def test_one_shard(rng, default_client, monkeypatch):
    """An axis of size 1 makes plain requests."""
    writers = []
    forward = type(default_client).forward
    monkeypatch.setattr(type(default_client), "forward",
                        lambda *a, **o: writers.append(o.get("writer")) or forward(*a, **o))
    arrays = tensors(rng)
    reference.close(sharded(1, {"causal": True})(arrays), whole(arrays, causal=True), 2e-5)
    assert writers == [None, None]


def test_other_platforms(rng, monkeypatch):
    """The calls through the host, which platforms other than CPUs use."""
    from ringattn import _jax_calls as ours
    monkeypatch.setattr(ours, "_in_place", ours._through_host)
    monkeypatch.setattr(ours, "_draw_in_place", ours._draw_through_host)
    jax.clear_caches()
    try:
        arrays = {**tensors(rng), "softmax_aux": normal(rng, "float32", 4, 1)}
        out, pull = jax.vjp(sharded(2, {"causal": True}), arrays)
        exact, expected = exact_gradients(arrays, np.ones(out.shape), {"causal": True})
        reference.close(out, exact, 2e-5)
        check_gradients(pull(jnp.ones_like(out))[0], expected, arrays)
    finally:
        jax.clear_caches()


# ------------------------------------------------------------------ failures

def fails_on(shard, when, monkeypatch, client):
    """Client.forward fails on one shard, before it joins the request or after the request has succeeded."""
    forward = type(client).forward

    def failing(self, *tensors, **options):
        if options["writer"].index != shard:
            return forward(self, *tensors, **options)
        if when == "after":
            forward(self, *tensors, **options)
        raise RuntimeError("this shard fails")

    monkeypatch.setattr(type(client), "forward", failing)


def next_calls_work(rng, client):
    """After a failure. The call is a new program: otherwise JAX raises the failure of each device again at exit."""
    ringattn.set_default_client(client, deadline=60)
    arrays = tensors(rng)
    reference.close(sharded(4)(arrays), whole(arrays), 2e-5)
    assert not _jax_axis._outcomes


@pytest.mark.parametrize("when", ["before", "after"])
def test_failure_on_one_shard(rng, default_client, monkeypatch, when):
    """All shards fail, within the deadline. XLA would end the process if some went on to the next collective."""
    ringattn.set_default_client(default_client, deadline=2)
    arrays = tensors(rng)

    def loss(arrays):
        out = ring_flash_attention(**arrays, axis_name="sp")
        return jax.lax.psum(out.sum(), "sp")

    call = jax.jit(jax.shard_map(loss, mesh=mesh_of(sp=4), in_specs=ROWS, out_specs=P()))
    with monkeypatch.context() as patched:
        fails_on(2, when, patched, default_client)
        with pytest.raises(FAILURES, match="this shard fails|WRITER_MISSING|DEADLINE_EXCEEDED|WRITER_LOST"):
            call(arrays).block_until_ready()
    next_calls_work(rng, default_client)
    assert np.isfinite(call(arrays))


def test_errors_of_the_service(rng, default_client):
    arrays = {name: normal(rng, "float32", 1, 4, 1, 600) for name in ("query", "key", "value")}
    with pytest.raises(FAILURES, match="InvalidArgumentError.*head_dim: is 600"):
        sharded(2)(arrays).block_until_ready()
    ringattn.set_default_client(default_client, deadline=60, transport="relay")
    with pytest.raises(FAILURES, match="relay"):
        sharded(2)(tensors(rng)).block_until_ready()
    ringattn.set_default_client(ringattn.connect("127.0.0.1:1"), deadline=0.5)
    with pytest.raises(FAILURES, match="UnavailableError: UNAVAILABLE"):
        sharded(2)(tensors(rng)).block_until_ready()
    next_calls_work(rng, default_client)


def test_different_seeds(rng, default_client):
    """Arguments that must be equal on all shards and are not."""
    arrays = tensors(rng)

    def call(arrays):
        return ring_flash_attention(**arrays, dropout_prob=0.5, dropout_seed=jax.lax.axis_index("sp"), axis_name="sp")

    with pytest.raises(FAILURES, match="WRITERS_DIFFER"):
        jax.jit(jax.shard_map(call, mesh=mesh_of(sp=2), in_specs=ROWS, out_specs=ROWS))(arrays).block_until_ready()
    next_calls_work(rng, default_client)


def test_invalid_axes(rng):
    arrays = tensors(rng)
    for name in ("sp", 3, ("sp",)):
        with pytest.raises(ringattn.InvalidArgumentError, match="axis_name: is "):
            jax.jit(lambda arrays, name=name: ring_flash_attention(**arrays, axis_name=name))(arrays)
    with pytest.raises(ringattn.InvalidArgumentError, match="axis_name: is 'rows'; must be an axis of an enclosing"):
        jax.vmap(lambda x: ring_flash_attention(x, x, x, axis_name="rows"), axis_name="rows")(
            normal(rng, "float32", 2, 1, 4, 1, 8))
    with pytest.raises(ringattn.InvalidArgumentError, match=r"bias: has the shape \[1, 1, 8, 12\]; must be .* 8, 24\]"):
        jax.shard_map(lambda arrays, bias: ring_flash_attention(**arrays, bias=bias, axis_name="sp"), mesh=mesh_of(sp=2),
                      in_specs=(ROWS, P(None, None, "sp", None)), out_specs=ROWS)(arrays, np.zeros((1, 1, 16, 12), "f"))
