"""Client over numpy: results, layouts of memory, reports, options."""
import threading
import time

import numpy as np
import pytest
import reference

import ringattn


def tensors(rng, dtype=np.float32, batch=2, queries=70, keys=90, heads=4, kv_heads=2, dim=16, dim_v=24):
    shapes = [(batch, queries, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim_v)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (20, 5)}, {"causal": True, "window": (9, -1)}, {"softcap": 2.0},
    {"softmax_scale": 0.7},
])
def test_forward(client, rng, options):
    q, k, v = tensors(rng)
    out, lse, report = client.forward(q, k, v, world_size=3, **options)
    expected = reference.forward(q, k, v, **options)
    reference.close(out, expected[0], 1e-5)
    reference.close(lse, expected[1], 1e-5)
    assert out.dtype == lse.dtype == np.float32
    assert report.plan.world_size == 3 and report.attempts == 1


def test_backward_equals_finite_differences(client, rng):
    q, k, v = tensors(rng, batch=1, queries=6, keys=9, dim=4, dim_v=4)
    dout, dlse = rng.standard_normal((1, 6, 4, 4), np.float32), rng.standard_normal((1, 4, 6), np.float32)
    out, lse, _ = client.forward(q, k, v, causal=True)
    given = client.backward(dout, q, k, v, out=out, lse=lse, dlse=dlse, causal=True)
    recomputed = client.backward(dout, q, k, v, dlse=dlse, causal=True)

    def loss(*inputs):
        out, lse = reference.forward(*inputs, causal=True)
        return (out * dout).sum() + (lse * dlse).sum()

    for index, (name, tensor) in enumerate((("dq", q), ("dk", k), ("dv", v))):
        expected = np.zeros(tensor.shape)
        for place in np.ndindex(*tensor.shape):
            step = np.zeros(tensor.shape)
            step[place] = 1e-5
            ends = [loss(*(t + sign * step if i == index else t.astype(np.float64)
                           for i, t in enumerate((q, k, v)))) for sign in (1, -1)]
            expected[place] = (ends[0] - ends[1]) / 2e-5
        reference.close(getattr(given, name), expected, 1e-4)
        reference.close(getattr(recomputed, name), expected, 1e-4)
    assert given.dsinks is None and given.dbias is None


def test_a_batch_without_rows(client, rng):
    q, k, v = tensors(rng, batch=0)
    for options in ({}, {"bias": np.ones((1, 4, 70, 90), np.float32)},
                    {"bias": np.ones((0, 4, 70, 90), np.float32), "mask": np.ones((0, 1, 70, 90), bool)}):
        out, lse, _ = client.forward(q, k, v, causal=True, **options)
        assert out.shape == (0, 70, 4, 24) and lse.shape == (0, 4, 70)
        given = client.backward(np.zeros_like(out), q, k, v, out=out, lse=lse, causal=True, **options,
                                bias_gradient="bias" in options)
        assert given.dq.shape == q.shape and given.dk.shape == k.shape and given.dv.shape == v.shape
        if "bias" in options:
            assert given.dbias.shape == options["bias"].shape and not given.dbias.any()


def test_many_short_rows(client, rng):
    q, k, v = tensors(rng, batch=15_000, queries=2, keys=3, dim=8, dim_v=8)
    dout = rng.standard_normal(q.shape, np.float32)
    out, lse, _ = client.forward(q, k, v, causal=True)
    expected = reference.forward(q, k, v, causal=True)
    reference.close(out, expected[0], 1e-5)
    reference.close(lse, expected[1], 1e-5)
    gradients = client.backward(dout, q, k, v, out=out, lse=lse, causal=True)
    rows = slice(14_990, None)
    last = client.backward(dout[rows], q[rows], k[rows], v[rows], out=out[rows], lse=lse[rows], causal=True)
    for name in ("dq", "dk", "dv"):
        reference.close(getattr(gradients, name)[rows], getattr(last, name), 1e-6)
    one = np.ones((65_536, 1, 1, 8), np.float32)
    with pytest.raises(ringattn.ResourceExhaustedError, match="shape.batch"):
        client.forward(one, one, one)


def test_packed_documents_are_their_own_calls(client, rng):
    lengths_q, lengths_k = [5, 0, 33, 17], [9, 4, 33, 20]
    cu_q, cu_k = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (lengths_q, lengths_k))
    q, k, v = (rng.standard_normal((total, heads, 8), np.float32)
               for total, heads in ((cu_q[-1], 4), (cu_k[-1], 2), (cu_k[-1], 2)))
    causal = [True, False, True, False]
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k.tolist(),
              "documents": [ringattn.Document(causal=c, window=(6, -1) if c else None) for c in causal]}
    out, lse, _ = client.forward(q, k, v, **packed)
    gradients = client.backward(out, q, k, v, out=out, lse=lse, **packed)
    assert gradients.dk.shape == k.shape
    for i, is_causal in enumerate(causal):
        rows, columns = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        expected = reference.forward(q[None, rows], k[None, columns], v[None, columns], causal=is_causal,
                                     window=(6, -1) if is_causal else None)
        reference.close(out[rows], expected[0][0], 1e-5)
        reference.close(lse[:, rows], expected[1][0], 1e-5)


