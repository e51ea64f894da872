"""Rings over several hosts. Workers with different --host_id emulate hosts on one machine."""

import contextlib
import json
import pathlib
import signal
import socket
import subprocess
import threading
import time
import urllib.request

import grpc
import pytest

from attention import (Result, assert_close, chunks_of, header_for, make_inputs, reason_of, reference,
                       requests, run)
from cluster import CLI, Cluster, wait_until
from stubs import attention_pb2 as pb

HOSTS = ["host-b", "host-a", "host-b", "host-a"]  # of worker-0 to worker-3
# Requests above this many tokens need more than one device.
THRESHOLD = 256


def start_hosts(directory, hosts, server_flags=(), flags=lambda index: ()):
    ring = Cluster(directory, workers=0, server_flags=[
        f"--single_device_threshold_tokens={THRESHOLD}", *server_flags])
    for index, host in enumerate(hosts):
        ring.start_worker(index, flags=[f"--host_id={host}", *flags(index)])
    ring.wait_ready(len(hosts))
    return ring


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    ring = start_hosts(tmp_path_factory.mktemp("hosts"), HOSTS,
                       flags=lambda index: [f"--zone=rack-{HOSTS[index][-1]}"])
    yield ring
    print(ring.tail())
    ring.close()


def metric(ring, name):
    with urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


def forward(ring, inputs, edit, **options):
    """A Forward whose header `edit` changes."""
    header = header_for(inputs, **options)
    edit(header)
    result = Result()
    chunks = chunks_of(inputs, ["q", "k", "v"])
    for response in ring.attention.Forward(requests(header, chunks), timeout=60):
        result.take(response)
    return result.finish()


def host_of(ring):
    """The host of each worker, by name."""
    return {w.name: w.location.host for w in ring.topology().workers}


def test_ranks_follow_hosts(two_hosts):
    workers = list(two_hosts.topology().workers)
    assert [w.rank for w in workers] == [0, 1, 2, 3]
    assert [w.name for w in workers] == ["worker-1", "worker-3", "worker-0", "worker-2"]
    assert [w.location.host for w in workers] == ["host-a", "host-a", "host-b", "host-b"]
    assert [w.location.zone for w in workers] == ["rack-a", "rack-a", "rack-b", "rack-b"]
    # Both links are measured: inside each host, and between the hosts.
    assert all(w.link_bytes_per_second > 1e6 for w in workers)
    assert all(w.host_link_bytes_per_second > 1e6 for w in workers)
    assert {w.next_transport for w in workers} == {"wire"}


def connections(process):
    """Pairs of the local and remote IPv4 address of a process's TCP connections."""
    sockets = set()
    for descriptor in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(str(descriptor.readlink()))
    lines = pathlib.Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return [tuple(socket.inet_ntoa(bytes.fromhex(end.split(":")[0])[::-1]) for end in row[1:3])
            for row in rows if row[3] == "01" and f"socket:[{row[9]}]" in sockets]


@pytest.mark.parametrize("transport", ["auto", "wire", "gloo"])
def test_workers_connect_to_the_ring_address_of_others(tmp_path, transport):
    addresses = [f"127.0.77.{index + 1}" for index in range(3)]
    ring = start_hosts(tmp_path, ["host-a", "host-b", "host-c"], flags=lambda index: [
        f"--ring_address={addresses[index]}", f"--ring_transport={transport}"])
    with contextlib.closing(ring):
        workers = {w.rank: int(w.name[-1]) for w in ring.topology().workers}
        per_pair = 1 if transport == "gloo" else 2
        for rank in range(3):
            address, others = addresses[workers[rank]], [r for r in range(3) if r != rank]
            ends = connections(ring.workers[workers[rank]])
            # One worker of each pair has connected to the ring address of the other.
            for other in others:
                there = addresses[workers[other]]
                outgoing = sum(remote == there for _, remote in ends)
                assert outgoing in (0, per_pair), (rank, other, ends)
                if transport != "gloo":
                    assert (outgoing > 0) == (rank > other), (rank, other, ends)
            incoming = sum(local == address for local, _ in ends)
            if transport != "gloo":
                assert incoming == per_pair * sum(other > rank for other in others), (rank, ends)
        inputs = make_inputs(sq=1000, heads=2, dim=32)
        result = run(ring.attention, inputs, causal=True, world_size=3)
        assert_close(result.array("out"), reference(inputs, causal=True)["out"], 1e-4)


def test_a_worker_logs_why_it_cannot_form_a_ring(tmp_path):
    ring = Cluster(tmp_path, workers=0)
    with contextlib.closing(ring):
        ring.start_worker(0, flags=["--ring_address=192.0.2.1"])
        log = tmp_path / "worker-0.log"
        wait_until(lambda: "the ring cannot form" in log.read_text(), 20, "the reason")
        assert "cannot listen for ring peers on 192.0.2.1: " in log.read_text()


