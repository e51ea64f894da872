"""Gradients against PyTorch's own, with every argument; torch.compile, checkpointing, autograd's corners."""
import os
import shutil

import numpy as np
import pytest
import reference

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import torch_reference  # noqa: E402
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,  # noqa: E402
                                    create_selective_checkpoint_contexts)

import ringattn  # noqa: E402

B, SQ, SK, H, HKV, D, DV = 2, 33, 47, 4, 2, 16, 8
SEED = 0x1234567_89ABCDEF

pytestmark = pytest.mark.usefixtures("default_client")


def leaves(dtype=torch.float32, batch=(B,), queries=SQ, keys=SK, dim_v=DV):
    shapes = [(*batch, queries, H, D), (*batch, keys, HKV, D), (*batch, keys, HKV, dim_v)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def random_mask():
    mask = torch.rand(1, H, SQ, SK) < 0.7
    mask[:, :, 5] = False  # a row that sees nothing
    return mask


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (12, 3)},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.9},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "alibi per row": {"alibi_slopes": torch.linspace(0, 1, B * H).reshape(B, H), "causal": True},
    "bias": {"bias": lambda: torch.randn(1, H, SQ, SK, requires_grad=True)},
    "bias per batch": {"bias": lambda: torch.randn(B, 1, SQ, SK, requires_grad=True), "softcap": 2.0},
    "mask": {"mask": random_mask},
    "segments": {"q_segment_ids": torch.arange(B * SQ, dtype=torch.int32).reshape(B, SQ) // 9 % 4 - 1,
                 "kv_segment_ids": torch.arange(B * SK, dtype=torch.int32).reshape(B, SK) // 11 % 4 - 1},
    "sinks": {"sinks": lambda: torch.randn(H, requires_grad=True), "causal": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor([SEED])},
    "all": {"causal": True, "window": (30, -1), "softcap": 3.0, "softmax_scale": 0.4,
            "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "bias": lambda: torch.randn(B, H, SQ, SK,
                                                                                             requires_grad=True),
            "mask": random_mask, "sinks": lambda: torch.randn(H, requires_grad=True), "dropout_p": 0.2,
            "dropout_seed": torch.tensor([SEED])},
}


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 1.5e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name, dtype, bound):
    options = {key: value() if callable(value) else value for key, value in OPTIONS[name].items()}
    inputs = leaves(dtype)
    wanted = inputs + [options[key] for key in ("bias", "sinks") if key in options]
    out, lse = ringattn.attention(*inputs, **options)
    expected = dict(options)
    if "dropout_seed" in expected:
        expected["dropout_seed"] = SEED
    exact, exact_lse = torch_reference.attention(*inputs, **expected)
    assert out.dtype == dtype and lse.dtype == torch.float32
    reference.close(out.detach().double(), exact.detach(), bound)
    reference.close(lse.detach(), exact_lse.detach(), 2e-5)
    # Gradients as they come from a loss over out and lse: not contiguous, and of a scalar, expanded.
    weights = torch.randn(*out.shape[:-1], 2 * DV).to(dtype)[..., ::2]
    finite = torch.isfinite(exact_lse)
    statistics = torch.where(finite, torch.randn(lse.shape), 0.0)
    loss = (out * weights).sum() + (lse.masked_fill(~finite, 0) * statistics).sum()
    exact_loss = (exact * weights.double()).sum() + (exact_lse.masked_fill(~finite, 0) * statistics).sum()
    for ours, theirs in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(exact_loss, wanted)):
        assert ours.dtype == theirs.dtype
        reference.close(ours.double(), theirs.double(), bound)


def test_a_batch_without_rows():
    q, k, v = leaves(batch=(0,))
    bias = torch.randn(1, H, SQ, SK, requires_grad=True)
    out = ringattn.attention(q, k, v, causal=True, bias=bias)[0]
    assert out.shape == (0, SQ, H, DV)
    out.sum().backward()
    for leaf in (q, k, v, bias):
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any()


def test_packed_documents():
    cu_q, cu_k = torch.tensor([0, 5, 5, 33], dtype=torch.int32), torch.tensor([0, 20, 22, 47], dtype=torch.int32)
    q, k, v = leaves(batch=())
    options = {"causal": True, "alibi_slopes": torch.linspace(0, 1, 3 * H).reshape(3, H)}
    out, lse = ringattn.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    parts = []
    for i in range(3):
        rows, columns = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        if rows.start < rows.stop:
            parts.append(torch_reference.attention(q[None, rows], k[None, columns], v[None, columns], causal=True,
                                                   alibi_slopes=options["alibi_slopes"][i]))
    exact = torch.cat([part[0][0] for part in parts])
    reference.close(out.detach(), exact.detach(), 2e-5)
    assert lse.shape == (H, SQ)
    weights = torch.randn_like(out)
    gradients = zip(torch.autograd.grad((out * weights).sum(), (q, k, v)),
                    torch.autograd.grad((exact * weights).sum(), (q, k, v)))
    for ours, theirs in gradients:
        reference.close(ours, theirs, 2e-5)


