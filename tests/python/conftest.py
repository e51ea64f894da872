"""A service of real processes for tests of the installed package. Run by tests/lib/python_tests.sh."""
import contextlib
import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import ringattn

sys.path.insert(0, str(pathlib.Path(__file__).parent / "sharded"))

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("RINGATTN_BIN", ROOT / "bazel-bin"))
EXAMPLES = ROOT / "client/python/examples"


@pytest.fixture(scope="session")
def state(tmp_path_factory):
    """The service's folder."""
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="session", autouse=True)
def address(state):
    """The address of a coordinator with three CPU workers."""
    command = [BIN / "client/ringattn"]
    up = subprocess.run([*command, "up", "--workers=3", "--port=0", "--device=cpu", "--threads=1", "--detach",
                         f"--state_dir={state}"], capture_output=True, text=True, timeout=120,
                        env={**os.environ, "RINGATTN_BIN_DIR": os.environ.get("RINGATTN_BIN_DIR", "")})
    found = re.search(r"gRPC address (\S+),", up.stdout)
    assert up.returncode == 0 and found, up.stdout + up.stderr
    os.environ["RINGATTN_ADDRESS"] = found[1]
    yield found[1]
    subprocess.run([*command, "down", f"--state_dir={state}"], capture_output=True, timeout=120)


@pytest.fixture
def service_pids(address, state):
    """The coordinator's process and the workers'."""
    launcher = (state / "launcher.pid").read_text().strip()
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    assert len(children) == 4, children
    return [int(child) for child in children]


@pytest.fixture
def client(address):
    with ringattn.connect(address) as client:
        yield client


@pytest.fixture
def default_client(client):
    """The client, as the default client of the test. PyTorch's generator has a fixed seed."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    ringattn.set_default_client(client)
    yield client
    ringattn.set_default_client(None)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def long_call():
    """Tensors whose forward keeps the ring busy for many seconds."""
    return tuple(np.ones((1, 65536, 8, 16), np.float32) for _ in range(3))


def wait_until(condition, seconds, what):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


def state_of(client, request_id):
    """The operation's state, or None before the service knows it."""
    with contextlib.suppress(ringattn.NotFoundError):
        return client.get_operation(request_id)["state"]


def is_served(client, seconds=20):
    """A small call succeeds: the workers are free."""
    q = np.ones((1, 64, 2, 8), np.float32)
    return client.forward(q, q, q, world_size=3, deadline=seconds).report.attempts == 1


@pytest.fixture(scope="session")
def ranks(address, tmp_path_factory):
    """ranks(world_size): a process group for functions that every rank calls with its shard, started on first use."""
    from rank_processes import Ranks
    started = {}

    def of(world_size):
        if world_size not in started:
            started[world_size] = Ranks(world_size, tmp_path_factory.mktemp("group") / "store")
        return started[world_size]

    yield of
    for group in started.values():
        group.close()
