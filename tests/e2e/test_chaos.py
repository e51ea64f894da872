"""The chaos test in short: faults that are over quickly, from a seed that is always the same. The
full tier runs all of them for ten minutes (tests/chaos/chaos.py)."""

import sys

from stubs import ROOT

sys.path.append(str(ROOT / "tests/chaos"))

import chaos  # noqa: E402


def test_results_stay_right_while_much_goes_wrong(tmp_path):
    wrong = chaos.run_chaos(tmp_path, seed=20261122, seconds=30, round_seconds=12,
                            kinds=chaos.QUICK_KINDS)
    assert not wrong
