"""Ring passes: the share of its GPUs' speed that a ring reaches, and the causes of the rest."""

import contextlib
import dataclasses
import math

import gpus
from calls import call, plan_flags, timed, verify
from harness import check
from inputs import Shape
from session import CAUSAL


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Shape
    mask: tuple = tuple(CAUSAL)
    layout: str = "zigzag"
    runs: int = 2
    rows: int = 16  # verified

    @property
    def kind(self):
        if self.shape.documents:
            return "packed"
        return "window" if any("window" in word for word in self.mask) else (
            "causal" if self.mask else "full")


def cases(profile):
    """All ring cases by name: lengths in total, "-mha" with as many K/V heads as query heads."""
    shape = profile["shape"]
    found = {}
    for name, tokens in profile["lengths"].items():
        runs = 5 if tokens <= 1 << 16 else 3 if tokens <= 1 << 17 else 2 if tokens <= 1 << 18 else 1
        rows = 16 if tokens <= 1 << 18 else 4
        for suffix, kv_heads in (("", shape["kv_heads"]), ("-mha", shape["heads"])):
            found[name + suffix] = Case(
                Shape(**{**shape, "kv_heads": kv_heads, "seq_len": tokens}), runs=runs, rows=rows)
    tokens = profile["lengths"]["64k"]
    dense = Shape(**shape, seq_len=tokens)
    documents = tuple(profile["documents"])
    found["full"] = Case(dense, mask=(), layout="auto")
    found["window"] = Case(dense, mask=("--causal", f"--window={tokens // 16},0"), layout="auto")
    found["packed"] = Case(dataclasses.replace(dense, seq_len=sum(documents), documents=documents),
                           layout="auto", runs=3)
    return found


def goals(case, workers, command, figures):
    """Returns the bounds for this pass, each with the measured value; a miss does not fail the
    part."""
    tokens = case.shape.seq_len // workers
    wanted = []
    if workers < 2:
        return wanted
    if case.kind == "causal":
        if tokens >= 16384:
            wanted.append(("of one GPU", 0.98 if tokens >= 65536 else 0.95, figures["of_single"]))
        if "of_single_equal_work" in figures:
            goal = 0.98 if tokens >= 65536 else 0.97 if tokens >= 16384 else 0.95
            wanted.append(("of one GPU with equal work", goal, figures["of_single_equal_work"]))
        if tokens >= 8192:
            wanted.append(("exchange hidden", 0.95, figures["timeline"]["hidden_share"]))
    if case.kind == "packed":
        wanted.append(("of its kernels", 0.8, figures["kernels_part"] * figures["balance"]))
    return [{"what": f"{command}: {what}", "goal": goal, "value": value,
             "met": value is not None and value >= goal} for what, goal, value in wanted]


def one_pass(session, case, command, shape, world_size, name, runs):
    """A verified, then timed request; None and only the output if `runs` is 0."""
    mask = list(case.mask)
    options = [*mask, *plan_flags(world_size, case.layout)]
    output = session.output(f"{name}-{command}")
    # dout is present in both directions, so that both see the same file.
    source = session.view(shape, True)
    if runs == 0:
        call(session.harness, session.ring, command, source, output, options)
        return None
    if runs < 3:
        session.warm_up(command, shape, mask, world_size)
        source = session.view(shape, True)
    forward = session.output(f"{name}-forward") if command == "backward" else None

    def judge():
        verify(session.harness, session.ring, source, output, mask, case.rows, forward)
    # Shorter passes fall between two looks at the clock.
    watch = gpus.ClockWatch() if session.gpu and case.shape.seq_len >= 1 << 18 else None
    with watch or contextlib.nullcontext():
        figures = timed(session.harness, session.ring, command, source, output, options, runs,
                        session.scratch, judge)
    if watch:
        figures["clocks"] = watch.at_peak
    return figures


def alone(case, workers):
    """Returns the shapes that one GPU runs for comparison with the ring: {name: shape}. "single"
    has a GPU's share of the tokens. Under a causal mask that is 1/W of a GPU's work in the ring,
    over before the card has warmed up and before its power limit lowers clocks. Where the ring must
    reach nearly all of one GPU's rate, "single_equal_work" has as much work as a GPU in the
    ring."""
    shapes = {"single": case.shape.share(workers)}
    tokens = case.shape.seq_len // workers
    if case.kind == "causal" and 8192 <= tokens < 131072:
        equal = round(case.shape.seq_len / math.sqrt(workers) / 256) * 256
        shapes["single_equal_work"] = dataclasses.replace(case.shape, seq_len=equal)
    return shapes


def ring_part(session, name, case, commands):
    """Runs each of `commands` on the whole ring and on one GPU (alone()). The ring's rate per GPU
    as a fraction of that GPU's kernel rate is the ring's efficiency."""
    def run(result):
        session.ring.ensure()
        result["case"] = {"tokens": case.shape.seq_len, "heads": case.shape.heads,
                          "kv_heads": case.shape.kv_heads, "head_dim": case.shape.head_dim,
                          "kind": case.kind, "workers": session.workers,
                          "transport": session.ring.transport}
        result["goals"] = []
        for command in ("forward", "backward"):
            wanted = command in commands
            if not wanted and "backward" not in commands:
                continue
            runs = case.runs if wanted else 0
            figures = one_pass(session, case, command, case.shape, session.workers, "ring", runs)
            if wanted:
                session.keep_trace(f"{session.part}-{command}", figures.pop("trace_file"))
                result[command] = figures
            if session.workers == 1:
                continue
            for baseline, shape in alone(case, session.workers).items():
                single = one_pass(session, case, command, shape, 1, baseline, runs)
                if not wanted:
                    continue
                figures[baseline] = {key: single[key] for key in (
                    "ring_seconds", "kernel_seconds", "kernel_tflops_per_gpu",
                    "ring_tflops_per_gpu", "clocks") if key in single}
                figures[f"of_{baseline}"] = round(
                    figures["ring_tflops_per_gpu"] / max(single["kernel_tflops_per_gpu"], 1e-9), 4)
            if wanted:
                result["goals"] += goals(case, session.workers, command, figures)
        check(any(command in result for command in commands), f"{name}: no pass was requested")
    return run
