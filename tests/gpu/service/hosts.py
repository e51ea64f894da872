"""Rings over two emulated hosts of two workers each, compared with rings of one host: rates of hops, times
of verified passes in flat and double rings, equal bits of deterministic passes, and the sweep.

The hosts are parts of this machine: --host_id parts copy engines, and NCCL_HOSTID parts NCCL's hosts. NCCL
and sockets connect them over loopback. So rates between hosts are not those of a network.

Each worker has a GPU if there are four. With two, both hosts use both, in opposite order; with one, all
workers use it, and hops inside a host are copies within its memory. The ring of one host has the same
workers on the same GPUs (--shared_gpu). The workers of a GPU take turns, so a worker's exchange may also be
hidden by the others' kernels, and NCCL's kernels wait for their turn."""

import contextlib
import dataclasses
import itertools
import time

from calls import call, verify
from faults import digest
from harness import PartTimeout, check
from hosts_hops import hop_rates
from inputs import Shape
from peer_memory import moved
from session import CAUSAL
from wire import bench

PASSES = ("forward", "backward")
WORKERS, PER_HOST = 4, 2
# By rank, by number of GPUs. Ranks 1 and 2, and 3 and 0, are neighbours over the host boundary.
GPUS = {4: (0, 1, 2, 3), 2: (0, 1, 1, 0), 1: (0, 0, 0, 0)}
# Memory of a worker, by the number of workers that share its GPU.
MEMORY = {2: "48GiB", 3: "32GiB", 4: "24GiB"}
# (hosts, --ring_transport), by the name of the part after "hosts-".
LAYOUTS = {"one": (1, "peer"), "wire": (2, "peer+wire"), "nccl": (2, "peer+nccl")}
# What may carry the ring's bytes, by --ring_transport on two hosts. CPU workers have sockets only.
CARRIED_BY = {"peer+wire": {"peer", "wire"}, "peer+nccl": {"peer", "nccl"}}
# In order of value. The first is that of the goals.
LENGTHS = {"peer+wire": ("128k", "64k", "32k"), "peer+nccl": ("128k", "64k"), "wire": ("64k",)}
# One GPU computes all.
LENGTHS_ON_ONE = {"peer+wire": ("128k", "64k", "32k"), "peer+nccl": ("64k",)}
RUNS = 5
# The most seconds of a layout, by number of hosts and transport.
LIMITS = {(1, "peer"): 75, (2, "peer+wire"): 120, (2, "peer+nccl"): 80}
SCHEDULES = {"ring": ["--schedule=ring"],
             "double_ring": ["--schedule=double_ring", f"--group_size={PER_HOST}"]}
# The least rate of a double ring over two hosts, relative to a ring of one host.
DOUBLE_RING = {"forward": 0.95, "backward": 0.93}
DETERMINISTIC_RUNS = 3
SWEEPS = {"schedules": ["--cases=5000", "--seed=77"],
          "options": ["--cases=2000", "--options", "--noscore_terms", "--seed=78"],
          "score_terms": ["--cases=2000", "--options", "--seed=79"],
          "probabilities": ["--cases=2000", "--options", "--probabilities", "--seed=80"]}


def gpu_count(session):
    """The GPUs that the workers use."""
    return max((count for count in GPUS if session.gpu and count <= len(session.gpu_names)), default=0)


def gpus_by_rank(session):
    return GPUS.get(gpu_count(session), ())


def lengths_of(session, hosts, transport):
    transport = "peer+wire" if hosts == 1 and session.gpu else transport
    return (LENGTHS_ON_ONE if gpu_count(session) == 1 else LENGTHS)[transport]


@dataclasses.dataclass(frozen=True)
class Placement:
    """The emulated host of each rank, and its GPU. Without GPUs, the workers use CPUs."""
    hosts: tuple
    gpus: tuple = ()

    def sharing(self):
        """The most workers of one GPU."""
        return max((self.gpus.count(gpu) for gpu in self.gpus), default=1)


