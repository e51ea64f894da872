"""flash-attn's functions: names, arguments, defaults, and what their packed forms mean."""
import importlib
import inspect
import os

import pytest
import reference

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import torch_reference  # noqa: E402

import ringattn  # noqa: E402

OPTIONS = [("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0),
           ("alibi_slopes", None), ("deterministic", False), ("return_attn_probs", False)]
NEEDED = inspect.Parameter.empty
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v"],
    "flash_attn_kvpacked_func": ["q", "kv"],
    "flash_attn_qkvpacked_func": ["qkv"],
    "flash_attn_varlen_func": ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
}
CU = torch.tensor([0, 7, 30, 41], dtype=torch.int32)

pytestmark = pytest.mark.usefixtures("default_client")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(ringattn, name)).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    more = [("block_table", None)] if name == "flash_attn_varlen_func" else []
    assert positional == [(needed, NEEDED) for needed in SIGNATURES[name]] + OPTIONS + more


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window_size": (5, 0)}, {"causal": True, "softcap": 2.0, "softmax_scale": 0.3},
    {"alibi_slopes": torch.tensor([0.5, 0.1])},
])
def test_packed_forms_equal_the_plain_one(options):
    def grads(out, *inputs):
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    qkv = torch.randn(2, 41, 3, 2, 16, requires_grad=True)
    plain = grads(ringattn.flash_attn_func(*qkv.unbind(2), **options), qkv)
    packed = grads(ringattn.flash_attn_qkvpacked_func(qkv, **options), qkv)
    half = grads(ringattn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **options), qkv)
    for ours, theirs, others in zip(packed, plain, half):
        assert (ours == theirs).all() and (others == theirs).all()
    row = qkv[0]
    varlen = grads(ringattn.flash_attn_varlen_func(*row.unbind(1), CU, CU, 23, 23, **options), qkv)
    all_in_one = grads(ringattn.flash_attn_varlen_qkvpacked_func(row, CU, 23, **options), qkv)
    two = grads(ringattn.flash_attn_varlen_kvpacked_func(row[:, 0], row[:, 1:], CU, CU, 23, 23, **options), qkv)
    for ours, theirs, others in zip(all_in_one, varlen, two):
        assert (ours == theirs).all() and (others == theirs).all()
    names = {"window_size": "window"}
    exact = torch.cat([
        torch_reference.attention(*(x[None, a:b] for x in row.unbind(1)),
                                  **{names.get(key, key): value for key, value in options.items()})[0][0]
        for a, b in zip(CU[:-1], CU[1:])])
    reference.close(varlen[0].detach(), exact.detach(), 2e-5)


def test_lse_is_returned_and_differentiable():
    q = torch.randn(1, 9, 2, 8, requires_grad=True)
    out, lse = ringattn.flash_attn_func(q, q, q, return_softmax_lse=True)
    exact = torch_reference.attention(q, q, q)[1]
    reference.close(torch.autograd.grad(lse.sum(), q)[0], torch.autograd.grad(exact.sum(), q)[0], 2e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_return_attn_probs_is_how_lse_is_returned(name):
    """(out, lse, None), as flash-attn does without dropout; with dropout its third result is refused by name."""
    qkv = torch.randn(41, 3, 2, 16)
    of = {"q": qkv[:, 0], "k": qkv[:, 1], "v": qkv[:, 2], "kv": qkv[:, 1:], "qkv": qkv}
    if "varlen" not in name:
        of = {key: value[None] for key, value in of.items()}
    arguments = [of.get(key, CU if key.startswith("cu_") else 23) for key in SIGNATURES[name]]
    function = getattr(ringattn, name)
    out, lse, probabilities = function(*arguments, return_attn_probs=True)
    expected = function(*arguments, return_softmax_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and probabilities is None
    assert lse.shape == ((2, 41) if "varlen" in name else (1, 2, 41))
    with pytest.raises(NotImplementedError, match="return_attn_probs"):
        function(*arguments, dropout_p=0.1, return_attn_probs=True)


def test_deterministic_calls_give_the_same_bits():
    row = torch.randn(41, 3, 2, 16)

    def once():
        leaf = row.clone().requires_grad_()
        out = ringattn.flash_attn_varlen_qkvpacked_func(leaf, CU, 23, causal=True, deterministic=True)
        return out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]

    for first, second in zip(once(), once()):
        assert torch.equal(first, second)


def test_block_table_is_refused():
    q = torch.randn(41, 2, 16)
    with pytest.raises(NotImplementedError, match="block_table"):
        ringattn.flash_attn_varlen_func(q, q, q, CU, CU, 23, 23, block_table=torch.zeros(1, 1, dtype=torch.int32))


@pytest.mark.parametrize("module", ["ringattn", "ringattn.flash_attn"])
def test_names_that_there_are_not(module):
    module = importlib.import_module(module)
    assert not hasattr(module, "flash_attn_fnuc")
    with pytest.raises(AttributeError, match="flash_attn_fnuc"):
        module.flash_attn_fnuc


def test_wrong_packing():
    with pytest.raises(ringattn.InvalidArgumentError, match="kv: has the shape"):
        ringattn.flash_attn_kvpacked_func(torch.randn(1, 8, 2, 16), torch.randn(1, 8, 3, 2, 16))


@pytest.mark.parametrize("options, residual", [
    ({}, "auto"), ({}, "remote"), ({}, "off"), ({"transport": "host_memory"}, "auto"), ({"transport": "direct"}, "auto"),
    ({"transport": "direct"}, "remote"),
])
def test_packed_tensors_travel_as_they_are(client, monkeypatch, options, residual):
    sent = []
    for method in ("forward", "backward"):
        def spy(*tensors, _call=getattr(client, method), **named):
            result = _call(*tensors, **named)
            sent.append({name for name in ("q", "k", "v", "qkv", "kv") if named.get(name) is not None})
            return result
        monkeypatch.setattr(client, method, spy)
    qkv = torch.randn(2, 70, 3, 2, 16, requires_grad=True)
    ringattn.set_default_client(client, residual=residual, world_size=2, layout="zigzag", schedule="ring", **options)
    ours = torch.autograd.grad(ringattn.flash_attn_qkvpacked_func(qkv, causal=True).square().sum(), qkv)[0]
    form = {"qkv"}
    assert sent == [form, set() if residual == "remote" else form]
    sent.clear()
    half = torch.autograd.grad(
        ringattn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True).square().sum(), qkv)[0]
    form = {"q", "kv"}
    assert sent == [form, set() if residual == "remote" else form]
    theirs = torch.autograd.grad(torch_reference.attention(*qkv.unbind(2), causal=True)[0].square().sum(), qkv)[0]
    reference.close(ours, theirs, 1e-5)
    reference.close(half, theirs, 1e-5)
