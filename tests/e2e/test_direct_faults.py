"""Direct streams under faults and attacks: each ends in a typed error within its time bound."""

import pathlib
import re
import signal
import subprocess
import threading
import time

import grpc
import pytest

from attention import error_of, make_inputs, reason_of, run
import http2
from cluster import (CHANNEL_OPTIONS, CLI, await_state, open_descriptors, peak_resident_bytes,
                     reset_peak, resident_bytes, wait_until)
from direct_call import DirectCall, Stream, cut, opening
from direct_ring import CODE, RING, await_free, call, generate, make_direct_ring, refused, ring
from stubs import attention_pb2 as pb
from timing import in_time, timed


# -------------------------------------------------------------------------- tokens


def assert_refused(stream):
    error = stream.error()
    assert error.code() == CODE.UNAUTHENTICATED, error
    assert error.details() == "the token is not valid for a stream of this worker"
    stream.close()


def test_a_token_opens_its_streams_once_at_its_worker(ring):
    inputs = make_inputs(sq=3000, heads=4, dim=64)
    before = [refused(ring, i) for i in range(4)]
    direct = DirectCall(ring, inputs, schedule=RING, world_size=2).accept()
    first, second = direct.tickets
    rank_of = {w.name: int(w.name[-1]) for w in ring.topology().workers}
    assert_refused(Stream(second.endpoints[0]).open(first.token))  # another rank's
    assert_refused(Stream(first.endpoints[0]).open(b"\0" * 32))
    assert_refused(Stream(first.endpoints[0]).open(b""))
    assert_refused(Stream(first.endpoints[0]).open(first.token[:-1]))
    assert_refused(Stream(first.endpoints[0]).open(
        ring.secret.read_text().encode()))  # the cluster's secret is nothing here
    assert_refused(Stream(first.endpoints[0]).begin(*ring.credentials, opening(token=b"")))
    streams = [[direct.open(rank, part, 2).opened() for part in range(2)] for rank in range(2)]
    assert_refused(direct.open(0, 0, 2))  # used
    assert_refused(direct.open(0, 1, 2))
    assert_refused(direct.open(0, 0, 3))  # another set
    many = Stream(first.endpoints[0]).open(first.token, 0, 1000)
    assert many.error().code() == CODE.INVALID_ARGUMENT
    for rank, mine in enumerate(streams):
        direct.send(mine[0], rank)
    arrays = direct.receive(streams)
    list(direct.stream)
    expected = run(ring.attention, inputs, schedule=RING, world_size=2)
    assert arrays["out"].tobytes() == expected.array("out").tobytes()
    assert_refused(direct.open(0))  # stale
    assert_refused(direct.open(1, 0, 2))
    counted = sum(refused(ring, i) - before[i] for i in rank_of.values())
    assert counted == 11
    assert sum(refused(ring, i, "parts") for i in range(4)) == 1


def test_the_next_generation_knows_no_token_of_the_last(make_direct_ring):
    ring = make_direct_ring(workers=2)
    inputs = make_inputs(sq=2000, heads=4, dim=64)
    direct = DirectCall(ring, inputs, schedule=RING, world_size=2).accept()
    generation = ring.topology().generation
    ring.kill_worker(1)
    assert reason_of(error_of(direct.stream)) == "WORKER_LOST"
    ring.start_worker(1)
    ring.wait_ready(2, after_generation=generation)
    survivor = [t for t in direct.tickets if t.worker == "worker-0"][0]
    assert_refused(Stream(survivor.endpoints[0]).open(survivor.token))
    again = DirectCall(ring, inputs, schedule=RING, world_size=2)
    expected = run(ring.attention, inputs, schedule=RING, world_size=2)
    assert again.run()["out"].tobytes() == expected.array("out").tobytes()


