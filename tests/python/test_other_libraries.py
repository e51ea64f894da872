"""The rows of docs/python.md about PyTorch's and xformers' functions: the named arguments give the same results."""
import os

import pytest
import torch_reference

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import ringattn  # noqa: E402

pytestmark = pytest.mark.usefixtures("default_client")
BATCH, QUERIES, KEYS, HEADS, KV_HEADS, DIM = 2, 9, 14, 4, 2, 16


def tensors(kv_heads=HEADS, queries=QUERIES):
    """q, k, v [batch, seq_len, heads, head_dim], with gradients."""
    return [torch.randn(BATCH, tokens, heads, DIM, requires_grad=True)
            for tokens, heads in ((queries, HEADS), (KEYS, kv_heads), (KEYS, kv_heads))]


def check(ours, exact, *leaves):
    weights = torch.randn_like(ours)
    assert (ours - exact).abs().max() < 1e-5
    for own, theirs in zip(torch.autograd.grad((ours * weights).sum(), leaves),
                           torch.autograd.grad((exact * weights).sum(), leaves)):
        assert (own - theirs).abs().max() < 1e-4


def sdpa(q, k, v, **options):
    return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)),
                                                            **options).transpose(1, 2)


def test_scaled_dot_product_attention():
    q, k, v = tensors()
    seen = torch.rand(BATCH, 1, QUERIES, KEYS) < 0.7
    seen[..., 0] = True
    added = torch.randn(1, HEADS, QUERIES, KEYS, requires_grad=True)
    check(ringattn.attention(q, k, v)[0], sdpa(q, k, v), q, k, v)
    check(ringattn.attention(q, k, v, softmax_scale=0.3)[0], sdpa(q, k, v, scale=0.3), q, k, v)
    check(ringattn.attention(q, k, v, mask=seen)[0], sdpa(q, k, v, attn_mask=seen), q, k, v)
    check(ringattn.attention(q, k, v, bias=added)[0], sdpa(q, k, v, attn_mask=added), q, k, v, added)
    both = ringattn.attention(q, k, v, mask=seen, bias=added)[0]
    check(both, sdpa(q, k, v, attn_mask=torch.where(seen, added, -torch.inf)), q, k, v, added)


def test_causality_is_aligned_to_the_last_key():
    """PyTorch aligns it to the first, so the same numbers of queries and keys give the same results."""
    q, k, v = tensors(queries=KEYS)
    check(ringattn.attention(q, k, v, causal=True)[0], sdpa(q, k, v, is_causal=True), q, k, v)
    q, k, v = tensors()
    last = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)
    check(ringattn.attention(q, k, v, causal=True)[0], sdpa(q, k, v, attn_mask=last), q, k, v)


def test_fewer_heads_of_keys():
    q, k, v = tensors(KV_HEADS)
    check(ringattn.attention(q, k, v)[0], sdpa(q, k, v, enable_gqa=True), q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_block_diagonal_masks(causal):
    """xformers' BlockDiagonalMask(.from_seqlens) and BlockDiagonalCausalMask, whose blocks are causal from their ends."""
    lengths = [3, 6, 1]
    q, k, v = (torch.randn(sum(lengths), HEADS, DIM, requires_grad=True) for _ in range(3))
    offsets = [0, 3, 9, 10]
    ours, _ = ringattn.attention(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=causal)
    exact = torch.cat([sdpa(*(x[None, a:b] for x in (q, k, v)), is_causal=causal)[0]
                       for a, b in zip(offsets, offsets[1:])])
    check(ours, exact, q, k, v)


def test_memory_efficient_attention():
    """xformers' p is dropout_p, and its attn_bias may be a tensor."""
    q, k, v = tensors()
    bias = torch.randn(BATCH, HEADS, QUERIES, KEYS)
    ours, _ = ringattn.attention(q, k, v, bias=bias, softmax_scale=0.2, dropout_p=0.25, dropout_seed=7)
    exact, _ = torch_reference.attention(q.double(), k.double(), v.double(), bias=bias.double(), softmax_scale=0.2,
                                         dropout_p=0.25, dropout_seed=7)
    assert (ours - exact).abs().max() < 1e-5
