"""Derivatives that there are not are refused by name; autocast, saved-tensor hooks, and what an import costs."""
import os
import subprocess
import sys

import pytest
import reference

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import torch.autograd.forward_ad as forward_ad  # noqa: E402
import torch_reference  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import ringattn  # noqa: E402

pytestmark = pytest.mark.usefixtures("default_client")


def qkv(dtype=torch.float32, tokens=17):
    return [torch.randn(1, tokens, 4, 16, dtype=dtype) for _ in range(3)]


def loss(q, k, v, **options):
    return ringattn.attention(q, k, v, **options)[0].square().sum()


# Forward mode and torch.func.

def test_dual_tensors_are_refused():
    q, k, v = qkv()
    with forward_ad.dual_level():
        for place, name in enumerate("qkv"):
            given = [q, k, v]
            given[place] = forward_ad.make_dual(given[place], torch.ones_like(q))
            with pytest.raises(NotImplementedError, match=f"{name}: forward-mode"):
                ringattn.attention(*given)
        for name, value in (("alibi_slopes", torch.ones(4)), ("softmax_scale", torch.tensor(0.3)),
                            ("bias", torch.zeros(1, 1, 17, 17)), ("sinks", torch.zeros(4))):
            dual = forward_ad.make_dual(value, torch.ones_like(value))
            with pytest.raises(NotImplementedError, match=f"{name}: forward-mode"):
                ringattn.attention(q, k, v, **{name: dual})
        # A level alone changes nothing.
        assert torch.equal(ringattn.attention(q, k, v)[0], ringattn.attention(q, k, v)[0])


@pytest.mark.parametrize("transform", [
    lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    lambda f, x: torch.func.jacfwd(f)(x),
    lambda f, x: torch.func.linearize(f, x),
    lambda f, x: torch.func.hessian(f)(x),
    lambda f, x: torch.func.grad(f)(x),
    lambda f, x: torch.func.vjp(f, x),
    lambda f, x: torch.func.jacrev(f)(x),
    lambda f, x: torch.vmap(torch.func.grad(f))(x[None]),
    lambda f, x: torch.autograd.functional.jvp(f, x, torch.ones_like(x), strict=True),
], ids=["jvp", "jacfwd", "linearize", "hessian", "grad", "vjp", "jacrev", "vmap of grad", "double backward"])
def test_transforms_are_refused(transform):
    q, k, v = qkv(tokens=3)
    with pytest.raises(NotImplementedError, match="forward-mode|torch.func|double backward"):
        transform(lambda x: loss(x, k, v), q)


def test_a_compiled_jvp_is_refused():
    q, k, v = qkv()

    def both(x):
        return torch.func.jvp(lambda x: loss(x, k, v), (x,), (torch.ones_like(x),))

    with pytest.raises(Exception, match="forward-mode"):
        torch.compile(both, backend="aot_eager")(q)


def test_vmap_is_served():
    q, k, v = (torch.stack([x, 2 * x, -x]) for x in qkv())
    ours = torch.vmap(lambda q, k, v: ringattn.attention(q, k, v, causal=True)[0])(q, k, v)
    for row in range(3):
        assert torch.equal(ours[row], ringattn.attention(q[row], k[row], v[row], causal=True)[0])


# Numbers that a model may want to train.

@pytest.mark.parametrize("name, value", [
    ("alibi_slopes", lambda: torch.rand(4)), ("softmax_scale", lambda: torch.tensor(0.3)),
    ("softcap", lambda: torch.tensor(2.0)), ("dropout_p", lambda: torch.tensor(0.1)),
])
def test_a_gradient_that_there_is_not_is_refused(name, value):
    q, k, v = qkv()
    trained = value().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name}: requires a gradient"):
        ringattn.attention(q, k, v, **{name: trained})
    constant = ringattn.attention(q, k, v, dropout_seed=torch.tensor([1]), **{name: trained.detach()})[0]
    with torch.no_grad():
        assert torch.equal(ringattn.attention(q, k, v, dropout_seed=torch.tensor([1]), **{name: trained})[0], constant)


# Calls of a client, whose results have no graph.

GIVEN = {"q": (1, 17, 4, 16), "k": (1, 17, 4, 16), "v": (1, 17, 4, 16), "bias": (1, 1, 17, 17), "sinks": (4,),
         "alibi_slopes": (4,), "softmax_scale": (), "softcap": (), "out": (1, 17, 4, 16), "dout": (1, 17, 4, 16),
         "lse": (1, 4, 17), "dlse": (1, 4, 17)}


