"""Dilated attention against torchscale's definition: outputs and gradients of drawn cases, and arguments by name."""
import os

import numpy as np
import pytest
import reference

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import dilated_reference  # noqa: E402

import ringattn  # noqa: E402

BOUNDS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SEED = 0x1234567_89ABCDEF

pytestmark = pytest.mark.usefixtures("default_client")


def leaves(tokens, heads=4, kv_heads=4, dim=8, dim_v=8, batch=1, dtype=torch.float32):
    return [torch.randn(batch, tokens, count, columns).to(dtype).requires_grad_()
            for count, columns in ((heads, dim), (kv_heads, dim), (kv_heads, dim_v))]


def drawn(case):
    """Tensors, levels and options of one case. Most sequences have a partial last segment."""
    rng = np.random.default_rng(case)
    torch.manual_seed(case)
    batch, tokens = int(rng.integers(1, 3)), int(rng.integers(1, 90))
    heads = int(rng.integers(1, 8))
    kv_heads = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    dtype = [torch.float32, torch.float32, torch.bfloat16, torch.float16][case % 4]
    tensors = leaves(tokens, heads, kv_heads, *(int(n) for n in rng.choice([8, 16, 24], 2)), batch, dtype)
    count = int(rng.integers(1, 4))
    levels = (rng.integers(1, tokens + 20, count).tolist(), rng.integers(1, 7, count).tolist())
    options = {"is_causal": bool(rng.integers(2)), "head_offsets": str(rng.choice(["blocks", "modulo"])),
               "differentiate_weights": bool(rng.integers(3) == 0)}
    if rng.integers(3) == 0:
        options["key_padding_mask"] = torch.from_numpy(rng.random((batch, tokens)) < 0.3)
    if rng.integers(3) == 0:
        options |= {"dropout": 0.25, "dropout_seed": SEED + case}
    if rng.integers(3) == 0:
        options["softmax_scale"] = 0.4
    return tensors, levels, options


def check(tensors, levels, options, bound, **of_reference):
    out = ringattn.dilated_attention(*tensors, *levels, **options)
    exact = dilated_reference.attention(*tensors, *levels, **options, **of_reference)
    assert out.dtype == tensors[0].dtype
    reference.close(out.detach().double(), exact.detach(), bound)
    weights = torch.randn(out.shape).to(out.dtype)
    gradients = torch.autograd.grad((out * weights).sum(), tensors)
    expected = torch.autograd.grad((exact * weights.double()).sum(), tensors)
    # dq and dk are differences that may cancel: a row that sees one key has neither. Their size is that of dv.
    least = 0.05 * expected[2].double().norm()
    for ours, theirs in zip(gradients, expected):
        assert ours.dtype == theirs.dtype
        error, size = (ours.double() - theirs.double()).norm(), theirs.double().norm()
        assert error <= bound * max(size, least) + 1e-6, (error, size, least)


@pytest.mark.parametrize("case", range(72))
def test_drawn_cases(case):
    tensors, levels, options = drawn(case)
    check(tensors, levels, options, BOUNDS[tensors[0].dtype])


def test_drawn_cases_have_what_they_must():
    """The draw covers sequences with a partial last segment, several levels, and each option."""
    cases = [drawn(case) for case in range(72)]
    ragged = [tensors[0].shape[1] % min(length, tensors[0].shape[1]) != 0
              for tensors, levels, _ in cases for length in levels[0]]
    assert sum(ragged) > 40
    assert sum(len(levels[0]) > 1 for _, levels, _ in cases) > 30
    for name in ("is_causal", "differentiate_weights", "key_padding_mask", "dropout"):
        assert 10 < sum(options.get(name) is not None and options[name] is not False for _, _, options in cases), name
    assert sum(max(levels[1]) < tensors[0].shape[2] for tensors, levels, _ in cases) > 10  # offsets in blocks of heads


