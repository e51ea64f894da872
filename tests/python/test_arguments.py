"""Arguments that are not what they should be end in an error that names them; what is near enough is converted."""
import os
import re
import subprocess

import numpy as np
import pytest
from conftest import BIN

import ringattn

Q = np.ones((2, 8, 4, 16), np.float32)
K = np.ones((2, 8, 2, 16), np.float32)
IDS = np.zeros((2, 8), np.int32)
PACKED = (Q[0], K[0], K[0])
CU = {"cu_seqlens_q": [0, 8], "cu_seqlens_k": [0, 8]}


@pytest.mark.parametrize("field, arrays, options", [
    ("window", (Q, K, K), {"window": 3}),
    ("window[0]", (Q, K, K), {"window": (2.5, 0)}),
    ("window[1]", (Q, K, K), {"window": (2, 1.0)}),
    ("window[0]", (Q, K, K), {"window": (2**63, 0)}),
    ("documents", PACKED, {**CU, "documents": 3}),
    ("documents[1]", PACKED, {**CU, "documents": [ringattn.Document(), 3]}),
    ("documents[0].causal", PACKED, {**CU, "documents": [ringattn.Document(causal="no")]}),
    ("dilation_levels[0]", (Q, K, K), {"dilation_levels": [(4, 1)]}),
    ("dilation_levels[0].segment_length", (Q, K, K), {"dilation_levels": [ringattn.DilationLevel(2**63, 1)]}),
    ("deterministic", (Q, K, K), {"deterministic": np.ones(2, bool)}),
    ("bias", (Q, K, K), {"bias": np.ones((1, 1, 8, 8), np.int32)}),
    ("documents[0].window[0]", PACKED, {**CU, "documents": [ringattn.Document(window=(1.5, 0))]}),
    ("deadline", (Q, K, K), {"deadline": "3s"}),
    ("deadline", (Q, K, K), {"deadline": [3]}),
    ("deadline", (Q, K, K), {"deadline": float("nan")}),
    ("retain", (Q, K, K), {"retain": "long"}),
    ("progress_interval", (Q, K, K), {"progress_interval": "1"}),
    ("world_size", (Q, K, K), {"world_size": 1.5}),
    ("tile_q", (Q, K, K), {"tile_q": "24"}),
    ("dropout_seed", (Q, K, K), {"dropout_p": 0.5, "dropout_seed": 1.5}),
    ("dropout_origin", (Q, K, K), {"dropout_p": 0.5, "dropout_origin": 3}),
    ("dropout_origin[2]", (Q, K, K), {"dropout_p": 0.5, "dropout_origin": (0, 0, 0.5, 0)}),
    ("dilation_levels[0].dilation_rate", (Q, K, K), {"dilation_levels": [ringattn.DilationLevel(4, 1.5)]}),
    ("probability_rows[1]", (Q, K, K), {"probability_rows": [(0, 1), (0, 1.5)]}),
    ("probability_rows[0]", (Q, K, K), {"probability_rows": [3]}),
    ("cu_seqlens_q", PACKED, {**CU, "cu_seqlens_q": [0.0, 8.0]}),
    ("cu_seqlens_q", PACKED, {**CU, "cu_seqlens_q": [[0, 8]]}),
    ("cu_seqlens_q", PACKED, {**CU, "cu_seqlens_q": [1, 8]}),
    ("cu_seqlens_k", PACKED, {**CU, "cu_seqlens_k": [0, 6, 4, 8]}),
    ("cu_seqlens_k", PACKED, {**CU, "cu_seqlens_k": [0, 9]}),
    ("cu_seqlens_k", PACKED, {**CU, "cu_seqlens_k": []}),
    ("compute_dtype", (Q, K, K), {"compute_dtype": "float32"}),
    ("deterministic", (Q, K, K), {"deterministic": "no"}),
    ("output_dtype", (Q, K, K), {"output_dtype": "float16"}),
    ("q_segment_ids", (Q, K, K), {"q_segment_ids": IDS.astype(np.int64) + 2**31, "kv_segment_ids": IDS}),
    ("kv_segment_ids", (Q, K, K), {"q_segment_ids": IDS, "kv_segment_ids": IDS.astype(np.int64) - 2**40}),
    # numpy's masked arrays: what is masked must not be read.
    ("q", (np.ma.masked_array(Q, Q > 0), K, K), {}),
    ("v", (Q, K, np.ma.masked_array(K)), {}),
    ("bias", (Q, K, K), {"bias": np.ma.zeros((1, 1, 8, 8), np.float32)}),
    ("q_segment_ids", (Q, K, K), {"q_segment_ids": np.ma.masked_array(IDS), "kv_segment_ids": IDS}),
    ("q_segment_ids", (Q, K, K), {"q_segment_ids": np.ma.masked_array(IDS.astype(np.int64)), "kv_segment_ids": IDS}),
    ("sinks", (Q, K, K), {"sinks": np.ma.zeros(4, np.float16)}),
    ("alibi_slopes", (Q, K, K), {"alibi_slopes": np.ma.zeros(4, np.float32)}),
    ("cu_seqlens_q", PACKED, {**CU, "cu_seqlens_q": np.ma.masked_array([0, 8])}),
])
def test_an_error_names_the_argument(client, field, arrays, options):
    with pytest.raises(ringattn.InvalidArgumentError) as caught:
        client.forward(*arrays, **options)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert str(caught.value).startswith(f"INVALID_ARGUMENT: {field}: ")


