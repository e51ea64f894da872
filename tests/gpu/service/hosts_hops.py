"""Rates of hops inside a host, in rings of one and of two emulated hosts, by the bundle's mixed_hop_rate."""

import json

# The least rate of a hop inside a host in a ring over two hosts, relative to a ring of that host.
INSIDE = 0.95
ONE = "one host, copy engines"
# Without those over NCCL alone: with shared GPUs, the program leaves them out.
RINGS = (ONE, "two hosts, copy engines and sockets", "two hosts, copy engines and NCCL")
RINGS_OF_NCCL = ("one host, NCCL", "two hosts, NCCL")
SECONDS = 30  # for one kind of ring


def hop_rates(session, steps, result, gpus):
    """Bytes per second of a hop inside a host, by ring. `gpus`: by rank."""
    rings = result["hops"] = {}
    shared = len(set(gpus)) < len(gpus)
    for name in RINGS if shared else RINGS + RINGS_OF_NCCL:
        found = steps.run(f"hop, {name}", SECONDS, session.harness.run_ok, [
            session.bin / "mixed_hop_rate", f"--gpus={','.join(map(str, gpus))}", f"--ring={name}"])
        if found is None:
            continue
        ring = rings[name] = json.loads(found.splitlines()[-1])  # NCCL's log precedes it
        session.harness.log(f"hop inside a host, {name}: {ring}")
        if ONE not in rings or not name.startswith("two hosts"):
            continue
        for pattern in ("pair", "ring"):
            key = f"{pattern}_bytes_per_second"
            ratio = ring[f"{pattern}_of_one_host"] = round(ring[key] / rings[ONE][key], 4)
            if "copy engines" in name:
                result["goals"].append({"what": f"{name}: hop inside a host ({pattern}) of one host's",
                                        "goal": INSIDE, "value": ratio, "met": ratio >= INSIDE})