def test_bfloat16_float16_and_fp32_results(client, rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype, bound in ((np.float16, 2e-3), (ml_dtypes.bfloat16, 1e-2)):
        q, k, v = tensors(rng, dtype)
        out, lse, _ = client.forward(q, k, v)
        assert out.dtype == dtype and lse.dtype == np.float32
        expected = reference.forward(*(x.astype(np.float64) for x in (q, k, v)))[0]
        reference.close(out, expected, bound)
        wide = client.forward(q, k, v, output_dtype="float32")
        assert wide.out.dtype == np.float32
        reference.close(wide.out, expected, bound)
        assert client.backward(out, q, k, v, out=out, lse=lse).dv.dtype == dtype


def test_memory_is_taken_as_it_is(rng):
    from ringattn._arrays import take

    single = rng.standard_normal((2, 3, 4), np.float32)
    assert np.shares_memory(take(single, "q").memory, single)
    readonly = single.copy()
    readonly.flags.writeable = False
    assert np.shares_memory(take(readonly, "q").memory, readonly)

    class OfDlpack:  # what a library that is neither numpy nor PyTorch shows
        def __dlpack__(self, **options):
            return single.__dlpack__(**options)

        def __dlpack_device__(self):
            return single.__dlpack_device__()

    assert np.shares_memory(take(OfDlpack(), "q").memory, single)
    strided = single[:, :, ::2]
    assert (take(strided, "q").memory == strided).all()


def test_strided_inputs(client, rng):
    q, k, v = tensors(rng, queries=90, heads=2, dim_v=16)
    plain = client.forward(q, k, v).out
    heads_first = np.ascontiguousarray(q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    both = np.stack([k, v], 2)
    assert (client.forward(heads_first, both[:, :, 0], both[:, :, 1]).out == plain).all()


def test_members_and_tuning(client, rng):
    q, k, v = tensors(rng, queries=90, dim_v=16)
    plain, *_, report = client.forward(q, k, v, world_size=2)
    members = report.plan.members[::-1]
    tuned = client.forward(q, k, v, members=members, tile_q=24, tile_kv=192, key_splits=1)
    assert tuned.report.plan.members == members
    assert np.allclose(tuned.out, plain, atol=1e-5)
    with pytest.raises(ringattn.InvalidArgumentError, match="plan.tuning.tile_q"):
        client.forward(q, k, v, tile_q=100)
    with pytest.raises(ringattn.RingattnError, match="worker nobody is not ready; ready workers: "):
        client.forward(q, k, v, members=["nobody"])


def test_call_options_and_report(client, rng):
    q, k, v = tensors(rng, queries=90, dim_v=16)
    report = client.forward(q, k, v, layout="striped", stripe=4, schedule="ring", world_size=2, timeline=True,
                            request_id="py-1", deadline=60.0,
                            traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").report
    assert report.request_id == "py-1" and report.plan.layout == "striped" and report.plan.world_size == 2
    assert report.transport == "relay"
    assert set(report.stages) >= {"queue", "upload", "compute", "download"}
    assert report.bytes_up == q.nbytes + k.nbytes + v.nbytes
    assert report.details["summary"]["ranks"][0]["timeline"][0]["category"]
    assert set(report.kernels) == set(report.plan.members)
    for (use,) in report.kernels.values():
        assert (use.call, use.family, use.kernel_class) == ("forward", "cpu_fp32", "plain")
        assert use.instructions and use.calls >= 1
    assert report.details["accepted"]["traceparent"].startswith("00-4bf92f")
    assert client.get_operation("py-1")["state"] == "succeeded"


def test_service(client):
    assert client.server_info()["version"] == ringattn.__version__
    assert len(client.topology()["workers"]) == 3


def test_other_threads_run_during_a_call(client, rng):
    q = rng.standard_normal((1, 4096, 8, 32), np.float32)
    ticks, ended = 0, threading.Event()

    def tick():
        nonlocal ticks
        while not ended.is_set():
            ticks += 1
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    thread.start()
    seconds = time.monotonic()
    client.forward(q, q, q)
    seconds = time.monotonic() - seconds
    ended.set()
    thread.join()
    assert ticks >= seconds / 0.005 * 0.1, (ticks, seconds)


def test_what_python_adds_to_a_call(client, rng):
    """Beside the client library's own time, at 16 MiB each way and more."""
    q = rng.standard_normal((1, 16384, 4, 64), np.float32)
    ratios = []
    for _ in range(8):
        began = time.monotonic()
        report = client.forward(q, q, q, window=(64, 0)).report
        ratios.append((time.monotonic() - began) / report.times["finished"])
        if ratios[-1] <= 1.05:
            return
    raise AssertionError(ratios)


def test_threads_share_a_client(client, rng):
    q, k, v = tensors(rng)
    expected = client.forward(q, k, v).out
    results = [None] * 6

    def call(index):
        results[index] = client.forward(q, k, v).out

    threads = [threading.Thread(target=call, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((result == expected).all() for result in results)


def test_a_closed_client(address, rng):
    q, k, v = tensors(rng)
    client = ringattn.connect(address)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.forward(q, k, v)
