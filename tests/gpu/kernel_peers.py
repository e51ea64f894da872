"""Compares the kernels with FlashAttention-4's (its SM90 path, the wheel `flash-attn-4`) and cuDNN's, interleaved in
one process. Every result is compared with fp64 on sampled rows first, gradients with FA4's.

  PYTHONPATH=FA4'S_FOLDERS kernel_peers.py --library libringattn_kernels.so [--cases 128:32/8,64:32/32]
      [--lengths 4096,16384,65536] [--rounds 9] [--seconds 150]

Prints a line per case: TFLOP/s of 4 Sq Sk D H operations (halved for causal, 2.5 times that for backward), medians,
and ours over the better of the two. Needs a GPU and PyTorch; without the wheel it compares with cuDNN alone.
"""

import argparse
import random
import statistics
import time

import kernel_speed
import torch
from torch.nn.attention import SDPBackend

try:
    from flash_attn.cute.interface import flash_attn_func
except ImportError as error:
    flash_attn_func = None
    print(f"without FA4: {error}")

class Fa4:
    def __init__(self, q, k, v, dout, causal):
        self.inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        self.dout, self.causal, self.out = dout, causal, None

    def run(self):
        out = flash_attn_func(*self.inputs, causal=self.causal)
        return out[0] if isinstance(out, tuple) else out

    def forward(self):
        with torch.no_grad():
            return self.run()

    def backward(self):
        if self.out is None:
            self.out = self.run()
        self.out.backward(self.dout, retain_graph=True)
        gradients = [t.grad for t in self.inputs]
        for t in self.inputs:
            t.grad = None
        return gradients

    def release(self):
        pass


def compare(library, dim, heads, kv_heads, length, causal, direction, rounds):
    make = lambda h: torch.randn(1, length, h, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout = make(heads), make(kv_heads), make(kv_heads), make(heads)
    ours = kernel_speed.Ours(library, "bf16", q, k, v, dout, causal)
    ours.forward()
    if direction == "backward":
        ours.backward()
    torch.cuda.synchronize()
    errors = kernel_speed.verify(ours, causal)
    good = errors["out"] < 1e-2 and (direction == "forward" or errors["dq"] < 2e-2)
    notes = "" if good else f" WRONG {errors}"
    runs = [("ours", ours)]
    if flash_attn_func is not None:
        peer = Fa4(q, k, v, dout, causal)
        try:
            result = getattr(peer, direction)()
            torch.cuda.synchronize()
            runs.append(("fa4", peer))
            if direction == "backward":
                distance = max(float((a.float() - b.float()).norm() / b.float().norm())
                               for a, b in zip(ours.gradients, result))
                notes += f" gradients {distance:.0e} from fa4's"
                good = good and distance < 2e-2
        except Exception as error:  # a head dim that it lacks, a compilation that fails: of any type
            notes += f" fa4: {str(error)[:80]}"
    runs.append(("cudnn", kernel_speed.Peer(SDPBackend.CUDNN_ATTENTION, q, k, v, dout, causal)))
    flops = 4.0 * length * length * dim * heads * (0.5 if causal else 1)
    flops *= 1 if direction == "forward" else 2.5
    repeats = max(1, int(3e-3 / (flops / 4e14)))
    times = {name: [] for name, _ in runs}
    for round_index in range(rounds + 1):
        for name, run in random.sample(runs, len(runs)):
            ms = kernel_speed.time_ms(getattr(run, direction), repeats)
            if round_index > 0:
                times[name].append(ms)
    rates = {name: flops / statistics.median(ms) / 1e9 for name, ms in times.items()}
    best = max(rate for name, rate in rates.items() if name != "ours")
    print(f"d{dim} {direction} {length} {heads}/{kv_heads} {'causal' if causal else 'full'}: "
          + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
          + f"; ours / best {rates['ours'] / best:.2f}{notes}", flush=True)
    for _, run in runs:
        run.release()
    torch.cuda.empty_cache()
    return good


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--cases", default="64:32/32,96:32/32,128:32/8,192:16/16,256:16/16")
    parser.add_argument("--lengths", default="4096,16384,65536", help="those above 20000: d128's forward alone")
    parser.add_argument("--rounds", type=int, default=5, help="3 at most above 20000")
    parser.add_argument("--seconds", type=float, default=150, help="begin nothing after so long")
    args = parser.parse_args()
    library = kernel_speed.load(args.library)
    begin, good = time.monotonic(), True
    for case in args.cases.split(","):
        dim, heads = case.split(":")
        query_heads, kv_heads = map(int, heads.split("/"))
        for direction in ("forward", "backward"):
            for causal in (True, False):
                for length in map(int, args.lengths.split(",")):
                    # Where a cell of the tables asks for it: it takes seconds.
                    if length > 20000 and (dim != "128" or direction == "backward"):
                        continue
                    if time.monotonic() - begin > args.seconds:
                        continue
                    good &= compare(library, int(dim), query_heads, kv_heads, length, causal,
                                    direction, min(args.rounds, 3) if length > 20000 else args.rounds)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
