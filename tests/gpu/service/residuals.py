"""Forward and backward of a training step: with what the forward leaves on the workers, and without."""

from calls import call, figures, plan_flags, verify
from harness import check
from inputs import Shape
from session import CAUSAL

# The backward that reads a residual beside the one that gets all tensors, over the coordinator.
STATELESS_TO_RESIDUAL = 1 / 0.6


def part(session):
    def run(result):
        session.ring.ensure()
        harness, ring = session.harness, session.ring
        shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"]["64k"])
        for command in ("forward", "backward"):
            session.warm_up(command, shape, CAUSAL, session.workers)
        source = session.view(shape, True)
        options = [*CAUSAL, *plan_flags(session.workers, "zigzag"), "--transport=relay"]
        forward, gradients = session.output("residual-forward"), session.output("residual-backward")

        def backward(*flags):
            way = [] if "--transport=host" in flags else ["--transport=relay"]
            report = call(harness, ring, "backward", source, gradients, [*CAUSAL, *way, *flags])
            check(not report["residual"]["failure"], f"not read: {report['residual']}")
            return report

        plain = call(harness, ring, "forward", source, forward, options)
        kept = call(harness, ring, "forward", source, forward, [*options, "--retain=5m"])
        handle = kept["residual"]["handle"]
        check(handle, f"nothing was kept: {kept['residual']}")
        backward(f"--residual={handle}", "--keep_residual")
        verify(harness, ring, source, gradients, CAUSAL, 8, forward)
        read = backward(f"--residual={handle}", "--keep_residual")
        by_host = backward(f"--residual={handle}", "--transport=host")
        verify(harness, ring, source, gradients, CAUSAL, 8, forward)
        stateless = backward(*plan_flags(session.workers, "zigzag"))
        for name, report in (("forward", plain), ("forward_kept", kept), ("backward_residual", read),
                             ("backward_residual_host_memory", by_host),
                             ("backward_stateless", stateless)):
            result[name] = figures(report)
        dout = 2 * shape.seq_len * shape.heads * shape.head_dim
        check(result["backward_residual"]["bytes_up"] == dout,
              f"{result['backward_residual']['bytes_up']} bytes up, dout has {dout}")
        result["goals"] = []
        for name in ("backward_residual", "backward_residual_host_memory"):
            ratio = (result["backward_stateless"]["client_seconds"]
                     / max(result[name]["client_seconds"], 1e-9))
            result["goals"].append({"what": f"stateless backward on the relay beside {name}",
                                    "goal": round(STATELESS_TO_RESIDUAL, 3),
                                    "value": round(ratio, 3), "met": ratio >= STATELESS_TO_RESIDUAL})
    return run
