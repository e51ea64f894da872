"""Draining workers: operations that a worker takes part in end first. And `ringattn workers`."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import threading

import pytest

from attention import assert_close, make_inputs, reference, run
from cluster import BIN, CLI, free_port, wait_until
from stubs import attention_pb2 as pb, cluster_pb2
from test_probes import NOT_SERVING, SERVING, health

# Each call of a kernel takes a second longer: some seconds a request, on any machine.
SLOW = ["--fault_injection=slow_step_ms:1000"]


def busy(ring):
    workers = ring.topology().workers
    return workers and all(worker.reserved_bytes > 0 for worker in workers)


def send(ring, inputs):
    """A request on its own thread; its result or failure is in the list that is returned."""
    outcome = []

    def call():
        try:
            outcome.append(run(ring.attention, inputs, causal=True, schedule=pb.SCHEDULE_RING))
        except Exception as failure:  # noqa: BLE001  # handed on to the test
            outcome.append(failure)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: busy(ring), 20, "the request is in flight")
    return thread, outcome


def test_a_worker_that_is_told_to_end_finishes_what_it_has(make_ring):
    ring = make_ring(workers=2, worker_flags=SLOW)
    generation = ring.topology().generation
    thread, outcome = send(ring, make_inputs(sq=600))
    ring.workers[1].send_signal(signal.SIGTERM)
    states = {w.name: w.state for w in wait_until(
        lambda: [w for w in ring.topology().workers if w.state == cluster_pb2.WORKER_STATE_LEAVING],
        5, "the worker says that it leaves")}
    assert list(states) == ["worker-1"]
    assert ring.workers[1].poll() is None
    thread.join(60)
    assert not isinstance(outcome[0], Exception), outcome[0]
    assert ring.workers[1].wait(10) == 0
    ring.wait_ready(1, after_generation=generation)
    small = make_inputs(sq=64)
    result = run(ring.attention, small)
    assert_close(result.array("out"), reference(small)["out"], 1e-4)


def test_a_worker_waits_no_longer_than_it_may(make_ring):
    ring = make_ring(workers=2, worker_flags=["--drain_timeout=100ms", *SLOW])
    thread, outcome = send(ring, make_inputs(sq=600))
    ring.workers[1].send_signal(signal.SIGTERM)
    assert ring.workers[1].wait(10) == 0
    thread.join(60)
    assert isinstance(outcome[0], Exception)
    ring.wait_ready(1)


def test_a_second_signal_ends_it_at_once(make_ring):
    ring = make_ring(workers=2, worker_flags=SLOW)
    thread, _ = send(ring, make_inputs(sq=600))
    ring.workers[1].send_signal(signal.SIGTERM)
    wait_until(lambda: any(w.state == cluster_pb2.WORKER_STATE_LEAVING
                           for w in ring.topology().workers), 5, "it leaves")
    ring.workers[1].send_signal(signal.SIGTERM)
    assert ring.workers[1].wait(5) == 128 + signal.SIGTERM
    thread.join(60)


def test_without_a_coordinator_it_ends_at_once(make_ring):
    ring = make_ring(workers=1)
    ring.kill_server()
    ring.workers[0].send_signal(signal.SIGTERM)
    assert ring.workers[0].wait(10) == 0


@pytest.fixture
def group(make_ring):
    """A coordinator, and two workers of one `ringattn workers`."""
    ring = make_ring(workers=0)
    log = open(ring.directory / "group.log", "wb")
    port = free_port(3)  # of the group, and the workers'
    process = subprocess.Popen(
        [CLI, "workers", "--count=2", f"--bin_dir={BIN}", "--", "--name=pod",
         f"--coordinator={ring.control_address}", f"--secret_file={ring.secret}", "--device=cpu",
         "--threads=1", "--data_listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0",
         f"--health_listen=127.0.0.1:{port}", *SLOW], stdout=log, stderr=log)
    ring.group, ring.group_health = process, f"127.0.0.1:{port}"
    yield ring
    process.kill()
    process.wait()
    log.close()


def children(pid):
    """Process numbers, ascending."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # "pid (name) state parent ...": the name may hold anything.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return sorted(found)


def test_a_group_of_workers_joins_is_mended_and_leaves(group):
    topology = group.wait_ready(2)
    assert sorted(w.name for w in topology.workers) == ["pod-0", "pod-1"]
    wait_until(lambda: health(group.group_health, "readiness") == SERVING, 10, "readiness")
    os.kill(children(group.group.pid)[0], signal.SIGKILL)
    wait_until(lambda: health(group.group_health, "readiness") == NOT_SERVING, 10, "a loss is seen")
    assert health(group.group_health, "liveness") == SERVING
    group.wait_ready(2, after_generation=topology.generation)
    wait_until(lambda: health(group.group_health, "readiness") == SERVING, 10, "readiness")
    thread, outcome = send(group, make_inputs(sq=600))
    group.group.send_signal(signal.SIGTERM)
    thread.join(60)
    assert not isinstance(outcome[0], Exception), outcome[0]
    assert group.group.wait(15) == 0
    wait_until(lambda: not group.topology().workers, 5, "all of them left")


def test_a_group_says_what_is_wrong_with_its_flags():
    def workers(*flags):
        return subprocess.run([CLI, "workers", "--count=2", f"--bin_dir={BIN}", "--", *flags],
                              capture_output=True, text=True, timeout=30)

    wrong = workers("--local_rank=1")
    assert wrong.returncode == 2 and "--local_rank=1" in wrong.stderr
    wrong = workers("--name=pod")
    assert wrong.returncode == 3 and "--secret_file is required" in wrong.stderr
    assert re.search("worker [01] cannot start", wrong.stderr)  # either may be first