def test_results_are_tensors_of_the_clients(default_client):
    q, k, v = (leaf.detach() for leaf in leaves())
    out, lse, _ = default_client.forward(q, k, v)
    assert isinstance(out, torch.Tensor) and not out.requires_grad and lse.shape == (B, H, SQ)
    gradients = default_client.backward(torch.ones_like(out), q, k, v, out=out, lse=lse)
    assert isinstance(gradients.dv, torch.Tensor) and gradients.dv.shape == v.shape


def test_zero_copy():
    from ringattn._arrays import take

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(2, 3).to(dtype)
        assert take(tensor, "q").memory.__array_interface__["data"][0] == tensor.data_ptr()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_whole(backend, tmp_path, monkeypatch):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor: no C++ compiler found")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    q, k, v = leaves()

    def model(q, k, v):
        return (ringattn.flash_attn_func(q * 2, k, v, causal=True, softcap=2.0) ** 2).sum()

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected = torch.autograd.grad(model(q, k, v), (q, k, v))
    for _ in range(2):  # compiled, and found again
        for ours, theirs in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected):
            reference.close(ours, theirs, 1e-6)


def test_operators_are_well_made():
    """PyTorch's own checks: schema, fake tensors, autograd registration, dispatch under AOT."""
    from ringattn.torch_ops import _attention

    q, k, v = leaves()
    no_tensors, options = (None,) * 9, (0.0, None, True, -1, -1, 0.0, False, False, False, [], [], [0, 0, 0, 0],
                                     -1)
    torch.library.opcheck(_attention, (q, k, v, *no_tensors, *options, "", False, "off"))
    kv = torch.stack([k, k], -3).detach().requires_grad_()
    torch.library.opcheck(_attention, (q, kv, None, *no_tensors, *options, "kv", False, "off"))
    qkv = torch.stack([q, q, q], -3).detach().requires_grad_()
    torch.library.opcheck(_attention, (qkv, None, None, *no_tensors, *options, "qkv", False, "off"))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_checkpointing_recomputes_the_same(dropout_p):
    q, k, v = leaves(dim_v=D)

    def layer(q, k, v):
        return ringattn.flash_attn_func(q.sin(), k, v, dropout_p=dropout_p)

    def gradients(run):
        torch.manual_seed(7)
        return torch.autograd.grad(run().square().sum(), (q, k, v))

    plain = gradients(lambda: layer(q, k, v))
    again = gradients(lambda: checkpoint(layer, q, k, v, use_reentrant=False))
    assert all((a == b).all() for a, b in zip(plain, again))


def test_selective_checkpointing_saves_attention(default_client, monkeypatch):
    q, k, v = leaves(dim_v=D)
    calls = []
    forward = type(default_client).forward
    monkeypatch.setattr(type(default_client), "forward", lambda *a, **o: calls.append(1) or forward(*a, **o))

    def policy(context, operator, *arguments, **options):
        saved = operator is torch.ops.ringattn.attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    out = checkpoint(lambda q, k, v: ringattn.flash_attn_func(q.sin(), k, v), q, k, v, use_reentrant=False,
                     context_fn=lambda: create_selective_checkpoint_contexts(policy))
    out.square().sum().backward()
    assert len(calls) == 1 and torch.isfinite(q.grad).all()


def test_dropout_is_drawn_from_the_generator():
    q, k, v = leaves()
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(ringattn.flash_attn_func(q, k, v, dropout_p=0.5))
    assert (draws[0] == draws[1]).all() and not (draws[0] == draws[2]).all()


def test_only_what_is_needed_is_differentiated():
    q, k, v = leaves()
    out, lse = ringattn.attention(q.detach(), k, v.detach())
    assert torch.autograd.grad(lse.sum(), k)[0].abs().sum() > 0
    with torch.no_grad():
        assert not ringattn.flash_attn_func(q, k, v).requires_grad
    out = ringattn.flash_attn_func(q, k, v)
    gradient, = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()


def test_default_client_options(default_client):
    q, k, v = leaves()
    ringattn.set_default_client(default_client, world_size=7)
    with pytest.raises(ringattn.FailedPreconditionError):
        ringattn.flash_attn_func(q, k, v)
    with pytest.raises(TypeError, match="causal"):
        ringattn.set_default_client(default_client, causal=True)


