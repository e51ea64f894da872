"""Prepared calls: what equal calls find, what is refused, and when the workers let go."""
import re
import time
import urllib.request

import numpy as np
import pytest

import ringattn
from conftest import wait_until


def tensors(rng, tokens=300, heads=2):
    return [rng.standard_normal((1, tokens, heads, 16), np.float32) for _ in range(3)]


@pytest.fixture
def metric(client):
    """Reads a metric of all workers together."""
    def read(series):
        total = 0.0
        for worker in client.topology()["workers"]:
            text = urllib.request.urlopen(f"http://{worker['metrics_address']}/metrics", timeout=10).read().decode()
            found = re.search(rf"^ringattn_worker_{re.escape(series)} (\S+)$", text, re.MULTILINE)
            total += float(found[1]) if found else 0.0
        return total
    return read


@pytest.fixture
def lookups(metric):
    """Reads (hits, misses)."""
    return lambda: tuple(metric(f'kept_operation_lookups_total{{result="{result}"}}') for result in ("hit", "miss"))


def settled(lookups):
    """Waits for two heartbeats, which publish the workers' figures."""
    time.sleep(2.2)
    return lookups()


@pytest.mark.parametrize("transport", ["relay", "direct", "host_memory"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_first_calls_find_the_part(client, rng, lookups, transport, world_size):
    q, k, v = tensors(rng, tokens=301 + world_size)
    options = dict(causal=True, world_size=world_size, softcap=3.0 + len(transport))
    if world_size == 1:
        options["members"] = [client.topology()["workers"][0]["name"]]
    with client.prepare(q, k, v, **options) as forward:
        spec = ringattn.TensorSpec(q.shape)
        lse = ringattn.TensorSpec((1, 2, q.shape[1]))
        with client.prepare(q, k, v, dout=spec, out=spec, lse=lse, **options) as backward:
            assert len(forward.members) == world_size and forward.members == backward.members
            assert forward.nbytes > 0 and backward.nbytes > forward.nbytes
            assert forward.found == backward.found == 0 and forward.ttl == 30
            before = settled(lookups)
            out, lse, _ = client.forward(q, k, v, transport=transport, **options)
            grads = client.backward(out, q, k, v, out=out, lse=lse, transport=transport, **options)
            wait_until(lambda: lookups()[0] == before[0] + 2 * world_size, 10, "hits")
            assert lookups()[1] == before[1]
    exact = client.forward(q, k, v, causal=True, softcap=options["softcap"], world_size=world_size)
    np.testing.assert_allclose(out, exact.out, atol=1e-5)
    assert np.isfinite(grads.dq).all()


def test_an_equal_part_is_found(client, rng):
    q, k, v = tensors(rng, tokens=77)
    with client.prepare(q, k, v) as first, client.prepare(q, k, v, transport="direct") as second:
        assert first.found == 0 and second.found == 1 and second.nbytes == first.nbytes
        assert client.forward(q, k, v).report.plan.members == first.members
        assert client.prepare(q, k, v, window=(3, 0)).found == 0
        assert second.trouble is None
    second.close()
    assert "closed" in repr(second)


def test_specs_stand_for_tensors(client, rng):
    q = ringattn.TensorSpec((90, 4, 16), "fp16")
    k = ringattn.TensorSpec((90, 2, 16), np.float16)
    options = dict(cu_seqlens_q=[0, 40, 80], cu_seqlens_k=[0, 40, 80], sinks=ringattn.TensorSpec(4))
    with client.prepare(q, k, k, **options):  # the last 10 tokens are not sent
        real = [np.ones(spec.shape, np.float16) for spec in (q, k, k)]
        options["sinks"] = np.ones(4, np.float32)
        assert client.prepare(*real, **options).found == 1
    with pytest.raises(ringattn.InvalidArgumentError, match="q has 0 bytes"):
        client.forward(q, k, k, cu_seqlens_q=[0, 90], cu_seqlens_k=[0, 90])


def test_what_cannot_be_prepared_is_named(client, rng):
    q, k, v = tensors(rng, tokens=50)
    for name, value in (("retain", True), ("residual", "x"), ("keep_residual", True)):
        given = {} if name == "retain" else {"dout": q}
        with pytest.raises(ringattn.InvalidArgumentError, match=f"{name}: is set, but workers keep no"):
            client.prepare(q, k, v, **given, **{name: value})
    with pytest.raises(ringattn.InvalidArgumentError, match="out: is given without dout"):
        client.prepare(q, k, v, out=q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'cuasal'"):
        client.prepare(q, k, v, cuasal=True)
    with pytest.raises(ringattn.InvalidArgumentError, match="prepare.ttl: is 601 s, must be more than 0 and at most 600"):
        client.prepare(q, k, v, ttl=601)
    with pytest.raises(ringattn.InvalidArgumentError, match="ttl"):
        client.prepare(q, k, v, ttl=0)
    with pytest.raises(ringattn.FailedPreconditionError, match="world_size|worker"):
        client.prepare(q, k, v, world_size=40)


def test_renewals_end_with_close(client, rng, metric):
    q, k, v = tensors(rng, tokens=61)
    time.sleep(2.2)
    before = metric("prepared_recipes")
    prepared = client.prepare(q, k, v, ttl=1.5, softcap=7.0)
    assert prepared.ttl == 1.5
    wait_until(lambda: metric("prepared_recipes") == before + 1, 10, "a hold")
    time.sleep(4)
    assert metric("prepared_recipes") == before + 1 and prepared.trouble is None
    prepared.close()
    wait_until(lambda: metric("prepared_recipes") == before, 10, "the end of the hold")
