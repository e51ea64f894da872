"""Loads that a process must survive: exhausted descriptors, pings, floods of streams and lines,
half-open connections, signals. A well-behaved client is served during each load and after it.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import resource
import signal
import socket
import statistics
import subprocess
import time
import urllib.request

import grpc
import pytest

import cluster as cluster_module
from attention import chunks_of, header_for, make_inputs, requests, run
from cluster import CHANNEL_OPTIONS, CLI, SERVER, WORKER, open_descriptors, wait_until
from stubs import (attention_pb2 as pb, attention_pb2_grpc, cluster_pb2, cluster_pb2_grpc,
                   error_details_pb2, status_pb2)
from timing import in_time, timed

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
PING = b"\0\0\x08\x06" + bytes(5) + b"12345678"


def dial(address, hello=b""):
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(hello)
    return connection


def heard_until_closed(connection, seconds=5):
    connection.settimeout(seconds)
    heard = b""
    try:
        while part := connection.recv(4096):
            heard += part
    except (TimeoutError, socket.timeout, ConnectionResetError):
        pass
    return heard


def tiny(ring, **options):
    return run(ring.attention, make_inputs(sq=8, dim=8, heads=1), timeout=20, **options)


def p99(ring, count=30):
    """Returns the 99th percentile of the seconds that consecutive tiny requests take."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        tiny(ring)
        times.append(time.perf_counter() - start)
    return max(times)


def answers_anew(address):
    """Whether a fresh connection is served; None if it is refused, False if nothing comes."""
    with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        try:
            cluster_pb2_grpc.ClusterServiceStub(channel).GetServerInfo(
                cluster_pb2.GetServerInfoRequest(), timeout=5)
        except grpc.RpcError as error:
            return None if error.code() == grpc.StatusCode.UNAVAILABLE else False
        return True


def metric(ring, name):
    text = urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics", timeout=10).read()
    return sum(float(line.split()[-1]) for line in text.decode().splitlines()
               if line.startswith(name))


def details_of(error):
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())[
        "grpc-status-details-bin"])
    reason, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        detail.Unpack(reason)
        detail.Unpack(retry)
    return reason.reason, retry


# ---------------------------------------------------------------- descriptors

@timed
def test_connections_beyond_the_descriptors(make_ring, tmp_path, monkeypatch):
    """At a soft limit of 64 and a hard one of 400: twice as many connections."""
    wrapper = tmp_path / "few.sh"
    wrapper.write_text(f'#!/bin/sh\nulimit -Sn 64; ulimit -Hn 400; exec {SERVER} "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setattr(cluster_module, "SERVER", wrapper)
    ring = make_ring(workers=2)
    assert metric(ring, "ringattn_max_descriptors") == 400
    alone = p99(ring)
    held = [dial(ring.address) for _ in range(800)]
    beside = p99(ring)
    refused = dial(ring.address, PREFACE)
    assert b"too many connections" in heard_until_closed(refused)
    start = time.monotonic()
    assert answers_anew(ring.address) is None
    refused_after = time.monotonic() - start
    assert open_descriptors(ring.server.pid) < 380
    wait_until(lambda: metric(ring, "ringattn_refused_connections_total") >= 500, 20, "counted")
    assert metric(ring, "ringattn_failed_accepts_total") == 0
    for connection in held:
        connection.close()
    wait_until(lambda: answers_anew(ring.address), 30, "full service afterwards")
    tiny(ring)
    print(f"p99 alone {alone * 1e3:.1f} ms, with 800 connections {beside * 1e3:.1f} ms")
    in_time(refused_after < 1, refused_after)
    in_time(beside < max(10 * alone, 0.5), (beside, alone))


def test_descriptors_used_up_by_others(make_ring):
    """accept() fails; afterwards the same process serves new connections."""
    ring = make_ring(workers=1)
    for _ in range(8):  # every channel to the worker is connected
        tiny(ring)
    pid = ring.server.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    waiting = [dial(ring.address, PREFACE) for _ in range(5)]
    wait_until(lambda: "cannot accept" in (ring.directory / "server.log").read_text(), 10,
               "accept fails")
    tiny(ring)  # those who are connected notice nothing
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: answers_anew(ring.address), 30, "connections are taken again")
    assert ring.server.poll() is None
    for connection in waiting:
        connection.close()


