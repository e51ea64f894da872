"""CUDA memory of clients where no worker has a GPU: refused by name, or another way with the reason. What
it does where there is one: //tests/cuda_memory, on a fake driver, and tests/gpu/service.sh."""

import pathlib
import socket
import struct
import subprocess

import grpc
import pytest

from attention import error_of, make_inputs, reason_of, run
from cluster import BIN, CLI
from local_region import (CUDA_VMM, KIND_REFUSED, NOT_UNDERSTOOD, HostCall, Region, answer_of,
                          attach_message, connect)
from stubs import attention_pb2 as pb, local_memory_pb2 as lm


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    from cluster import Cluster
    directory = tmp_path_factory.mktemp("cuda")
    cluster = Cluster(directory, workers=2,
                      worker_flags=["--local_memory=host_memory", f"--local_socket_dir={directory}"])
    yield cluster
    print(cluster.tail())
    cluster.close()


@pytest.fixture
def region(ring):
    made = Region(ring, 4 << 20)
    yield made
    made.close()


def test_a_client_of_the_first_version_is_told_so_in_its_own(ring):
    region = Region(ring, 1 << 16, attach=False)
    point = region.offer().points[0]
    link = connect(point.socket_path)
    socket.send_fds(link, [struct.pack("<II", 1, 1) + point.token], [region.fd])
    said = link.recv(512)
    assert said[:8] == struct.pack("<II", 1, NOT_UNDERSTOOD)
    assert b"version 1 of the attach protocol is not supported; this worker uses version 2" in said
    assert link.recv(16) == b""
    link.close()
    region.close()


def test_cuda_memory_is_refused_by_workers_without_a_gpu(ring):
    """By the coordinator, which knows, and by a worker that is shown some all the same."""
    region = Region(ring, 1 << 16, attach=False)
    with pytest.raises(grpc.RpcError) as refused:
        region.stub.Attach(lm.AttachRequest(bytes=1 << 20, kind=lm.REGION_KIND_CUDA), timeout=10)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(refused.value) == "TRANSPORT_UNAVAILABLE"
    assert "no connected worker takes CUDA memory (--local_memory)" in refused.value.details()
    with pytest.raises(grpc.RpcError) as unknown:
        region.stub.Attach(lm.AttachRequest(bytes=1 << 20, kind=77), timeout=10)
    assert unknown.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "kind: 77" in unknown.value.details()
    point = region.offer().points[0]
    link = connect(point.socket_path)
    allocation = b"u" * 16 + struct.pack("<QQ", 1 << 21, 0)
    socket.send_fds(link, [attach_message(point.token, CUDA_VMM, allocation)], [region.fd])
    code, words = answer_of(link)
    assert code == KIND_REFUSED and b"does not accept CUDA memory" in words
    link.close()
    region.close()


def test_a_call_that_accepts_cuda_memory_goes_another_way_and_says_why(ring, region):
    inputs = make_inputs(2, 300)
    relayed = run(ring.attention, inputs)
    expected = {name: relayed.array(name).tobytes() for name in ("out", "lse")}
    call = HostCall(region, inputs, required=False)
    call.header.transport.accept.insert(0, pb.TRANSPORT_CUDA_MEMORY)
    result = call.run(ring.attention)
    assert result.accepted.transport == pb.TRANSPORT_HOST_MEMORY
    assert {name: call.bytes(name) for name in ("out", "lse")} == expected
    call = HostCall(region, inputs, required=False)
    call.header.transport.accept[:] = [pb.TRANSPORT_CUDA_MEMORY]
    call.header.transport.required = True
    error = error_of(call.start(ring.attention))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "no CUDA memory: q lies in host memory" in error.details()


def test_a_cpu_worker_that_is_to_take_cuda_memory_is_a_mistake(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-some-length")
    ended = subprocess.run([BIN / "worker" / "ringattn-worker", f"--secret_file={secret}",
                            "--device=cpu", "--local_memory=cuda_memory", f"--local_socket_dir={tmp_path}"],
                           capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode > 1
    assert "--local_memory: cuda_memory has no effect with --device=cpu" in ended.stderr + ended.stdout


@pytest.fixture
def without_gpu(make_ring, tmp_path):
    """A worker that was to find a GPU and to take CUDA memory, and found none."""
    ring = make_ring(workers=0)
    log = tmp_path / "auto.log"
    with open(log, "wb") as out:
        worker = subprocess.Popen(
            [BIN / "worker" / "ringattn-worker", f"--coordinator={ring.control_address}",
             f"--secret_file={ring.secret}", "--name=auto", "--device=auto", "--threads=1",
             "--local_memory=cuda_memory", f"--local_socket_dir={tmp_path}"], stdout=out, stderr=out)
    try:
        ring.wait_ready(1)
        if '"device":"cpu (' not in log.read_text():
            pytest.skip("a machine with a GPU")
        yield ring, log
    finally:
        worker.kill()
        worker.wait()


def test_a_worker_that_finds_no_gpu_takes_host_memory_alone_and_warns(without_gpu, tmp_path):
    ring, log = without_gpu
    assert "--local_memory=cuda_memory: the device is not a GPU, so only host memory is accepted" in log.read_text()
    region = Region(ring, 1 << 16)
    assert list(region.links) == ["auto"]
    region.close()
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    subprocess.run([CLI, "generate", f"--output={source}", "--seq_len=64", "--heads=2",
                    "--head_dim=64"], check=True, timeout=60, capture_output=True)
    ended = subprocess.run([CLI, "forward", f"--server={ring.address}", f"--input={source}",
                            f"--output={output}", "--transport=cuda_memory"],
                           capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "no CUDA driver: libcuda.so.1 cannot be loaded" in ended.stderr + ended.stdout