def placement_of(session, hosts):
    return Placement(tuple(rank * hosts // WORKERS for rank in range(WORKERS)), gpus_by_rank(session))


def started_on_hosts(session, placement):
    """Returns a folder with the bundle's programs, whose workers start as placed, with slots that give worker-N
    rank N."""
    hosts, gpus = (" ".join(map(str, by_rank)) for by_rank in (placement.hosts, placement.gpus))
    folder = session.scratch / f"on-hosts-{hosts}-{gpus}".replace(" ", "")
    if folder.exists():
        return folder
    folder.mkdir()
    for program in session.bin.iterdir():
        if program.name != "ringattn-worker":
            (folder / program.name).symlink_to(program)
    # NCCL regards workers of one host as on different ones if they share a GPU.
    one_gpu = placement.sharing() == len(placement.hosts) > 1
    wrapper = folder / "ringattn-worker"
    wrapper.write_text(
        "#!/bin/sh\n"
        'for flag; do case $flag in --name=worker-*) rank=${flag#--name=worker-} ;; esac; done\n'
        f"host=host$(echo {hosts} | cut -d' ' -f$((rank + 1)))\n"
        f"gpu=$(echo {gpus} | cut -d' ' -f$((rank + 1)))\n"
        f"nccl_host=$host{'-$rank' if one_gpu else ''}\n"
        "for flag; do\n"
        "  shift\n"
        "  case $flag in --device=cuda:*) flag=--device=cuda:$gpu ;; esac\n"
        '  set -- "$@" "$flag"\n'
        "done\n"
        "export NCCL_HOSTID=$nccl_host NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} NCCL_IB_DISABLE=1\n"
        f"exec '{session.bin / 'ringattn-worker'}' \"$@\" --host_id=$host --slot=$rank\n")
    wrapper.chmod(0o755)
    return folder


@contextlib.contextmanager
def cluster(session, name, placement, transport, line, worker_flags=()):
    """A ring of all placed workers; what the workers measured is put into `line`."""
    ring = session.make_ring(name, len(placement.hosts), "cuda" if session.gpu else "cpu", transport)
    if placement.sharing() > 1:
        # The workers of a GPU fit on it, and their kernels do not spin for keys on each other's time.
        worker_flags = [*worker_flags, f"--memory_limit={MEMORY[placement.sharing()]}", "--shared_gpu",
                        "--no_late_keys"]
    ring.up_flags = [f"--bin_dir={started_on_hosts(session, placement)}",
                     *(f"--worker_flag={flag}" for flag in worker_flags)]
    session.ring = ring
    try:
        ring.ensure()
        workers = sorted(ring.topology_or_none()["workers"], key=lambda worker: worker["rank"])
        found = [worker.get("location", {}).get("host") for worker in workers]
        check(found == [f"host{host}" for host in placement.hosts], f"the ranks are on {found}")
        line["up_seconds"] = ring.up_seconds
        line["rates"] = [{key: value for key, value in worker.items() if "_per_second" in key
                          and isinstance(value, (int, float))} for worker in workers]
        # Protobuf's JSON has durations as text: 0.000139s.
        line["host_exchange_overhead_seconds"] = max(
            float(worker.get("host_exchange_overhead", "0s").removesuffix("s")) for worker in workers)
        session.harness.log(f"{name}: rates by rank: {line['rates']}, seconds of an exchange without bytes between "
                            f"hosts: {line['host_exchange_overhead_seconds']}")
        yield ring
        line["ring_bytes"] = moved(ring)
    finally:
        ring.down()


def times(session, length, command, schedule):
    """The figures of a verified pass."""
    shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"][length])
    transport = "host_memory" if session.gpu else "relay"
    found = bench(session, shape, command, f"--runs={RUNS if session.gpu else 1}",
                  f"--transport={transport}", "--deadline=60s", transport=transport,
                  plan=[*SCHEDULES[schedule], f"--world_size={WORKERS}", "--layout=zigzag"])
    return {key: found[key] for key in ("ring_seconds", "ranks")}


def deterministic(session, ring):
    """By schedule: the digests of a forward and a backward, which several runs have in common."""
    source = session.view(Shape(**session.profile["smoke"]), True)
    outputs = {command: session.output(f"hosts-{command}") for command in PASSES}
    found = {}
    for schedule, flags in SCHEDULES.items():
        options = [*CAUSAL, "--deterministic", *flags, f"--world_size={WORKERS}", "--layout=zigzag"]
        bits = set()
        for _ in range(DETERMINISTIC_RUNS):
            for command in PASSES:
                call(session.harness, ring, command, source, outputs[command], options)
            bits.add(tuple(digest(outputs[command]) for command in PASSES))
        verify(session.harness, ring, source, outputs["backward"], CAUSAL, 8, outputs["forward"])
        check(len(bits) == 1, f"deterministic {schedule}: {len(bits)} different results")
        found[schedule] = list(bits.pop())
    return found


def sweep(session, result, world_size=WORKERS):
    # Here because correctness imports session, and parts without the sweep need not.
    from correctness import sweep_cases
    seconds = session.args.sweep_seconds or (5 if session.gpu else 3)
    session.workers, workers = world_size, session.workers
    try:
        for name, flags in SWEEPS.items():
            result[name] = sweep_cases(session, [*flags, f"--budget={seconds}s"])
            check(result[name]["failed"] == 0, f"sweep, {name}: {result[name]['failures'][:3]}")
    finally:
        session.workers = workers


class Steps:
    """Parts of this part, each with a limit; a failure does not stop the others."""

    def __init__(self, harness, result):
        self.harness, self.failures = harness, []
        self.seconds = result["step_seconds"] = {}

    def run(self, name, seconds, function, *arguments):
        whole, begin = self.harness.part_end, time.monotonic()
        self.harness.part_end = min(whole, begin + seconds)
        try:
            return function(*arguments)
        except PartTimeout:
            raise
        except Exception as failure:  # pylint: disable=broad-except
            self.failures.append(f"{name}: {failure!r:.500}")
            self.harness.log(f"     {name} FAILED: {failure!r:.500}")
            return None
        finally:
            self.harness.part_end = whole
            self.seconds[name] = round(time.monotonic() - begin, 1)


def run_layout(session, steps, result, name, hosts, transport):
    line = result["layouts"][name] = session.hosts[name] = {"passes": {}, "sweep": {}}
    schedules = SCHEDULES if hosts > 1 else ("ring",)

    def run():
        placement = placement_of(session, hosts)
        with cluster(session, name.replace(" ", "-").replace("+", "-"), placement, transport, line) as ring:
            line["deterministic"] = steps.run(f"{name}, deterministic", 40, deterministic, session, ring)
            session.harness.log(f"{name}, deterministic: {line['deterministic']}")
            if hosts > 1:
                steps.run(f"{name}, sweep", 60, sweep, session, line["sweep"])
                session.harness.log(f"{name}, sweep: {line['sweep']}")
            lengths = lengths_of(session, hosts, transport)
            for length, command, schedule in itertools.product(lengths, PASSES, schedules):
                key = f"{length} {command} {schedule}"
                line["passes"][key] = steps.run(f"{name}, {key}", 40, times, session, length, command,
                                                schedule)
                session.harness.log(f"{name}, {key}: {line['passes'][key]}")
        carried = CARRIED_BY.get(transport, {transport})
        check(set(line["ring_bytes"]) <= carried, f"the ring's bytes went by {line['ring_bytes']}")

    steps.run(name, LIMITS.get((hosts, transport), 120), run)


def compare(session, result):
    """Rates of passes over two hosts relative to one host."""
    goal_length = lengths_of(session, 1, "wire")[0]
    one = session.hosts.get("one host", {}).get("passes", {})
    result["of_one_host"] = {}
    for name, layout in result["layouts"].items():
        for key, figures in layout["passes"].items():
            length, command, schedule = key.split()
            alone = one.get(f"{length} {command} ring")
            if name == "one host" or not figures or not alone:
                continue
            ratio = round(alone["ring_seconds"] / figures["ring_seconds"], 4)
            result["of_one_host"][f"{name}, {key}"] = ratio
            if session.gpu and schedule == "double_ring" and length == goal_length:
                result["goals"].append({"what": f"{name}: {key} of one host's ring",
                                        "goal": DOUBLE_RING[command], "value": ratio,
                                        "met": ratio >= DOUBLE_RING[command]})
    bits = {name: layout.get("deterministic") for name, layout in session.hosts.items()}
    for schedule in SCHEDULES:
        found = {str(line[schedule]) for line in bits.values() if line}
        check(len(found) <= 1, f"deterministic {schedule}: other bits by another transport: {bits}")


def part(session, only=None):
    """`only`: hops, or a key of LAYOUTS; None: all, in this order."""
    def run(result):
        shared = session.ring
        shared.down()
        steps = Steps(session.harness, result)
        session.harness.log(f"{WORKERS} workers on {gpu_count(session)} GPUs")
        result["gpus"] = list(gpus_by_rank(session))
        result["layouts"], result["goals"] = {}, []
        try:
            if session.gpu and only in (None, "hops"):
                hop_rates(session, steps, result, gpus_by_rank(session))
            for name, (hosts, transport) in LAYOUTS.items():
                if only not in (None, name) or not session.gpu and name == "nccl":
                    continue
                transport = transport if session.gpu else "wire"
                run_layout(session, steps, result, f"two hosts, {transport}" if hosts > 1 else "one host", hosts,
                           transport)
        finally:
            session.ring = shared
            compare(session, result)
        check(not steps.failures, "; ".join(steps.failures))
    return run