def test_strangers_at_a_workers_client_port(make_ring, tmp_path, monkeypatch):
    """With a hard limit of 300 descriptors: 600 connections leave enough for the coordinator and
    the ring. The call that cannot connect uses the relay, and the worker reports what it refused."""
    wrapper = tmp_path / "few.sh"
    wrapper.write_text(f'#!/bin/sh\nulimit -Sn 64; ulimit -Hn 300; exec {WORKER} "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setattr(cluster_module, "WORKER", wrapper)
    ring = make_ring(workers=2, worker_flags=["--client_data_listen=127.0.0.1:0"])
    ports = ring.worker_ports(0)
    held = [dial(ports["client_data"]) for _ in range(600)]
    wait_until(lambda: "connection refused: too many" in
               (ring.directory / "worker-0.log").read_text(), 20, "connections are refused")
    assert open_descriptors(ring.workers[0].pid) < 230
    for world_size in (1, 2):
        tiny(ring, world_size=world_size)
    done = subprocess.run(
        [CLI, "bench", f"--server={ring.address}", "--seq_len=64", "--heads=1", "--head_dim=8",
         "--runs=1", "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr

    def refused():
        text = urllib.request.urlopen(f"http://{ports['metrics']}/metrics", timeout=10).read().decode()
        return [line for line in text.splitlines() if line.startswith(
            'ringattn_refused_connections_total{listener="clients"}') and not line.endswith(" 0")]

    wait_until(refused, 20, "counted")
    for connection in held:
        connection.close()
    answered = ring.topology()
    assert len([w for w in answered.workers if w.HasField("rank")]) == 2


def test_a_dead_port_ends_the_process(make_ring):
    """A failure that the process cannot repair is left to the supervisor: exit code 71."""
    ring = make_ring(workers=0, server_flags=["--dead_after=1500ms"])
    pid = ring.server.pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE,
                     (3, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
    assert ring.server.wait(timeout=20) == 71
    log = (ring.directory / "server.log").read_text()
    assert "the public port does not answer" in log and "does not recover" in log


# ------------------------------------------------------------ lonely requests

@timed
def test_a_lonely_request_is_not_late(ring):
    """After a second without an event gRPC's callback threads sleep for 100 ms."""
    inputs = make_inputs(sq=8, dim=8, heads=1)
    times, prompt = [], []

    def took():
        start = time.perf_counter()
        run(ring.attention, inputs)
        return time.perf_counter() - start

    for _ in range(7):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:  # all threads get an event
            list(pool.map(lambda _: ring.cluster.GetServerInfo(
                cluster_pb2.GetServerInfoRequest(), timeout=10), range(64)))
        prompt.append(took())
        time.sleep(1.05)
        times.append(took())
    for name, taken in (("lonely requests", times), ("those after others", prompt)):
        print(f"{name}, ms:", [round(t * 1e3, 1) for t in taken])
    in_time(statistics.median(times) < statistics.median(prompt) + 0.030, (times, prompt))


# ------------------------------------------------------------------- keepalive

def pinged(address, pause, count, seconds):
    """Returns the server's answers to `count` pings, until it closes or sends nothing for so
    long."""
    connection = dial(address, PREFACE)
    try:
        for _ in range(count):
            time.sleep(pause)
            connection.sendall(PING)
    except OSError:
        pass  # it has closed
    return heard_until_closed(connection, seconds)


@timed
def test_pings_are_accepted_down_to_the_interval(make_ring):
    text = subprocess.run([SERVER, "--help"], capture_output=True, text=True).stdout
    flag = text[text.index("--min_ping_interval"):]
    assert "[5s]" in flag[:300]  # half of the usual 10 s
    ring = make_ring(workers=0, server_flags=["--min_ping_interval=200ms"])
    assert b"too_many_pings" in pinged(ring.address, 0.01, 8, 10)
    # A server that is kept from reading meets some of them together.
    heard = pinged(ring.address, 0.25, 8, 0.5)
    in_time(b"too_many_pings" not in heard, heard)


# ------------------------------------------------------------------------ ends

SLOW = "--fault_injection=slow_step_ms:5000"


def slow_request(ring):
    """A request that takes some seconds, once it computes. (future, stub)"""
    inputs = make_inputs(sq=64)
    states = []

    def consume():
        for response in ring.attention.Forward(
                requests(header_for(inputs), chunks_of(inputs, "qkv")), timeout=60):
            states.append(response.WhichOneof("message"))
        return states

    future = concurrent.futures.ThreadPoolExecutor(1).submit(consume)
    wait_until(lambda: "accepted" in states, 10, "the request is accepted")
    return future


def test_sigterm_lets_requests_finish(make_ring):
    ring = make_ring(workers=1, worker_flags=[SLOW], server_flags=["--drain_timeout=20s"])
    request = slow_request(ring)
    ring.server.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in (ring.directory / "server.log").read_text(), 5, "the drain")

    def refused():
        call = ring.attention.Forward(requests(header_for(make_inputs(sq=8)), []), timeout=20)
        try:
            next(call)  # accepted: the drain has not begun
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            return details_of(error)
        call.cancel()

    reason, retry = wait_until(refused, 5, "a refusal")
    assert reason == "DRAINING" and retry.retry_delay.ToMilliseconds() > 0
    assert "summary" in request.result(timeout=20)
    assert ring.server.wait(timeout=10) == 0


def test_what_does_not_finish_is_told(make_ring):
    ring = make_ring(workers=1, worker_flags=["--fault_injection=slow_step_ms:20000"],
                     server_flags=["--drain_timeout=300ms"])
    request = slow_request(ring)
    ring.server.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as error:
        request.result(timeout=20)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    reason, retry = details_of(error.value)
    assert reason == "SHUTTING_DOWN" and retry.retry_delay.ToMilliseconds() > 0
    assert ring.server.wait(timeout=10) == 0


def test_a_second_signal_ends_at_once(make_ring):
    ring = make_ring(workers=1, worker_flags=["--fault_injection=slow_step_ms:20000"],
                     server_flags=["--drain_timeout=60s"])
    slow_request(ring)
    ring.server.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in (ring.directory / "server.log").read_text(), 5, "the drain")
    ring.server.send_signal(signal.SIGTERM)
    assert ring.server.wait(timeout=5) == 128 + signal.SIGTERM


# -------------------------------------------------------------------- launcher

def up(state, *flags):
    return subprocess.run(
        [CLI, "up", "--workers=1", "--device=cpu", "--port=0", "--detach",
         f"--state_dir={state}", *flags],
        capture_output=True, text=True, timeout=60)


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    yield folder
    subprocess.run([CLI, "down", f"--state_dir={folder}", "--timeout=0s"], capture_output=True)


def test_down_waits_for_what_is_in_flight(state):
    done = up(state, f"--worker_flag={SLOW}", "--drain_timeout=20s")
    assert done.returncode == 0, done.stdout + done.stderr
    address = json.loads((state / "server.json").read_text())["listen"]

    class Service:  # as slow_request() needs it
        channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        attention = attention_pb2_grpc.AttentionServiceStub(channel)

    request = slow_request(Service)
    down = subprocess.Popen([CLI, "down", f"--state_dir={state}"], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)
    assert "summary" in request.result(timeout=20)
    out, err = down.communicate(timeout=30)
    assert down.returncode == 0 and "ended" in out
    assert "still running: ringattn-server" in err and "of at most 35" in err, err
    text = (state / "launcher.log").read_text()
    assert "did not end in time" not in text, text


def test_a_service_that_ends_without_trouble_logs_none(state):
    done = up(state)
    assert done.returncode == 0, done.stdout + done.stderr
    address = json.loads((state / "server.json").read_text())["listen"]
    call = subprocess.run([CLI, "bench", f"--server={address}", "--seq_len=64", "--heads=1",
                           "--head_dim=8", "--runs=1"], capture_output=True, text=True, timeout=60)
    assert call.returncode == 0, call.stdout + call.stderr
    down = subprocess.run([CLI, "down", f"--state_dir={state}"], capture_output=True, text=True,
                          timeout=60)
    assert down.returncode == 0 and "ended" in down.stdout, down.stdout + down.stderr
    logs = sorted(state.glob("*.log"))
    assert [log.name for log in logs] == ["launcher.log", "server.log", "worker-0.log"]
    for log in logs:
        bad = [line for line in log.read_text().splitlines()
               if line.startswith("{") and json.loads(line)["level"] != "info"]
        assert not bad, (log.name, bad)


def test_metrics_are_on_7702_unless_it_is_taken(state):
    def metrics_of_a_service():
        done = up(state)
        assert done.returncode == 0, done.stdout + done.stderr
        metrics = json.loads((state / "server.json").read_text())["metrics"]
        assert f"http://{metrics}/" in done.stdout
        assert b"ringattn_" in urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10).read()
        down = subprocess.run([CLI, "down", f"--state_dir={state}"], capture_output=True, timeout=60)
        assert down.returncode == 0
        return metrics

    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", 7702))
            holder.listen()
            is_ours = True
        except OSError:
            is_ours = False  # another process has it
        assert metrics_of_a_service() != "127.0.0.1:7702"
    if is_ours:
        assert metrics_of_a_service() == "127.0.0.1:7702"


def test_services_that_start_at_once_share_no_metrics_port(tmp_path):
    """Both find port 7702 free, and one of them takes it first."""
    states = [tmp_path / name for name in ("one", "two", "three")]
    try:
        with concurrent.futures.ThreadPoolExecutor(len(states)) as threads:
            done = list(threads.map(up, states))
        assert [run.returncode for run in done] == [0] * len(states), [run.stderr for run in done]
        assert len({json.loads((state / "server.json").read_text())["metrics"] for state in states}) == len(states)
    finally:
        for state in states:
            subprocess.run([CLI, "down", f"--state_dir={state}"], capture_output=True, timeout=60)


def test_up_shows_a_workers_own_words(state):
    start = time.monotonic()
    done = up(state, "--worker_flag=--nonsense")
    assert done.returncode != 0 and time.monotonic() - start < 20
    assert "--nonsense" in done.stderr and "cannot start" in done.stderr, done.stderr
    assert done.stderr.count("The following argument") == 1


def test_default_ports_are_those_of_the_examples():
    server = subprocess.run([SERVER, "--help"], capture_output=True, text=True).stdout
    worker = subprocess.run([WORKER, "--help"], capture_output=True, text=True).stdout
    assert "127.0.0.1:7700" in server and "127.0.0.1:7701" in server and "74" not in re.findall(
        r"127\.0\.0\.1:(\d\d)", server)
    assert "127.0.0.1:7701" in worker
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", readme)) == {"7700", "7702"}


# ---------------------------------------------------------------------- floods

def threads_of(pid):
    return len(os.listdir(f"/proc/{pid}/task"))


def test_reflection_streams_are_bounded(ring):
    before = threads_of(ring.server.pid)
    channel = grpc.insecure_channel(ring.address, CHANNEL_OPTIONS)
    call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    held = []
    release = []

    def never():
        while not release:
            time.sleep(0.1)
        yield b""

    streams = [call(never(), timeout=60) for _ in range(150)]
    held.extend(streams)
    refused = wait_until(lambda: [s for s in held if s.done()], 15, "some are refused")
    assert refused[0].code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert threads_of(ring.server.pid) < before + 40
    tiny(ring)
    release.append(True)
    for stream in held:
        stream.cancel()
    channel.close()

    def listed():
        with grpc.insecure_channel(ring.address, CHANNEL_OPTIONS) as other:
            ask = other.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            try:  # list_services = 7
                return b"AttentionService" in b"".join(ask(iter([b"\x3a\x00"]), timeout=5))
            except grpc.RpcError:
                return False

    wait_until(listed, 15, "reflection afterwards")


def test_watchers_are_bounded(make_ring):
    ring = make_ring(workers=1, server_flags=["--max_watchers=3"])
    watches = [ring.cluster.WatchTopology(cluster_pb2.WatchTopologyRequest(), timeout=30)
               for _ in range(3)]
    for watch in watches:
        next(iter(watch))
    with pytest.raises(grpc.RpcError) as error:
        next(iter(ring.cluster.WatchTopology(cluster_pb2.WatchTopologyRequest(), timeout=10)))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error.value)[0] == "TOO_MANY_WATCHERS"
    ring.kill_worker(0)
    assert any(not response.topology.workers for response in watches[0])  # the watch still reports changes
    for watch in watches:
        watch.cancel()


@pytest.mark.parametrize("port", ["server", "worker"])
def test_half_open_http_blocks_nobody(ring, port):
    address = ring.ports["metrics"] if port == "server" else ring.worker_ports(0)["metrics"]
    silent = [dial(address, b"GET /met") for _ in range(20)]
    start = time.monotonic()
    assert b"ringattn_" in urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read()
    took = time.monotonic() - start
    print(f"/metrics with 20 half-open connections: {took:.2f} s")
    assert took < 5
    for connection in silent:
        connection.close()


def test_a_flood_of_requests_is_not_a_flood_of_lines(ring):
    log = ring.directory / "server.log"
    before, start = log.stat().st_size, time.monotonic()

    def bad(_):
        with pytest.raises(grpc.RpcError):
            list(ring.attention.Forward(iter([pb.ForwardRequest()]), timeout=20))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(bad, range(2500)))
    seconds = time.monotonic() - start
    tiny(ring)
    grown = log.stat().st_size - before
    print(f"{grown} bytes of log in {seconds:.1f} s for 2,500 requests")
    assert grown < 2 * (200 + 20 * (seconds + 1)) * 400
    wait_until(lambda: (tiny(ring), '"suppressed":' in log.read_text())[1], 20,
               "the number of missing lines is reported")