def test_with_a_small_ring(default_client):
    """Segments that lie across workers, under each schedule that exchanges something else."""
    tensors = leaves(97, batch=2, heads=6, kv_heads=3)
    for schedule in ("ring", "all_gather", "pass_q"):
        ringattn.set_default_client(default_client, world_size=3, schedule=schedule)
        check(tensors, ([40, 97], [2, 3]), {"is_causal": True}, 2e-5)


def test_padding_keys_of_torchscale():
    """Queries of torchscale see its zero keys only without is_causal, and with a partial last segment."""
    tensors = leaves(48)
    for levels, options in ((([16, 48], [2, 4]), {}), (([20, 60], [2, 3]), {"is_causal": True})):
        check(tensors, levels, options, 2e-5, padding_is_visible=True)
    seen = dilated_reference.attention(*tensors, [20], [2], padding_is_visible=True)
    unseen = dilated_reference.attention(*tensors, [20], [2])
    assert (seen - unseen).abs().max() > 0.01
    reference.close(ringattn.dilated_attention(*tensors, [20], [2]).detach(), unseen.detach(), 2e-5)


def test_both_gradients_differ():
    """Constant weights and differentiated weights have the same outputs, and different gradients of q and k."""
    tensors = leaves(40)
    results = []
    for differentiate_weights in (False, True):
        out = ringattn.dilated_attention(*tensors, [8, 40], [1, 2], differentiate_weights=differentiate_weights)
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    (out, dq, dk, dv), (out_2, dq_2, dk_2, dv_2) = results
    reference.close(out.detach(), out_2.detach(), 1e-5)
    reference.close(dv, dv_2, 1e-5)
    assert (dq - dq_2).norm() > 0.01 * dq.norm() and (dk - dk_2).norm() > 0.01 * dk.norm()


def test_number_of_requests(default_client, monkeypatch):
    tensors, calls = leaves(32), []
    forward = type(default_client).forward
    monkeypatch.setattr(type(default_client), "forward", lambda *a, **o: calls.append(1) or forward(*a, **o))
    for requires_grad, options, requests in ((False, {}, 1), (True, {}, 2), (True, {"differentiate_weights": True}, 1)):
        calls.clear()
        inputs = tensors if requires_grad else [tensor.detach() for tensor in tensors]
        ringattn.dilated_attention(*inputs, [8, 32], [1, 4], **options)
        assert len(calls) == requests


def test_levels_of_attention():
    """`attention` takes the service's levels, with gradients, also through lse and for packed documents."""
    q, k, v = leaves(30)
    level = ringattn.DilationLevel(10, 2, offset=1, head_begin=1, head_end=3)
    out, lse = ringattn.attention(q[0], k[0], v[0], dilation_levels=[level], cu_seqlens_q=[0, 12, 30],
                                  cu_seqlens_k=[0, 12, 30])
    assert torch.isneginf(lse[[0, 3]]).all() and torch.isneginf(lse[1, 12]) and torch.isfinite(lse[1, 13])
    scores = torch.einsum("ihd,jhd->hij", q[0], k[0]) * 8 ** -0.5
    place = torch.cat([torch.arange(12), torch.arange(18)])
    segment = torch.cat([torch.arange(12) // 10, 2 + torch.arange(18) // 10])
    seen = (segment[:, None] == segment) & (place % 10 % 2 == 1) & (place % 10 % 2 == 1)[:, None]
    exact = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)[1:3]
    finite = torch.isfinite(exact)
    reference.close(lse[1:3][finite].detach(), exact[finite].detach(), 2e-5)
    for ours, theirs in zip(torch.autograd.grad(lse[1:3][finite].sum(), (q, k)),
                            torch.autograd.grad(exact[finite].sum(), (q, k))):
        reference.close(ours, theirs, 2e-5)
    for field, bad in (("offset", ringattn.DilationLevel(8, 2, offset=-1)),
                       ("head_end", ringattn.DilationLevel(8, 2, head_end=-2))):
        with pytest.raises(ringattn.InvalidArgumentError, match=rf"dilation_levels\[0\].{field}: is -\d"):
            ringattn.attention(q, k, v, dilation_levels=[bad])


def test_groups_of_heads():
    """The levels that docs/python.md names for dilated-attention-pytorch: a segment length and a rate for each group."""
    q, k, v = leaves(48, heads=6, kv_heads=6)
    pairs = [(12, 1), (24, 2), (48, 3)]
    levels = [ringattn.DilationLevel(s, r, offset=i % r, head_begin=2 * i, head_end=2 * i + 2)
              for i, (s, r) in enumerate(pairs)]
    out = ringattn.attention(q, k, v, dilation_levels=levels, causal=True)[0]
    exact = torch.zeros_like(out)
    for i, (s, r) in enumerate(pairs):
        for begin in range(0, 48, s):
            at = slice(begin + i % r, begin + s, r), slice(2 * i, 2 * i + 2)
            parts = (x[:, at[0], at[1]].transpose(1, 2) for x in (q, k, v))
            exact[:, at[0], at[1]] = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)
    reference.close(out.detach(), exact.detach(), 2e-5)


