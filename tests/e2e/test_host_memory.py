"""Tensors in memory that clients share with workers: the same results, nothing leaked, and
everything that may go wrong ends in a typed error within its bound."""

import fcntl
import json
import math
import os
import pathlib
import signal
import struct
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest

from attention import chunks_of, details, make_inputs, requests, run
from cluster import BIN, CLI, open_descriptors, wait_until
from local_region import (ATTACHED, DESCRIPTOR_REFUSED, FENCED, NO_SUCH_TOKEN, NOT_UNDERSTOOD,
                          HostCall, Region, answer_of, connect, make_memfd, output_bytes, show)
from stubs import attention_pb2 as pb, local_memory_pb2 as lm

RING = pb.SCHEDULE_RING
HERE = pathlib.Path(__file__).parent


def local_flags(directory):
    return ["--local_memory=host", f"--local_socket_dir={directory}"]


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    from cluster import Cluster
    directory = tmp_path_factory.mktemp("host")
    cluster = Cluster(directory, workers=4, worker_flags=local_flags(directory))
    yield cluster
    print(cluster.tail())
    cluster.close()


@pytest.fixture
def make_local_ring(make_ring, tmp_path):
    def make(workers=2, **options):
        flags = local_flags(tmp_path) + options.pop("worker_flags", [])
        return make_ring(workers=workers, worker_flags=flags, **options)
    return make


@pytest.fixture
def region(ring):
    made = Region(ring, 32 << 20)
    yield made
    if made.links:
        made.close()


def mapped(pid):
    return (pathlib.Path(f"/proc/{pid}/maps").read_text()).count("memfd:")


def await_unmapped(ring):
    wait_until(lambda: all(mapped(w.pid) == 0 for w in ring.workers.values()), 20,
               "regions unmapped")


def relayed(ring, inputs, names=("out", "lse"), **options):
    result = run(ring.attention, inputs, **options)
    return {name: result.array(name).tobytes() for name in names}


def error_of(stream):
    with pytest.raises(grpc.RpcError) as error:
        for _ in stream:
            pass
    return error.value


def reason_of(error):
    return details(error)["ErrorInfo"].reason


def field_of(error):
    return details(error)["BadRequest"].field_violations[0].field


# ------------------------------------------------------------------------ results


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("layout", [pb.LAYOUT_CONTIGUOUS, pb.LAYOUT_ZIGZAG, pb.LAYOUT_STRIPED])
def test_results_equal_the_relays(ring, region, layout, world_size):
    inputs = make_inputs(batch=2, sq=203, sk=211, heads=4, kv_heads=2, dim=24, dim_v=40, seed=3)
    options = dict(causal=True, window=(90, -1), softcap=3.0, layout=layout, schedule=RING,
                   world_size=world_size)
    expected = relayed(ring, inputs, **options)
    call = HostCall(region, inputs, **options)
    result = call.run(ring.attention)
    assert result.accepted.transport == pb.TRANSPORT_HOST_MEMORY
    assert result.accepted.transport_reason
    assert not result.accepted.inputs
    assert result.summary.bytes_up == sum(inputs[n].nbytes for n in "qkv")
    for name, data in expected.items():
        assert call.bytes(name) == data, name
    gradients = relayed(ring, inputs, names=("dq", "dk", "dv"), backward=True, **options)
    backward = HostCall(region, inputs, backward=True, **options)
    backward.run(ring.attention)
    for name, data in gradients.items():
        assert backward.bytes(name) == data, name


def test_odd_offsets_and_rows_that_see_nothing(ring, region):
    inputs = make_inputs(sq=77, sk=13, heads=3, dim=5, dtype=np.float16, seed=9)
    expected = relayed(ring, inputs, causal=True, schedule=RING, world_size=4)
    region.used += 3
    call = HostCall(region, inputs, causal=True, schedule=RING, world_size=4)
    assert call.outputs["out"][0] % 2 == 1
    call.run(ring.attention)
    assert call.bytes("out") == expected["out"]
    assert call.bytes("lse") == expected["lse"]


