"""Programs of the K/V sweep through the real service; see kv_service_sweep.cc."""

import subprocess

import pytest
from cluster import BIN
from direct_ring import make_direct_ring  # noqa: F401


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_programs_match_the_oracle(make_direct_ring, world_size):  # noqa: F811
    ring = make_direct_ring(workers=3)
    for transport in ("direct", "relay"):
        done = subprocess.run([BIN / "tests/e2e/kv_service_sweep", f"--server={ring.address}", "--cases=15",
                               f"--world_size={world_size}", f"--transport={transport}", f"--seed={world_size}"],
                              capture_output=True, text=True, timeout=300)
        print(done.stdout[-3000:])
        assert done.returncode == 0, done.stderr
        assert "15 programs" in done.stdout and " 0 failed" in done.stdout
