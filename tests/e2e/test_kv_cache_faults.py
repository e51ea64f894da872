"""K/V caches when processes die, stop, restart and leave, and when clients exceed what they may."""

import json
import signal
import threading
import time

import grpc
import pytest

from attention import details
from certificates import digest, write_clients
from cluster import Cluster, wait_until
from kv_ring import WAYS, make_kv_ring  # noqa: F401
from kv import (DIRECT, HOST, RELAY, Group, Model, Row, Spec, Writer, create, delete, get, service)
from stubs import admin_pb2, kv_cache_pb2 as kv

CODE = grpc.StatusCode
TO_WORKERS = pytest.mark.parametrize("transport", [DIRECT, HOST], ids=["direct", "host_memory"])
SPEC = Spec([Group([0, 1], heads=8, kv_heads=4)])


def reason_of(error):
    return details(error)["ErrorInfo"].reason


def fails(code, reason, call):
    with pytest.raises(grpc.RpcError) as error:
        call()
    assert error.value.code() == code, error.value.details()
    assert reason_of(error.value) == reason, error.value.details()
    return error.value


def open_writer(ring, transport, world_size=2, **fields):
    cache = create(ring, SPEC, world_size=world_size, **fields)
    writer, model = Writer(ring, cache.cache_id, SPEC, transport), Model(SPEC)
    model.step(writer, [Row(1, 30)])
    return cache.cache_id, writer, model


def members_of(ring, cache_id):
    """Indexes of the workers that hold the cache, by rank."""
    return [int(name.rsplit("-", 1)[1]) for name in get(ring, cache_id).placement.members]


# ------------------------------------------------------------------ lost workers


@WAYS
def test_a_killed_worker_is_data_loss_within_a_second(make_kv_ring, transport):
    ring = make_kv_ring(workers=3)
    cache_id, writer, model = open_writer(ring, transport)
    other = create(ring, SPEC, world_size=1, members=["worker-2"])
    members = members_of(ring, cache_id)
    begin = time.monotonic()
    ring.kill_worker(members[1])
    if transport == RELAY:
        error = writer.streams[0].end()
        assert error.code() == CODE.DATA_LOSS and reason_of(error) == "KV_LOST"
        assert f"worker-{members[1]}" in error.details()
    else:
        # The survivor's stream ends because the coordinator frees the cache.
        error = writer.streams[0].end()
        assert error.code() == CODE.DATA_LOSS and reason_of(error) == "KV_LOST"
    fails(CODE.DATA_LOSS, "KV_LOST", lambda: Writer(ring, cache_id, SPEC, transport))
    assert time.monotonic() - begin < 1.0
    assert get(ring, cache_id).ended.code == CODE.DATA_LOSS.value[0]
    writer.close()
    if 2 not in members:
        assert not get(ring, other.cache_id).HasField("ended")
    # The client prefills another cache.
    _, writer, model = open_writer(ring, transport, world_size=1)
    model.step(writer, [Row(1, 1)])
    writer.close()


@pytest.mark.parametrize("state", ["idle", "begun", "called"])
def test_a_worker_killed_in_any_state_loses_the_cache(make_kv_ring, state):
    ring = make_kv_ring(workers=2)
    cache_id, writer, model = open_writer(ring, RELAY)
    begin = model.begin(2, [Row(1, 1)])
    if state != "idle":
        assert writer.begin(begin).HasField("accepted")
    if state == "called":
        q, k, v = (model.draw(1, h, 16) for h in (8, 4, 4))
        writer.call(begin, 0, q, k, v)
    ring.kill_worker(0)
    error = writer.streams[0].end()
    assert (error.code(), reason_of(error)) == (CODE.DATA_LOSS, "KV_LOST")
    wait_until(lambda: not any(w.reserved_bytes for w in ring.topology().workers), 5, "memory")


