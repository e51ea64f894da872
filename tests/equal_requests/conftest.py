import pathlib
import sys

import pytest

E2E = pathlib.Path(__file__).resolve().parents[1] / "e2e"
sys.path[:0] = [str(E2E / "support"), str(E2E)]

from cluster import Cluster  # noqa: E402


@pytest.fixture
def make_ring(tmp_path):
    """A ring of one's own: make_ring(workers=..., server_flags=..., dial=...)."""
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
