"""TLS, certificates and tokens of known clients, from Python."""
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import BIN, wait_until

import ringattn

TOKEN = "a-token-of-the-python-jobs"
Q = np.ones((1, 64, 2, 8), np.float32)


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def authority(folder, name):
    openssl("req", "-x509", *KEY, "-days", 30, "-subj", f"/CN={name}", "-keyout", folder / f"{name}.key", "-out",
            folder / f"{name}.crt")
    return folder / f"{name}.crt", folder / f"{name}.key"


def issue(folder, by, name, subject, san):
    crt, key, csr, ext = (folder / f"{name}.{end}" for end in ("crt", "key", "csr", "ext"))
    ext.write_text(f"subjectAltName={san}\n")
    openssl("req", *KEY, "-subj", subject, "-keyout", key, "-out", csr)
    openssl("x509", "-req", "-in", csr, "-CA", by[0], "-CAkey", by[1], "-CAcreateserial", "-days", 10, "-extfile",
            ext, "-out", crt)
    return crt, key


class Service:
    """A coordinator that speaks TLS and knows its clients, and one worker, which takes host memory."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        ours = authority(self.folder, "ours")
        self.ca, self.other_ca = ours[0], authority(self.folder, "another")[0]
        self.crt, self.key = issue(self.folder, ours, "server", "/CN=server", "DNS:localhost,IP:127.0.0.1")
        self.trainer = issue(self.folder, ours, "trainer", "/CN=trainer", "DNS:trainer")
        self.token = self.folder / "token"
        self.token.write_text(TOKEN + "\n")
        clients = self.folder / "clients.json"
        clients.write_text(json.dumps({"clients": [
            {"name": "trainer", "certificates": ["x509:CN=trainer"]},
            {"name": "jobs", "token_sha256": [hashlib.sha256(TOKEN.encode()).hexdigest()]}]}))
        secret = self.folder / "secret"
        secret.write_text("s" * 40)
        secret.chmod(0o600)
        log = (self.folder / "server.log").open("w")
        ports = self.folder / "ports.json"
        self.processes = [subprocess.Popen(
            [BIN / "server/ringattn-server", f"--port_file={ports}", "--listen=127.0.0.1:0", "--control_listen=127.0.0.1:0",
             "--metrics_listen=127.0.0.1:0", f"--secret_file={secret}", f"--tls_cert={self.crt}",
             f"--tls_key={self.key}", f"--tls_client_ca={self.ca}", f"--clients_file={clients}"],
            stdout=log, stderr=subprocess.STDOUT)]
        bound = json.loads(wait_until(lambda: ports.exists() and ports.read_text().strip(), 60, "the server's ports"))
        self.address = bound["listen"]
        self.processes.append(subprocess.Popen(
            [BIN / "worker/ringattn-worker", f"--coordinator={bound['control']}", "--name=worker-0", "--device=cpu",
             "--threads=1", "--memory_limit=1000000000", "--data_listen=127.0.0.1:0", f"--secret_file={secret}",
             "--local_memory=host_memory", f"--local_socket_dir={self.folder}"],
            stdout=(self.folder / "worker.log").open("w"), stderr=subprocess.STDOUT))

    def close(self):
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    made = Service(tmp_path_factory.mktemp("tls"))
    yield made
    made.close()


def test_a_certificate(service):
    with ringattn.connect(service.address, tls_ca=service.ca, tls_cert=service.trainer[0],
                          tls_key=service.trainer[1]) as client:
        out, _, report = client.forward(Q, Q, Q, deadline=60)
        assert (out == 1).all() and report.transport == "relay"
        # Host memory and residuals are this client's own here too.
        kept = client.forward(Q, Q, Q, transport="host_memory", retain=60)
        assert kept.report.transport == "host_memory"
        assert client.backward(Q, residual=kept.report.residual).report.bytes_up == Q.nbytes


def test_a_token(service):
    with ringattn.connect(service.address, tls_ca=service.ca, token_file=service.token) as client:
        assert (client.forward(Q, Q, Q, deadline=60).out == 1).all()
        handle = client.forward(Q, Q, Q, retain=60).report.residual
        with ringattn.connect(service.address, tls_ca=service.ca, tls_cert=service.trainer[0],
                              tls_key=service.trainer[1]) as other:
            with pytest.raises(ringattn.NotFoundError):  # another client's
                other.backward(Q, residual=handle)
        client.delete_residual(handle)


def test_by_the_environment(service):
    """A training script that does not configure TLS in its code."""
    script = "import numpy as np, ringattn; q = np.ones((1, 8, 1, 8), np.float32); " \
             "print(ringattn.default_client().forward(q, q, q, deadline=60).out.sum())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "RINGATTN_ADDRESS": service.address, "RINGATTN_TLS_CA": str(service.ca),
                               "RINGATTN_TOKEN_FILE": str(service.token)})
    assert done.stdout.strip() == "64.0", done.stdout + done.stderr


def test_who_is_not_known_is_refused(service):
    with ringattn.connect(service.address, tls_ca=service.ca) as nobody:
        with pytest.raises(ringattn.PermissionDeniedError):
            nobody.forward(Q, Q, Q, deadline=30)
        with pytest.raises(ringattn.RingattnError):
            nobody.server_info()
    wrong = service.folder / "wrong"
    wrong.write_text("a-token-that-nobody-has\n")
    with ringattn.connect(service.address, tls_ca=service.ca, token_file=wrong) as client:
        with pytest.raises(ringattn.PermissionDeniedError):
            client.forward(Q, Q, Q, deadline=30)


def test_what_cannot_be_trusted_is_named(service):
    with ringattn.connect(service.address, tls_ca=service.other_ca, token_file=service.token) as client:
        with pytest.raises(ringattn.UnavailableError) as error:
            client.forward(Q, Q, Q, deadline=30)
        assert error.value.reason == "TLS_HANDSHAKE_FAILED"
    for files in ({"tls_ca": service.folder / "missing"}, {"tls_ca": service.token},
                  {"tls_ca": service.ca, "tls_cert": service.trainer[0]},
                  {"tls_ca": service.ca, "token_file": service.folder / "missing"}):
        with pytest.raises(ringattn.InvalidArgumentError):
            ringattn.connect(service.address, **files)
    with pytest.raises(ringattn.InvalidArgumentError, match="plain text"):
        ringattn.connect("192.0.2.1:7700", token_file=service.token)
    # Plain text where TLS is spoken.
    with ringattn.connect(service.address, connect_timeout=2.0) as client:
        with pytest.raises(ringattn.RingattnError):
            client.forward(Q, Q, Q, deadline=20)
