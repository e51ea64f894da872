"""Models under DistributedDataParallel and FSDP, whose parameters are arguments of attention. CPUs and gloo."""
import contextlib
import os

import pytest

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

TOKENS, HEADS, DIM = 12, 2, 16


class Layer(torch.nn.Module):
    """Attention with trained sinks and biases: by the service, or by PyTorch."""

    def __init__(self, is_ours):
        super().__init__()
        torch.manual_seed(1)
        self.is_ours = is_ours
        self.q, self.k, self.v, self.out = (torch.nn.Linear(HEADS * DIM, HEADS * DIM) for _ in range(4))
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))
        self.bias = torch.nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS))

    def forward(self, x):
        import ringattn

        q, k, v = (layer(x).unflatten(-1, (HEADS, DIM)) for layer in (self.q, self.k, self.v))
        if self.is_ours:
            out, _ = ringattn.attention(q, k, v, sinks=self.sinks, bias=self.bias)
        else:
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5 + self.bias
            sinks = self.sinks[None, :, None, None].expand(len(q), -1, TOKENS, 1)
            out = torch.einsum("bhqk,bkhd->bqhd", torch.cat([scores, sinks], -1).softmax(-1)[..., :-1], v)
        return self.out(out.flatten(-2))


def wrapped(kind, layer):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if kind.startswith("DDP"):
        layer = checkpoint_wrapper(layer) if "checkpoint" in kind else layer
        return DistributedDataParallel(layer, gradient_as_bucket_view="views" in kind)
    if kind == "FSDP 2":
        fully_shard(layer)
        return layer
    precision = MixedPrecision(param_dtype=torch.bfloat16) if "bfloat16" in kind else None
    return FullyShardedDataParallel(layer, device_id=torch.device("cpu"), mixed_precision=precision)


def steps(rank, world_size, kind):
    """The largest difference of a gradient of this rank from PyTorch's, after two accumulated micro-batches and one."""
    batches = torch.randn(3, 2 * world_size, TOKENS, HEADS * DIM, generator=torch.Generator().manual_seed(5))
    gradients = []
    for is_ours in (False, True):
        model = wrapped(kind, Layer(is_ours))
        for number, batch in enumerate(batches):
            alone = model.no_sync() if number < 2 and kind.startswith("DDP") else contextlib.nullcontext()
            with alone:
                model(batch[2 * rank:2 * rank + 2]).square().mean().backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gradients.append([getattr(gradient, "to_local", lambda gradient=gradient: gradient)() for gradient in found])
    assert len(gradients[0]) == len(gradients[1]) > 0
    return max((ours - exact).abs().max().item() / exact.abs().max().item() for exact, ours in zip(*gradients)
               if exact.numel())  # FSDP 2 leaves a rank without rows of a small parameter


def static_graph_steps(rank, world_size, is_ours, is_first_synchronized):
    """The gradients of this rank after steps under `static_graph`, of which some are accumulated without communication."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Layer(is_ours), static_graph=True)
    batches = torch.randn(4, 2 * world_size, TOKENS, HEADS * DIM, generator=torch.Generator().manual_seed(5))
    for synchronizes, batch in zip((is_first_synchronized, False, False, True), batches):
        with contextlib.nullcontext() if synchronizes else model.no_sync():
            model(batch[2 * rank:2 * rank + 2]).square().mean().backward()
    return [parameter.grad.numpy() for parameter in model.parameters()]


def test_static_graph_with_no_sync(ranks):
    """Gradients equal PyTorch's. Without a synchronized first step, PyTorch's reducer fails for every model."""
    exact, ours = (ranks(2).run(static_graph_steps, is_ours, True) for is_ours in (False, True))
    for expected, found in zip(exact, ours):
        assert all(abs(a - b).max() <= 1e-5 * abs(a).max() for a, b in zip(expected, found, strict=True))
    for is_ours in (False, True):
        for _, kind, text in ranks(2).outcomes(static_graph_steps, is_ours, False):
            assert kind == "RuntimeError" and "expect_autograd_hooks_ INTERNAL ASSERT FAILED" in text, text


@pytest.mark.parametrize("kind, bound", [
    ("DDP", 1e-5), ("DDP views", 1e-5), ("DDP checkpoint", 1e-5), ("FSDP", 1e-5), ("FSDP bfloat16", 0.03), ("FSDP 2", 1e-5),
])
def test_gradients_equal_pytorchs(ranks, kind, bound):
    assert max(ranks(2).run(steps, kind)) < bound
