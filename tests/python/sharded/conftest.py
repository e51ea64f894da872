"""Process groups for tests of functions that every rank calls with its shard."""
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from rank_processes import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks(address, tmp_path_factory):
    """ranks(world_size): its processes, which are started on first use."""
    started = {}

    def of(world_size):
        if world_size not in started:
            started[world_size] = Ranks(world_size, tmp_path_factory.mktemp("group") / "store")
        return started[world_size]

    yield of
    for group in started.values():
        group.close()
