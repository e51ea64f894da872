"""deploy/quickstart.sh --prebuilt where nothing can be installed: it has to use the GPUs."""

import os
import pathlib
import socket

from harness import check

# Programs that would install or build something; each is replaced by one that logs the call and
# fails.
FORBIDDEN = ("apt-get", "apt", "sudo", "pip", "pip3", "bazel", "curl", "wget", "git", "make", "g++")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def part(session):
    def run(result):
        session.ring.down()
        folder = session.scratch / "quickstart"
        programs, told = folder / "bin", folder / "told"
        programs.mkdir(parents=True)
        for name in FORBIDDEN:
            program = programs / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >>"{told}"\nexit 97\n')
            program.chmod(0o755)
        port = free_port()
        environment = {**os.environ, "RINGATTN_STATE_DIR": str(folder / "state"),
                       "RINGATTN_PORT": str(port), "PATH": f"{programs}:{os.environ['PATH']}"}
        environment.pop("RINGATTN_NCCL", None)  # quickstart.sh has to find it
        script = pathlib.Path(__file__).resolve().parents[3] / "deploy/quickstart.sh"
        try:
            code, text = session.harness.run([script, f"--prebuilt={session.bundle}"],
                                             environment=environment)
            result["exit_code"] = code
            if code == 0:
                topology = session.harness.run_json(
                    [session.ring.cli, "topology", f"--server=127.0.0.1:{port}", "--json"])
                result["devices"] = [worker.get("device") for worker in topology["workers"]]
                session.harness.run([script, f"--prebuilt={session.bundle}"],
                                    environment=environment)  # once more: it is running already
        finally:
            stop, _ = session.harness.run([script, "--stop"], seconds=20, environment=environment,
                                          cleans_up=True)
        called = told.read_text().splitlines() if told.exists() else []
        check(not called, f"called {called}")
        check(code == 0, f"exits {code}: {text[-800:]}")
        check(stop == 0, f"--stop exits {stop}")
        check("up and verified" in text, text[-300:])
        kind = "cuda" if session.gpu else "cpu"
        wanted = min(8, len(session.gpu_names)) if session.gpu else 4
        found = [device for device in result["devices"] if kind in str(device).lower()]
        check(len(found) == wanted == len(result["devices"]),
              f"expected {wanted} {kind} workers, found {result['devices']}")
        check(not session.gpu or len(set(found)) == wanted, f"GPUs used twice: {found}")
    return run
