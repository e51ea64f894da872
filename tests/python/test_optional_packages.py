"""Errors of parts of the package that need another package: they name it and the command that installs it."""
import subprocess
import sys

import pytest

# A finder that hides a package: "missing", or "old", which has none of the names that ringattn imports.
HIDE = """
import importlib.machinery, importlib.util, sys
package, kind, what = sys.argv[1:]

class Loader:
    def create_module(self, spec): return None
    def exec_module(self, module): module.__version__ = "0.1"

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != package:
            return None
        if kind == "missing":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == package:
            return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
import ringattn
try:
    exec(what)
except ImportError as error:
    print(type(error).__name__, error)
"""


def error_of(package, kind, what):
    run = subprocess.run([sys.executable, "-c", HIDE, package, kind, what], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("package, title, user, what", [
    *(("torch", "PyTorch", f"ringattn.{name}", f"ringattn.{name}")
      for name in ("attention", "flash_attn_func", "dilated_attention", "flash_attn_with_kvcache", "KvCache")),
    *(("torch", "PyTorch", f"ringattn.{name}", f"import ringattn.{name}")
      for name in ("flash_attn", "huggingface", "nnscaler", "ring_flash_attn")),
    ("jax", "JAX", "ringattn.jax", "import ringattn.jax"),
    ("ml_dtypes", "ml_dtypes", "bfloat16 in numpy", "from ringattn._dtypes import numpy_dtype; numpy_dtype('bfloat16')"),
    ("vllm", "vLLM", "ringattn.vllm",
     "import os, ringattn.vllm; os.environ['RINGATTN_VLLM'] = '1'; ringattn.vllm.register()"),
])
def test_a_missing_package(package, title, user, what):
    assert error_of(package, "missing", what) == (
        f"ModuleNotFoundError {user} needs {title}, which is not installed; run: pip install {package}")


@pytest.mark.parametrize("user, what", [
    ("ringattn.KvCache", "ringattn.KvCache"), ("ringattn.huggingface", "import ringattn.huggingface"),
    ("ringattn.ring_flash_attn.substitute_hf_flash_attn", "from ringattn.ring_flash_attn import substitute_hf_flash_attn"),
])
def test_transformers_is_missing(user, what):
    pytest.importorskip("torch")
    assert error_of("transformers", "missing", what) == (
        f"ModuleNotFoundError {user} needs Hugging Face transformers, which is not installed; run: pip install transformers")


def test_packages_that_are_too_old():
    for package, title, user in (("jax", "JAX", "ringattn.jax"),
                                 ("transformers", "Hugging Face transformers", "ringattn.huggingface")):
        if package == "transformers":
            pytest.importorskip("torch")
        text = error_of(package, "old", f"import {user}")
        assert text.startswith(f"ImportError {user} needs a newer {title}; 0.1 is installed (")
        assert text.endswith(f"run: pip install --upgrade {package}")
