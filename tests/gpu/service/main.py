"""See tests/gpu/service.sh."""

import argparse
import atexit
import os
import sys

import correctness
import cuda_memory
import deterministic
import direct
import faults
import hosts
import hosts_exposed
import hosts_unequal
import memory
import packed_inputs
import peer
import peer_memory
import quickstart
import host_memory
import kv
import residuals
import rings
import tables
import wire
from inputs import Shape
from session import Session

# Lengths are of the whole ring. `fault` is a request that computes for long and uploads little: no mask
# and fp32. Names of lengths stand for GPUs' sizes; CPU workers get something small under the same names.
GPU = {"lengths": {"16k": 1 << 14, "32k": 1 << 15, "64k": 1 << 16, "128k": 1 << 17, "256k": 1 << 18,
                   "512k": 1 << 19, "1m": 1 << 20},
       "shape": {"heads": 32, "kv_heads": 8, "head_dim": 128},
       "documents": [1000, 30000, 4000, 12000, 500, 18036],
       "smoke": {"seq_len": 8192, "heads": 8, "kv_heads": 2, "head_dim": 64},
       "fault": {"seq_len": 262144, "heads": 4, "kv_heads": 4, "head_dim": 128, "dtype": "fp32"}}
CPU = {"lengths": {"16k": 1536, "32k": 2048, "64k": 3072, "128k": 4096, "256k": 4608, "512k": 5120,
                   "1m": 6144},
       "shape": {"heads": 8, "kv_heads": 2, "head_dim": 64},
       "documents": [100, 1500, 400, 1072],
       "smoke": {"seq_len": 2048, "heads": 8, "kv_heads": 2, "head_dim": 64},
       "fault": {"seq_len": 16384, "heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": "fp32"}}

# In order of value; what one call's time does not reach is not run. Others must be named.
DEFAULT = ("smoke sweep 64k 32k packed 256k kill stop kill-backward stop-backward 64k-mha peer agree "
           "window full 128k in-flight memory end-to-end quickstart 128k-mha 256k-mha 512k 1m tests")


def parts_of(session):
    """{name: (seconds at most, makes the function that runs it; whether the ring matters)}."""
    found = {"environment": (20, correctness.environment(session), False),
             "smoke": (90, correctness.smoke(session), True),
             "sweep": (150, correctness.sweep(session), True),
             "agree": (90, correctness.agree(session), True),
             "end-to-end": (80, wire.end_to_end(session), True),
             "in-flight": (120, wire.in_flight(session), True),
             "residual": (150, residuals.part(session), True),
             "host-memory": (60, host_memory.part(session, "64k"), True),
             "host-memory-256k": (200, host_memory.part(session, "256k"), True),
             "host-memory-1m": (400, host_memory.part(session, "1m"), True),
             "direct": (90, direct.part(session, "64k"), True),
             "direct-256k": (240, direct.part(session, "256k"), True),
             "direct-1m": (500, direct.part(session, "1m"), True),
             "cuda-memory": (240, cuda_memory.part(session, "64k"), True),
             "cuda-memory-256k": (300, cuda_memory.part(session, "256k"), True),
             "kv": (400, kv.part(session), True),
             "packed-inputs": (200, packed_inputs.part(session), True),
             "deterministic": (150, deterministic.part(session), True),
             "peer-memory": (200, peer_memory.part(session), False),
             "hosts": (290, hosts.part(session), False),
             **{f"hosts-{name}": (130, hosts.part(session, name), False) for name in ("hops", *hosts.LAYOUTS)},
             "hosts-exposed": (200, hosts_exposed.part(session), False),
             "hosts-hidden": (150, hosts_exposed.hidden_part(session), False),
             "hosts-unequal": (200, hosts_unequal.part(session), False),
             "memory": (150, memory.part(session), False),
             "quickstart": (90, quickstart.part(session), False),
             "peer": (150, peer.part(session), False),
             "tests": (110, correctness.tests(session), False)}
    for how in ("kill", "stop"):
        found[how] = (90, faults.lose_a_worker(session, how, "forward"), True)
        found[f"{how}-backward"] = (120, faults.lose_a_worker(session, how, "backward"), True)
    for name, case in rings.cases(session.profile).items():
        gibi_elements = case.shape.bytes(True) / 2**31
        for suffix, commands in (("", ("forward", "backward")), (":forward", ("forward",)),
                                 (":backward", ("backward",))):
            found[name + suffix] = (60 + 30 * gibi_elements,
                                    rings.ring_part(session, name, case, commands), True)
    return found


