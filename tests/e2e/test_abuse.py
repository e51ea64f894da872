"""Clients that hold resources which other clients need. Each test measures how long a well-behaved
client waits meanwhile, and verifies full service afterwards."""

import threading
import time
import urllib.request

import grpc
import numpy as np
import pytest

from attention import (assert_close, details, header_for, make_inputs, reference, requests, run)
from cluster import CHANNEL_OPTIONS, wait_until
from stubs import attention_pb2_grpc, tensor_pb2 as T
from timing import in_time, timed


class Client:
    """A client with a separate connection."""

    def __init__(self, ring):
        self.channel = grpc.insecure_channel(ring.address, CHANNEL_OPTIONS)
        self.attention = attention_pb2_grpc.AttentionServiceStub(self.channel)

    def close(self):
        self.channel.close()


def serve(client, seconds):
    """Tiny requests one after another, at least one; how long each took."""
    inputs = make_inputs(sq=8, heads=1, dim=8)
    exact = reference(inputs)["out"]
    took = []
    end = time.monotonic() + seconds
    while not took or time.monotonic() < end:
        begin = time.monotonic()
        result = run(client.attention, inputs, timeout=60)
        took.append(time.monotonic() - begin)
        assert_close(result.array("out"), exact, 1e-4)
    return took


def report(record_property, name, took):
    for percent in (50, 99):
        value = float(np.percentile(took, percent))
        record_property(f"{name}_p{percent}_ms", round(1e3 * value, 1))
        print(f"{name}: p{percent} {1e3 * value:.1f} ms of {len(took)} requests")
    return float(np.percentile(took, 99))


def reason(error):
    return details(error)["ErrorInfo"].reason


def counters(ring):
    with urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics", timeout=5) as reply:
        return reply.read().decode()


@timed
def test_slow_uploads_starve_nobody(make_ring, record_property):
    # One worker has eight slots. An upload of one byte every half second does not count as idle.
    ring = make_ring(workers=1, server_flags=["--upload_grace_contended=1s", "--upload_grace=3s"])
    inputs = make_inputs(sq=2000, heads=4, dim=64)
    over = threading.Event()

    def trickle():
        for at in range(1000):
            yield T.TensorChunk(tensor=T.TENSOR_ID_Q, offset=at, data=b"x")
            if over.wait(0.5):
                return

    attacker, honest = Client(ring), Client(ring)
    quiet = report(record_property, "before", serve(honest, 1))
    slow = [attacker.attention.Forward(requests(header_for(inputs), trickle()), timeout=60)
            for _ in range(8)]
    for call in slow:
        assert next(call).WhichOneof("message") == "accepted"
    beside = serve(honest, 4)
    report(record_property, "beside_slow_uploads", beside)
    for call in slow:
        with pytest.raises(grpc.RpcError) as error:
            list(call)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason(error.value) == "UPLOAD_TOO_SLOW"
    over.set()
    wait_until(lambda: not any(w.reserved_bytes for w in ring.topology().workers), 10, "memory")
    serve(honest, 0)
    assert 'ringattn_idle_transfers_total{stage="upload"} 8' in counters(ring)
    attacker.close()
    honest.close()
    # The first request waits until the slow clients have lost their slots; later ones do not
    # wait.
    in_time(beside[0] < 5, beside[0])
    in_time(sorted(beside)[-2] < max(1.0, 5 * quiet), beside)


@timed
def test_streams_without_a_header_lock_nobody_out(make_ring, record_property):
    ring = make_ring(workers=1, server_flags=["--header_timeout=6s"])
    over = threading.Event()

    def nothing():
        over.wait(60)
        return
        yield

    honest = Client(ring)
    quiet = report(record_property, "before", serve(honest, 1))
    attackers = [Client(ring) for _ in range(5)]
    calls = [attacker.attention.Forward(nothing(), timeout=60)
             for attacker in attackers for _ in range(120)]
    beside = report(record_property, "beside_600_without_header", serve(honest, 2))
    ended = {}
    for call in calls:
        with pytest.raises(grpc.RpcError) as error:
            next(call)
        outcome = (error.value.code(), reason(error.value))
        ended[outcome] = ended.get(outcome, 0) + 1
    late = (grpc.StatusCode.DEADLINE_EXCEEDED, "HEADER_TIMEOUT")
    evicted = (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WITHOUT_HEADER")
    assert set(ended) == {late, evicted}
    print(f"evicted {ended[evicted]}, timed out {ended[late]}")
    over.set()
    serve(honest, 0)
    for client in [*attackers, honest]:
        client.close()
    in_time(beside < max(1.0, 5 * quiet), (beside, quiet))


def test_a_connection_has_its_places_and_no_more(make_ring):
    ring = make_ring(workers=1, server_flags=["--max_streams_per_connection=20"])
    over = threading.Event()

    def nothing():
        over.wait(60)
        return
        yield

    greedy, honest = Client(ring), Client(ring)
    serve(greedy, 0)  # connected: calls that wait for a connection do not keep their order
    calls = [greedy.attention.Forward(nothing(), timeout=60) for _ in range(30)]
    refused = []
    for call in calls[20:]:
        with pytest.raises(grpc.RpcError) as error:
            next(call)
        refused.append((error.value.code(), reason(error.value)))
        assert "RetryInfo" in details(error.value)
    assert set(refused) == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")}
    serve(honest, 0)
    for call in calls:
        call.cancel()
    over.set()

    def served():
        try:
            return serve(greedy, 0)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            return None

    wait_until(served, 20, "its places back")
    greedy.close()
    honest.close()


def test_deadlines_in_upload_are_no_mistakes_of_the_client(make_ring):
    ring = make_ring(workers=1)
    inputs = make_inputs(sq=200, heads=1, dim=8)
    over = threading.Event()

    def part():
        yield T.TensorChunk(tensor=T.TENSOR_ID_Q, offset=0, data=b"x")
        over.wait(30)

    accepted = []

    def one(seed):
        rng = np.random.default_rng(seed)
        call = ring.attention.Forward(requests(header_for(inputs), part()),
                                      timeout=0.1 + 0.1 * rng.random())
        with pytest.raises(grpc.RpcError):
            accepted.append(next(call))
            list(call)

    # At most eight requests of each round get a slot, and some exceed their deadline before they
    # start.
    for round_ in range(50):
        threads = [threading.Thread(target=one, args=(15 * round_ + i,)) for i in range(15)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(accepted) >= 75:
            break
    assert len(accepted) >= 75
    over.set()
    wait_until(lambda: not any(w.reserved_bytes for w in ring.topology().workers), 20, "memory")

    def ended():
        lines = [line for line in counters(ring).splitlines()
                 if line.startswith("ringattn_requests_total{")]
        counts = {line.split('code="')[1].split('"')[0]: int(float(line.rsplit(" ", 1)[1]))
                  for line in lines if 'method="Forward"' in line}
        return counts if sum(counts.values()) >= len(accepted) else None

    counts = wait_until(ended, 20, "all that were accepted to be counted")
    assert set(code for code, count in counts.items() if count) <= {"DEADLINE_EXCEEDED",
                                                                    "CANCELLED"}, counts
