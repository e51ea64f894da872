#!/usr/bin/env python3
"""Measures calls over host and CUDA memory on one worker: the median of equal calls in a row with its stages, and the
latencies of a closed loop. `ringattn bench` verifies its first call. With several builds, rounds alternate between them,
and the table ends with ratios of the medians to the first build:

  tests/bench/memory_calls.py --bin=DIR [--bin=DIR]... [--device=cpu|cuda] [--tokens=16,1024,4096] [--rounds=3]

DIR is a folder with ringattn, ringattn-server and ringattn-worker. Prints one JSON object per measurement, then the table.
Needs Python's standard library only. `overhead_ms` is a call less its kernels; `elsewhere` of the stages is the time
outside of the coordinator; `inline` divides the time between coordinator and worker (docs/cli-json.md).
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile


@contextlib.contextmanager
def service(build, options, port):
    with tempfile.TemporaryDirectory() as state:
        subprocess.run(
            [build / "ringattn", "up", "--detach", f"--state_dir={state}", f"--bin_dir={build}", "--workers=1",
             f"--device={options.device}", f"--port={port}", f"--metrics_port={port + 1}",
             *(["--local_memory=cuda_memory"] if options.device == "cuda" else [])], check=True,
            stdout=subprocess.DEVNULL)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            subprocess.run([build / "ringattn", "down", f"--state_dir={state}"], check=True, stdout=subprocess.DEVNULL)


def bench(build, server, flags):
    done = subprocess.run([build / "ringattn", "bench", f"--server={server}", "--json", *flags], capture_output=True,
                          text=True, timeout=300)
    if done.returncode != 0:
        sys.exit(f"{build}: {' '.join(flags)}: {done.returncode}: {done.stdout} {done.stderr}")
    return json.loads(done.stdout)


def measure(build, server, case, options):
    flags = [f"--seq_len={case['tokens']}", f"--heads={case['heads']}", f"--kv_heads={case['kv_heads']}",
             f"--head_dim={options.head_dim}", "--causal", f"--transport={case['transport']}",
             *(["--backward"] if case["backward"] else [])]
    row = bench(build, server, [*flags, f"--runs={options.calls}"])
    ms = {name: round(1e3 * value, 4) for name, value in row["stage_seconds"].items()}
    inline = row.get("inline_seconds") or {}
    rank = row["last_run"]["ranks"][0]
    median = 1e3 * row["seconds"]["median"]
    kernels = 1e3 * (inline.get("kernels") or rank["compute_seconds"])
    result = {"median_ms": round(median, 4), "kernels_ms": round(kernels, 4), "overhead_ms": round(median - kernels, 4),
              "stages_ms": ms, "inline_ms": {name: round(1e3 * value, 4) for name, value in inline.items()},
              "bytes": row["last_run"]["bytes"]}
    if options.seconds > 0:
        load = bench(build, server, [*flags, "--concurrency_range=1:1", "--stability_percentage=100", "--max_trials=3",
                                     f"--measurement_interval={max(200, int(333 * options.seconds))}"])
        latency = load["load"]["levels"][0]["latency_seconds"]
        result.update({f"{name}_ms": round(1e3 * latency[name], 4) for name in ("p50", "p99")})
    return result


def cases(options):
    for transport in options.transports.split(","):
        for tokens in options.tokens.split(","):
            for heads in options.heads.split(","):
                for backward in (False, True):
                    query, key = (heads.split("/") * 2)[:2]
                    yield {"transport": transport, "tokens": int(tokens), "heads": int(query), "kv_heads": int(key),
                           "backward": backward}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", action="append", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--transports", default="host_memory")
    parser.add_argument("--tokens", default="16,1024,4096")
    parser.add_argument("--heads", default="1,32/8")
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1, help="of the closed loop; 0: none")
    parser.add_argument("--port", type=int, default=17700)
    options = parser.parse_args()
    rows = {}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(service(build, options, options.port + 10 * index))
                   for index, build in enumerate(options.bin)]
        for number in range(options.rounds):
            for case in cases(options):
                for build, server in zip(options.bin, servers):
                    row = measure(build, server, case, options)
                    rows.setdefault(tuple(case.items()), {}).setdefault(build, []).append(row)
                    print(json.dumps({"round": number, "build": str(build), **case, **row}), flush=True)
    columns = [name for name in ("median_ms", "kernels_ms", "overhead_ms", "p50_ms", "p99_ms")
               if name in next(iter(rows.values()))[options.bin[0]][0]]
    print("case,build," + ",".join(columns) + ",overhead ratio")
    for case, builds in rows.items():
        first = None
        for build, measured in builds.items():
            values = [statistics.median(row[name] for row in measured) for name in columns]
            overhead = values[columns.index("overhead_ms")]
            first = first or overhead
            print(" ".join(f"{name}={value}" for name, value in case), build, *(f"{value:.3f}" for value in values),
                  f"{overhead / first:.3f}", sep=",")


if __name__ == "__main__":
    main()
