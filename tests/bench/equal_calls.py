#!/usr/bin/python3
"""Measures equal calls in a row over host memory: the shape of one layer of a training step, forward and backward. The
overhead of a call is its time, median over the calls from the second on, less the mean time of a run's kernels. With several
builds, rounds alternate between them, and the table ends with ratios to the first:

  tests/bench/equal_calls.py [--bin=DIR]... [--tokens=256] [--heads=4] [--calls=64] [--rounds=5]

DIR is a bazel-bin folder, this tree's unless given, or a folder with the three programs. Each build gets its own
coordinator and one CPU worker with one thread. Bazel targets needed: //server:ringattn-server //worker:ringattn-worker
//client:ringattn.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import tempfile
import urllib.request

from one_worker import start
from small_requests import BAZEL_BIN, ended_requests, processor_seconds, program

COLUMNS = ("forward_ms", "forward_overhead_ms", "backward_ms", "backward_overhead_ms", "coordinator_ms", "worker_ms")


def kernel_seconds(ring):
    """The sum of the times of the worker's kernels, and the number of its runs."""
    url = f"http://{ring.worker_ports(0)['metrics']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        values = dict(line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if not line.startswith("#"))
    return [float(values[f'ringattn_stage_duration_seconds_{part}{{stage="compute"}}']) for part in ("sum", "count")]


def calls(ring, client, options, backward):
    """`ringattn bench`, which verifies its first call and then repeats it. The median call and its overhead in ms."""
    before = kernel_seconds(ring)
    done = subprocess.run(
        [client, "bench", f"--server={ring.address}", f"--seq_len={options.tokens}", f"--heads={options.heads}",
         "--causal", "--transport=host_memory", f"--runs={options.calls}", "--json",
         *(["--backward"] if backward else [])], check=True, capture_output=True, text=True)
    seconds = json.loads(done.stdout)["seconds"]["median"]
    kernels, runs = (after - first for after, first in zip(kernel_seconds(ring), before))
    return 1000 * seconds, 1000 * (seconds - kernels / runs)


def measure(ring, client, options):
    processes = {"coordinator_ms": ring.server, "worker_ms": ring.workers[0]}
    before = {name: processor_seconds(process.pid) for name, process in processes.items()}
    ended = -ended_requests(ring.ports["metrics"])
    row = {}
    for backward, direction in ((False, "forward"), (True, "backward")):
        row[f"{direction}_ms"], row[f"{direction}_overhead_ms"] = calls(ring, client, options, backward)
    ended += ended_requests(ring.ports["metrics"])
    for name, process in processes.items():
        row[name] = 1000 * (processor_seconds(process.pid) - before[name]) / ended
    return row


def print_table(builds, rows):
    """Prints the medians of each build's rounds, and the medians of their ratios to those of the first."""
    print("build," + ",".join(COLUMNS))
    for build, measured in zip(builds, rows):
        figures = [statistics.median(row[column] for row in measured) for column in COLUMNS]
        print(f"{build}," + ",".join(f"{figure:.3f}" for figure in figures))
    for build, measured in zip(builds[1:], rows[1:]):
        ratios = [statistics.median(row[column] / first[column] for row, first in zip(measured, rows[0]))
                  for column in COLUMNS]
        print(f"{build} / {builds[0]}," + ",".join(f"{ratio:.3f}" for ratio in ratios))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", action="append", type=pathlib.Path)
    for name, default in (("tokens", 256), ("heads", 4), ("calls", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    builds = options.bin or [BAZEL_BIN]
    rows = [[] for _ in builds]
    with contextlib.ExitStack() as stack:
        rings = []
        for build in builds:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            rings.append(start(build, directory,
                               ["--local_memory=host_memory", f"--local_socket_dir={directory}"]))
            stack.callback(rings[-1].close)
        for _ in range(options.rounds):
            for build, ring, measured in zip(builds, rings, rows):
                measured.append(measure(ring, program(build, "ringattn"), options))
    print_table(builds, rows)


if __name__ == "__main__":
    main()
