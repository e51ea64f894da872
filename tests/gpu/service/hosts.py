"""Rings over two emulated hosts of two GPUs each: the rates of their hops, and verified passes with
copy engines inside the hosts and NCCL or sockets between them, compared with NCCL for all hops. The
hosts are parts of this machine: --host_id parts copy engines, and NCCL_HOSTID parts NCCL's hosts. NCCL
and sockets connect them over loopback. So rates between hosts are not those of a network."""

import json

from calls import call, figures, plan_flags, verify
from faults import digest
from harness import check
from inputs import Shape
from peer_memory import moved
from session import CAUSAL

PASSES = ("forward", "backward")
WORKERS = 4
# The least rate of a hop inside a host in a ring over two hosts, relative to a ring of that host.
INSIDE = 0.95
# By --ring_transport: what may carry the ring's bytes.
CARRIED_BY = {"nccl": {"nccl"}, "peer+nccl": {"peer", "nccl"}, "peer+wire": {"peer", "wire"}}


def started_on_hosts(session):
    """Returns a folder with the bundle's programs, whose workers 0 and 1 start on one emulated host and the
    others on a second one."""
    folder = session.scratch / "on-hosts"
    if folder.exists():
        return folder
    folder.mkdir()
    for program in session.bin.iterdir():
        if program.name != "ringattn-worker":
            (folder / program.name).symlink_to(program)
    wrapper = folder / "ringattn-worker"
    wrapper.write_text(
        "#!/bin/sh\nhost=host1\n"
        'for flag in "$@"; do case $flag in --name=worker-[01]) host=host0 ;; esac; done\n'
        "export NCCL_HOSTID=$host NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} NCCL_IB_DISABLE=1\n"
        f"exec '{session.bin / 'ringattn-worker'}' \"$@\" --host_id=$host\n")
    wrapper.chmod(0o755)
    return folder


def hop_rates(session, result):
    """The bundle's mixed_hop_rate: bytes per second of a hop inside a host, by ring."""
    output = session.harness.run_ok([session.bin / "mixed_hop_rate"], seconds=120)
    measured = json.loads(output.splitlines()[-1])  # NCCL's log precedes it
    rings = {ring.pop("ring"): ring for ring in measured["rings"]}
    result["hops"] = {"bytes": measured["bytes"], **rings}
    one = rings["one host, copy engines"]
    for pattern in ("pair", "ring"):
        key = f"{pattern}_bytes_per_second"
        for name in ("two hosts, copy engines and NCCL", "two hosts, NCCL"):
            ratio = rings[name][key] / one[key]
            rings[name][f"{pattern}_of_one_host"] = round(ratio, 4)
            session.harness.log(f"hop inside a host, {pattern}: {name}: {rings[name][key] / 1e9:.1f} GB/s, "
                                f"{ratio:.3f} of one host by copy engines")
        ratio = rings["two hosts, copy engines and NCCL"][f"{pattern}_of_one_host"]
        result["goals"].append({"what": f"hop inside a host ({pattern}) of one host's", "goal": INSIDE,
                                "value": ratio, "met": ratio >= INSIDE})


def run_on(session, transport, runs=3):
    """A cluster on both hosts: verified passes of 64K tokens and the fastest of `runs` each."""
    ring = session.make_ring(f"hosts-{transport.replace('+', '-')}", WORKERS, "cuda", transport)
    ring.up_flags = [f"--bin_dir={started_on_hosts(session)}"]
    session.ring = ring
    shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"]["64k"])
    source, plan = session.view(shape, True), [*CAUSAL, *plan_flags(WORKERS, "zigzag")]
    line = {}
    try:
        ring.ensure()
        hosts = {worker.get("location", {}).get("host") for worker in ring.topology_or_none()["workers"]}
        check(len(hosts) == 2, f"the workers are on {hosts}")
        outputs = {command: session.output(f"hosts-{transport.replace('+', '-')}-{command}") for command in PASSES}
        for command in PASSES:
            seconds = [figures(call(session.harness, ring, command, source, outputs[command], plan))
                       ["ring_seconds"] for _ in range(runs)]
            line[f"{command}_ring_seconds"] = min(seconds)
        line["forward_digest"] = digest(outputs["forward"])
        verify(session.harness, ring, source, outputs["forward"], CAUSAL, 8)
        verify(session.harness, ring, source, outputs["backward"], CAUSAL, 8, outputs["forward"])
        line["ring_bytes"] = moved(ring)
        check(set(line["ring_bytes"]) == CARRIED_BY[transport],
              f"--ring_transport={transport}: the ring's bytes went by {line['ring_bytes']}")
        session.harness.log(f"--ring_transport={transport}: {line}")
        return line
    finally:
        ring.down()


def part(session):
    def run(result):
        if not session.gpu or session.workers < WORKERS:
            result["skipped"] = f"needs {WORKERS} GPUs"
            return
        shared = session.ring
        shared.down()
        result["goals"] = []
        try:
            hop_rates(session, result)
            lines = {transport: run_on(session, transport) for transport in CARRIED_BY}
            result["passes"] = lines
            # A backward pass adds gradients of queries in no fixed order.
            for transport, line in lines.items():
                check(line["forward_digest"] == lines["nccl"]["forward_digest"],
                      f"forward: {transport} gives other bits than NCCL alone")
        finally:
            session.ring = shared
    return run
