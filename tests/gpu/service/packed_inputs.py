"""Uploads of q, k and v packed into one tensor, compared with the same values apart, over direct streams and over
the relay: the time of the upload stage, calls alternating. All results have the same bits."""

import statistics

import direct
from calls import call, plan_flags, verify
from faults import digest
from harness import check

GOAL = 0.95  # of the rate apart
ROUNDS = 5
# Heads and head dimension: what a token's run in a packed tensor is, 8 KiB and 1 KiB of bf16.
SHAPES = ((32, 128), (8, 64))


def part(session):
    def run(result):
        ring = session.ring
        ring.down()
        ring.up_flags = [direct.LISTEN]
        try:
            ring.ensure()
            result["packed_inputs"] = [rates(session, *shape, way)
                                       for shape in SHAPES for way in ("direct", "relay")]
            result["goals"] = [{
                "what": f"qkv of {line['heads']} heads of {line['head_dim']} by {line['way']}, compared with q, k and v",
                "goal": GOAL, "value": line["of_apart"], "met": line["of_apart"] >= GOAL}
                               for line in result["packed_inputs"]]
        finally:
            ring.down()
            ring.up_flags = []
    return run


def rates(session, heads, head_dim, way):
    harness, ring = session.harness, session.ring
    tokens = session.profile["lengths"]["32k"] * 4096 // (heads * head_dim)  # as many bytes of each shape
    sources = {packing: session.output(f"inputs-{packing}") for packing in ("none", "qkv")}
    for packing, path in sources.items():
        harness.run_ok([ring.cli, "generate", f"--output={path}", "--seed=7", "--dtype=bf16",
                        f"--seq_len={tokens}", f"--heads={heads}", f"--head_dim={head_dim}",
                        f"--packing={packing}"])
    # Hardly any computing.
    options = ["--causal", "--window=16", f"--transport={way}", *plan_flags(ring.workers)]
    seconds, bits, moved = {packing: [] for packing in sources}, set(), 0
    for round_index in range(ROUNDS + 1):
        for packing, path in sources.items():
            output = session.output("packed")
            report = call(harness, ring, "forward", path, output, options)
            moved = report["bytes"][report["transport"]["kind"]]["up"]
            bits.add(digest(output))
            if round_index == 0:
                verify(harness, ring, path, output, ["--causal", "--window=16"], 8)
            else:
                seconds[packing].append(report["stage_seconds"]["upload"])
    check(len(bits) == 1, f"{len(bits)} different results of the same values")
    apart, packed = (statistics.median(seconds[packing]) for packing in ("none", "qkv"))
    return {"heads": heads, "head_dim": head_dim, "way": way, "bytes_up": moved,
            "apart_bytes_per_second": round(moved / apart), "qkv_bytes_per_second": round(moved / packed),
            "of_apart": round(apart / packed, 3)}
