"""Certificates made by openssl, and the flags of a service with TLS on every link."""

import hashlib
import json
import pathlib
import secrets
import subprocess

import grpc

from cluster import CHANNEL_OPTIONS

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
LOOPBACK = "DNS:localhost,IP:127.0.0.1"


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)


class Authority:
    """A certificate authority; `issue` writes a certificate NAME.crt and its key NAME.key."""

    def __init__(self, directory, name):
        self.directory = pathlib.Path(directory)
        self.certificate = self.directory / f"{name}.ca.crt"
        self.key = self.directory / f"{name}.ca.key"
        openssl("req", "-x509", *KEY, "-days", 30, "-subj", f"/CN={name}", "-keyout", self.key,
                "-out", self.certificate)

    def issue(self, name, subject=None, san=LOOPBACK, days=10):
        crt, key, csr, ext = (self.directory / f"{name}.{e}" for e in ("crt", "key", "csr", "ext"))
        ext.write_text(f"subjectAltName={san}\n")
        openssl("req", *KEY, "-subj", subject or f"/CN={name}", "-keyout", key, "-out", csr)
        openssl("x509", "-req", "-in", csr, "-CA", self.certificate, "-CAkey", self.key,
                "-set_serial", secrets.randbits(64), "-days", days, "-extfile", ext, "-out", crt)
        return crt, key


def replace(paths, by):
    """As certificate managers do: the new file is moved into place."""
    for path, new in zip(paths, by):
        staged = path.with_suffix(".new")
        staged.write_bytes(pathlib.Path(new).read_bytes())
        staged.rename(path)


def server_tls(crt, key, client_ca=None):
    flags = [f"--tls_cert={crt}", f"--tls_key={key}"]
    return flags + ([f"--tls_client_ca={client_ca}"] if client_ca else [])


def cluster_tls(ca, crt, key):
    return [f"--cluster_tls_ca={ca}", f"--cluster_tls_cert={crt}", f"--cluster_tls_key={key}"]


def client_tls(ca, pair=None):
    flags = [f"--tls_ca={ca}"]
    return flags + ([f"--tls_cert={pair[0]}", f"--tls_key={pair[1]}"] if pair else [])


def digest(token):
    return hashlib.sha256(token.encode()).hexdigest()


def write_clients(path, clients):
    """Moved into place, too."""
    staged = pathlib.Path(f"{path}.new")
    staged.write_text(clients if isinstance(clients, str) else json.dumps({"clients": clients}))
    staged.rename(path)


def tls_channel(address, ca, pair=None, token=None):
    read = lambda path: pathlib.Path(path).read_bytes()
    credentials = grpc.ssl_channel_credentials(
        read(ca), *((read(pair[1]), read(pair[0])) if pair else (None, None)))
    if token:
        credentials = grpc.composite_channel_credentials(
            credentials, grpc.access_token_call_credentials(token))
    return grpc.secure_channel(address, credentials, CHANNEL_OPTIONS)


class ShowsToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor,
                 grpc.StreamUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """A bearer token in plain text, for loopback."""

    def __init__(self, token):
        self.metadata = [("authorization", f"Bearer {token}")]

    def _show(self, continuation, details, request):
        class Details(grpc.ClientCallDetails):
            method, timeout = details.method, details.timeout
            metadata = list(details.metadata or []) + self.metadata
            credentials, wait_for_ready = details.credentials, details.wait_for_ready
            compression = details.compression
        return continuation(Details(), request)

    intercept_unary_unary = intercept_unary_stream = _show
    intercept_stream_unary = intercept_stream_stream = _show


def token_channel(address, token):
    return grpc.intercept_channel(grpc.insecure_channel(address, CHANNEL_OPTIONS),
                                  ShowsToken(token))
