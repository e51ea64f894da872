"""Memory that a request takes on each GPU, on rings of 1, 2, 4, ..., compared with the plan's
prediction."""

from calls import plan_flags, verify, with_memory
from harness import check
from inputs import Shape
from ring import GaugeWatch
from session import CAUSAL

TOLERANCE = 0.1


def part(session):
    def run(result):
        if not session.gpu:
            result["skipped"] = "needs GPUs"
            return
        shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"]["256k"])
        source = session.view(shape, True)
        all_workers, session.ring.workers = session.ring.workers, 1
        result["rows"] = []
        try:
            while session.ring.workers <= all_workers:
                session.ring.down()  # so that nothing is left of larger requests
                session.ring.ensure()
                for command in ("forward", "backward"):
                    result["rows"].append(measure(session, source, command))
                session.ring.workers *= 2
        finally:
            session.ring.down()
            session.ring.workers = all_workers
        for row in result["rows"]:
            for predicted, allocated in zip(row["predicted"], row["allocated"]):
                check(allocated and abs(allocated / predicted - 1) <= TOLERANCE,
                      f"{row['pass']} on {row['ring']}: allocated {allocated}, predicted {predicted}")
    return run


def measure(session, source, command):
    ring = session.ring
    output = session.output(f"memory-{command}")
    with GaugeWatch(ring, "ringattn_device_allocated_bytes") as allocated:
        figures, memory = with_memory(session.harness, ring, command, source, output,
                                      [*CAUSAL, *plan_flags(ring.workers)])
    verify(session.harness, ring, source, output, CAUSAL, 4,
           session.output("memory-forward") if command == "backward" else None)
    return {"pass": command, "ring": ring.workers,
            "predicted": figures["predicted_bytes"],
            "allocated": [allocated.peak.get(f"worker-{i}") for i in range(ring.workers)],
            "peak": [memory.peak[i] for i in range(ring.workers)],
            "idle": [memory.first[i] for i in range(ring.workers)]}
