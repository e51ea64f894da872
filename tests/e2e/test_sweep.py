"""Cases of the sweeps through the real service; see service_sweep.cc and kv_service_sweep.cc."""

import subprocess

import pytest
from cluster import BIN
from direct_ring import make_direct_ring  # noqa: F401


def test_cases_drawn_pairwise_match_the_oracle(make_ring):
    ring = make_ring(workers=8)
    generation = ring.topology().generation
    for flags in [["--cases=160"], ["--cases=160", "--options", "--probabilities", "--seed=78"]]:
        done = subprocess.run([BIN / "tests/e2e/service_sweep", f"--server={ring.address}", *flags],
                              capture_output=True, text=True, timeout=600)
        print(done.stdout[-3000:])
        assert done.returncode == 0, done.stderr
        assert "160 cases, 0 failed" in done.stdout
    assert ring.topology().generation == generation


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_programs_of_caches_match_the_oracle(make_direct_ring, world_size):  # noqa: F811
    ring = make_direct_ring(workers=3)
    for transport in ("direct", "relay"):
        done = subprocess.run([BIN / "tests/e2e/kv_service_sweep", f"--server={ring.address}", "--cases=15",
                               f"--world_size={world_size}", f"--transport={transport}", f"--seed={world_size}"],
                              capture_output=True, text=True, timeout=300)
        print(done.stdout[-3000:])
        assert done.returncode == 0, done.stderr
        assert "15 programs" in done.stdout and " 0 failed" in done.stdout
