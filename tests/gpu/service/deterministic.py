"""Deterministic passes: the same bits in every run, under load, and on rings that were formed again."""

import os
import signal
import subprocess
import threading

from calls import call, plan_flags, verify
from faults import digest
from harness import check
from inputs import Shape

RINGS, RUNS_OF_A_RING = 5, 4


class Load:
    """Forward passes of another client, one after the other, for as long as the block lasts: they alternate with
    the measured calls, and their uploads and downloads overlap the measured kernels."""

    def __init__(self, ring, source, output, options):
        self.command = [str(word) for word in (
            ring.cli, "forward", f"--server={ring.address}", f"--input={source}", f"--output={output}",
            "--deadline=60s", *options)]
        self.ended, self.served, self.thread = threading.Event(), 0, None

    def _run(self):
        while not self.ended.is_set():
            # Some fail: their ring is taken away below.
            done = subprocess.run(self.command, capture_output=True, check=False)
            self.served += done.returncode == 0

    def __enter__(self):
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


def part(session):
    """Every ring but the first comes after a killed worker. A run is a forward and a backward that recomputes it; the
    first one is judged."""
    def run(result):
        harness, ring = session.harness, session.ring
        ring.ensure()
        profile = session.profile
        shape = Shape(**profile["shape"], seq_len=profile["lengths"]["16k"])
        source, output = session.view(shape, True), session.output("deterministic")
        # Generated apart: a view lasts until the next one.
        small, load = profile["smoke"], session.output("load-inputs")
        harness.run_ok([ring.cli, "generate", f"--output={load}", "--seed=5",
                        *(f"--{name}={value}" for name, value in small.items())])
        options = ["--causal", "--deterministic", *plan_flags(ring.workers)]
        forward = session.output("deterministic-forward")
        bits, served, generations = [], 0, []
        for number in range(RINGS):
            if number > 0:
                os.kill(ring.pids()["worker-0"], signal.SIGKILL)
                ring.wait_members(ring.workers, seconds=30, after_generation=generations[-1])
            generations.append(ring.state()[2])
            with Load(ring, load, session.output("load"),
                      ["--causal", *plan_flags(ring.workers)]) as beside:
                for _ in range(RUNS_OF_A_RING):
                    call(harness, ring, "forward", source, forward, options)
                    call(harness, ring, "backward", source, output, options)
                    bits.append((digest(forward), digest(output)))
                    if len(bits) == 1:
                        verify(harness, ring, source, forward, ["--causal"], 8)
                        # dk and dv are judged with the forward's help.
                        verify(harness, ring, source, output, ["--causal"], 8, forward)
            served += beside.served
        result["deterministic"] = {"tokens": shape.seq_len, "runs": len(bits), "rings": len(set(generations)),
                                   "different_results": len(set(bits)), "requests_beside": served}
        check(len(set(generations)) == RINGS, f"rings of the generations {generations}")
        check(served >= RINGS, f"{served} requests were served meanwhile")
        check(len(set(bits)) == 1, f"{len(set(bits))} different results of {len(bits)} runs")
    return run
