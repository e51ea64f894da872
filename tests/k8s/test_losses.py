"""Containers, pods and a node are lost in the middle of a request: the client library gets its result,
the ring comes back, and the next request is right."""

import time

from node import wait_for
from release import COORDINATOR, NAMESPACE, WORKERS, InFlight

WORKER = "ringattn-worker-1"
RING = ("--causal", "--schedule=ring")


def lose(release, report, long_input, short_input, what, action, replayed=True):
    """Sends a long request, calls `action`, and says what became of it and when."""
    generation = release.generation()
    request = InFlight(release, long_input, *RING)
    began = time.monotonic()
    action()
    attempts = request.attempts()
    answered = time.monotonic() - began
    assert (attempts > 1) == replayed, f"{attempts} attempts"
    release.wait_ring(2, after=generation)
    whole = time.monotonic() - began
    # A Service that still leads to a pod that is gone costs attempts, not the request.
    next_attempts = release.forward(short_input, *RING)
    report(f"{what}: answered after {answered:.1f} s ({attempts} attempts), ring of two after "
           f"{whole:.1f} s, next request in {next_attempts}")


def test_a_workers_container_is_killed(release, report, long_input, short_input):
    before = release.restarts()[WORKER]
    lose(release, report, long_input, short_input, "SIGKILL of a worker's container",
         lambda: release.kill_container(WORKER))
    assert release.restarts()[WORKER] == before + 1


def test_a_workers_pod_is_deleted_by_force(release, report, long_input, short_input):
    lose(release, report, long_input, short_input, "forced deletion of a worker's pod",
         lambda: release.kubectl("delete", "pod", WORKER, "--force", "--grace-period=0"))


def test_a_workers_pod_is_deleted_gently(release, report, long_input, short_input):
    """It stays until the request has ended: nothing is sent twice."""
    lose(release, report, long_input, short_input, "deletion of a worker's pod",
         lambda: release.kubectl("delete", "pod", WORKER, "--wait=false"), replayed=False)


def test_the_coordinators_container_is_killed(release, report, long_input, short_input):
    pod = next(iter(release.pods("coordinator")))
    lose(release, report, long_input, short_input, "SIGKILL of the coordinator's container",
         lambda: release.kill_container(pod))


def test_the_coordinators_pod_is_deleted_by_force(release, report, long_input, short_input):
    pod = next(iter(release.pods("coordinator")))
    lose(release, report, long_input, short_input, "forced deletion of the coordinator's pod",
         lambda: release.kubectl("delete", "pod", pod, "--force", "--grace-period=0"))


def test_the_coordinators_pod_is_deleted_gently(release, report, long_input, short_input):
    """It drains: what is in flight ends first."""
    pod = next(iter(release.pods("coordinator")))
    lose(release, report, long_input, short_input, "deletion of the coordinator's pod",
         lambda: release.kubectl("delete", "pod", pod, "--wait=false"), replayed=False)
    release.settled(COORDINATOR)


def test_the_disruption_budget_holds_an_eviction(release):
    """One worker at a time: the second is refused until the first is back in the ring."""
    def evict(pod):
        eviction = ('{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"%s",'
                    '"namespace":"%s"}}' % (pod, NAMESPACE))
        return release.kubernetes.run(
            "kubectl", "create", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction",
            "-f", "-", stdin=eviction, check=False)

    release.settled(WORKERS)
    generation = release.generation()
    evicted = evict("ringattn-worker-1")
    assert evicted.returncode == 0, evicted.stderr
    refused = evict("ringattn-worker-0")
    assert refused.returncode != 0
    assert "disruption budget" in refused.stderr, refused.stderr
    release.wait_ring(2, after=generation)
    release.settled(WORKERS)
    generation = release.generation()
    wait_for(lambda: evict("ringattn-worker-0").returncode == 0, 30, "the budget allows one again")
    release.wait_ring(2, after=generation)
    release.settled(WORKERS)


def test_a_node_is_drained(release, report, long_input, short_input):
    """The request in flight ends first, then its worker moves."""
    generation = release.generation()
    request = InFlight(release, long_input, *RING)
    began = time.monotonic()
    release.kubernetes.kubectl("drain", "node2", "--ignore-daemonsets", "--delete-emptydir-data",
                               "--timeout=120s", timeout=150)
    drained = time.monotonic() - began
    assert request.attempts() == 1
    release.wait_ring(2, after=generation)
    assert {pod["spec"]["nodeName"] for pod in release.pods("worker").values()} == {"node1"}
    assert release.forward(short_input, *RING) == 1
    report(f"a node drained in mid-request: {drained:.1f} s, nothing sent twice")
    release.kubernetes.kubectl("uncordon", "node2")
    spread_again(release)


def test_a_node_is_lost(release, report, long_input, short_input):
    generation = release.generation()
    request = InFlight(release, long_input, *RING)
    began = time.monotonic()
    release.kubernetes.lose_node()
    attempts = request.attempts()
    answered = time.monotonic() - began
    assert attempts > 1
    release.wait_ring(1, after=generation)
    assert release.forward(short_input, "--causal") == 1
    # The taint of a node's controller: no pod runs there any longer.
    release.kubernetes.kubectl("taint", "nodes", "node2",
                               "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
    release.wait_ring(2, seconds=120, after=generation)
    whole = time.monotonic() - began
    report(f"a node lost in mid-request: answered after {answered:.1f} s ({attempts} attempts), "
           f"ring of two after {whole:.1f} s")
    release.kubernetes.replace_node()
    spread_again(release)


def spread_again(release):
    """One worker is put on the empty node."""
    on_first = [name for name, pod in release.pods("worker").items()
                if pod["spec"]["nodeName"] == "node1"]
    if len(on_first) > 1:
        generation = release.generation()
        release.kubectl("delete", "pod", on_first[-1])
        release.wait_ring(2, after=generation)
        release.settled(WORKERS)
    nodes = {pod["spec"]["nodeName"] for pod in release.pods("worker").values()}
    assert nodes == {"node1", "node2"}
