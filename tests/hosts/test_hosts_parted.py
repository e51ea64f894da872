"""Emulated hosts that reach the coordinator and not each other (host_network.py)."""

import json
import time
import urllib.request

import grpc
import pytest

from attention import assert_close, make_inputs, reason_of, reference, run
from cluster import wait_until
from health import NOT_SERVING, SERVING, health
from host_network import HostCluster, HostNetwork, is_available
from stubs import cluster_pb2

HEALTH_PORT = 7810
pytestmark = pytest.mark.skipif(not is_available(), reason="needs root, ip netns and tc tbf")


@pytest.fixture
def network():
    made = HostNetwork()
    yield made
    made.close()


@pytest.fixture
def start(tmp_path, network):
    clusters = []

    def make(**options):
        clusters.append(HostCluster(tmp_path, network, worker_flags=[f"--health_listen=0.0.0.0:{HEALTH_PORT}"],
                                    **options))
        return clusters[-1]

    yield make
    for cluster in clusters:
        print(cluster.tail())
        cluster.close()


def page(ring, path):
    with urllib.request.urlopen(f"http://{ring.ports['metrics']}/{path}", timeout=10) as reply:
        return reply.read().decode()


def health_of(ring, name):
    """The address of a worker's health port."""
    return f"{ring.network.inside[int(name[-1])]}:{HEALTH_PORT}"


def parted_workers(ring):
    line = next(line for line in page(ring, "metrics").splitlines()
                if line.startswith("ringattn_parted_workers "))
    return float(line.split()[1])


def parted_topology(ring):
    """The topology, once one worker is the ring and the other is parted."""
    topology = ring.topology()
    states = sorted(worker.state for worker in topology.workers)
    expected = sorted([cluster_pb2.WORKER_STATE_READY, cluster_pb2.WORKER_STATE_PARTED])
    return topology if states == expected else None


def log_of(ring):
    return (ring.directory / "server.log").read_text()


def check_served(ring, **options):
    inputs = make_inputs(sq=300)
    result = run(ring.attention, inputs, causal=True, **options)
    assert_close(result.array("out"), reference(inputs, causal=True)["out"], 1e-4)
    return list(result.accepted.plan.members)


def check_whole(ring, after_generation):
    """Both hosts serve again, soon after the link carries packets."""
    ring.network.heal()
    healed = time.monotonic()
    ring.wait_ready(2, 30, after_generation)
    print(f"both hosts serve {time.monotonic() - healed:.1f} s after the link works")
    assert len(check_served(ring, world_size=2)) == 2
    wait_until(lambda: parted_workers(ring) == 0, 10, "no parted worker")
    assert "hosts reach each other again" in log_of(ring)
    for worker in ("worker-0", "worker-1"):
        assert wait_until(lambda: health(health_of(ring, worker), "readiness") == SERVING, 5, "readiness")


# Both directions, and one.
@pytest.mark.parametrize("cut", [(0, 1), (0,), (1,)])
def test_a_partition_while_forming_leaves_one_host(network, start, cut):
    network.cut(cut)
    begin = time.monotonic()
    ring = start(members=1)
    formed = time.monotonic()
    print(f"one host serves after {formed - begin:.1f} s")
    assert formed - begin < 30
    # On a busy machine the first ring may have formed before the other worker had registered.
    topology = wait_until(lambda: parted_topology(ring), 30, "a parted worker")
    [member] = check_served(ring)
    by_state = {worker.state: worker for worker in topology.workers}
    assert by_state[cluster_pb2.WORKER_STATE_READY].name == member
    parted = by_state[cluster_pb2.WORKER_STATE_PARTED]
    assert list(parted.parted_from) == [by_state[cluster_pb2.WORKER_STATE_READY].location.host]
    assert wait_until(lambda: parted_workers(ring) == 1, 5, "one parted worker")
    rows = {row["name"]: row for row in json.loads(page(ring, "status.json"))["workers"]}
    assert rows[parted.name]["state"] == "parted"
    assert rows[parted.name]["parted_from"] == list(parted.parted_from)
    # Kubernetes sends no traffic to a pod that is not ready, and does not restart one that is alive.
    for worker in (parted.name, member):
        probe = health_of(ring, worker)
        assert health(probe, "liveness") == SERVING
        expected = NOT_SERVING if worker == parted.name else SERVING
        assert wait_until(lambda: health(probe, "readiness") == expected, 5, f"readiness of {worker}")
    assert "hosts parted" in log_of(ring)
    # Probes fail, and the ring stays as it is.
    time.sleep(12)
    assert ring.topology().generation == topology.generation
    check_whole(ring, topology.generation)


def test_a_partition_of_a_ring_leaves_one_host(network, start):
    ring = start()
    generation = ring.topology().generation
    network.cut()
    begin = time.monotonic()
    with pytest.raises(grpc.RpcError) as failed:
        check_served(ring, world_size=2)
    ended = time.monotonic()
    print(f"{reason_of(failed.value)} after {ended - begin:.1f} s")
    assert failed.value.code() == grpc.StatusCode.ABORTED
    assert ended - begin < 15  # --progress_timeout is 20 s
    topology = ring.wait_ready(1, 30, generation)
    served = time.monotonic()
    print(f"one host serves after {served - begin:.1f} s")
    assert served - ended < 7  # a ring over both would have needed 8 s to fail
    check_served(ring)
    check_whole(ring, topology.generation)
