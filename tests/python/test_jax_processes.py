"""`axis_name` with jax.distributed: the shards of several processes are the writers of one request."""
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

pytest.importorskip("jax", reason=os.environ.get("RINGATTN_NO_JAX") or None)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.mark.parametrize("devices", [1, 2])
def test_two_processes(address, devices):
    """Results, gradients, an error on all shards, and the call after it."""
    program, port = pathlib.Path(__file__).parent / "lib/jax_process.py", free_port()
    children = [subprocess.Popen([sys.executable, program, str(rank), port, str(devices)], text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
    try:
        outputs = [child.communicate(timeout=240) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (out, err) in zip(children, outputs):
        assert child.returncode == 0, out + err
        found = json.loads(out.splitlines()[-1])
        assert (found["processes"], found["devices"]) == (2, 2 * devices)
        assert max(found["differences"] + found["after"]) < 2e-5, found
        assert "WRITERS_DIFFER" in found["error"]
