"""tests/gpu/service.sh runs where there are GPUs; --cpu keeps its logic from rotting elsewhere."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from cluster import BIN
from stubs import ROOT

sys.path.append(str(ROOT / "tests/gpu/service"))

import timeline  # noqa: E402


def test_the_share_of_exchange_that_compute_hides(tmp_path):
    def bar(category, begin, end, process=10):
        return {"ph": "X", "pid": process, "cat": category, "name": "", "tid": 1,
                "ts": begin, "dur": end - begin}
    events = [{"ph": "M", "pid": 10, "name": "process_name"},
              bar("compute", 0, 100), bar("compute", 90, 200), bar("compute", 300, 400),
              bar("exchange", 50, 150), bar("exchange", 150, 350),  # 100 and 50 + 50 hidden
              bar("compute", 0, 10, 11), bar("exchange", 10, 110, 11),
              bar("compute", 0, 1000, 1)]  # the client's, no rank's
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    result = timeline.analyse(tmp_path / "trace.json")
    assert result["ranks"][0]["hidden_share"] == pytest.approx(200 / 300)
    assert result["ranks"][0]["compute_seconds"] == pytest.approx(300e-6)
    assert result["ranks"][1]["hidden_share"] == 0
    assert result["hidden_share"] == pytest.approx(0.5)


def test_the_gpu_script_on_cpu_workers(tmp_path):
    if shutil.which("patchelf") is None:
        pytest.skip("patchelf is not installed (deploy/install_deps.sh patchelf)")
    made = subprocess.run([ROOT / "deploy/bundle.sh", f"--bin={BIN.resolve()}",
                           "--with=//tests/e2e:service_sweep", f"--output={tmp_path}/bundle"],
                          capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stdout + made.stderr
    out = tmp_path / "out"
    done = subprocess.run([ROOT / "tests/gpu/service.sh", "--cpu", f"--bundle={tmp_path}/bundle",
                           "--only=smoke,sweep,64k,kill,masks", "--seconds=300"],
                          env={**os.environ, "OUT": str(out)}, capture_output=True, text=True,
                          timeout=360)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    parts = json.loads((out / "summary.json").read_text())["parts"]
    assert set(parts) == {"environment", "smoke", "sweep", "64k", "kill", "masks"}
    assert all(part["ok"] for part in parts.values())
    assert parts["sweep"]["cases"] > 10
    assert parts["kill"]["repeat_bit_equal"]
    for command in ("forward", "backward"):
        assert 0 < parts["64k"][command]["overlap"]["hidden_share"] <= 1
        assert parts["64k"][command]["of_single_gpu"] > 0
    for mask in ("full", "window", "packed"):
        assert 0 < parts["masks"][mask]["balance"] <= 1
    assert len(list(out.iterdir())) <= 8
