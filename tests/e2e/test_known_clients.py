"""Who a client is, and what it may do: tokens, certificates, quotas, the audit log."""

import os
import re
import subprocess
import threading

import grpc
import pytest

from attention import chunks_of, details, header_for, make_inputs, requests, run
from certificates import digest, tls_channel, token_channel, write_clients
from cluster import CHANNEL_OPTIONS, wait_until
from secure_ring import (CODE, GRPCURL, LIMITED_TOKEN, SMALL, TOKEN, audit_lines, metric, pki,
                         refusal, secure, server_info, stub)
from stubs import attention_pb2 as pb, cluster_pb2, kv_cache_pb2


def test_nobody_unknown_is_served(secure, pki):
    """Every method of every service of this project, reflection, and methods that do not exist."""
    services = [f.services_by_name.values() for f in (pb.DESCRIPTOR, cluster_pb2.DESCRIPTOR)]
    services.append([kv_cache_pb2.DESCRIPTOR.services_by_name["KvCacheService"]])
    methods = [f"/{m.containing_service.full_name}/{m.name}" for s in services for each in s
               for m in each.methods]
    assert len(methods) >= 7
    before = metric(secure, "ringattn_auth_failures_total")
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    with tls_channel(secure.address, pki.ca) as channel:
        for method in [*methods, reflection, "/no.such.Service/Method"]:
            call = channel.stream_stream(method)
            code, reason, words = refusal(lambda: list(call(iter([b""]), timeout=10)))
            assert code == CODE.UNAUTHENTICATED, method
            assert "authorization: Bearer" in words and "--tls_cert" in words, method
            assert reason == ("CREDENTIALS_MISSING" if method in methods else ""), method
        # Probes have no identity and get an answer.
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=10) == b"\x08\x01"
    assert metric(secure, "ringattn_auth_failures_total") == before + len(methods) + 2


def test_who_a_client_is(secure, pki):
    def end_of(pair=None, token=None, metadata=None):
        with tls_channel(secure.address, pki.ca, pair, token) as channel:
            try:
                server_info(channel, metadata=metadata)
            except grpc.RpcError as error:
                assert error.code() == CODE.UNAUTHENTICATED
                return details(error)["ErrorInfo"].reason
        return "OK"

    assert end_of(pki.trainer) == end_of(pki.spiffe) == end_of(token=TOKEN) == "OK"
    assert end_of(pki.unlisted) == "CERTIFICATE_UNKNOWN"
    assert end_of(pki.unlisted, TOKEN) == "OK"  # as good as none
    assert end_of(token=TOKEN[:-1] + "x") == "TOKEN_UNKNOWN"
    # A replaced token gets this error with any certificate.
    assert end_of(pki.trainer, "a-token-that-was-replaced") == "TOKEN_UNKNOWN"
    assert end_of(pki.trainer, TOKEN) == "CREDENTIALS_DIFFER"
    for value in ("Basic YTpi", "Bearer", TOKEN):
        assert end_of(metadata=[("authorization", value)]) == "CREDENTIALS_MALFORMED"
    assert end_of(metadata=[("authorization", f"Bearer {TOKEN}")] * 2) == "CREDENTIALS_MALFORMED"
    for reason in ("TOKEN_UNKNOWN", "CREDENTIALS_DIFFER"):
        assert metric(secure, f'ringattn_auth_failures_total{{reason="{reason}"}}') >= 1


@pytest.mark.skipif(not os.access(GRPCURL, os.X_OK), reason="grpcurl is not built")
def test_grpcurl_with_certificates(secure, pki):
    tls = ["-cacert", pki.ca, "-cert", pki.trainer[0], "-key", pki.trainer[1]]
    grpcurl = lambda *args: subprocess.run([GRPCURL, *map(str, args)], capture_output=True,
                                           text=True, timeout=30)
    assert "ringattn.v1.AttentionService" in grpcurl(*tls, secure.address, "list").stdout
    tokens = ["-cacert", pki.ca, "-H", f"authorization: Bearer {TOKEN}"]
    assert '"version"' in grpcurl(*tokens, secure.address,
                                  "ringattn.v1.ClusterService/GetServerInfo").stdout
    refused = grpcurl("-cacert", pki.ca, secure.address, "list")
    assert refused.returncode != 0 and "Unauthenticated" in refused.stderr


class Held:
    """A request that is accepted and then waits for its tensors."""

    def __init__(self, attention, request_id):
        self.inputs = make_inputs(**SMALL)
        self.go = threading.Event()
        self.call = attention.Forward(self.messages(request_id), timeout=60)
        self.first = next(self.call)

    def messages(self, request_id):
        sent = requests(header_for(self.inputs, request_id=request_id),
                        chunks_of(self.inputs, ["q", "k", "v"]))
        yield next(sent)
        self.go.wait(60)
        yield from sent

    def finish(self):
        self.go.set()
        return [response.WhichOneof("message") for response in self.call]