def test_the_command_line_says_which_way(ring, tmp_path):
    files = {name: tmp_path / f"{name}.safetensors" for name in ("in", "relay", "host", "grads",
                                                                 "relay_grads")}
    subprocess.run([CLI, "generate", f"--output={files['in']}", "--seq_len=700", "--heads=4",
                    "--kv_heads=2", "--head_dim=32", "--dtype=bf16", "--seed=1", "--with_dout"],
                   check=True, capture_output=True)

    def call(command, output, *flags):
        done = subprocess.run([CLI, command, f"--server={ring.address}", f"--input={files['in']}",
                               f"--output={files[output]}", "--causal", "--schedule=ring", "--json",
                               *flags], capture_output=True, text=True, timeout=120)
        return json.loads(done.stdout)

    relay = call("forward", "relay")
    assert relay["transport"]["kind"] == "coordinator_stream"
    assert relay["transport"]["reason"].startswith("the client has no region")
    host = call("forward", "host", "--transport=host")
    assert host["transport"]["kind"] == "host_memory"
    assert host["bytes"]["host_memory"]["up"] > 0
    assert files["relay"].read_bytes() == files["host"].read_bytes()
    call("backward", "relay_grads", "--transport=relay")
    assert call("backward", "grads", "--transport=host")["transport"]["kind"] == "host_memory"
    assert files["grads"].read_bytes() == files["relay_grads"].read_bytes()
    bench = subprocess.run([CLI, "bench", f"--server={ring.address}", "--seq_len=512",
                            "--runs=1", "--transport=host", "--json"],
                           capture_output=True, text=True, timeout=120)
    report = json.loads(bench.stdout)
    assert report["last_run"]["transport"]["kind"] == "host_memory", bench.stdout
    # Of one run the median is the run.
    assert sum(report["stage_seconds"].values()) == pytest.approx(report["seconds"]["median"], abs=1e-6)


def test_files_are_staged_for_host_memory_alone(ring, tmp_path):
    """--transport=auto of one call: making memory for it takes longer than the relay."""
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    subprocess.run([CLI, "generate", f"--output={source}", "--seq_len=4096", "--heads=4",
                    "--head_dim=64", "--dtype=bf16", "--seed=3"], check=True, capture_output=True)

    def call(*flags, server=ring.address):
        out.unlink(missing_ok=True)
        done = subprocess.run([CLI, "forward", f"--server={server}", f"--input={source}",
                               f"--output={out}", "--window=64,0", "--json", *flags],
                              capture_output=True, text=True, timeout=120)
        reply = json.loads(done.stdout)
        return reply, out.read_bytes() if done.returncode == 0 else None

    staged, results = call("--transport=host")
    assert staged["transport"]["kind"] == "host_memory"
    assert "; staged: " in staged["transport"]["reason"]
    moved = 4 * 4096 * 4 * 64 * 2 + 4096 * 4 * 4
    assert staged["transport"]["staged_bytes"] == moved
    seconds = staged["client_seconds"]
    assert 0 < seconds["accepted"] < seconds["finished"]
    relayed, expected = call("--transport=relay")
    assert relayed["transport"]["kind"] == "coordinator_stream"
    assert relayed["transport"]["staged_bytes"] == 0
    assert results == expected
    reasons = {"": "is not staged: no memory is ready for it yet",
               "--staging_limit=0": "is not staged: it is turned off",
               "--staging_limit=4MiB": "are more than the limit of staging (4194304)"}
    for flag, reason in reasons.items():
        relayed, results = call(*flag.split())
        assert relayed["transport"]["kind"] == "coordinator_stream" and results == expected
        assert reason in relayed["transport"]["reason"]
    refused, _ = call("--staging_limit=4MiB", "--transport=host")
    assert refused["error"]["reason"] == "TRANSPORT_UNAVAILABLE"
    assert "the limit of staging" in refused["error"]["message"]
    await_unmapped(ring)


