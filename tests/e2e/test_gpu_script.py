"""tests/gpu/service.sh runs where there are GPUs; --cpu keeps its logic from rotting elsewhere."""

import json
import os
import shutil
import subprocess

import pytest

from cluster import BIN
from stubs import ROOT


def test_the_gpu_script_on_cpu_workers(tmp_path):
    if shutil.which("patchelf") is None:
        pytest.skip("patchelf is not installed (deploy/install_deps.sh patchelf)")
    made = subprocess.run([ROOT / "deploy/bundle.sh", f"--bin={BIN.resolve()}",
                           "--with=//tests/e2e:service_sweep", f"--output={tmp_path}/bundle"],
                          capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stdout + made.stderr
    out = tmp_path / "out"
    done = subprocess.run([ROOT / "tests/gpu/service.sh", "--cpu", f"--bundle={tmp_path}/bundle",
                           "--only=smoke,sweep,64k,kill", "--seconds=300"],
                          env={**os.environ, "OUT": str(out)}, capture_output=True, text=True,
                          timeout=360)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    parts = json.loads((out / "summary.json").read_text())["parts"]
    assert set(parts) == {"environment", "smoke", "sweep", "64k", "kill"}
    assert all(part["ok"] for part in parts.values())
    assert parts["sweep"]["cases"] > 10
    assert parts["kill"]["repeat_bit_equal"]
    for command in ("forward", "backward"):
        assert 0 < parts["64k"][command]["overlap"]["hidden_share"] <= 1
        assert parts["64k"][command]["of_single_gpu"] > 0
    assert len(list(out.iterdir())) <= 8
