"""Tensors in memory that clients share with workers: nothing leaked, nothing written late, and
everything that may go wrong ends in a typed error within its bound."""

import concurrent.futures
import ctypes
import hashlib
import json
import math
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import grpc
import pytest

from attention import error_of, make_inputs, reason_of
from cluster import CLI, await_state, open_descriptors, wait_until
from local_region import (ATTACHED, DESCRIPTOR_REFUSED, FENCED, FOREIGN_USER, NO_SUCH_TOKEN,
                          NOT_UNDERSTOOD, HostCall, Region, answer_of, connect, make_memfd, show)
from local_ring import (HERE, RING, SLOW, await_unmapped, make_local_ring, mapped, region, relayed,
                        ring, slow_ring)
from stubs import (attention_pb2 as pb, attention_pb2_grpc, local_memory_pb2,
                   local_memory_pb2_grpc)


# ------------------------------------------------------------------------- attaching


def test_descriptors_of_other_kinds_are_refused(ring):
    region = Region(ring, 1 << 16, attach=False)

    def attach(fds):
        point = region.offer().points[0]
        link = connect(point.socket_path)
        try:
            return show(link, point.token, fds)[0]
        finally:
            link.close()

    before = [open_descriptors(w.pid) for w in ring.workers.values()]
    pipe = os.pipe()
    zero = os.open("/dev/zero", os.O_RDWR)
    shrinkable = make_memfd(region.size, seals=0)
    sparse = make_memfd(region.size, allocate=False)
    short = make_memfd(region.size - 4096)
    read_only = os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY)
    for fd in (*pipe, zero, shrinkable, sparse, short, read_only):
        assert attach([fd]) == DESCRIPTOR_REFUSED
        os.close(fd)
    assert attach([]) == NOT_UNDERSTOOD
    assert attach([region.fd, region.fd]) == NOT_UNDERSTOOD
    assert attach([region.fd]) == ATTACHED
    # Those of an earlier test's connections may have been counted, and be closed by now.
    wait_until(lambda: all(open_descriptors(w.pid) <= count
                           for w, count in zip(ring.workers.values(), before)), 20,
               "no descriptor stays")
    region.close()
    await_unmapped(ring)


def test_tokens_are_for_one_use_at_one_worker(ring):
    region = Region(ring, 1 << 16, attach=False)
    first, second = region.offer().points[:2]
    elsewhere = connect(second.socket_path)
    assert show(elsewhere, first.token, [region.fd])[0] == NO_SUCH_TOKEN
    link = connect(first.socket_path)
    assert show(link, first.token, [region.fd])[0] == ATTACHED
    again = connect(first.socket_path)
    assert show(again, first.token, [region.fd])[0] == NO_SUCH_TOKEN
    garbage = connect(first.socket_path)
    assert show(garbage, b"\0" * 16, [region.fd])[0] == NO_SUCH_TOKEN
    version = connect(first.socket_path)
    version.send(struct.pack("<II", 3, 1) + second.token)
    assert answer_of(version)[0] == NOT_UNDERSTOOD
    for each in (link, elsewhere, again, garbage, version):
        each.close()
    region.close()
    await_unmapped(ring)


FOREIGNER = """
import socket, struct, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.settimeout(20)
try:
    link.connect(sys.argv[1])
except PermissionError:
    print("the file's permissions")
    sys.exit()
data = link.recv(512)
print(struct.unpack_from("<II", data)[1], data[8:].decode())
print(link.recv(512))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")
@pytest.mark.parametrize("served", [None, "12345"])
def test_another_user_is_refused(make_ring, served):
    """By the socket's permissions; where others are served too, by who it is."""
    nobody = 65534
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own are closed to others
        os.chmod(folder, 0o755)
        flags = ["--local_memory=host_memory", f"--local_socket_dir={folder}"]
        ring = make_ring(workers=1, worker_flags=flags + (
            [f"--local_uids={os.geteuid()},{served}"] if served else []))
        region = Region(ring, 1 << 16, attach=False)
        point = region.offer().points[0]
        done = subprocess.run([sys.executable, "-I", "-c", FOREIGNER, point.socket_path], user=nobody,
                              group=nobody, extra_groups=[], cwd="/", capture_output=True, text=True,
                              timeout=60)
        if served is None:
            assert done.stdout == "the file's permissions\n", done.stdout + done.stderr
        else:
            said, end = done.stdout.splitlines()
            assert said.startswith(f"{FOREIGN_USER} ") and "--local_uids" in said
            assert end == "b''"  # closed
            text = urllib.request.urlopen(
                f"http://{ring.worker_ports(0)['metrics']}/metrics").read().decode()
            assert 'ringattn_refused_attaches_total{reason="user"} 1' in text
        region.attach()  # its own user's, with the token that was not used up
        region.close()
        await_unmapped(ring)


