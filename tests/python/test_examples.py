"""Every example runs as it stands."""
import os
import subprocess
import sys

import pytest
from conftest import EXAMPLES

NEEDS = {"train_torch.py": "torch", "huggingface_model.py": "transformers", "huggingface_generate.py": "transformers"}
ELSEWHERE = {"vllm_generate.py"}  # test_vllm.py, with vLLM's packages


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in ELSEWHERE))
def test_example(address, name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=os.environ.get("RINGATTN_NO_TORCH") or None)
    run = subprocess.run([sys.executable, EXAMPLES / name, address], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.strip()
