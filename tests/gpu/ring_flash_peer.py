#!/usr/bin/env python3
"""The ring to beat: ring-flash-attention's zigzag as it is published, on FlashAttention-4's kernels.

  PYTHONPATH=FOLDERS torchrun --nproc-per-node=2 tests/gpu/ring_flash_peer.py [--heads=32/8,32/32]
      [--tokens=16384,32768,65536,131072,262144,524288] [--rounds=7] [--seconds=300] [--json=FILE]
  torchrun --nproc-per-node=3 tests/gpu/ring_flash_peer.py --kernels=plain --heads=4/2 --dim=32 --tokens=768
                  the same on gloo, with attention as it is written down in FA4's place; --kernels=fa2 are PyTorch's

FOLDERS hold the wheels `ring-flash-attn` and `flash-attn-4` with what that needs (`nvidia-cutlass-dsl` and its libs,
`quack-kernels`, `apache-tvm-ffi`, `torch-c-dlpack-ext`). ring-flash-attention calls the package flash-attn, whose two
functions are given to it on other kernels here; FA4's put gradients where the ring wants them.

Verifies a short sequence in fp64 first. Then each case: medians of CUDA events of the slowest rank, from a common
barrier; from 256K tokens on three rounds at most. TFLOP/s per GPU by 4 S S D H halved for the mask, 3.5 times that for
forward + backward. A line for each case, and with --json one of JSON. Begins no case after --seconds.
"""
import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
import types

import ring_peer  # sets NCCL's environment
import torch
import torch.distributed as dist

LONG = 1 << 18


class Fa4:
    dtype, device = torch.bfloat16, "cuda"
    tolerance = ring_peer.Flash.tolerance

    def __init__(self):
        from flash_attn.cute import interface  # pylint: disable=import-error,import-outside-toplevel
        self.fa4 = interface

    def forward(self, q, k, v, causal):
        return self.fa4._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)[:2]

    def backward_into(self, dq, dk, dv, dout, q, k, v, out, lse, causal):
        self.fa4._flash_attn_bwd(q, k, v, out, dout, lse, causal=causal, dq=dq, dk=dk, dv=dv)


class Plain(ring_peer.Plain):
    """Kernels for bf16: the ring requires its fp32 conversions to be copies."""
    dtype, tolerance = torch.bfloat16, ring_peer.Flash.tolerance

    def forward(self, q, k, v, causal):
        out, lse = super().forward(q.float(), k.float(), v.float(), causal)
        return out.to(self.dtype), lse

    def backward(self, dout, q, k, v, out, lse, causal):
        return super().backward(*(t.float() for t in (dout, q, k, v, out, lse)), causal)


KERNELS = {"fa4": Fa4, "fa2": ring_peer.Flash, "plain": Plain}


def published_ring(kernels):
    """zigzag_ring_flash_attn_func on these kernels. Its other arguments request the kernels' defaults: the usual
    scale, no dropout, window or ALiBi."""
    def forward(q, k, v, causal, **_):
        return (*kernels.forward(q, k, v, causal), None, None)

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, causal, **_):
        given = dout, q, k, v, out, softmax_lse.contiguous(), causal
        if hasattr(kernels, "backward_into"):
            kernels.backward_into(dq, dk, dv, *given)
            return
        for target, gradient in zip((dq, dk, dv), kernels.backward(*given)):
            target.copy_(gradient)

    flash_attn = types.ModuleType("flash_attn.flash_attn_interface")
    flash_attn._flash_attn_forward, flash_attn._flash_attn_backward = forward, backward
    sys.modules[flash_attn.__name__] = flash_attn
    # The package without its __init__, which imports adapters for a transformers that few have.
    package = types.ModuleType("ring_flash_attn")
    found = importlib.util.find_spec("ring_flash_attn")
    if found is None:
        sys.exit("ring_flash_peer.py: the wheel ring-flash-attn is not on PYTHONPATH")
    package.__path__ = found.submodule_search_locations
    sys.modules[package.__name__] = package
    return importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn").zigzag_ring_flash_attn_func


def leaves(member, tokens, heads, kv_heads):
    q, k, v, dout = member.inputs(tokens, heads, kv_heads)
    return [t.requires_grad_() for t in (q, k, v)], dout


