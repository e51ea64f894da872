"""Many thousand calls, regions and residuals leave nothing behind: not here, not with the coordinator, not with workers.

A part in a default run; RINGATTN_PYTHON_LOAD=full: 100,000 calls, 10,000 regions, 10,000 residuals (half an hour).
"""
import gc
import os
import pathlib
import time

import numpy as np
import pytest
from conftest import wait_until

import ringattn

FULL = os.environ.get("RINGATTN_PYTHON_LOAD") == "full"
PAGE = os.sysconf("SC_PAGE_SIZE")


class Watched:
    """The resources that a process holds."""

    def __init__(self, pid):
        self.pid = pid

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def mappings(self):
        """Returns the bytes of memory shared between client and workers."""
        return pathlib.Path(f"/proc/{self.pid}/maps").read_text().count("memfd:ringattn-region")

    def threads(self):
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def private_bytes(self):
        if self.pid == os.getpid():
            gc.collect()
        resident, shared = pathlib.Path(f"/proc/{self.pid}/statm").read_text().split()[1:3]
        return (int(resident) - int(shared)) * PAGE


@pytest.fixture
def watched(service_pids):
    return [Watched(os.getpid()), *(Watched(pid) for pid in service_pids)]


def flat(watched, work, times, allowed_bytes, what, record_property, settle=gc.collect):
    """Runs `work(times)` after a tenth of it, and compares what everybody holds."""
    work(max(times // 10, 20))
    settle()
    before = [(w.descriptors(), w.mappings(), w.threads(), w.private_bytes()) for w in watched]
    began = time.monotonic()
    work(times)
    seconds = time.monotonic() - began
    settle()
    # gRPC creates threads and connections on demand, up to a bound that the number of calls does not affect.
    wait_until(lambda: all(w.descriptors() <= b[0] + 6 and w.mappings() <= b[1] and w.threads() <= b[2] + 16
                           for w, b in zip(watched, before)), 30,
               f"descriptors, mappings and threads as before: {before}")
    grown = [w.private_bytes() - b[3] for w, b in zip(watched, before)]
    figures = f"{times} {what} in {seconds:.0f} s; KiB grown: {[g // 1024 for g in grown]}"
    print(figures)
    record_property("figures", figures)
    assert all(g <= allowed_bytes for g in grown), figures


def test_small_calls(client, rng, watched, record_property):
    """By the relay, by host memory, staged."""
    q, k, v = (rng.standard_normal((1, 32, 2, 16), np.float32) for _ in range(3))
    shared = [client.empty(x.shape) for x in (q, k, v)]
    for ours, theirs in zip(shared, (q, k, v)):
        ours[:] = theirs
    expected = client.forward(q, k, v).out

    def work(times):
        for i in range(times):
            if i % 10 == 9:
                out = client.forward(*shared, transport="host_memory").out
            elif i % 100 == 50:
                out = client.forward(q, k, v, transport="host_memory").out
            else:
                out = client.forward(q, k, v).out
            if i % 500 < 10:
                assert (out == expected).all()

    times = 100_000 if FULL else 1000
    flat(watched, work, times, max(6 << 20, 100 * times), "small calls", record_property)


def test_regions(client, watched, record_property):
    """Regions attached by all workers and detached again, used or not."""
    def work(times):
        for i in range(times):
            region = client.region(1 << 16)
            assert len(region.workers) == 3
            if i % 10 == 0:
                q = region.empty((1, 16, 1, 8))
                q[:] = 1
                assert client.forward(q, q, q).report.transport == "host_memory"
                del q
            if i % 2:
                region.close()
            del region

    times = 10_000 if FULL else 100
    flat(watched, work, times, max(6 << 20, 400 * times), "regions attached and detached", record_property)
    own = len(client._arena._own)
    wait_until(lambda: all(w.mappings() <= own for w in watched[1:]), 20, "nothing mapped")


def test_residuals(client, rng, watched, record_property):
    """Kept, and then deleted, read, or left to their time."""
    q, k, v = (rng.standard_normal((1, 64, 2, 16), np.float32) for _ in range(3))

    def work(times):
        for i in range(times):
            out, _, report = client.forward(q, k, v, retain=1 if i % 3 == 0 else 60)
            assert report.residual is not None, report.residual_reason
            if i % 3 == 1:
                client.delete_residual(report.residual)
            elif i % 3 == 2 and FULL:
                client.backward(out, residual=report.residual)
            elif i % 3 == 2:
                client.delete_residual(report.residual.handle)

    def reserved():
        return sum(worker["reserved_bytes"] for worker in client.topology()["workers"])

    others = 0 if FULL else reserved()  # what other tests left for a minute

    def settle():
        # One that was read stays a minute, should its answer have been lost.
        wait_until(lambda: reserved() <= others, 100 if FULL else 20, "the workers' memory given back")

    # The coordinator remembers what became of the last 16,384 handles.
    times = 10_000 if FULL else 150
    flat(watched, work, times, max(6 << 20, 1024 * times), "retained forwards", record_property, settle)
