"""Results against the fp64 oracle, and of different devices against one another."""

import array
import json
import math
import re
import struct

from calls import call, plan_flags, verify
from harness import check
from inputs import Shape
from session import CAUSAL


def environment(session):
    def run(result):
        harness = session.harness
        result["gpus"] = session.gpu_names
        result["workers"] = session.workers
        result["nccl"] = session.nccl
        result["ring_transport"] = session.args.ring_transport or "the default"
        result["bundle"] = (session.bundle / "MANIFEST").read_text()
        if session.gpu:
            harness.run(["nvidia-smi"], log_to="environment.txt")
            harness.run(["nvidia-smi", "topo", "-m"], log_to="environment.txt")
            harness.run(["df", "-h", session.scratch, "/dev/shm"], log_to="environment.txt")
            check(session.gpu_names, "no GPU")
    return run


def tests(session):
    """Runs the test programs of the bundle; a failure does not stop the others."""
    def run(result):
        failed = []
        if not session.gpu:
            result["skipped"] = "they need GPUs"
            return
        session.ring.down()  # they measure, and want the memory
        for name, seconds in (("cuda_device_test", 40), ("peer_ring_test", 40), ("nccl_ring_test", 60)):
            if not (session.bin / name).exists():
                result[name] = "not in the bundle"
                failed.append(name)
                continue
            try:
                code, text = session.harness.run([session.bin / name], seconds=seconds,
                                                 log_to="programs.log")
            except Exception as error:  # pylint: disable=broad-except
                code, text = -1, str(error)
            result[name] = {
                "exit_code": code,
                "passed": len(re.findall(r"^\[       OK \]", text, re.M)),
                "failed": sorted(set(re.findall(r"^\[  FAILED  \] (\S+?),? (?:where .*)?\(", text, re.M))),
                "said": re.findall(r"^(?:small groups|\d+ CTAs|abort).*$", text, re.M)}
            if code != 0:
                failed.append(name)
        check(not failed, f"failed: {failed}")
    return run


def smoke(session):
    def run(result):
        session.ring.ensure()
        result["up_seconds"] = session.ring.up_seconds
        topology = session.ring.topology_or_none() or {}
        result["devices"] = [worker.get("device") for worker in topology.get("workers", [])]
        source = session.view(Shape(**session.profile["smoke"]), True)
        forward, backward = session.output("smoke-forward"), session.output("smoke-backward")
        for command, output in (("forward", forward), ("backward", backward)):
            options = [*CAUSAL, *plan_flags(session.workers, "zigzag")]
            call(session.harness, session.ring, command, source, output, options)
        verify(session.harness, session.ring, source, backward, CAUSAL, rows=32, forward=forward)
    return run


def sweep(session):
    def run(result):
        session.ring.ensure()
        seconds = session.args.sweep_seconds or (8 if not session.gpu else 40)
        result.update(sweep_cases(session, ["--cases=5000", f"--budget={seconds}s"]))
        # Options that only some requests have.
        options = ["--cases=2000", "--options", "--noscore_terms", "--seed=78", f"--budget={seconds}s"]
        result["options"] = sweep_cases(session, options)
        terms = ["--cases=2000", "--options", "--seed=79", f"--budget={seconds}s"]
        result["score_terms"] = sweep_cases(session, terms)
        rows = ["--cases=2000", "--options", "--probabilities", "--seed=80", f"--budget={seconds}s"]
        result["probabilities"] = sweep_cases(session, rows)
        failed = sum(part["failed"] for part in (result, *(
            result[key] for key in ("options", "score_terms", "probabilities"))))
        check(failed == 0, f"{failed} cases failed")
    return run


def sweep_cases(session, flags):
    code, text = session.harness.run(
        [session.bin / "service_sweep", f"--server={session.ring.address}", *flags,
         f"--max_world_size={session.workers}", "--threads=4"], log_to="programs.log")
    match = re.search(r"service sweep: (\d+) cases, (\d+) failed", text)
    check(match and (code == 0) == (match[2] == "0"), f"exit {code}: {text[-500:]}")
    return {"summary": text.strip().splitlines()[-2:],
            "failures": re.findall(r"^FAILED.*$", text, re.M)[:20],
            "cases": int(match[1]), "failed": int(match[2])}


# --------------------------------------------------------------------- devices against one another

