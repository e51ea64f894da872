#!/usr/bin/env python3
"""How fast one GPU's memory is copied to all GPUs at once, itself included, and back: the bound of what
tensors in a client's CUDA memory cost beside computing. Prints {"gpus", "out_bytes_per_second",
"in_bytes_per_second"}, sums over the GPUs, medians of several rounds.

  device_copy_bound.py [--gpus=N] [--source=INDEX] [--bytes=PER_GPU] [--rounds=N]
"""
import argparse
import json
import statistics

import torch

from copy_bound import seconds_together


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--source", type=int, default=0)
    parser.add_argument("--bytes", type=int, default=1 << 29)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    pairs = []
    for index in range(args.gpus):
        source = torch.ones(args.bytes, dtype=torch.uint8, device=f"cuda:{args.source}")
        pairs.append((index, source, torch.empty(args.bytes, dtype=torch.uint8,
                                                 device=f"cuda:{index}")))
    result = {"gpus": args.gpus}
    for name, inwards in (("out", False), ("in", True)):
        times = []
        for _ in range(args.rounds + 1):
            times.append(seconds_together([
                (index, (lambda s=source, d=device: s.copy_(d, non_blocking=True)) if inwards
                 else (lambda s=source, d=device: d.copy_(s, non_blocking=True)))
                for index, source, device in pairs]))
        result[f"{name}_bytes_per_second"] = args.gpus * args.bytes / statistics.median(times[1:])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
