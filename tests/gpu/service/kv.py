"""K/V caches on the workers: random programs of steps against the fp64 oracle, decode steps with their bounds, decode
next to ring operations, and a worker that is killed during decode."""

import json
import os
import re
import signal
import subprocess
import time

from harness import check

LISTEN = "--worker_flag=--client_data_listen=127.0.0.1:0"
# Programs of the sweep for each number of workers and transport; lengths and steps of the bench. `ring` is the
# request that runs on all workers next to decode.
GPU = {"cases": 25, "lengths": (16384, 131072, 1048576), "direct_length": 131072, "steps": 1000, "long": 100000, "fault_length": 131072,
       "shape": ("--heads=32", "--kv_heads=8", "--head_dim=128", "--dtype=bf16"), "kv_heads": 8,
       "beside": 60000, "window_ms": 3000,
       "ring": ("--seq_len=65536", "--heads=32", "--kv_heads=8", "--head_dim=128", "--dtype=bf16")}
CPU = {"cases": 10, "lengths": (1024,), "direct_length": 1024, "steps": 20, "long": 200, "fault_length": 4096,
       "shape": ("--heads=8", "--kv_heads=4", "--head_dim=64", "--dtype=bf16"), "kv_heads": 4,
       "beside": 300, "window_ms": 400,
       "ring": ("--seq_len=2048", "--heads=8", "--kv_heads=4", "--head_dim=64", "--dtype=bf16")}
LOSS_SECONDS = 1.0  # from the kill to the client's typed error


def part(session):
    def run(result):
        sizes = GPU if session.gpu else CPU
        ring, harness = session.ring, session.harness
        worlds = [world for world in (1, 2, 4, 8) if world <= min(session.workers, sizes["kv_heads"])]
        ring.down()
        ring.up_flags = [LISTEN]
        try:
            ring.ensure()
            if session.gpu:
                result["kernels"], result["kernels_after_idle"] = kernels(session)
                result["doorbell"] = doorbell(session, result["kernels_after_idle"])
            result["sweeps"] = [sweep(session, sizes, world, transport)
                                for world in worlds for transport in ("host_memory", "direct", "relay")]
            result["beside"] = beside(session, sizes)
            result["steps"] = [bench(session, sizes, 1, sizes["lengths"][0], "host_memory", sizes["long"])]
            if session.workers > 1:
                result["loss"] = lose(session, sizes)
            for world in worlds:
                levels = [(length, "host_memory") for length in sizes["lengths"]] + [(sizes["direct_length"], "direct")]
                for length, transport in levels:
                    result["steps"].append(bench(session, sizes, world, length, transport, sizes["steps"]))
                    harness.write_summary()
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


def command(session, sizes, world, length, steps, transport, *flags):
    return [session.bin / "ringattn", "bench", f"--server={session.ring.address}", f"--steps={steps}",
            f"--seq_len={length}", *sizes["shape"], "--causal", f"--world_size={world}", f"--transport={transport}",
            "--rows=1", "--json", *flags]


def bench(session, sizes, world, length, transport, steps, *flags):
    report = session.harness.run_json(command(session, sizes, world, length, steps, transport, "--layers=1", *flags))
    level = report["levels"][0]
    check(level["verified"]["passed"], f"decode of {length} keys on {world} workers is wrong: {level['verified']}")
    shape = dict(flag.lstrip("-").split("=") for flag in sizes["shape"])
    kv_bytes = (length + 1) * int(shape["kv_heads"]) * int(shape["head_dim"]) * 2 * 2
    level["kv_bytes_per_second_and_worker"] = kv_bytes / world / level["device_seconds"]["p50"]
    return {"world_size": world, "transport": transport, **level}


def values(output):
    """{(case, measure): value} of lines case,measure,value,unit."""
    found = {}
    for line in output.splitlines():
        words = line.rsplit(",", 3)
        if len(words) == 4:
            found[words[0], words[1]] = float(words[2])
    return found


