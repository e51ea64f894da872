"""A ring whose workers take clients' memory, and what tests ask of it."""

import pathlib

import pytest

from attention import details, run
from cluster import wait_until
from local_region import Region
from stubs import attention_pb2 as pb

RING = pb.SCHEDULE_RING
HERE = pathlib.Path(__file__).parent


def local_flags(directory):
    return ["--local_memory=host_memory", f"--local_socket_dir={directory}"]


# Each call of a kernel takes so much longer, on any machine.
SLOW = ["--fault_injection=slow_step_ms:300"]


def cluster_of_four(directory, flags=()):
    from cluster import Cluster
    cluster = Cluster(directory, workers=4, worker_flags=local_flags(directory) + list(flags))
    yield cluster
    print(cluster.tail())
    cluster.close()


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    yield from cluster_of_four(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def slow_ring(tmp_path_factory):
    """Where a call is still computing when a test does something about it."""
    yield from cluster_of_four(tmp_path_factory.mktemp("slow"), SLOW)


@pytest.fixture
def make_local_ring(make_ring, tmp_path):
    def make(workers=2, **options):
        flags = local_flags(tmp_path) + options.pop("worker_flags", [])
        return make_ring(workers=workers, worker_flags=flags, **options)
    return make


@pytest.fixture
def region(ring):
    made = Region(ring, 32 << 20)
    yield made
    if made.links:
        made.close()


def mapped(pid):
    return (pathlib.Path(f"/proc/{pid}/maps").read_text()).count("memfd:")


def await_unmapped(ring):
    wait_until(lambda: all(mapped(w.pid) == 0 for w in ring.workers.values()), 20,
               "regions unmapped")


def relayed(ring, inputs, names=("out", "lse"), **options):
    result = run(ring.attention, inputs, **options)
    return {name: result.array(name).tobytes() for name in names}


def field_of(error):
    return details(error)["BadRequest"].field_violations[0].field
