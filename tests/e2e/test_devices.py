"""What a worker says about devices that it cannot use; the same on machines with and without GPUs."""

import subprocess

import pytest

from cluster import BIN


def start_worker(tmp_path, *flags):
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-some-length")
    return subprocess.run(
        [BIN / "worker" / "ringattn-worker", f"--secret_file={secret}", *flags],
        capture_output=True, text=True, timeout=60, check=False)


def test_a_gpu_that_is_not_there_is_an_error_by_name(tmp_path):
    ended = start_worker(tmp_path, "--device=cuda:99")
    assert ended.returncode == 1
    assert "--device=cuda:99: " in ended.stderr
    assert "no CUDA device" in ended.stderr or "built without CUDA" in ended.stderr


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:", "cuda:-1", "cuda:1x"])
def test_a_name_that_means_nothing_is_a_mistake_on_the_command_line(tmp_path, name):
    ended = start_worker(tmp_path, f"--device={name}")
    assert ended.returncode > 1
    assert "none of auto, cpu and cuda:N" in ended.stderr + ended.stdout
