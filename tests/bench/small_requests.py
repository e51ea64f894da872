#!/usr/bin/env python3
"""Measures small requests on one worker: latency, rate and processor time per request, by requests in flight.

With several builds, rounds alternate between them, and the table ends with ratios to the first:

  tests/bench/small_requests.py [--bin_dir=DIR]... [--in_flight=1,8,64] [--rounds=3] [--seconds=2] [--cpu]
                                [--conditions=default,processors=4,awake] [--round_trip=PROGRAM]

Each build is measured under each condition. `processors=N` binds the coordinator to N processors. `awake` keeps all
processors of this process busy with loops of idle priority, so that no wake-up waits for a halted one. PROGRAM is
//tests/bench:grpc_round_trip: each round also measures an empty gRPC call, and the table has the latency of each build over
it. DIR is a folder with ringattn, ringattn-server and ringattn-worker, or a bazel-bin folder, which is this tree's unless
given. Bazel targets needed: //server:ringattn-server //worker:ringattn-worker //client:ringattn.
Needs no packages. `ringattn bench` verifies the first result of each level. Prints CSV: medians of the rounds, and medians
of the ratios of paired rounds.
"""
import argparse
import contextlib
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from urllib.request import urlopen

BAZEL_BIN = pathlib.Path(__file__).resolve().parents[2] / "bazel-bin"
COLUMNS = ("p50_ms", "p99_ms", "per_second", "coordinator_ms", "worker_ms", "client_ms")


def program(build, name):
    """The path of a program in a bazel-bin folder or a flat one."""
    nested = build / {"ringattn-server": "server", "ringattn-worker": "worker", "ringattn": "client"}[name] / name
    path = nested if nested.exists() else build / name
    if not path.exists():
        sys.exit(f"{build} has no {name}; build it, or name a folder that has it")
    return path


def start(args, build, port, state):
    """Returns the process ids of coordinator and worker."""
    programs = {"coordinator_ms": program(build, "ringattn-server"), "worker_ms": program(build, "ringattn-worker")}
    # Other services of the same programs may be running or still be ending.
    known = {name: processes_of(path) for name, path in programs.items()}
    up = subprocess.run(
        [program(build, "ringattn"), "up", "--detach", f"--state_dir={state}", f"--bin_dir={build}", "--workers=1",
         f"--device={'cpu' if args.cpu else 'cuda'}", f"--port={port}", f"--metrics_port={port + 1}"],
        stdout=subprocess.DEVNULL)
    if up.returncode != 0:
        sys.exit(f"{program(build, 'ringattn')} up failed ({up.returncode})")
    processes = {}
    for name, path in programs.items():
        new = processes_of(path) - known[name]
        if len(new) != 1:
            sys.exit(f"{len(new)} new processes run {path} instead of one; name a folder with the program itself or a link")
        processes[name] = new.pop()
    return processes


def processes_of(path):
    """Returns the ids of the processes that run the program, which may be a link."""
    ids = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.path.samefile(process / "exe", path):
                ids.add(int(process.name))
    return ids


def processor_seconds(process):
    fields = pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ended_requests(metrics_address):
    text = urlopen(f"http://{metrics_address}/metrics", timeout=10).read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
               if line.startswith("ringattn_requests_total"))