def test_a_stopped_worker_writes_nothing_for_an_older_epoch(make_kv_ring):
    """SIGSTOP during a step, then a new epoch, then SIGCONT: the older writer gets no answer."""
    ring = make_kv_ring(workers=1)
    cache_id, writer, model = open_writer(ring, RELAY, world_size=1)
    ring.stop_worker(0)
    writer.streams[0].send(kv.StepRequest(begin=model.begin(2, [Row(1, 1)])))
    later = []
    thread = threading.Thread(
        target=lambda: later.append(Writer(ring, cache_id, SPEC, RELAY, answered_step=1)))
    thread.start()
    time.sleep(0.5)
    ring.workers[0].send_signal(signal.SIGCONT)
    thread.join(20)
    error = writer.streams[0].end()
    assert (error.code(), reason_of(error)) == (CODE.ABORTED, "KV_FENCED")
    [writer] = later
    assert writer.next_step == 2 and writer.lengths() == {1: 30}
    model.step(writer, [Row(1, 1)])
    writer.close()


# ------------------------------------------------------------- the coordinator


@TO_WORKERS
def test_decoding_survives_the_coordinator(make_kv_ring, transport):
    ring = make_kv_ring(workers=2)
    cache_id, writer, model = open_writer(ring, transport)
    idle = create(ring, SPEC, world_size=1, ttl=dict(seconds=120))
    ring.kill_server()
    for _ in range(20):  # streams to the workers do not need it
        model.step(writer, [Row(1, 1)])
        time.sleep(0.05)
    ring.start_server()
    ring.wait_ready(2)
    model.step(writer, [Row(1, 1)])
    info = wait_until(lambda: adopted(ring, cache_id), 10, "the cache at the new coordinator")
    assert info.open and info.epoch == writer.answer.epoch
    assert not get(ring, idle.cache_id).open
    reserved = sum(w.kv_cache_bytes for w in ring.topology().workers)
    assert reserved == 2 * info.bytes_per_worker + idle.bytes_per_worker
    model.step(writer, [Row(1, 1)])
    # The next writer's epoch is larger than all earlier ones.
    second = Writer(ring, cache_id, SPEC, RELAY, answered_step=writer.next_step - 1)
    assert second.answer.epoch > writer.answer.epoch
    assert second.next_step == writer.next_step
    model.step(second, [Row(1, 1)])
    writer.close()
    second.close()
    delete(ring, cache_id)
    delete(ring, idle.cache_id)
    wait_until(lambda: not any(w.reserved_bytes for w in ring.topology().workers), 5, "memory")


def adopted(ring, cache_id):
    try:
        info = get(ring, cache_id)
    except grpc.RpcError as error:
        assert error.code() in (CODE.NOT_FOUND, CODE.UNAVAILABLE), error.details()
        return None
    return info if info.open else None


def test_a_cache_whose_workers_do_not_all_come_back_is_lost(make_kv_ring):
    flags = ["--kv_orphan_time=3s"]
    ring = make_kv_ring(workers=2, server_flags=flags)
    cache_id, writer, _ = open_writer(ring, DIRECT, ttl=dict(seconds=120))
    writer.close()
    ring.kill_server()
    ring.kill_worker(1)
    ring.start_server()
    ring.wait_ready(1)
    fails(CODE.UNAVAILABLE, "KV_ADOPTING", lambda: Writer(ring, cache_id, SPEC))
    wait_until(lambda: get(ring, cache_id).HasField("ended"), 10, "the end of the cache")
    fails(CODE.DATA_LOSS, "KV_LOST", lambda: Writer(ring, cache_id, SPEC))
    wait_until(lambda: not any(w.reserved_bytes for w in ring.topology().workers), 5, "memory")


def test_a_relayed_writer_opens_again_after_a_restart(make_kv_ring):
    ring = make_kv_ring(workers=2)
    cache_id, writer, model = open_writer(ring, RELAY)
    ring.server.kill()
    assert writer.streams[0].end().code() == CODE.UNAVAILABLE
    ring.kill_server()  # closes the channel
    ring.start_server()
    ring.wait_ready(2)
    wait_until(lambda: adopted(ring, cache_id), 10, "the cache at the new coordinator")
    writer = Writer(ring, cache_id, SPEC, RELAY, answered_step=1)
    assert writer.next_step == 2
    model.step(writer, [Row(1, 1)])
    writer.close()


# -------------------------------------------------------------------- the ring


