"""A Forward's residual over host memory and direct streams: after every event the Backward's gradients are
right and the transport stays the same; a lost residual costs bandwidth, with the reason in the report."""

import json
import subprocess
import time

import pytest

from cluster import CLI

FLAGS = {"host_memory": lambda tmp: ["--local_memory=host_memory", f"--local_socket_dir={tmp}"],
         "direct": lambda tmp: ["--client_data_listen=127.0.0.1:0"]}
# Large enough for direct streams: q, k, v and dout of 2 x 900 tokens.
SHAPE = ["--batch=2", "--seq_len=900", "--heads=4", "--kv_heads=2", "--head_dim=64", "--dtype=bf16"]
Q, K = 2 * 900 * 4 * 64 * 2, 2 * 900 * 2 * 64 * 2


class Calls:
    def __init__(self, ring, way, tmp_path):
        self.ring, self.way = ring, way
        self.given, self.out, self.grad = (tmp_path / name for name in ("in.st", "out.st", "grad.st"))
        self.run("generate", f"--output={self.given}", *SHAPE, "--seed=7", "--with_dout")

    def run(self, *arguments):
        done = subprocess.run([CLI, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def call(self, command, output, *flags):
        output.unlink(missing_ok=True)
        report = json.loads(self.run(command, f"--server={self.ring.address}", f"--input={self.given}",
                                     f"--output={output}", "--causal", "--json", f"--transport={self.way}", *flags))
        assert report["transport"]["kind"] == self.way, report["transport"]
        return report

    def forward(self, *flags):
        return self.call("forward", self.out, "--schedule=ring", "--world_size=2", *flags)

    def backward(self, handle, expected_failure, *flags):
        report = self.call("backward", self.grad, f"--residual={handle}", *flags)
        assert report["residual"]["failure"] == expected_failure
        sent = report["bytes"][self.way]["up"]
        # dout alone, or also q, k, v (out and lse are computed again).
        assert sent == (Q if not expected_failure else 2 * Q + 2 * K)
        self.run("verify", f"--input={self.given}", f"--output={self.grad}", f"--forward={self.out}", "--causal")


@pytest.mark.parametrize("way", ["host_memory", "direct"])
def test_whatever_becomes_of_it(make_ring, tmp_path, way):
    ring = make_ring(workers=2, worker_flags=FLAGS[way](tmp_path))
    calls = Calls(ring, way, tmp_path)

    handle = calls.forward("--retain=1m")["residual"]["handle"]
    calls.backward(handle, "", "--keep_residual")
    calls.backward(handle, "")
    calls.backward(handle, "RESIDUAL_CONSUMED")

    handle = calls.forward("--retain=1s")["residual"]["handle"]
    time.sleep(2)
    calls.backward(handle, "RESIDUAL_EXPIRED")

    calls.backward("0" * len(handle), "RESIDUAL_NOT_FOUND")  # as is another client's

    handle = calls.forward("--retain=1m")["residual"]["handle"]
    generation = ring.topology().generation
    ring.kill_worker(1)  # half of it
    ring.start_worker(1)
    ring.wait_ready(2, after_generation=generation)
    calls.backward(handle, "RESIDUAL_LOST")


@pytest.mark.parametrize("way", ["host_memory", "direct"])
def test_over_the_quota_the_forward_goes_on(make_ring, tmp_path, way):
    ring = make_ring(workers=2, worker_flags=FLAGS[way](tmp_path), server_flags=["--max_residual_bytes=65536"])
    calls = Calls(ring, way, tmp_path)
    kept = calls.forward("--retain=1m")["residual"]
    assert kept["handle"] == "" and kept["reason"]
    calls.run("verify", f"--input={calls.given}", f"--output={calls.out}", "--causal")
