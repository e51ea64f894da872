"""Residuals over numpy: equal gradients, fewer bytes, typed ends."""
import time

import numpy as np
import pytest

import ringattn

GRADIENTS = ("dq", "dk", "dv")


def tensors(rng, queries=70, keys=90):
    shapes = [(2, queries, 4, 16), (2, keys, 2, 16), (2, keys, 2, 24), (2, queries, 4, 24)]
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def stateless(client, dout, q, k, v, **options):
    out, lse, _ = client.forward(q, k, v, **options)
    return client.backward(dout, q, k, v, out=out, lse=lse, **options)


def equal(ours, theirs, names=GRADIENTS):
    for name in names:
        assert (getattr(ours, name) == getattr(theirs, name)).all(), name


@pytest.mark.parametrize("transport", ["relay", "host_memory", "direct"])
def test_backward_sends_dout_alone(client, rng, transport):
    q, k, v, dout = tensors(rng)
    options = {"causal": True, "window": (40, 3), "softcap": 2.0, "world_size": 3}
    expected = stateless(client, dout, q, k, v, **options)
    report = client.forward(q, k, v, retain=60, transport=transport, **options).report
    assert report.residual is not None and report.residual_reason == ""
    assert report.residual.handle not in repr(client)
    result = client.backward(dout, residual=report.residual, transport=transport)
    equal(result, expected)
    assert result.report.residual_failure == "" and result.report.bytes_up == dout.nbytes
    with pytest.raises(ringattn.FailedPreconditionError) as error:
        client.backward(dout, residual=report.residual)
    assert error.value.reason == "RESIDUAL_CONSUMED"


def test_without_being_asked_nothing_stays(client, rng):
    q, k, v, _ = tensors(rng)
    report = client.forward(q, k, v).report
    assert report.residual is None and report.residual_reason == "" and report.residual_failure == ""
    assert client.forward(q, k, v, retain=None).report.residual is None
    assert client.forward(q, k, v, retain=False).report.residual is None


def test_every_tensor_of_a_backward(client, rng):
    """Bias with its gradient, sinks, dlse, packed documents, fp32 results of fp16."""
    q, k, v, dout = tensors(rng)
    dlse = rng.standard_normal((2, 4, 70), np.float32)
    options = {"bias": rng.standard_normal((1, 4, 70, 90), np.float32), "bias_gradient": True,
               "sinks": rng.standard_normal(4, np.float32)}
    out, lse, report = client.forward(q, k, v, retain=True, **options)
    expected = client.backward(dout, q, k, v, out=out, lse=lse, dlse=dlse, **options)
    result = client.backward(dout, residual=report.residual, dlse=dlse)
    equal(result, expected, (*GRADIENTS, "dsinks", "dbias"))
    assert result.dbias.shape == (1, 4, 70, 90)

    packed = {"cu_seqlens_q": [0, 30, 140], "cu_seqlens_k": [0, 100, 180], "causal": True, "output_dtype": "float32"}
    q, k, v, dout = (x.reshape(-1, *x.shape[2:]).astype(np.float16) for x in (q, k, v, dout))
    expected = stateless(client, dout, q, k, v, **packed)
    residual = client.forward(q, k, v, retain=True, **packed).report.residual
    result = client.backward(dout, residual=residual)
    assert result.dq.dtype == np.float32 and result.dq.shape == q.shape
    equal(result, expected)


@pytest.mark.parametrize("transport", ["relay", "host_memory", "direct"])
def test_tensors_are_sent_where_it_is_gone(client, rng, transport):
    q, k, v, dout = tensors(rng)
    out, lse, report = client.forward(q, k, v, retain=60, causal=True)
    client.delete_residual(report.residual)
    expected = client.backward(dout, q, k, v, out=out, lse=lse, causal=True)
    for residual in (report.residual, report.residual.handle):  # with tensors a handle will do
        result = client.backward(dout, q, k, v, out=out, lse=lse, causal=True, residual=residual, transport=transport)
        assert result.report.residual_failure == "RESIDUAL_CONSUMED" and result.report.attempts == 2
        assert transport.split("_")[0] in result.report.transport or transport == "relay"
        equal(result, expected)
    with pytest.raises(ringattn.FailedPreconditionError):
        client.backward(dout, residual=report.residual)


def test_the_forwards_plan_may_be_said_again(client, rng):
    """Plan options next to a residual are compared, not dropped: also where the tensors are not given."""
    q, k, v, dout = tensors(rng)
    plan = {"schedule": "ring", "layout": "zigzag", "world_size": 2}
    expected = stateless(client, dout, q, k, v, **plan)
    report = client.forward(q, k, v, retain=60, **plan).report
    told = {**plan, "members": list(report.plan.members)}
    for other, field in [({"world_size": 3}, "plan.world_size"), ({"layout": "striped"}, "plan.layout"),
                         ({"members": told["members"][::-1]}, "plan.members"), ({"tile_q": 7}, "plan.tuning.tile_q")]:
        with pytest.raises(ringattn.InvalidArgumentError) as error:
            client.backward(dout, residual=report.residual, **other)
        assert error.value.violations[0].field == field
    equal(client.backward(dout, residual=report.residual, **told), expected)
    # On one device every schedule is the same one.
    alone = {"schedule": "all_gather", "world_size": 1}
    expected = stateless(client, dout, q, k, v, **alone)
    residual = client.forward(q, k, v, retain=60, **alone).report.residual
    equal(client.backward(dout, residual=residual, **alone), expected)


