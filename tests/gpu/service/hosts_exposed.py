"""The time in which GPUs wait for the exchange between two emulated hosts, compared with the timing simulator's
(ring_times), from a quarter to four times the length from which the simulator hides the exchange.

Each worker has a GPU of its own. The network is loopback with one connection per pair of workers, whose rate one core
sets. A queue with a rate (tc tbf) is no alternative: its bursts are as long as these exchanges.

The part hosts-hidden compares the double ring with a ring of one host, at 1.5 times that length."""

import statistics

import hosts
from harness import check
from inputs import Shape
from wire import bench

# Few bytes of K/V per operation, so that short sequences hide the exchange.
SHAPE = {"heads": 8, "kv_heads": 1, "head_dim": 128}
CPU_SHAPE = {"heads": 8, "kv_heads": 1, "head_dim": 64}
# Lengths relative to the hiding length, in order of value.
SHARES = (0.5, 1, 0.25, 2, 4, 0.75)
RUNS = 3
# Longer ones run once: little is exposed there, and a run takes ten seconds.
LONGEST_REPEATED = 1.5
# A double ring hides the exchange from this share on.
HIDDEN_SHARE = 1.5
# Floating point operations per second of a GPU, for the choice of lengths only. Rates are measured.
FLOPS = 5.5e14
CPU_FLOPS = 2e10
# Simulated exposure below this part of the pass is compared by the time of the whole pass.
LEAST_EXPOSED = 0.05
LOW, HIGH = 0.85, 1.15
ONE_CONNECTION = ["--wire_connections=1"]


