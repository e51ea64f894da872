"""Requests by the command line: runs with their figures, and verification."""

import timeline
from gpus import MemoryWatch


def plan_flags(world_size, layout="auto"):
    schedule = "ring" if world_size > 1 else "single"
    return [f"--schedule={schedule}", f"--world_size={world_size}",
            *([f"--layout={layout}"] if world_size > 1 else [])]


def call(harness, ring, command, source, output, options, trace_file=None):
    """One request; its --json report."""
    flags = [f"--trace={trace_file}"] if trace_file else []
    return harness.run_json([ring.cli, command, f"--server={ring.address}", f"--input={source}",
                             f"--output={output}", "--deadline=200s", "--json", *flags, *options])


def verify(harness, ring, source, output, options, rows, forward=None):
    """The --json report of a verification that must pass. `forward`: the forward pass's output; dk and
    dv of long requests are judged with its help."""
    given = [f"--forward={forward}"] if forward else []
    return harness.run_json([ring.cli, "verify", f"--input={source}", f"--output={output}",
                             f"--rows={rows}", "--json", *given, *options])


def figures(report):
    """Returns a report's speeds. Rates are per GPU: of the kernels alone, and of the whole pass as the coordinator
    measures it (service_), from its command to run until the last rank reports completion."""
    ranks = report["ranks"]
    kernel_seconds = [rank["compute_seconds"] for rank in ranks]
    wall = report["compute_seconds"]
    flops = report["flops"]
    moved = report["bytes"].get(report["transport"]["kind"], {})
    return {
        "client_seconds": round(report["client_seconds"]["finished"], 4),
        "stage_seconds": {k: round(v, 4) for k, v in report["stage_seconds"].items()},
        "bytes_up": moved.get("up"), "bytes_down": moved.get("down"),
        "flops": flops,
        "ring_seconds": round(wall, 5),
        "kernel_seconds": [round(s, 5) for s in kernel_seconds],
        "ring_wait_seconds": [round(rank["ring_wait_seconds"], 5) for rank in ranks],
        "kernel_tflops_per_gpu": round(flops / max(sum(kernel_seconds), 1e-9) / 1e12, 3),
        "service_tflops_per_gpu": round(flops / max(wall, 1e-9) / len(ranks) / 1e12, 3),
        # How even the ranks are.
        "balance": round(sum(kernel_seconds) / len(ranks) / max(*kernel_seconds, 1e-9), 4),
        "predicted_bytes": [rank["buffer_bytes"] for rank in report["plan"]["ranks"]],
        "layout": report["plan"]["layout"],
        "generation": report["generation"],
        "attempts": report["attempts"],
    }


def rate_of_ring(result, flops):
    """The ring's rate per GPU is by the slowest rank's span, from the begin of its first transfer or
    kernel to the end of its last: all that it waits for peers is in it, messages to and from the
    coordinator are not. kernels_part: how much of it the slowest rank's kernels take."""
    span = result["timeline"]["slowest_span_seconds"] or result["ring_seconds"]
    kernels = result["kernel_seconds"]
    result["ring_tflops_per_gpu"] = round(flops / max(span, 1e-9) / len(kernels) / 1e12, 3)
    result["kernels_part"] = round(max(kernels) / max(span, 1e-9), 4)


def timed(harness, ring, command, source, output, options, runs, folder, judge=None):
    """Runs a request once, lets judge() look at the output, and runs it on until `runs` are done. Gives
    the figures of the run whose rate is the median (of two, the better one's), with its timeline,
    and every run's rates. The first run counts: what a worker does only once, warm_up() has done."""
    done = []
    for index in range(runs):
        trace_file = folder / f"trace-{index}.json"
        result = figures(call(harness, ring, command, source, output, options, trace_file))
        result["timeline"] = timeline.analyse(trace_file)
        rate_of_ring(result, result.pop("flops"))
        result["trace_file"] = trace_file
        done.append(result)
        if index == 0 and judge is not None:
            judge()
    by_time = sorted(done, key=lambda result: -result["ring_tflops_per_gpu"])
    median = by_time[(len(by_time) - 1) // 2]
    runs_figures = [{k: result[k] for k in ("client_seconds", "ring_seconds", "kernel_tflops_per_gpu",
                                            "ring_tflops_per_gpu")} for result in done]
    return {**median, "runs": runs_figures}


def with_memory(harness, ring, command, source, output, options):
    """One request; its figures and what nvidia-smi saw, first and at the peak, by GPU index."""
    with MemoryWatch() as memory:
        result = figures(call(harness, ring, command, source, output, options))
    return result, memory
