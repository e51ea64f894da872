"""Nodes as hosts of one ring, two workers on each: rings over both, a slow link between them, nodes that
are parted, and a node that is lost.

All nodes run on one machine and have its boot id, so the workers report the node's name as their host."""

import json
import threading
import time

import pytest

from node import wait_for
from release import COORDINATOR, WORKERS, timed

VALUES = {
    "worker.replicas": 4,
    "worker.extraArgs": ["--host_id=$(NODE_NAME)"],
    "worker.extraEnv": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    "worker.topology.zoneLabel": "topology.kubernetes.io/zone",
    "worker.topology.zonePlacement": "spread",
    "coordinator.extraArgs": ["--single_device_threshold_tokens=512"],
}
DEFAULTS = {
    "worker.replicas": 2,
    "worker.extraArgs": [],
    "worker.extraEnv": [],
    "worker.topology.zoneLabel": "",
    "worker.topology.zonePlacement": "together",
    "coordinator.extraArgs": [],
}
ALL = ("--causal", "--schedule=ring", "--world_size=4")
# Seconds until the typed error of a request on both nodes, until one node serves, and until both do again.
LOST = {"error": 6, "serves": 10}
PARTED = {"error": 10, "serves": 15, "whole": 15}


def install(release, values):
    words = [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
    release.replicas = values["worker.replicas"]
    release.upgrade(*words)
    release.settled(COORDINATOR)
    release.settled(WORKERS)


@pytest.fixture(scope="module")
def two_hosts(release):
    install(release, VALUES)
    release.wait_ring(4)
    yield release
    install(release, DEFAULTS)
    release.wait_ring(2)


@pytest.fixture
def link(two_hosts):
    cluster = two_hosts.kubernetes
    yield cluster
    cluster.heal()
    cluster.shape(None)


def nodes_of(release):
    """The pods of the workers by node."""
    found = {"node1": {}, "node2": {}}
    for name, pod in release.pods("worker").items():
        found[pod["spec"]["nodeName"]][name] = pod
    return found


def addresses(pods):
    return [pod["status"]["podIP"] for pod in pods.values()]


def is_ready(pod):
    return any(condition["type"] == "Ready" and condition["status"] == "True"
               for condition in pod["status"]["conditions"])


def form_again(release):
    """A new ring of all workers, with measured links. Returns the topology."""
    generation = release.generation()
    release.kubectl("delete", "pod", "ringattn-worker-3")
    return release.wait_ring(4, after=generation)


class Call(threading.Thread):
    """A request on all workers, concurrently with the test. After a loss, the client library replays it on those that
    are left."""

    def __init__(self, release, inputs):
        super().__init__()
        self.release, self.inputs = release, inputs
        self.output = release.directory / "lost.safetensors"
        self.began = time.monotonic()
        self.start()
        release.wait_busy()
        time.sleep(1)  # the tensors arrive, and the ring computes
        assert self.is_alive(), "the request is too short"

    def run(self):
        done = self.release.call("forward", f"--input={self.inputs}", f"--output={self.output}", "--json",
                                 "--deadline=150s", "--causal", "--schedule=ring", check=False)
        self.outcome = json.loads(done.stdout)

    def replayed(self, lost):
        """Verifies the result. The failure of the last attempt that failed, and when it was known, in seconds after
        `lost`."""
        self.join(180)
        assert not self.is_alive(), "the request does not end"
        assert "error" not in self.outcome, self.outcome
        self.release.verify(self.inputs, self.output, "--causal")
        assert self.outcome["plan"]["world_size"] == 2
        failed = self.outcome["failed_attempts"]
        return failed["last"], self.began + failed["seconds"] - lost


def wait_for_one_node(release):
    """Until two workers of one node are the ring. Returns the node's name."""
    topology = release.wait_ring(2)
    hosts = {worker["location"]["host"] for worker in topology["workers"] if "rank" in worker}
    assert len(hosts) == 1
    return hosts.pop()


def check_one_node_serves(release, short_input):
    node = wait_for_one_node(release)
    # A node that is gone answers the first attempt late.
    assert release.forward(short_input, "--causal", "--schedule=ring", "--world_size=2") >= 1
    return node


def test_nodes_are_hosts_and_zones(two_hosts):
    workers = two_hosts.topology()["workers"]
    assert [worker["location"]["host"] for worker in workers] == ["node1", "node1", "node2", "node2"]
    assert [worker["location"]["zone"] for worker in workers] == [
        "zone=rack-1", "zone=rack-1", "zone=rack-2", "zone=rack-2"]
    assert {worker["next_transport"] for worker in workers} == {"wire"}
    assert len({worker["host_total_bytes_per_second"] for worker in workers}) == 1
    for name, pods in nodes_of(two_hosts).items():
        assert {w["name"] for w in workers if w["location"]["host"] == name} == set(pods)


@pytest.mark.parametrize("flags", [ALL, ("--causal", "--schedule=double_ring", "--world_size=4"),
                                   ("--window=64,0", "--schedule=ring", "--world_size=3")],
                         ids=["ring", "double ring", "three"])
def test_a_ring_over_both_nodes_is_right(two_hosts, short_input, report, flags):
    with timed(report, f"a verified request over both nodes, {' '.join(flags)}"):
        assert two_hosts.forward(short_input, *flags) == 1


# 20 Mbit/s: 2.5 MB/s, in both directions. All workers of a node share the link.
def test_a_slow_link_keeps_requests_on_one_node(two_hosts, link, short_input, report):
    link.shape(20)
    workers = form_again(two_hosts)["workers"]
    # Senders may end once their bytes are in a socket's queue. The receivers' rates are lower.
    slow = min(worker["host_link_bytes_per_second"] for worker in workers)
    assert 0.5 * 2.5e6 < slow < 1.6 * 2.5e6
    total = workers[0]["host_total_bytes_per_second"]
    assert 0.5 * 2.5e6 < total < 1.6 * 2.5e6
    done = two_hosts.call("forward", f"--input={short_input}",
                          f"--output={two_hosts.directory}/slow.safetensors", "--json", "--causal")
    plan = json.loads(done.stdout)["plan"]
    assert "on 1 of 2 hosts" in plan["reason"] and "(measured)" in plan["reason"]
    assert plan["world_size"] <= 2
    assert two_hosts.forward(short_input, "--causal") == 1
    assert two_hosts.forward(short_input, *ALL) == 1
    link.shape(None)
    fast = min(worker["host_link_bytes_per_second"] for worker in form_again(two_hosts)["workers"])
    assert fast > 4 * slow
    report(f"a link of 2.5 MB/s was measured as {slow:.3g} bytes/s, of all workers together {total:.3g}; "
           f"without a limit {fast:.3g}")


def check_parted(release, serving):
    """The other node's workers are parted and their pods not ready, and nothing restarts them."""
    other, = {"node1", "node2"} - {serving}
    parted = nodes_of(release)[other]

    def states():
        topology = release.topology() or {"workers": []}
        return {worker["name"]: (worker["state"], worker.get("parted_from"))
                for worker in topology["workers"] if worker["name"] in parted}

    expected = {name: ("WORKER_STATE_PARTED", [serving]) for name in parted}
    wait_for(lambda: states() == expected, 30, f"parted workers; last seen: {states()}")
    wait_for(lambda: not any(map(is_ready, nodes_of(release)[other].values())), 60, "pods that are not ready")
    wait_for(lambda: all(map(is_ready, nodes_of(release)[serving].values())), 60, "ready pods of the node that serves")


def check_whole(release, link, short_input, report, restarts):
    healed = time.monotonic()
    link.heal()
    release.wait_ring(4)
    whole = time.monotonic() - healed
    report(f"  all four workers in the ring {whole:.1f} s after the nodes reach each other")
    assert whole <= PARTED["whole"]
    release.settled(WORKERS)  # all pods are ready
    assert release.forward(short_input, *ALL) == 1
    assert release.restarts() == restarts


def test_nodes_are_parted_in_mid_request(two_hosts, link, long_input, short_input, report):
    restarts = two_hosts.restarts()
    call = Call(two_hosts, long_input)
    parted = time.monotonic()
    link.part(*map(addresses, nodes_of(two_hosts).values()))
    serving = wait_for_one_node(two_hosts)
    serves = time.monotonic() - parted
    failure, seconds = call.replayed(parted)
    report(f"nodes parted in mid-request: {failure.split(':')[0]} after {seconds:.1f} s, one node serves after "
           f"{serves:.1f} s, and the replay is right")
    assert failure.startswith("ABORTED"), failure
    assert seconds <= PARTED["error"] and serves <= PARTED["serves"]
    check_parted(two_hosts, serving)
    check_whole(two_hosts, link, short_input, report, restarts)


def test_nodes_are_parted_while_a_ring_forms(two_hosts, link, short_input, report):
    restarts = two_hosts.restarts()
    generation = two_hosts.generation()
    # Addresses stay when a container ends.
    link.part(*map(addresses, nodes_of(two_hosts).values()))
    began = time.monotonic()
    two_hosts.kill_container("ringattn-worker-3")
    two_hosts.wait_ring(2, after=generation)
    serving = check_one_node_serves(two_hosts, short_input)
    serves = time.monotonic() - began
    report(f"nodes parted while a ring forms: one node serves after {serves:.1f} s")
    assert serves <= PARTED["serves"]
    check_parted(two_hosts, serving)
    # Probes fail, and the ring stays as it is.
    generation = two_hosts.generation(2)
    time.sleep(12)
    assert two_hosts.generation(2) == generation
    restarts["ringattn-worker-3"] += 1
    check_whole(two_hosts, link, short_input, report, restarts)


def test_a_node_is_lost(two_hosts, long_input, short_input, report):
    call = Call(two_hosts, long_input)
    lost = time.monotonic()
    two_hosts.kubernetes.lose_node()
    assert wait_for_one_node(two_hosts) == "node1"
    serves = time.monotonic() - lost
    failure, seconds = call.replayed(lost)
    report(f"a node of two workers lost in mid-request: {failure.split(':')[0]} after {seconds:.1f} s, the other node "
           f"serves after {serves:.1f} s, and the replay is right")
    assert failure.startswith("ABORTED"), failure
    assert seconds <= LOST["error"] and serves <= LOST["serves"]
    # The taint of a node's controller: its pods are replaced on the other node.
    two_hosts.kubernetes.kubectl("taint", "nodes", "node2",
                                 "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
    two_hosts.wait_ring(4, seconds=120)
    two_hosts.kubernetes.replace_node()
    generation = two_hosts.generation()
    two_hosts.kubectl("delete", "pod", "ringattn-worker-2", "ringattn-worker-3")
    two_hosts.wait_ring(4, seconds=120, after=generation)
    two_hosts.settled(WORKERS)
    assert {name: len(pods) for name, pods in nodes_of(two_hosts).items()} == {"node1": 2, "node2": 2}
    assert two_hosts.forward(short_input, *ALL) == 1
