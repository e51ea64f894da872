"""Every example runs as it stands."""
import os
import subprocess
import sys

import pytest
from conftest import EXAMPLES

NEEDS = {"train_torch.py": "torch", "gather_ranks.py": "torch", "huggingface_model.py": "transformers",
         "huggingface_generate.py": "transformers", "train_ddp.py": "transformers", "jax_gradients.py": "jax"}
ELSEWHERE = {"vllm_generate.py"}  # test_vllm.py, with vLLM's packages


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in ELSEWHERE))
def test_example(address, name):
    if name in NEEDS:
        missing = "RINGATTN_NO_JAX" if NEEDS[name] == "jax" else "RINGATTN_NO_TORCH"
        pytest.importorskip(NEEDS[name], reason=os.environ.get(missing) or None)
    run = subprocess.run([sys.executable, EXAMPLES / name, address], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.strip()
