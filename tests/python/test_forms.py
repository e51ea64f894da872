"""Tensors in other forms: packed inputs with their gradients, lse per document, probabilities of chosen rows."""
import asyncio
import os

import numpy as np
import pytest
import reference

import ringattn


def plain(rng, tokens_q=(2, 70), tokens_k=(2, 70), heads=4, kv_heads=4, dim=16, dtype=np.float32):
    shapes = [(*tokens_q, heads, dim), (*tokens_k, kv_heads, dim), (*tokens_k, kv_heads, dim), (*tokens_q, heads, dim)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def packed_form(packing, q, k, v):
    return {"qkv": np.stack([q, k, v], -3)} if packing == "qkv" else {"q": q, "kv": np.stack([k, v], -3)}


OPTIONS = {"causal": True, "window": (40, 3), "softcap": 2.0, "world_size": 3, "layout": "zigzag"}


@pytest.mark.parametrize("transport", ["relay", "host_memory", "direct"])
@pytest.mark.parametrize("packing, kv_heads, keys", [("qkv", 4, 70), ("kv", 2, 90)])
def test_packed_inputs_have_the_bits_of_plain_ones(client, rng, transport, packing, kv_heads, keys):
    q, k, v, dout = plain(rng, tokens_k=(2, keys), kv_heads=kv_heads)
    out, lse, _ = client.forward(q, k, v, **OPTIONS)
    expected = client.backward(dout, q, k, v, out=out, lse=lse, **OPTIONS)
    form = packed_form(packing, q, k, v)
    ours = client.forward(**form, transport=transport, **OPTIONS)
    assert (ours.out == out).all() and (ours.lse == lse).all()
    assert ours.report.bytes_up == q.nbytes + k.nbytes + v.nbytes
    inputs = {name: tensor["bytes"] for name, tensor in
              ((tensor["tensor"], tensor) for tensor in ours.report.details["accepted"]["inputs"])}
    if transport == "relay" and inputs:  # not in the header: what is asked for is the packed tensor
        assert set(inputs) == set(form)
    for more in ({"out": out, "lse": lse}, {}):
        result = client.backward(dout, **form, transport=transport, **more, **OPTIONS)
        parts = [expected.dq, expected.dk, expected.dv] if packing == "qkv" else [expected.dk, expected.dv]
        gradient = result.dqkv if packing == "qkv" else result.dkv
        reference.close(gradient, np.stack(parts, -3), 0 if more else 1e-6)
        assert result.dk is None and result.dv is None
        assert (result.dqkv is None) == (packing == "kv") and (result.dkv is None) == (packing == "qkv")
        if packing == "kv":
            reference.close(result.dq, expected.dq, 0 if more else 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packed_documents_in_packed_form(client, rng, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v, dout = plain(rng, (75,), (75,), dtype=dtype)
    cu = [0, 20, 20, 75]
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    expected = client.backward(dout, q, k, v, **options)
    result = client.backward(dout, **packed_form("qkv", q, k, v), **options)
    assert result.dqkv.dtype == dtype and result.dqkv.shape == (75, 3, 4, 16)
    assert (result.dqkv == np.stack([expected.dq, expected.dk, expected.dv], -3)).all()


def test_residual_of_packed_inputs(client, rng):
    q, k, v, dout = plain(rng)
    form = packed_form("qkv", q, k, v)
    out, lse, report = client.forward(**form, causal=True, retain=60)
    expected = client.backward(dout, **form, out=out, lse=lse, causal=True)
    result = client.backward(dout, residual=report.residual, keep_residual=True)
    assert (result.dqkv == expected.dqkv).all() and result.report.bytes_up == dout.nbytes
    beside = client.backward(dout, **form, residual=report.residual, causal=True)
    assert (beside.dqkv == expected.dqkv).all() and beside.report.residual_failure == ""
    # It is gone now: the packed tensor is sent instead.
    again = client.backward(dout, **form, residual=report.residual, causal=True)
    assert again.report.residual_failure == "RESIDUAL_CONSUMED"
    reference.close(again.dqkv, expected.dqkv, 1e-6)


def test_forms_that_make_no_sense(client, rng):
    q, k, v, dout = plain(rng)
    qkv, kv = np.stack([q, k, v], -3), np.stack([k, v], -3)
    for call, field in [
            (lambda: client.forward(q, qkv=qkv), "q"), (lambda: client.forward(qkv=qkv, kv=kv), "kv"),
            (lambda: client.forward(q, k, kv=kv), "k"), (lambda: client.forward(q, v=v, kv=kv), "v"),
            (lambda: client.forward(qkv=kv), "qkv"), (lambda: client.forward(q, kv=qkv), "kv"),
            (lambda: client.forward(qkv=q), "qkv"), (lambda: client.forward(q, kv=kv[:1]), "kv"),
            (lambda: client.forward(q, kv=kv[..., :8]), "kv"),
            (lambda: client.forward(q, kv=kv.astype(np.float16)), "kv"),
            (lambda: client.backward(dout, q, qkv=qkv), "q")]:
        with pytest.raises(ringattn.InvalidArgumentError) as error:
            call()
        assert error.value.violations[0].field == field, error.value
    for call, name in [(lambda: client.forward(), "q"), (lambda: client.forward(kv=kv), "q"),
                       (lambda: client.forward(q, k), "v"), (lambda: client.backward(dout), "q")]:
        with pytest.raises(TypeError, match=f"^{name}: is missing"):
            call()


# ----------------------------------------------------------------- lse per document


def by_document(lse, cu):
    lengths = np.diff(cu)
    rows = np.full((len(lengths), lse.shape[0], max(lengths)), -np.inf, np.float32)
    for row, begin, length in zip(rows, cu, lengths):
        row[:, :length] = lse[:, begin:begin + length]
    return rows


@pytest.mark.parametrize("transport", ["relay", "host_memory"])
def test_lse_per_document(client, rng, transport):
    q, k, v, dout = plain(rng, (75,), (90,), kv_heads=2)
    cu_q, cu_k = np.array([0, 20, 20, 75]), np.array([0, 30, 31, 90])
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True, "transport": transport}
    out, lse, _ = client.forward(q, k, v, **options)
    ours = client.forward(q, k, v, lse_format="per_document", **options)
    assert ours.lse.shape == (3, 4, 55)
    assert np.array_equal(ours.lse, by_document(lse, cu_q)) and (ours.out == out).all()
    assert (client.forward(q, k, v, lse_format="flat", **options).lse == lse).all()
    dlse = rng.standard_normal(lse.shape, np.float32)
    expected = client.backward(dout, q, k, v, out=out, lse=lse, dlse=dlse, **options)
    behind = np.where(np.isfinite(ours.lse), by_document(dlse, cu_q), np.nan)  # is not read
    result = client.backward(dout, q, k, v, out=out, lse=ours.lse, dlse=behind, lse_format="per_document", **options)
    for name in ("dq", "dk", "dv"):
        assert (getattr(result, name) == getattr(expected, name)).all(), name
    # And with a residual.
    report = client.forward(q, k, v, lse_format="per_document", retain=60, **options).report
    result = client.backward(dout, residual=report.residual, dlse=behind)
    assert (result.dq == expected.dq).all()


def test_lse_formats_that_make_no_sense(client, rng):
    q, k, v, dout = plain(rng)
    with pytest.raises(ringattn.InvalidArgumentError, match="lse_format: is per_document, which needs cu_seqlens_q"):
        client.forward(q, k, v, lse_format="per_document")
    with pytest.raises(ringattn.InvalidArgumentError, match="lse_format: is 'longest'"):
        client.forward(q, k, v, lse_format="longest")
    cu = [0, 30, 70]
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    row = [x[0] for x in (q, k, v)]
    out, lse, _ = client.forward(*row, **options)
    with pytest.raises(ringattn.InvalidArgumentError, match=r"lse: .*must be \[2, 4, 40\]"):
        client.backward(dout[0], *row, out=out, lse=lse, lse_format="per_document", **options)


# ----------------------------------------------------------------- probabilities


def weights(q, k, lse, causal):
    """Returns p for all rows of a batch row or document, in fp64: [heads, queries, keys]."""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("ihd,jhd->hij", q.astype(np.float64), np.repeat(k, group, 1).astype(np.float64))
    seen = reference.visible(len(q), len(k), causal)
    return np.where(seen, np.exp(scores * q.shape[-1] ** -0.5 - lse[..., None]), 0)


def test_probabilities_of_dense_rows(client, rng):
    q, k, v, _ = plain(rng, tokens_k=(2, 90), kv_heads=2)
    rows = [(1, 69), (0, 0), (0, 33)]
    out, lse, report = client.forward(q, k, v, causal=True, world_size=3, probability_rows=rows)
    result = client.forward(q, k, v, causal=True, world_size=3, probability_rows=np.array(rows))
    assert result.probabilities.shape == (3, 4, 90) and result.probabilities.dtype == np.float32
    assert client.forward(q, k, v).probabilities is None
    for given, (batch, position) in zip(result.probabilities, rows):
        reference.close(given, weights(q[batch], k[batch], lse[batch], True)[:, position], 1e-5)


def test_probabilities_of_documents(client, rng):
    q, k, v, _ = plain(rng, (75,), (90,), kv_heads=2)
    cu_q, cu_k = [0, 20, 20, 75], [0, 30, 31, 90]
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    result = client.forward(q, k, v, probability_rows=[(0, 19), (2, 0), (2, 54)], **options)
    assert result.probabilities.shape == (3, 4, 59)
    for given, (document, position) in zip(result.probabilities, [(0, 19), (2, 0), (2, 54)]):
        rows, keys = slice(cu_q[document], cu_q[document + 1]), slice(cu_k[document], cu_k[document + 1])
        expected = weights(q[rows], k[keys], result.lse[:, rows], False)[:, position]
        reference.close(given[:, :expected.shape[-1]], expected, 1e-5)
        assert (given[:, expected.shape[-1]:] == 0).all()


def test_probability_rows_that_make_no_sense(client, rng):
    q, k, v, dout = plain(rng)
    for rows, text in [([(2, 0)], r"probability_rows\[0\]: has batch row 2; the call has 2"),
                       ([(0, 1), (0, -1)], r"probability_rows\[1\]: has position -1"),
                       ([(0,)], r"probability_rows\[0\]: is \(0,\); must be \(batch row or document, position\)"),
                       ([(0, 70)], r"reply.probability_rows\[0\]"), ([(0, 1)] * 4097, "probability_rows")]:
        with pytest.raises(ringattn.RingattnError, match=text):
            client.forward(q, k, v, probability_rows=rows)
    with pytest.raises(TypeError, match="unexpected keyword argument 'probability_rows'"):
        client.backward(dout, q, k, v, probability_rows=[(0, 1)])
    with pytest.raises(ringattn.InvalidArgumentError, match="reply.probability_rows.*pass_q"):
        client.forward(q, k, v, probability_rows=[(0, 1)], schedule="pass_q", world_size=2)


@pytest.mark.parametrize("packing", [None, "qkv"])
def test_dilation(client, rng, packing):
    """One level of segments of 8 tokens and every second of them, by head: what a mask says."""
    q, k, v, dout = plain(rng, (1, 32), (1, 32), heads=2, kv_heads=2)
    levels = [ringattn.DilationLevel(segment_length=8, dilation_rate=2)]
    tokens = np.arange(32)
    chosen = np.stack([tokens % 2 == head for head in range(2)])
    mask = (chosen[:, :, None] & chosen[:, None, :] & (tokens[:, None] // 8 == tokens // 8))[None]
    form = packed_form("qkv", q, k, v) if packing else {"q": q, "k": k, "v": v}
    out, lse, _ = client.forward(**form, dilation_levels=levels)
    expected = client.forward(q, k, v, mask=mask)
    reference.close(out, expected.out, 1e-5)
    reference.close(lse, expected.lse, 1e-5)
    result = client.backward(dout, **form, dilation_levels=levels)
    gradient = client.backward(dout, q, k, v, mask=mask)
    reference.close(result.dqkv[..., 0, :, :] if packing else result.dq, gradient.dq, 1e-5)
    with pytest.raises(ringattn.RingattnError, match="dilation_rate"):
        client.forward(**form, dilation_levels=[ringattn.DilationLevel(8, 0)])


def test_in_an_event_loop(client, rng):
    q, k, v, dout = plain(rng, (70,), (70,))
    cu = [0, 30, 70]
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "lse_format": "per_document"}
    form = packed_form("qkv", q, k, v)

    async def both():
        forward = await client.forward_async(**form, probability_rows=[(1, 2)], **options)
        return forward, await client.backward_async(dout, **form, out=forward.out, lse=forward.lse, **options)

    forward, backward = asyncio.run(both())
    expected = client.forward(**form, probability_rows=[(1, 2)], **options)
    assert forward.lse.shape == (2, 4, 40) and (forward.out == expected.out).all()
    assert (forward.probabilities == expected.probabilities).all()
    gradients = client.backward(dout, **form, out=expected.out, lse=expected.lse, **options)
    assert (backward.dqkv == gradients.dqkv).all()


def test_torch_tensors(client):
    torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)
    torch.manual_seed(0)
    qkv = torch.randn(2, 70, 3, 4, 16, dtype=torch.bfloat16)
    result = client.forward(qkv=qkv, causal=True, probability_rows=[(1, 69)])
    assert result.out.dtype == torch.bfloat16 and result.probabilities.shape == (1, 4, 70)
    torch.testing.assert_close(result.probabilities.sum(-1), torch.ones(1, 4))
    gradients = client.backward(torch.ones_like(result.out), qkv=qkv, causal=True)
    assert gradients.dqkv.shape == qkv.shape and gradients.dqkv.dtype == torch.bfloat16
