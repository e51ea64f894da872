"""Cases of the sweep through the real service; see service_sweep.cc."""

import subprocess

from cluster import BIN


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
