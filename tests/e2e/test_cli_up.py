"""`ringattn up` and `down`: the service's processes."""

import os
import signal

from cluster import free_port, wait_until
from command_line import cli, generate


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(c) for c in f.read().split()]


def name_of(pid):
    """Returns the name of a process that may have just ended."""
    try:
        with open(f"/proc/{pid}/comm") as f:
            return f.read().strip()
    except FileNotFoundError:
        return ""


def test_up_restarts_what_dies_and_down_ends_it(tmp_path):
    port, state = free_port(), tmp_path / "state"
    cli("up", "--workers=2", f"--port={port}", f"--state_dir={state}", "--detach")
    try:
        server = f"--server=127.0.0.1:{port}"
        assert "worker-1" in cli("topology", server).stdout
        launcher = next(p for p in map(int, filter(str.isdigit, os.listdir("/proc")))
                        if _is_launcher(p, state))
        names = sorted(name_of(c) for c in children(launcher))
        assert names == ["ringattn-server", "ringattn-worker", "ringattn-worker"]
        workers = [c for c in children(launcher) if name_of(c) == "ringattn-worker"]
        os.kill(workers[0], signal.SIGKILL)
        os.kill(workers[1], signal.SIGSTOP)

        def replaced():
            now = [c for c in children(launcher) if name_of(c) == "ringattn-worker"]
            return len(now) == 2 and not set(now) & set(workers)
        wait_until(replaced, 30, "both workers to be replaced")
        generate(tmp_path / "i.safetensors")
        cli("forward", server, f"--input={tmp_path}/i.safetensors",
            f"--output={tmp_path}/f.safetensors", "--schedule=ring", "--world_size=2",
            "--deadline=60s")
    finally:
        cli("down", f"--state_dir={state}")
    assert not any(_is_launcher(int(p), state) for p in os.listdir("/proc") if p.isdigit())


def _is_launcher(pid, state):
    try:
        with open(f"/proc/{pid}/cmdline") as f:
            words = f.read().split("\0")
    except OSError:
        return False
    return "up" in words and any(str(state) in w for w in words)
