"""TLS on every link: real processes, certificates made here."""

import concurrent.futures
import json
import pathlib
import re
import ssl
import subprocess
import threading
import time
import urllib.request

import grpc
import pytest

import http2
from attention import make_inputs, requests, run
from certificates import (client_tls, cluster_tls, digest, replace, server_tls, tls_channel,
                          write_clients)
from cluster import (CHANNEL_OPTIONS, CLI, SERVER, WORKER, open_descriptors, peak_resident_bytes,
                     reset_peak, wait_until)
from secure_ring import (CODE, SMALL, TOKEN, cli, clients_of_all, metric, pki, refusal, secure,
                         server_info, stub)
from stubs import ROOT
from timing import in_time, timed


# ---------------------------------------------------------------- links


def test_everything_works_over_mutual_tls(secure, pki, tmp_path):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    reach = [f"--server={secure.address}", *client_tls(pki.ca, pki.trainer)]
    cli("generate", f"--output={source}", "--seq_len=700", "--heads=4", "--kv_heads=2",
        "--head_dim=32", "--dtype=bf16", "--seed=7", "--with_dout")
    options = ["--causal", "--schedule=ring", "--world_size=2"]
    cli("forward", *reach, f"--input={source}", f"--output={forward}", *options,
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
            (client_tls(pki.other_ca, pki.trainer), "none of the given authorities"),
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
    # No call, no metric: the log has it.
    log = secure.directory / "server.log"
    wait_until(lambda: "certificate verify failed" in log.read_text(), 10, "the handshake's failure")
    # The command line looks at its own first.
    done = cli("info", f"--server={secure.address}", *client_tls(pki.ca, pki.expired), code=2)
    assert "it expired at" in done.stderr and str(pki.expired[0]) in done.stderr
    done = cli("info", f"--server={secure.address}", *client_tls(pki.ca, pki.alien), code=3)
    assert "another client certificate" in done.stderr


def test_plain_text_is_not_understood_by_tls_nor_tls_by_plain_text(secure, pki, ring):
    with grpc.insecure_channel(secure.address, CHANNEL_OPTIONS) as channel:
        assert refusal(lambda: server_info(channel))[0] == CODE.UNAVAILABLE
    done = cli("info", f"--server={secure.address}", code=3)
    assert "may expect TLS" in done.stderr
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


def client_hello():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    sent = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), sent)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


def half_open(address):
    """A connection whose peer has answered a ClientHello and waits for the rest of the handshake."""
    return http2.dial(address, client_hello())


@timed
@pytest.mark.parametrize("port", ["clients", "control", "data"])
def test_half_open_handshakes_end_after_five_seconds(secure, pki, port):
    """docs/security.md: at most 45 KB each, 5 s long."""
    address = {"clients": secure.address, "control": secure.ports["control"],
               "data": secure.worker_ports(0)["data"]}[port]
    pid = secure.workers[0].pid if port == "data" else secure.server.pid
    call = lambda: run(secure.attention, make_inputs(**SMALL), world_size=2)
    call()
    descriptors, memory = open_descriptors(pid), reset_peak(pid)
    begin = time.monotonic()
    held = [half_open(address) for _ in range(200)] + [http2.dial(address, hello=b"")]
    for connection in held[:-1]:
        assert connection.recv(1 << 16)[:1] == b"\x16"  # a TLS handshake record
    call()
    for connection in held:
        assert http2.heard_until_closed(connection, 30) is not None
        connection.close()
    seconds, grown = time.monotonic() - begin, peak_resident_bytes(pid) - memory
    print(f"closed after {seconds:.1f} s, {grown / len(held) / 1e3:.0f} KB each")
    assert grown < len(held) * 100_000  # with the two calls
    wait_until(lambda: open_descriptors(pid) <= descriptors + 10, 20, "descriptors as before")
    call()
    in_time(4 < seconds < 8, seconds)


def test_half_open_handshakes_count_as_connections(pki, make_ring):
    """docs/security.md: --max_connections bounds their number, and so their memory."""
    most, attempts = 100, 800
    ring = make_ring(workers=0, server_flags=[*server_tls(*pki.server, pki.ca), f"--max_connections={most}"],
                     dial=lambda address: tls_channel(address, pki.ca, pki.trainer))
    server_info(ring.channel)  # this is one of the connections
    hello, memory = client_hello(), reset_peak(ring.server.pid)
    held = [http2.dial(ring.address, hello) for _ in range(attempts)]
    answers = [connection.recv(1 << 16) for connection in held]
    grown = peak_resident_bytes(ring.server.pid) - memory
    admitted = [answer for answer in answers if answer[:1] == b"\x16"]  # a TLS handshake record
    print(f"{len(admitted)} of {attempts} admitted, {grown / 1e6:.1f} MB")
    assert 0 < len(admitted) < most
    assert all(b"too many connections" in answer for answer in answers if answer not in admitted)
    assert grown < most * 100_000
    refused = 'ringattn_refused_connections_total{listener="public"}'
    wait_until(lambda: metric(ring, refused) == attempts - len(admitted), 10, "the refusals in the metrics")
    for connection in held:
        connection.close()
    server_info(ring.channel)


def test_an_expired_server_certificate(pki):
    """A server with an expired certificate; ours would not start with one, so this one is a
    stand-in."""
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
            # Even with --insecure, tokens must not be sent in plain text.
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
            (["--tls_cert=a", "--tls_key=b"], "tls_ca is empty"),
            ([f"--tls_ca={pki.ca}", f"--tls_cert={pki.trainer[0]}"], "must be given together"),
            ([f"--tls_ca={tmp_path / 'none'}"], "cannot read the authorities"),
            ([f"--token_file={short}"], "a token has 16 to 1024"),
            (["--server=192.0.2.1:1", f"--token_file={pki.token}"], "in plain text")]:
        flags = flags if flags[0].startswith("--server") else ["--server=127.0.0.1:1", *flags]
        assert says in cli("info", *flags, code=2).stderr


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
        # An accepted stream stays open; a client reads its token again for each call.
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
        # Invalid files change nothing.
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
    assert "needs --tls_ca for `up` too" in done.stderr
    done = cli(*up, *client_tls(pki.ca, pki.trainer))
    try:
        address = re.search(r"gRPC address (\S+),", done.stdout).group(1)
        assert "1 worker on 1 host\n" in cli("topology", f"--server={address}",
                                  *client_tls(pki.ca, pki.trainer)).stdout
        time.sleep(3)  # several probes
        assert "restart" not in (tmp_path / "launcher.log").read_text()
    finally:
        cli("down", f"--state_dir={tmp_path}")
