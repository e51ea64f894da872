#!/usr/bin/env python3
"""Compares our CUDA kernels' speed with PyTorch's FA2 and cuDNN, in one run on one GPU.

Verifies each configuration first (fp32 reference on sampled rows), then times all
libraries in turn, several rounds, and prints medians: TFLOP/s by 4 Sq Sk D H forward
(halved for causal) and 2.5 times that backward, and the ratio to each peer. Our backward
includes delta, zeroing and conversion, as PyTorch's does.

  kernel_speed.py --library ours=libringattn_kernels.so [--library other=...[@FAMILY]] \
      [--dims 64,128] [--lengths 4096,8192] [--heads 32/8] [--masks causal,full] [--directions forward]
  kernel_speed.py --library ours=libringattn_kernels.so --terms [--term_family sm90] [--lengths 16384]

With --deterministic: backwards alone, deterministic compared with the default; each runs three times, with other work
on the GPU between, and must give the same bits. "ratio" is deterministic to default. With --fp8: forwards alone, in
e4m3 compared with the request's type, the rounding included, and FA3's fp8 where its wheel is installed. With --terms:
each score term compared with our plain kernel and PyTorch's peers (term_rows.py) instead.
"""
import argparse
import ctypes
import datetime
import os
import random
import statistics
import sys
import typing

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"bf16": (1, torch.bfloat16), "fp16": (2, torch.float16), "fp32": (0, torch.float32)}


class Build(typing.NamedTuple):
    """A library, and the kernel family that serves (empty: the first that can)."""
    library: ctypes.CDLL
    family: str
    fp8: bool = False
    deterministic: bool = False


def load(path):
    path, _, family = path.partition("@")
    library = ctypes.CDLL(path)
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    library.ringattn_prepare.restype = pointer
    library.ringattn_prepare.argtypes = (
        [ctypes.c_int] + [i64] * 7 + [ctypes.c_float] * 2 + [ctypes.c_int, i64] + [pointer] * 13)
    for name in ("ringattn_forward", "ringattn_backward", "ringattn_backward_kernel"):
        getattr(library, name).argtypes = [pointer, pointer]
    library.ringattn_release.argtypes = [pointer]
    return Build(library, family or os.environ.get("RINGATTN_KERNEL_FAMILY", ""))


class Ours:
    """One prepared problem of one library build."""

    def __init__(self, build, dtype, q, k, v, dout, causal, fp32_results=False):
        self.library = library = build.library
        if build.family:
            os.environ["RINGATTN_KERNEL_FAMILY"] = build.family
        else:
            os.environ.pop("RINGATTN_KERNEL_FAMILY", None)
        self.fp8 = build.fp8
        self.deterministic = build.deterministic
        os.environ["RINGATTN_COMPUTE_DTYPE"] = "fp8_e4m3" if build.fp8 else ""
        os.environ["RINGATTN_DETERMINISTIC"] = "1" if build.deterministic else ""
        batch, q_rows, heads, dim = q.shape
        kv_rows, kv_heads, dim_v = k.shape[1], k.shape[2], v.shape[3]
        f32 = dict(dtype=torch.float32, device="cuda")
        self.out = torch.empty(batch, q_rows, heads, dim_v, device="cuda",
                               dtype=torch.float32 if fp32_results else q.dtype)
        self.out.fill_(float("nan"))
        self.lse = torch.full((batch, heads, q_rows), float("nan"), **f32)
        self.delta = torch.empty(batch, heads, q_rows, **f32)
        self.accumulators = [torch.empty(t.shape, **f32) for t in (q, k, v)]
        # With fp32 results, a backward's accumulators are the result.
        self.gradients = self.accumulators if fp32_results else [torch.empty_like(t) for t in (q, k, v)]
        self.inputs = (q, k, v, dout)
        tensors = [q, k, v, self.out, self.lse, dout, self.delta, *self.accumulators,
                   *self.gradients]
        self.handle = library.ringattn_prepare(
            DTYPES[dtype][0], batch, q_rows, kv_rows, heads, kv_heads, dim, dim_v, dim ** -0.5, 0.0,
            int(causal), -1, *[t.data_ptr() for t in tensors])
        if not self.handle:
            sys.exit("prepare failed")

    def stream(self):
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def forward(self):
        if self.library.ringattn_forward(self.handle, self.stream()):
            sys.exit("forward failed")

    def backward(self):
        if self.library.ringattn_backward(self.handle, self.stream()):
            sys.exit("backward failed")

    def backward_kernel(self):
        self.library.ringattn_backward_kernel(self.handle, self.stream())

    def release(self):
        self.library.ringattn_release(self.handle)


