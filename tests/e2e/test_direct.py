"""Tensors straight to the workers and from them: the same results as by the coordinator, which sees
none of their bytes, and everything that may go wrong ends in a typed error within its bound."""

import json
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request

import grpc
import numpy as np
import pytest

from attention import details, make_inputs, run
from cluster import BIN, CHANNEL_OPTIONS, CLI, open_descriptors, resident_bytes, wait_until
from direct_call import DirectCall, Stream, cut, tensor_id
from stubs import attention_pb2 as pb

RING = pb.SCHEDULE_RING
CODE = grpc.StatusCode
LISTEN = ["--client_data_listen=127.0.0.1:0"]


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    from cluster import Cluster
    cluster = Cluster(tmp_path_factory.mktemp("direct"), workers=4, worker_flags=LISTEN)
    yield cluster
    print(cluster.tail())
    cluster.close()


@pytest.fixture
def make_direct_ring(make_ring):
    def make(workers=2, **options):
        return make_ring(workers=workers, worker_flags=LISTEN + options.pop("worker_flags", []),
                         **options)
    return make


def error_of(stream):
    with pytest.raises(grpc.RpcError) as error:
        for _ in stream:
            pass
    return error.value


def reason_of(error):
    return details(error)["ErrorInfo"].reason


def metrics(address):
    text = urllib.request.urlopen(f"http://{address}/metrics").read().decode()
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    return values


def refused(ring, index=0, reason="token"):
    return metrics(ring.worker_ports(index)["metrics"])[
        f'ringattn_refused_streams_total{{reason="{reason}"}}']


def await_free(ring):
    wait_until(lambda: all(w.reserved_bytes == 0 for w in ring.topology().workers), 30,
               "memory given back")


def generate(path, *flags):
    subprocess.run([CLI, "generate", f"--output={path}", "--seed=1", "--with_dout", *flags],
                   check=True, capture_output=True)


def call(ring, command, source, output, *flags, check=True):
    done = subprocess.run([CLI, command, f"--server={ring.address}", f"--input={source}",
                           f"--output={output}", "--causal", "--schedule=ring", "--json", *flags],
                          capture_output=True, text=True, timeout=300)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


# ------------------------------------------------------------------------ results


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("layout", [pb.LAYOUT_CONTIGUOUS, pb.LAYOUT_ZIGZAG, pb.LAYOUT_STRIPED])
def test_results_equal_the_relays(ring, layout, world_size):
    inputs = make_inputs(batch=2, sq=203, sk=211, heads=4, kv_heads=2, dim=24, dim_v=40, seed=3)
    options = dict(causal=True, window=(90, -1), softcap=3.0, layout=layout, schedule=RING,
                   world_size=world_size)
    for backward, names in ((False, ("out", "lse")), (True, ("dq", "dk", "dv"))):
        expected = run(ring.attention, inputs, backward=backward, **options)
        for parts in (1, 3):
            direct = DirectCall(ring, inputs, backward=backward, **options)
            arrays = direct.run(parts)
            assert direct.accepted.transport == pb.TRANSPORT_DIRECT_STREAM
            assert direct.accepted.transport_reason and not direct.accepted.inputs
            assert len({t.token for t in direct.tickets}) == len(direct.tickets) == world_size
            assert direct.result.summary.bytes_up == sum(inputs[n].nbytes for n in direct.names)
            for name in names:
                assert arrays[name].tobytes() == expected.array(name).tobytes(), (name, parts)


