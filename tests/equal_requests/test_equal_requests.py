"""Equal requests: a worker keeps what it has prepared for the next one of the same client (docs/operations.md)."""

import numpy as np
import pytest

from attention import assert_close, make_inputs, reference, run
from certificates import digest, token_channel, write_clients
from cluster import wait_until
from stubs import attention_pb2_grpc

SHAPES = [dict(sq=64), dict(sq=64, causal=True), dict(sq=65), dict(sq=64, window=(7, 0)), dict(sq=64, softcap=3.0),
          dict(sq=300, heads=4, kv_heads=2, causal=True)]


def hits(ring, index=0):
    return ring.worker_metric(index, 'ringattn_worker_kept_operation_lookups_total{result="hit"}')


def check(stub, seed, shape, backward):
    options = {name: shape[name] for name in ("causal", "window", "softcap") if name in shape}
    sizes = {name: value for name, value in shape.items() if name not in options}
    inputs = make_inputs(seed=seed, **sizes)
    result = run(stub, inputs, backward=backward, **options)
    exact = reference(inputs, **options)
    for name in ("dq", "dk", "dv") if backward else ("out", "lse"):
        assert_close(result.array(name), exact[name], 1e-4)


@pytest.mark.parametrize("workers", [1, 3])
def test_other_data_and_other_shapes_alternate(make_ring, workers):
    ring = make_ring(workers=workers)
    rng = np.random.default_rng(workers)
    for seed in range(60):
        check(ring.attention, seed, SHAPES[rng.integers(len(SHAPES))], backward=bool(rng.integers(2)))
    wait_until(lambda: sum(hits(ring, index) for index in range(workers)) > 20, 10, "requests that found a kept operation")


def test_principals_share_nothing(make_ring, tmp_path):
    clients = tmp_path / "clients.json"
    write_clients(clients, [{"name": name, "token_sha256": [digest(name * 16)]} for name in ("alice", "bob")])
    ring = make_ring(workers=1, server_flags=[f"--clients_file={clients}"],
                     dial=lambda address: token_channel(address, "alice" * 16))
    stubs = {name: attention_pb2_grpc.AttentionServiceStub(token_channel(ring.address, name * 16))
             for name in ("alice", "bob")}
    for seed, name in enumerate(["alice", "bob"]):
        check(stubs[name], seed, SHAPES[0], backward=False)
    wait_until(lambda: ring.worker_metric(0, "ringattn_worker_kept_operations") == 2, 10, "two kept operations")
    assert hits(ring) == 0
    for seed, name in enumerate(["alice", "bob", "bob"]):
        check(stubs[name], 10 + seed, SHAPES[0], backward=False)
    wait_until(lambda: hits(ring) == 3, 10, "each principal's own operation")


def test_kept_memory_gives_way_and_leases_end(make_ring):
    ring = make_ring(workers=1, worker_flags=["--memory_limit=4MiB", "--prepared_lease=2s"])
    for seed in range(2):  # 1 MiB each, next to which 3.4 do not fit
        check(ring.attention, seed, dict(sq=500 + seed, heads=2, dim=64), backward=False)
        check(ring.attention, seed, dict(sq=1700, heads=2, dim=64), backward=False)
    check(ring.attention, 9, dict(sq=500, heads=2, dim=64), backward=False)
    drops = "ringattn_worker_kept_operation_drops_total"
    wait_until(lambda: ring.worker_metric(0, drops + '{reason="evicted"}') > 0, 10, "evictions")
    wait_until(lambda: ring.worker_metric(0, drops + '{reason="expired"}') > 0, 10, "the lease's end")
    wait_until(lambda: ring.worker_metric(0, "ringattn_worker_kept_operation_bytes") == 0, 10, "free memory")
    assert ring.worker_metric(0, "ringattn_worker_reserved_bytes") == 0