class Peer:
    """PyTorch's scaled_dot_product_attention on one back end."""

    def __init__(self, backend, q, k, v, dout, causal, deterministic=False):
        self.backend, self.causal, self.deterministic = backend, causal, deterministic
        self.q, self.k, self.v = (t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v))
        self.dout = dout.transpose(1, 2)
        self.gqa = q.shape[2] != k.shape[2]
        self.result = None

    def forward(self):
        with sdpa_kernel(self.backend), torch.no_grad():
            return F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=self.causal,
                                                  enable_gqa=self.gqa)

    def backward(self):
        if self.result is None:
            with sdpa_kernel(self.backend):
                self.result = F.scaled_dot_product_attention(
                    self.q, self.k, self.v, is_causal=self.causal, enable_gqa=self.gqa)
        torch.use_deterministic_algorithms(self.deterministic)
        gradients = torch.autograd.grad(self.result, (self.q, self.k, self.v), self.dout,
                                        retain_graph=True)
        torch.use_deterministic_algorithms(False)
        return gradients

    def release(self):
        self.result = None


class Fa3Float8:
    """FlashAttention-3's forward in e4m3 (the fa3_fwd wheel), of tensors that are rounded already."""

    def __init__(self, q, k, v, causal):
        from fa3_fwd_interface import flash_attn_func  # pylint: disable=import-error
        self.function, self.causal = flash_attn_func, causal
        self.inputs = [t.to(torch.float8_e4m3fn) for t in (q, k, v)]

    def forward(self):
        return self.function(*self.inputs, causal=self.causal)

    def release(self):
        self.inputs = None


