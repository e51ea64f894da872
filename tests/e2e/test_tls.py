"""TLS on every link, and who may do what: real processes, certificates made here."""

import concurrent.futures
import json
import os
import pathlib
import re
import ssl
import subprocess
import threading
import time
import types
import urllib.request

import grpc
import pytest

from attention import chunks_of, details, header_for, make_inputs, requests, run
from certificates import (Authority, client_tls, cluster_tls, digest, replace, server_tls,
                          tls_channel, token_channel, write_clients)
from cluster import CHANNEL_OPTIONS, CLI, SERVER, WORKER, Cluster, wait_until
from stubs import (ROOT, attention_pb2 as pb, attention_pb2_grpc, cluster_pb2, cluster_pb2_grpc)

GRPCURL = os.environ.get("RINGATTN_GRPCURL", str(ROOT / ".deps/bin/grpcurl"))
SMALL = dict(sq=8, heads=1, dim=8)
CODE = grpc.StatusCode
TOKEN, LIMITED_TOKEN = "a-token-of-the-batch-jobs", "a-token-of-the-limited-one"


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Who there is. Subjects as a clients file names them."""
    directory = tmp_path_factory.mktemp("pki")
    ca, other = Authority(directory, "ours"), Authority(directory, "another")
    cluster = Authority(directory, "cluster")
    token = directory / "token"
    token.write_text(TOKEN + "\n")
    return types.SimpleNamespace(
        directory=directory, authority=ca, ca=ca.certificate, other_ca=other.certificate,
        cluster=cluster, server=ca.issue("server"), member=cluster.issue("member"),
        trainer=ca.issue("trainer", subject="/CN=trainer/O=lab", san="DNS:trainer"),
        spiffe=ca.issue("spiffe", san="URI:spiffe://lab.example/evaluator"),
        unlisted=ca.issue("unlisted"), alien=other.issue("alien"),
        expired=ca.issue("expired", subject="/CN=trainer/O=lab", days=-1), token=token)


def clients_of_all():
    return [{"name": "trainer", "certificates": ["x509:O=lab,CN=trainer"], "weight": 2},
            {"name": "evaluator", "certificates": ["spiffe://lab.example/evaluator"]},
            {"name": "batch", "token_sha256": [digest(TOKEN)]},
            {"name": "limited", "token_sha256": [digest(LIMITED_TOKEN).upper()],
             "max_requests_in_flight": 1}]


@pytest.fixture(scope="module")
def secure(pki, tmp_path_factory):
    """Two workers; TLS and proofs on every link, four known clients, an audit log."""
    directory = tmp_path_factory.mktemp("secure")
    served = [directory / "server.crt", directory / "server.key"]
    member = [directory / "member.crt", directory / "member.key"]
    replace(served, pki.server)
    replace(member, pki.member)
    clients = directory / "clients.json"
    write_clients(clients, clients_of_all())
    links = cluster_tls(pki.cluster.certificate, *member)
    cluster = Cluster(
        directory, workers=2, worker_flags=links,
        server_flags=[*server_tls(*served, pki.ca), *links, f"--clients_file={clients}",
                      f"--audit_log={directory / 'audit.jsonl'}"],
        dial=lambda address: tls_channel(address, pki.ca, pki.trainer))
    cluster.served, cluster.member, cluster.clients = served, member, clients
    yield cluster
    print(cluster.tail())
    cluster.close()


def cli(*arguments, code=0, timeout=60):
    done = subprocess.run([str(CLI), *map(str, arguments)], capture_output=True, text=True,
                          timeout=timeout)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def stub(channel):
    return attention_pb2_grpc.AttentionServiceStub(channel)


def server_info(channel, **options):
    return cluster_pb2_grpc.ClusterServiceStub(channel).GetServerInfo(
        cluster_pb2.GetServerInfoRequest(), timeout=10, **options)


def refusal(call):
    """Code, reason and words of the error that `call` ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    info = details(caught.value).get("ErrorInfo")
    return caught.value.code(), info.reason if info else "", caught.value.details()


def metric(cluster, name, port=None):
    address = port or cluster.ports["metrics"]
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    found = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]
    return sum(found) if found else None


