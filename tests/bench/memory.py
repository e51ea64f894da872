#!/usr/bin/env python3
"""Memory, read from the processes themselves (peak resident size):

  - K/V-related bytes of a worker for rings of 1, 2, 4 and 8 at one total length,
    beside the plan's prediction: they must fall with 1/W;
  - the coordinator's peak while requests grow from 4K to 256K tokens: flat.

  tests/bench/memory.py            prints a table; exits 1 outside the bounds
"""

import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))

import numpy as np  # noqa: E402

from attention import run  # noqa: E402
from cluster import Cluster  # noqa: E402
from stubs import attention_pb2 as pb  # noqa: E402

MB = 1e6
TOKENS, HEADS, DIM = 16384, 4, 128


def status_bytes(pid, field):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def reset_peak(pid):
    pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")


def inputs_of(sq, sk, heads, dim):
    # Not zeros, but cheap: memory is measured here, not values.
    fill = lambda rows: np.linspace(-1, 1, rows * heads * dim, dtype=np.float32).reshape(
        1, rows, heads, dim)
    return dict(q=fill(sq), k=fill(sk), v=fill(sk), dout=fill(sq))


def peak_growth(ring, inputs, **options):
    """Bytes above idle at the peak of one request: (worst worker, predicted)."""
    pids = [worker.pid for worker in ring.workers.values()]
    idle = []
    for pid in pids:
        reset_peak(pid)
        idle.append(status_bytes(pid, "VmRSS"))
    result = run(ring.attention, inputs, timeout=600, **options)
    growth = [status_bytes(pid, "VmHWM") - base for pid, base in zip(pids, idle)]
    predicted = [rank.buffer_bytes for rank in result.accepted.plan.ranks]
    return max(growth), max(predicted)


def measure_workers():
    """K/V-related bytes: what a request with keys takes beyond one without."""
    good = True
    print(f"worker, {TOKENS} tokens, {HEADS} heads, head_dim {DIM}, fp32, full attention, MB")
    print(f"{'W':>3} {'K/V-related':>12} {'predicted':>10} {'ratio':>6} {'x W / (W=1)':>12}")
    first = None
    for world_size in (1, 2, 4, 8):
        with tempfile.TemporaryDirectory() as directory:
            ring = Cluster(directory, workers=world_size)
            try:
                plan = dict(world_size=world_size,
                            schedule=pb.SCHEDULE_RING if world_size > 1 else pb.SCHEDULE_SINGLE,
                            layout=pb.LAYOUT_CONTIGUOUS)
                run(ring.attention, inputs_of(512, 512, HEADS, DIM), **plan)  # warm up
                without = peak_growth(ring, inputs_of(TOKENS, 0, HEADS, DIM), **plan)
                with_keys = peak_growth(ring, inputs_of(TOKENS, TOKENS, HEADS, DIM), **plan)
            finally:
                ring.close()
        measured, predicted = (a - b for a, b in zip(with_keys, without))
        # A ring holds two blocks, its own and the next; one device holds all of it once.
        share = measured * world_size / (1 if world_size == 1 else 2)
        first = first or share
        ratio = measured / predicted
        good &= 0.9 <= ratio <= 1.1
        print(f"{world_size:>3} {measured / MB:>12.1f} {predicted / MB:>10.1f} {ratio:>6.2f} "
              f"{share / first:>12.2f}")
    return good


def measure_coordinator():
    print("coordinator, 4 heads, head_dim 64, fp32, window (64, 0), ring of 2, peak MB")
    peaks = {}
    with tempfile.TemporaryDirectory() as directory:
        ring = Cluster(directory, workers=2)
        try:
            for tokens in (4 << 10, 16 << 10, 64 << 10, 256 << 10):
                inputs = inputs_of(tokens, tokens, 4, 64)
                bytes_moved = 4 * inputs["q"].nbytes
                reset_peak(ring.server.pid)
                run(ring.attention, inputs, timeout=600, causal=True, window=(64, 0),
                    schedule=pb.SCHEDULE_RING)
                peaks[tokens] = status_bytes(ring.server.pid, "VmHWM")
                print(f"{tokens:>8} tokens {bytes_moved / MB:>8.1f} moved "
                      f"{peaks[tokens] / MB:>8.1f} peak")
        finally:
            ring.close()
    return peaks[256 << 10] - peaks[16 << 10] < 64 * MB


if __name__ == "__main__":
    results = [measure_workers(), measure_coordinator()]
    sys.exit(0 if all(results) else 1)