def test_operators_see_hosts(two_hosts):
    command = [CLI, "topology", f"--server={two_hosts.address}"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "4 workers on 2 hosts" in text.splitlines()[0]
    assert [line.split()[2] for line in text.splitlines()[2:]] == [
        "host-a", "host-a", "host-b", "host-b"]
    reply = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True,
                                      check=True).stdout)
    assert reply["workers"][0]["location"]["zone"] == "rack-a"
    assert metric(two_hosts, "ringattn_ring_hosts") == 2
    assert metric(two_hosts, "ringattn_ring_host_link_bytes_per_second") > 1e6
    log = (two_hosts.directory / "server.log").read_text()
    assert '"hosts":"host-a: 0 1; host-b: 2 3"' in log
    worker_log = (two_hosts.directory / "worker-0.log").read_text()
    assert '"host":"host-b"' in worker_log and '"zone":"rack-b"' in worker_log


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_request_stays_on_as_few_hosts_as_possible(two_hosts, world_size):
    inputs = make_inputs(sq=300)
    result = run(two_hosts.attention, inputs, backward=True, causal=True, world_size=world_size,
                 schedule=pb.SCHEDULE_RING if world_size > 1 else 0)
    exact = reference(inputs, causal=True)
    for name in ("dq", "dk", "dv"):
        assert_close(result.array(name), exact[name], 1e-4)
    hosts = host_of(two_hosts)
    members = [hosts[name] for name in result.accepted.plan.members]
    assert len(members) == world_size
    assert len(set(members)) == (1 if world_size <= 2 else 2)
    links = sum(a != b for a, b in zip(members, members[1:] + members[:1]))
    assert links == (0 if world_size <= 2 else 2)
    expected = f"with {links} links between hosts"
    assert (expected in result.accepted.plan.reason) == (links > 0), result.accepted.plan.reason


def test_concurrent_requests_of_one_host_use_both(two_hosts):
    inputs = make_inputs(sq=2000, heads=4, dim=64)
    used = []

    def call():
        result = run(two_hosts.attention, inputs, causal=True, world_size=2)
        used.append(list(result.accepted.plan.members))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hosts = host_of(two_hosts)
    assert len(used) == 6
    assert all(len({hosts[name] for name in members}) == 1 for members in used)
    assert {hosts[members[0]] for members in used} == {"host-a", "host-b"}


def test_named_members_are_obeyed_and_their_links_reported(two_hosts):
    inputs = make_inputs(sq=300)
    # Interleaved: every link is between hosts.
    names = ["worker-0", "worker-1", "worker-2", "worker-3"]
    result = forward(two_hosts, inputs, lambda header: header.plan.members.extend(names))
    assert_close(result.array("out"), reference(inputs)["out"], 1e-4)
    assert list(result.accepted.plan.members) == names
    assert "with 4 links between hosts" in result.accepted.plan.reason


def test_the_reason_states_the_choice_of_hosts(two_hosts):
    inputs = make_inputs(sq=600)
    plan = run(two_hosts.attention, inputs, causal=True).accepted.plan
    assert plan.world_size in (2, 4)
    assert "600 tokens exceed the single-device threshold of 256: ring over" in plan.reason
    assert "predicted" in plan.reason and "bytes/s between hosts" in plan.reason and "(measured)" in plan.reason
    hosts = host_of(two_hosts)
    assert len({hosts[name] for name in plan.members}) == plan.world_size // 2


# The link between the hosts is not measured while the workers have no memory for blocks.
def test_an_unmeasured_link_has_the_configured_rate(tmp_path):
    ring = start_hosts(tmp_path, ["x", "y"], server_flags=[
        "--default_host_link_bytes_per_second=1000"], flags=lambda _: ["--memory_limit=250000"])
    try:
        assert all(w.host_link_bytes_per_second == 0 for w in ring.topology().workers)
        plan = run(ring.attention, make_inputs(sq=400, heads=1), causal=True).accepted.plan
        assert plan.world_size == 1 and len(plan.members) == 1
        assert "1 worker on 1 of 2 hosts" in plan.reason
        assert "with 1e+03 bytes/s between hosts (assumed)" in plan.reason
    finally:
        ring.close()


