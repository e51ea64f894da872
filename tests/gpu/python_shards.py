#!/usr/bin/env python3
"""The functions of ring_flash_attn with one process per GPU, an NCCL process group and CUDA memory: outputs and
gradients against PyTorch's attention over the whole sequence in fp32, and the time of a call with one writer per GPU
next to that of one client that has all tokens on one GPU. Prints JSON. Needs PyTorch with CUDA and the package (an
unpacked wheel in PYTHONPATH will do), and workers that take CUDA memory.

  python_shards.py --server=HOST:PORT [--ranks=N] [--tokens=N] [--heads=N] [--kv_heads=N] [--runs=N]
"""
import argparse
import json
import pathlib
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import ringattn
from ringattn import ring_flash_attn

SHORT = 4096  # tokens of the compared calls
WORST = 0.03  # of the largest value, for bf16


def rows_of(layout, rank, ranks, tokens):
    """The tokens of a rank, in the order of its rows."""
    every = torch.arange(tokens)
    if layout == "stripe":
        return every[rank::ranks]
    if layout == "zigzag":
        pieces = every.chunk(2 * ranks)
        return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])
    return every.chunk(ranks)[rank]


def whole(args, tokens, device, seed):
    """q, k, v and dout of the whole sequence, equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, tokens, count, 128, generator=generator).to(device, torch.bfloat16)
            for count in (args.heads, args.kv_heads, args.kv_heads, args.heads)]


def reference(tensors):
    q, k, v, dout = (tensor.float().transpose(1, 2) for tensor in tensors)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(dout)
    return [tensor.transpose(1, 2) for tensor in (out.detach(), q.grad, k.grad, v.grad)]


def judge(rank, args, device):
    """{layout: worst error of out, dq, dk, dv on this rank, as a share of the largest value}"""
    found = {}
    tensors = whole(args, SHORT, device, 0)
    wanted = reference(tensors)
    for layout, name in (("ring", "ring_flash_attn_func"), ("zigzag", "zigzag_ring_flash_attn_func"),
                         ("stripe", "stripe_flash_attn_func")):
        rows = rows_of(layout, rank, args.ranks, SHORT).to(device)
        q, k, v, dout = (tensor[:, rows].contiguous() for tensor in tensors)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = getattr(ring_flash_attn, name)(q, k, v, causal=True)
        assert out.device == q.device, out.device
        out.backward(dout)
        errors = [((got.float() - want[:, rows]).abs().max() / want.abs().max()).item()
                  for got, want in zip((out, q.grad, k.grad, v.grad), wanted)]
        assert all(error < WORST for error in errors), (layout, errors)
        found[layout] = [round(error, 5) for error in errors]
    return found


def seconds_of(call, runs):
    """Medians of a call's seconds and of its time on the ring, from a common start. The slowest rank counts."""
    seconds, rings = [], []
    for _ in range(runs + 2):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        report = call()
        torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - begin], device="cuda")
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(took.item())
        rings.append(report.compute_seconds if report else 0.0)
    return {"seconds": statistics.median(seconds[2:]), "ring_seconds": statistics.median(rings[2:])}


def times(client, rank, args, device):
    """A forward with a writer per rank, and one of the first rank alone, over the same ring and layout."""
    tensors = whole(args, args.tokens, device, 1)[:3]
    own = [tensor.chunk(args.ranks, 1)[rank].contiguous() for tensor in tensors]
    each = args.tokens // args.ranks
    span = [(rank * each, each)]
    plan = {"causal": True, "transport": "cuda_memory", "world_size": args.ranks}
    calls = 0

    def shards():
        nonlocal calls
        calls += 1
        writer = ringattn.Writer(index=rank, count=args.ranks, q=span, kv=span, seq_len_q=args.tokens,
                                 seq_len_kv=args.tokens)
        report = client.forward(*own, writer=writer, request_id=f"shards-{calls}", **plan).report
        assert report.transport == "cuda_memory", report.transport_reason
        return report

    def alone():
        if rank == 0:
            report = client.forward(*tensors, **plan).report
            assert report.transport == "cuda_memory", report.transport_reason
            return report
        return None

    found = {"writers": [], "one_client": []}
    for _ in range(3):  # interleaved
        found["writers"].append(seconds_of(shards, args.runs))
        found["one_client"].append(seconds_of(alone, args.runs))
    middle = {name: sorted(level, key=lambda one: one["seconds"])[1] for name, level in found.items()}
    return middle | {"ratio": middle["writers"]["seconds"] / middle["one_client"]["seconds"]}


def run(rank, args, store, results):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=args.ranks, device_id=device)
    with ringattn.connect(args.server) as client:
        ringattn.set_default_client(client, transport="cuda_memory")
        result = {"errors": judge(rank, args, device), "times": times(client, rank, args, device)}
        dist.barrier()
    pathlib.Path(results, str(rank)).write_text(json.dumps(result))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(run, (args, f"{folder}/store", folder), args.ranks)
        ranks = [json.loads(pathlib.Path(folder, str(rank)).read_text()) for rank in range(args.ranks)]
    print(json.dumps({"errors": [rank["errors"] for rank in ranks], **ranks[0]["times"]}))


if __name__ == "__main__":
    main()
