#!/usr/bin/env python3
"""PyTorch's tensors on a GPU through the Python package, on a service whose workers take CUDA memory: forward and
gradients against torch's own, results on the caller's device, streams, and times. Prints JSON. Needs PyTorch with CUDA
and the package (an unpacked wheel in PYTHONPATH will do).

  python_cuda.py --server=HOST:PORT [--tokens=N] [--heads=N] [--kv_heads=N] [--runs=N]
"""
import argparse
import json
import statistics
import time

import torch

import ringattn


def tensors(tokens, heads, kv_heads, device, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(1, tokens, count, 128, dtype=torch.bfloat16, device=device)
            for count in (heads, kv_heads, kv_heads, heads)]


def judge(client, heads, kv_heads, device):
    """Both passes of a short call by autograd, against torch in fp32."""
    ringattn.set_default_client(client, transport="cuda_memory")
    q, k, v, dout = tensors(2048, heads, kv_heads, device)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out, _ = ringattn.attention(q, k, v, causal=True)
    assert out.device == q.device, out.device
    out.backward(dout)
    wide = [tensor.detach().float().transpose(1, 2).requires_grad_() for tensor in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    want.backward(dout.float().transpose(1, 2))
    worst = {"out": (out.float() - want.transpose(1, 2)).abs().max().item()}
    for name, tensor, judged in zip("qkv", (q, k, v), wide):
        limit = judged.grad.abs().max().item()
        worst[f"d{name}"] = (tensor.grad.float() - judged.grad.transpose(1, 2)).abs().max().item() / limit
    assert all(error < 0.03 for error in worst.values()), worst
    return worst


def order(client, heads, kv_heads, device):
    """The package waits for a side stream that still writes, and does not reuse memory that a kernel still reads."""
    q, k, v, _ = tensors(4096, heads, kv_heads, device, 1)
    want = client.forward(q, k, v, causal=True, transport="cuda_memory").out.clone()
    side = torch.cuda.Stream(device)
    wrong = 0
    for _ in range(20):
        late = torch.zeros_like(q)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late.copy_(q)
            out = client.forward(late, k, v, causal=True, transport="cuda_memory").out
            torch.cuda._sleep(20_000_000)
            kept = out.clone()
            del out
            client.forward(torch.zeros_like(q), k, v, causal=True, transport="cuda_memory")
        side.synchronize()
        wrong += not torch.equal(kept, want)
    assert wrong == 0, f"{wrong} of 20"
    return 20


def times(client, args, device):
    q, k, v, _ = tensors(args.tokens, args.heads, args.kv_heads, device, 2)
    own = [client.cuda_empty(tensor.shape, tensor.dtype, device.index or 0).copy_(tensor) for tensor in (q, k, v)]
    found = {}
    for name, given, options in (("torch_memory", (q, k, v), {"transport": "cuda_memory"}),
                                 ("own_regions", own, {"transport": "cuda_memory"}),
                                 ("through_the_host", (q, k, v), {"transport": "host_memory"})):
        seconds, rings, report = [], [], None
        for _ in range(args.runs + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            report = client.forward(*given, causal=True, **options).report
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            rings.append(report.compute_seconds)
        found[name] = {"seconds": statistics.median(seconds[1:]), "ring_seconds": statistics.median(rings[1:]),
                       "transport": report.transport, "reason": report.transport_reason,
                       "staged_bytes": report.staged_bytes}
    assert found["own_regions"]["staged_bytes"] == 0, found
    assert found["torch_memory"]["transport"] == "cuda_memory", found
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    device = torch.device("cuda:0")
    with ringattn.connect(args.server) as client:
        result = {"worst": judge(client, args.heads, args.kv_heads, device),
                  "ordered": order(client, args.heads, args.kv_heads, device), "times": times(client, args, device)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
