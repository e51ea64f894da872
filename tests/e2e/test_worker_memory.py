"""A request takes of each worker what its plan says, and beside it a process keeps a bounded rest."""

import pytest

from stubs import attention_pb2 as pb
from worker_memory import KEPT_BYTES, idle_bytes, inputs_of, kept_bytes, typical_growth, warm_up


@pytest.mark.parametrize("workers", [2, 8])
def test_a_request_takes_what_its_plan_says(make_ring, workers):
    ring = make_ring(workers=workers)
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
