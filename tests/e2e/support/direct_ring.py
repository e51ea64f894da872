"""A ring whose workers take streams from clients, and what tests ask of it."""

import functools
import json
import subprocess
import urllib.request

import grpc
import pytest

from cluster import CLI, wait_until
from stubs import attention_pb2 as pb
from timing import run_connected

RING = pb.SCHEDULE_RING
CODE = grpc.StatusCode
LISTEN = ["--client_data_listen=127.0.0.1:0"]


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    from cluster import Cluster
    cluster = Cluster(tmp_path_factory.mktemp("direct"), workers=4, worker_flags=LISTEN)
    yield cluster
    print(cluster.tail())
    cluster.close()


@pytest.fixture
def make_direct_ring(make_ring):
    def make(workers=2, **options):
        return make_ring(workers=workers, worker_flags=LISTEN + options.pop("worker_flags", []),
                         **options)
    return make


def metrics(address):
    text = urllib.request.urlopen(f"http://{address}/metrics").read().decode()
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    return values


def refused(ring, index=0, reason="token"):
    return metrics(ring.worker_ports(index)["metrics"])[
        f'ringattn_refused_streams_total{{reason="{reason}"}}']


def await_free(ring):
    wait_until(lambda: all(w.reserved_bytes == 0 for w in ring.topology().workers), 30,
               "memory given back")


def generate(path, *flags):
    subprocess.run([CLI, "generate", f"--output={path}", "--seed=1", "--with_dout", *flags],
                   check=True, capture_output=True)


def call(ring, command, source, output, *flags, check=True):
    run = run_connected if check else functools.partial(subprocess.run, capture_output=True, text=True)
    done = run([CLI, command, f"--server={ring.address}", f"--input={source}", f"--output={output}",
                "--causal", "--schedule=ring", "--json", *flags], timeout=300)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)
