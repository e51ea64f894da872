"""Clients that send requests and read no answers: floods of costly headers, and of calls that are
cancelled right after they start. A well-behaved client hardly waits meanwhile, no worker is lost,
and full service follows. The attackers run in a separate process, so that they do not share an
interpreter with the well-behaved client:

    test_abuse_floods.py headers|resets ADDRESS     prints a line when it has begun; ends with stdin
"""

import contextlib
import pathlib
import subprocess
import sys
import threading

import grpc
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))  # run as a program, too

from attention import header_for, make_inputs, requests, run
from cluster import CHANNEL_OPTIONS, peak_resident_bytes, reset_peak, wait_until
from stubs import attention_pb2 as pb, attention_pb2_grpc, tensor_pb2
from test_abuse import Client, report, serve
from timing import in_time, timed

WORKERS = 4


def stubs_of(address, connections):
    return [attention_pb2_grpc.AttentionServiceStub(
        grpc.insecure_channel(address, [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]))
        for _ in range(connections)]


def send_headers(address, over):
    """2^17 documents each, striped over all ranks: the longest plans that are accepted, no byte
    of a tensor. One such header stalled the control plane for seconds; forty lost all workers."""
    documents = 1 << 17
    bounds = list(range(documents + 1))
    header = pb.ForwardHeader(
        shape=pb.AttentionShape(batch=1, seq_len_q=documents, seq_len_kv=documents, num_heads=1,
                                head_dim=8, packed=pb.PackedDocuments(cu_seqlens_q=bounds,
                                                                      cu_seqlens_k=bounds)),
        dtype=tensor_pb2.DATA_TYPE_FLOAT32,
        plan=pb.PlanOptions(layout=pb.LAYOUT_STRIPED, schedule=pb.SCHEDULE_RING))

    def header_alone():
        yield from requests(header, [])
        over.wait(60)

    calls = [stub.Forward(header_alone(), timeout=60)
             for stub in stubs_of(address, 4) for _ in range(10)]
    print("begun", flush=True)
    over.wait(60)
    for call in calls:
        call.cancel()


def cut_calls(address, over):
    header = header_for(make_inputs(sq=512, heads=2, dim=32))
    stubs = stubs_of(address, 2)
    print("begun", flush=True)
    cut = 0
    while not over.wait(0.005):
        for _ in range(20):
            stubs[cut % 2].Forward(requests(header, []), timeout=60).cancel()
            cut += 1
    print(cut, flush=True)


@contextlib.contextmanager
def attackers(kind, address):
    process = subprocess.Popen([sys.executable, __file__, kind, address], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(30)


def check_flood(ring, kind, record_property, bound):
    generation = ring.topology().generation
    honest = Client(ring)
    quiet = report(record_property, "before", serve(honest, 1))
    with attackers(kind, ring.address) as process:
        beside = report(record_property, f"beside_{kind}", serve(honest, 5))
    print(process.stdout.read())
    wait_until(lambda: not any(w.reserved_bytes for w in ring.topology().workers), 30, "memory")
    topology = ring.topology()
    assert topology.generation == generation, "a worker was lost"
    assert len(topology.workers) == WORKERS
    serve(honest, 0)
    honest.close()
    in_time(beside < max(bound, 20 * quiet), (beside, quiet))


@timed
def test_costly_headers_delay_nobody(make_ring, record_property):
    check_flood(make_ring(workers=WORKERS), "headers", record_property, bound=0.05)


@timed
def test_calls_that_are_cut_at_once_delay_nobody(make_ring, record_property):
    check_flood(make_ring(workers=WORKERS), "resets", record_property, bound=0.25)


def levels_header(heads):
    """64 dilation levels, each with an offset for every head: 662 bytes."""
    tokens = 1 << 17
    header = pb.ForwardHeader(shape=pb.AttentionShape(batch=1, seq_len_q=tokens, seq_len_kv=tokens, num_heads=heads,
                                                      head_dim=1), dtype=tensor_pb2.DATA_TYPE_FLOAT32)
    for _ in range(64):
        header.options.dilation_levels.add(segment_length=tokens, dilation_rate=tokens - 1)
    return header


def test_dilation_levels_of_many_heads_cost_little(make_ring):
    """Plans grow with levels times offsets. Too many are rejected, and the most that are accepted lose no worker."""
    ring = make_ring(workers=WORKERS)
    generation = ring.topology().generation
    pids = [ring.server.pid, *(worker.pid for worker in ring.workers.values())]
    before = [reset_peak(pid) for pid in pids]
    for heads in (256, 512, 1024):
        with pytest.raises(grpc.RpcError) as refused:
            list(ring.attention.Forward(requests(levels_header(heads), []), timeout=30))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"options.dilation_levels: select {64 * heads} pairs" in refused.value.details()
    calls, over = [], threading.Event()

    def header_alone():
        yield from requests(levels_header(16), [])
        over.wait(60)

    for stub in stubs_of(ring.address, 8):
        calls.append(stub.Forward(header_alone(), timeout=60))
    assert all(next(call).WhichOneof("message") == "accepted" for call in calls)
    over.set()
    for call in calls:
        call.cancel()
    wait_until(lambda: not any(w.reserved_bytes for w in ring.topology().workers), 30, "memory")
    grown = [peak_resident_bytes(pid) - bytes_before for pid, bytes_before in zip(pids, before)]
    print(f"MB: {[round(value / 1e6) for value in grown]}")
    assert max(grown) < 200e6, grown
    assert ring.topology().generation == generation, "a worker was lost"
    run(ring.attention, make_inputs(sq=8, heads=1, dim=8))


if __name__ == "__main__":
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    {"headers": send_headers, "resets": cut_calls}[sys.argv[1]](sys.argv[2], is_over)
