"""The peer: zigzag ring attention on FA2 kernels (tests/gpu/ring_peer.py), on the same GPUs, next
to our figures of the same call."""

import json
import pathlib
import shutil

import rings
from harness import check


def has_torch(session, python):
    return session.harness.run([python, "-c", "import torch, torch.distributed"])[0] == 0


def sizes(session):
    """Flags for the lengths and heads that this call measures of our ring too; all if it has none."""
    named = {part.split(":")[0] for part in session.args.parts}
    found = [case for name, case in rings.cases(session.profile).items()
             if name in named and case.kind == "causal"]
    if not found:
        return []
    tokens = sorted({case.shape.seq_len for case in found})
    heads = sorted({(case.shape.heads, case.shape.kv_heads) for case in found})
    return ["--tokens=" + ",".join(map(str, tokens)),
            "--heads=" + ",".join(f"{heads}/{kv_heads}" for heads, kv_heads in heads)]


def part(session):
    def run(result):
        python = session.args.peer_python or shutil.which("python3")
        if session.workers < 2:
            result["skipped"] = "needs two workers"
            return
        if not session.gpu and not has_torch(session, python):
            result["skipped"] = "no PyTorch"
            return
        session.ring.down()  # its contexts hold memory and a little of the GPUs' time
        script = pathlib.Path(__file__).resolve().parents[1] / "ring_peer.py"
        report = session.scratch / "peer.json"
        small = sizes(session) if session.gpu else [
            "--device=cpu", "--heads=4/2", "--dim=32", "--tokens=512", "--rounds=1",
            "--check_tokens=128", "--p2p_bytes=65536"]
        session.harness.run_ok([python, script, f"--world_size={session.workers}",
                                f"--json={report}", *small], log_to="programs.log")
        result.update(json.loads(report.read_text()))
        check(result["verified"], "the peer is wrong")
        ours = our_figures(session.harness.summary["parts"])
        for row in result["rows"]:
            key = (row["tokens"], row["heads"], row["kv_heads"], row["pass"])
            row["ours_tflops_per_gpu"] = ours.get(key)
            row["ratio"] = ours[key] and round(ours[key] / row["tflops_per_gpu"], 4) \
                if key in ours else None
        result["goals"] = [{"what": f"{row['pass']} of {row['tokens']} tokens, {row['heads']}/"
                                    f"{row['kv_heads']}: ahead of the peer",
                            "goal": 1, "value": row["ratio"], "met": row["ratio"] >= 1}
                           for row in result["rows"] if row["ratio"] is not None]
    return run


def our_figures(parts):
    """{(tokens, heads, kv_heads, pass): the best of our transports} of this call's causal rings."""
    found = {}
    for part_result in parts.values():
        case = part_result.get("case")
        if not case or case["kind"] != "causal":
            continue
        for command in ("forward", "backward"):
            if figures := part_result.get(command):
                key = (case["tokens"], case["heads"], case["kv_heads"], command)
                found[key] = max(found.get(key, 0.0), figures["ring_tflops_per_gpu"])
    return found
