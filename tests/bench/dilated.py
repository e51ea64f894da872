#!/usr/bin/env python3
"""Compares dilated levels with packed attention of the same pairs, on CPU workers: medians of interleaved rounds.

A level of segments w at rate r is as many documents of w / r tokens as there are segments; several levels are the
documents of all of them. `ringattn bench` verifies each request against fp64 rows before it is timed. The comparison is
of the service's compute stage (gathers, kernels, exchanges and merges), because the packed request has fewer tokens to
move: a dilated one has all n, of which a level at rate r computes n / r for each head. The output also has the time of
the whole call and the fastest rounds, because the machine may be shared.

  tests/bench/dilated.py [--tokens=8192] [--rounds=5] [--thin] [--base=BIN]   exits 1 beyond 1.3

--thin: levels that are alone and select few tokens. --base: another build's binaries (as bazel-bin has them), whose
dilated request is a third in every round.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e/support"))

import cluster  # noqa: E402
from cluster import Cluster  # noqa: E402

GOAL = 1.3

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=8192)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--head_dim", type=int, default=64)
parser.add_argument("--dtype", default="bf16")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--thin", action="store_true")
parser.add_argument("--base", type=pathlib.Path)
flags = parser.parse_args()
n = flags.tokens

CASES = {
    "one level, w = n/4, r = 1": [(n // 4, 1)],
    "one level, w = n/4, r = 4": [(n // 4, 4)],
    "one level, w = n, r = 8": [(n, 8)],
    "three levels, n/16:1, n/4:4, n:16": [(n // 16, 1), (n // 4, 4), (n, 16)],
}


if flags.thin:
    CASES = {name: levels for name, levels in CASES.items() if len(levels) == 1 and levels[0][1] > 1}


def bench(ring, cli, backward, *options):
    command = [cli, "bench", f"--server={ring.address}", "--json", "--runs=3", "--rows=8", f"--heads={flags.heads}",
               f"--head_dim={flags.head_dim}", f"--dtype={flags.dtype}", f"--world_size={flags.workers}",
               *(["--schedule=ring"] if flags.workers > 1 else []), "--transport=relay", *options]
    done = subprocess.run([*command, *(["--backward"] if backward else [])], capture_output=True, text=True)
    result = json.loads(done.stdout)
    if done.returncode != 0:
        sys.exit(f"{command}: {done.stdout}{done.stderr}")
    return result["stage_seconds"]["compute"], result["seconds"]["median"]


def documents(levels):
    return ",".join(",".join([str(w // r)] * (n // w)) for w, r in levels)


def start(directory, binaries):
    """A ring of that build's processes and its command line."""
    cluster.SERVER = binaries / "server/ringattn-server"
    cluster.WORKER = binaries / "worker/ringattn-worker"
    (directory := pathlib.Path(directory) / str(len(list(pathlib.Path(directory).iterdir())))).mkdir()
    return Cluster(directory, workers=flags.workers), binaries / "client/ringattn"


def report(name, backward, dilated, packed):
    """One line of a build's rounds; the median of their ratios."""
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(dilated, packed)]
    median = lambda times, part: 1e3 * statistics.median(time[part] for time in times)
    ratio = statistics.median(ratios)
    quickest = [1e3 * min(time[0] for time in times) for times in (dilated, packed)]
    print(f"{name:<34} {'backward' if backward else 'forward':<8} compute {median(dilated, 0):7.1f} / "
          f"{median(packed, 0):7.1f} = {ratio:4.2f} ({min(ratios):4.2f} to {max(ratios):4.2f}), "
          f"quickest {quickest[0]:6.1f} / {quickest[1]:6.1f} = {quickest[0] / quickest[1]:4.2f}   "
          f"call {median(dilated, 1):7.1f} / {median(packed, 1):7.1f}", flush=True)
    return ratio


with tempfile.TemporaryDirectory() as directory:
    builds = {"": start(directory, cluster.BIN)}
    good = True
    try:
        if flags.base:
            builds["base: "] = start(directory, flags.base)
        print(f"{n} tokens, {flags.heads} heads of {flags.head_dim}, {flags.dtype}, full attention, "
              f"{flags.workers} workers; ms, dilated / packed, medians of {flags.rounds} rounds")
        for name, levels in CASES.items():
            dilation = ",".join(f"{w}:{r}" for w, r in levels)
            for backward in (False, True):
                turns = {build: lambda ring=ring, cli=cli: bench(ring, cli, backward, f"--seq_len={n}",
                                                                 f"--dilation={dilation}", "--layout=contiguous")
                         for build, (ring, cli) in builds.items()}
                turns["packed"] = lambda: bench(*builds[""], backward, f"--documents={documents(levels)}")
                times = {which: [] for which in turns}
                for number in range(flags.rounds):
                    # The order alternates between rounds.
                    for which in list(turns)[::1 if number % 2 else -1]:
                        times[which].append(turns[which]())
                for build in builds:
                    ratio = report(build + name, backward, times[build], times["packed"])
                    good &= ratio <= GOAL or build != ""
    finally:
        for ring, _ in builds.values():
            ring.close()
sys.exit(0 if good else 1)