def test_the_load_generator_finds_memory_ready(ring):
    """Many calls of one client: from the third or so on, auto goes by host memory."""
    done = subprocess.run([CLI, "bench", f"--server={ring.address}", "--seq_len=4096", "--heads=4",
                           "--head_dim=64", "--window=16,0", "--runs=8", "--json"],
                          capture_output=True, text=True, timeout=120)
    transport = json.loads(done.stdout)["last_run"]["transport"]
    assert transport["kind"] == "host_memory" and transport["staged_bytes"] > 0, done.stdout


def test_where_no_worker_takes_memory_nothing_is_staged(make_ring):
    ring = make_ring(workers=1)
    done = subprocess.run([CLI, "bench", f"--server={ring.address}", "--seq_len=4096", "--heads=4",
                           "--head_dim=64", "--window=16,0", "--runs=8", "--json"],
                          capture_output=True, text=True, timeout=120)
    transport = json.loads(done.stdout)["last_run"]["transport"]
    assert transport["kind"] == "coordinator_stream" and transport["staged_bytes"] == 0
    assert "is not staged: no worker of this machine took memory" in transport["reason"]


def test_what_a_forward_left_is_read_by_host_memory_too(make_local_ring, tmp_path):
    """q, k, v, out and lse stay with the workers; dout alone is copied out of the client's memory."""
    # Of its own: what was read stays a minute, should the answer have been lost.
    ring = make_local_ring(workers=3)
    source, out, grads = (tmp_path / f"{name}.safetensors" for name in ("in", "out", "grads"))
    subprocess.run([CLI, "generate", f"--output={source}", "--seq_len=900", "--heads=4",
                    "--head_dim=32", "--dtype=bf16", "--seed=2", "--with_dout"],
                   check=True, capture_output=True)

    def call(command, output, *flags):
        done = subprocess.run([CLI, command, f"--server={ring.address}", f"--input={source}",
                               f"--output={output}", "--causal", "--schedule=ring", "--json",
                               *flags], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    kept = call("forward", out, "--retain=1m", "--transport=host")
    assert kept["transport"]["kind"] == "host_memory"
    handle = kept["residual"]["handle"]
    read = call("backward", grads, f"--residual={handle}", "--transport=host")
    assert read["transport"]["kind"] == "host_memory" and read["residual"]["failure"] == ""
    assert read["bytes"]["host_memory"]["up"] == 900 * 4 * 32 * 2  # dout
    subprocess.run([CLI, "verify", f"--input={source}", f"--output={grads}", f"--forward={out}",
                    "--causal"], check=True, capture_output=True)


def test_the_load_generator_by_host_memory(ring):
    done = subprocess.run([CLI, "bench", f"--server={ring.address}", "--seq_len=256", "--heads=2",
                           "--head_dim=32", "--transport=host", "--concurrency_range=1:3:2",
                           "--measurement_interval=100", "--max_trials=3", "--backward", "--json"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for level in json.loads(done.stdout)["load"]["levels"]:
        assert level["succeeded"] > 0 and not level["failed"]


def test_no_tensor_byte_passes_the_coordinator(ring, region):
    import urllib.request

    def counted():
        text = urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics").read().decode()
        lines = [l for l in text.splitlines() if l.startswith("ringattn_tensor_bytes_total{")
                 or l.startswith("ringattn_bytes_total{")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    before = counted()
    call = HostCall(region, make_inputs(sq=300), schedule=RING, world_size=2)
    call.run(ring.attention)
    after = counted()
    grown = {name for name in after if after[name] > before[name]}
    assert grown and all("host_memory" in name for name in grown), grown


@pytest.mark.parametrize("flags", [[], ["--options", "--seed=79"]])
def test_cases_of_the_sweep_match_the_oracle(ring, flags):
    done = subprocess.run([BIN / "tests/e2e/service_sweep", f"--server={ring.address}",
                           "--cases=80", "--max_world_size=4", "--transport=host", *flags],
                          capture_output=True, text=True, timeout=600)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stderr
    assert "80 cases, 0 failed" in done.stdout


# ---------------------------------------------------------------- choice and refusal


def test_without_an_attached_region_the_relay_serves_with_the_reason(make_local_ring):
    ring = make_local_ring(workers=2)
    inputs = make_inputs()
    some = Region(ring, 1 << 20, attach=False)
    some.attach(only=["worker-0"])
    call = HostCall(some, inputs, required=False, schedule=RING, world_size=2)
    responses = ring.attention.Forward(requests(call.header, chunks_of(inputs, "qkv")), timeout=60)
    accepted = next(responses).accepted
    assert accepted.transport == pb.TRANSPORT_COORDINATOR_STREAM
    assert accepted.transport_reason == ("no host memory: worker-1 has not attached the region of q")
    assert len(accepted.inputs) == 3
    assert sum(len(r.chunk.data) for r in responses) == sum(
        output_bytes(inputs, n) for n in ("out", "lse"))
    call.header.transport.required = True
    error = error_of(call.start(ring.attention))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(error) == "TRANSPORT_UNAVAILABLE"
    some.close()


def test_workers_without_local_memory_are_named(make_ring):
    ring = make_ring(workers=1)
    with pytest.raises(grpc.RpcError) as error:
        Region(ring, 4096)
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(error.value) == "TRANSPORT_UNAVAILABLE"


def test_bad_places_are_refused_by_field(ring, region):
    inputs = make_inputs()

    def refused(change):
        call = HostCall(region, inputs, schedule=RING)
        change(call.header.transport)
        error = error_of(call.start(ring.attention))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert region.id not in error.details().encode()
        return field_of(error), reason_of(error)

    def set_place(index, **fields):
        def change(transport):
            for name, value in fields.items():
                setattr(transport.places[index], name, value)
        return change

    assert refused(set_place(0, region_id=b"x" * 16)) == (
        "transport.places[0].region_id", "REGION_UNKNOWN")
    assert refused(set_place(1, region_id=b"x"))[0] == "transport.places[1].region_id"
    assert refused(set_place(2, offset=region.size - 8))[0] == "transport.places[2].offset"
    assert refused(set_place(2, offset=2**64 - 1))[0] == "transport.places[2].offset"
    overlap = lambda t: setattr(t.places[3], "offset", t.places[0].offset + 4)
    assert refused(overlap)[0] == "transport.places[3].offset"


def test_chunks_beside_host_memory_are_refused(ring, region):
    inputs = make_inputs(sq=3000, heads=4, dim=64)
    call = HostCall(region, inputs, schedule=RING, causal=True)
    stream = ring.attention.Forward(requests(call.header, chunks_of(inputs, "q")), timeout=60)
    error = error_of(stream)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error) == "BAD_CHUNK"


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
    assert bytes(after) == before, "bytes beside the outputs were written"
    assert bytes(neighbour.memory[:]) == struct.pack("<f", math.nan) * (neighbour.size // 4)
    shared.close()
    neighbour.close()


def long_call(region, **options):
    """Some seconds of computing on one thread a rank."""
    return HostCall(region, make_inputs(sq=9000, heads=8, dim=64), causal=True, schedule=RING,
                    **options)


def await_state(ring, request_id, states):
    def reached():
        try:
            reply = ring.attention.GetOperation(pb.GetOperationRequest(request_id=request_id),
                                                timeout=5)
        except grpc.RpcError:
            return False
        return reply.state in states
    wait_until(reached, 60, f"operation in {states}")


def test_after_the_status_of_a_cancelled_call_nothing_is_written(ring):
    region = Region(ring, 128 << 20)
    call = long_call(region, request_id="cancelled")
    stream = call.start(ring.attention)
    next(stream)
    await_state(ring, "cancelled", [pb.OPERATION_STATE_COMPUTING])
    ring.attention.CancelOperation(pb.CancelOperationRequest(request_id="cancelled"), timeout=10)
    error = error_of(stream)
    assert error.code() == grpc.StatusCode.CANCELLED
    begin, end = call.output_span()
    region.memory[begin:end] = b"\xa5" * (end - begin)
    time.sleep(1)
    assert region.memory[begin:end] == b"\xa5" * (end - begin)
    small = HostCall(region, make_inputs(), schedule=RING)
    small.run(ring.attention)
    region.close()


def test_after_a_fence_nothing_is_written(ring):
    region = Region(ring, 128 << 20)
    call = long_call(region, request_id="fenced", fence_number=77)
    stream = call.start(ring.attention)
    next(stream)
    await_state(ring, "fenced", [pb.OPERATION_STATE_COMPUTING])
    for worker in region.links:
        code, number = region.fence(worker, 77)
        assert code == FENCED and number == struct.pack("<Q", 77)
    begin, end = call.output_span()
    region.memory[begin:end] = b"\xa5" * (end - begin)
    error = error_of(stream)  # it computes to its end and then may not write
    assert error.code() == grpc.StatusCode.CANCELLED
    assert region.memory[begin:end] == b"\xa5" * (end - begin)
    region.close()


def test_a_region_released_in_flight_ends_its_requests(ring):
    region = Region(ring, 128 << 20)
    call = long_call(region, request_id="released")
    stream = call.start(ring.attention)
    generation = next(stream).accepted.generation
    await_state(ring, "released", [pb.OPERATION_STATE_COMPUTING])
    region.close()
    error = error_of(stream)
    assert error.code() == grpc.StatusCode.CANCELLED
    assert reason_of(error) == "REGION_RELEASED"
    await_unmapped(ring)
    assert ring.topology().generation == generation


def test_a_hole_punched_in_flight_spoils_only_the_punchers_result(ring, region):
    libc_punch = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    call = HostCall(region, make_inputs(sq=2000, heads=4, dim=32), causal=True, schedule=RING)
    stream = call.start(ring.attention)
    libc.fallocate(region.fd, libc_punch, ctypes.c_long(0), ctypes.c_long(region.size))
    for _ in stream:
        pass
    inputs = make_inputs(seed=4)
    again = HostCall(region, inputs, schedule=RING)
    again.run(ring.attention)
    assert again.bytes("out") == relayed(ring, inputs, schedule=RING)["out"]


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
call = HostCall(region, make_inputs(sq=9000, heads=8, dim=64), causal=True,
                schedule=pb.SCHEDULE_RING, request_id="victim")
stream = call.start(ring.attention)
print("ready", flush=True)
for _ in stream: pass
sys.stdin.read()
"""


@pytest.mark.parametrize("phase", ["attaching", "copying in", "running", "copying out"])
def test_a_client_that_is_killed_leaves_nothing(ring, phase):
    generation = ring.topology().generation
    child = subprocess.Popen([sys.executable, "-c", CHILD.format(
        here=str(HERE), address=ring.address, phase=phase)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    if phase == "running":
        await_state(ring, "victim", [pb.OPERATION_STATE_COMPUTING])
    elif phase == "copying out":
        # Its copies take milliseconds: as near to them as can be.
        await_state(ring, "victim", [pb.OPERATION_STATE_DOWNLOADING, pb.OPERATION_STATE_SUCCEEDED])
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
    ring = make_local_ring(workers=2)
    inputs = make_inputs(seed=2)
    options = dict(schedule=RING, world_size=2)
    expected = relayed(ring, inputs, **options)
    region = Region(ring, 128 << 20)
    long = long_call(region, request_id="loses")
    stream = long.start(ring.attention)
    next(stream)
    await_state(ring, "loses", [pb.OPERATION_STATE_COMPUTING])
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


def test_a_coordinator_that_is_started_again_knows_no_regions(make_local_ring):
    ring = make_local_ring(workers=1)
    region = Region(ring, 1 << 20)
    ring.kill_server()
    assert region.links["worker-0"].recv(16) == b""  # the worker lets go of it
    ring.start_server()
    ring.wait_ready(1)
    call = HostCall(region, make_inputs())
    error = error_of(call.start(ring.attention))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error) == "REGION_UNKNOWN"
    region.close()


def test_a_deadline_ends_it_with_nothing_written_after(ring):
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
