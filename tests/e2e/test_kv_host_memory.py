"""Step rings in host memory: negotiation, bad clients, and what remains after either side dies."""

import json
import signal
import struct
import subprocess
import time

import grpc
import numpy as np
import pytest

from attention import details
from cluster import CLI, open_descriptors, wait_until
from direct_ring import LISTEN, metrics
from kv import (DIRECT, HOST, RELAY, Group, Model, Row, Spec, Writer, create, delete, direct_metadata,
                service)
from kv_ring import DONE, POSTED, RING_BYTES, SLOT_BYTES, make_kv_ring, ring  # noqa: F401
from local_region import Region
from local_ring import local_flags, mapped
from stubs import kv_cache_pb2 as kv

CODE = grpc.StatusCode
SPEC = Spec([Group([0, 1], heads=8, kv_heads=4)])


def open_cache(ring, cache_id, **fields):
    return service(ring).OpenCache(kv.OpenCacheRequest(cache_id=cache_id, **fields), timeout=20)


def refusal(ring, cache_id, **fields):
    with pytest.raises(grpc.RpcError) as error:
        open_cache(ring, cache_id, **fields)
    return error.value.code(), details(error.value)["ErrorInfo"].reason, error.value.details()


def step_rings(ring, index=0):
    return metrics(ring.worker_ports(index)["metrics"])["ringattn_worker_step_rings"]


def open_writer(ring, world_size=1):
    cache = create(ring, SPEC, world_size=world_size)
    writer, model = Writer(ring, cache.cache_id, SPEC, HOST), Model(SPEC)
    model.step(writer, [Row(1, 30)])
    return cache.cache_id, writer, model


# ------------------------------------------------------------------ negotiation


def test_a_region_is_required_and_must_be_attached(ring):
    cache = create(ring, SPEC, world_size=2)
    code, reason, words = refusal(ring, cache.cache_id, accept=[HOST])
    assert (code, reason) == (CODE.INVALID_ARGUMENT, "INVALID_REQUEST") and "region_id" in words
    code, reason, words = refusal(ring, cache.cache_id, accept=[HOST], region_id=b"x" * 16)
    assert (code, reason) == (CODE.FAILED_PRECONDITION, "TRANSPORT_UNAVAILABLE")
    assert "has not attached the region" in words
    # Another transport is used if the client accepts one.
    for accept, transport in (([HOST, DIRECT, RELAY], DIRECT), ([HOST, RELAY], RELAY)):
        answer = open_cache(ring, cache.cache_id, accept=accept, region_id=b"x" * 16)
        assert answer.transport == transport
        assert "no host memory: worker" in answer.transport_reason
    delete(ring, cache.cache_id)


def test_all_workers_of_the_cache_need_the_region(ring):
    cache = create(ring, SPEC, members=["worker-0", "worker-1"])
    region = Region(ring, 2 * RING_BYTES, attach=False)
    region.attach(only=["worker-0"])
    code, reason, words = refusal(ring, cache.cache_id, accept=[HOST], region_id=region.id)
    assert reason == "TRANSPORT_UNAVAILABLE" and "worker-1 has not attached" in words
    region.close()
    delete(ring, cache.cache_id)


def test_workers_without_an_address_or_without_host_memory(make_ring, tmp_path):
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    ring = make_ring(workers=0)
    ring.start_worker(0, flags=LISTEN)
    ring.start_worker(1, flags=local_flags(sockets))
    ring.wait_ready(2)
    for worker, words in ((0, "takes no host memory"), (1, "has no client data address")):
        cache = create(ring, SPEC, members=[f"worker-{worker}"])
        code, reason, message = refusal(ring, cache.cache_id, accept=[HOST], region_id=b"x" * 16)
        assert (code, reason) == (CODE.FAILED_PRECONDITION, "TRANSPORT_UNAVAILABLE")
        assert words in message
        delete(ring, cache.cache_id)


# ------------------------------------------------------------------ bad clients


@pytest.mark.parametrize("spoil,words", [
    ("counter", "messages ahead"), ("length", "a slot holds"), ("garbage", "not a StepRequest")])
def test_a_client_that_breaks_the_rules_loses_its_stream_only(ring, spoil, words):
    cache_id, writer, model = open_writer(ring)
    stream = writer.streams[0]
    slot = 4096 + stream.posted % 2 * SLOT_BYTES
    if spoil == "counter":
        stream.store(POSTED, stream.posted + 3)
    else:
        size = SLOT_BYTES if spoil == "length" else 8
        struct.pack_into("<I", stream.memory, slot, size)
        stream.memory[slot + 64:slot + 72] = b"\xff" * 8
        stream.store(POSTED, stream.posted + 1)
    error = stream.end()
    assert error.code() == CODE.INVALID_ARGUMENT and words in error.details()
    assert details(error)["ErrorInfo"].reason == "BAD_CALL"
    writer.close()
    wait_until(lambda: not any(step_rings(ring, i) for i in range(4)), 5, "the end of the ring")
    writer = Writer(ring, cache_id, SPEC, HOST, answered_step=1)
    model.step(writer, [Row(1, 1)])
    writer.close()
    delete(ring, cache_id)


