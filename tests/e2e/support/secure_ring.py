"""A ring with TLS and proofs on every link and four known clients, for tests that import its fixtures;
certificates are made here."""

import json
import os
import subprocess
import types
import urllib.request

import grpc
import pytest

from attention import details, run
from certificates import Authority, cluster_tls, digest, replace, server_tls, tls_channel, write_clients
from cluster import CLI, Cluster
from stubs import ROOT, attention_pb2_grpc, cluster_pb2, cluster_pb2_grpc

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
