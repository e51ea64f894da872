"""K/V caches on the workers: random programs of steps against the fp64 oracle, decode steps with their bounds, and a
worker that is killed during decode."""

import re
import signal
import subprocess
import os
import time

from harness import check

LISTEN = "--worker_flag=--client_data_listen=127.0.0.1:0"
# Programs of the sweep for each number of workers and transport; lengths and steps of the bench.
GPU = {"cases": 60, "lengths": {1: (16384, 131072, 1048576), 2: (131072, 1048576), 4: (131072, 1048576)},
       "steps": 400, "fault_length": 131072, "shape": ("--heads=32", "--kv_heads=8", "--head_dim=128", "--dtype=bf16")}
CPU = {"cases": 10, "lengths": {1: (1024, 4096), 2: (4096,), 4: ()},
       "steps": 20, "fault_length": 4096, "shape": ("--heads=8", "--kv_heads=4", "--head_dim=64", "--dtype=bf16")}
LOSS_SECONDS = 1.0  # from the kill to the client's typed error


def part(session):
    def run(result):
        sizes = GPU if session.gpu else CPU
        ring, harness = session.ring, session.harness
        worlds = [world for world in (1, 2, 4) if world <= session.workers]
        ring.down()
        ring.up_flags = [LISTEN]
        try:
            ring.ensure()
            result["sweeps"] = [sweep(session, sizes, world, transport)
                                for world in worlds for transport in ("direct", "relay")]
            result["steps"] = []
            for world in worlds:
                for length in sizes["lengths"][world]:
                    result["steps"].append(bench(session, sizes, world, length))
                    harness.write_summary()
            if session.workers > 1:
                result["loss"] = lose(session, sizes)
        finally:
            ring.down()
            ring.up_flags = []
    return run


def sweep(session, sizes, world, transport):
    output = session.harness.run_ok(
        [session.bin / "kv_service_sweep", f"--server={session.ring.address}", f"--cases={sizes['cases']}",
         f"--world_size={world}", f"--transport={transport}", f"--seed={world}"], log_to="programs.log")
    found = re.search(r"(\d+) programs, (\d+) results compared, (\d+) steps refused, (\d+) failed", output)
    check(found, f"no summary of the sweep: {output[-300:]}")
    programs, results, refused, failed = map(int, found.groups())
    return {"world_size": world, "transport": transport, "programs": programs, "results": results,
            "refused": refused, "failed": failed}


def command(session, sizes, world, length, steps, *flags):
    return [session.bin / "ringattn", "bench", f"--server={session.ring.address}", f"--steps={steps}",
            f"--seq_len={length}", *sizes["shape"], "--causal", f"--world_size={world}", "--transport=direct",
            "--rows=1", "--json", *flags]


def bench(session, sizes, world, length):
    report = session.harness.run_json(command(session, sizes, world, length, sizes["steps"], "--layers=1"))
    level = report["levels"][0]
    check(level["verified"]["passed"], f"decode of {length} keys on {world} workers is wrong: {level['verified']}")
    shape = dict(flag.lstrip("-").split("=") for flag in sizes["shape"])
    kv_bytes = (length + 1) * int(shape["kv_heads"]) * int(shape["head_dim"]) * 2 * 2
    level["kv_bytes_per_second_and_worker"] = kv_bytes / world / level["device_seconds"]["p50"]
    return {"world_size": world, **level}


def lose(session, sizes):
    """Kills a worker during decode."""
    ring, harness = session.ring, session.harness
    world, length = 2, sizes["fault_length"]
    generation = ring.state()[2]
    before = decoded(ring)
    process = subprocess.Popen([str(word) for word in command(session, sizes, world, length, 1000000, "--layers=2")],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # More steps than the fill and the verification take.
        fill = 2 + length * 8 * 128 * 2 // (4 << 20) + 10
        end = time.monotonic() + 60
        members = []
        while len(members) < world and time.monotonic() < end:
            check(process.poll() is None, "the bench ended before it decoded")
            members = [name for name, steps in decoded(ring).items() if steps > before.get(name, 0) + fill]
            time.sleep(0.05)
        check(len(members) == world, "no decode within 60 s")
        victim = members[-1]
        begin = time.monotonic()
        os.kill(ring.pids()[victim], signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=20)
        seconds = time.monotonic() - begin
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    said = stdout + stderr
    check(process.returncode != 0, "the bench did not fail")
    check("KV_LOST" in said or "DATA_LOSS" in said, f"another error than a lost cache: {said[-500:]}")
    check(seconds < LOSS_SECONDS, f"the error came {seconds:.2f} s after the kill")
    begin = time.monotonic()
    survivor = next(name for name in ring.pids() if name != victim)
    report = harness.run_json(command(session, sizes, 1, 4096, 20, "--layers=2", f"--members={survivor}"))
    check(report["levels"][0]["verified"]["passed"], "the new cache gives wrong results")
    served = time.monotonic() - begin
    ring.wait_members(ring.workers, seconds=30, after_generation=generation)
    return {"killed": victim, "error_seconds": round(seconds, 3), "new_cache_seconds": round(served, 2),
            "error": said.strip()[-300:]}


def decoded(ring):
    """Steps that each worker's process has begun."""
    found = {}
    for name, address in ring.worker_metrics().items():
        try:
            lines = ring.metrics(address)
        except OSError:
            continue
        for line in lines:
            if line.startswith("ringattn_worker_kv_steps_total"):
                found[name] = float(line.rsplit(" ", 1)[1])
    return found
