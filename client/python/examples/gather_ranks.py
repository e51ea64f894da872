"""Ranks of torch.distributed that each hold a piece of the sequence: rank 0 gathers the pieces, calls, and scatters the
results: python gather_ranks.py 127.0.0.1:7700
"""
import sys
import tempfile

import torch
import torch.distributed as dist

import ringattn

RANKS = 2


def gather(piece: torch.Tensor) -> torch.Tensor | None:
    """The ranks' pieces along the sequence, on rank 0."""
    pieces = [torch.empty_like(piece) for _ in range(RANKS)] if dist.get_rank() == 0 else None
    dist.gather(piece.contiguous(), pieces)
    return None if pieces is None else torch.cat(pieces, 1)


def scatter(whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """This rank's piece of rank 0's tensor."""
    piece = torch.empty_like(like, memory_format=torch.contiguous_format)
    dist.scatter(piece, None if whole is None else [part.contiguous() for part in whole.chunk(RANKS, 1)])
    return piece


class Attention(torch.autograd.Function):
    """Causal attention over the whole sequence. Tensors: [batch, seq_len / RANKS, heads, head_dim]."""

    @staticmethod
    def forward(ctx, q, k, v):
        whole = [gather(piece) for piece in (q, k, v)]
        ctx.save_for_backward(q, k, v)
        result = None
        if dist.get_rank() == 0:
            # The workers keep the tensors, so that the backward sends only the gradient of out.
            result = ringattn.default_client().forward(*whole, causal=True, retain=600)
            ctx.residual = result.report.residual
            assert ctx.residual is not None, result.report.residual_reason
        return scatter(None if result is None else result.out, q)

    @staticmethod
    def backward(ctx, dout):
        whole, result = gather(dout), None
        if dist.get_rank() == 0:
            result = ringattn.default_client().backward(whole, residual=ctx.residual)
        return tuple(scatter(None if result is None else gradient, piece)
                     for gradient, piece in zip(result[:3] if result else (None,) * 3, ctx.saved_tensors))


def whole_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 256, heads, 32, generator=generator) for heads in (4, 2, 2)]


def run_rank(rank: int, address: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}/rendezvous", rank=rank, world_size=RANKS)
    if rank == 0:
        ringattn.set_default_client(ringattn.connect(address))
    pieces = [tensor.chunk(RANKS, 1)[rank].clone().requires_grad_() for tensor in whole_tensors()]
    out = Attention.apply(*pieces)
    out.square().sum().backward()
    results = [gather(piece) for piece in (out.detach(), *(piece.grad for piece in pieces))]
    if rank == 0:
        torch.save(results, f"{store}/results")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.start_processes(run_rank, (sys.argv[1], store), nprocs=RANKS, start_method="spawn")
        results = torch.load(f"{store}/results")
    q, k, v = (tensor.requires_grad_() for tensor in whole_tensors())
    k_heads, v_heads = (tensor.repeat_interleave(2, 2).transpose(1, 2) for tensor in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k_heads, v_heads, is_causal=True)
    expected = [out.transpose(1, 2), *torch.autograd.grad(out.square().sum(), (q, k, v))]
    error = max((ours - theirs).abs().max().item() for ours, theirs in zip(results, expected))
    assert error < 1e-4, error
    print(f"out, dq, dk and dv of {RANKS} ranks differ from PyTorch's by at most {error:.1e}")
