#!/usr/bin/python3
"""Measures small requests: latency alone, rate with several in flight, and the processor time of coordinator and worker
per request. With several builds, rounds alternate between them, and the table ends with ratios to the first:

  tests/bench/small_requests.py [--bin=DIR]... [--tokens=16] [--in_flight=8] [--rounds=5] [--seconds=1]

DIR is a bazel-bin folder, this tree's unless given, or a folder with the three programs. Each build gets its own
coordinator and one CPU worker with one thread. Bazel targets needed: //server:ringattn-server //worker:ringattn-worker
//client:ringattn.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "e2e/support"))

import cluster  # noqa: E402

COLUMNS = ("p50_ms", "p99_ms", "per_second", "coordinator_ms", "worker_ms")


def program(build, name):
    """The path of a program in a bazel-bin folder or a flat one."""
    nested = build / {"ringattn-server": "server", "ringattn-worker": "worker", "ringattn": "client"}[name] / name
    return nested if nested.exists() else build / name


def processor_seconds(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(build, directory):
    cluster.SERVER = program(build, "ringattn-server")
    cluster.WORKER = program(build, "ringattn-worker")
    return cluster.Cluster(directory, workers=1)


def load(ring, client, options, in_flight):
    """One level of `ringattn bench`, which verifies the first result; its figures."""
    done = subprocess.run(
        [client, "bench", f"--server={ring.address}", f"--seq_len={options.tokens}", "--transport=relay", "--json",
         f"--concurrency_range={in_flight}:{in_flight}", f"--measurement_interval={1000 * options.seconds}",
         "--max_trials=1"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["load"]["levels"][0]


def ended_requests(ring):
    with urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("ringattn_requests_total"))


def measure(ring, client, options):
    alone = load(ring, client, options, 1)["latency_seconds"]
    processes = {"coordinator_ms": ring.server, "worker_ms": ring.workers[0]}
    before = {name: processor_seconds(process) for name, process in processes.items()}
    calls = -ended_requests(ring)
    level = load(ring, client, options, options.in_flight)
    calls += ended_requests(ring)
    row = {"p50_ms": 1000 * alone["p50"], "p99_ms": 1000 * alone["p99"],
           "per_second": level["calls_per_second"]["value"]}
    for name, process in processes.items():
        row[name] = 1000 * (processor_seconds(process) - before[name]) / calls
    return row


def print_table(builds, rows, columns):
    """Prints the medians of each build's rounds, and the medians of their ratios to those of the first."""
    print("build," + ",".join(columns))
    for build, measured in zip(builds, rows):
        figures = [statistics.median(row[column] for row in measured) for column in columns]
        print(f"{build}," + ",".join(f"{figure:.3f}" for figure in figures))
    for build, measured in zip(builds[1:], rows[1:]):
        ratios = [statistics.median(row[column] / first[column] for row, first in zip(measured, rows[0]))
                  for column in columns]
        print(f"{build} / {builds[0]}," + ",".join(f"{ratio:.3f}" for ratio in ratios))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", action="append", type=pathlib.Path)
    for name, default in (("tokens", 16), ("in_flight", 8), ("rounds", 5), ("seconds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    builds = options.bin or [cluster.BIN]
    rows = [[] for _ in builds]
    with contextlib.ExitStack() as stack:
        rings = []
        for build in builds:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            rings.append(start(build, directory))
            stack.callback(rings[-1].close)
        for _ in range(options.rounds):
            for build, ring, measured in zip(builds, rings, rows):
                measured.append(measure(ring, program(build, "ringattn"), options))
    print_table(builds, rows, COLUMNS)


if __name__ == "__main__":
    main()