def test_a_region_is_its_principals_alone(make_local_ring, tmp_path):
    """Another client that knows its name gets neither at it nor to know that it exists."""
    tokens = {"alice": "a" * 40, "bob": "b" * 40}
    clients = tmp_path / "clients.json"
    clients.write_text(json.dumps({"clients": [
        {"name": name, "token_sha256": [hashlib.sha256(token.encode()).hexdigest()]}
        for name, token in tokens.items()]}))
    clients.chmod(0o600)

    def dial(address, token=tokens["alice"]):
        return grpc.secure_channel(address, grpc.composite_channel_credentials(
            grpc.local_channel_credentials(), grpc.access_token_call_credentials(token)))

    audit = tmp_path / "audit.jsonl"
    ring = make_local_ring(workers=1, dial=dial, server_flags=[f"--clients_file={clients}",
                                                               f"--audit_log={audit}"])
    inputs = make_inputs()
    alices = Region(ring, 1 << 20)
    call = HostCall(alices, inputs)
    call.run(ring.attention)
    before = alices.memory[:]

    channel = dial(ring.address, tokens["bob"])
    bob = attention_pb2_grpc.AttentionServiceStub(channel)
    errors = [error_of(call.start(bob))]
    alices.id, id_ = b"?" * 16, alices.id
    errors.append(error_of(HostCall(alices, inputs).start(bob)))  # an unknown region: the same answer
    for error in errors:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(error) == "REGION_UNKNOWN"
    stub = local_memory_pb2_grpc.LocalMemoryServiceStub(channel)
    with pytest.raises(grpc.RpcError) as error:
        stub.Attach(local_memory_pb2.AttachRequest(bytes=alices.size, region_id=id_), timeout=10)
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert id_.hex() not in error.value.details()
    alices.id = id_
    begin, end = call.output_span()
    assert alices.memory[begin:end] == before[begin:end]
    alices.close()
    channel.close()
    line = wait_until(lambda: [each for each in map(json.loads, audit.read_text().splitlines())
                               if each["client"] == "alice"], 10, "an audit line")[0]
    assert line["transport"] == "host_memory"
    assert line["transport_reason"] == "host memory: all members have the regions of all tensors"


def test_the_seal_keeps_the_pages(ring, region):
    with pytest.raises(OSError):
        os.ftruncate(region.fd, 4096)


def test_attaching_a_thousand_times_leaves_nothing(make_local_ring):
    ring = make_local_ring(workers=1)
    worker = ring.workers[0].pid

    def cycle(times):
        for _ in range(times):
            region = Region(ring, 1 << 16)
            region.memory.close()
            region.close()
        wait_until(lambda: mapped(worker) == 0, 20, "unmapped")

    cycle(20)
    before = open_descriptors(worker), open_descriptors(ring.server.pid)
    for _ in range(50):  # a client has 64 at a time
        cycle(20)
    wait_until(lambda: (open_descriptors(worker), open_descriptors(ring.server.pid)) == before, 20,
               "descriptors as before")


# ---------------------------------------------------------------------- in flight


