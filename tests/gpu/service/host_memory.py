"""Calls whose tensors lie in memory that the client shares with the workers, compared with the
relay and with the ring plus the bare copies (tests/gpu/copy_bound.py) of the same run."""

import json
import pathlib
import shutil

import wire
from inputs import Shape

# Bound on a call's time, relative to the ring plus the copies at the rate of pinned memory.
CALL_TO_BOUND = 1.15
PASSES = ("forward", "backward")
# Timed calls of each pass, and of the relay for comparison: none where its call would take a
# minute.
RUNS = {"64k": (15, 2), "256k": (5, 2), "1m": (2, 0)}


def copy_bound(session, memory):
    """Bytes per second up and down, all GPUs together, and nothing; or none, and why: without PyTorch or
    GPUs."""
    python = session.args.peer_python or shutil.which("python3")
    if not session.gpu:
        return None, "no GPUs"
    script = pathlib.Path(__file__).resolve().parents[1] / "copy_bound.py"
    code, text = session.harness.run([python, script, f"--memory={memory}",
                                      f"--gpus={session.workers}"])
    if code != 0:
        return None, text[-300:]
    report = json.loads(text)
    return (report["up_bytes_per_second"], report["down_bytes_per_second"]), ""


def part(session, length):
    def run(result):
        session.ring.ensure()
        shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"][length])
        rates, why = copy_bound(session, "host")
        result["copy_bound"] = rates or why
        result["host_memory"] = []
        result["goals"] = []
        for command in PASSES:
            runs, relay_runs = RUNS[length]
            # A region's pages are pinned, or not, before it is used again. The default limit of
            # staging is 4 GiB; a backward of 256K tokens needs more.
            line = wire.bench(session, shape, command, f"--runs={runs}", "--transport=host_memory",
                              "--staging_limit=64GiB", "--deadline=120s", transport="host_memory")
            if relay_runs:
                relay = wire.bench(session, shape, command, f"--runs={relay_runs}", "--transport=relay",
                                   "--deadline=120s")
                line["relay_seconds"] = relay["call_seconds"]
            if rates is not None:
                line["bound_seconds"] = (line["ring_seconds"] + line["bytes_up"] / rates[0]
                                         + line["bytes_down"] / rates[1])
                ratio = line["call_seconds"] / line["bound_seconds"]
                result["goals"].append({
                    "what": f"{command} of {shape.seq_len} tokens over host memory compared with ring and copies",
                    "goal": CALL_TO_BOUND, "value": round(ratio, 3), "met": ratio <= CALL_TO_BOUND})
            result["host_memory"].append({"pass": command, **line})
    return run
