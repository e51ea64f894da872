"""Requests by the command line: inputs made ahead, runs with their figures, verification."""

import json
import pathlib
import subprocess
import threading
import time

import timeline
from gpus import MemoryWatch
from harness import Failure, check


class Inputs:
    """Generates input files on a thread, in the order asked for, while other parts run."""

    def __init__(self, cli, folder):
        self.cli, self.folder = cli, pathlib.Path(folder)
        self.wanted, self.ready = [], {}
        self.lock = threading.Condition()
        self.process = None
        self.closed = False
        self.thread = threading.Thread(target=self._work, daemon=True)

    def want(self, name, *, heads, kv_heads, head_dim, seq_len=None, documents=None,
             dtype="bf16", dout=True):
        """Once, however often it is asked for; tokens in one sequence or in documents."""
        if name in (wanted for wanted, _ in self.wanted):
            return
        length = (f"--documents={','.join(map(str, documents))}" if documents
                  else f"--seq_len={seq_len}")
        self.wanted.append((name, [
            length, f"--heads={heads}", f"--kv_heads={kv_heads}",
            f"--head_dim={head_dim}", f"--dtype={dtype}", "--batch=1", "--seed=3",
            *(["--with_dout"] if dout else [])]))

    def start(self):
        self.thread.start()

    def path(self, name):
        return self.folder / f"{name}.safetensors"

    def _work(self):
        for name, flags in self.wanted:
            with self.lock:
                if self.closed:
                    return
                self.process = subprocess.Popen(
                    [str(self.cli), "generate", f"--output={self.path(name)}", *flags],
                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            error = self.process.communicate()[1]
            with self.lock:
                self.ready[name] = error if self.process.returncode != 0 else ""
                self.lock.notify_all()

    def get(self, name, seconds):
        end = time.monotonic() + seconds
        check(name in (wanted for wanted, _ in self.wanted), f"input {name} is not in the list")
        with self.lock:
            while name not in self.ready:
                check(time.monotonic() < end, f"input {name} was not generated in time")
                self.lock.wait(0.2)
            check(not self.ready[name], f"input {name}: {self.ready[name]}")
        return self.path(name)

    def close(self):
        with self.lock:
            self.closed = True
            if self.process is not None and self.process.poll() is None:
                self.process.kill()


def plan_flags(world_size, layout="auto"):
    schedule = "ring" if world_size > 1 else "single"
    return [f"--schedule={schedule}", f"--world_size={world_size}",
            *([f"--layout={layout}"] if world_size > 1 else [])]


def call(harness, ring, command, source, output, options, trace_file=None):
    """One request; its --json report."""
    flags = [f"--trace={trace_file}"] if trace_file else []
    text = harness.run_ok([ring.cli, command, f"--server={ring.address}", f"--input={source}",
                           f"--output={output}", "--deadline=90s", "--json", *flags, *options])
    try:
        return json.loads(text)
    except ValueError:
        raise Failure(f"{command} printed no JSON: {text[-300:]}") from None


def verify(harness, ring, source, output, options, rows, forward=None):
    """`forward`: the forward pass's output; dk and dv of long requests are judged with its help."""
    given = [f"--forward={forward}"] if forward else []
    code, text = harness.run([ring.cli, "verify", f"--input={source}", f"--output={output}",
                              f"--rows={rows}", *given, *options])
    check(code == 0, f"wrong result of {output.name}: {text[-500:]}")


def figures(report):
    """What a report says about speed. Rates per GPU: of the kernels alone, and of the ring pass
    from the first rank's start to the last one's end."""
    ranks = report["ranks"]
    kernel_seconds = [rank["compute_seconds"] for rank in ranks]
    wall = report["compute_seconds"]
    flops = report["flops"]
    return {
        "client_seconds": round(report["client_seconds"]["finished"], 4),
        "stage_seconds": {k: round(v, 4) for k, v in report["stage_seconds"].items()},
        "ring_seconds": round(wall, 5),
        "kernel_seconds": [round(s, 5) for s in kernel_seconds],
        "ring_wait_seconds": [round(rank["ring_wait_seconds"], 5) for rank in ranks],
        "kernel_tflops_per_gpu": round(flops / max(sum(kernel_seconds), 1e-9) / 1e12, 3),
        "ring_tflops_per_gpu": round(flops / max(wall, 1e-9) / len(ranks) / 1e12, 3),
        "generation": report["generation"],
        "attempts": report["attempts"],
    }


def measure(harness, ring, command, source, output, options, runs, watch_memory, trace_file=None):
    """Runs a request several times (the first pays for lazy loading); all figures, the best ring
    time's, memory against the plan, and the last run's overlap."""
    reports = []
    with MemoryWatch(watch_memory) as memory:
        for index in range(runs):
            last = index + 1 == runs
            reports.append(call(harness, ring, command, source, output, options,
                                trace_file if last else None))
    all_figures = [figures(report) for report in reports]
    result = {"best": min(all_figures, key=lambda f: f["ring_seconds"]),
              "runs": [{k: f[k] for k in ("client_seconds", "ring_seconds", "kernel_tflops_per_gpu",
                                          "ring_tflops_per_gpu")} for f in all_figures],
              "predicted_bytes": [rank["buffer_bytes"] for rank in reports[-1]["plan"]["ranks"]],
              "layout": reports[-1]["plan"]["layout"]}
    if watch_memory:
        result["memory_first_bytes"] = memory.first
        result["memory_peak_bytes"] = memory.peak
    if trace_file:
        result["overlap"] = timeline.analyse(trace_file)
    return result
