"""How GPUs of one machine map one another's memory: descriptors (--peer_memory=vmm) compared with CUDA's legacy
handles (ipc), with the same bits and in the same time; and workers in separate PID namespaces, where
all of them have number 1, as in pods of one GPU."""

import os
import re
import shutil
import signal

import wire
from calls import call, plan_flags, verify
from faults import digest
from harness import check
from inputs import Shape
from session import CAUSAL

PASSES = ("forward", "backward")
# The largest allowed time of an exchange by descriptors, relative to legacy handles.
VMM_TO_IPC = 1.02


def moved(ring):
    """Tensor bytes between ranks, by the way that they took."""
    found = {}
    for address in ring.worker_metrics().values():
        for line in ring.metrics(address):
            match = re.match(r'ringattn_bytes_total\{direction="ring",transport="(\w+)"\} (\S+)', line)
            if match:
                found[match[1]] = found.get(match[1], 0) + float(match[2])
    return {name: count for name, count in found.items() if count > 0}


def started_in_namespaces(session):
    """Returns a folder with the bundle's programs, whose worker starts in new PID and IPC namespaces. It keeps the
    machine's network, which gRPC needs, so the folder for sockets is passed, as pods need it."""
    folder = session.scratch / "namespaced"
    folder.mkdir()
    for program in session.bin.iterdir():
        if program.name != "ringattn-worker":
            (folder / program.name).symlink_to(program)
    wrapper = folder / "ringattn-worker"
    wrapper.write_text("#!/bin/sh\nexec unshare --pid --ipc --fork --kill-child --mount-proc "
                       f"'{session.bin / 'ringattn-worker'}' \"$@\"\n")
    wrapper.chmod(0o755)
    return folder


def run_on(session, name, flags, result, bench):
    """One cluster: both passes with their digests, judged by the oracle, and what carried the ring."""
    ring = session.make_ring(name, session.workers, "cuda", "peer")
    ring.up_flags = flags
    session.ring = ring
    shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"]["64k"])
    source, plan = session.view(shape, True), [*CAUSAL, *plan_flags(session.workers, "zigzag")]
    try:
        ring.ensure()
        line = result[name] = {}
        outputs = {command: session.output(f"{name}-{command}") for command in PASSES}
        for command in PASSES:
            call(session.harness, ring, command, source, outputs[command], plan)
        verify(session.harness, ring, source, outputs["backward"], CAUSAL, 8, outputs["forward"])
        line["digest"] = digest(outputs["forward"])
        line["ring_bytes"] = moved(ring)
        if bench:
            for command in PASSES:
                figures = wire.bench(session, shape, command, "--runs=7", "--transport=host_memory",
                                     "--deadline=120s", transport="host_memory")
                line[f"{command}_ring_seconds"] = figures["ring_seconds"]
        else:
            line["after_a_kill"] = lose_one(session, ring, source, plan)
        return line
    finally:
        ring.down()


def lose_one(session, ring, source, plan):
    """A worker is killed: the ring forms again, and the next result has the same bits."""
    output = session.output("namespaced-again")
    _, _, generation = ring.state()
    # The worker itself, not who waits for it outside of its namespace.
    victim = max(ring.pids().values())
    os.kill(victim, signal.SIGKILL)
    ring.wait_members(session.workers, seconds=60, after_generation=generation)
    call(session.harness, ring, "forward", source, output, plan)
    return digest(output)


def part(session):
    def run(result):
        if not session.gpu or session.workers < 2:
            result["skipped"] = "needs two GPUs"
            return
        shared = session.ring
        shared.down()
        try:
            kinds = {kind: run_on(session, kind, [f"--worker_flag=--peer_memory={kind}"], result, True)
                     for kind in ("vmm", "ipc")}
            check(set(kinds["vmm"]["ring_bytes"]) == {"peer"}, f"{kinds['vmm']['ring_bytes']}")
            check(set(kinds["ipc"]["ring_bytes"]) == {"peer_ipc"}, f"{kinds['ipc']['ring_bytes']}")
            check(kinds["vmm"]["digest"] == kinds["ipc"]["digest"], "other bits by descriptors")
            result["goals"] = []
            for command in PASSES:
                ratio = kinds["vmm"][f"{command}_ring_seconds"] / kinds["ipc"][f"{command}_ring_seconds"]
                result["goals"].append({
                    "what": f"{command}: the ring by descriptors compared with legacy handles",
                    "goal": VMM_TO_IPC, "value": round(ratio, 3), "met": ratio <= VMM_TO_IPC})
            if os.geteuid() != 0 or shutil.which("unshare") is None:
                result["namespaces"] = "skipped: needs root and unshare"
                return
            sockets = session.scratch / "peers"
            sockets.mkdir()
            line = run_on(session, "namespaces",
                          [f"--bin_dir={started_in_namespaces(session)}",
                           "--worker_flag=--peer_memory=vmm",
                           f"--worker_flag=--peer_socket_dir={sockets}"], result, False)
            check(set(line["ring_bytes"]) == {"peer"}, f"{line['ring_bytes']}")
            check(line["digest"] == kinds["vmm"]["digest"] == line["after_a_kill"],
                  "other bits in namespaces")
        finally:
            session.ring = shared
    return run
