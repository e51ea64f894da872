#!/usr/bin/env python3
"""Measures small requests next to large ones of the whole ring, with and without preemption, in one run.

Starts a ring per setting of --preempt_after and measures, with `ringattn bench`: the small requests alone, the
large ones alone, and both together. The bound of a small request is preempt_after + 2 times its time alone.

  small_next_to_large.py --bin_dir DIR [--workers N] [--large 65536] [--transport host_memory] [--seconds 10]
  small_next_to_large.py --bin_dir DIR --cpu        two CPU workers with smaller requests

DIR has ringattn, ringattn-server and ringattn-worker. Prints JSON; exits 1 if a result is wrong.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from urllib.request import urlopen

SMALL_TOKENS = 64
PREEMPT_AFTER = 0.005


def shape(tokens, args):
    return [f"--seq_len={tokens}", f"--heads={args.heads}", f"--kv_heads={args.kv_heads}", "--head_dim=128",
            "--causal"]


def start_bench(args, port, tokens, concurrency, seconds, *flags):
    window = max(1000, int(1000 * seconds / 3))
    return subprocess.Popen(
        [args.bin_dir / "ringattn", "bench", f"--server=127.0.0.1:{port}", *shape(tokens, args),
         f"--concurrency_range={concurrency}", f"--measurement_interval={window}", "--stability_percentage=100",
         "--max_trials=3", "--json", *flags], stdout=subprocess.PIPE, text=True)


def level_of(bench):
    """Returns rate and latencies of a bench that has been started."""
    out, _ = bench.communicate()
    if bench.returncode != 0:
        sys.exit(f"bench failed ({bench.returncode}): {out}")
    level = json.loads(out)["load"]["levels"][0]
    return {"calls_per_second": level["calls_per_second"]["value"],
            **{f"{name}_ms": round(1e3 * level["latency_seconds"][name], 3) for name in ("p50", "p99")}}


def counter(port, name):
    """Returns the sum over all workers of a metric, from the ports that the coordinator lists."""
    status = json.load(urlopen(f"http://127.0.0.1:{port}/status.json", timeout=10))
    total = 0.0
    for worker in status["workers"]:
        text = urlopen(f"http://{worker['metrics_address']}/metrics", timeout=10).read().decode()
        total += sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " "))
    return total


def measure(args, preempt_after):
    with tempfile.TemporaryDirectory() as state:
        ports = args.port, args.port + 1
        subprocess.run(
            [args.bin_dir / "ringattn", "up", "--detach", f"--state_dir={state}", f"--bin_dir={args.bin_dir}",
             f"--workers={args.workers}", f"--device={'cpu' if args.cpu else 'cuda'}", f"--port={ports[0]}",
             f"--metrics_port={ports[1]}", f"--server_flag=--preempt_after={preempt_after}"],
            check=True, stdout=subprocess.DEVNULL)
        try:
            ring = [f"--world_size={args.workers}", f"--transport={args.transport}"]
            alone = level_of(start_bench(args, ports[0], SMALL_TOKENS, 1, args.seconds))
            large_alone = level_of(start_bench(args, ports[0], args.large, args.in_flight, args.seconds, *ring))
            # The large requests begin first and end last.
            large = start_bench(args, ports[0], args.large, args.in_flight, 3 * args.seconds, *ring)
            time.sleep(args.seconds)
            beside = level_of(start_bench(args, ports[0], SMALL_TOKENS, 1, args.seconds))
            large_beside = level_of(large)
            return {
                "small_alone": alone, "small_beside": beside, "large_alone": large_alone,
                "large_beside": large_beside,
                "preemptions": counter(ports[1], "ringattn_worker_preemptions_total"),
                "paused_seconds": counter(ports[1], "ringattn_worker_paused_seconds_total"),
                "small_bound_ms": 1e3 * PREEMPT_AFTER + 2 * alone["p99_ms"],
                "large_throughput": large_beside["calls_per_second"] / large_alone["calls_per_second"]}
        finally:
            subprocess.run([args.bin_dir / "ringattn", "down", f"--state_dir={state}"], stdout=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin_dir", type=pathlib.Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--large", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--in_flight", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--transport", default="host_memory",
                        help="of the large requests; streams of gRPC also need most of 16 processors")
    parser.add_argument("--settings", default=f"{1e3 * PREEMPT_AFTER:g}ms,1h", help="of --preempt_after")
    parser.add_argument("--port", type=int, default=17700)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    args.bin_dir = args.bin_dir.resolve()
    if args.cpu:
        args.large, args.heads, args.kv_heads = 8192, 4, 2
    results = {after: measure(args, after) for after in args.settings.split(",")}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
