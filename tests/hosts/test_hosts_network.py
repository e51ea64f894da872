"""Two emulated hosts with a link of a given rate between them (host_network.py)."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest

from attention import assert_close, make_inputs, reference, run
from certificates import Authority, cluster_tls
from cluster import WORKER, Cluster, wait_until
from host_network import HostCluster, HostNetwork, is_available
from stubs import tensor_pb2

pytestmark = pytest.mark.skipif(not is_available(), reason="needs root, ip netns and tc tbf")


@pytest.fixture
def make_hosts(tmp_path):
    made = []

    def make(megabits, cards=1, **options):
        network = HostNetwork(cards)
        made.append(network)
        network.set_rate(megabits)
        cluster = HostCluster(tmp_path, network, **options)
        made.append(cluster)
        return cluster

    yield make
    for each in reversed(made):
        if isinstance(each, Cluster):
            print(each.tail())
        each.close()


# 20 Mbit/s: 2.5 MB/s. K and V of 500 tokens, 2 heads of 64, take 0.2 s; computing takes milliseconds.
def test_a_slow_link_keeps_a_request_on_one_host(make_hosts):
    hosts = make_hosts(20)
    workers = list(hosts.topology().workers)
    assert [w.location.host for w in workers] == ["host-0", "host-1"]
    for worker in workers:
        assert 0.6 * 2.5e6 < worker.host_link_bytes_per_second < 1.6 * 2.5e6
        assert any(interface.name == "e0" for interface in worker.location.interfaces)
    inputs = make_inputs(sq=1000, heads=2, dim=64)
    result = run(hosts.attention, inputs, causal=True)
    assert_close(result.array("out"), reference(inputs, causal=True)["out"], 1e-4)
    plan = result.accepted.plan
    assert plan.world_size == 1, plan.reason
    assert "1 worker on 1 of 2 hosts, predicted" in plan.reason
    assert "bytes/s between hosts (measured)" in plan.reason
    # Both hosts are worse by far.
    forced = run(hosts.attention, inputs, causal=True, world_size=2)
    assert_close(forced.array("out"), reference(inputs, causal=True)["out"], 1e-4)
    assert "with 2 links between hosts" in forced.accepted.plan.reason
    seconds = [r.summary.compute_time.ToTimedelta().total_seconds() for r in (result, forced)]
    assert seconds[0] < seconds[1], seconds


def test_a_fast_link_uses_both_hosts(make_hosts):
    hosts = make_hosts(None)
    plan = run(hosts.attention, make_inputs(sq=3000, heads=4, kv_heads=1, dim=64),
               causal=True).accepted.plan
    # A busy machine may measure one worker as far slower than the other, which then stays alone.
    rates = [rate.flops_per_second for worker in hosts.topology().workers
             for rate in worker.kernel_rates
             if tensor_pb2.DATA_TYPE_FLOAT32 in rate.dtypes and not rate.backward and not rate.score_terms]
    assert len(rates) == 2
    if min(rates) > 0.6 * max(rates):
        assert plan.world_size == 2, plan.reason
        assert "ring over all 2 workers on 2 hosts, predicted" in plan.reason
    else:
        assert "predicted" in plan.reason


# 40 Mbit/s: 5 MB/s per card.
@pytest.mark.parametrize("cards", [1, 2])
def test_the_rate_of_all_workers_of_a_host_depends_on_its_cards(make_hosts, cards):
    hosts = make_hosts(40, cards=cards, per_host=2)
    workers = list(hosts.topology().workers)
    assert [w.location.host for w in workers] == ["host-0", "host-0", "host-1", "host-1"]
    total, = {w.host_total_bytes_per_second for w in workers}
    assert 0.6 * cards * 5e6 < total < 1.3 * cards * 5e6
    # Senders may end once their bytes are in a socket's queue. The receivers' rates are lower.
    assert 0.6 * 5e6 < min(w.host_link_bytes_per_second for w in workers) < 1.5 * 5e6
    inputs = make_inputs(sq=1000, heads=4, kv_heads=1, dim=64)
    result = run(hosts.attention, inputs, causal=True, world_size=4)
    assert_close(result.array("out"), reference(inputs, causal=True)["out"], 1e-4)


def test_workers_of_a_host_use_its_interfaces_in_turn(make_hosts):
    hosts = make_hosts(None, cards=2, per_host=2, by_interface=True)
    inputs = make_inputs(sq=1000, heads=2, dim=64)
    result = run(hosts.attention, inputs, causal=True, world_size=4)
    assert_close(result.array("out"), reference(inputs, causal=True)["out"], 1e-4)
    for host, name in enumerate(hosts.network.names):
        listening = subprocess.run(["ip", "netns", "exec", name, "ss", "-Htln"], capture_output=True,
                                   text=True, check=True).stdout
        for card in hosts.network.cards:
            assert f"{card[host]}:" in listening, listening


def test_a_worker_without_the_interface_ends_and_says_which_exist(make_hosts):
    hosts = make_hosts(None)
    done = subprocess.run(hosts.network.command(0, [
        WORKER, "--name=other", "--coordinator=127.0.0.1:1", f"--secret_file={hosts.secret}", "--insecure",
        "--device=cpu", "--ring_interface=net7"]), capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert 'network interface "net7" is not up or has no address; this machine has c0, e0, lo' in done.stderr


CAPTURE = """
import socket, sys
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
link.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
link.bind(("e0", 0))
with open(sys.argv[1], "wb") as file:
    print("ready", flush=True)
    while True:
        file.write(link.recv(1 << 20))
        file.flush()
"""


@contextlib.contextmanager
def capture(network, path):
    """Writes what passes between the hosts to a file."""
    process = subprocess.Popen(network.command(0, [sys.executable, "-c", CAPTURE, str(path)]),
                               stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("tls", [False, True])
def test_the_link_carries_tensors_in_plain_text_only_without_certificates(make_hosts, tmp_path, tls):
    flags = []
    if tls:
        authority = Authority(tmp_path, "cluster")
        flags = [*cluster_tls(authority.certificate, *authority.issue("member", san="DNS:member")),
                 "--cluster_tls_server_name=member"]
    hosts = make_hosts(None, server_flags=flags, worker_flags=flags)
    inputs = make_inputs(sq=2000, heads=1, dim=64)
    inputs["v"][:] = 1.2345
    with capture(hosts.network, tmp_path / "link"):
        result = run(hosts.attention, inputs, world_size=2)
        # Half of the keys and values, each way.
        wait_until(lambda: (tmp_path / "link").stat().st_size > 1_000_000, 10, "captured packets")
    np.testing.assert_allclose(result.array("out"), 1.2345, rtol=1e-4)
    bytes_on_link = (tmp_path / "link").read_bytes()
    row = np.full(64, 1.2345, np.float32).tobytes()
    assert (row in bytes_on_link) != tls
