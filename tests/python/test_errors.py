"""Invalid arguments raise an error with the right type and the field's name."""
import os
import pathlib
import pickle

import numpy as np
import pytest

import ringattn
from ringattn import _errors

Q = np.ones((2, 8, 4, 16), np.float32)
K = np.ones((2, 8, 2, 16), np.float32)
IDS = np.zeros((2, 8), np.int32)


@pytest.mark.parametrize("field, arrays, options", [
    ("q", (Q[0], K, K), {}),
    ("k", (Q, K[:1], K), {}),
    ("k", (Q, K.astype(np.float16), K), {}),
    ("k", (Q, K[..., :8], K), {}),
    ("v", (Q, K, K[:, :7]), {}),
    ("q", (Q.astype(np.float64), K, K), {}),
    ("q", (Q.astype(np.int32), K.astype(np.int32), K.astype(np.int32)), {}),
    ("q", (Q.astype(">f4"), K, K), {}),
    ("bias", (Q, K, K), {"bias": np.zeros((2, 4, 8, 7), np.float32)}),
    ("bias", (Q, K, K), {"bias": np.zeros((8, 8), np.float32)}),
    ("bias", (Q, K, K), {"bias": np.zeros((1, 1, 8, 8), np.float16)}),
    ("mask", (Q, K, K), {"mask": np.zeros((3, 1, 8, 8), bool)}),
    ("mask", (Q, K, K), {"mask": np.zeros((1, 1, 8, 8), np.float32)}),
    ("q_segment_ids", (Q, K, K), {"q_segment_ids": IDS}),
    ("kv_segment_ids", (Q, K, K), {"q_segment_ids": IDS, "kv_segment_ids": IDS[:, :7]}),
    ("q_segment_ids", (Q, K, K), {"q_segment_ids": IDS.astype(np.float32), "kv_segment_ids": IDS}),
    ("bias_before_softcap", (Q, K, K), {"bias_before_softcap": True}),
    ("mask_bits", (Q, K, K), {"mask_bits": True}),
    ("bias_gradient", (Q, K, K), {"bias_gradient": True}),
    ("sinks", (Q, K, K), {"sinks": np.zeros(2, np.float32)}),
    ("alibi_slopes", (Q, K, K), {"alibi_slopes": np.zeros(3, np.float32)}),
    ("window", (Q, K, K), {"window": 3}),
    ("deadline", (Q, K, K), {"deadline": 0}),
    ("cu_seqlens_q", (Q[0], K[0], K[0]), {"cu_seqlens_q": [0, 8]}),
    ("documents", (Q, K, K), {"documents": [ringattn.Document()]}),
    # Said by the service, or by the C++ library.
    ("options.softcap", (Q, K, K), {"softcap": -1.0}),
    ("options.window.left", (Q, K, K), {"window": (-2, 0)}),
    ("options.dropout.rate", (Q, K, K), {"dropout_p": 1.0}),
    ("shape.num_kv_heads", (Q, K[:, :, [0, 0, 0]], K[:, :, [0, 0, 0]]), {}),
    ("plan.layout", (Q, K, K), {"layout": "circular"}),
])
def test_invalid_argument(client, field, arrays, options):
    with pytest.raises((ringattn.InvalidArgumentError, ValueError), match=field.replace(".", r"\.")) as caught:
        client.forward(*arrays, **options)
    if isinstance(caught.value, ringattn.RingattnError):
        assert [violation.field for violation in caught.value.violations] == [field]


def test_unimplemented():
    # No option of the package is, on these workers: as the extension module says it of others.
    error = _errors.error_of({
        "code": "UNIMPLEMENTED", "message": "options.alibi: the kernels of device x (worker a) do not serve it",
        "reason": "OPTION_NOT_SERVED", "violations": [("options.alibi", "do not serve it")],
        "retry_after": None, "metadata": {}})
    assert isinstance(error, ringattn.UnimplementedError) and isinstance(error, NotImplementedError)
    assert error.code == "UNIMPLEMENTED" and error.violations[0].field == "options.alibi"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and again.violations == error.violations


def test_of_python(client):
    with pytest.raises(TypeError, match="forward.*'casual'"):
        client.forward(Q, K, K, casual=True)
    with pytest.raises(TypeError, match="'dlse'"):
        client.forward(Q, K, K, dlse=Q)
    with pytest.raises(TypeError, match="q: is a str"):
        client.forward("q", K, K)
    with pytest.raises(ValueError, match="lse"):
        client.backward(Q, Q, K, K, out=Q)
    with pytest.raises(AttributeError, match="flash_attn_fnuc"):
        ringattn.flash_attn_fnuc


def test_more_workers_than_there_are(client):
    with pytest.raises(ringattn.FailedPreconditionError):
        client.forward(Q, K, K, world_size=7)


def test_nobody_listens():
    with pytest.raises(ringattn.UnavailableError) as caught:
        ringattn.connect("127.0.0.1:1", connect_timeout=0.3).forward(Q, K, K)
    assert isinstance(caught.value, ConnectionError) and caught.value.code == "UNAVAILABLE"


def test_deadline(client, long_call):
    with pytest.raises(TimeoutError) as caught:
        client.forward(*long_call, deadline=0.7)
    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_unknown_operation(client):
    for call in (client.get_operation, client.cancel_operation):
        with pytest.raises(LookupError):
            call("nobody-sent-this")


def test_connect(tmp_path, address):
    with pytest.raises(ringattn.InvalidArgumentError):
        ringattn.connect("")
    with pytest.raises(ringattn.InvalidArgumentError, match="tls_cert and tls_key"):
        ringattn.connect("x:1", tls_ca=tmp_path, tls_cert=pathlib.Path("c"))
    with pytest.raises(ringattn.InvalidArgumentError, match="token_file"):
        ringattn.connect("example.com:1", token_file=tmp_path / "token")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    with ringattn.connect(address, token_file=os.fspath(token)) as client:
        assert client.server_info()["version"]


def test_a_bad_call_leaves_nothing_held(client):
    array = np.ones((1, 4, 1, 8), np.float32)
    for _ in range(3):
        with pytest.raises(ValueError):
            client.forward(array, array, array, layout="circular")
    array.resize((1, 4, 1, 4), refcheck=False)  # numpy refuses while a buffer is held
