"""Clients that misbehave. Each takes the Chaos and draws from its `rng`. All calls of theirs
are Backward calls, counted by `chaos.abuse()`, so that what the coordinator counts of Forward is
the verifying loaders' alone."""

import contextlib
import os
import resource
import socket
import time
import urllib.request

import grpc

from attention import chunks_of, header_for, make_inputs, requests
from cluster import CHANNEL_OPTIONS, wait_until
from stubs import (attention_pb2 as pb, attention_pb2_grpc, cluster_pb2, cluster_pb2_grpc,
                   tensor_pb2)

NAMES = ["q", "k", "v", "dout"]
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@contextlib.contextmanager
def attacker(chaos):
    """A stub with a separate connection; closing that ends all its calls."""
    with grpc.insecure_channel(chaos.cluster.address, CHANNEL_OPTIONS) as channel:
        yield attention_pb2_grpc.AttentionServiceStub(channel)


def backward(chaos, stub, messages, timeout=30):
    chaos.abuse()
    return stub.Backward(messages, timeout=timeout)


def outcome(call):
    """Reads the call to its end and ignores the status."""
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass


def some_inputs(rng, tokens=3000):
    return make_inputs(sq=rng.randrange(1, tokens), heads=2, dim=32, seed=rng.randrange(1000))


def after(messages, count, seconds):
    """The first `count`, then nothing for a while."""
    for index, message in enumerate(messages):
        if index == count:
            time.sleep(seconds)
            return
        yield message


def vanishes_in_upload(chaos, rng):
    inputs = some_inputs(rng)
    with attacker(chaos) as stub:
        for _ in range(5):
            backward(chaos, stub, after(requests(header_for(inputs, backward=True), chunks_of(
                inputs, NAMES, 8 << 10)), rng.randrange(1, 20), 0.3))
        time.sleep(0.3)


def vanishes_in_download(chaos, rng):
    inputs = some_inputs(rng)
    with attacker(chaos) as stub:
        call = backward(chaos, stub, requests(header_for(inputs, backward=True, chunk_bytes=1024),
                                              chunks_of(inputs, NAMES)))
        with contextlib.suppress(grpc.RpcError):
            for response in call:
                if response.WhichOneof("message") == "chunk":
                    return


def does_not_read(chaos, rng):
    """More than the windows hold, for longer than a download may rest."""
    inputs = make_inputs(sq=20000, heads=4, dim=64)
    with attacker(chaos) as stub:
        backward(chaos, stub, requests(header_for(inputs, backward=True, window=(8, 0)),
                                       chunks_of(inputs, NAMES)))
        time.sleep(4)


def trickles(chaos, rng):
    """A byte now and then."""
    inputs = some_inputs(rng)

    def slow():
        yield from requests(header_for(inputs, backward=True), [])
        for at in range(8):
            time.sleep(0.4)
            yield pb.BackwardRequest(chunk=tensor_pb2.TensorChunk(
                tensor=tensor_pb2.TENSOR_ID_Q, offset=at, data=b"x"))

    with attacker(chaos) as stub:
        calls = [backward(chaos, stub, slow()) for _ in range(8)]
        for call in calls:
            outcome(call)


def sends_no_header(chaos, rng):
    def nothing():
        time.sleep(1)
        return
        yield

    with attacker(chaos) as stub:
        for _ in range(100):
            backward(chaos, stub, nothing())
        time.sleep(1)


def heavy_headers(chaos, rng):
    """2^15 documents each, striped: the longest plans."""
    bounds = list(range(1 << 15)) + [1 << 15]
    header = pb.BackwardHeader(
        shape=pb.AttentionShape(batch=1, seq_len_q=1 << 15, seq_len_kv=1 << 15, num_heads=1,
                                head_dim=8, packed=pb.PackedDocuments(cu_seqlens_q=bounds,
                                                                      cu_seqlens_k=bounds)),
        dtype=tensor_pb2.DATA_TYPE_FLOAT32,
        plan=pb.PlanOptions(layout=pb.LAYOUT_STRIPED, schedule=pb.SCHEDULE_RING))
    with attacker(chaos) as stub:
        for _ in range(6):
            backward(chaos, stub, requests(header, []))
        time.sleep(0.5 * rng.random())


def resets(chaos, rng):
    header = header_for(some_inputs(rng), backward=True)
    with attacker(chaos) as stub:
        for _ in range(150):
            backward(chaos, stub, requests(header, [])).cancel()


