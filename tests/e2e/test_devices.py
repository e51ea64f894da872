"""A worker's messages about devices that it cannot use; the same on machines with and without
GPUs."""

import subprocess

import pytest

from cluster import BIN, CLI


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


@pytest.mark.parametrize("device, flag", [
    ("cpu", "--nccl_max_ctas=2"), ("cpu", "--nccl_library=/x"), ("cpu", "--pinned_pool=16777216"),
    ("cpu", "--ring_transport=nccl"), ("cpu", "--kernel_family=simt"),
    ("cpu", "--peer_memory=ipc"), ("cpu", "--peer_socket_dir=/tmp"), ("cpu", "--shared_gpu"),
    ("cpu", "--ring_transport=peer+wire"), ("cpu", "--insecure_ring"), ("cuda:0", "--ring_transport=gloo"),
    ("cuda:0", "--threads=2")])
def test_what_a_device_has_no_use_for_is_refused_by_name(tmp_path, device, flag):
    ended = start_worker(tmp_path, f"--device={device}", flag)
    assert ended.returncode > 1
    said = ended.stderr + ended.stdout
    assert flag.split("=")[0] in said
    assert f"has no effect with --device={device}" in said


def test_nccl_flags_are_refused_where_nccl_is_not_used(tmp_path):
    ended = start_worker(tmp_path, "--ring_transport=peer", "--nccl_max_ctas=2")
    assert ended.returncode > 1
    assert "has no effect with --ring_transport=peer" in ended.stderr + ended.stdout


def test_the_launcher_does_not_pass_threads_to_gpu_workers(tmp_path):
    ended = subprocess.run([CLI, "up", "--device=cuda", "--threads=2", f"--state_dir={tmp_path}"],
                           capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "--threads has no effect with --device=cuda" in ended.stderr + ended.stdout
    # Without a GPU the workers end at their device, not at a flag.
    subprocess.run([CLI, "up", "--device=cuda", "--workers=1", "--port=0", "--ready_timeout=3s",
                    f"--state_dir={tmp_path}"],
                   capture_output=True, text=True, timeout=60, check=False)
    assert "has no effect" not in (tmp_path / "worker-0.log").read_text()


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:", "cuda:-1", "cuda:1x"])
def test_a_name_that_means_nothing_is_a_mistake_on_the_command_line(tmp_path, name):
    ended = start_worker(tmp_path, f"--device={name}")
    assert ended.returncode > 1
    assert "use auto, cpu or cuda:N" in ended.stderr + ended.stdout


@pytest.mark.parametrize("given, flag, with_what", [
    ("--ring_transport=nccl", "--peer_memory=vmm", "--ring_transport=nccl"),
    ("--ring_transport=nccl", "--peer_socket_dir=/tmp", "--ring_transport=nccl"),
    ("--ring_transport=wire", "--peer_memory=vmm", "--ring_transport=wire"),
    ("--ring_transport=nccl", "--shared_gpu", "--ring_transport=nccl"),
    ("--ring_transport=peer+nccl", "--wire_connections=2", "--ring_transport=peer+nccl"),
    ("--ring_transport=peer+wire", "--insecure_ring", "--ring_transport=peer+wire"),
    ("--peer_memory=ipc", "--peer_socket_dir=/tmp", "--peer_memory=ipc")])
def test_flags_of_shared_memory_are_refused_where_it_is_not_used(tmp_path, given, flag, with_what):
    ended = start_worker(tmp_path, given, flag)
    assert ended.returncode > 1
    said = ended.stderr + ended.stdout
    assert flag.split("=")[0] in said and f"has no effect with {with_what}" in said


def test_a_folder_for_sockets_is_an_absolute_path(tmp_path):
    ended = start_worker(tmp_path, "--peer_socket_dir=here")
    assert ended.returncode > 1
    assert "--peer_socket_dir" in ended.stderr + ended.stdout