def test_a_request_is_its_clients_own(secure, pki):
    ours = secure.attention
    with tls_channel(secure.address, pki.ca, pki.spiffe) as channel:
        theirs = stub(channel)
        held = Held(ours, "mine")
        ask = pb.GetStatusRequest(request_id="mine")
        cancel = pb.CancelRequest(request_id="mine")
        assert ours.GetStatus(ask, timeout=10).state == pb.REQUEST_STATE_UPLOADING
        for call in (lambda: theirs.GetStatus(ask, timeout=10),
                     lambda: theirs.Cancel(cancel, timeout=10)):
            assert refusal(call)[:2] == (CODE.NOT_FOUND, "OPERATION_NOT_FOUND")
        # The same name is another request where it is another's: nothing is superseded.
        run(theirs, make_inputs(**SMALL), request_id="mine", timeout=20)
        assert held.finish()[-1] == "summary"
        held = Held(ours, "cancelled")
        ours.Cancel(pb.CancelRequest(request_id="cancelled"), timeout=10)
        assert refusal(held.finish)[0] == CODE.CANCELLED
    wanted = {("trainer", "Forward", "OK"), ("evaluator", "Forward", "OK"),
              ("evaluator", "Cancel", "NOT_FOUND"), ("trainer", "Cancel", "OK")}
    wait_until(lambda: wanted <= {(line["client"], line["method"], line["code"])
                                  for line in audit_lines(secure)
                                  if line.get("request_id") in ("mine", "cancelled")}, 20, "audit lines")


def test_requests_in_flight_have_a_quota(secure, pki):
    with tls_channel(secure.address, pki.ca, token=LIMITED_TOKEN) as channel:
        attention = stub(channel)
        held = Held(attention, "the-one")
        with pytest.raises(grpc.RpcError) as caught:
            run(attention, make_inputs(**SMALL))
        assert caught.value.code() == CODE.RESOURCE_EXHAUSTED
        found = details(caught.value)
        assert found["ErrorInfo"].reason == "CLIENT_REQUESTS_IN_FLIGHT"
        assert found["RetryInfo"].retry_delay.seconds >= 1
        violation = found["QuotaFailure"].violations[0]
        assert violation.subject == "client:limited"
        assert violation.description == "max_requests_in_flight: 1"
        # It is the client's alone, and free again when the request has ended.
        run(secure.attention, make_inputs(**SMALL))
        assert held.finish()[-1] == "summary"
        run(attention, make_inputs(**SMALL))


def test_queued_bytes_have_a_quota_and_tokens_work_in_plain_text_on_loopback(make_ring, tmp_path):
    clients = tmp_path / "clients.json"
    write_clients(clients, [{"name": "holder", "token_sha256": [digest("h" * 16)]},
                            {"name": "b", "token_sha256": [digest("b" * 16)],
                             "max_queued_bytes": 1000}])
    ring = make_ring(workers=1, server_flags=[f"--clients_file={clients}",
                                              "--max_operations_per_worker=1"],
                     dial=lambda address: token_channel(address, "h" * 16))
    held = Held(ring.attention, "holds-the-place")
    attention = stub(token_channel(ring.address, "b" * 16))
    inputs = make_inputs(**SMALL)  # 768 bytes
    messages = lambda: requests(header_for(inputs), chunks_of(inputs, ["q", "k", "v"]))
    waiting = attention.Forward(messages(), timeout=60)
    wait_until(lambda: metric(ring, "ringattn_queue_depth") == 1, 10, "one waits")
    with pytest.raises(grpc.RpcError) as caught:
        list(attention.Forward(messages(), timeout=60))
    assert caught.value.code() == CODE.RESOURCE_EXHAUSTED
    found = details(caught.value)
    assert found["ErrorInfo"].reason == "CLIENT_QUEUE_FULL" and "RetryInfo" in found
    assert "max_queued_bytes: " in found["QuotaFailure"].violations[0].description
    assert held.finish()[-1] == "summary"
    assert [r.WhichOneof("message") for r in waiting][-1] == "summary"
    # Reflection is for known clients here as well.
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    with grpc.insecure_channel(ring.address, CHANNEL_OPTIONS) as channel:
        call = channel.stream_stream(reflection)
        assert refusal(lambda: list(call(iter([b""]), timeout=10)))[0] == CODE.UNAUTHENTICATED


def test_the_audit_log_has_a_line_for_each_request(secure, pki):
    inputs = make_inputs(sq=64, heads=2, dim=16)
    run(secure.attention, inputs, request_id="audited")
    with pytest.raises(grpc.RpcError):
        run(secure.attention, inputs, request_id="audited-bad", world_size=60)
    lines = {line["request_id"]: line for line in wait_until(
        lambda: [l for l in audit_lines(secure) if l.get("request_id", "").startswith("audited")]
        if len([l for l in audit_lines(secure) if l.get("request_id", "").startswith("audited")]) == 2
        else None, 20, "audit lines")}
    good, bad = lines["audited"], lines["audited-bad"]
    assert good["client"] == bad["client"] == "trainer"
    assert (good["code"], good["method"], good["dtype"]) == ("OK", "Forward", "fp32")
    assert re.fullmatch(r"ipv4:127\.0\.0\.1:\d+", good["peer"])
    assert (good["batch"], good["seq_len_q"], good["seq_len_kv"], good["heads"],
            good["head_dim"]) == (1, 64, 64, 2, 16)
    assert good["bytes_up"] == 3 * 64 * 2 * 16 * 4
    assert good["bytes_down"] == 64 * 2 * 16 * 4 + 64 * 2 * 4
    stages = [good[f"{s}_seconds"] for s in ("queue", "upload", "compute", "download")]
    assert 0 < sum(stages) <= good["seconds"] + 0.01
    assert bad["code"] in ("INVALID_ARGUMENT", "UNAVAILABLE", "FAILED_PRECONDITION") and bad["error"]
    assert metric(secure, 'ringattn_client_requests_total{client="trainer",code="OK"}') >= 1
