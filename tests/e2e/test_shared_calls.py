"""Calls streams: many requests on one stream of a real service."""

import queue
import re
import urllib.request

import grpc
import numpy as np
import pytest

from attention import Result, assert_close, chunks_of, header_for, make_inputs, reference
from certificates import digest, token_channel, write_clients
from cluster import wait_until
from stubs import attention_pb2 as pb


class Calls:
    """A client of one Calls stream."""

    def __init__(self, stub):
        self.outgoing = queue.Queue()
        self.responses = stub.Calls(iter(self.outgoing.get, None), timeout=120)
        self.results, self.ends = {}, {}

    def begin(self, number, inputs, backward=False, timeout=None, **options):
        header = header_for(inputs, backward=backward, **options)
        for name in ["q", "k", "v"] + (["dout"] if backward else []):
            for chunk in chunks_of(inputs, [name]):
                header.inline_tensors.add(tensor=chunk.tensor, data=chunk.data)
        request = pb.CallRequest(call=number)
        if timeout is not None:
            request.timeout.FromMilliseconds(int(1000 * timeout))
        (request.backward if backward else request.forward).header.CopyFrom(header)
        self.send(request)

    def cancel(self, number):
        self.send(pb.CallRequest(call=number, cancel=True))

    def send(self, *requests):
        self.outgoing.put(pb.CallsRequest(requests=requests))

    def read(self, ends):
        """Reads until so many calls have ended."""
        while len(self.ends) < ends:
            for response in next(self.responses).responses:
                which = response.WhichOneof("message")
                if which:
                    self.results.setdefault(response.call, Result()).take(getattr(response, which))
                if response.HasField("end"):
                    assert response.call not in self.ends
                    self.ends[response.call] = response.end

    def finish(self):
        self.outgoing.put(None)
        assert list(self.responses) == []
        return self.responses.code()


def metric(ring, name):
    with urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics", timeout=10) as reply:
        return int(re.search(rf"^{name} (\d+)$", reply.read().decode(), re.M).group(1))


def test_forwards_and_backwards_on_one_stream(ring):
    calls = Calls(ring.attention)
    shapes = [dict(sq=16, heads=1, dim=64), dict(sq=33, sk=40, heads=4, kv_heads=2, dim=24), dict(sq=1, heads=2, dim=8)]
    inputs = {}
    for number in range(60):
        inputs[number] = make_inputs(seed=number, **shapes[number % 3])
        calls.begin(number, inputs[number], backward=number % 4 == 3, causal=number % 3 != 1)
    calls.read(ends=60)
    for number, end in calls.ends.items():
        assert end.code == 0, end.message
        result = calls.results[number].finish()
        expected = reference(inputs[number], causal=number % 3 != 1)
        for name in ("dq", "dk", "dv") if number % 4 == 3 else ("out", "lse"):
            assert_close(result.array(name), expected[name], 1e-4)
    assert metric(ring, "ringattn_shared_calls_total") >= 60
    wait_until(lambda: metric(ring, "ringattn_calls_streams") == 1, 5, "the gauge of open streams")
    assert calls.finish() == grpc.StatusCode.OK
    wait_until(lambda: metric(ring, "ringattn_calls_streams") == 0, 5, "the gauge without streams")


# Outputs of 64 KiB and more come in several messages, from shard streams.
def test_a_call_with_large_outputs(ring):
    calls = Calls(ring.attention)
    inputs = make_inputs(sq=400, heads=4, kv_heads=1, dim=16)
    calls.begin(1, inputs, causal=True, world_size=3, chunk_bytes=4096)
    calls.begin(2, inputs, causal=True)
    calls.read(ends=2)
    expected = reference(inputs, causal=True)["out"]
    for number in (1, 2):
        assert calls.ends[number].code == 0, calls.ends[number].message
        assert_close(calls.results[number].finish().array("out"), expected, 1e-4)
    assert calls.results[1].accepted.plan.world_size == 3
    assert calls.finish() == grpc.StatusCode.OK


def test_errors_deadlines_and_cancellations_are_those_of_their_calls(ring):
    calls = Calls(ring.attention)
    small, large = make_inputs(sq=16, heads=1, dim=64), make_inputs(sq=1000, heads=4, dim=16)
    calls.begin(1, small, softcap=-1.0)
    calls.begin(2, large, timeout=0.001)
    calls.begin(3, large)
    calls.cancel(3)
    calls.cancel(99)
    calls.begin(4, small)
    calls.read(ends=4)
    assert calls.ends[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert any("softcap" in str(detail) for detail in calls.ends[1].details)
    assert calls.ends[2].code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert calls.ends[3].code in (0, grpc.StatusCode.CANCELLED.value[0])
    assert calls.ends[4].code == 0
    np.testing.assert_allclose(calls.results[4].finish().array("out"), reference(small)["out"], atol=1e-4)
    assert calls.finish() == grpc.StatusCode.OK


@pytest.mark.parametrize("request_, text", [
    (pb.CallsRequest(requests=[pb.CallRequest(call=1)]), "neither forward nor backward"),
    (pb.CallsRequest(), "it is empty"),
])
def test_a_message_without_a_request_ends_the_stream(ring, request_, text):
    with pytest.raises(grpc.RpcError) as error:
        list(ring.attention.Calls(iter([request_]), timeout=30))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert text in error.value.details()


def test_a_client_that_is_no_longer_known_begins_no_call(make_ring, tmp_path):
    clients, token = tmp_path / "clients.json", "k" * 16
    known = {"name": "known", "token_sha256": [digest(token)]}
    other = {"name": "other", "token_sha256": [digest("o" * 16)]}
    write_clients(clients, [known, other])
    ring = make_ring(workers=1, server_flags=[f"--clients_file={clients}"],
                     dial=lambda address: token_channel(address, token))
    calls = Calls(ring.attention)
    small = make_inputs(sq=16, heads=1, dim=64)
    calls.begin(1, small)
    calls.read(ends=1)
    assert calls.ends[1].code == 0
    write_clients(clients, [other])
    wait_until(lambda: metric(ring, "ringattn_known_clients") == 1, 30, "the new file")
    calls.begin(2, small)
    with pytest.raises(grpc.RpcError) as error:
        calls.read(ends=2)
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
