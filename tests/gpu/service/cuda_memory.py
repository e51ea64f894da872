"""Calls whose tensors lie in a client's CUDA memory: the relay's bits; times compared with host memory and with
the ring plus the bare copies between GPUs (tests/gpu/copy_bound.py) of the same
run; memory of cuMemCreate compared with that of cudaMalloc; and clients that are killed while workers copy."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

import wire
from calls import call, plan_flags, verify
from faults import digest
from harness import check
from host_memory import copy_bound
from inputs import Shape
from session import CAUSAL

# Bound on a call's time, relative to the ring plus the copies at the rate of the links.
CALL_TO_BOUND = 1.15
PASSES = ("forward", "backward")
KINDS = ("vmm", "malloc")
KILLS = 6
# Until a worker has unmapped what a dead client had.
UNMAP_SECONDS = 5


def cuda(kind, device=0):
    return ["--transport=cuda_memory", f"--cuda_memory={kind}", f"--cuda_device={device}"]


def same_bits(session, ring, shape, result):
    """Every kind of memory, on the first GPU and on the last: forward to the bit, gradients by the oracle
    (whose kernels add in no fixed order), with whether the bits were equal too."""
    harness = session.harness
    source = session.view(shape, True)
    plan = [*CAUSAL, *plan_flags(session.workers, "zigzag")]
    outputs = {command: session.output(f"cuda-{command}") for command in PASSES}
    relayed = {}
    for command in PASSES:
        call(harness, ring, command, source, outputs[command], [*plan, "--transport=relay"])
        relayed[command] = digest(outputs[command])
    verify(harness, ring, source, outputs["backward"], CAUSAL, 8, outputs["forward"])
    result["same_bits"] = []
    for kind in KINDS:
        for device in sorted({0, session.workers - 1}):
            line = {"memory": kind, "gpu": device}
            for command in PASSES:
                report = call(harness, ring, command, source, outputs[command],
                              [*plan, *cuda(kind, device)])
                check(report["transport"]["kind"] == "cuda_memory", f"{report['transport']}")
                line[command] = digest(outputs[command]) == relayed[command]
            check(line["forward"], f"{kind} memory of GPU {device}: not the relay's bits")
            verify(harness, ring, source, outputs["backward"], CAUSAL, 8, outputs["forward"])
            result["same_bits"].append(line)
    return source, outputs["forward"], plan, relayed["forward"]


def import_rates(session, result):
    """Measures copies of mapped memory without the service, by the kind of memory; an error here fails no part."""
    script = pathlib.Path(__file__).resolve().parents[1] / "import_rates.py"
    code, text = session.harness.run([shutil.which("python3"), script], seconds=60)
    result["import_rates"] = json.loads(text) if code == 0 else text[-300:]


def times(session, shape, result):
    rates, why = copy_bound(session, "device")
    result["copy_bound"] = rates or why
    result["cuda_memory"], result["goals"] = [], []
    for command in PASSES:
        host = wire.bench(session, shape, command, "--runs=15", "--transport=host_memory",
                          "--deadline=120s", transport="host_memory")
        for kind in KINDS:
            line = wire.bench(session, shape, command, "--runs=15", *cuda(kind), "--deadline=120s",
                              transport="cuda_memory")
            line["host_seconds"] = host["call_seconds"]
            if rates is not None:
                line["bound_seconds"] = (line["ring_seconds"] + line["bytes_up"] / rates[0]
                                         + line["bytes_down"] / rates[1])
                ratio = line["call_seconds"] / line["bound_seconds"]
                result["goals"].append({
                    "what": f"{command} of {shape.seq_len} tokens over CUDA memory ({kind}) compared with "
                            "ring and copies",
                    "goal": CALL_TO_BOUND, "value": round(ratio, 3), "met": ratio <= CALL_TO_BOUND})
            result["cuda_memory"].append({"pass": command, "memory": kind, **line})


def gauge(ring, name):
    """Its value on each worker."""
    found = {}
    for worker, address in ring.worker_metrics().items():
        for line in ring.metrics(address):
            if line.startswith(name + " "):
                found[worker] = float(line.split()[1])
    return found


def imported(ring):
    return sum(gauge(ring, "ringattn_worker_imported_bytes").values())


def kill_clients(session, ring, shape, given, result):
    """Clients that call again and again, killed at other moments of a call: no worker ends, everything is
    unmapped, and the next request is right."""
    source, output, plan, bits = given
    pids = ring.pids()
    check(imported(ring) == 0, f"{imported(ring)} bytes are mapped before")
    result["kills"] = []
    for index in range(KILLS):
        kind = KINDS[index % len(KINDS)]
        client = subprocess.Popen(
            [str(word) for word in (
                ring.cli, "bench", f"--server={ring.address}", "--runs=10000", "--rows=1", *CAUSAL,
                f"--seq_len={shape.seq_len}", f"--heads={shape.heads}",
                f"--kv_heads={shape.kv_heads}", f"--head_dim={shape.head_dim}",
                f"--dtype={shape.dtype}", *plan_flags(session.workers, "zigzag"), *cuda(kind))],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 60
            while imported(ring) == 0 and client.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            check(client.poll() is None and imported(ring) > 0, "the client never got to its calls")
            time.sleep(1 + 0.0137 * index)  # at one moment of a call or another
        finally:
            client.send_signal(signal.SIGKILL)
            client.wait()
        begin = time.monotonic()
        while imported(ring) > 0 and time.monotonic() < begin + UNMAP_SECONDS:
            time.sleep(0.005)
        line = {"memory": kind, "unmapped_seconds": round(time.monotonic() - begin, 3)}
        check(imported(ring) == 0, f"still mapped {UNMAP_SECONDS} s after the client's death")
        check(ring.pids() == pids, f"workers were {pids} and are {ring.pids()}")
        call(session.harness, ring, "forward", source, output, [*plan, *cuda(kind)])
        line["next_is_right"] = digest(output) == bits
        check(line["next_is_right"], "other bits after a client's death")
        result["kills"].append(line)


def from_python(session, ring, result):
    """PyTorch's tensors on the first GPU, through the package that RINGATTN_PYTHON_PACKAGE names a folder of (an
    unpacked wheel for the python3 with PyTorch)."""
    package = os.environ.get("RINGATTN_PYTHON_PACKAGE")
    python = session.args.peer_python or shutil.which("python3")
    if not package:
        result["python"] = "skipped: no RINGATTN_PYTHON_PACKAGE"
        return
    script = pathlib.Path(__file__).resolve().parents[1] / "python_cuda.py"
    result["python"] = session.harness.run_json(
        [python, script, f"--server={ring.address}"],
        environment={**os.environ, "PYTHONPATH": package})


def refused_without(session, result):
    """Workers that take host memory alone: required, the call fails by name; otherwise it is right."""
    ring = session.ring
    ring.ensure()
    shape = Shape(**session.profile["smoke"])
    source, output = session.view(shape, True), session.output("cuda-refused")
    code, text = session.harness.run([
        ring.cli, "forward", f"--server={ring.address}", f"--input={source}", f"--output={output}",
        "--deadline=60s", "--json", *cuda("vmm")])
    result["without"] = text[-300:]
    check(code != 0 and "TRANSPORT_UNAVAILABLE" in text and "takes CUDA memory" in text, text[-600:])


def part(session, length):
    def run(result):
        if not session.gpu:
            result["skipped"] = "needs GPUs"
            return
        refused_without(session, result)
        session.ring.down()  # two clusters do not fit at once
        import_rates(session, result)
        shared, ring = session.ring, session.make_ring("cuda-memory", session.workers, "cuda")
        ring.up_flags = ["--local_memory=cuda_memory"]
        session.ring = ring
        try:
            ring.ensure()
            shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"][length])
            given = same_bits(session, ring, shape, result)
            kill_clients(session, ring, shape, given, result)
            times(session, shape, result)
            from_python(session, ring, result)
            check(imported(ring) == 0, f"{imported(ring)} bytes stay mapped")
        finally:
            ring.down()
            session.ring = shared
    return run
