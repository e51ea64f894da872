"""Memory that requests take from workers, read from the processes (Linux)."""

import pathlib
import statistics
import time

import numpy as np

from attention import run

# What gRPC reads into and malloc does not give back stays with a process. Each of its first requests finds
# some of it in use and adds to it; after some five there is enough.
WARM_UPS, REQUESTS = 6, 3
# So much it is at most, of a worker however large its requests, with code and the kernels' scratch, which its
# first request touches.
KEPT_BYTES = 20e6


def status_bytes(pid, field):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def inputs_of(sq, sk, heads, dim):
    # Not zeros, but cheap: memory is measured here, not values.
    fill = lambda rows: np.linspace(-1, 1, rows * heads * dim, dtype=np.float32).reshape(
        1, rows, heads, dim)
    return dict(q=fill(sq), k=fill(sk), v=fill(sk), dout=fill(sq))


def idle_bytes(ring):
    """By worker, resident bytes once they stand still: a worker keeps released memory for a second."""
    now = lambda: [status_bytes(worker.pid, "VmRSS") for worker in ring.workers.values()]
    resident, since = now(), time.monotonic()
    while time.monotonic() - since < 1.5:
        time.sleep(0.1)
        if (changed := now()) != resident:
            resident, since = changed, time.monotonic()
    return resident


def peak_growth(ring, inputs, **options):
    """Bytes above idle at the peak of one request: (worst worker, predicted)."""
    idle = idle_bytes(ring)
    pids = [worker.pid for worker in ring.workers.values()]
    for pid in pids:
        pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")
    result = run(ring.attention, inputs, timeout=600, **options)
    growth = [status_bytes(pid, "VmHWM") - base for pid, base in zip(pids, idle)]
    predicted = [rank.buffer_bytes for rank in result.accepted.plan.ranks]
    return max(growth), max(predicted)


def warm_up(ring, inputs, **options):
    for _ in range(WARM_UPS):
        run(ring.attention, inputs, timeout=600, **options)


def typical_growth(ring, inputs, **options):
    """peak_growth, medians of some requests."""
    return [statistics.median(column)
            for column in zip(*(peak_growth(ring, inputs, **options) for _ in range(REQUESTS)))]


def kept_bytes(ring, start):
    """Returns the largest growth of an idle worker's memory over its idle_bytes at the start."""
    return max(now - before for now, before in zip(idle_bytes(ring), start))