def test_what_says_nothing_opens_nothing(ring):
    """A worker rejects a call without a readable OpenShard like one with a wrong token and allocates
    nothing; the coordinator's port reports the reason to a caller that has the secret."""
    direct = DirectCall(ring, make_inputs(sq=900, heads=4, dim=64), schedule=RING,
                        world_size=1).accept()
    ticket = direct.tickets[0]
    address = ticket.endpoints[0]
    worker = int(ticket.worker[-1])
    before = refused(ring, worker)
    right = opening(token=ticket.token, parts=1)
    key, data = right
    bad = {"missing": [], "under another name": [("ringattn-open", "x"), ("ringattn-token-bin", data)],
           "empty": [(key, b"")], "garbled": [(key, b"\xff" + data)], "cut": [(key, data[:-1])],
           "twice": [right, right],
           "over a kibibyte": [opening(token=ticket.token, operation_id="x" * 1024)],
           "a kibibyte, and wrong": [opening(token=b"x" * 1020)]}
    for metadata in bad.values():
        assert_refused(Stream(address).begin(*metadata))
    assert refused(ring, worker) - before == len(bad)
    # gRPC itself takes no more metadata than the port's limit.
    large = Stream(address).begin(right, ("x-more", "x" * 5000))
    assert large.error().code() == CODE.RESOURCE_EXHAUSTED
    large.close()
    data_port = ring.worker_ports(worker)["data"]
    for kind in ("missing", "garbled", "twice", "over a kibibyte"):
        error = Stream(data_port).begin(*ring.credentials, *bad[kind]).error()
        assert error.code() == CODE.INVALID_ARGUMENT and key in error.details(), (kind, error)
        for secret in ([], [("ringattn-secret", "guess")]):
            error = Stream(data_port).begin(*secret, *bad[kind]).error()
            assert error.code() == CODE.UNAUTHENTICATED, (kind, error)
            assert error.details().endswith("does not carry the cluster's secret")
    error = Stream(data_port).begin(*ring.credentials, opening(operation_id="x", generation=1)).error()
    assert error.code() == CODE.NOT_FOUND
    stream = Stream(address).begin(right).opened()  # still good for it
    direct.stream.cancel()
    assert stream.error().code() == CODE.ABORTED
    await_free(ring)


def test_base64_that_is_none_is_refused_by_grpc(ring):
    """Binary metadata is sent as base64. A value that is not base64 ends its own connection only."""
    address = ring.worker_ports(0)["client_data"]
    connection = http2.dial(address)
    connection.sendall(http2.exchange(1, address, ("ringattn-open-bin", "!not base64!")))
    assert http2.heard_until_closed(connection, 10) is not None
    connection.close()
    assert_refused(Stream(address).begin())


def test_a_flood_without_tokens_is_over_soon(make_direct_ring):
    """And clients with tokens get through it."""
    ring = make_direct_ring(workers=1)
    address = ring.worker_ports(0)["client_data"]
    worker = ring.workers[0].pid
    run_one = lambda: DirectCall(ring, make_inputs(sq=500), schedule=RING).run()
    run_one()
    before, memory = open_descriptors(worker), resident_bytes(worker)
    begin = time.monotonic()
    silent = [Stream(address).begin() for _ in range(100)]
    raw = [http2.dial(address, hello=b"") for _ in range(60)]  # not even HTTP/2
    idle = http2.dial(address)  # no more than its first words
    for stream in silent:
        assert_refused(stream)
    run_one()
    assert time.monotonic() - begin < 20
    for connection in raw:
        assert http2.heard_until_closed(connection, 30) is not None
        connection.close()
    assert time.monotonic() - begin < 40
    # As many streams as it likes, one after another and a hundred at a time.
    channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
    exchange = channel.stream_stream("/ringattn.v1.ShardService/Exchange", lambda x: x, lambda x: x)
    for _ in range(30):
        calls = [exchange(iter(()), timeout=60) for _ in range(100)]
        assert {call_.code() for call_ in calls} == {CODE.UNAUTHENTICATED}
    channel.close()
    run_one()
    assert http2.heard_until_closed(idle, 90) is not None
    assert 25 < time.monotonic() - begin < 120
    idle.close()
    wait_until(lambda: open_descriptors(worker) <= before + 2, 45, "descriptors as before")
    assert resident_bytes(worker) - memory < 64 << 20
    assert refused(ring, 0) == 3100
    run_one()


@timed
def test_a_connection_without_http2_is_closed_after_five_seconds(ring):
    begin = time.monotonic()
    connection = http2.dial(ring.worker_ports(0)["client_data"], hello=b"")
    assert http2.heard_until_closed(connection, 30) is not None
    in_time(4 < time.monotonic() - begin < 8, time.monotonic() - begin)
    connection.close()