def audit_lines(cluster):
    return [json.loads(line) for line in
            (cluster.directory / "audit.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------- links


def test_everything_works_over_mutual_tls(secure, pki, tmp_path):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    reach = [f"--server={secure.address}", *client_tls(pki.ca, pki.trainer)]
    cli("generate", f"--output={source}", "--seq_len=700", "--heads=4", "--kv_heads=2",
        "--head_dim=32", "--dtype=bf16", "--seed=7", "--with_dout")
    options = ["--causal", "--schedule=ring", "--world_size=2"]
    cli("forward", *reach, f"--input={source}", f"--output={forward}", *options, "--streams=2",
        "--request_id=over-tls")
    cli("backward", *reach, f"--input={source}", f"--output={backward}", *options)
    cli("verify", f"--input={source}", f"--output={backward}", f"--forward={forward}", "--causal")
    assert "version" in cli("info", *reach).stdout
    assert "2 workers" in cli("topology", *reach).stdout
    by_token = [f"--server={secure.address}", *client_tls(pki.ca), f"--token_file={pki.token}"]
    cli("plan", *by_token, "--seq_len=4096")
    # localhost is in the certificate as well; another name is not.
    port = secure.address.rsplit(":", 1)[1]
    cli("info", f"--server=localhost:{port}", *reach[1:])
    cli("info", *reach, "--tls_server_name=localhost")


def test_a_wrong_authority_and_a_wrong_name_are_final(secure, pki):
    reach = [f"--server={secure.address}"]
    for flags, says in [
            (client_tls(pki.other_ca, pki.trainer), "leads to none of the authorities"),
            ([*client_tls(pki.ca, pki.trainer), "--tls_server_name=elsewhere.example"],
             "is for another name")]:
        start = time.monotonic()
        done = cli("info", *reach, *flags, code=3)
        assert "UNAVAILABLE" in done.stderr and says in done.stderr
        assert "TLS_HANDSHAKE_FAILED" in done.stderr
        assert time.monotonic() - start < 4  # not tried for as long as it may


def test_a_call_is_not_replayed_where_tls_cannot_come_about(secure, pki, tmp_path):
    source = tmp_path / "in.safetensors"
    cli("generate", f"--output={source}", "--seq_len=8", "--head_dim=8")
    start = time.monotonic()
    done = cli("forward", f"--server={secure.address}", *client_tls(pki.other_ca, pki.trainer),
               f"--input={source}", f"--output={tmp_path / 'out'}", code=3)
    assert "TLS_HANDSHAKE_FAILED" in done.stderr and "replays" not in done.stderr
    assert time.monotonic() - start < 4


def test_certificates_that_the_server_does_not_accept(secure, pki):
    for pair in (pki.alien, pki.expired):
        with tls_channel(secure.address, pki.ca, pair) as channel:
            assert refusal(lambda: server_info(channel))[0] == CODE.UNAVAILABLE
    # The command line looks at its own first.
    done = cli("info", f"--server={secure.address}", *client_tls(pki.ca, pki.expired), code=2)
    assert "it expired at" in done.stderr and str(pki.expired[0]) in done.stderr
    done = cli("info", f"--server={secure.address}", *client_tls(pki.ca, pki.alien), code=3)
    assert "another client certificate" in done.stderr


def test_plain_text_is_not_understood_by_tls_nor_tls_by_plain_text(secure, pki, ring):
    with grpc.insecure_channel(secure.address, CHANNEL_OPTIONS) as channel:
        assert refusal(lambda: server_info(channel))[0] == CODE.UNAVAILABLE
    done = cli("info", f"--server={secure.address}", code=3)
    assert "may want TLS" in done.stderr
    done = cli("info", f"--server={ring.address}", *client_tls(pki.ca), code=3)
    assert "speaks plain text, not TLS" in done.stderr
    # Workers and operators too: the control listener wants the cluster's certificates.
    for port in (secure.ports["control"], secure.worker_ports(0)["data"]):
        for channel in (grpc.insecure_channel(port, CHANNEL_OPTIONS),
                        tls_channel(port, pki.cluster.certificate),
                        tls_channel(port, pki.cluster.certificate, pki.trainer)):
            with channel:
                call = channel.unary_unary("/grpc.health.v1.Health/Check")
                assert refusal(lambda: call(b"", timeout=5))[0] == CODE.UNAVAILABLE
        with tls_channel(port, pki.cluster.certificate, pki.member) as channel:
            assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5) == b"\x08\x01"


def test_an_expired_server_certificate(pki):
    """Of a server that cannot be ours, which would not start with it."""
    expired = [pathlib.Path(p).read_bytes() for p in pki.expired]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0",
                                  grpc.ssl_server_credentials([(expired[1], expired[0])]))
    server.start()
    try:
        done = cli("info", f"--server=127.0.0.1:{port}", *client_tls(pki.ca), code=3)
    finally:
        server.stop(0)
    assert "not valid today" in done.stderr and "TLS_HANDSHAKE_FAILED" in done.stderr


