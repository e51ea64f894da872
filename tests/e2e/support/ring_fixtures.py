"""Fixtures that start rings; a conftest.py imports what its folder uses."""

import pytest

from cluster import Cluster


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