@pytest.mark.parametrize("name", GIVEN)
def test_calls_of_a_client_refuse_derivatives(default_client, name):
    """Their results would look like constants to autograd."""
    tensors = {key: torch.rand(GIVEN[key]) for key in ("q", "k", "v", name)}

    def call(tensor):
        given = {**tensors, name: tensor}
        if name in ("out", "lse"):
            given |= {key: torch.rand(GIVEN[key]) for key in ("out", "lse") if key != name}
        if name in ("out", "lse", "dout", "dlse"):
            return default_client.backward(given.pop("dout", torch.rand(GIVEN["dout"])), **given)
        return default_client.forward(**given)

    trained = tensors[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name}: requires a gradient.*ringattn.attention"):
        call(trained)
    with torch.no_grad():
        call(trained)
    call(trained.detach())
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"{name}: forward-mode"):
        call(forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name])))


@pytest.mark.parametrize("call", [
    lambda q, slopes: ringattn.flash_attn_func(q, q, q, alibi_slopes=slopes),
    lambda q, slopes: ringattn.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2), alibi_slopes=slopes),
])
def test_trained_slopes_of_flash_attns_functions(call):
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        call(qkv()[0], torch.rand(4, requires_grad=True))


# Autocast.

@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
def test_autocast_casts_as_scaled_dot_product_attention_does(dtype, bound):
    q, k, v = (x.requires_grad_() for x in qkv())
    bias = torch.randn(1, 4, 17, 17, requires_grad=True)
    inputs = (q, k, v, bias)
    exact = torch_reference.attention(q, k, v, bias=bias)[0]
    with torch.autocast("cpu", dtype=dtype):
        # Rotary embeddings and norms leave float32, a linear layer the lower type.
        ours = ringattn.attention(q, k.to(dtype), v.to(dtype), bias=bias)[0]
        theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), bias)
    assert ours.dtype == theirs.dtype == dtype
    reference.close(ours.detach().float(), exact.detach(), bound)
    weights = torch.randn_like(exact)
    for gradient, expected in zip(torch.autograd.grad((ours * weights).sum(), inputs),
                                  torch.autograd.grad((exact * weights).sum(), inputs)):
        assert gradient.dtype == torch.float32
        reference.close(gradient, expected, 2 * bound)


def test_autocast_of_packed_tensors_and_documents():
    cu = torch.tensor([0, 5, 17])
    packed = torch.randn(17, 3, 4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ringattn.flash_attn_varlen_qkvpacked_func(packed, cu, 12)
        out_kv = ringattn.flash_attn_varlen_kvpacked_func(packed[:, 0].bfloat16(), packed[:, 1:], cu, cu, 12, 12)
        with torch.autocast("cpu", enabled=False):
            assert ringattn.flash_attn_varlen_qkvpacked_func(packed, cu, 12).dtype == torch.float32
    assert out.dtype == torch.bfloat16 and torch.equal(out, out_kv)


def test_autocast_inside_a_compiled_program_and_checkpoints():
    q, k, v = (x.requires_grad_() for x in qkv())

    def layer(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ringattn.attention(q, k.bfloat16(), v)[0].float().square().sum()

    expected = torch.autograd.grad(layer(q, k, v), (q, k, v))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ours in (torch.autograd.grad(compiled(q, k, v), (q, k, v)),
                 torch.autograd.grad(checkpoint(layer, q, k, v, use_reentrant=False), (q, k, v))):
        for gradient, known in zip(ours, expected):
            assert torch.equal(gradient, known)


def test_types_that_differ_without_autocast_are_refused():
    q, k, v = qkv()
    with pytest.raises(ringattn.InvalidArgumentError, match="v: is bfloat16; must be float32, as q"):
        ringattn.attention(q, k, v.bfloat16())


# Saved-tensor hooks.

def test_offloading_hooks_and_residuals(default_client):
    """Hooks replace the tensor that owns a residual. 'auto' then sends the tensors; 'remote' says what happened."""
    q, k, v = (x.requires_grad_() for x in qkv())
    expected = torch.autograd.grad(loss(q, k, v, residual="off"), (q, k, v))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        automatic = loss(q, k, v, residual="auto")
        remote = loss(q, k, v, residual="remote")
    for gradient, known in zip(torch.autograd.grad(automatic, (q, k, v)), expected):
        reference.close(gradient, known, 1e-5)
    with pytest.raises(ringattn.FailedPreconditionError, match="Saved-tensor hooks") as caught:
        torch.autograd.grad(remote, (q, k, v))
    assert caught.value.reason == "RESIDUAL_DROPPED"


# What an import and a first call cost.

def test_a_first_call_does_not_import_the_compiler(address):
    """torch._dynamo takes two seconds to import."""
    run = subprocess.run([sys.executable, "-c", f"""
import sys, torch, ringattn
ringattn.set_default_client(ringattn.connect({address!r}))
q = torch.randn(1, 9, 2, 16, requires_grad=True)
ringattn.flash_attn_func(q, q, q, causal=True).sum().backward()
assert q.grad.isfinite().all()
assert "torch._dynamo" not in sys.modules
"""], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
