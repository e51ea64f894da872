"""nnscaler's wrappers: groups as global ranks, whole tensors without a group."""
import os

import pytest
import reference

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import torch_reference  # noqa: E402
from sharded_cases import Case, call_on_rank, check, expected, tokens_of_rank  # noqa: E402

import ringattn  # noqa: E402
import ringattn.nnscaler  # noqa: E402


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name, options", [
    ("wrap_ring_attn", {}), ("wrap_zigzag_attn", {}), ("wrap_ring_attn", {"causal": False}),
    ("wrap_zigzag_attn", {"window_size": (30, 0), "alibi_slopes": torch.tensor([0.1, 0.4])}),
    ("wrap_ring_attn_varlen", {"softmax_scale": 0.7, "causal": True}),
    ("wrap_ring_attn_varlen", {"dropout_p": 0.2, "dropout_seed": 3, "softcap": 2.0}),
])
def test_forward_and_backward(ranks, name, options, world_size):
    if "varlen" not in name:
        options = {"causal": True} | options  # the default of the wrapper
    check(Case(name, lengths=(12, 31, 21) if "varlen" in name else (64,), options=options), ranks(world_size))


def of_some_ranks(rank, world_size, members, case):
    if rank not in members:
        with pytest.raises(ValueError, match=f"process_group: is .*, without this process's rank {rank}"):
            ringattn.nnscaler.wrap_ring_attn_func(*[torch.zeros(1, 4, 2, 8)] * 3, process_group=members)
        return None
    return [call_on_rank(members.index(rank), len(members), case, group=members) for _ in range(2)]


def test_a_group_of_some_ranks(ranks):
    case = Case("wrap_ring_attn", lengths=(24,), options={"causal": True})
    results = ranks(4).run(of_some_ranks, [1, 2], case)
    for index, member in enumerate([1, 2]):
        rows = tokens_of_rank(case, index, 2).numpy()
        for values in results[member]:
            for ours, whole in zip((values[0], *values[2:]), [whole for i, whole in enumerate(expected(case)) if i != 1]):
                reference.close(ours, whole.take(rows, 1), 2e-5)


def with_wrong_ranks(rank, world_size, members):
    return ringattn.nnscaler.wrap_ring_attn_func(*[torch.zeros(1, 4, 2, 8)] * 3, process_group=members)


@pytest.mark.parametrize("members", [[0, 5], [0, 0, 1], [-1, 0], []])
def test_numbers_that_are_no_ranks(ranks, members):
    for _, kind, text in ranks(2).outcomes(with_wrong_ranks, members):
        assert kind == "ValueError" and text.startswith(f"process_group: is {members}; must be different ranks from 0 to 1")


@pytest.mark.parametrize("members, kind, match", [
    (3, "TypeError", "process_group: is an int"), ([0, 1.5], "InvalidArgumentError", "process_group: is 1.5"),
    ([7], "ValueError", "process_group: is [7]; must be different ranks from 0 to 1")])
def test_groups_that_are_none(ranks, members, kind, match):
    for _, found, text in ranks(2).outcomes(with_wrong_ranks, members):
        assert found == kind and match in text, (found, text)


@pytest.mark.parametrize("process_group", [None, (0,)])
def test_whole_tensors(default_client, process_group):
    q, k, v = (torch.randn(1, 20, 2, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 20, 20, requires_grad=True)
    for wrapper in (ringattn.nnscaler.wrap_ring_attn_func, ringattn.nnscaler.wrap_zigzag_attn_func):
        out = wrapper(q, k, v, softcap=2.0, bias=bias, process_group=process_group)
        exact = torch_reference.attention(q, k, v, causal=True, softcap=2.0, bias=bias)[0]
        reference.close(out.detach(), exact.detach(), 2e-5)
        for ours, theirs in zip(torch.autograd.grad(out.square().sum(), (q, bias)),
                                torch.autograd.grad(exact.square().sum(), (q, bias))):
            reference.close(ours, theirs, 5e-5)
    offsets = torch.tensor([0, 6, 20])
    out = ringattn.nnscaler.wrap_ring_attn_varlen_func(q[0], k[0], v[0], offsets, offsets, softmax_scale=0.5,
                                                       process_group=process_group)
    exact = torch.cat([torch_reference.attention(q[:, a:b], k[:, a:b], v[:, a:b], softmax_scale=0.5)[0][0]
                       for a, b in ((0, 6), (6, 20))])
    reference.close(out.detach(), exact.detach(), 2e-5)


def with_bias(rank, world_size, shape):
    q, bias = biased(shape)
    q, bias = (tensor.chunk(world_size, axis)[rank].clone().requires_grad_() for tensor, axis in ((q, 1), (bias, 2)))
    out = ringattn.nnscaler.wrap_ring_attn_func(q, q, q, bias=bias, process_group=range(world_size))
    return out.detach(), *torch.autograd.grad(out.square().sum(), (q, bias))


def biased(shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 12, 2, 8, generator=generator), torch.randn(*shape, 12, 12, generator=generator)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1, 2)])
def test_bias(ranks, shape):
    """A rank passes the bias of its queries and all keys, and receives that gradient."""
    q, bias = (tensor.requires_grad_() for tensor in biased(shape))
    exact = torch_reference.attention(q, q, q, causal=True, bias=bias)[0]
    wanted = [exact.detach(), *torch.autograd.grad(exact.square().sum(), (q, bias))]
    for axis, whole, *of_ranks in zip((1, 1, 2), wanted, *ranks(2).run(with_bias, shape)):
        reference.close(torch.cat(of_ranks, axis), whole, 2e-5)


def varlen_with_offsets(rank, world_size, offsets):
    q = torch.zeros(4, 2, 8)
    return ringattn.nnscaler.wrap_ring_attn_varlen_func(q, q, q, *[torch.tensor(offsets)] * 2, process_group=(0, 1))


def test_offsets_of_one_rank_only(ranks):
    for _, kind, text in ranks(2).outcomes(varlen_with_offsets, [0, 4]):
        assert kind == "InvalidArgumentError"
        assert "cu_seqlens_q: ends with 4; the 2 ranks have 4 tokens each" in text