def measure(args, build, port, processes, in_flight):
    metrics = f"127.0.0.1:{port + 1}"
    before = {name: processor_seconds(process) for name, process in processes.items()}
    calls = -ended_requests(metrics)
    own = os.times()
    done = subprocess.run(
        [program(build, "ringattn"), "bench", f"--server=127.0.0.1:{port}", f"--seq_len={args.tokens}", "--transport=relay",
         f"--concurrency_range={in_flight}:{in_flight}", f"--measurement_interval={int(1000 * args.seconds)}",
         "--max_trials=1", "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"bench failed ({done.returncode}): {done.stdout}")
    level = json.loads(done.stdout)["load"]["levels"][0]
    calls += ended_requests(metrics)
    row = {"p50_ms": 1e3 * level["latency_seconds"]["p50"], "p99_ms": 1e3 * level["latency_seconds"]["p99"],
           "per_second": level["calls_per_second"]["value"]}
    for name, process in processes.items():
        row[name] = 1e3 * (processor_seconds(process) - before[name]) / calls
    now = os.times()
    row["client_ms"] = 1e3 * (now.children_user + now.children_system
                              - own.children_user - own.children_system) / calls
    return row


@contextlib.contextmanager
def condition(name, coordinator):
    """Applies a condition while measurements run."""
    processors = sorted(os.sched_getaffinity(0))
    loops = []
    kind, _, count = name.partition("=")
    if kind == "processors":
        bind(coordinator, processors[:int(count)])
    elif kind == "awake":
        loop = ["chrt", "--idle", "0", "sh", "-c", "while :; do :; done"]
        loops = [subprocess.Popen(["taskset", "-c", str(processor), *loop]) for processor in processors]
    try:
        yield
    finally:
        bind(coordinator, processors)
        for loop in loops:
            loop.kill()
            loop.wait()


def bind(process, processors):
    subprocess.run(["taskset", "-a", "-p", "-c", ",".join(map(str, processors)), str(process)], check=True,
                   stdout=subprocess.DEVNULL)


def print_row(name, in_flight, figures):
    print(f"{name},{in_flight}," + ",".join(f"{figure:.3f}" for figure in figures), flush=True)


def empty_call(program):
    """Milliseconds of an empty gRPC call between two processes."""
    done = subprocess.run([program, "--trips=3000"], stdout=subprocess.PIPE, text=True, check=True)
    call = json.loads(done.stdout)["call"]
    return call["p50_ms"], call["p99_ms"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin_dir", type=pathlib.Path, action="append")
    parser.add_argument("--in_flight", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--conditions", default="default")
    parser.add_argument("--port", type=int, default=17800)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--round_trip", type=pathlib.Path)
    args = parser.parse_args()
    builds = [bin_dir.absolute() for bin_dir in args.bin_dir or [BAZEL_BIN]]
    levels = [int(level) for level in args.in_flight.split(",")]
    names = args.conditions.split(",")
    for name in names:
        if not re.fullmatch(r"default|awake|processors=[1-9]\d*", name):
            parser.error(f"--conditions: {name} is none of default, processors=N, awake")
    for build, name in itertools.product(builds, ("ringattn", "ringattn-server", "ringattn-worker")):
        program(build, name)
    variants = list(itertools.product(builds, names))
    rows = {(variant, level): [] for variant in variants for level in levels}
    empty_calls = []
    with contextlib.ExitStack() as stack:
        services = {}
        for index, build in enumerate(builds):
            state = stack.enter_context(tempfile.TemporaryDirectory())
            port = args.port + 10 * index
            services[build] = port, start(args, build, port, state)
            stack.callback(subprocess.run, [program(build, "ringattn"), "down", f"--state_dir={state}"],
                           stdout=subprocess.DEVNULL)
        for _ in range(args.rounds):
            if args.round_trip:
                empty_calls.append(empty_call(args.round_trip.absolute()))
            for level in levels:
                for variant in variants:
                    build, name = variant
                    port, processes = services[build]
                    with condition(name, processes["coordinator_ms"]):
                        rows[variant, level].append(measure(args, build, port, processes, level))
    print("build,condition,in_flight," + ",".join(COLUMNS))
    for (variant, level), measured in rows.items():
        print_row(",".join(map(str, variant)), level,
                  [statistics.median(row[column] for row in measured) for column in COLUMNS])
    first = variants[0]
    for variant in variants[1:]:
        for level in levels:
            pairs = list(zip(rows[variant, level], rows[first, level]))
            print_row(",".join(f"{own} / {other}" for own, other in zip(variant, first)), level,
                      [statistics.median(row[column] / other[column] for row, other in pairs) for column in COLUMNS])
    if args.round_trip:
        print_row("an empty call,", 1, map(statistics.median, zip(*empty_calls)))
    for (variant, level), measured in rows.items() if args.round_trip else ():
        ratios = [(row["p50_ms"] / p50, row["p99_ms"] / p99) for row, (p50, p99) in zip(measured, empty_calls)]
        print_row(",".join(map(str, variant)) + " / an empty call", level, map(statistics.median, zip(*ratios)))


if __name__ == "__main__":
    main()