def test_one_region_in_eight_operations_and_its_neighbours_untouched(ring):
    inputs = [make_inputs(sq=160 + 7 * i, heads=2, dim=16, seed=i) for i in range(8)]
    options = dict(causal=True, schedule=RING)
    expected = [relayed(ring, each, **options) for each in inputs]
    shared = Region(ring, 16 << 20)
    neighbour = Region(ring, 1 << 20)
    neighbour.memory[:] = struct.pack("<f", math.nan) * (neighbour.size // 4)
    shared.memory[:] = struct.pack("<f", math.nan) * (shared.size // 4)
    calls = [HostCall(shared, each, **options) for each in inputs]
    before = bytes(shared.memory[:])
    threads = [threading.Thread(target=call.run, args=(ring.attention,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = bytearray(shared.memory[:])
    for call, tensors in zip(calls, expected):
        for name, data in tensors.items():
            assert call.bytes(name) == data
            offset, size = call.outputs[name]
            after[offset:offset + size] = before[offset:offset + size]
    assert bytes(after) == before, "bytes outside the outputs were written"
    assert bytes(neighbour.memory[:]) == struct.pack("<f", math.nan) * (neighbour.size // 4)
    shared.close()
    neighbour.close()


def long_call(region, **options):
    """Seconds of computing where calls of kernels are slow."""
    return HostCall(region, make_inputs(sq=9000, heads=2, dim=64), causal=True, schedule=RING,
                    **options)


def test_after_the_status_of_a_cancelled_call_nothing_is_written(slow_ring):
    ring = slow_ring
    region = Region(ring, 128 << 20)
    call = long_call(region, request_id="cancelled")
    stream = call.start(ring.attention)
    next(stream)
    await_state(ring, "cancelled", [pb.REQUEST_STATE_COMPUTING])
    ring.attention.Cancel(pb.CancelRequest(request_id="cancelled"), timeout=10)
    error = error_of(stream)
    assert error.code() == grpc.StatusCode.CANCELLED
    begin, end = call.output_span()
    region.memory[begin:end] = b"\xa5" * (end - begin)
    time.sleep(1)
    assert region.memory[begin:end] == b"\xa5" * (end - begin)
    small = HostCall(region, make_inputs(), schedule=RING)
    small.run(ring.attention)
    region.close()


def test_after_a_fence_nothing_is_written(slow_ring):
    ring = slow_ring
    region = Region(ring, 128 << 20)
    call = long_call(region, request_id="fenced", fence_number=77)
    stream = call.start(ring.attention)
    next(stream)
    await_state(ring, "fenced", [pb.REQUEST_STATE_COMPUTING])
    for worker in region.links:
        code, number = region.fence(worker, 77)
        assert code == FENCED and number == struct.pack("<Q", 77)
    begin, end = call.output_span()
    region.memory[begin:end] = b"\xa5" * (end - begin)
    error = error_of(stream)  # it computes to its end and then may not write
    assert error.code() == grpc.StatusCode.CANCELLED
    assert region.memory[begin:end] == b"\xa5" * (end - begin)
    region.close()


def test_a_region_released_in_flight_ends_its_requests(slow_ring):
    ring = slow_ring
    region = Region(ring, 128 << 20)
    call = long_call(region, request_id="released")
    stream = call.start(ring.attention)
    generation = next(stream).accepted.generation
    await_state(ring, "released", [pb.REQUEST_STATE_COMPUTING])
    region.close()
    error = error_of(stream)
    assert error.code() == grpc.StatusCode.CANCELLED
    assert reason_of(error) == "REGION_RELEASED"
    await_unmapped(ring)
    assert ring.topology().generation == generation


def punch(region):
    """Frees all pages of the region, which a memfd that is sealed against shrinking allows."""
    keep_size, punch_hole = 0x01, 0x02  # FALLOC_FL_*
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_long(region.size)
    assert libc.fallocate(region.fd, keep_size | punch_hole, ctypes.c_long(0), size) == 0


def allocated(region):
    return os.fstat(region.fd).st_blocks * 512


def region_rss(pid):
    """Bytes of regions that the process has mapped and touched."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", pathlib.Path(f"/proc/{pid}/smaps").read_text(),
                       flags=re.M)
    return sum(int(re.search(r"^Rss: +(\d+) kB", entry, re.M)[1]) << 10
               for entry in entries if "memfd:region" in entry.split("\n")[0])


def test_a_hole_punched_in_flight_spoils_only_the_punchers_result(slow_ring):
    """The workers read zeros there and go on; another region and another request keep their values."""
    ring = slow_ring
    generation, pids = ring.topology().generation, [w.pid for w in ring.workers.values()]
    region, other = Region(ring, 32 << 20), Region(ring, 4 << 20)
    inputs = make_inputs(sq=900, heads=2, dim=32)
    expected = relayed(ring, inputs, causal=True, schedule=RING)
    spoilt = HostCall(region, make_inputs(sq=2000, heads=4, dim=32), causal=True, schedule=RING,
                      request_id="spoilt")
    honest = HostCall(other, inputs, causal=True, schedule=RING)
    stream = spoilt.start(ring.attention)
    next(stream)
    results = concurrent.futures.ThreadPoolExecutor(1).submit(honest.run, ring.attention)
    ended = False
    while not ended:  # while it is copied in, computed and copied out
        punch(region)
        try:
            next(stream)
        except StopIteration:
            ended = True
    results.result(timeout=120)
    assert {name: honest.bytes(name) for name in expected} == expected
    again = HostCall(region, inputs, causal=True, schedule=RING)
    again.run(ring.attention)
    assert {name: again.bytes(name) for name in expected} == expected
    assert ring.topology().generation == generation
    assert [w.pid for w in ring.workers.values()] == pids and all(
        w.poll() is None for w in ring.workers.values())
    region.close()
    other.close()


def test_what_a_punched_region_costs_the_workers(make_local_ring):
    """A worker allocates the pages of the tensors that it copies, and no others."""
    ring = make_local_ring(workers=1)
    worker = ring.workers[0].pid
    region = Region(ring, 64 << 20)
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):
        wait_until(lambda: region_rss(worker) == region.size, 20, "the region is mapped ahead")
    punch(region)
    assert allocated(region) == 0 and region_rss(worker) == 0
    call = HostCall(region, make_inputs(sq=2000, heads=4, dim=32), causal=True)
    punch(region)  # HostCall wrote its inputs
    call.run(ring.attention)
    sizes = [call.inputs[name].nbytes for name in "qkv"] + [size for _, size in call.outputs.values()]
    most = sum(sizes) + 2 * 4096 * len(sizes)  # a tensor touches parts of its first and last page
    assert 0 < region_rss(worker) <= most and allocated(region) <= most
    region.close()
    await_unmapped(ring)


CHILD = """
import sys
sys.path.insert(0, {here!r})
import grpc
from attention import make_inputs
from local_region import HostCall, Region, connect
from stubs import attention_pb2 as pb, attention_pb2_grpc
class Ring: pass
ring = Ring()
ring.channel = grpc.insecure_channel({address!r})
ring.attention = attention_pb2_grpc.AttentionServiceStub(ring.channel)
region = Region(ring, 128 << 20, attach=False)
if {phase!r} == "attaching":
    links = [connect(point.socket_path) for point in region.offer().points]
    print("ready", flush=True)
    sys.stdin.read()
region.attach()
# Long by its rows, whose square the work is, where it is to be seen running.
shape = dict(sq=36000, heads=2) if {phase!r} == "running" else dict(sq=9000, heads=8)
call = HostCall(region, make_inputs(dim=64, **shape), causal=True,
                schedule=pb.SCHEDULE_RING, request_id={victim!r})
stream = call.start(ring.attention)
print("ready", flush=True)
for _ in stream: pass
sys.stdin.read()
"""


@pytest.mark.parametrize("phase", ["attaching", "copying in", "running", "copying out"])
def test_a_client_that_is_killed_leaves_nothing(ring, phase):
    generation, victim = ring.topology().generation, f"victim-{phase.replace(' ', '-')}"
    child = subprocess.Popen([sys.executable, "-c", CHILD.format(
        here=str(HERE), address=ring.address, phase=phase, victim=victim)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    if phase == "running":
        await_state(ring, victim, [pb.REQUEST_STATE_COMPUTING])
    elif phase == "copying out":
        # Its copies take milliseconds: as near to them as can be.
        await_state(ring, victim, [pb.REQUEST_STATE_DOWNLOADING, pb.REQUEST_STATE_SUCCEEDED])
    child.send_signal(signal.SIGKILL)
    child.wait()
    await_unmapped(ring)
    wait_until(lambda: all(w.reserved_bytes == 0 for w in ring.topology().workers), 30,
               "memory given back")
    assert ring.topology().generation == generation
    inputs = make_inputs(seed=8)
    region = Region(ring, 1 << 20)
    call = HostCall(region, inputs, schedule=RING)
    call.run(ring.attention)
    assert call.bytes("out") == relayed(ring, inputs, schedule=RING)["out"]
    region.close()


def test_a_worker_that_is_started_again_is_shown_the_region_again(make_local_ring):
    ring = make_local_ring(workers=2, worker_flags=SLOW)
    inputs = make_inputs(seed=2)
    options = dict(schedule=RING, world_size=2)
    expected = relayed(ring, inputs, **options)
    region = Region(ring, 128 << 20)
    long = long_call(region, request_id="loses")
    stream = long.start(ring.attention)
    next(stream)
    await_state(ring, "loses", [pb.REQUEST_STATE_COMPUTING])
    before = ring.topology().generation
    ring.kill_worker(1)
    error = error_of(stream)
    assert error.code() == grpc.StatusCode.ABORTED
    assert reason_of(error) == "WORKER_LOST"
    begin, end = long.output_span()
    region.memory[begin:end] = b"\xa5" * (end - begin)
    ring.start_worker(1)
    ring.wait_ready(2, after_generation=before)
    call = HostCall(region, inputs, **options)
    refused = error_of(call.start(ring.attention))
    assert "worker-1 has not attached" in refused.details()
    region.links.pop("worker-1").close()
    region.attach()  # under the same id
    call.run(ring.attention)
    assert call.bytes("out") == expected["out"]
    assert region.memory[begin:end] == b"\xa5" * (end - begin)
    region.close()


def calls_over(ring):
    text = urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics", timeout=10).read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
               if line.startswith("ringattn_requests_total{"))


def test_calls_that_require_host_memory_outlive_a_killed_worker(make_local_ring):
    """A client learns that a worker has joined from the rejection of its replay."""
    ring = make_local_ring(workers=2, worker_flags=["--fault_injection=slow_step_ms:200"])
    before = ring.topology().generation
    calls = subprocess.Popen(
        [CLI, "bench", f"--server={ring.address}", "--seq_len=512", "--runs=8", "--world_size=2",
         "--schedule=ring", "--transport=host_memory", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: calls_over(ring) >= 2, 60, "two calls over")
    ring.kill_worker(1)
    ring.start_worker(1)
    out, err = calls.communicate(timeout=120)
    assert calls.returncode == 0, err
    assert json.loads(out)["last_run"]["transport"]["kind"] == "host_memory"
    assert ring.topology().generation > before
    await_unmapped(ring)


def test_a_coordinator_that_is_started_again_knows_no_regions(make_local_ring):
    ring = make_local_ring(workers=1)
    region = Region(ring, 1 << 20)
    ring.kill_server()
    assert region.links["worker-0"].recv(16) == b""  # the worker detaches the region
    ring.start_server()
    ring.wait_ready(1)
    call = HostCall(region, make_inputs())
    error = error_of(call.start(ring.attention))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error) == "REGION_UNKNOWN"
    region.close()


def test_a_deadline_ends_it_with_nothing_written_after(slow_ring):
    ring = slow_ring
    region = Region(ring, 128 << 20)
    call = long_call(region, fence_number=5)
    error = error_of(call.start(ring.attention, timeout=0.4))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    for worker in region.links:  # the client's own clock: it has to ask
        assert region.fence(worker, 5)[0] == FENCED
    begin, end = call.output_span()
    region.memory[begin:end] = b"\xa5" * (end - begin)
    time.sleep(1)
    assert region.memory[begin:end] == b"\xa5" * (end - begin)
    region.close()