def test_compiles_whole():
    tensors = leaves(24)

    def layer(q, k, v):
        return ringattn.dilated_attention(q * 2, k, v, [8, 24], [1, 2], is_causal=True).square().sum()

    expected = torch.autograd.grad(layer(*tensors), tensors)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(torch.autograd.grad(compiled(*tensors), tensors), expected):
        reference.close(ours, theirs, 1e-6)


def test_empty_sequences():
    for batch, tokens in ((0, 8), (2, 0)):
        tensors = leaves(tokens, batch=batch)
        out = ringattn.dilated_attention(*tensors, [4, 8], [1, 2])
        assert out.shape == tensors[0].shape
        out.sum().backward()
        assert all(tensor.grad.shape == tensor.shape for tensor in tensors)


UNSUPPORTED = {"attn_mask": torch.zeros(8, 8), "rel_pos": torch.zeros(8, 8), "incremental_state": {},
               "is_first_step": True, "seq_parallel": True}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_arguments(name):
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        ringattn.dilated_attention(*leaves(8), [4], [2], **{name: UNSUPPORTED[name]})


@pytest.mark.parametrize("text, levels, options", [
    ("segment_lengths: is empty", ([], []), {}),
    ("segment_lengths: is an int", (4, [1]), {}),
    (r"segment_lengths\[1\]: is 0", ([4, 0], [1, 2]), {}),
    (r"segment_lengths\[0\]: is 2.5", ([2.5], [1]), {}),
    (r"dilation_rates\[0\]: is -1", ([4], [-1]), {}),
    ("dilation_rates: has 1 numbers; must have 2", ([4, 8], [1]), {}),
    ("head_offsets: is 'paper'", ([4], [1]), {"head_offsets": "paper"}),
    ("is_causal: is 'no'", ([4], [1]), {"is_causal": "no"}),
    ("key_padding_mask: is torch.bool", ([4], [1]), {"key_padding_mask": torch.zeros(1, 7, dtype=torch.bool)}),
    ("dropout", ([4], [1]), {"dropout": 1.5, "dropout_seed": 1}),
    ("softmax_scale", ([4], [1]), {"softmax_scale": "big"}),
])
def test_invalid_arguments(text, levels, options):
    with pytest.raises(ringattn.InvalidArgumentError, match=text):
        ringattn.dilated_attention(*leaves(8), *levels, **options)


def test_invalid_tensors():
    q, k, v = leaves(8)
    with pytest.raises(TypeError, match="k: is a numpy.ndarray"):
        ringattn.dilated_attention(q, k.detach().numpy(), v, [4], [2])
    with pytest.raises(ringattn.InvalidArgumentError, match="q: has the shape"):
        ringattn.dilated_attention(q[0], k, v, [4], [2])
    with pytest.raises(ringattn.RingattnError, match="seq_len|dilation_levels"):
        ringattn.dilated_attention(q[:, :5], k, v, [4], [2])
    with pytest.raises(ringattn.RingattnError, match="dilation_levels"):
        ringattn.dilated_attention(*leaves(200, heads=140, kv_heads=1), [100], [70])  # 70 offsets in blocks of heads
