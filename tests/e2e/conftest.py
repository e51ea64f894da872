import sys
import pathlib

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))

from cluster import Cluster  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "timed: bounds a time, so nothing else should run (support/timing.py)")


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """Four workers, shared by a module's tests that do no harm."""
    cluster = Cluster(tmp_path_factory.mktemp("ring"))
    yield cluster
    print(cluster.tail())  # shown by pytest for failures only
    cluster.close()


@pytest.fixture
def make_ring(tmp_path):
    """A ring of one's own: make_ring(workers=..., server_flags=..., worker_flags=...)."""
    made = []

    def make(**options):
        directory = tmp_path / f"ring-{len(made)}"
        directory.mkdir()
        made.append(Cluster(directory, **options))
        return made[-1]

    yield make
    for cluster in made:
        print(cluster.tail())
        cluster.close()