def test_a_ring_must_be_in_the_region_that_was_named(ring):
    cache = create(ring, SPEC, members=["worker-0"])
    region, other = Region(ring, RING_BYTES), Region(ring, RING_BYTES)
    answer = open_cache(ring, cache.cache_id, accept=[HOST], region_id=region.id)
    ticket = answer.shards[0]
    from stubs import kv_cache_pb2_grpc
    with grpc.insecure_channel(ticket.endpoints[0]) as channel:
        hello = kv.StepHello(cache_id=cache.cache_id, epoch=answer.epoch, token=ticket.token)
        hello.ring.CopyFrom(kv.StepRing(region_id=other.id, slots=2, request_bytes=SLOT_BYTES,
                                        response_bytes=SLOT_BYTES))
        with pytest.raises(grpc.RpcError) as error:
            next(kv_cache_pb2_grpc.KvShardServiceStub(channel).Steps(
                iter([kv.StepRequest(hello=hello)]), metadata=direct_metadata(hello)))
        assert error.value.code() == CODE.INVALID_ARGUMENT
        assert "hello.ring.region_id" in error.value.details()
        assert other.id.hex() not in error.value.details()
    region.close()
    other.close()
    delete(ring, cache.cache_id)


# ------------------------------------------------------------------------- ends


def test_steps_go_on_after_the_region_was_released(make_kv_ring):
    """The ring keeps its memory until its stream ends."""
    ring = make_kv_ring(workers=1)
    cache_id, writer, model = open_writer(ring)
    writer.region.close()
    for _ in range(5):
        model.step(writer, [Row(1, 1)])
    assert mapped(ring.workers[0].pid) == 1 and step_rings(ring) == 1
    writer.close()
    wait_until(lambda: mapped(ring.workers[0].pid) == 0 and step_rings(ring) == 0, 5,
               "the region unmapped")
    delete(ring, cache_id)


def test_a_client_that_dies_leaves_nothing(make_kv_ring):
    ring = make_kv_ring(workers=2)
    before = [open_descriptors(w.pid) for w in ring.workers.values()]
    for _ in range(3):
        client = subprocess.Popen(
            [CLI, "bench", f"--server={ring.address}", "--steps=1000000", "--seq_len=64", "--causal",
             "--heads=4", "--head_dim=32", "--world_size=2", "--transport=host_memory"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: all(step_rings(ring, i) == 1 for i in range(2)), 20, "the rings")
        time.sleep(0.3)
        client.send_signal(signal.SIGKILL)
        client.wait()
        begin = time.monotonic()
        wait_until(lambda: all(step_rings(ring, i) == 0 and mapped(ring.workers[i].pid) == 0
                               for i in range(2)), 5, "the end of the rings")
        assert time.monotonic() - begin < 2
    wait_until(lambda: all(abs(open_descriptors(w.pid) - had) <= 2
                           for w, had in zip(ring.workers.values(), before)), 5, "descriptors")


def test_the_library_reports_a_worker_that_dies(make_kv_ring):
    ring = make_kv_ring(workers=2)
    client = subprocess.Popen(
        [CLI, "bench", f"--server={ring.address}", "--steps=1000000", "--seq_len=64", "--causal",
         "--heads=4", "--head_dim=32", "--world_size=2", "--transport=host_memory", "--json"],
        stdout=subprocess.PIPE, text=True)
    wait_until(lambda: all(step_rings(ring, i) == 1 for i in range(2)), 20, "the rings")
    time.sleep(0.3)
    begin = time.monotonic()
    ring.kill_worker(1)
    out, _ = client.communicate(timeout=20)
    assert time.monotonic() - begin < 5
    error = json.loads(out)["error"]
    assert (error["code"], error["reason"]) == ("DATA_LOSS", "KV_LOST")


def test_metrics_count_bytes_and_waits(make_kv_ring):
    ring = make_kv_ring(workers=1)
    cache = create(ring, Spec([Group([0])]))
    writer, model = Writer(ring, cache.cache_id, Spec([Group([0])]), HOST), Model(Spec([Group([0])]))
    values = metrics(ring.worker_ports(0)["metrics"])
    for _ in range(4):
        model.step(writer, [Row(1, 2)])
    after = metrics(ring.worker_ports(0)["metrics"])

    def grown(name):
        return after[name] - values[name]

    row = 16 * np.dtype(np.float32).itemsize
    host = 'transport="host_memory"'
    assert grown(f'ringattn_bytes_total{{direction="up",{host}}}') == 4 * 2 * (4 + 2 + 2) * row
    assert grown(f'ringattn_bytes_total{{direction="down",{host}}}') == 4 * 2 * (4 * row + 4 * 4)
    waits = [grown(f'ringattn_worker_step_ring_waits_total{{wait="{wait}"}}')
             for wait in ("active", "asleep")]
    assert sum(waits) > 0
    assert after["ringattn_worker_step_rings"] == 1
    writer.close()
    delete(ring, cache.cache_id)
