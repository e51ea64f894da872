#!/usr/bin/env python3
"""Measures Python's overhead on a call over host memory: the package's calls and the C++ client's alternate, each on
tensors in a separate region.

  python_call.py --server=127.0.0.1:7700 --helper=bazel-bin/tests/bench/region_calls [--tokens=65536] [--rounds=15]

Needs the package installed. The request hardly computes (each query sees its own key), so that the payload dominates.
The target ratio is 1.05.
"""
import argparse
import json
import statistics
import subprocess
import time

import numpy as np

import ringattn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--server", required=True)
parser.add_argument("--helper", required=True)
parser.add_argument("--tokens", type=int, default=65536)
parser.add_argument("--heads", type=int, default=32)
parser.add_argument("--kv_heads", type=int, default=8)
parser.add_argument("--dim", type=int, default=128)
parser.add_argument("--rounds", type=int, default=15)
flags = parser.parse_args()

helper = subprocess.Popen(
    [flags.helper, *(f"--{name}={getattr(flags, name)}" for name in ("server", "tokens", "heads", "kv_heads", "dim"))],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert helper.stdout.readline() == "ready\n"


def by_cpp():
    helper.stdin.write("\n")
    helper.stdin.flush()
    return float(helper.stdout.readline())


with ringattn.connect(flags.server) as client:
    heads = {"q": flags.heads, "k": flags.kv_heads, "v": flags.kv_heads}
    q, k, v = (client.empty((1, flags.tokens, heads[name], flags.dim), "float16") for name in "qkv")
    for tensor in (q, k, v):
        tensor[:] = np.float16(1)

    def by_python():
        began = time.perf_counter()
        out, lse, report = client.forward(q, k, v, window=(0, 0), transport="host_memory")
        seconds = time.perf_counter() - began
        assert report.transport == "host_memory" and report.staged_bytes == 0 and out[0, -1, 0, 0] == 1
        return seconds

    cpp, python = [], []
    for measured in range(-2, flags.rounds):
        # The order alternates between rounds.
        pair = [(cpp, by_cpp), (python, by_python)]
        for seconds, call in pair if measured % 2 else reversed(pair):
            value = call()
            if measured >= 0:
                seconds.append(value)
    helper.stdin.close()
    helper.wait()
    print(json.dumps({
        "tokens": flags.tokens, "rounds": flags.rounds, "cpp_seconds": statistics.median(cpp),
        "python_seconds": statistics.median(python),
        "ratio": statistics.median(python) / statistics.median(cpp),
        "median_of_ratios": statistics.median(p / c for p, c in zip(python, cpp)),
        "ratios": [round(p / c, 3) for p, c in sorted(zip(python, cpp), key=lambda pair: pair[0] / pair[1])]}))