def test_default_client_by_the_environment(address, monkeypatch):
    q, k, v = leaves()
    ringattn.set_default_client(None)
    monkeypatch.setenv("RINGATTN_ADDRESS", address)
    assert ringattn.flash_attn_func(q, k, v).shape == (B, SQ, H, DV)
    ringattn.set_default_client(None)
    monkeypatch.delenv("RINGATTN_ADDRESS")
    with pytest.raises(RuntimeError, match="RINGATTN_ADDRESS"):
        ringattn.flash_attn_func(q, k, v)


def test_errors_pass_through_autograd():
    q, k, v = leaves(torch.float64)
    with pytest.raises(ringattn.InvalidArgumentError, match="q: is of type float64"):
        ringattn.flash_attn_func(q, k, v)
    q, k, v = leaves()
    with pytest.raises(ringattn.InvalidArgumentError, match="softcap"):
        ringattn.flash_attn_func(q, k, v, softcap=-1.0)


def test_mixed_libraries(default_client):
    q, k, v = (x.detach() for x in leaves())
    out = default_client.forward(q, k.numpy(), v).out
    assert isinstance(out, torch.Tensor)
    assert isinstance(default_client.forward(q.numpy(), k, v).out, np.ndarray)


def packed_leaves(tokens=75):
    torch.manual_seed(3)
    return torch.randn(tokens, 3, 2, D, requires_grad=True), torch.tensor([0, 20, 20, tokens], dtype=torch.int32)


def test_lse_per_document():
    """lse per document has a gradient, too; elements after a document's end have none."""
    qkv, cu = packed_leaves()
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    out, flat = ringattn.attention(qkv=qkv, **options)
    weights = torch.randn(2, 75)
    expected = torch.autograd.grad(out.sum() + (flat * weights).sum(), qkv)[0]
    for more in ({}, {"max_seqlen_q": 55}):
        out, lse = ringattn.attention(qkv=qkv, lse_format="per_document", **more, **options)
        assert lse.shape == (3, 2, 55)
        ours = torch.cat([lse[0, :, :20], lse[2]], -1)
        assert (ours == flat).all()
        gradient = torch.autograd.grad(out.sum() + (ours * weights).sum(), qkv)[0]
        assert (gradient == expected).all()
    with pytest.raises(ringattn.InvalidArgumentError, match="max_seqlen_q: is 60; the longest document has 55"):
        ringattn.attention(qkv=qkv, lse_format="per_document", max_seqlen_q=60, **options)
    with pytest.raises(ringattn.InvalidArgumentError, match="lse_format"):
        ringattn.attention(qkv=qkv[None], lse_format="per_document")


def test_packed_forms_compile_whole():
    qkv, cu = packed_leaves()

    def layer(qkv):
        out, lse = ringattn.attention(qkv=qkv, cu_seqlens_q=cu, cu_seqlens_k=cu, lse_format="per_document",
                                      max_seqlen_q=55)
        return out.square().sum() + lse[2].sum()

    expected = torch.autograd.grad(layer(qkv), qkv)[0]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert (torch.autograd.grad(compiled(qkv), qkv)[0] == expected).all()


def test_documents_bits_and_origins():
    """Options whose PyTorch tensors need no special rule: as in Client.forward."""
    qkv, cu = packed_leaves()
    client = ringattn.default_client()
    documents = [ringattn.Document(causal=True), ringattn.Document(), ringattn.Document(window=(5, 2))]
    bits = torch.randint(0, 256, (1, 2, 75, 7), dtype=torch.uint8)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "documents": documents, "mask": bits, "mask_bits": True,
               "bias": torch.randn(1, 1, 75, 55), "bias_before_softcap": True, "softcap": 2.0, "dropout_p": 0.3,
               "dropout_origin": (1, 4, 9, 3)}
    ours = ringattn.attention(qkv=qkv, dropout_seed=torch.tensor([5]), **options)[0]
    qkv = qkv.detach()
    expected = client.forward(qkv=qkv, dropout_seed=5, **options).out
    assert (ours == expected).all()
    for name, other in (("documents", ()), ("bias_before_softcap", False), ("dropout_origin", (0, 0, 0, 0))):
        assert (client.forward(qkv=qkv, dropout_seed=5, **options | {name: other}).out != expected).any(), name


def test_forms_that_make_no_sense():
    q, k, v = leaves()
    qkv = torch.zeros(1, 4, 3, 2, D)
    for call, text in [(lambda: ringattn.attention(q, k), "v: is missing"), (lambda: ringattn.attention(), "q: is miss"),
                       (lambda: ringattn.attention(q, qkv=qkv), "q: is given in addition to qkv"),
                       (lambda: ringattn.attention(kv=qkv), "q: is missing")]:
        with pytest.raises(TypeError, match=text):
            call()
    with pytest.raises(ringattn.InvalidArgumentError, match="kv: has the shape"):
        ringattn.attention(q, kv=qkv)