# ---------------------------------------------------------------- the command line


def start_refused(program, *flags):
    done = subprocess.run([str(program), *map(str, flags)], capture_output=True, text=True,
                          timeout=20)
    assert done.returncode == 2, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_what_servers_and_workers_refuse_to_start_with(pki, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-some-length")
    clients = tmp_path / "clients.json"
    write_clients(clients, clients_of_all())
    bad_clients = tmp_path / "bad.json"
    write_clients(bad_clients, [{"name": "a", "token_sha256": ["abc"]}])
    base = {"--secret_file": secret, "--listen": "127.0.0.1:0", "--control_listen": "127.0.0.1:0",
            "--metrics_listen": "127.0.0.1:0"}
    (crt, key), (other_crt, _) = pki.server, pki.trainer
    for flags, says in [
            (["--listen=0.0.0.0:0"], ["--listen=0.0.0.0:0", "plain text", "--insecure"]),
            (["--listen=[::]:0"], ["--listen=[::]:0", "--tls_cert"]),
            (["--listen=:0"], ["--listen=:0", "plain text"]),
            (["--control_listen=0.0.0.0:0"], ["--control_listen", "--cluster_tls_cert"]),
            ([*server_tls(crt, key), "--control_listen=0.0.0.0:0"], ["--control_listen"]),
            # Whatever --insecure says, tokens are not for everybody to read.
            (["--listen=0.0.0.0:0", "--insecure", f"--clients_file={clients}"],
             ["--clients_file", "tokens would travel in plain text"]),
            ([f"--tls_cert={crt}"], ["--tls_cert and --tls_key go together"]),
            ([f"--tls_client_ca={pki.ca}"], ["--tls_client_ca needs"]),
            ([f"--cluster_tls_cert={crt}"], ["--cluster_tls_key is missing"]),
            (server_tls(tmp_path / "no.crt", key), ["no.crt", "cannot read the certificate"]),
            (server_tls(key, key), ["it holds no certificate"]),
            (server_tls(crt, crt), ["it holds no key"]),
            (server_tls(other_crt, key), [str(key), "it is not the key of"]),
            (server_tls(*pki.expired), ["it expired at"]),
            (server_tls(crt, key, key), [str(key), "it holds no certificate"]),
            ([f"--clients_file={bad_clients}"], ["bad.json: clients[0] (a).token_sha256"]),
            (["--audit_log=/no/such/folder/audit"], ["cannot append to the audit log"])]:
        given = {flag.split("=")[0] for flag in flags}
        said = start_refused(SERVER, *flags,
                             *(f"{k}={v}" for k, v in base.items() if k not in given))
        for text in says:
            assert text in said, (flags, said)
    worker = [f"--secret_file={secret}", "--device=cpu"]
    for flags, says in [
            (["--data_listen=0.0.0.0:0"], ["--data_listen=0.0.0.0:0", "--insecure"]),
            (["--coordinator=192.0.2.1:7701"], ["--coordinator=192.0.2.1:7701", "plain text"]),
            ([f"--cluster_tls_ca={pki.ca}"], ["--cluster_tls_cert is missing"]),
            (cluster_tls(pki.ca, *pki.expired), ["it expired at"])]:
        said = start_refused(WORKER, *worker, *flags)
        for text in says:
            assert text in said, (flags, said)


def test_what_the_command_line_refuses(pki, tmp_path):
    short = tmp_path / "short"
    short.write_text("x")
    for flags, says in [
            (["--tls_cert=a", "--tls_key=b"], "tls_ca: missing"),
            ([f"--tls_ca={pki.ca}", f"--tls_cert={pki.trainer[0]}"], "go together"),
            ([f"--tls_ca={tmp_path / 'none'}"], "cannot read the authorities"),
            ([f"--token_file={short}"], "a token has 16 to 1024"),
            (["--server=192.0.2.1:1", f"--token_file={pki.token}"], "in plain text")]:
        flags = flags if flags[0].startswith("--server") else ["--server=127.0.0.1:1", *flags]
        assert says in cli("info", *flags, code=2).stderr


# ---------------------------------------------------------------- identities


def test_nobody_unknown_is_served(secure, pki):
    """Every method of every service of ours, reflection, and whatever does not exist."""
    services = [f.services_by_name.values() for f in (pb.DESCRIPTOR, cluster_pb2.DESCRIPTOR)]
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
    # A token that was replaced is told so, whatever certificate there is.
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
        ask = pb.GetOperationRequest(request_id="mine")
        cancel = pb.CancelOperationRequest(request_id="mine")
        assert ours.GetOperation(ask, timeout=10).state == pb.OPERATION_STATE_UPLOADING
        for call in (lambda: theirs.GetOperation(ask, timeout=10),
                     lambda: theirs.CancelOperation(cancel, timeout=10)):
            assert refusal(call)[:2] == (CODE.NOT_FOUND, "OPERATION_NOT_FOUND")
        # The same name is another request where it is another's: nothing is superseded.
        run(theirs, make_inputs(**SMALL), request_id="mine", timeout=20)
        assert held.finish()[-1] == "summary"
        held = Held(ours, "cancelled")
        ours.CancelOperation(pb.CancelOperationRequest(request_id="cancelled"), timeout=10)
        assert refusal(held.finish)[0] == CODE.CANCELLED
    lines = wait_until(lambda: [line for line in audit_lines(secure)
                                if line["request_id"] in ("mine", "cancelled")
                                ][:6] or None, 5, "audit lines")
    said = {(line["client"], line["method"], line["code"]) for line in lines}
    assert {("trainer", "Forward", "OK"), ("evaluator", "Forward", "OK"),
            ("evaluator", "CancelOperation", "NOT_FOUND"),
            ("trainer", "CancelOperation", "OK")} <= said


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
        lambda: [l for l in audit_lines(secure) if l["request_id"].startswith("audited")]
        if len([l for l in audit_lines(secure) if l["request_id"].startswith("audited")]) == 2
        else None, 5, "audit lines")}
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