@pytest.mark.parametrize("options, text", [
    ({"layout": "circular"}, "plan.layout: is 'circular'; must be one of contiguous, zigzag"),
    ({"world_size": -5}, "plan.world_size: is -5; must be a whole number from 0 to 4294967295"),
    ({"traceparent": 7}, "traceparent: is 7; must be a string"),
    ({"crc32c": "yes"}, "crc32c: is 'yes'; must be True or False"),
    ({"causal": "yes"}, "options.causal: is 'yes'; must be True or False"),
    ({"softcap": "hard"}, "options.softcap: is 'hard'; must be a number"),
])
def test_an_error_of_the_extension_says_what_is_accepted(client, options, text):
    with pytest.raises(ValueError) as caught:
        client.forward(Q, K, K, **options)
    assert str(caught.value).startswith(text)


def test_arguments_of_connect_and_empty(client, address):
    for value, text in (("1GB", "region_bytes: is '1GB'; must be a whole number"),
                        (-5, "region_bytes: is -5; must not be negative")):
        with pytest.raises(ringattn.InvalidArgumentError, match=text):
            ringattn.connect(address, region_bytes=value)
    for shape in (2.5, (2, 3.0), (2, "3")):
        with pytest.raises(ringattn.InvalidArgumentError, match="shape: is .*; must be a whole number"):
            client.empty(shape)
    for dtype in ("float31", 7.5):
        with pytest.raises(ringattn.InvalidArgumentError, match="dtype: is .*; the service supports float32, bfloat16, "):
            client.empty((2, 3), dtype)


def test_what_is_no_array(client):
    for call in (lambda: client.forward([[1.0]], K, K), lambda: client.forward(Q, K, K, bias=[1.0])):
        with pytest.raises(TypeError, match="(q|bias): is a list; must be an array"):
            call()




def test_a_masked_array_behind_an_interface(client):
    class Holder:
        def __array__(self, dtype=None, copy=None):
            return np.ma.masked_array(Q, Q > 0)

    with pytest.raises(ringattn.InvalidArgumentError, match="q: is a numpy masked array"):
        client.forward(Holder(), K, K)


def test_integers_of_other_types_are_converted(client, rng):
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((10, 4, 16), (10, 2, 16), (10, 2, 16)))
    cu = [0, 4, 10]
    expected = client.forward(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu).out
    for dtype in (np.int64, np.uint32, np.int16):
        given = np.array(cu, dtype)
        assert (client.forward(q, k, v, cu_seqlens_q=given, cu_seqlens_k=given).out == expected).all()
    q, k, v = q[None], k[None], v[None]
    ids = np.array([[0, 0, 0, 1, 1, -1, 2, 2, 2, 2]], np.int32)
    expected = client.forward(q, k, v, q_segment_ids=ids, kv_segment_ids=ids).out
    for dtype in (np.int64, np.int16, np.int8):
        given = ids.astype(dtype)
        assert (client.forward(q, k, v, q_segment_ids=given, kv_segment_ids=given).out == expected).all()


