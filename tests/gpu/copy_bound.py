#!/usr/bin/env python3
"""How fast pinned host memory is copied to and from all GPUs at once: the bound of what tensors in
host memory cost beside computing. Prints {"gpus", "h2d_bytes_per_second", "d2h_bytes_per_second"},
sums over the GPUs, medians of several rounds.

  copy_bound.py [--gpus=N] [--bytes=PER_GPU] [--rounds=N]
"""
import argparse
import json
import statistics
import threading
import time

import torch


def seconds_together(copies):
    """All of [(device, copy)] at once; from the first one's begin to the last one's end."""
    barrier = threading.Barrier(len(copies) + 1)

    def run(device, copy):
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            barrier.wait()
            copy()
            torch.cuda.synchronize()
            barrier.wait()

    threads = [threading.Thread(target=run, args=line) for line in copies]
    for thread in threads:
        thread.start()
    barrier.wait()
    begin = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - begin
    for thread in threads:
        thread.join()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    pairs = []
    for index in range(args.gpus):
        host = torch.ones(args.bytes, dtype=torch.uint8, pin_memory=True)
        pairs.append((index, host, torch.empty_like(host, device=f"cuda:{index}")))
    result = {"gpus": args.gpus}
    for name, downwards in (("h2d", False), ("d2h", True)):
        times = []
        for _ in range(args.rounds + 1):
            times.append(seconds_together([
                (index, (lambda h=host, d=device: h.copy_(d, non_blocking=True)) if downwards
                 else (lambda h=host, d=device: d.copy_(h, non_blocking=True)))
                for index, host, device in pairs]))
        result[f"{name}_bytes_per_second"] = args.gpus * args.bytes / statistics.median(times[1:])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