def kernels(session):
    """Microseconds of the kernels of one decode step, by length and number of ranks: in a row, where one call overlaps
    the next, and each after the device was idle as between two steps."""
    output = session.harness.run_ok([session.bin / "paged_bench", "--only=ranks", "--rounds=5"])
    in_a_row, after_idle = {}, {}
    for (case, measure), value in values(output).items():
        words = re.fullmatch(r"decode of (\d+) keys, (\d+) ranks", case)
        found = {"append and attention": in_a_row, "append and attention after idle": after_idle}.get(measure)
        if words and found is not None:
            found[f"{words[1]} keys, {words[2]} ranks"] = value
    check(in_a_row and after_idle, f"paged_bench printed no times: {output[-300:]}")
    return in_a_row, after_idle


def doorbell(session, kernels_us):
    """Microseconds from a word stored by one thread until another thread has copied a call's tensors to the device, an
    empty captured launch has ended, and a word has come back. `waiting` has the p50 with a kernel that waits as long as
    the kernels of a step, less this wait."""
    waits = {name: f"{value:.1f}" for name, value in kernels_us.items()}
    found = values(session.harness.run_ok([session.bin / "kv_gpu_bench", "--steps=300", "--layers=1", "--lengths=2048",
                                           f"--waits_us={','.join(waits.values())}"]))
    case = "empty captured launch"
    return {**{name: found[case, f"with a doorbell {name}"] for name in ("p50", "p99")},
            "waiting": {name: found[case, f"doorbell less a wait of {wait} us p50"] for name, wait in waits.items()}}


def beside(session, sizes):
    """Decode on one worker while requests run one after another on all workers, and those requests without decode."""
    harness, ring = session.harness, session.ring
    length = sizes["lengths"][0]

    def requests(windows):
        return [str(word) for word in (
            session.bin / "ringattn", "bench", f"--server={ring.address}", *sizes["ring"], "--causal", "--rows=4",
            f"--world_size={ring.workers}", "--transport=host_memory", "--concurrency_range=1",
            f"--measurement_interval={sizes['window_ms']}", f"--max_trials={windows}", "--stability_percentage=100",
            "--json")]

    def level_of(report):
        found = report["load"]["levels"][0]
        check(not found["failed"], f"requests failed: {found['failed']}")
        return {"calls_per_second": found["calls_per_second"]["value"], "latency_seconds": found["latency_seconds"]}

    alone = level_of(harness.run_json(requests(3)))
    process = subprocess.Popen(requests(3), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        # The bench verifies its first request before it sends the others one after another.
        first, end = runs(ring), time.monotonic() + 60
        while runs(ring) < first + 3 * ring.workers:
            check(time.monotonic() < end and process.poll() is None, "no requests ran within 60 s")
            time.sleep(0.05)
        before = runs(ring)
        decode = bench(session, sizes, 1, length, "host_memory", sizes["beside"])
        decode["runs_of_requests"] = runs(ring) - before
        during = process.poll() is None
        stdout, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    check(process.returncode == 0, f"the requests next to decode failed: {stderr[-500:]}")
    return {"decode": decode, "requests_alone": alone, "requests": level_of(json.loads(stdout)),
            "requests_outlasted_decode": during}


def runs(ring):
    """Runs of requests that all workers together have finished."""
    return sum(float(line.rsplit(" ", 1)[1]) for address in ring.worker_metrics().values()
               for line in ring.metrics(address) if line.startswith("ringattn_worker_runs_total"))


def lose(session, sizes):
    """Kills a worker during decode."""
    ring, harness = session.ring, session.harness
    world, length = 2, sizes["fault_length"]
    generation = ring.state()[2]
    before = decoded(ring)
    process = subprocess.Popen([str(word) for word in command(session, sizes, world, length, 1000000, "direct",
                                                            "--layers=2")],
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
    report = harness.run_json(command(session, sizes, 1, 4096, 20, "direct", "--layers=2",
                                      f"--members={survivor}"))
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