def half_open_http(chaos, rng):
    address = chaos.cluster.ports["metrics"]
    with contextlib.ExitStack() as held:
        for _ in range(20):
            held.enter_context(dial(address)).sendall(b"GET /met")
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
            reply.read()


def dial(address):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def many_connections(chaos, rng):
    with contextlib.ExitStack() as held:
        for _ in range(300):
            held.enter_context(dial(chaos.cluster.address))
        time.sleep(0.3)


def no_descriptors(chaos, rng):
    """Makes every later open() of a running process fail."""
    with chaos.restarting:
        pid = chaos.cluster.server.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), hard))
        try:
            with contextlib.suppress(OSError), contextlib.ExitStack() as held:
                for _ in range(20):
                    held.enter_context(dial(chaos.cluster.address))
                time.sleep(0.5)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def cancels_by_name(chaos, rng):
    inputs = some_inputs(rng, 20000)
    with attacker(chaos) as stub:
        for index in range(4):
            header = header_for(inputs, backward=True, request_id=f"cancelled-{index}")
            call = backward(chaos, stub, requests(header, chunks_of(inputs, NAMES)))
            time.sleep(0.2 * rng.random())
            stub.Cancel(pb.CancelRequest(request_id=header.request_id),
                                 timeout=30)
            outcome(call)


def supersedes(chaos, rng):
    """The newest of a name goes on, equal headers or not."""
    inputs, others = some_inputs(rng), some_inputs(rng)
    with attacker(chaos) as stub:
        calls = [backward(chaos, stub, requests(header_for(some, backward=True,
                                                           request_id="again"),
                                                chunks_of(some, NAMES)))
                 for some in (inputs, inputs, others, inputs)]
        for call in calls:
            outcome(call)


def deadlines(chaos, rng):
    inputs = some_inputs(rng)
    with attacker(chaos) as stub:
        calls = [backward(chaos, stub, requests(header_for(inputs, backward=True),
                                                chunks_of(inputs, NAMES)),
                          timeout=0.002 + 0.2 * rng.random()) for _ in range(20)]
        for call in calls:
            outcome(call)


def nonsense_requests(chaos, rng):
    inputs = some_inputs(rng)
    header = header_for(inputs, backward=True)
    header.shape.head_dim = 10000
    good = header_for(inputs, backward=True)
    late = pb.BackwardRequest(chunk=tensor_pb2.TensorChunk(
        tensor=tensor_pb2.TENSOR_ID_Q, offset=1 << 40, data=b"x"))
    with attacker(chaos) as stub:
        for messages in ([pb.BackwardRequest()], list(requests(header, [])),
                         [*requests(good, []), late], [late]):
            outcome(backward(chaos, stub, iter(messages)))


def too_large_for_the_workers(chaos, rng):
    """More than --memory_limit: refused before a byte is sent."""
    header = pb.BackwardHeader(
        shape=pb.AttentionShape(batch=64, seq_len_q=1 << 18, seq_len_kv=1 << 18, num_heads=8,
                                head_dim=128), dtype=tensor_pb2.DATA_TYPE_FLOAT32)
    with attacker(chaos) as stub:
        outcome(backward(chaos, stub, requests(header, [])))


def reflection_streams(chaos, rng):
    def never():
        time.sleep(1)
        return
        yield

    with grpc.insecure_channel(chaos.cluster.address, CHANNEL_OPTIONS) as channel:
        streams = [channel.stream_stream(REFLECTION)(never(), timeout=10) for _ in range(80)]
        time.sleep(0.5)
        for stream in streams:
            stream.cancel()


def watchers(chaos, rng):
    with grpc.insecure_channel(chaos.cluster.address, CHANNEL_OPTIONS) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        held = [stub.WatchTopology(cluster_pb2.WatchTopologyRequest(), timeout=10)
                for _ in range(60)]
        time.sleep(0.5)
        for watch in held:
            watch.cancel()


def garbage(chaos, rng):
    for address in (chaos.cluster.address, chaos.cluster.ports["control"],
                    chaos.cluster.ports["metrics"]):
        for size in (1, 24, 5000):
            with contextlib.suppress(OSError), dial(address) as connection:
                connection.sendall(rng.randbytes(size))


QUICK = [vanishes_in_upload, vanishes_in_download, sends_no_header, heavy_headers, resets,
         half_open_http, many_connections, no_descriptors, cancels_by_name, supersedes, deadlines,
         nonsense_requests, too_large_for_the_workers, reflection_streams, watchers, garbage]
SLOW = [does_not_read, trickles]