def read_tensors(path):
    """{name: (dimensions, values as Python floats)} of a small safetensors file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            wide = array.array("I", (value << 16 for value in array.array("H", raw)))
            raw = wide.tobytes()
        else:
            check(entry["dtype"] == "F32", f"{name} is {entry['dtype']}")
        found[name] = entry["shape"], array.array("f", raw)
    return found


def distances(a, b):
    """{name: the largest over heads of the 2-norm of a - b}; of lse the largest difference. NaN where
    one of two is a NaN."""
    check(a.keys() == b.keys(), f"{sorted(a)} and {sorted(b)}")
    found = {}
    for name, (shape, values) in a.items():
        others = b[name][1]
        check(b[name][0] == shape, f"{name} has shapes {shape} and {b[name][0]}")
        if name == "lse":
            worst = 0.0
            for x, y in zip(values, others):
                # Equal infinities: a row without keys.
                worst = worst if x == y else max(worst, abs(x - y)) if x - y == x - y else math.nan
            found[name] = worst
            continue
        heads, dim = shape[-2], shape[-1]
        sums = [0.0] * heads
        for row in range(len(values) // dim):
            at = row * dim
            sums[row % heads] += sum((x - y) ** 2 for x, y in zip(values[at:at + dim],
                                                                  others[at:at + dim]))
        found[name] = math.sqrt(math.nan if any(s != s for s in sums) else max(sums))
    return found


def agree(session):
    """The same requests on all workers, on one, and on CPU workers. Each is judged whole against fp64;
    then the results may differ from one another by no more than that bound allows one of them: the
    largest difference of a head in 2-norm against the norm bound (which is the head's own with one head;
    with several it may be the whole tensor's), lse against an element's."""
    heads_and_types = [(1, 1, "bf16"), (4, 2, "bf16"), (1, 1, "fp32")]
    masks = {"causal": CAUSAL, "full": [], "window": ["--causal", "--window=100,0"]}

    def run(result):
        session.ring.ensure()
        other = session.make_ring("cpu-state", 2, "cpu")
        other.ensure()
        try:
            result["cases"] = {}
            for heads, kv_heads, dtype in heads_and_types:
                for mask_name, mask in masks.items():
                    shape = Shape(480, heads, kv_heads, 128 if heads == 1 else 64, dtype)
                    name = f"{dtype} {heads}/{kv_heads} {mask_name}"
                    result["cases"][name] = compare(session, other, shape, mask, name)
        finally:
            other.down()
        worst = max(((value["ratio"], name, pair) for name, case in result["cases"].items()
                     for pair, value in case.items()), default=None)
        check(worst is not None, "nothing was compared")
        result["worst"] = {"ratio": worst[0], "where": f"{worst[1]}, {worst[2]}"}
    return run


def compare(session, other, shape, mask, name):
    source = session.view(shape, True)
    places = {"ring": (session.ring, plan_flags(session.workers)),
              "one": (session.ring, plan_flags(1)),
              "cpu": (other, plan_flags(other.workers))}
    tensors, bounds = {}, {}
    for place, (ring, plan) in places.items():
        forward, backward = session.output(f"{place}-forward"), session.output(f"{place}-backward")
        for command, output in (("forward", forward), ("backward", backward)):
            call(session.harness, ring, command, source, output, [*mask, *plan])
        judged = verify(session.harness, ring, source, backward, mask, 16, forward)["tensors"]
        check(set(judged) == {"out", "lse", "dq", "dk", "dv"}, f"{name}: judged {sorted(judged)}")
        check(judged["dq"]["rows"] == shape.seq_len * shape.heads, f"{name}: judged by samples only")
        bounds[place] = {tensor: report["norm" if "norm" in report else "element"]["bound"]
                         for tensor, report in judged.items()}
        tensors[place] = {**read_tensors(forward), **read_tensors(backward)}
    found = {}
    for a, b in (("ring", "one"), ("ring", "cpu"), ("one", "cpu")):
        ratios = {tensor: distance / max(min(bounds[a][tensor], bounds[b][tensor]), 1e-30)
                  for tensor, distance in distances(tensors[a], tensors[b]).items()}
        for tensor, ratio in ratios.items():
            check(ratio <= 1, f"{name}: {tensor} of {a} and {b} differ by {ratio:.3g} of the bound")
        worst = max(ratios, key=ratios.get)
        found[f"{a} and {b}"] = {"ratio": round(ratios[worst], 4), "tensor": worst}
    return found
