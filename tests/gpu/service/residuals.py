"""Forward and backward of a training step: with what the forward leaves on the workers, and without. Without
it the client either sends q, k, v and dout, and the forward is computed again, or has kept out and lse, as a
training loop does, and sends them too."""

from calls import call, figures, plan_flags, verify
from harness import check
from inputs import Shape, join
from session import CAUSAL

# Time of a backward that gets q, k, v and dout, relative to one that reads a residual, over the
# relay.
STATELESS_TO_RESIDUAL = 1 / 0.6
ROUNDS = 3
RESIDUAL = ("backward_residual", "backward_residual_host_memory")
STATELESS = ("backward_stateless", "backward_stateless_with_forward")


def part(session):
    def run(result):
        session.ring.ensure()
        harness, ring = session.harness, session.ring
        shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"]["64k"])
        for command in ("forward", "backward"):
            session.warm_up(command, shape, CAUSAL, session.workers)
        source = session.view(shape, True)
        plan = plan_flags(session.workers, "zigzag")
        options = [*CAUSAL, *plan, "--transport=relay"]
        forward, gradients = session.output("residual-forward"), session.output("residual-backward")

        def backward(given, *flags):
            report = call(harness, ring, "backward", given, gradients, [*CAUSAL, *flags])
            check(not report["residual"]["failure"], f"not read: {report['residual']}")
            return figures(report)

        result["forward"] = figures(call(harness, ring, "forward", source, forward, options))
        kept = call(harness, ring, "forward", source, forward, [*options, "--retain=5m"])
        result["forward_kept"] = figures(kept)
        handle = kept["residual"]["handle"]
        check(handle, f"nothing was kept: {kept['residual']}")
        with_forward = session.output("residual-with-forward")
        join(with_forward, source, forward)

        read = [f"--residual={handle}", "--keep_residual"]
        ways = {"backward_residual": (source, "--transport=relay", *read),
                "backward_residual_host_memory": (source, "--transport=host_memory", *read),
                "backward_stateless": (source, "--transport=relay", *plan),
                "backward_stateless_with_forward": (with_forward, "--transport=relay", *plan)}
        for way in ways.values():
            backward(*way)
            verify(harness, ring, source, gradients, CAUSAL, 8, forward)
        runs = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                runs[name].append(backward(*way))
        for name, done in runs.items():
            result[name] = sorted(done, key=lambda run: run["client_seconds"])[len(done) // 2]
        backward(source, "--transport=relay", read[0])  # not kept: their memory is free again
        with_forward.unlink()
        judge(result, shape)
    return run


def judge(result, shape):
    """Bytes that went up, each residual's time over each stateless backward's, and the goals."""
    wide = 2 * shape.seq_len * shape.heads * shape.head_dim
    sent = {"backward_residual": wide, "backward_stateless": shape.bytes(True),
            "backward_stateless_with_forward": shape.bytes(True) + wide + 4 * shape.seq_len * shape.heads}
    for name, wanted in sent.items():
        check(result[name]["bytes_up"] == wanted,
              f"{name}: {result[name]['bytes_up']} bytes up, its tensors have {wanted}")
    seconds = {name: max(result[name]["client_seconds"], 1e-9) for name in (*RESIDUAL, *STATELESS)}
    result["time_ratios"] = {name: {other: round(seconds[name] / seconds[other], 3) for other in STATELESS}
                             for name in RESIDUAL}
    result["goals"] = []
    for name in RESIDUAL:
        ratio = seconds["backward_stateless"] / seconds[name]
        result["goals"].append({"what": f"stateless backward on the relay compared with {name}",
                                "goal": round(STATELESS_TO_RESIDUAL, 3),
                                "value": round(ratio, 3), "met": ratio >= STATELESS_TO_RESIDUAL})