def test_sinks_of_16_bits_are_converted(client, rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = rng.standard_normal((1, 10, 4, 16), np.float32)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        sinks = rng.standard_normal(4).astype(dtype)
        expected = client.forward(q, q, q, sinks=sinks.astype(np.float32)).out
        assert (client.forward(q, q, q, sinks=sinks).out == expected).all()
        assert client.backward(q, q, q, q, sinks=sinks).dsinks.dtype == np.float32


def values_of_flags(command):
    """{flag: its values}, of the command line's flags with a fixed set of values."""
    text = subprocess.run([BIN / "client/ringattn", command, "--help"], capture_output=True, text=True, check=True,
                          timeout=60).stdout
    return {name: values.split(",") for name, values in re.findall(r"--(\w+) [^\n{]*\{([^}]*)\}", text)}


@pytest.mark.parametrize("flag, option, options", [
    ("layout", "layout", {}), ("schedule", "schedule", {}), ("transport", "transport", {}),
    ("output_dtype", "output_dtype", {}), ("compute_dtype", "compute_dtype", {}), ("lse", "lse_format", CU),
])
def test_values_have_the_command_lines_names(client, flag, option, options):
    """The service may reject a value for this call, but Python knows all of them."""
    values = values_of_flags("forward")[flag]
    assert len(values) > 1
    for value in values:
        try:
            client.forward(*(array.astype(np.float16) for array in (PACKED if options else (Q, K, K))),
                           **options, **{option: value})
        except ringattn.RingattnError as error:
            assert "must be" not in str(error), error


def test_types_have_the_command_lines_names(client):
    for name in values_of_flags("generate")["dtype"]:
        assert client.empty((2, 3), name).shape == (2, 3)


def test_types_have_the_command_lines_names_too(client, rng):
    q = rng.standard_normal((1, 32, 2, 16)).astype(np.float16)
    for name in ("fp32", "float32", np.float32, np.dtype("float32")):
        assert client.forward(q, q, q, output_dtype=name).out.dtype == np.float32
    expected = client.forward(q, q, q, compute_dtype="fp8_e4m3").out
    assert (client.forward(q, q, q, compute_dtype="float8_e4m3").out == expected).all()
    assert (client.forward(q, q, q).out != expected).any()


# Tokens after cu_seqlens[-1].

def packed_problem(rng, queries=13, keys=17):
    q, dout = (rng.standard_normal((queries, 4, 16), np.float32) for _ in range(2))
    k, v = (rng.standard_normal((keys, 2, 16), np.float32) for _ in range(2))
    return q, k, v, dout, {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": [0, 6, 11]}


OPTIONS = {
    "plain": {"causal": True},
    "terms": {"softcap": 3.0, "alibi_slopes": np.linspace(0, 1, 8).reshape(2, 4), "sinks": np.ones(4, np.float32)},
    "documents": {"documents": [ringattn.Document(causal=True), ringattn.Document(window=(2, 1))]},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_after_the_last_document_get_zeros(client, rng, name):
    q, k, v, dout, cu = packed_problem(rng)
    options = {**cu, **OPTIONS[name]}
    dlse = rng.standard_normal((4, 13), np.float32)
    out, lse, _ = client.forward(q, k, v, **options)
    expected = client.forward(q[:9], k[:11], v[:11], **options)
    assert out.shape == q.shape and lse.shape == (4, 13)
    assert (out[:9] == expected.out).all() and (out[9:] == 0).all()
    assert (lse[:, :9] == expected.lse).all() and np.isneginf(lse[:, 9:]).all()
    gradients = client.backward(dout, q, k, v, out=out, lse=lse, dlse=dlse, **options)
    exact = client.backward(dout[:9], q[:9], k[:11], v[:11], out=out[:9], lse=lse[:, :9], dlse=dlse[:, :9], **options)
    for gradient, known, used in ((gradients.dq, exact.dq, 9), (gradients.dk, exact.dk, 11),
                                  (gradients.dv, exact.dv, 11)):
        assert (gradient[:used] == known).all() and (gradient[used:] == 0).all() and len(gradient) > used


def test_tokens_after_the_last_document_of_packed_tensors_pairs_and_residuals(client, rng):
    q, k, v, dout, cu = packed_problem(rng, queries=13, keys=13)
    qkv = np.ascontiguousarray(np.stack([q[:, :2], k, v], 1))
    both = {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": [0, 4, 9]}
    bias = rng.standard_normal((1, 2, 13, 5), np.float32)
    mask = rng.random((1, 1, 13, 5)) < 0.7
    ids = np.array([0, 0, 1, 1, 2, 2, 2, 3, 3, 9, 9, 9, 9])
    options = {**both, "bias": bias, "mask": mask, "q_segment_ids": ids, "kv_segment_ids": ids, "bias_gradient": True}
    cut = {**both, "bias": bias[:, :, :9], "mask": mask[:, :, :9], "q_segment_ids": ids[:9], "kv_segment_ids": ids[:9],
           "bias_gradient": True}
    result = client.forward(qkv=qkv, retain=60, **options)
    expected = client.forward(qkv=qkv[:9], **cut)
    assert (result.out[:9] == expected.out).all() and (result.out[9:] == 0).all()
    exact = client.backward(dout[:9, :2], qkv=qkv[:9], out=expected.out, lse=expected.lse, **cut)
    ours = [client.backward(dout[:, :2], qkv=qkv, out=result.out, lse=result.lse, **options)]
    if result.report.residual is not None:
        ours.append(client.backward(dout[:, :2], residual=result.report.residual))
    assert len(ours) == 2, result.report.residual_reason
    for gradients in ours:
        assert gradients.dqkv.shape == qkv.shape and gradients.dbias.shape == bias.shape
        assert np.allclose(gradients.dqkv[:9], exact.dqkv, atol=1e-6) and (gradients.dqkv[9:] == 0).all()
        assert np.allclose(gradients.dbias[:, :, :9], exact.dbias, atol=1e-6)
        assert (gradients.dbias[:, :, 9:] == 0).all()
    per_document = client.forward(qkv=qkv, lse_format="per_document", **both).lse
    assert (per_document == client.forward(qkv=qkv[:9], lse_format="per_document", **both).lse).all()
    with pytest.raises(ringattn.InvalidArgumentError, match="cu_seqlens_k: ends with 8"):
        client.forward(qkv=qkv, cu_seqlens_q=[0, 9], cu_seqlens_k=[0, 8])


torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)


T = torch.ones(2, 8, 4, 16)


@pytest.mark.parametrize("call, error, text", [
    (lambda: ringattn.attention(Q, T, T), TypeError, "q: is a numpy.ndarray; must be a torch.Tensor"),
    (lambda: ringattn.flash_attn_func(T, K, T), TypeError, "k: is a numpy.ndarray"),
    (lambda: ringattn.flash_attn_qkvpacked_func(Q), TypeError, "qkv: is a numpy.ndarray"),
    (lambda: ringattn.attention(T, T, T, mask=[1]), TypeError, "mask: is a list"),
    (lambda: ringattn.attention(T.double(), T.double(), T.double()), ringattn.InvalidArgumentError,
     "q: is of type float64"),
    (lambda: ringattn.flash_attn_func(T, T, T, window_size=3), ringattn.InvalidArgumentError, "window_size: is 3"),
    (lambda: ringattn.flash_attn_func(T, T, T, window_size=(1.5, 0)), ringattn.InvalidArgumentError,
     r"window_size\[0\]: is 1.5"),
    (lambda: ringattn.attention(T, T, T, window=(1, 2, 3)), ringattn.InvalidArgumentError, r"window: is \(1, 2, 3\)"),
    (lambda: ringattn.attention(T, T, T, softmax_scale="0.5"), ringattn.InvalidArgumentError, "softmax_scale: is '0.5'"),
    (lambda: ringattn.attention(T, T, T, softmax_scale=T), ringattn.InvalidArgumentError, "softmax_scale: is a torch.Tensor"),
    (lambda: ringattn.attention(T, T, T, softcap=[1]), ringattn.InvalidArgumentError, "softcap: is a list"),
    (lambda: ringattn.attention(T[0], T[0], T[0], cu_seqlens_q=[0, 8.5], cu_seqlens_k=[0, 8]),
     ringattn.InvalidArgumentError, "cu_seqlens_q: is 8.5"),
    (lambda: ringattn.attention(T[0], T[0], T[0], cu_seqlens_q=8, cu_seqlens_k=8), ringattn.InvalidArgumentError,
     "cu_seqlens_q: is an int"),
    (lambda: ringattn.attention(T, T, T, dropout_p=0.5, dropout_seed=1.5), ringattn.InvalidArgumentError,
     "dropout_seed: is 1.5"),
    (lambda: ringattn.attention(T[0], T[0], T[0], cu_seqlens_q=np.ma.masked_array([0, 8]), cu_seqlens_k=[0, 8]),
     ringattn.InvalidArgumentError, "cu_seqlens_q: is a numpy masked array"),
    (lambda: ringattn.attention(T.to_sparse(), T, T), ringattn.InvalidArgumentError, "q: has the layout torch.sparse_coo"),
    (lambda: ringattn.attention(T, T, T, causal=torch.ones(2)), ringattn.InvalidArgumentError, "causal: is a torch.Tensor"),
    (lambda: ringattn.attention(T, T, T, window=(2**70, 0)), ringattn.InvalidArgumentError, r"window\[0\]: is 11805"),
    (lambda: ringattn.attention(T, T, T, dilation_levels=[4]), ringattn.InvalidArgumentError,
     r"dilation_levels\[0\]: is an int; must be a ringattn.DilationLevel"),
    (lambda: ringattn.attention(T[0], T[0], T[0], cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 8], documents=[1]),
     ringattn.InvalidArgumentError, r"documents\[0\]: is an int; must be a ringattn.Document"),
])
def test_torch_functions_name_the_argument(default_client, call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_meta_tensors_give_shapes():
    """As PyTorch's own functions. No service is called."""
    q = torch.empty(2, 8, 4, 16, device="meta")
    out, lse = ringattn.attention(q, q, q)
    assert out.is_meta and out.shape == q.shape and lse.shape == (2, 4, 8)


def test_torch_functions_take_lists_of_offsets(default_client):
    q = torch.randn(10, 2, 16)
    expected = ringattn.attention(q, q, q, cu_seqlens_q=torch.tensor([0, 4, 10]), cu_seqlens_k=torch.tensor([0, 4, 10]))
    for given in ([0, 4, 10], np.array([0, 4, 10])):
        ours = ringattn.attention(q, q, q, cu_seqlens_q=given, cu_seqlens_k=given)
        assert torch.equal(ours[0], expected[0])


def test_a_tensor_that_wraps_others_is_refused(client):
    from torch.masked import masked_tensor

    wrapped = masked_tensor(T, T > 2)
    with pytest.raises(ringattn.InvalidArgumentError, match="q: is a MaskedTensor"):
        client.forward(wrapped, T, T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_sinks(default_client, dtype):
    q = torch.randn(1, 9, 4, 16)
    sinks = torch.randn(4).to(dtype).requires_grad_()
    same = sinks.detach().float().requires_grad_()
    ours, = torch.autograd.grad(ringattn.attention(q, q, q, sinks=sinks)[0].square().sum(), sinks)
    exact, = torch.autograd.grad(ringattn.attention(q, q, q, sinks=same)[0].square().sum(), same)
    assert ours.dtype == dtype and torch.equal(ours, exact.to(dtype))


def test_padding_at_the_end_of_a_compiled_buffer(default_client):
    """Offsets change from call to call, and the compiled program does not."""
    qkv = torch.randn(16, 3, 2, 16, requires_grad=True)

    def layer(qkv, cu):
        return ringattn.flash_attn_varlen_qkvpacked_func(qkv, cu, 16, causal=True).square().sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for cu in ([0, 5, 12], [0, 9, 16], [0, 1, 2]):
        used = cu[-1]
        cu = torch.tensor(cu, dtype=torch.int64)
        gradient, = torch.autograd.grad(compiled(qkv, cu), qkv)
        alone = qkv[:used].detach().requires_grad_()
        expected, = torch.autograd.grad(layer(alone, cu), alone)
        assert torch.allclose(gradient[:used], expected, atol=1e-6) and (gradient[used:] == 0).all()