def placement(session):
    """Two hosts of two workers with four GPUs, otherwise of one."""
    if not session.gpu:
        return hosts.Placement((0, 1))
    per_host = 2 if len(session.gpu_names) >= 4 else 1
    check(len(session.gpu_names) >= 2 * per_host, "the part hosts-exposed needs two GPUs")
    return hosts.Placement(tuple(rank // per_host for rank in range(2 * per_host)), tuple(range(2 * per_host)))


def wire_of(line):
    """The rates between the hosts: of one worker, and of a host."""
    link = min(rank["host_link_bytes_per_second"] for rank in line["rates"]
               if rank.get("host_link_bytes_per_second", 0) > 0)
    return link, max(rank.get("host_total_bytes_per_second", 0) for rank in line["rates"])


def lengths(session, shape, link, workers, shares=SHARES):
    """Tokens by share of the hiding length, in whole blocks of 1,024 per worker (CPU: 64)."""
    pair = 4 * shape["head_dim"] * shape["heads"] / 2
    hiding = 2 * 2 * shape["head_dim"] * shape["kv_heads"] * (FLOPS if session.gpu else CPU_FLOPS) / (pair * link)
    unit = 1024 if session.gpu else 64
    return {share: max(1, round(share * hiding / unit)) * unit * workers for share in shares}


def measure(session, shape, command, schedule, workers, runs):
    """Medians over `runs` of seconds: of the slowest rank's pass, of the busiest rank's calls, and of the difference."""
    found = []
    transport = "host_memory" if session.gpu else "relay"
    flags = [*hosts.SCHEDULES[schedule], f"--world_size={workers}", "--layout=zigzag"]
    for _ in range(runs if session.gpu else 1):
        ranks = bench(session, shape, command, "--runs=2", f"--transport={transport}", transport=transport,
                      plan=flags)["ranks"]
        seconds = max(rank["compute_seconds"] + rank["ring_wait_seconds"] for rank in ranks)
        busy = max(rank["compute_seconds"] for rank in ranks)
        found.append((seconds, busy, seconds - busy))
    return dict(zip(("seconds", "busy_seconds", "exposed_seconds"), map(statistics.median, zip(*found))))


def simulate(session, shape, command, schedule, per_host, busy, link, total, overhead):
    return session.harness.run_json([
        session.bin / "ring_times", f"--tokens={shape.seq_len}", f"--heads={shape.heads}",
        f"--kv_heads={shape.kv_heads}", f"--head_dim={shape.head_dim}", "--hosts=2", f"--per_host={per_host}",
        f"--compute_seconds={busy}", f"--host_link_bytes_per_s={link}", f"--host_total_bytes_per_s={total}",
        f"--host_exchange_overhead_s={overhead}",
        *(["--backward"] if command == "backward" else []),
        *(["--double_ring"] if schedule == "double_ring" else [])])


def compare(session, result, key, measured, simulated):
    """The exposed time relative to the simulator's, or the whole pass where little is exposed."""
    exposed = simulated["exposed_seconds"] > LEAST_EXPOSED * simulated["seconds"]
    what = "exposed_seconds" if exposed else "seconds"
    ratio = round(measured[what] / simulated[what], 4)
    line = result["exposed"][key] = {**measured, "simulated": simulated, "compared": what, "ratio": ratio}
    session.harness.log(f"{key}: {line}")
    if session.gpu:
        result["goals"].append({"what": f"{key}: {what} / simulated", "goal": f"{LOW} to {HIGH}", "value": ratio,
                                "met": LOW <= ratio <= HIGH})


def part(session):
    def run(result):
        shared = session.ring
        shared.down()
        steps = hosts.Steps(session.harness, result)
        placed = placement(session)
        workers, per_host = len(placed.hosts), placed.hosts.count(0)
        result.update(gpus=list(placed.gpus), exposed={}, goals=[], layouts={})
        transport = "peer+wire" if session.gpu else "wire"
        # Kernels that wait for keys on the device would count as busy.
        flags = [*ONE_CONNECTION, *(["--no_late_keys"] if session.gpu else [])]
        sizes = SHAPE if session.gpu else CPU_SHAPE
        line = result["layouts"][f"two hosts of {per_host}"] = {"passes": {}}
        try:
            with hosts.cluster(session, "exposed", placed, transport, line, flags):
                link, total = wire_of(line)
                for share, tokens in lengths(session, sizes, link, workers).items():
                    shape = Shape(**sizes, seq_len=tokens)
                    for command in hosts.PASSES:
                        for schedule in hosts.SCHEDULES if per_host > 1 else ("ring",):
                            key = f"{share} {tokens} {command} {schedule}"
                            measured = steps.run(key, 40, measure, session, shape, command, schedule, workers,
                                                 RUNS if share <= LONGEST_REPEATED else 1)
                            if measured is None:
                                continue
                            session.harness.log(f"{key}: {measured}")
                            simulated = steps.run(f"simulated {key}", 20, simulate, session, shape, command,
                                                  schedule, per_host, measured["busy_seconds"], link, total,
                                                  line["host_exchange_overhead_seconds"])
                            if simulated is not None:
                                compare(session, result, key, measured, simulated)
        finally:
            session.ring = shared
        check(not steps.failures, "; ".join(steps.failures))
    return run


def measured_layout(session, steps, placed, line, schedule, tokens=None):
    """The medians of a layout's passes, and the tokens. None: those of HIDDEN_SHARE for its link."""
    sizes, workers = SHAPE if session.gpu else CPU_SHAPE, len(placed.hosts)
    count = len(set(placed.hosts))
    name = f"hidden-on-{count}"
    with hosts.cluster(session, name, placed, ("peer+wire" if session.gpu else "wire") if count > 1 else
                       "peer" if session.gpu else "wire", line, ONE_CONNECTION):
        if tokens is None:
            tokens, = lengths(session, sizes, wire_of(line)[0], workers, (HIDDEN_SHARE,)).values()
        shape = Shape(**sizes, seq_len=tokens)
        for command in hosts.PASSES:
            key = f"{HIDDEN_SHARE} {command} {schedule}"
            line["passes"][key] = steps.run(f"{name}, {key}", 40, measure, session, shape, command, schedule, workers,
                                            RUNS)
            session.harness.log(f"{name}, {tokens} tokens, {key}: {line['passes'][key]}")
    return tokens


def hidden_part(session):
    def run(result):
        shared = session.ring
        shared.down()
        steps = hosts.Steps(session.harness, result)
        placed = placement(session) if session.gpu else hosts.Placement((0, 0, 1, 1))
        check(placed.hosts.count(0) > 1, "the part hosts-hidden needs four GPUs")
        lines = {"two hosts": {"passes": {}}, "one host": {"passes": {}}}
        result.update(gpus=list(placed.gpus), goals=[], hidden=lines)
        try:
            tokens = measured_layout(session, steps, placed, lines["two hosts"], "double_ring")
            measured_layout(session, steps, hosts.Placement((0,) * len(placed.hosts), placed.gpus), lines["one host"],
                            "ring", tokens)
        finally:
            session.ring = shared
        for command in hosts.PASSES:
            two, one = (lines[name]["passes"].get(f"{HIDDEN_SHARE} {command} {schedule}")
                        for name, schedule in (("two hosts", "double_ring"), ("one host", "ring")))
            if session.gpu and two and one:
                ratio = round(one["seconds"] / two["seconds"], 4)
                result["goals"].append({"what": f"{tokens} tokens, {command}: double ring over two hosts, rate of one "
                                                "host's ring", "goal": hosts.DOUBLE_RING[command], "value": ratio,
                                        "met": ratio >= hosts.DOUBLE_RING[command]})
        check(not steps.failures, "; ".join(steps.failures))
    return run
