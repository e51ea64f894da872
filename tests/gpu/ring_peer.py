#!/usr/bin/env python3
"""The peer of our ring: zigzag ring attention as in ring-flash-attention, reimplemented in PyTorch.

One process per GPU, NCCL. Rank r holds pieces r and 2W - 1 - r of 2W. Forward: each step starts an
exchange of K and V with the neighbours, calls FA2 on what is there, and merges the partial result by
log-sum-exp in PyTorch operations. Backward: K and V go around again, and fp32 dK and dV follow one hop
behind. In step 0 a rank works on its own keys, causal; then on the first half of K/V that come from a
lower rank, or with the second half of its queries on all of those from a higher one, never masked.

Verifies a short sequence against one process in fp64, then times: medians of a call's time from a common
barrier to the last rank's end. "backward" is forward and backward. TFLOP/s by 4 S S D H halved for the
mask, 3.5 times that for backward.

  ring_peer.py [--world_size=W] [--tokens=65536,131072,262144] [--heads=32/8,32/32] [--json=FILE]
  ring_peer.py --device=cpu --world_size=3 --heads=4/2 --dim=32 --tokens=512     the same on gloo, with
      plain fp32 attention in FA2's place
"""
import argparse
import dataclasses
import datetime
import json
import os
import socket
import statistics
import sys
import time

# Multicast serves collectives, which nothing here needs; shared hosts may not stand it.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402


# --------------------------------------------------------------------- kernels; tensors are [1, S, H, D]

class Flash:
    """PyTorch's FA2."""

    dtype, device = torch.bfloat16, "cuda"
    tolerance = 2e-2  # bf16: P, dS and each step's dQ are rounded

    def __init__(self):
        self.random = None  # FA2's dropout state: there even without dropout

    def forward(self, q, k, v, causal):
        """out, and lse [1, H, S] in fp32."""
        out, lse, *self.random, _ = torch.ops.aten._flash_attention_forward.default(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, causal):
        return torch.ops.aten._flash_attention_backward.default(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, *self.random)


class Plain:
    """Attention as it is written down, in the inputs' type; the reference too."""

    dtype, device = torch.float32, "cpu"
    tolerance = 1e-4

    @staticmethod
    def probabilities(q, k, causal):
        """Scores, masked, and softmax_scale; K repeated for the heads that share it."""
        k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scale = q.shape[-1] ** -0.5
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores.masked_fill_(mask, float("-inf"))
        return scores, scale

    def forward(self, q, k, v, causal):
        scores, _ = self.probabilities(q, k, causal)
        lse = scores.logsumexp(-1)
        v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        return torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v), lse

    def backward(self, dout, q, k, v, out, lse, causal):
        scores, scale = self.probabilities(q, k, causal)
        group = q.shape[2] // k.shape[2]
        p = (scores - lse[..., None]).exp()
        wide_k, wide_v = (t.repeat_interleave(group, dim=2) for t in (k, v))
        delta = (dout * out).sum(-1).transpose(1, 2)
        ds = p * (torch.einsum("bqhd,bkhd->bhqk", dout, wide_v) - delta[..., None]) * scale

        def shared(gradient):
            return gradient.unflatten(2, (k.shape[2], group)).sum(3)
        return (torch.einsum("bhqk,bkhd->bqhd", ds, wide_k),
                shared(torch.einsum("bhqk,bqhd->bkhd", ds, q)),
                shared(torch.einsum("bhqk,bqhd->bkhd", p, dout)))


# --------------------------------------------------------------------- the ring

class Exchange:
    """Tensors to the next rank while as many come from the one before, in one group."""

    def __init__(self, rank, world_size):
        self.next, self.previous = (rank + 1) % world_size, (rank - 1) % world_size
        self.requests = []

    def start(self, tensors):
        received = [torch.empty_like(tensor) for tensor in tensors]
        operations = []
        for ours, theirs in zip(tensors, received):
            operations += [dist.P2POp(dist.isend, ours, self.next),
                           dist.P2POp(dist.irecv, theirs, self.previous)]
        self.requests = dist.batch_isend_irecv(operations)
        return received

    def wait(self):
        for request in self.requests:
            request.wait()
        self.requests = []


