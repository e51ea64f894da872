import pathlib
import sys

E2E = pathlib.Path(__file__).resolve().parents[1] / "e2e"
sys.path[:0] = [str(E2E / "support"), str(E2E)]

from ring_fixtures import make_ring  # noqa: E402, F401