def test_it_can_stay_for_another(client, rng):
    q, k, v, dout = tensors(rng)
    expected = stateless(client, dout, q, k, v)
    residual = client.forward(q, k, v, retain=60).report.residual
    for keep in (True, True, False):
        equal(client.backward(dout, residual=residual, keep_residual=keep), expected)
    with pytest.raises(ringattn.FailedPreconditionError):
        client.backward(dout, residual=residual)


def test_its_time(client, rng):
    q, k, v, dout = tensors(rng)
    short, renewed = (client.forward(q, k, v, retain=seconds).report.residual for seconds in (1, 3))
    assert client.renew_residuals([renewed], 60) == [""]
    time.sleep(3.5)
    assert client.renew_residuals([short, renewed.handle]) == ["RESIDUAL_EXPIRED", ""]
    with pytest.raises(ringattn.FailedPreconditionError) as error:
        client.backward(dout, residual=short)
    assert error.value.reason == "RESIDUAL_EXPIRED"
    client.backward(dout, residual=renewed)


def test_deleting(client, rng):
    q, k, v, _ = tensors(rng)
    residual = client.forward(q, k, v, retain=60).report.residual
    client.delete_residual(residual)
    client.delete_residual(residual.handle)
    assert client.renew_residuals([residual]) == ["RESIDUAL_CONSUMED"]
    with pytest.raises(ringattn.NotFoundError) as error:
        client.delete_residual("0" * 32)
    assert error.value.reason == "RESIDUAL_NOT_FOUND"


def test_what_cannot_be_is_refused(client, rng):
    q, k, v, dout = tensors(rng)
    residual = client.forward(q, k, v, retain=60).report.residual
    with pytest.raises(TypeError, match="pass Report.residual"):
        client.backward(dout, residual=residual.handle)
    with pytest.raises(TypeError, match="residual"):
        client.backward(dout, q, k, v, residual=7)
    with pytest.raises(ringattn.InvalidArgumentError, match="causal: is determined by the residual"):
        client.backward(dout, residual=residual, causal=True)
    with pytest.raises(ringattn.InvalidArgumentError, match="dout"):
        client.backward(dout[:1], residual=residual)
    with pytest.raises(ringattn.InvalidArgumentError, match="keep_residual"):
        client.backward(dout, q, k, v, keep_residual=True)
    with pytest.raises(ringattn.InvalidArgumentError, match="retain"):
        client.forward(q, k, v, retain=-1)
    with pytest.raises(ringattn.InvalidArgumentError, match="seconds"):
        client.renew_residuals([residual], 0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'retain'"):
        client.backward(dout, q, k, v, retain=60)
    # Other options than the forward's are the service's to refuse.
    with pytest.raises(ringattn.InvalidArgumentError) as error:
        client.backward(dout, q, k, v, residual=residual, softcap=3.0)
    assert error.value.violations[0].field.startswith("options")
    client.delete_residual(residual)


def test_in_an_event_loop(client, rng):
    import asyncio

    q, k, v, dout = tensors(rng)
    expected = stateless(client, dout, q, k, v)

    async def main():
        report = (await client.forward_async(q, k, v, retain=60)).report
        return await client.backward_async(dout, residual=report.residual)

    equal(asyncio.run(main()), expected)


def test_held_past_its_seconds(client, address, rng):
    q, k, v, dout = tensors(rng)
    held, other = (client.forward(q, k, v, retain=3.0).report.residual for _ in range(2))
    assert client.hold_trouble is None
    client.hold_residuals([held])
    client.hold_residuals([other.handle])
    client.release_residuals([other])
    time.sleep(4)
    result = client.backward(dout, residual=held, keep_residual=True)
    equal(result, stateless(client, dout, q, k, v))
    assert client.hold_trouble is None
    with pytest.raises(TypeError):
        client.hold_residuals([5])
    # Another client, whose own stream ends at once, takes nothing away from the first.
    with ringattn.connect(address) as second:
        second.hold_residuals([held])
        time.sleep(0.5)
    assert client.backward(dout, residual=held).report.residual_failure == ""
    limits = client.server_info()["limits"]
    assert limits["residual_hold_ttl"] == 60 and limits["residual_hold_grace"] == 10


def test_hold_trouble_is_told():
    with ringattn.connect("127.0.0.1:1") as nowhere:
        nowhere.hold_residuals(["0" * 32])
        end = time.monotonic() + 10
        while nowhere.hold_trouble is None and time.monotonic() < end:
            time.sleep(0.05)
        assert isinstance(nowhere.hold_trouble, ringattn.UnavailableError)
        assert "127.0.0.1:1" in str(nowhere.hold_trouble)
    with pytest.raises(RuntimeError, match="the client is closed"):
        nowhere.hold_residuals([])