def test_checksums_both_ways(ring):
    inputs = make_inputs(sq=900, heads=4, dim=64)
    direct = DirectCall(ring, inputs, crc=True, schedule=RING, world_size=1).accept()
    stream = direct.open(0, with_crc32c=True)
    data = cut(inputs["q"], direct.tickets[0], "q")
    stream.chunk("q", 0, data, crc32c=1)
    assert stream.error().code() in (CODE.INVALID_ARGUMENT, CODE.ABORTED)
    error = error_of(direct.stream)
    assert error.code() == CODE.INVALID_ARGUMENT and reason_of(error) == "BAD_CHUNK"
    assert "crc32c" in error.details()
    direct = DirectCall(ring, inputs, crc=True, schedule=RING, world_size=1).accept()
    stream = direct.open(0, with_crc32c=True)
    direct.send(stream, 0)
    chunks = [r.chunk for r in stream.call if r.WhichOneof("message") == "chunk"]
    assert chunks and all(chunk.HasField("crc32c") for chunk in chunks)
    list(direct.stream)


def test_the_command_line_says_which_way(ring, tmp_path):
    source = tmp_path / "in.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--kv_heads=2", "--head_dim=64", "--dtype=bf16")
    files = {name: tmp_path / f"{name}.safetensors" for name in ("relay", "auto", "direct")}
    for command in ("forward", "backward"):
        relay = call(ring, command, source, files["relay"], "--transport=relay")
        assert relay["transport"] == {"kind": "coordinator_stream", "staged_bytes": 0,
                                      "reason": "the caller chose the coordinator"}
        auto = call(ring, command, source, files["auto"])
        assert auto["transport"]["kind"] == "direct_stream"
        assert auto["bytes"]["direct_stream"]["up"] > 0
        direct = call(ring, command, source, files["direct"], "--transport=direct",
                      "--channels_per_worker=4")
        assert direct["transport"] == {
            "kind": "direct_stream", "staged_bytes": 0,
            "reason": "direct stream: all members have a client data address"}
        assert direct["client_seconds"]["first_output"] > 0
        assert files["relay"].read_bytes() == files["direct"].read_bytes()
        assert files["relay"].read_bytes() == files["auto"].read_bytes()
    split = call(ring, "forward", source, files["auto"], "--streams=3")
    assert split["streams"] == 3
    subprocess.run([CLI, "verify", f"--input={source}", f"--output={files['auto']}", "--causal"],
                   check=True, capture_output=True)


def test_tiny_tensors_take_the_coordinator_with_the_reason(ring, tmp_path):
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=300", "--heads=4", "--head_dim=32")
    auto = call(ring, "forward", source, output)
    assert auto["transport"]["kind"] == "coordinator_stream"
    assert "no direct stream: the tensors are less than a MiB" in auto["transport"]["reason"]


def test_what_a_forward_left_is_read_by_direct_streams_too(make_direct_ring, tmp_path):
    ring = make_direct_ring(workers=3)
    source, out, grads = (tmp_path / f"{name}.safetensors" for name in ("in", "out", "grads"))
    generate(source, "--seq_len=2900", "--heads=4", "--head_dim=64", "--dtype=bf16")
    kept = call(ring, "forward", source, out, "--retain=1m", "--transport=direct")
    handle = kept["residual"]["handle"]
    read = call(ring, "backward", source, grads, f"--residual={handle}", "--transport=direct")
    assert read["transport"]["kind"] == "direct_stream" and read["residual"]["failure"] == ""
    assert read["bytes"]["direct_stream"]["up"] == 2900 * 4 * 64 * 2  # dout
    subprocess.run([CLI, "verify", f"--input={source}", f"--output={grads}", f"--forward={out}",
                    "--causal"], check=True, capture_output=True)


