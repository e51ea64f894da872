"""Concurrent known clients for longer: small requests of one and sixty-four large ones of another,
and shares by weight. Full tier (tests/lib/long_tests.sh)."""

import threading
import time

import numpy as np

from attention import assert_close, make_inputs, reference, run
from certificates import Authority, digest, server_tls, tls_channel, write_clients
from cluster import wait_until
from stubs import attention_pb2_grpc
from test_fairness import LargeRequests, tiny_requests

TOKENS = {name: f"the-token-of-{name}-client" for name in ("large", "small", "light", "heavy")}


def start(make_ring, tmp_path, weights=None):
    """One worker behind TLS; `attention(name)` is a stub on that client's connection."""
    authority = Authority(tmp_path, "ca")
    clients = tmp_path / "clients.json"
    write_clients(clients, [{"name": name, "token_sha256": [digest(token)],
                             "weight": (weights or {}).get(name, 1)}
                            for name, token in TOKENS.items()])
    dial = lambda address, name="small": tls_channel(address, authority.certificate,
                                                     token=TOKENS[name])
    ring = make_ring(workers=1, dial=dial,
                     server_flags=[*server_tls(*authority.issue("server")),
                                   f"--clients_file={clients}"])
    return lambda name: attention_pb2_grpc.AttentionServiceStub(dial(ring.address, name))


def test_a_clients_small_requests_beside_anothers_sixty_four_large_ones(make_ring, tmp_path):
    attention = start(make_ring, tmp_path)
    small = attention("small")
    alone = tiny_requests(small, 0.02, 3, seed=0)
    large = LargeRequests(attention("large"))
    try:
        wait_until(lambda: len(large.runs) >= 2, 60, "large requests are served")
        begin, run_seconds = len(large.runs), float(np.median(large.runs))
        beside = tiny_requests(small, run_seconds, max(30, 20 * run_seconds), seed=1)
        runs = large.runs[begin:]
    finally:
        large.stop()
    assert not large.errors, large.errors[0]
    p99 = lambda times: float(np.percentile(times, 99))
    print({"alone p99 ms": round(1e3 * p99(alone), 1), "beside p50 ms":
           round(1e3 * float(np.median(beside)), 1), "beside p99 ms": round(1e3 * p99(beside), 1),
           "longest large run ms": round(1e3 * max(runs), 1), "small": len(beside),
           "large": len(runs)})
    assert len(runs) >= 10
    # On one worker a large request has one step, which is not interrupted.
    assert p99(beside) <= 3 * p99(alone) + max(runs)


def test_device_time_is_shared_by_weight(make_ring, tmp_path):
    attention = start(make_ring, tmp_path, {"light": 1, "heavy": 3})
    inputs = make_inputs(sq=12000, heads=1, dim=32)
    exact = reference(make_inputs(sq=8, heads=1, dim=8))["out"]
    served, over = {"light": 0, "heavy": 0}, threading.Event()

    def work(stub, name):
        while not over.is_set():
            run(stub, inputs, causal=True, timeout=300)
            if not over.is_set():
                served[name] += 1

    # More of each than the worker has places for, so that both always wait.
    threads = [threading.Thread(target=work, args=(attention(name), name))
               for name in served for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(served.values()) >= 12, 120, "both are served")
    before = dict(served)
    time.sleep(30)
    got = {name: served[name] - before[name] for name in served}
    over.set()
    for thread in threads:
        thread.join()
    print(got)
    assert min(got.values()) >= 5
    assert 2 <= got["heavy"] / got["light"] <= 4.5
    result = run(attention("small"), make_inputs(sq=8, heads=1, dim=8))
    assert_close(result.array("out"), exact, 1e-4)
