#!/usr/bin/env python3
"""The relay's rate with TLS on every link compared with plain text, interleaved in one run.

  bazel build //server:ringattn-server //worker:ringattn-worker //tests/bench:transport_bench
  tests/bench/tls_rate.py [FLAGS OF transport_bench]

Starts two services with one worker each on loopback, one of them with mutual TLS from the client
to the coordinator and from there to the worker.
"""

import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e/support"))

from certificates import (Authority, client_tls, cluster_tls, server_tls,  # noqa: E402
                          tls_channel)
from cluster import BIN, Cluster  # noqa: E402


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name in ("plain", "tls"):
            (folder / name).mkdir()
        ca = Authority(folder, "ca")
        pair, ours = ca.issue("server"), ca.issue("client")
        links = cluster_tls(ca.certificate, *pair)
        plain = Cluster(folder / "plain", workers=1)
        tls = Cluster(folder / "tls", workers=1, worker_flags=links,
                      server_flags=[*server_tls(*pair, ca.certificate), *links],
                      dial=lambda address: tls_channel(address, ca.certificate, ours))
        try:
            return subprocess.run(
                [BIN / "tests/bench/transport_bench", f"--server={plain.address}",
                 f"--tls_server={tls.address}", *client_tls(ca.certificate, ours),
                 *(sys.argv[1:] or ["--paths=tcp,library"])], check=False).returncode
        finally:
            plain.close()
            tls.close()


if __name__ == "__main__":
    sys.exit(main())
