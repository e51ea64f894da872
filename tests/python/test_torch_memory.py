"""PyTorch tensors whose memory is unusual: freed, on the device meta, inside of a transform, shown by a view."""
import os

import pytest
import torch_reference

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import ringattn  # noqa: E402

pytestmark = pytest.mark.usefixtures("default_client")


def qkv(tokens=12):
    return [torch.randn(2, tokens, 4, 16) for _ in range(3)]


def close(ours, exact, bound=1e-5):
    assert ours.shape == exact.shape and (ours.detach().double() - exact.detach()).abs().max() < bound


def exact(*tensors, **options):
    return torch_reference.attention(*(tensor.double() for tensor in tensors), **options)[0]


# Storages that are freed and made again, as FSDP does with parameters.

def test_storages_stay_resizable(client):
    """`Tensor.numpy` would fix their size."""
    tensors = [*qkv(), torch.randn(4), torch.rand(4), torch.tensor([0, 5, 24])]
    q, k, v, sinks, slopes, offsets = tensors
    out, lse = ringattn.attention(q, k, v, sinks=sinks, alibi_slopes=slopes)
    packed = [tensor.reshape(24, 4, 16) for tensor in (q, k, v)]
    ringattn.attention(*packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    result = client.forward(q, k, v)
    for tensor in (*tensors, out, lse, result.out, result.lse):
        tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("residual", ["off", "auto"])
def test_a_storage_that_is_freed_between_forward_and_backward(residual):
    q, k, v = qkv()
    kept, q = q.clone(), q.requires_grad_()
    nbytes, storage = q.untyped_storage().nbytes(), q.untyped_storage()
    out, _ = ringattn.attention(q, k, v, residual=residual)
    storage.resize_(0)
    with pytest.raises(ringattn.InvalidArgumentError, match=f"q: needs {nbytes} bytes of storage, which has 0"):
        torch.autograd.grad(out.square().sum(), q, retain_graph=True)
    storage.resize_(nbytes)
    q.data.copy_(kept)
    gradient, = torch.autograd.grad(out.square().sum(), q)
    again = kept.double().requires_grad_()
    close(gradient, torch.autograd.grad(exact(again, k, v).square().sum(), again)[0], 1e-4)


@pytest.mark.parametrize("nbytes", [0, 100, 2 * 12 * 4 * 16 * 4 - 1])
def test_a_storage_that_is_too_small_is_refused(client, nbytes):
    q, k, v = qkv()
    k.untyped_storage().resize_(nbytes)
    for call in (ringattn.attention, client.forward):
        with pytest.raises(ringattn.InvalidArgumentError, match=f"k: needs 6144 bytes of storage, which has {nbytes}"):
            call(q, k, v)
    slopes = torch.rand(4)
    slopes.untyped_storage().resize_(8)
    with pytest.raises(ringattn.InvalidArgumentError, match="alibi_slopes: needs 16 bytes"):
        ringattn.attention(q, v, v, alibi_slopes=slopes)
    # The last element counts, not the number of elements.
    view = torch.randn(2, 24, 4, 16)[:, ::2]
    view.untyped_storage().resize_(view.untyped_storage().nbytes() - 4 * 64)
    close(ringattn.attention(view, v, v)[0], exact(view, v, v))
    view.untyped_storage().resize_(view.untyped_storage().nbytes() - 4)
    with pytest.raises(ringattn.InvalidArgumentError, match="q: needs"):
        client.forward(view, v, v)


# The device meta.

OPTIONS = {
    "bias": lambda: torch.zeros(1, 1, 12, 12), "mask": lambda: torch.ones(1, 1, 12, 12, dtype=torch.bool),
    "alibi_slopes": lambda: torch.ones(4), "sinks": lambda: torch.ones(4), "dropout_seed": lambda: torch.tensor([3]),
}


@pytest.mark.parametrize("compiled", [False, True])
def test_values_next_to_none_are_refused(compiled):
    """PyTorch would run the operator on the device meta, and the result would be uninitialized memory."""
    q, k, v = qkv()
    call = ringattn.attention
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    for name in ("k", "v"):
        with pytest.raises(Exception, match=f"{name}: is on the device meta, which holds no values; q is in memory"):
            call(**{"q": q, "k": k, "v": v, name: q.to("meta")})
    with pytest.raises(Exception, match="k: is in memory; q is on the device meta"):
        call(q.to("meta"), k, v)
    for name, value in OPTIONS.items():
        with pytest.raises(Exception, match=f"{name}: is on the device meta"):
            call(q, k, v, dropout_p=0.1, **{name: value().to("meta")})
    ids = torch.zeros(2, 12, dtype=torch.int32)
    with pytest.raises(Exception, match="kv_segment_ids: is on the device meta"):
        call(q, k, v, q_segment_ids=ids, kv_segment_ids=ids.to("meta"))
    with pytest.raises(Exception, match="cu_seqlens_k: is on the device meta"):
        call(q[0], k[0], v[0], cu_seqlens_q=torch.tensor([0, 12]), cu_seqlens_k=torch.tensor([0, 12], device="meta"))


def test_all_tensors_on_the_device_meta_give_shapes():
    q, k, v = (tensor.to("meta").requires_grad_() for tensor in qkv())
    for options in ({}, {"sinks": torch.ones(4)}, {"bias": torch.zeros(1, 1, 12, 12, device="meta")}):
        out, lse = ringattn.attention(q, k, v, **options)
        assert out.is_meta and lse.is_meta and out.shape == q.shape and lse.shape == (2, 4, 12)
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert gradient.is_meta and gradient.shape == q.shape


def test_a_client_refuses_tensors_without_values(client):
    q, k, v = qkv()
    for name, value in (("alibi_slopes", torch.ones(4)), ("sinks", torch.ones(4)), ("bias", torch.zeros(1, 1, 12, 12))):
        with pytest.raises(ringattn.InvalidArgumentError, match=f"{name}: is on the device meta"):
            client.forward(q, k, v, **{name: value.to("meta")})
    with pytest.raises(ringattn.InvalidArgumentError, match="cu_seqlens_q: is on the device meta"):
        client.forward(q[0], k[0], v[0], cu_seqlens_q=torch.tensor([0, 12], device="meta"), cu_seqlens_k=[0, 12])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_changes_nothing(client, device):
    """Offsets, seeds and results are made on the CPU."""
    q, k, v = qkv()
    expected = ringattn.attention(q, k, v, dropout_p=0.2, dropout_seed=5)[0]
    packed = {"q": q[0], "k": k[0], "v": v[0], "cu_seqlens_q": [0, 5, 12], "cu_seqlens_k": [0, 5, 12]}
    documents = client.forward(**packed).out
    with torch.device(device):
        assert torch.equal(ringattn.attention(q, k, v, dropout_p=0.2, dropout_seed=5)[0], expected)
        assert torch.equal(ringattn.attention(**packed)[0], documents)
        assert torch.equal(client.forward(**packed).out, documents)
        assert client.forward(q[:0], k[:0], v[:0]).out.device.type == "cpu"


# Transforms and views.

@pytest.mark.parametrize("transform", [
    lambda f, x: torch.vmap(f)(x), lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    lambda f, x: torch.func.jvp(f, (x,), (x,)),
], ids=["vmap", "grad", "jvp"])
def test_a_client_refuses_tensors_of_a_transform(client, transform):
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="q: is a tensor inside of torch.vmap or torch.func; use ringattn.att"):
        transform(lambda x: client.forward(x, k[:1], v[:1]).out, q[:, None])


