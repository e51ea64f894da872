"""Rates of hops inside a host, in rings of one and of two emulated hosts, by the bundle's mixed_hop_rate."""

import json

# The least rate of a hop inside a host in a ring over two hosts, relative to a ring of that host.
INSIDE = 0.95


def hop_rates(session, result, gpus):
    """Bytes per second of a hop inside a host, by ring. `gpus`: by rank."""
    output = session.harness.run_ok([session.bin / "mixed_hop_rate", f"--gpus={','.join(map(str, gpus))}"],
                                    seconds=120)
    measured = json.loads(output.splitlines()[-1])  # NCCL's log precedes it
    rings = {ring.pop("ring"): ring for ring in measured["rings"]}
    result["hops"] = {"bytes": measured["bytes"], **rings}
    result["goals"] = []
    one = rings["one host, copy engines"]
    for name, ring in rings.items():
        if not name.startswith("two hosts"):
            continue
        for pattern in ("pair", "ring"):
            key = f"{pattern}_bytes_per_second"
            ratio = ring[f"{pattern}_of_one_host"] = round(ring[key] / one[key], 4)
            session.harness.log(f"hop inside a host, {pattern}: {name}: {ring[key] / 1e9:.1f} GB/s, "
                                f"{ratio:.3f} of one host by copy engines")
            if "copy engines" in name:
                result["goals"].append({"what": f"{name}: hop inside a host ({pattern}) of one host's",
                                        "goal": INSIDE, "value": ratio, "met": ratio >= INSIDE})
