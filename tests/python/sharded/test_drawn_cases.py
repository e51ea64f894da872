"""Every function that ranks call with their shards, with drawn shapes and options, against the whole sequence in fp64."""
import os

import pytest

pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import sharded_cases  # noqa: E402

CASES = 18  # of each function and world size


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", sharded_cases.LAYOUTS)
def test_drawn_cases_equal_the_whole_sequence(ranks, name, world_size):
    for number in range(CASES):
        sharded_cases.check(sharded_cases.draw(name, world_size, number), ranks(world_size))