def test_views_and_zeros(client):
    q, k, v = qkv()
    imaginary = torch.complex(q, q).conj().imag  # a view that negates
    assert imaginary.is_neg()
    close(ringattn.attention(imaginary, k, v)[0], exact(-q, k, v))
    close(client.forward(k, imaginary, v).out, exact(k, -q, v))
    zero = torch._efficientzerotensor(q.shape)  # a tensor without memory
    close(client.forward(zero, k, v).out, exact(torch.zeros_like(q), k, v))
    for tensor in (q.flip(1), q.transpose(0, 1).contiguous().transpose(0, 1), q[:, :1].expand(2, 12, 4, 16)):
        leaf = tensor.clone().requires_grad_()
        close(ringattn.attention(tensor, k, tensor)[0], exact(tensor, k, tensor))
        view = leaf.flip(1).transpose(1, 2).transpose(1, 2)
        ours, = torch.autograd.grad(ringattn.attention(view, k, view)[0].square().sum(), leaf)
        again = leaf.detach().double().requires_grad_()
        view = again.flip(1)
        close(ours, torch.autograd.grad(exact(view, k, view).square().sum(), again)[0], 1e-4)


def test_inference_mode():
    q, k, v = qkv()
    with torch.inference_mode():
        inside = ringattn.attention(q, k, v)[0]
        made = q.clone()
    assert inside.is_inference() and torch.equal(inside, ringattn.attention(made, k, v)[0])
    close(inside, exact(q, k, v))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        ringattn.attention(made, k.requires_grad_(), v)


def test_nested_autocast():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        outer = ringattn.attention(q, k.half(), v)[0]
        with torch.autocast("cpu", enabled=False):
            plain = ringattn.attention(q, k, v)[0]
            with torch.autocast("cpu", torch.float16):
                inner = ringattn.attention(outer, k, v.bfloat16())[0]
    assert (outer.dtype, plain.dtype, inner.dtype) == (torch.bfloat16, torch.float32, torch.float16)
    close(plain, exact(q, k, v))
    close(outer, exact(q, k, v), 3e-2)
    close(inner, exact(outer, k, v), 3e-2)