def verify(member, ring, heads, kv_heads):
    inputs, dout = leaves(member, member.args.check_tokens, heads, kv_heads)
    out, lse, _ = ring(*inputs, causal=True, return_attn_probs=True)
    gradients = torch.autograd.grad(out, inputs, dout)
    given, out, lse = [t.detach() for t in (*inputs, dout)], out.detach(), lse.detach()
    return ring_peer.errors_of(member, given, out, lse, gradients)


def seconds_of(member, function):
    """The slowest rank's."""
    if member.kernels.device != "cuda":
        return member.seconds(function)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    begin.record()
    function()
    end.record()
    end.synchronize()
    return member.largest(begin.elapsed_time(end) * 1e-3)


def measure(member, ring, tokens, heads, kv_heads):
    inputs, dout = leaves(member, tokens, heads, kv_heads)

    def forward():
        with torch.no_grad():
            ring(*inputs, causal=True)

    def both():
        ring(*inputs, causal=True).backward(dout)
        for t in inputs:
            t.grad = None

    flops = 4 * tokens * tokens * member.args.dim * heads / 2
    row = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "world_size": member.world_size}
    for name, function, factor in (("forward", forward, 1.0), ("forward_backward", both, 3.5)):
        for _ in range(1 if tokens >= LONG else 2):  # warm
            function()
        rounds = min(member.args.rounds, 3) if tokens >= LONG else member.args.rounds
        times = [seconds_of(member, function) for _ in range(rounds)]
        median = statistics.median(times)
        row[name] = {"tflops_per_gpu": round(flops * factor / median / member.world_size / 1e12, 4),
                     "median_seconds": median, "seconds": times}
    return row


def tell(row, args):
    print(f"{row['tokens']} tokens, {row['heads']}/{row['kv_heads']}: " + ", ".join(
        f"{name.replace('_', ' + ')} {row[name]['tflops_per_gpu']:.4g} TFLOP/s per GPU "
        f"({row[name]['median_seconds'] * 1e3:.2f} ms)" for name in ("forward", "forward_backward")), flush=True)
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def serve(args):
    begin = time.monotonic()
    rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kernels = KERNELS[args.kernels]()
    member = ring_peer.Member(args, rank, kernels)
    options = {}
    if kernels.device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = member.device
    dist.init_process_group("nccl" if kernels.device == "cuda" else "gloo",
                            timeout=datetime.timedelta(seconds=300), **options)  # FA4 compiles at first
    ring = published_ring(kernels)
    if rank == 0:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in
                    ("torch", "ring-flash-attn", *(["flash-attn-4"] if args.kernels == "fa4" else []))]
        print(f"{', '.join(versions)}; {args.kernels}, {args.world_size} ranks, head_dim {args.dim}", flush=True)
        if args.json:
            open(args.json, "w", encoding="utf-8").close()
    unit = 2 * args.world_size
    args.check_tokens = args.check_tokens // unit * unit
    for heads, kv_heads in args.heads:
        errors = verify(member, ring, heads, kv_heads)
        # A NaN is not less than anything.
        good = all(error < kernels.tolerance for error in errors.values())
        if rank == 0:
            print(f"{heads}/{kv_heads}, {args.check_tokens} tokens: {'verified' if good else 'WRONG'}, {errors}",
                  flush=True)
        if not good:
            sys.exit(1)
    for tokens in args.tokens:
        for heads, kv_heads in args.heads:
            if member.largest(time.monotonic() - begin) > args.seconds:
                continue
            row = measure(member, ring, tokens // unit * unit, heads, kv_heads)
            if rank == 0:
                tell(row, args)
            if kernels.device == "cuda":
                torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=KERNELS, default="fa4")
    parser.add_argument("--tokens", default="16384,32768,65536,131072,262144,524288", help="in total")
    parser.add_argument("--heads", default="32/8,32/32")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--check_tokens", type=int, default=2048)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    args.heads = [tuple(map(int, pair.split("/"))) for pair in args.heads.split(",")]
    args.tokens = [int(tokens) for tokens in args.tokens.split(",")]
    serve(args)


if __name__ == "__main__":
    main()