def test_a_request_that_one_host_cannot_hold_gets_another(tmp_path):
    def edit(header):
        header.options.deterministic = True  # prefers one host

    ring = start_hosts(tmp_path, ["x", "y"], flags=lambda _: ["--memory_limit=2200000"])
    try:
        inputs = make_inputs(sq=1200, heads=2, dim=64)  # q, k, v and out: 2.4 MB
        result = forward(ring, inputs, edit, causal=True)
        assert_close(result.array("out"), reference(inputs, causal=True)["out"], 1e-4)
        assert result.accepted.plan.world_size == 2
        assert "rings of fewer than 2 workers lack the memory" in result.accepted.plan.reason
    finally:
        ring.close()


def test_a_deterministic_request_uses_one_host(two_hosts):
    def edit(header):
        header.options.deterministic = True

    plan = forward(two_hosts, make_inputs(sq=700), edit, causal=True).accepted.plan
    assert plan.world_size == 2
    assert "ring over 2 workers on 1 of 2 hosts" in plan.reason


def is_computing(ring):
    """Whether all workers report a run. Before that, a lost worker may end a request in another way."""
    with urllib.request.urlopen(f"http://{ring.ports['metrics']}/status.json", timeout=10) as reply:
        workers = json.load(reply)["workers"]
    return len(workers) == len(HOSTS) and all(worker["computes"] for worker in workers)


# The request on both hosts fails with a typed error, and the other host serves.
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_host(tmp_path, how):
    with contextlib.closing(start_hosts(
            tmp_path, HOSTS, flags=lambda _: ["--fault_injection=slow_step_ms:500"])) as ring:
        inputs = make_inputs(sq=600)
        outcome = []

        def call():
            try:
                outcome.append(run(ring.attention, inputs, causal=True, world_size=4))
            except grpc.RpcError as error:
                outcome.append((error, time.monotonic()))

        thread = threading.Thread(target=call)
        thread.start()
        wait_until(lambda: is_computing(ring), 20, "the request computes")
        lost = time.monotonic()
        for index, host in enumerate(HOSTS):
            if host == "host-b":
                ring.workers[index].send_signal(how)
        thread.join(30)
        error, failed = outcome[0]
        assert error.code() == grpc.StatusCode.ABORTED and reason_of(error) == "WORKER_LOST"
        assert failed - lost < 6

        def served():
            try:
                return run(ring.attention, inputs, causal=True, world_size=2)
            except grpc.RpcError:
                return None

        result = wait_until(served, 30, "the other host serves")
        recovered = time.monotonic()
        assert_close(result.array("out"), reference(inputs, causal=True)["out"], 1e-4)
        assert list(result.accepted.plan.members) == ["worker-1", "worker-3"]
        print(f"{how.name}: error after {failed - lost:.1f} s, served after {recovered - lost:.1f} s")
        assert recovered - lost < 15
        log = (ring.directory / "server.log").read_text()
        assert log.count("host lost") == 1 and "worker lost" not in log
        assert '"workers":"worker-0 worker-2"' in log or '"workers":"worker-2 worker-0"' in log


def plan(*flags, code=0):
    done = subprocess.run([CLI, "plan", "--batch=1", "--seq_len=65536", "--heads=32", "--kv_heads=8",
                           "--head_dim=128", "--dtype=bf16", "--causal", "--workers=16",
                           "--device_flops_per_s=6e14", "--link_bytes_per_s=3e11", "--json", *flags],
                          capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)["plan"] if code == 0 else done.stdout + done.stderr


def test_plan_predicts_hosts_without_a_service():
    slow = plan("--hosts=2", "--host_link_bytes_per_s=12.5e9")
    assert slow["world_size"] == 8 and "8 workers on 1 of 2 hosts" in slow["reason"]
    assert slow["rates"]["hosts"] == 2 and slow["rates"]["host_link_bytes_per_s"] == 12.5e9
    fast = plan("--hosts=2", "--host_link_bytes_per_s=3e11")
    assert fast["world_size"] == 16 and "all 16 workers on 2 hosts" in fast["reason"]
    assert plan()["reason"].endswith("ring over all 16 workers; zigzag, which balances causal work")
    assert "--hosts=3: 16 workers cannot be divided evenly" in plan("--hosts=3", code=2)


def test_workers_of_one_machine_are_one_host(tmp_path):
    with contextlib.closing(Cluster(tmp_path)) as ring:
        check_one_host(ring)


def check_one_host(ring):
    workers = list(ring.topology().workers)
    boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert {w.location.host for w in workers} == {boot_id}
    assert [w.name for w in workers] == [f"worker-{i}" for i in range(4)]
    assert all(w.host_link_bytes_per_second == 0 for w in workers)
    assert metric(ring, "ringattn_ring_hosts") == 1
    plan = run(ring.attention, make_inputs(sq=300), world_size=4).accepted.plan
    assert plan.reason.startswith("ring size 4 as requested; ")
