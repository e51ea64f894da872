"""The release's credentials: two authorities, their certificates, one client's token."""

import base64
import hashlib
import json
import pathlib
import secrets

from pki import make_authority, make_certificate

NAMES = "DNS:ringattn.attention.svc.cluster.local,DNS:ringattn.attention.svc,DNS:localhost"


class Credentials:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.secret = secrets.token_hex(24)
        self.token_file = self.folder / "token"
        self.token = secrets.token_hex(32)
        self.token_file.write_text(self.token)
        for part in ("public", "cluster"):
            make_authority(self.folder / part)
            self.renew(part)

    @property
    def public_ca(self):
        return self.folder / "public/ca.crt"

    def renew(self, part):
        """A new certificate and key of the same authority."""
        make_certificate(self.folder / part, "tls", f"/CN=ringattn {part}",
                         NAMES if part == "public" else "DNS:ringattn-cluster")

    def manifest(self, name):
        """The Secret `name` as the chart's values call it."""
        if name == "ringattn-cluster-secret":
            data = {"secret": self.secret}
        elif name == "ringattn-clients":
            digest = hashlib.sha256(self.token.encode()).hexdigest()
            data = {"clients.json": json.dumps(
                {"clients": [{"name": "tests", "token_sha256": [digest]}]})}
        else:
            folder = self.folder / {"ringattn-public-tls": "public", "ringattn-cluster-tls": "cluster"}[name]
            data = {key: (folder / key).read_text() for key in ("tls.crt", "tls.key", "ca.crt")}
        return json.dumps({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name},
            "type": "kubernetes.io/tls" if "tls.crt" in data else "Opaque",
            "data": {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}})

    ALL = ("ringattn-cluster-secret", "ringattn-clients", "ringattn-public-tls", "ringattn-cluster-tls")
