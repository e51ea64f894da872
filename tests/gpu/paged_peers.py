#!/usr/bin/env python3
"""Speed of the paged decode beside FlashAttention-3 and PyTorch, in one run on one GPU.

  paged_peers.py --library libringattn_paged.so [--batches 1,16] [--lengths 2048,32768] [--rounds 7]

One new token for each sequence, 32 query heads, 8 K/V heads, head_dim 128, bf16. Every library reads
K and V from memory: layers of a model follow one another, each with a cache of its own, in one captured
graph. Ours reads blocks of 64 tokens in random order and appends the new entry. FlashAttention-3 (the
fa3_fwd wheel, built without block tables) reads a contiguous cache and appends the new entry. PyTorch's
scaled_dot_product_attention reads a contiguous cache and appends nothing. All results are compared with an
fp32 reference first. Prints lines of comma-separated values: case, measure, value, unit.
"""
import argparse
import ctypes
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
MOST_BYTES = 24 << 30  # of K and V of one case
COLD_BYTES = 512 << 20  # that all layers of a case read, at least


class Problem(ctypes.Structure):
    """RingattnPagedProblem of paged_abi.cc."""
    _fields_ = ([(name, ctypes.c_int32) for name in (
        "dtype", "num_heads", "num_kv_heads", "head_dim", "block_tokens", "planes")]
        + [("blocks", ctypes.c_int64)]
        + [(name, ctypes.c_int32) for name in (
            "max_rows", "max_q_tokens", "max_total_q", "max_append_tokens")]
        + [("softmax_scale", ctypes.c_float)]
        + [(name, ctypes.c_void_p) for name in (
            "cache", "step", "rows", "tables", "q", "k", "v", "out", "lse", "workspace")])


def load(path):
    library = ctypes.CDLL(path)
    library.ringattn_paged_workspace_bytes.restype = ctypes.c_int64
    library.ringattn_paged_create.restype = ctypes.c_void_p
    library.ringattn_paged_enqueue.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.ringattn_paged_release.argtypes = [ctypes.c_void_p]
    return library


