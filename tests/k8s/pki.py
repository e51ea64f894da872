"""Keys and certificates of the test's cluster, and the configurations that carry them. By openssl alone."""

import json
import pathlib
import subprocess

EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def openssl(*words):
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def make_authority(folder, name="ca"):
    """FOLDER/NAME.crt and .key; the certificate's path."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    openssl("req", "-x509", *EC, "-days", "30", "-keyout", folder / f"{name}.key", "-out",
            folder / f"{name}.crt", "-subj", f"/CN={name}", "-addext",
            "keyUsage=critical,keyCertSign,cRLSign,digitalSignature")
    return folder / f"{name}.crt"


def make_certificate(folder, name, subject, names="", authority="ca"):
    """FOLDER/NAME.crt and .key for both purposes. `names`: "DNS:a,IP:1.2.3.4"."""
    folder = pathlib.Path(folder)
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    openssl("req", *EC, "-keyout", folder / f"{name}.key", "-out", request, "-subj", subject)
    extensions.write_text("keyUsage=critical,digitalSignature,keyEncipherment\n"
                          "extendedKeyUsage=serverAuth,clientAuth\n"
                          + (f"subjectAltName={names}\n" if names else ""))
    openssl("x509", "-req", "-in", request, "-CA", folder / f"{authority}.crt", "-CAkey",
            folder / f"{authority}.key", "-CAcreateserial", "-days", "30", "-out",
            folder / f"{name}.crt", "-extfile", extensions)
    request.unlink()
    extensions.unlink()


class Pki:
    """The keys and certificates of one Kubernetes cluster."""

    def __init__(self, folder, api):
        self.folder = pathlib.Path(folder)
        self.api = api  # "https://host:port"
        self.ca = make_authority(self.folder)
        host = api.split("//")[1].split(":")[0]
        make_certificate(self.folder, "apiserver", "/CN=kube-apiserver",
                         "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,"
                         f"DNS:localhost,IP:127.0.0.1,IP:{host},IP:10.96.0.1")
        make_certificate(self.folder, "kubelet-client",
                         "/O=system:masters/CN=kube-apiserver-kubelet-client")
        openssl("genrsa", "-out", self.folder / "sa.key", "2048")
        openssl("rsa", "-in", self.folder / "sa.key", "-pubout", "-out", self.folder / "sa.pub")
        self._make_config("admin", "/O=system:masters/CN=admin")
        for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
            self._make_config(name, f"/CN=system:{name}")

    def _make_config(self, name, subject):
        make_certificate(self.folder, name, subject)
        self.config(name).write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": self.api,
                                                      "certificate-authority": str(self.ca)}}],
            "users": [{"name": name, "user": {
                "client-certificate": str(self.folder / f"{name}.crt"),
                "client-key": str(self.folder / f"{name}.key")}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": name}}]}))

    def config(self, name):
        return self.folder / f"{name}.conf"

    def node_config(self, node):
        self._make_config(f"kubelet-{node.name}", f"/O=system:nodes/CN=system:node:{node.name}")
        return self.config(f"kubelet-{node.name}")
