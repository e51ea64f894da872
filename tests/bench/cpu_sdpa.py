#!/usr/bin/env python3
"""Our CPU kernels against PyTorch's CPU scaled_dot_product_attention.

Causal, forward and backward, fp32 and bf16, head_dim 64 and 128, 4K and 16K
tokens, the same number of threads. Samples of both are interleaved, so that a
noisy machine slows both alike; medians are printed with their ratio (PyTorch's
time over ours: above 1 we are faster). Our binary checks sampled rows against
fp64 before it times anything; this script checks that PyTorch's outputs are
finite. PyTorch gets its own preferred layout, [batch, heads, tokens, dim].

    bazel build //worker/kernels/cpu:cpu_kernels_bench
    tests/bench/cpu_sdpa.py [--threads=2] [--rounds=5]

PyTorch is installed into .cache/sdpa-venv when it is missing.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".cache", "sdpa-venv")
BENCH = os.path.join(ROOT, "bazel-bin", "worker", "kernels", "cpu", "cpu_kernels_bench")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # ~200 MB; PyPI's wheel brings CUDA, 5 GB
SIZES = [(4096, 8), (16384, 2)]  # tokens, heads


def ensure_torch():
    """Runs this script again inside a virtual environment that has PyTorch."""
    python = os.path.join(VENV, "bin", "python")
    if os.path.realpath(sys.prefix) == os.path.realpath(VENV):
        return
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    if subprocess.run([python, "-c", "import torch, numpy"], capture_output=True).returncode:
        install = [python, "-m", "pip", "install", "--quiet", "torch", "numpy"]
        if subprocess.run(install + ["--index-url", CPU_INDEX], capture_output=True).returncode:
            subprocess.run(install, check=True)
    os.execv(python, [python] + sys.argv)


def torch_sampler(dtype_name, tokens, heads, dim):
    """Returns a function that times one forward and one backward, in ms."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
    q, k, v = (torch.randn(1, heads, tokens, dim).to(dtype).requires_grad_() for _ in range(3))
    dout = torch.randn(1, heads, tokens, dim).to(dtype)

    def sample():
        q.grad = k.grad = v.grad = None
        start = time.perf_counter()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        middle = time.perf_counter()
        out.backward(dout)
        end = time.perf_counter()
        if not (torch.isfinite(out).all() and torch.isfinite(q.grad).all()):
            raise SystemExit("PyTorch's result is not finite")
        return 1e3 * (middle - start), 1e3 * (end - middle)

    sample()  # warm up
    return sample


def our_sample(dtype_name, tokens, heads, dim, threads):
    """One run of our binary: one warm-up, the check, one timed forward and backward."""
    output = subprocess.run(
        [BENCH, f"--dtype={dtype_name}", f"--seq={tokens}", f"--heads={heads}",
         f"--head_dim={dim}", f"--threads={threads}", "--repeats=1"],
        check=True, capture_output=True, text=True).stdout
    times = dict(re.findall(r"^(forward|backward).*: ([\d.]+) ms", output, re.MULTILINE))
    return float(times["forward"]), float(times["backward"])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not os.path.exists(BENCH):
        raise SystemExit("build first: bazel build //worker/kernels/cpu:cpu_kernels_bench")
    ensure_torch()
    import torch

    torch.set_num_threads(args.threads)
    print(f"PyTorch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), "
          f"{args.threads} threads, causal, medians of {args.rounds} interleaved runs")
    print(f"{'dtype':6}{'tokens':>8}{'heads':>6}{'d':>5}  {'pass':9}{'PyTorch ms':>11}"
          f"{'ours ms':>10}{'GFLOP/s':>9}{'ratio':>7}")
    worst = float("inf")
    for tokens, heads in SIZES:
        for dtype_name in ("fp32", "bf16"):
            for dim in (64, 128):
                theirs_sample = torch_sampler(dtype_name, tokens, heads, dim)
                theirs, ours = [], []
                for _ in range(args.rounds):
                    theirs.append(theirs_sample())
                    ours.append(our_sample(dtype_name, tokens, heads, dim, args.threads))
                flops = 2.0 * heads * tokens * tokens * dim
                for i, (name, factor) in enumerate((("forward", 1.0), ("backward", 2.5))):
                    their_ms = statistics.median(s[i] for s in theirs)
                    our_ms = statistics.median(s[i] for s in ours)
                    worst = min(worst, their_ms / our_ms)
                    print(f"{dtype_name:6}{tokens:8}{heads:6}{dim:5}  {name:9}{their_ms:11.1f}"
                          f"{our_ms:10.1f}{factor * flops / our_ms * 1e-6:9.0f}"
                          f"{their_ms / our_ms:7.2f}", flush=True)
    print(f"smallest ratio {worst:.2f}")


if __name__ == "__main__":
    main()