def test_the_load_generator_by_direct_streams(ring):
    done = subprocess.run([CLI, "bench", f"--server={ring.address}", "--seq_len=256", "--heads=2",
                           "--head_dim=32", "--transport=direct", "--concurrency_range=1:3:2",
                           "--measurement_interval=100", "--max_trials=3", "--backward", "--json"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for level in json.loads(done.stdout)["load"]["levels"]:
        assert level["succeeded"] > 0 and not level["failed"]


@pytest.mark.parametrize("flags", [[], ["--options", "--seed=79"]])
def test_cases_of_the_sweep_match_the_oracle(ring, flags):
    done = subprocess.run([BIN / "tests/e2e/service_sweep", f"--server={ring.address}",
                           "--cases=80", "--max_world_size=4", "--transport=direct", *flags],
                          capture_output=True, text=True, timeout=600)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stderr
    assert "80 cases, 0 failed" in done.stdout


def test_no_tensor_byte_passes_the_coordinator(ring, tmp_path):
    """Its memory is flat and its processor all but idle; workers count the bytes."""
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    # Causal against one key: next to nothing is computed.
    generate(source, "--seq_len=40000", "--seq_len_kv=1", "--heads=16", "--head_dim=64")
    call(ring, "forward", source, output, "--transport=direct")
    stat = pathlib.Path(f"/proc/{ring.server.pid}/stat")
    ticks = lambda: sum(int(n) for n in stat.read_text().rsplit(")", 1)[1].split()[11:13])
    counted = lambda: {n: v for n, v in metrics(ring.ports["metrics"]).items()
                       if n.startswith("ringattn_bytes_total{")}
    before, memory, used, moved = counted(), resident_bytes(ring.server.pid), ticks(), 0
    for _ in range(4):
        report = call(ring, "forward", source, output, "--transport=direct")
        moved += sum(report["bytes"]["direct_stream"].values())
    seconds = (ticks() - used) / 100
    after = counted()
    grown = {name for name in after if after[name] > before.get(name, 0)}
    assert grown and all("direct_stream" in name for name in grown), grown
    assert sum(after[n] - before[n] for n in grown) == moved > 0.6e9
    assert resident_bytes(ring.server.pid) - memory < 8 << 20
    print(f"{seconds / moved * 1e9:.3f} s of the coordinator's processor per GB")
    assert seconds / moved * 1e9 < 0.1
    sums = [metrics(ring.worker_ports(i)["metrics"]) for i in range(4)]
    for direction in ("up", "down"):
        name = f'ringattn_bytes_total{{direction="{direction}",transport="direct_stream"}}'
        assert sum(s[name] for s in sums) > 0.3e9


# ---------------------------------------------------------------- choice and refusal


def listener_without_an_answer():
    """Takes connections, as a firewall that lets SYNs through does, and says nothing."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.listen(16)
    return held


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_a_worker_out_of_reach_is_relayed_with_the_reason(make_ring, tmp_path, kind):
    held = listener_without_an_answer()
    address = "127.0.0.1:%d" % held.getsockname()[1]
    if kind == "closed":
        held.close()
    ring = make_ring(workers=0)
    ring.start_worker(0, LISTEN)
    ring.start_worker(1, LISTEN + [f"--client_data_address={address}"])
    ring.wait_ready(2)
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--head_dim=64")
    begin = time.monotonic()
    report = call(ring, "forward", source, output)
    assert time.monotonic() - begin < 10
    assert report["transport"]["kind"] == "coordinator_stream"
    reason = report["transport"]["reason"]
    assert "no direct stream: " in reason and f"worker-1 at {address}" in reason
    relay = tmp_path / "relay.safetensors"
    call(ring, "forward", source, relay, "--transport=relay")
    assert output.read_bytes() == relay.read_bytes()
    failed = call(ring, "forward", source, output, "--transport=direct", check=False)
    assert failed["error"]["code"] == "FAILED_PRECONDITION"
    assert failed["error"]["reason"] == "TRANSPORT_UNAVAILABLE"
    assert address in failed["error"]["message"]
    await_free(ring)
    held.close()


def test_workers_without_the_port_are_named(make_ring, tmp_path):
    ring = make_ring(workers=0)
    ring.start_worker(0, LISTEN)
    ring.start_worker(1)
    ring.wait_ready(2)
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--head_dim=64")
    report = call(ring, "forward", source, output)
    assert report["transport"]["reason"].startswith(
        "no direct stream: worker-1 has no client data address")
    failed = call(ring, "forward", source, output, "--transport=direct", check=False)
    assert failed["error"]["reason"] == "TRANSPORT_UNAVAILABLE"


def test_inline_tensors_take_the_coordinator(ring):
    inputs = make_inputs(sq=8)
    direct = DirectCall(ring, inputs, required=False, schedule=RING)
    direct.stream.cancel()
    for name in direct.names:
        direct.header.inline_tensors.add(tensor=tensor_id(name), data=inputs[name].tobytes())
    accepted = next(ring.attention.Forward(iter([pb.ForwardRequest(header=direct.header)]),
                                           timeout=30)).accepted
    assert accepted.transport == pb.TRANSPORT_COORDINATOR_STREAM
    assert accepted.transport_reason == "no direct stream: some of its tensors are inline"


def test_chunks_on_the_coordinators_stream_are_refused(ring):
    inputs = make_inputs(sq=3000, heads=4, dim=64)
    direct = DirectCall(ring, inputs, schedule=RING)
    direct.stream.cancel()
    from attention import chunks_of, requests
    error = error_of(ring.attention.Forward(requests(direct.header, chunks_of(inputs, "q")),
                                            timeout=60))
    assert error.code() == CODE.INVALID_ARGUMENT and reason_of(error) == "BAD_CHUNK"


@pytest.mark.parametrize("flags, words", [
    (["--client_data_listen=0.0.0.0:0"], "give --client_data_address too"),
    (["--client_data_address=a:1"], "means nothing without --client_data_listen"),
    (LISTEN + ["--client_tls_cert=x"], "go together"),
    (["--client_data_listen=10.1.2.3:0"], "--client_tls_cert and --client_tls_key"),
])
def test_flags_that_do_not_fit_are_refused(tmp_path, flags, words):
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o600)
    done = subprocess.run([BIN / "worker/ringattn-worker", f"--secret_file={secret}",
                           "--check_flags", *flags], capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr + done.stdout


# -------------------------------------------------------------------------- tokens


def assert_refused(stream):
    error = stream.error()
    assert error.code() == CODE.UNAUTHENTICATED, error
    assert error.details() == "the token opens no stream here"
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
    stranger = Stream(first.endpoints[0], metadata=[("ringattn-secret", ring.secret.read_text())])
    assert_refused(stranger.open(b""))
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


def test_a_flood_without_tokens_is_over_soon(make_direct_ring):
    """And clients with tokens get through it."""
    ring = make_direct_ring(workers=1)
    address = ring.worker_ports(0)["client_data"]
    worker = ring.workers[0].pid
    run_one = lambda: DirectCall(ring, make_inputs(sq=500), schedule=RING).run()
    run_one()
    before, memory = open_descriptors(worker), resident_bytes(worker)
    begin = time.monotonic()
    silent = [Stream(address) for _ in range(100)]
    raw = []
    for _ in range(60):  # not even HTTP/2
        connection = socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])))
        raw.append(connection)
    large = Stream(address)
    large.chunk("q", 0, b"x" * 100_000)
    assert large.error().code() == CODE.INVALID_ARGUMENT
    run_one()
    codes = [stream.error().code() for stream in silent]
    assert time.monotonic() - begin < 9
    # 64 have places, and those that came after made room for themselves.
    crowded, late = codes.count(CODE.RESOURCE_EXHAUSTED), codes.count(CODE.DEADLINE_EXCEEDED)
    assert 36 <= crowded <= 40 and crowded + late == 100, codes
    for connection in raw:
        connection.settimeout(10)
        while connection.recv(4096):
            pass
        connection.close()
    assert time.monotonic() - begin < 15
    for stream in [*silent, large]:
        stream.close()
    wait_until(lambda: open_descriptors(worker) <= before + 2, 45, "descriptors as before")
    assert resident_bytes(worker) - memory < 64 << 20
    assert refused(ring, 0, "late") == late and refused(ring, 0, "crowded") == crowded
    run_one()


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
    nothing = DirectCall(ring, inputs, schedule=RING, world_size=2).accept()  # not even a stream
    error = error_of(nothing.stream)
    assert error.code() == CODE.DEADLINE_EXCEEDED and reason_of(error) == "UPLOAD_IDLE"
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
inputs = make_inputs(sq=30000, heads=8, dim=64)
call = DirectCall(ring, inputs, schedule=pb.SCHEDULE_RING, window=(4, 0)).accept()
streams = [call.open(rank).opened() for rank in range(len(call.tickets))]
for rank, stream in enumerate(streams):
    call.send(stream, rank, ["q"] if {phase!r} == "sending" else None)
if {phase!r} == "taking":
    for stream in streams:
        next(stream.call)
else:
    time.sleep(0.5)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("phase", ["sending", "taking"])
def test_a_client_that_is_killed_leaves_nothing(ring, phase):
    import sys
    generation = ring.topology().generation
    DirectCall(ring, make_inputs(), schedule=RING).run()
    time.sleep(1)
    before = [open_descriptors(w.pid) for w in ring.workers.values()]
    child = subprocess.Popen([sys.executable, "-c", CLIENT.format(
        here=str(pathlib.Path(__file__).parent), address=ring.address, phase=phase)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
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
    ring = make_direct_ring(workers=2)
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=9000", "--heads=8", "--head_dim=64")
    reports = []
    thread = threading.Thread(target=lambda: reports.append(
        call(ring, "forward", source, output, "--transport=direct", "--request_id=replayed")))
    thread.start()

    def computes():
        try:
            reply = ring.attention.GetOperation(pb.GetOperationRequest(request_id="replayed"),
                                                timeout=5)
        except grpc.RpcError:
            return False
        return reply.state == pb.OPERATION_STATE_COMPUTING
    wait_until(computes, 60, "computing")
    ring.kill_worker(1)
    ring.start_worker(1)
    thread.join()
    assert reports[0]["attempts"] >= 2 and reports[0]["transport"]["kind"] == "direct_stream"
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


def test_over_tls_with_and_without_proofs(make_ring, tmp_path):
    """As at the public port: by the client's authorities; who shows no certificate where one is asked
    for is relayed, and so is who meets plain text."""
    from certificates import Authority, client_tls, server_tls, tls_channel
    authority = Authority(tmp_path, "ours")
    served, trainer = authority.issue("server"), authority.issue("trainer")
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--head_dim=64")
    tls = [f"--client_tls_cert={served[0]}", f"--client_tls_key={served[1]}"]
    for flags, mine, kind in (
            (tls, None, "direct_stream"),
            (tls + [f"--client_tls_ca={authority.certificate}"], trainer, "direct_stream"),
            (tls + [f"--client_tls_ca={authority.certificate}"], None, "coordinator_stream"),
            ([], None, "coordinator_stream")):
        ring = make_ring(workers=2, worker_flags=LISTEN + flags, server_flags=server_tls(*served),
                         dial=lambda address: tls_channel(address, authority.certificate))
        report = call(ring, "forward", source, output, *client_tls(authority.certificate, mine))
        assert report["transport"]["kind"] == kind, report["transport"]
        if kind == "coordinator_stream":
            assert "no direct stream: worker-" in report["transport"]["reason"]
        ring.close()


def test_the_launcher_opens_the_port_for_this_machine(tmp_path):
    state = tmp_path / "state"
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--head_dim=64")
    for flags, kind in (([], "direct_stream"), (["--direct=off"], "coordinator_stream")):
        subprocess.run([CLI, "up", "--workers=2", "--device=cpu", "--port=0", "--detach",
                        f"--state_dir={state}", *flags], check=True, capture_output=True,
                       timeout=120)
        try:
            ports = json.loads((state / "server.json").read_text())
            done = subprocess.run([CLI, "forward", f"--server={ports['listen']}",
                                   f"--input={source}", f"--output={output}", "--json"],
                                  check=True, capture_output=True, text=True, timeout=120)
            assert json.loads(done.stdout)["transport"]["kind"] == kind
        finally:
            subprocess.run([CLI, "down", f"--state_dir={state}"], check=True, capture_output=True)