@WAYS
def test_forming_the_ring_again_does_not_touch_caches(make_kv_ring, transport):
    ring = make_kv_ring(workers=2)
    cache_id, writer, model = open_writer(ring, transport)
    generation = ring.topology().generation
    stop, errors = threading.Event(), []

    def decode():
        try:
            while not stop.is_set():
                model.step(writer, [Row(1, 1, keep=30)])
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=decode)
    thread.start()
    ring.admin().ReformRing(admin_pb2.ReformRingRequest(), metadata=ring.credentials, timeout=30)
    ring.start_worker(2)
    ring.wait_ready(3, after_generation=generation)
    steps = writer.next_step
    wait_until(lambda: writer.next_step > steps + 3 or errors, 10, "steps after the forming")
    stop.set()
    thread.join()
    assert not errors, errors
    assert not get(ring, cache_id).HasField("ended")
    writer.close()


@WAYS
def test_a_leaving_worker_serves_its_writer_until_it_goes(make_kv_ring, transport):
    ring = make_kv_ring(workers=2, worker_flags=["--drain_timeout=4s"])
    cache_id, writer, model = open_writer(ring, transport, members=["worker-0", "worker-1"])
    assert not model.step(writer, [Row(1, 1)]).leaving
    assert not get(ring, cache_id).leaving_workers
    ring.workers[1].send_signal(signal.SIGTERM)
    # The writer and GetCache are told while the cache still works.
    info = wait_until(lambda: [i for i in [get(ring, cache_id)] if i.leaving_workers], 5,
                      "GetCache names the worker")[0]
    assert list(info.leaving_workers) == ["worker-1"] and not info.HasField("ended")
    for _ in range(10):
        begin = model.begin(writer.next_step, [Row(1, 1)])
        answers = [stream.ask(kv.StepRequest(begin=begin)) for stream in writer.streams]
        assert any(answer.accepted.leaving for answer in answers)
        writer.next_step += 1
        model.run(writer, begin)
        time.sleep(0.1)
    # Caches are made elsewhere meanwhile.
    other = create(ring, SPEC)
    assert list(other.placement.members) == ["worker-0"]
    # The leaving worker's own stream ends with the reason before the process does.
    error = writer.streams[-1].end()
    assert (error.code(), reason_of(error)) == (CODE.DATA_LOSS, "KV_LOST"), error.details()
    assert "ordered to end" in error.details()
    assert ring.workers[1].wait(20) == 0
    fails(CODE.DATA_LOSS, "KV_LOST", lambda: Writer(ring, cache_id, SPEC))
    writer.close()


# --------------------------------------------------------- quotas and strangers


TOKENS = {"first": "the-token-of-the-first", "second": "the-token-of-the-second"}


@pytest.fixture
def known(tmp_path):
    clients = tmp_path / "clients.json"
    write_clients(clients, [
        {"name": "first", "token_sha256": [digest(TOKENS["first"])], "max_kv_caches": 2,
         "max_kv_cache_bytes": 2 << 20},
        {"name": "second", "token_sha256": [digest(TOKENS["second"])]}])
    directory = tmp_path / "known"
    directory.mkdir()
    cluster = Cluster(directory, workers=0, server_flags=[
        f"--clients_file={clients}", f"--audit_log={directory / 'audit.jsonl'}"])
    cluster.audit = directory / "audit.jsonl"
    cluster.start_worker(0)
    stub = service(cluster)
    wait_until(lambda: serves(stub), 40, "a worker")
    yield stub, cluster
    print(cluster.tail())
    cluster.close()


def metadata(name):
    return [("authorization", f"Bearer {TOKENS[name]}")]


def request(spec=SPEC, **fields):
    return kv.CreateCacheRequest(spec=spec.proto(), **fields)


def serves(stub):
    try:
        cache = stub.CreateCache(request(), metadata=metadata("second"), timeout=5)
    except grpc.RpcError:
        return False
    stub.DeleteCache(kv.DeleteCacheRequest(cache_id=cache.cache_id), metadata=metadata("second"))
    return True


