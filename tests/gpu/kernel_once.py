#!/usr/bin/env python3
"""One call of a kernel between profiler.start and stop, with what it needs done before: for ncu.

  ncu --profile-from-start off --clock-control none --set full --section SourceCounters -o REPORT \\
      kernel_once.py --library libringattn_kernels.so [--terms dropout,mask] [--direction backward]
      [--dim 128] [--length 8192] [--heads 32/8] [--decode]
  ncu --import REPORT.ncu-rep --page source --csv        instructions with what their warps waited for

Causal, bf16. --decode: one query token and --length keys.
"""
import argparse

import kernel_speed
import term_rows
import torch


def prepare(args):
    build = kernel_speed.load(args.library)
    heads, kv_heads = map(int, args.heads.split("/"))
    if args.decode:
        make = lambda rows, count: torch.randn(1, rows, count, args.dim, device="cuda", dtype=torch.bfloat16)
        tensors = (make(1, heads), make(args.length, kv_heads), make(args.length, kv_heads), make(1, heads))
        return kernel_speed.Ours(build, "bf16", *tensors, True)
    problem = term_rows.Problem(args.length, args.dim, heads, kv_heads, torch.bfloat16)
    if not args.terms:
        return kernel_speed.Ours(build, "bf16", *problem.tensors, True)
    return term_rows.Ours(build, "bf16", problem.tensors, problem.terms(set(args.terms.split(","))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--terms", default="", help="of term_rows.py, those that meet")
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--decode", action="store_true")
    args = parser.parse_args()
    if args.decode and (args.terms or args.direction == "backward"):
        parser.error("--decode is a plain forward")
    call = prepare(args)
    for _ in range(3):
        call.forward()
    if args.direction == "backward":
        call.backward()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    (call.backward_kernel if args.direction == "backward" else call.forward)()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
