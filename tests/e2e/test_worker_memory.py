"""A request takes from each worker the memory that its plan states; a process keeps a bounded rest."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from stubs import attention_pb2 as pb
from command_line import cli
from cluster import wait_until
from worker_memory import KEPT_BYTES, idle_bytes, inputs_of, kept_bytes, typical_growth, warm_up

KEPT_OPERATIONS = "ringattn_worker_kept_operation_bytes"


@pytest.mark.parametrize("workers", [2, 8])
def test_a_request_takes_what_its_plan_says(make_ring, workers):
    # Without a lease each request allocates its own memory.
    ring = make_ring(workers=workers, worker_flags=["--prepared_lease=0"])
    start = idle_bytes(ring)
    inputs = inputs_of(512 * workers, 512 * workers, 64, 64)  # 8 MB of q, of k and of v on each rank
    for schedule in (pb.SCHEDULE_RING, pb.SCHEDULE_PASS_Q):
        options = dict(schedule=schedule, world_size=workers, layout=pb.LAYOUT_CONTIGUOUS, causal=True)
        warm_up(ring, inputs, **options)
        measured, predicted = typical_growth(ring, inputs, **options)
        print(f"schedule {schedule}: {measured / 1e6:.1f} MB, predicted {predicted / 1e6:.1f}")
        assert 0.98 * predicted <= measured <= 1.05 * predicted
    kept = kept_bytes(ring, start)
    print(f"kept beside requests: {kept / 1e6:.1f} MB")
    assert kept <= KEPT_BYTES


def test_memory_kept_for_equal_requests_is_counted_and_goes_back(make_ring):
    ring = make_ring(workers=2, worker_flags=["--prepared_lease=10s"])
    start = idle_bytes(ring)
    inputs = inputs_of(1024, 1024, 64, 64)
    options = dict(schedule=pb.SCHEDULE_RING, world_size=2, layout=pb.LAYOUT_CONTIGUOUS, causal=True)
    warm_up(ring, inputs, **options)
    counted = lambda: [ring.worker_metric(index, KEPT_OPERATIONS) for index in range(2)]
    wait_until(lambda: min(counted()) > 25e6, 10, "kept operations with at least q, k, v and out")
    for resident, before, kept in zip(idle_bytes(ring), start, counted()):
        print(f"kept: {(resident - before) / 1e6:.1f} MB of the process, {kept / 1e6:.1f} MB counted")
        assert 0.95 * kept <= resident - before <= kept + KEPT_BYTES
    wait_until(lambda: max(counted()) == 0, 20, "the lease's end")
    assert kept_bytes(ring, start) <= KEPT_BYTES


def test_requests_queue_for_the_workers_memory(make_ring, tmp_path):
    """Concurrent requests of which no two fit into a worker's memory limit all succeed."""
    source = tmp_path / "i.safetensors"
    cli("generate", f"--output={source}", "--seq_len=4000", "--heads=8", "--head_dim=64", "--dtype=fp32", "--seed=7")

    def forward(ring, index):
        output = tmp_path / f"f{index}.safetensors"
        done = cli("forward", f"--server={ring.address}", f"--input={source}", f"--output={output}", "--schedule=ring",
                   "--world_size=2", "--window=200,0", "--deadline=100s", "--json")
        return output, json.loads(done.stdout)

    _, alone = forward(make_ring(workers=2), 0)
    needed = max(rank["buffer_bytes"] for rank in alone["plan"]["ranks"])
    tight = make_ring(workers=2, worker_flags=[f"--memory_limit={needed * 3 // 2}"])
    with ThreadPoolExecutor(4) as callers:
        calls = list(callers.map(lambda index: forward(tight, index), range(1, 5)))
    for output, report in calls:
        assert report["plan"]["world_size"] == 2 and report["attempts"] == 1
        cli("verify", f"--input={source}", f"--output={output}", "--window=200,0")