def test_quotas_bind_each_client(known):
    stub, cluster = known
    first = dict(metadata=metadata("first"), timeout=10)
    error = fails(CODE.RESOURCE_EXHAUSTED, "KV_QUOTA",
                  lambda: stub.CreateCache(request(Spec(blocks=2000)), **first))
    quota = details(error)["QuotaFailure"].violations[0]
    assert quota.subject == "client:first" and "max_kv_cache_bytes" in quota.description
    caches = [stub.CreateCache(request(), **first) for _ in range(2)]
    error = fails(CODE.RESOURCE_EXHAUSTED, "TOO_MANY_CACHES",
                  lambda: stub.CreateCache(request(), **first))
    assert details(error)["QuotaFailure"].violations[0].subject == "client:first"
    # Another client has its own.
    other = stub.CreateCache(request(Spec(blocks=2000)), metadata=metadata("second"), timeout=10)
    stub.DeleteCache(kv.DeleteCacheRequest(cache_id=caches[0].cache_id), **first)
    stub.CreateCache(request(), **first)
    assert other.cache_id


def test_a_foreign_id_is_as_good_as_none(known):
    stub, cluster = known
    cache = stub.CreateCache(request(), metadata=metadata("first"), timeout=10)
    answer = stub.OpenCache(kv.OpenCacheRequest(cache_id=cache.cache_id),
                            metadata=metadata("first"), timeout=10)
    hello = kv.StepHello(cache_id=cache.cache_id, epoch=answer.epoch, token=answer.token)
    foreign = dict(metadata=metadata("second"), timeout=10)

    def calls(cache_id):
        yield lambda: stub.GetCache(kv.GetCacheRequest(cache_id=cache_id), **foreign)
        yield lambda: stub.OpenCache(kv.OpenCacheRequest(cache_id=cache_id), **foreign)
        yield lambda: stub.DeleteCache(kv.DeleteCacheRequest(cache_id=cache_id), **foreign)
        greeting = kv.StepHello()
        greeting.CopyFrom(hello)
        greeting.cache_id = cache_id
        yield lambda: list(stub.Steps(iter([kv.StepRequest(hello=greeting)]), **foreign))

    for there, nowhere in zip(calls(cache.cache_id), calls(b"x" * 16)):
        errors = [fails(CODE.NOT_FOUND, "KV_NOT_FOUND", call) for call in (there, nowhere)]
        assert errors[0].details() == errors[1].details()
    assert not stub.ListCaches(kv.ListCachesRequest(), **foreign).caches
    [own] = stub.ListCaches(kv.ListCachesRequest(), metadata=metadata("first")).caches
    assert own.cache_id == cache.cache_id and own.open

    def lines():
        return [json.loads(line) for line in cluster.audit.read_text().splitlines()]

    wait_until(lambda: any(line["method"] == "Steps" for line in lines()), 5, "the audit log")
    found = {(line["method"], line["client"], line["code"]) for line in lines()}
    assert {("CreateCache", "first", "OK"), ("OpenCache", "first", "OK"),
            ("OpenCache", "second", "NOT_FOUND"), ("DeleteCache", "second", "NOT_FOUND"),
            ("Steps", "second", "NOT_FOUND")} <= found
    assert cache.cache_id.hex() not in cluster.audit.read_text()


def test_a_full_worker_refuses_and_residual_memory_gives_way(make_kv_ring):
    ring = make_kv_ring(workers=1, worker_flags=["--memory_limit=67108864"])
    worker = ring.topology().workers[0]
    assert worker.max_kv_cache_bytes <= worker.memory_bytes // 2
    per_block = 2 * 16 * 4 * 2 * 16 * 4  # layers, tokens, kv heads, k and v, dim, fp32
    blocks = int(worker.max_kv_cache_bytes) // per_block
    cache = create(ring, Spec([Group([0, 1], heads=8, kv_heads=4)], blocks=blocks))
    error = fails(CODE.RESOURCE_EXHAUSTED, "KV_MEMORY", lambda: create(ring, SPEC))
    assert "RetryInfo" in details(error)
    delete(ring, cache.cache_id)
    delete(ring, create(ring, SPEC).cache_id)