class Ours:
    """Layers that share rows and tables, each with a plane of one cache."""

    def __init__(self, library, batch, length, planes, inputs):
        self.library = library
        q, k, v = inputs
        blocks_each = -(-length // BLOCK)
        blocks = batch * blocks_each
        self.cache = torch.empty(planes, 2, blocks, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.cache.normal_()
        table = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(batch, blocks_each)
        index = torch.arange(batch, dtype=torch.int32)
        rows = torch.zeros(batch, 8, dtype=torch.int32)
        rows[:, 0] = index  # first_q
        rows[:, 1] = 1  # q_tokens
        rows[:, 2] = index  # first_append
        rows[:, 3] = 1  # append_tokens
        rows[:, 4] = length - 1  # keep_length
        rows[:, 5] = index * blocks_each  # table
        steps = torch.zeros(planes, 4, dtype=torch.int32)
        steps[:, 0] = batch
        steps[:, 1] = torch.arange(planes, dtype=torch.int32)
        self.out = torch.full_like(q, float("nan"))
        self.lse = torch.empty(HEADS, batch, device="cuda")
        self.table = table
        self.keep = [rows.cuda(), steps.cuda(), q, k, v]
        problem = Problem(1, HEADS, KV_HEADS, DIM, BLOCK, planes, blocks, batch, 1, batch, 1, DIM ** -0.5,
                          self.cache.data_ptr(), self.keep[1].data_ptr(), self.keep[0].data_ptr(),
                          table.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), self.out.data_ptr(),
                          self.lse.data_ptr(), None)
        self.workspace = torch.zeros(library.ringattn_paged_workspace_bytes(ctypes.byref(problem)),
                                     dtype=torch.uint8, device="cuda")
        problem.workspace = self.workspace.data_ptr()
        self.handles = []
        for plane in range(planes):
            problem.step = self.keep[1].data_ptr() + plane * 16
            handle = library.ringattn_paged_create(ctypes.byref(problem))
            if not handle:
                sys.exit("create failed")
            self.handles.append(handle)

    def sequence(self, row):
        """K and V of plane 0."""
        return [self.cache[0, which][self.table[row].long()].flatten(0, 1) for which in (0, 1)]

    def run(self, planes):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for handle in self.handles[:planes]:
            if self.library.ringattn_paged_enqueue(handle, stream):
                sys.exit("enqueue failed")

    def release(self):
        for handle in self.handles:
            self.library.ringattn_paged_release(handle)


class Contiguous:
    """A peer on contiguous caches [planes, 2, batch, length, heads, dim]."""

    def __init__(self, kind, cache, length, inputs):
        self.kind, self.cache = kind, cache
        self.q, self.k, self.v = [t.unsqueeze(1) for t in inputs]
        self.lengths = torch.full((cache.shape[2],), length - 1, dtype=torch.int32, device="cuda")
        self.out = None

    def run(self, planes):
        for plane in range(planes):
            k, v = self.cache[plane, 0], self.cache[plane, 1]
            if self.kind == "FlashAttention-3":
                from fa3_fwd_interface import flash_attn_with_kvcache  # pylint: disable=import-error
                self.out = flash_attn_with_kvcache(
                    self.q, k, v, k=self.k, v=self.v, cache_seqlens=self.lengths, causal=True)
            else:
                with sdpa_kernel(getattr(SDPBackend, self.kind)):
                    self.out = F.scaled_dot_product_attention(
                        self.q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                        enable_gqa=True).transpose(1, 2)


def capture(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def time_us(graph, repeats):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def error(out, inputs, keys, values, row):
    q = inputs[0][row].float().view(KV_HEADS, HEADS // KV_HEADS, DIM)
    k, v = [t.float().transpose(0, 1) for t in (keys, values)]
    p = (q @ k.transpose(1, 2) * DIM ** -0.5).softmax(-1)
    expected = (p @ v).view(HEADS, DIM)
    return float((out.float().view(HEADS, DIM) - expected).norm() / expected.norm())


def measure(library, batch, length, rounds):
    planes = max(1, min(16, COLD_BYTES // (batch * length * TOKEN_BYTES)))
    inputs = [torch.randn(batch, heads, DIM, device="cuda", dtype=torch.bfloat16)
              for heads in (HEADS, KV_HEADS, KV_HEADS)]
    name = f"decode batch {batch} of {length} keys"
    ours = Ours(library, batch, length, planes, inputs)
    cache = torch.empty(planes, 2, batch, length, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16).normal_()
    graphs = {}
    graphs["ours"] = capture(lambda: ours.run(planes))
    # All planes' results lie in one place: plane 0 again, alone.
    ours.run(1)
    torch.cuda.synchronize()
    rows = {0, batch - 1, batch // 2}
    worst = max(error(ours.out[row], inputs, *ours.sequence(row), row) for row in rows)
    if not worst < 1e-2:
        sys.exit(f"{name}: ours differs from the reference by {worst}")
    for kind in ("FlashAttention-3", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
        peer = Contiguous(kind, cache, length, inputs)
        try:
            peer.run(1)
            torch.cuda.synchronize()
            worst = max(error(peer.out[row, 0], inputs, cache[0, 0, row], cache[0, 1, row], row) for row in rows)
            if not worst < 1e-2:
                print(f"{name},{kind} differs from the reference by,{worst:.3g},relative", flush=True)
                continue
            graphs[kind] = capture(lambda peer=peer: peer.run(planes))
        except Exception as failure:  # pylint: disable=broad-exception-caught
            print(f"# {name}: {kind}: {str(failure).splitlines()[0][:120]}", flush=True)
    samples = {kind: [] for kind in graphs}
    repeats = {kind: max(1, min(100, int(4000 / time_us(graph, 2)))) for kind, graph in graphs.items()}
    for _ in range(rounds):
        for kind, graph in graphs.items():
            samples[kind].append(time_us(graph, repeats[kind]) / planes)
    medians = {kind: statistics.median(times) for kind, times in samples.items()}
    for kind, us in medians.items():
        print(f"{name},{kind},{us:.5g},us", flush=True)
    peers = {kind: us for kind, us in medians.items() if kind != "ours"}
    if peers:
        best = min(peers, key=peers.get)
        print(f"{name},{best} / ours,{peers[best] / medians['ours']:.4g},time", flush=True)
    ours.release()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--batches", default="1,4,16,64,256")
    parser.add_argument("--lengths", default="2048,8192,32768,131072")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    library = load(args.library)
    torch.manual_seed(1)
    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for batch in map(int, args.batches.split(",")):
        for length in map(int, args.lengths.split(",")):
            if batch * length * TOKEN_BYTES <= MOST_BYTES:
                measure(library, batch, length, args.rounds)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