def parse(names):
    parser = argparse.ArgumentParser(
        prog="service.sh", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measures and judges the service on GPU workers.",
        epilog="parts, and those that ring passes consist of:\n  " + " ".join(names)
               + "\n\nby default, in this order:\n  environment " + DEFAULT)
    parser.add_argument("--bundle", default=".bundle/ringattn")
    parser.add_argument("--cpu", action="store_true", help="CPU workers and small requests")
    parser.add_argument("--workers", type=int, default=0, help="GPUs, or 3 with --cpu")
    parser.add_argument("--seconds", type=float, default=540, help="for all parts together")
    parser.add_argument("--sweep_seconds", type=int, default=0)
    parser.add_argument("--only", default="", help="PART,...: these, in this order")
    parser.add_argument("--ring_transport", default="",
                        help="of the workers; with several, a,b, the parts that use the ring "
                             "run on each of them")
    parser.add_argument("--worker_flag", action="append", default=[],
                        help="=FLAG of ringattn-worker, of every worker; may be repeated")
    parser.add_argument("--scratch", default="", help="folder for inputs and outputs, 60 GB at most")
    parser.add_argument("--peer_python", default="", help="a python3 that has PyTorch")
    args = parser.parse_args()
    args.parts = [part for part in (args.only.replace(",", " ") or DEFAULT).split()
                  if part != "environment"]
    for part in args.parts:
        if part not in names:
            parser.error(f"--only: is {part}, must be one of {', '.join(names)}")
    return args


def order_inputs(session):
    """Queues the inputs that the selected parts may need."""
    profile, parts = session.profile, session.args.parts  # warm-ups are shorter than what follows
    session.inputs.want(Shape(**profile["smoke"]), True)
    for name, case in rings.cases(profile).items():
        if any(part.split(":")[0] == name for part in parts):
            session.inputs.want(case.shape, True)
            for shape in rings.alone(case, session.workers).values():
                session.inputs.want(shape, True)
    if any(part.split("-")[0] in ("kill", "stop", "in") for part in parts):
        fault = Shape(**profile["fault"])
        session.inputs.want(fault, False)
        session.inputs.want(fault.share(2), True)
    if "deterministic" in parts:
        session.inputs.want(Shape(**profile["shape"], seq_len=profile["lengths"]["16k"]), True)
    if "in-flight" in parts or "residual" in parts or "cuda-memory" in parts or "peer-memory" in parts:
        session.inputs.want(Shape(**profile["shape"], seq_len=profile["lengths"]["64k"]), True)
    if "memory" in parts or "cuda-memory-256k" in parts:
        session.inputs.want(Shape(**profile["shape"], seq_len=profile["lengths"]["256k"]), True)
    session.inputs.start()


def schedule(session, parts):
    """(name in the summary, transport or None, seconds, function). With several transports the parts
    that use the ring come once for each, all of the first before all of the second."""
    transports = session.args.ring_transport.split(",")
    plan = [("environment", None, *parts["environment"][:2])]
    rest = []
    for index, transport in enumerate(transports):
        for name in session.args.parts:
            seconds, function, uses_ring = parts[name]
            if uses_ring:
                suffix = f"@{transport}" if len(transports) > 1 else ""
                plan.append((name + suffix, transport, seconds, function))
            elif index == 0:
                (plan if len(transports) == 1 else rest).append((name, None, seconds, function))
    return plan + rest


def run_all(session, plan):
    all_ok = True
    while plan:
        name, transport, seconds, function = plan.pop(0)
        if transport is not None and transport != session.ring.transport:
            session.ring.down()
            session.ring.transport = transport
        session.part = name
        ok = session.harness.part(name, seconds, function)
        all_ok = all_ok and ok
        if name == "smoke" and not ok:
            # After a failed smoke test the smaller programs are the most informative.
            plan.sort(key=lambda part: part[0] != "tests")
    return all_ok


def main():
    # The parts' names do not depend on the session, which itself needs the arguments.
    args = parse(list(parts_of(argparse.Namespace(profile=GPU))))
    session = Session(args, CPU if args.cpu else GPU, os.environ["OUT"])
    atexit.register(session.close)
    order_inputs(session)
    ok = run_all(session, schedule(session, parts_of(session)))
    (session.harness.out / "summary.md").write_text(tables.markdown(session.harness.summary))
    print(tables.markdown(session.harness.summary, brief=True), flush=True)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