def test_nothing_is_taken_in_without_a_token(make_direct_ring):
    """Twelve first messages of 14 MiB at once, of gRPC's and of clients who keep their last byte: of
    a stream there is at most its window, for the moment that it takes to refuse it."""
    ring = make_direct_ring(workers=1)
    address = ring.worker_ports(0)["client_data"]
    worker = ring.workers[0].pid
    run_one = lambda: DirectCall(ring, make_inputs(sq=500), schedule=RING).run()
    run_one()
    memory = reset_peak(worker)
    size = 14 << 20
    for metadata in ([], [opening(token=b"x" * 32, parts=1)]):
        streams = [Stream(address) for _ in range(12)]
        for stream in streams:
            grpc.channel_ready_future(stream.channel).result(timeout=10)
            stream.chunk("q", 0, bytes(size))
        for stream in streams:
            stream.begin(*metadata)
        for stream in streams:
            assert_refused(stream)
    calls = [http2.Unfinished(address, size) for _ in range(12)]
    threads = [threading.Thread(target=call_.pour, args=(4,)) for call_ in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grown = peak_resident_bytes(worker) - memory
    print(f"{grown / 1e6:.1f} MB more at the most, {max(c.sent_bytes for c in calls)} bytes sent")
    assert all(call_.ended and call_.sent_bytes < 2 << 20 for call_ in calls)
    assert grown < 16 << 20
    run_one()
    for call_ in calls:
        call_.close()


def test_the_port_serves_nothing_else(ring):
    address = ring.worker_ports(0)["client_data"]
    channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
    for method in ("/grpc.health.v1.Health/Check",
                   "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):
        call_ = channel.unary_unary(method, lambda x: x, lambda x: x)
        with pytest.raises(grpc.RpcError) as error:
            call_(b"", timeout=10)
        assert error.value.code() == CODE.UNIMPLEMENTED
    channel.close()


# ------------------------------------------------------------------------- failures


@pytest.mark.parametrize("wrong", ["twice", "outside", "unknown"])
def test_what_is_sent_wrong_ends_the_request(ring, wrong):
    inputs = make_inputs(sq=900, heads=4, dim=64)
    direct = DirectCall(ring, inputs, schedule=RING, world_size=2).accept()
    streams = [direct.open(rank).opened() for rank in range(2)]
    data = cut(inputs["q"], direct.tickets[0], "q")
    if wrong == "twice":
        streams[0].chunk("q", 0, data)
        streams[0].chunk("q", 64, data[64:128])
    elif wrong == "outside":
        streams[0].chunk("q", len(data) - 4, data[:8])
    else:
        streams[0].chunk("dout", 0, data)
    # Its release may overtake what the worker says itself: the coordinator's stream has the truth.
    assert streams[0].error().code() in (CODE.INVALID_ARGUMENT, CODE.ABORTED)
    error = error_of(direct.stream)
    assert error.code() == CODE.INVALID_ARGUMENT and reason_of(error) == "BAD_CHUNK"
    assert streams[1].error() is not None  # released with the operation
    await_free(ring)


def test_a_stream_that_breaks_fails_the_attempt(ring):
    inputs = make_inputs(sq=900, heads=4, dim=64)
    direct = DirectCall(ring, inputs, schedule=RING, world_size=2).accept()
    stream = direct.open(0).opened()
    stream.close()
    error = error_of(direct.stream)
    assert error.code() == CODE.ABORTED and reason_of(error) == "TRANSFER_FAILED"
    await_free(ring)


def test_cancelling_ends_the_streams(ring):
    inputs = make_inputs(sq=900, heads=4, dim=64)
    direct = DirectCall(ring, inputs, schedule=RING, world_size=2).accept()
    streams = [direct.open(rank).opened() for rank in range(2)]
    direct.stream.cancel()
    begin = time.monotonic()
    assert {stream.error().code() for stream in streams} == {CODE.ABORTED}
    assert time.monotonic() - begin < 5
    await_free(ring)


def test_a_client_that_rests_is_idle(make_direct_ring):
    ring = make_direct_ring(server_flags=["--upload_idle_timeout=3s", "--transfer_timeout=2s"])
    inputs = make_inputs(sq=3000, heads=4, dim=64)
    direct = DirectCall(ring, inputs, schedule=RING, world_size=2).accept()
    streams = [direct.open(rank).opened() for rank in range(2)]
    for rank, stream in enumerate(streams):
        direct.send(stream, rank, ["q"])
    error = error_of(direct.stream)
    assert error.code() == CODE.DEADLINE_EXCEEDED and reason_of(error) == "UPLOAD_IDLE"
    for streams_are_open in (True, False):
        nothing = DirectCall(ring, inputs, schedule=RING, world_size=2).accept()
        streams = [nothing.open(rank).opened() for rank in range(2) if streams_are_open]
        error = error_of(nothing.stream)
        assert error.code() == CODE.DEADLINE_EXCEEDED and reason_of(error) == "UPLOAD_IDLE"
        for stream in streams:
            assert stream.error().code() == CODE.ABORTED
    await_free(ring)


def test_a_client_whose_window_is_shut_holds_nothing(make_direct_ring):
    """It takes 5 bytes, less than any message, and reads none: neither the worker's answer nor its
    status ever leave it. The ring must not wait for that."""
    ring = make_direct_ring()
    generation = ring.topology().generation
    direct = DirectCall(ring, make_inputs(sq=3000, heads=4, dim=64), schedule=RING,
                        world_size=2).accept()
    shut = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
    streams = [Stream(ticket.endpoints[0], shut).open(ticket.token) for ticket in direct.tickets]
    time.sleep(0.5)
    for rank in range(2):
        assert_refused(direct.open(rank))  # they are open
    direct.stream.cancel()
    wait_until(lambda: not any(w.reserved_bytes for w in ring.topology().workers), 6,
               "memory given back")
    time.sleep(12)  # longer than the coordinator waits for an answer
    assert ring.topology().generation == generation
    assert all(worker.poll() is None for worker in ring.workers.values())
    for stream in streams:
        stream.close()
    DirectCall(ring, make_inputs(), schedule=RING).run()


def test_a_client_that_trickles_is_too_slow(make_direct_ring):
    """Never idle, and yet it would hold the workers' memory for hours."""
    ring = make_direct_ring(server_flags=["--upload_grace=3s"])
    direct = DirectCall(ring, make_inputs(sq=3000, heads=4, dim=64), schedule=RING,
                        world_size=2).accept()
    streams = [direct.open(rank).opened() for rank in range(2)]
    over = threading.Event()

    def trickle():
        for at in range(1000):
            for stream in streams:
                stream.chunk("q", at, b"x")
            if over.wait(0.5):
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    begin = time.monotonic()
    error = error_of(direct.stream)
    over.set()
    thread.join()
    assert error.code() == CODE.DEADLINE_EXCEEDED and reason_of(error) == "UPLOAD_TOO_SLOW"
    assert time.monotonic() - begin < 15
    for stream in streams:
        stream.close()
    await_free(ring)


def test_a_client_that_takes_nothing_is_idle(make_direct_ring):
    ring = make_direct_ring(server_flags=["--download_idle_timeout=2s", "--transfer_timeout=2s"])
    inputs = make_inputs(sq=40000, heads=8, dim=64)
    direct = DirectCall(ring, inputs, schedule=RING, world_size=2, window=(4, 0)).accept()
    streams = [direct.open(rank).opened() for rank in range(2)]
    for rank, stream in enumerate(streams):
        direct.send(stream, rank)
    error = error_of(direct.stream)
    assert error.code() == CODE.DEADLINE_EXCEEDED and reason_of(error) == "DOWNLOAD_IDLE"
    for stream in streams:
        stream.close()
    await_free(ring)


@pytest.mark.parametrize("fault, words, flags", [
    ("stop_reading:1", "it took no bytes of its inputs for ", ["--upload_idle_timeout=2s"]),
    ("stop_sending:1", "it sent no bytes of its outputs for ", ["--download_idle_timeout=2s"]),
])
def test_a_worker_that_stands_still_is_to_blame_and_not_the_client(make_direct_ring, tmp_path,
                                                                  fault, words, flags):
    ring = make_direct_ring(workers=0, server_flags=["--transfer_timeout=4s", *flags])
    for index in range(2):
        ring.start_worker(index, [f"--fault_injection={fault}"] if index == 1 else [])
    generation = ring.wait_ready(2).generation
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=20000", "--heads=4", "--head_dim=64")
    # The library sends the call again to the ring that is formed next.
    report = call(ring, "forward", source, output, "--transport=direct", "--window=8,0",
                  "--layout=contiguous")
    assert report["attempts"] == 2 and report["generation"] > generation
    log = (ring.directory / "server.log").read_text()
    lost = re.search(r"worker lost.*worker-1.*", log)
    assert lost and words in lost.group(0), log[-2000:]


CLIENT = """
import sys, time
sys.path.insert(0, {here!r})
import grpc
from attention import make_inputs
from direct_call import DirectCall
from stubs import attention_pb2 as pb, attention_pb2_grpc
class Ring: pass
ring = Ring()
ring.attention = attention_pb2_grpc.AttentionServiceStub(grpc.insecure_channel({address!r}))
long = {phase!r} == "running"
# Long by its rows, whose square the work is, however many cores there are for it.
shape = dict(sq=36000, heads=2) if long else dict(sq=30000, heads=8)
inputs = make_inputs(dim=64, **shape)
call = DirectCall(ring, inputs, schedule=pb.SCHEDULE_RING, window=(-1, 0) if long else (4, 0),
                  request_id="direct-victim-" + {phase!r}).accept()
if {phase!r} == "connecting":
    print("ready", flush=True)
    sys.stdin.read()
streams = [call.open(rank).opened() for rank in range(len(call.tickets))]
for rank, stream in enumerate(streams):
    call.send(stream, rank, ["q"] if {phase!r} == "sending" else None)
if {phase!r} == "taking":
    for stream in streams:
        next(stream.call)
elif not long:
    time.sleep(0.5)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("phase", ["connecting", "sending", "running", "taking"])
def test_a_client_that_is_killed_leaves_nothing(ring, phase):
    import sys
    generation = ring.topology().generation
    DirectCall(ring, make_inputs(), schedule=RING).run()
    time.sleep(1)
    before = [open_descriptors(w.pid) for w in ring.workers.values()]
    child = subprocess.Popen([sys.executable, "-c", CLIENT.format(
        here=str(pathlib.Path(__file__).parent / "support"), address=ring.address, phase=phase)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    if phase == "running":
        await_state(ring, "direct-victim-running", [pb.REQUEST_STATE_COMPUTING])
    child.send_signal(signal.SIGKILL)
    child.wait()
    await_free(ring)
    wait_until(lambda: all(open_descriptors(w.pid) <= n for w, n in
                           zip(ring.workers.values(), before)), 20, "descriptors as before")
    assert ring.topology().generation == generation
    inputs = make_inputs(seed=8)
    arrays = DirectCall(ring, inputs, schedule=RING).run()
    assert arrays["out"].tobytes() == run(ring.attention, inputs,
                                          schedule=RING).array("out").tobytes()


def test_a_killed_worker_is_replaced_and_the_call_replayed(make_direct_ring, tmp_path):
    # Each call of a kernel takes longer: the worker is lost in the middle, however fast the machine is.
    ring = make_direct_ring(workers=2, worker_flags=["--fault_injection=slow_step_ms:500"])
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--head_dim=64")
    reports = []
    thread = threading.Thread(target=lambda: reports.append(
        call(ring, "forward", source, output, "--transport=direct", "--request_id=replayed")))
    thread.start()

    await_state(ring, "replayed", [pb.REQUEST_STATE_COMPUTING])
    ring.kill_worker(1)
    ring.start_worker(1)
    thread.join()
    assert reports[0]["attempts"] >= 2 and reports[0]["transport"]["kind"] == "direct"
    subprocess.run([CLI, "verify", f"--input={source}", f"--output={output}", "--causal"],
                   check=True, capture_output=True)


def test_hundreds_of_calls_leave_nothing(ring):
    inputs = make_inputs(sq=200)
    def calls(times):
        for _ in range(times):
            DirectCall(ring, inputs, schedule=RING, world_size=1).run(parts=2)
    calls(50)
    time.sleep(1)
    pids = [ring.server.pid, *(w.pid for w in ring.workers.values())]
    before = [(open_descriptors(pid), resident_bytes(pid)) for pid in pids]
    calls(300)
    await_free(ring)
    wait_until(lambda: all(open_descriptors(pid) <= was[0] + 2 for pid, was in zip(pids, before)),
               40, "descriptors as before")
    for pid, was in zip(pids, before):
        assert resident_bytes(pid) - was[1] < 16 << 20
