import sys
import pathlib

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))

from cluster import Cluster  # noqa: E402
from ring_fixtures import make_ring  # noqa: E402, F401


def pytest_configure(config):
    config.addinivalue_line("markers", "timed: bounds a time, so nothing else should run (support/timing.py)")


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """Four workers, shared by a module's tests that do no harm."""
    cluster = Cluster(tmp_path_factory.mktemp("ring"))
    yield cluster
    print(cluster.tail())  # shown by pytest for failures only
    cluster.close()
