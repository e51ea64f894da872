#!/usr/bin/env python3
"""Dilated levels beside packed attention of the same pairs, on CPU workers: medians of interleaved rounds, in one run.

A level of segments w at rate r is as many documents of w / r tokens as there are segments; several levels are the
documents of all of them. `ringattn bench` verifies each request against fp64 rows before it is timed. What is compared
is the service's compute stage (gathers, kernels, exchanges and merges), as the packed request has fewer tokens to move:
a dilated one has all n, of which a level at rate r computes n / r for each head. The whole call is printed beside.

  tests/bench/dilated.py [--tokens=8192] [--rounds=5]   exits 1 beyond 1.3
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))

from cluster import CLI, Cluster  # noqa: E402

GOAL = 1.3

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=8192)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--head_dim", type=int, default=64)
parser.add_argument("--dtype", default="bf16")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
flags = parser.parse_args()
n = flags.tokens

CASES = {
    "one level, w = n/4, r = 1": [(n // 4, 1)],
    "one level, w = n/4, r = 4": [(n // 4, 4)],
    "one level, w = n, r = 8": [(n, 8)],
    "three levels, n/16:1, n/4:4, n:16": [(n // 16, 1), (n // 4, 4), (n, 16)],
}


def bench(ring, backward, *options):
    command = [CLI, "bench", f"--server={ring.address}", "--json", "--runs=3", "--rows=8", f"--heads={flags.heads}",
               f"--head_dim={flags.head_dim}", f"--dtype={flags.dtype}", f"--world_size={flags.workers}",
               *(["--schedule=ring"] if flags.workers > 1 else []), "--transport=relay", *options]
    done = subprocess.run([*command, *(["--backward"] if backward else [])], capture_output=True, text=True)
    result = json.loads(done.stdout)
    if done.returncode != 0:
        sys.exit(f"{command}: {done.stdout}{done.stderr}")
    return result["stage_seconds"]["compute"], result["seconds"]["median"]


def documents(levels):
    return ",".join(",".join([str(w // r)] * (n // w)) for w, r in levels)


with tempfile.TemporaryDirectory() as directory:
    ring = Cluster(directory, workers=flags.workers)
    good = True
    try:
        print(f"{n} tokens, {flags.heads} heads of {flags.head_dim}, {flags.dtype}, full attention, "
              f"{flags.workers} workers; ms, dilated / packed, medians of {flags.rounds} rounds")
        for name, levels in CASES.items():
            dilation = ",".join(f"{w}:{r}" for w, r in levels)
            for backward in (False, True):
                pairs = []
                for number in range(flags.rounds):
                    turns = [lambda: bench(ring, backward, f"--seq_len={n}", f"--dilation={dilation}",
                                           "--layout=contiguous"),
                             lambda: bench(ring, backward, f"--documents={documents(levels)}")]
                    # Whoever goes first goes second the next time.
                    order = (0, 1) if number % 2 else (1, 0)
                    times = {which: turns[which]() for which in order}
                    pairs.append((times[0], times[1]))
                ratios = [dilated[0] / packed[0] for dilated, packed in pairs]
                median = lambda side, part: 1e3 * statistics.median(pair[side][part] for pair in pairs)
                ratio = statistics.median(ratios)
                good &= ratio <= GOAL
                print(f"{name:<34} {'backward' if backward else 'forward':<8} compute {median(0, 0):7.1f} / "
                      f"{median(1, 0):7.1f} = {ratio:4.2f} ({min(ratios):4.2f} to {max(ratios):4.2f})   "
                      f"call {median(0, 1):7.1f} / {median(1, 1):7.1f}", flush=True)
    finally:
        ring.close()
sys.exit(0 if good else 1)
