"""Supervisors' probes: the plain-text health port of both processes, and --check_flags."""

import subprocess
import time

import grpc
import pytest

from cluster import SERVER, WORKER, Cluster, wait_until
from health import NOT_SERVING, SERVING, health


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    flags = ["--health_listen=127.0.0.1:0"]
    cluster = Cluster(tmp_path_factory.mktemp("probed"), workers=2, server_flags=flags,
                      worker_flags=flags)
    yield cluster
    cluster.close()


def test_ready_is_the_ring_and_alive_the_process(probed):
    ports = [probed.ports["health"], probed.worker_ports(0)["health"]]
    for address in ports:
        assert health(address, "liveness") == SERVING
        wait_until(lambda a=address: health(a, "readiness") == SERVING, 5, "readiness")
    probed.kill_worker(1)
    probed.kill_worker(0)
    wait_until(lambda: health(ports[0], "readiness") == NOT_SERVING, 10, "a ring without members")
    assert health(ports[0], "liveness") == SERVING
    assert health(ports[1], "liveness") is None
    generation = probed.topology().generation
    for index in (0, 1):
        probed.start_worker(index)
    probed.wait_ready(2, after_generation=generation)
    wait_until(lambda: health(ports[0], "readiness") == SERVING, 5, "readiness")


def test_a_worker_without_coordinator_is_alive_and_not_ready(probed):
    address = wait_until(lambda: probed.worker_ports(0)["health"], 5, "the worker's ports")
    wait_until(lambda: health(address, "readiness") == SERVING, 10, "readiness")
    probed.kill_server()
    wait_until(lambda: health(address, "readiness") == NOT_SERVING, 10, "the coordinator's loss")
    assert health(address, "liveness") == SERVING
    probed.start_server()
    wait_until(lambda: health(address, "readiness") == SERVING, 20, "the next ring")


def test_the_health_port_serves_nothing_else(probed):
    with grpc.insecure_channel(probed.ports["health"]) as channel:
        call = channel.unary_unary("/ringattn.v1.ClusterService/GetServerInfo")
        with pytest.raises(grpc.RpcError) as failure:
            call(b"", timeout=5)
    assert failure.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("program", [SERVER, WORKER], ids=["server", "worker"])
def test_check_flags_says_what_is_wrong_and_starts_nothing(tmp_path, program):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    began = time.monotonic()

    def check(*flags):
        return subprocess.run([program, "--check_flags", *flags], capture_output=True, text=True,
                              timeout=10)

    right = check(f"--secret_file={secret}", "--metrics_listen=127.0.0.1:1")
    assert right.returncode == 0, right.stderr
    of_workers = [((f"--secret_file={secret}", f"--ring_address={wildcard}"),
                   f'the ring address is "{wildcard}"; it must be') for wildcard in ("0.0.0.0", "::")]
    of_workers.append(((f"--secret_file={secret}", "--ring_address=127.0.0.1", "--ring_interface=lo"),
                       "--ring_address excludes --ring_interface"))
    for wrong, words in (*(of_workers if program == WORKER else ()),
                         ((f"--secret_file={secret}", "--no_such_flag=1"), "--no_such_flag"),
                         (("--secret_file=/no/such/file",), "secret file"),
                         ((f"--secret_file={secret}", "--teardown_timeout=soon"),
                          "--teardown_timeout"),
                         ((f"--secret_file={secret}", "--log_level=", "--no_such_flag"),
                          "--log_level=: has no value"),
                         ((), "--secret_file")):
        done = check(*wrong)
        assert done.returncode != 0, wrong
        assert words in done.stdout + done.stderr
    assert time.monotonic() - began < 10