class Ring:
    def __init__(self, kernels, rank, world_size):
        self.kernels, self.rank, self.world_size = kernels, rank, world_size

    def exchange(self):
        return Exchange(self.rank, self.world_size)

    def forward(self, q, k, v):
        """out in q's type, lse [1, H, S] in fp32."""
        half = q.shape[1] // 2
        exchange = self.exchange()
        out = lse = None  # fp32; lse as [1, S, H, 1]
        for step in range(self.world_size):
            if step + 1 < self.world_size:
                arriving = exchange.start([k, v])
            if step == 0:
                first, first_lse = self.kernels.forward(q, k, v, True)
                out, lse = first.float(), columns(first_lse)
            elif step <= self.rank:  # from a lower rank: no query sees its second half
                merge(out, lse, *self.kernels.forward(q, k[:, :half], v[:, :half], False))
            else:  # from a higher rank: it is in the past of our second half only
                merge(out[:, half:], lse[:, half:],
                      *self.kernels.forward(q[:, half:], k, v, False))
            if step + 1 < self.world_size:
                exchange.wait()
                k, v = arriving
        return out.to(q.dtype), lse[..., 0].transpose(1, 2).contiguous()

    def backward(self, dout, q, k, v, out, lse):
        """dq, dk, dv in fp32."""
        half = q.shape[1] // 2
        second = [t[:, half:] for t in (dout, q, out)]
        second_lse = lse[:, :, half:].contiguous()
        keys, gradients = self.exchange(), self.exchange()
        dq = dk = dv = coming = None
        for step in range(self.world_size):
            if step + 1 < self.world_size:
                arriving = keys.start([k, v])
            if step == 0:
                dq, dk, dv = (t.float() for t in
                              self.kernels.backward(dout, q, k, v, out, lse, True))
            else:
                if step <= self.rank:
                    more_q, more_k, more_v = self.kernels.backward(
                        dout, q, k[:, :half], v[:, :half], out, lse, False)
                    dq += more_q
                else:
                    more_q, more_k, more_v = self.kernels.backward(
                        second[0], second[1], k, v, second[2], second_lse, False)
                    dq[:, half:] += more_q
                # The gradients of these keys, as they stood when the rank before us sent them on.
                gradients.wait()
                dk, dv = coming
                rows = more_k.shape[1]
                dk[:, :rows] += more_k
                dv[:, :rows] += more_v
            if step + 1 < self.world_size:
                keys.wait()
                k, v = arriving
            coming = gradients.start([dk, dv])
        gradients.wait()  # home
        return dq, *coming


def columns(lse):
    return lse.transpose(1, 2).unsqueeze(-1).contiguous()


def merge(out, lse, more, more_lse):
    """Into out and lse, in place."""
    more_lse = columns(more_lse)
    out.lerp_(more.float(), torch.sigmoid(more_lse - lse))
    torch.logaddexp(lse, more_lse, out=more_lse)
    lse.copy_(more_lse)


# --------------------------------------------------------------------- measuring

@dataclasses.dataclass
class Member:
    """One process."""
    args: argparse.Namespace
    rank: int
    kernels: object

    @property
    def world_size(self):
        return self.args.world_size

    @property
    def device(self):
        return torch.device("cuda", self.rank) if self.kernels.device == "cuda" else "cpu"

    def synchronize(self):
        if self.kernels.device == "cuda":
            torch.cuda.synchronize()

    def random(self, tokens, heads, stream):
        """This rank's pieces; the same numbers for the same (rank, stream)."""
        generator = torch.Generator(self.device).manual_seed(1000 * stream + self.rank)
        return torch.randn(1, tokens // self.world_size, heads, self.args.dim,
                           device=self.device, generator=generator).to(self.kernels.dtype)

    def inputs(self, tokens, heads, kv_heads):
        return [self.random(tokens, count, stream)
                for stream, count in enumerate((heads, kv_heads, kv_heads, heads))]

    def largest(self, value):
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return max(values)

    def seconds(self, function):
        """Until the last rank is done."""
        self.synchronize()
        dist.barrier()
        self.synchronize()
        begin = time.perf_counter()
        function()
        self.synchronize()
        return self.largest(time.perf_counter() - begin)


def whole(member, piece):
    """All ranks' pieces of a [1, S, H, D] tensor in the sequence's order, fp64, on every rank."""
    pieces = [torch.empty_like(piece) for _ in range(member.world_size)]
    dist.all_gather(pieces, piece.contiguous())
    halves = [half for piece in pieces for half in piece.double().chunk(2, dim=1)]
    # Rank r's halves are pieces r and 2W - 1 - r.
    return torch.cat([*halves[0::2], *reversed(halves[1::2])], dim=1)


def errors_of(member, inputs, out, lse, gradients):
    """The worst relative error of out, dq, dk, dv in 2-norm, and of lse, as {name: error}."""
    reference = Plain()
    exact_q, exact_k, exact_v, exact_dout = (whole(member, t) for t in inputs)
    exact_out, exact_lse = reference.forward(exact_q, exact_k, exact_v, True)
    exact = {"out": exact_out}
    exact.update(zip(("dq", "dk", "dv"), reference.backward(
        exact_dout, exact_q, exact_k, exact_v, exact_out, exact_lse, True)))
    errors = {name: float((whole(member, actual) - exact[name]).norm() / exact[name].norm())
              for name, actual in zip(("out", "dq", "dk", "dv"), (out, *gradients))}
    errors["lse"] = float((whole(member, columns(lse)) - columns(exact_lse)).abs().max())
    return errors


def verify(member, heads, kv_heads):
    q, k, v, dout = member.inputs(member.args.check_tokens, heads, kv_heads)
    ring = Ring(member.kernels, member.rank, member.world_size)
    out, lse = ring.forward(q, k, v)
    gradients = ring.backward(dout, q, k, v, out, lse)
    return errors_of(member, (q, k, v, dout), out, lse, gradients)


