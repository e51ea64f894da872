#!/usr/bin/env python3
"""How fast tensors' bytes get to all GPUs at once and back without any other work: the lower bound
of the cost of transfers. --memory=host: pinned host memory; device: one GPU's memory, copied to
every GPU, itself included. Prints {"memory", "gpus", "up_bytes_per_second",
"down_bytes_per_second"}, to the GPUs and back, sums over them, medians of several rounds.

  copy_bound.py [--memory=host|device] [--gpus=N] [--source=GPU] [--bytes=PER_GPU] [--rounds=N]
"""
import argparse
import json
import statistics
import threading
import time

import torch


def seconds_together(copies):
    """All of [(device, target, source)] at once; from the first one's begin to the last one's end."""
    barrier = threading.Barrier(len(copies) + 1)

    def run(device, target, source):
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            barrier.wait()
            target.copy_(source, non_blocking=True)
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


def clients_memory(args):
    if args.memory == "host":
        return torch.ones(args.bytes, dtype=torch.uint8, pin_memory=True)
    return torch.ones(args.bytes, dtype=torch.uint8, device=f"cuda:{args.source}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", choices=("host", "device"), default="host")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--source", type=int, default=0, help="the GPU of --memory=device")
    parser.add_argument("--bytes", type=int, default=1 << 29)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    pairs = [(gpu, clients_memory(args),
              torch.empty(args.bytes, dtype=torch.uint8, device=f"cuda:{gpu}"))
             for gpu in range(args.gpus)]
    result = {"memory": args.memory, "gpus": args.gpus}
    for name, copies in (("up", [(gpu, device, theirs) for gpu, theirs, device in pairs]),
                         ("down", pairs)):
        times = [seconds_together(copies) for _ in range(args.rounds + 1)]
        result[f"{name}_bytes_per_second"] = args.gpus * args.bytes / statistics.median(times[1:])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