def verify(ours, causal, rows=24):
    """Relative error of out, lse and dq on sampled rows, and of dk, dv against cuDNN/FA2 norms."""
    q, k, v, dout = (t.float() for t in ours.inputs)
    _, n, heads, dim = q.shape
    group = heads // k.shape[2]
    picked = torch.randint(0, n, (rows,), device="cuda")
    head = int(torch.randint(0, heads, ()))
    key, value = k[0, :, head // group].double(), v[0, :, head // group].double()
    s = q[0, picked, head].double() @ key.T * dim ** -0.5
    if causal:
        s.masked_fill_(torch.arange(n, device="cuda")[None] > picked[:, None], float("-inf"))
    p = s.softmax(-1)
    out = p @ value
    lse = s.logsumexp(-1)
    ds = p * (dout[0, picked, head].double() @ value.T
              - (dout[0, picked, head].double() * out).sum(-1, keepdim=True))
    dq = ds @ key * dim ** -0.5

    def error(actual, expected):
        return float((actual.double() - expected).norm() / expected.norm())
    return dict(out=error(ours.out[0, picked, head], out),
                lse=float((ours.lse[0, head, picked].double() - lse).abs().max()),
                dq=error(ours.gradients[0][0, picked, head], dq))


def same_bits(ours):
    """Whether backwards give the same bits as the last one, after other work and concurrently with it."""
    before = [t.view(torch.int16 if t.element_size() == 2 else torch.int32).clone() for t in ours.gradients]
    noise = torch.randn(4096, 4096, device="cuda")
    other = torch.cuda.Stream()
    same = True
    for beside in (False, True):
        for t in ours.gradients:
            t.fill_(float("nan"))
        with torch.cuda.stream(other if beside else torch.cuda.current_stream()):
            for _ in range(8):
                noise = (noise @ noise).clamp_(-1, 1)
        ours.backward()
        torch.cuda.synchronize()
        same = same and all(torch.equal(a, t.view(a.dtype)) for a, t in zip(before, ours.gradients))
    return same


def time_ms(function, repeats):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def decode(library, args, heads, kv_heads):
    """One query token over long K/V: bytes of K and V per second."""
    print("\ndecode (1 query token), GB/s of K and V read, median")
    print("| dim | keys | us | GB/s | error |\n|---|---|---|---|---|")
    failed = False
    for length in map(int, args.decode.split(",")):
        dim = 128
        make = lambda n, h: torch.randn(1, n, h, dim, device="cuda", dtype=DTYPES[args.dtype][1])
        q, k, v, dout = make(1, heads), make(length, kv_heads), make(length, kv_heads), make(1, heads)
        run = Ours(library, args.dtype, q, k, v, dout, True)
        run.forward()
        torch.cuda.synchronize()
        group = heads // kv_heads
        s = torch.einsum("qhgd,khd->hgqk", q[0].double().unflatten(1, (kv_heads, group)),
                         k[0].double()) * dim ** -0.5
        expected = torch.einsum("hgqk,khd->qhgd", s.softmax(-1), v[0].double()).flatten(1, 2)
        error = float((run.out[0].double() - expected).norm() / expected.norm())
        failed |= not error < 1e-2
        us = statistics.median(time_ms(run.forward, 20) for _ in range(args.rounds)) * 1e3
        print(f"| {dim} | {length} | {us:.0f} | {k.numel() * 4 / us / 1e3:.0f} | {error:.1e} |",
              flush=True)
        run.release()
    return failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", action="append", required=True)
    parser.add_argument("--dims", default="64,96,128,192,256")
    parser.add_argument("--lengths", default="4096,8192,16384")
    parser.add_argument("--masks", default="causal,full")
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directions", default="forward,backward")
    parser.add_argument("--decode", default="", help="key counts for the one-token table")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--terms", action="store_true", help="score terms instead")
    parser.add_argument("--fp8", action="store_true",
                        help="forwards alone, the first library's in e4m3 as well; head dims up to 128")
    parser.add_argument("--deterministic", action="store_true",
                        help="backwards alone, every library's deterministic and default")
    parser.add_argument("--term_rows", default="", help="of its rows, these alone")
    parser.add_argument("--term_family", default="", help="the kernel family that terms are forced to")
    args = parser.parse_args()
    libraries = [(name, load(path)) for name, path in (x.split("=") for x in args.library)]
    if args.fp8:
        args.directions = "forward"
        args.dims = ",".join(d for d in args.dims.split(",") if int(d) <= 128)
        name, build = libraries[0]
        libraries.append((f"{name} fp8", build._replace(fp8=True)))
    if args.deterministic:
        args.directions = "backward"
        libraries = [pair for name, build in libraries
                     for pair in ((name, build), (f"{name} deterministic", build._replace(deterministic=True)))]
    heads, kv_heads = map(int, args.heads.split("/"))
    print(f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC, "
          f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"cuDNN {torch.backends.cudnn.version()}, {args.dtype}, heads {args.heads}, batch 1")
    if args.terms:
        import term_rows  # of this directory, which a script's path has first
        sys.exit(term_rows.run(args, libraries, heads, kv_heads))
    failed = False
    for direction in args.directions.split(","):
        print(f"\n{direction}, TFLOP/s (median of {args.rounds}); /fa2 and /cudnn: "
              f"{libraries[0][0]}'s ratio")
        print("| dim | mask | tokens | " + " | ".join(n for n, _ in libraries)
              + " | fa2 | cudnn | /fa2 | /cudnn | error |")
        print("|---" * (8 + len(libraries)) + "|")
        for dim in map(int, args.dims.split(",")):
            for causal in (m == "causal" for m in args.masks.split(",")):
                for length in map(int, args.lengths.split(",")):
                    dtype = DTYPES[args.dtype][1]
                    make = lambda h: torch.randn(1, length, h, dim, device="cuda", dtype=dtype)
                    q, k, v, dout = make(heads), make(kv_heads), make(kv_heads), make(heads)
                    runs = [(n, Ours(lib, args.dtype, q, k, v, dout, causal)) for n, lib in libraries]
                    notes = ""
                    for name, run in runs:
                        run.forward()
                        if direction == "backward":
                            run.backward()
                        torch.cuda.synchronize()
                        errors = verify(run, causal)
                        notes = f"{errors['out']:.1e}"
                        if direction == "backward":
                            notes = f"{errors['dq']:.1e}"
                        # In e4m3: what rounding to four bits costs out of unit normals, twice.
                        most = (0.12, 0.1) if run.fp8 else (1e-2, 1e-4)
                        if run.deterministic and not same_bits(run):
                            failed = True
                            notes += f" OTHER BITS ({name})"
                        good = errors["out"] < most[0] and errors["lse"] < most[1] and (
                            direction == "forward" or errors["dq"] < 2e-2)
                        if not good:
                            failed = True
                            notes += f" WRONG ({name}: {errors})"
                    if not args.no_peers:
                        for name, backend in (("fa2", SDPBackend.FLASH_ATTENTION),
                                              ("cudnn", SDPBackend.CUDNN_ATTENTION)):
                            peer = Peer(backend, q, k, v, dout, causal)
                            try:
                                result = getattr(peer, direction)()
                                torch.cuda.synchronize()
                                if direction == "backward":
                                    for ours_g, peer_g in zip(runs[0][1].gradients, result):
                                        a, b = ours_g.float(), peer_g.transpose(1, 2).float()
                                        e = float((a - b).norm() / b.norm())
                                        if not e < 2e-2:
                                            failed = True
                                            notes += f" differs from {name} by {e:.1e}"
                                runs.append((name, peer))
                            except RuntimeError as error:
                                notes += f" {name}: {str(error).splitlines()[0][:40]}"
                    if args.deterministic and not args.no_peers:
                        runs.append(("fa2 deterministic", Peer(SDPBackend.FLASH_ATTENTION, q, k, v, dout,
                                                               causal, deterministic=True)))
                    if args.fp8 and not args.no_peers:
                        try:
                            peer = Fa3Float8(q, k, v, causal)
                            peer.forward()
                            torch.cuda.synchronize()
                            runs.append(("fa3 fp8", peer))
                        except (ImportError, RuntimeError, TypeError) as error:
                            notes += f" fa3 fp8: {str(error).splitlines()[0][:40]}"
                    flops = 4 * length * length * dim * heads * (0.5 if causal else 1.0)
                    flops *= 1.0 if direction == "forward" else 2.5
                    repeats = max(1, int(3e-3 / (flops / 3e14)))
                    times = {name: [] for name, _ in runs}
                    for round_index in range(args.rounds + 1):
                        # Another order each round: what runs after a hot kernel is clocked lower.
                        for name, run in random.sample(runs, len(runs)):
                            ms = time_ms(getattr(run, direction), repeats)
                            if round_index > 0:
                                times[name].append(ms)
                    rate = {n: flops / statistics.median(t) / 1e9 for n, t in times.items()}
                    ours = rate[libraries[0][0]]
                    cells = [f"{rate[n]:.0f}" for n, _ in libraries]
                    for peer in ("fa2", "cudnn"):
                        cells.append(f"{rate[peer]:.0f}" if peer in rate else "-")
                    for peer in ("fa2", "cudnn"):
                        cells.append(f"{ours / rate[peer]:.2f}" if peer in rate else "-")
                    if args.deterministic:
                        pairs = list(zip(libraries[::2], libraries[1::2]))
                        notes += " ratio " + " ".join(f"{rate[d[0]] / rate[n[0]]:.2f}" for n, d in pairs)
                        if "fa2 deterministic" in rate:
                            notes += f" /fa2 deterministic {rate[pairs[0][1][0]] / rate['fa2 deterministic']:.2f}"
                    if "fa3 fp8" in rate:
                        notes += f" fa3 fp8 {rate['fa3 fp8']:.0f}"
                    print(f"| {dim} | {'causal' if causal else 'full'} | {length} | "
                          + " | ".join(cells) + f" | {notes} |", flush=True)
                    for _, run in runs:
                        run.release()
    if args.decode:
        failed |= decode(libraries[0][1], args, heads, kv_heads)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