# ---------------------------------------------------------------- rotation


def test_clients_and_tokens_are_replaced_while_it_runs(secure, pki, tmp_path):
    def is_known(token):
        with tls_channel(secure.address, pki.ca, token=token) as channel:
            try:
                return bool(server_info(channel))
            except grpc.RpcError as error:
                assert error.code() == CODE.UNAUTHENTICATED
                return False

    reloads = 'ringattn_clients_file_reloads_total{result="%s"}'
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    watch = subprocess.Popen(
        [str(CLI), "topology", "--watch", f"--server={secure.address}", *client_tls(pki.ca),
         f"--token_file={token_file}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        write_clients(secure.clients, '{"clients": [{"name": "x"}]}')
        wait_until(lambda: metric(secure, reloads % "refused") == 1, 5, "the bad file is seen")
        assert is_known(TOKEN)  # the old one stays in force
        newer = clients_of_all()
        newer[2]["token_sha256"] = [digest("the-next-token-of-batch")]
        write_clients(secure.clients, newer)
        wait_until(lambda: metric(secure, reloads % "ok") == 1, 5, "the new file is read")
        assert not is_known(TOKEN) and is_known("the-next-token-of-batch")
        # Who was let in stays; a client reads its token anew for each call.
        assert watch.poll() is None
        reach = [f"--server={secure.address}", *client_tls(pki.ca), f"--token_file={token_file}"]
        assert "TOKEN_UNKNOWN" in cli("info", *reach, code=3).stderr
        token_file.write_text("the-next-token-of-batch")
        cli("info", *reach)
    finally:
        watch.kill()
        watch.wait()
        write_clients(secure.clients, clients_of_all())
        wait_until(lambda: is_known(TOKEN), 5, "the first file is back")


class Busy:
    """Requests one after another on one connection, and on a new one each."""

    def __init__(self, cluster, dial):
        self.cluster, self.dial = cluster, dial
        self.done, self.errors, self.over = 0, [], threading.Event()
        self.threads = [threading.Thread(target=self.work, args=(fresh,)) for fresh in (0, 1)]
        for thread in self.threads:
            thread.start()

    def work(self, fresh):
        inputs = make_inputs(sq=64, heads=2, dim=16)
        channel = self.dial(self.cluster.address)
        while not self.over.is_set():
            if fresh:
                channel.close()
                channel = self.dial(self.cluster.address)
            try:
                run(stub(channel), inputs, timeout=20, schedule=2, world_size=2)
                self.done += 1
            except grpc.RpcError as error:
                self.errors.append(error)
        channel.close()

    def stop(self):
        self.over.set()
        for thread in self.threads:
            thread.join()


def served_certificate(address):
    return ssl.get_server_certificate(tuple(address.rsplit(":", 1)))


def test_certificates_are_replaced_while_requests_run(secure, pki):
    reloads = 'ringattn_tls_reloads_total{link="%s",result="%s"}'
    count = lambda link, result: metric(secure, reloads % (link, result))
    worker = lambda link, result: metric(secure, reloads % (link, result),
                                         secure.worker_ports(0)["metrics"])
    expiry = lambda: metric(secure, 'ringattn_tls_certificate_expiry_timestamp_seconds'
                            '{link="clients"}')
    before, expires = served_certificate(secure.address), expiry()
    assert 9 * 86400 < expires - time.time() < 11 * 86400
    busy = Busy(secure, secure.dial)
    try:
        # What is of no use changes nothing.
        replace(secure.served[:1], [pki.trainer[0]])
        wait_until(lambda: count("clients", "refused") == 1, 5, "a mismatch is seen")
        secure.served[0].write_text("rubbish")
        wait_until(lambda: count("clients", "refused") == 2, 5, "rubbish is seen")
        time.sleep(1.2)  # longer than gRPC takes to look
        assert served_certificate(secure.address) == before
        # A new one for clients, and new ones for all of the cluster.
        replace(secure.served, pki.authority.issue("server-2", days=20))
        replace(secure.member, pki.cluster.issue("member-2"))
        wait_until(lambda: served_certificate(secure.address) != before, 8, "the new certificate is served")
        assert count("clients", "ok") == 1 and expiry() > expires + 9 * 86400
        wait_until(lambda: count("cluster", "ok") == 1 and worker("cluster", "ok") == 1, 8,
                   "the cluster's too")
        done = busy.done
        wait_until(lambda: busy.done > done + 4, 20, "requests go on")
    finally:
        busy.stop()
    assert not busy.errors, busy.errors[0]
    # A worker that joins now meets the new ones.
    generation = secure.topology().generation
    secure.kill_worker(1)
    secure.start_worker(1)
    secure.wait_ready(2, after_generation=generation)
    run(secure.attention, make_inputs(**SMALL), timeout=20)


def test_the_pages_have_every_metric_of_a_secure_service(secure):
    """docs/operations.md has those that are always there, docs/security.md the others."""
    in_pages = set()
    for page in ("operations.md", "security.md"):
        in_pages |= set(re.findall(r"`(ringattn_[a-z0-9_]+)", (ROOT / "docs" / page).read_text()))
    seen = set()
    for port in (secure.ports["metrics"], secure.worker_ports(0)["metrics"]):
        text = urllib.request.urlopen(f"http://{port}/metrics", timeout=10).read().decode()
        seen |= set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    assert not seen - in_pages
    assert {"ringattn_tls_certificate_expiry_timestamp_seconds", "ringattn_tls_reloads_total",
            "ringattn_known_clients", "ringattn_audit_lines_lost_total"} <= seen


def test_the_public_port_is_alive_in_tls(secure, pki):
    """Its own probe speaks TLS, or the process would have ended itself by now."""
    with tls_channel(secure.address, pki.ca) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"\x0a\x08liveness", timeout=10) == b"\x08\x01"
    assert secure.server.poll() is None
    assert "does not answer" not in (secure.directory / "server.log").read_text()


def test_the_launcher_watches_over_a_tls_service(pki, tmp_path):
    links = cluster_tls(pki.cluster.certificate, *pki.member)
    server = [*server_tls(*pki.server, pki.ca), *links]
    passed = [f"--server_flag={f}" for f in server] + [f"--worker_flag={f}" for f in links]
    up = ["up", "--workers=1", "--port=0", "--device=cpu", "--threads=1", f"--state_dir={tmp_path}",
          "--detach", "--ready_timeout=30s", *passed]
    done = cli(*up, code=3)
    assert "give --tls_ca to `up` too" in done.stderr
    done = cli(*up, *client_tls(pki.ca, pki.trainer))
    try:
        address = re.search(r"gRPC address (\S+),", done.stdout).group(1)
        assert "1 workers" in cli("topology", f"--server={address}",
                                  *client_tls(pki.ca, pki.trainer)).stdout
        time.sleep(3)  # several probes
        assert "restart" not in (tmp_path / "launcher.log").read_text()
    finally:
        cli("down", f"--state_dir={tmp_path}")
