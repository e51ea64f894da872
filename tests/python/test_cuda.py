"""Tensors on a GPU, where there is none: a worker over the fake runtime and a client over the fake driver. Both are built
where there is a CUDA toolkit (CONTRIBUTING.md)."""
import contextlib
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from conftest import BIN

SERVICE = BIN / "tests/cuda_memory/fake_gpu_service"
DRIVER = BIN / "worker/testing/fake_cuda/libcuda.so.1"
PROGRAM = pathlib.Path(__file__).with_name("cuda_program.py")

pytestmark = pytest.mark.skipif(not (SERVICE.exists() and DRIVER.exists()), reason="built without a CUDA toolkit")


@contextlib.contextmanager
def service(takes, folder):
    with subprocess.Popen([SERVICE, takes, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            assert process.wait(30) == 0


def run(address, case):
    done = subprocess.run([sys.executable, PROGRAM, DRIVER, address, case], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, check=False)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr[-4000:]


@pytest.fixture(scope="module")
def taking(tmp_path_factory):
    with service("cuda", tmp_path_factory.mktemp("gpu")) as address:
        yield address


@pytest.mark.parametrize("case", ["taken", "own_memory", "other_ways", "bad_input", "beyond_the_limit", "event_loop",
                                  "writers"])
def test_a_worker_that_takes_cuda_memory(taking, case):
    run(taking, case)


def test_gradients_by_autograd(taking):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("without PyTorch")
    run(taking, "autograd")


@pytest.mark.parametrize("takes", ["host", "off"])
def test_a_worker_that_takes_none(takes, tmp_path):
    with service(takes, tmp_path) as address:
        run(address, "refused")
