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
    tests/bench/cpu_sdpa.py --terms                 each score term alone, compared with plain, full attention;
                                                    PyTorch with a mask, a bias or dropout for comparison

PyTorch is installed into .cache/sdpa-venv when it is missing; a Python that has it serves as well.
"""

import argparse
import importlib.util
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
    if os.path.realpath(sys.prefix) == os.path.realpath(VENV) or importlib.util.find_spec("torch"):
        return
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    if subprocess.run([python, "-c", "import torch, numpy"], capture_output=True).returncode:
        install = [python, "-m", "pip", "install", "--quiet", "torch", "numpy"]
        if subprocess.run(install + ["--index-url", CPU_INDEX], capture_output=True).returncode:
            subprocess.run(install, check=True)
    os.execv(python, [python] + sys.argv)


def torch_sampler(args, dtype_name, tokens, heads, dim, **options):
    """Returns a function that times one forward and one backward, in ms. `options`: of SDPA."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
    q, k, v = (torch.randn(1, heads, tokens, dim).to(dtype).requires_grad_() for _ in range(3))
    dout = torch.randn(1, heads, tokens, dim).to(dtype)
    clock = time.process_time if args.processor_time else time.perf_counter

    def sample():
        q.grad = k.grad = v.grad = None
        start = clock()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        middle = clock()
        out.backward(dout)
        end = clock()
        if not (torch.isfinite(out).all() and torch.isfinite(q.grad).all()):
            raise SystemExit("PyTorch's result is not finite")
        return 1e3 * (middle - start), 1e3 * (end - middle)

    sample()  # warm up
    return sample


def our_sample(args, dtype_name, tokens, heads, dim, *flags):
    """One run of our binary: one warm-up, the check, one timed forward and backward."""
    output = subprocess.run(
        [BENCH, f"--dtype={dtype_name}", f"--seq={tokens}", f"--heads={heads}",
         f"--head_dim={dim}", f"--threads={args.threads}", "--repeats=1", *flags],
        check=True, capture_output=True, text=True).stdout
    time_of = r"\(([\d.]+) cpu ms" if args.processor_time else r": ([\d.]+) ms"
    times = dict(re.findall(r"^(forward|backward).*" + time_of, output, re.MULTILINE))
    return float(times["forward"]), float(times["backward"])


def compare_plain(args):
    print(f"{'dtype':6}{'tokens':>8}{'heads':>6}{'d':>5}  {'pass':9}{'PyTorch ms':>11}"
          f"{'ours ms':>10}{'GFLOP/s':>9}{'ratio':>7}")
    worst = float("inf")
    for tokens, heads in SIZES:
        for dtype_name in ("fp32", "bf16"):
            for dim in (64, 128):
                theirs_sample = torch_sampler(args, dtype_name, tokens, heads, dim, is_causal=True)
                theirs, ours = [], []
                for _ in range(args.rounds):
                    theirs.append(theirs_sample())
                    ours.append(our_sample(args, dtype_name, tokens, heads, dim))
                flops = 2.0 * heads * tokens * tokens * dim
                for i, (name, factor) in enumerate((("forward", 1.0), ("backward", 2.5))):
                    their_ms = statistics.median(s[i] for s in theirs)
                    our_ms = statistics.median(s[i] for s in ours)
                    worst = min(worst, their_ms / our_ms)
                    print(f"{dtype_name:6}{tokens:8}{heads:6}{dim:5}  {name:9}{their_ms:11.1f}"
                          f"{our_ms:10.1f}{factor * flops / our_ms * 1e-6:9.0f}"
                          f"{their_ms / our_ms:7.2f}", flush=True)
    print(f"smallest ratio {worst:.2f}")


# cpu_kernels_bench --terms, and by what PyTorch's SDPA has the like, if at all.
TERMS = {"": "plain", "alibi": None, "bias": "bias", "bias1": None, "mask": "mask", "bits": None,
         "ids": None, "dropout": "dropout", "bias,dbias": None}


def compare_terms(args, heads=8):
    """Every term alone: the plain time over its own, and PyTorch's with the like over ours, medians over rounds."""
    import torch

    tokens = args.tokens
    print(f"full attention, {tokens} tokens, {heads} heads")
    print(f"{'dtype':6}{'d':>5} {'term':11}" + "".join(
        f" | {name:8} {'ms':>8} {'of plain (rounds)':>20} {'PyTorch ms':>11} {'ratio':>6}" for name in ("forward", "backward")))
    for dtype_name in ("fp32", "bf16"):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
        like = {"plain": {}, "mask": dict(attn_mask=torch.rand(tokens, tokens) < 0.5),
                "bias": dict(attn_mask=torch.rand(1, heads, tokens, tokens).to(dtype)), "dropout": dict(dropout_p=0.1)}
        for dim in (64, 128):
            theirs = {name: [] for name in like}
            ours = {term: [] for term in TERMS}
            samplers = {name: torch_sampler(args, dtype_name, tokens, heads, dim, **options)
                        for name, options in like.items()}
            for _ in range(args.rounds):
                for term, name in TERMS.items():
                    ours[term].append(our_sample(args, dtype_name, tokens, heads, dim, "--causal=false",
                                                 f"--terms={term}"))
                    if name:
                        theirs[name].append(samplers[name]())
            for term, name in TERMS.items():
                line = f"{dtype_name:6}{dim:5} {term or 'plain':11}"
                for i, direction in enumerate(("forward", "backward")):
                    mine = [sample[i] for sample in ours[term]]
                    shares = [plain[i] / time for plain, time in zip(ours[""], mine)]
                    of_plain = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
                    line += f" | {direction:8} {statistics.median(mine):8.1f} {of_plain:>20}"
                    if name:
                        their_ms = statistics.median(sample[i] for sample in theirs[name])
                        line += f" {their_ms:11.1f} {their_ms / statistics.median(mine):6.2f}"
                    else:
                        line += " " * 19
                print(line, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--terms", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096, help="of --terms")
    parser.add_argument("--processor_time", action="store_true", help="instead of wall time: where others work too")
    args = parser.parse_args()
    if not os.path.exists(BENCH):
        raise SystemExit("build first: bazel build //worker/kernels/cpu:cpu_kernels_bench")
    ensure_torch()
    import torch

    torch.set_num_threads(args.threads)
    print(f"PyTorch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), "
          f"{args.threads} threads, medians of {args.rounds} interleaved runs"
          f"{', processor time' if args.processor_time else ''}")
    if args.terms:
        compare_terms(args)
    else:
        print("causal")
        compare_plain(args)


if __name__ == "__main__":
    main()