def time_passes(member, tokens, heads, kv_heads):
    q, k, v, dout = member.inputs(tokens, heads, kv_heads)
    ring = Ring(member.kernels, member.rank, member.world_size)

    def forward():
        return ring.forward(q, k, v)

    def backward():
        ring.backward(dout, q, k, v, *forward())

    flops = 4 * tokens * tokens * member.args.dim * heads / 2
    rows = []
    for name, function, factor in (("forward", forward, 1.0), ("backward", backward, 3.5)):
        function()  # warm
        times = [member.seconds(function) for _ in range(member.args.rounds)]
        median = statistics.median(times)
        rows.append({"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "pass": name,
                     "median_seconds": median, "seconds": times,
                     "tflops_per_gpu": flops * factor / median / member.world_size / 1e12})
    return rows


def point_to_point(member, count_bytes):
    """Bytes per second, per GPU and way: around the ring, and between ranks 0 and 1."""
    ours = torch.zeros(count_bytes, dtype=torch.uint8, device=member.device)
    theirs = torch.empty_like(ours)
    rank, world_size = member.rank, member.world_size

    def ring():
        return [dist.P2POp(dist.isend, ours, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, theirs, (rank - 1) % world_size)]

    def pair():
        return [] if rank > 1 else [dist.P2POp(dist.isend, ours, 1 - rank),
                                    dist.P2POp(dist.irecv, theirs, 1 - rank)]

    def one_way():
        return ([dist.P2POp(dist.isend, ours, 1)] if rank == 0 else
                [dist.P2POp(dist.irecv, theirs, 0)] if rank == 1 else [])

    def repeat(operations, times):
        for _ in range(times):
            if listed := operations():
                for request in dist.batch_isend_irecv(listed):
                    request.wait()

    rows = []
    times = 5
    for name, operations in (("ring, both ways", ring), ("ranks 0 and 1, both ways", pair),
                             ("rank 0 to 1", one_way)):
        repeat(operations, 1)
        seconds = statistics.median(
            member.seconds(lambda operations=operations: repeat(operations, times))
            for _ in range(member.args.rounds)) / times
        rows.append({"pattern": name, "bytes": count_bytes, "bytes_per_second": count_bytes / seconds})
    return rows


def serve(rank, args, port):
    kernels = Flash() if args.device == "cuda" else Plain()
    options = {}
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=rank,
                            init_method=f"tcp://127.0.0.1:{port}", world_size=args.world_size,
                            timeout=datetime.timedelta(seconds=120), **options)
    member = Member(args, rank, kernels)
    report = {"world_size": args.world_size, "torch": torch.__version__, "dim": args.dim,
              "kernels": type(kernels).__name__, "verified": True, "errors": {}, "rows": [],
              "p2p": []}
    with torch.inference_mode():
        for heads, kv_heads in args.heads:
            errors = verify(member, heads, kv_heads)
            report["errors"][f"{heads}/{kv_heads}"] = errors
            # A NaN is not less than anything.
            report["verified"] &= all(error < kernels.tolerance for error in errors.values())
        if report["verified"]:
            report["p2p"] = point_to_point(member, args.p2p_bytes)
            for tokens in args.tokens:
                for heads, kv_heads in args.heads:
                    report["rows"] += time_passes(member, tokens, heads, kv_heads)
    if rank == 0:
        print_report(report)
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(report, file)
    dist.barrier()
    dist.destroy_process_group()
    if not report["verified"]:
        sys.exit(1)


def print_report(report):
    print(f"torch {report['torch']}, {report['kernels']}, {report['world_size']} ranks, "
          f"head_dim {report['dim']}, verified: {report['verified']}, {report['errors']}")
    for rate in report["p2p"]:
        print(f"{rate['pattern']}: {rate['bytes_per_second'] / 1e9:.1f} GB/s")
    if report["rows"]:
        print("| tokens | heads | pass | TFLOP/s per GPU | median ms |\n|---|---|---|---|---|")
    for row in report["rows"]:
        print(f"| {row['tokens']} | {row['heads']}/{row['kv_heads']} | {row['pass']} | "
              f"{row['tflops_per_gpu']:.4g} | {row['median_seconds'] * 1e3:.2f} |", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--world_size", type=int, default=0)
    parser.add_argument("--tokens", default="65536,131072,262144", help="in total")
    parser.add_argument("--heads", default="32/8,32/32")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check_tokens", type=int, default=2048)
    parser.add_argument("--p2p_bytes", type=int, default=256 << 20)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    args.world_size = args.world_size or (torch.cuda.device_count() if args.device == "cuda" else 2)
    args.heads = [tuple(map(int, pair.split("/"))) for pair in args.heads.split(",")]
    args.tokens = [int(tokens) for tokens in args.tokens.split(",")]
    if args.world_size < 2:
        parser.error("a ring needs two ranks")
    # Two pieces a rank of whole tiles: FA2's partial tiles are not what is measured here.
    unit = 2 * args.world_size
    args.tokens = [tokens // unit * unit for tokens in args.tokens]
    args.check_tokens = args.check_tokens // unit * unit
    return args


def main():
    args = parse()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(serve, args=(args, port), nprocs=args.world_size)


if __name__ == "__main__":
    main()
