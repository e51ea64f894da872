"""A ring over two emulated hosts with two workers and one: the sweep, and the planner's choice compared with forced
rings.

With fewer than three GPUs two workers share one. They compute at half their rate then, which the planner does not
know, so its choice is not judged."""

import hosts
from harness import check
from hosts import Placement, Steps, cluster, sweep
from inputs import Shape
from wire import bench

HOSTS = (0, 0, 1)
# By number of GPUs.
GPUS = {1: (0, 0, 0), 2: (0, 1, 1), 3: (0, 1, 2)}
LENGTHS = ("128k", "64k")
# None: the planner's.
PLANS = {"choice": None,
         "one_host": ["--world_size=2", "--schedule=ring", "--layout=zigzag"],
         "two_hosts": ["--world_size=3", "--schedule=ring", "--layout=zigzag"]}
RUNS = 3
WORST_CHOICE = 1.10


def placement(session):
    gpus = min(3, len(session.gpu_names)) if session.gpu else 0
    return Placement(HOSTS, GPUS.get(gpus, ()))


def measure(session, shape, command, plan):
    transport = "host_memory" if session.gpu else "relay"
    found = bench(session, shape, command, f"--runs={RUNS if session.gpu else 1}", f"--transport={transport}",
                  transport=transport, plan=plan or ["--layout=auto"])
    return {key: found[key] for key in ("ring_seconds", "plan")}


def passes(session, steps, line, result):
    """Times of the planner's choice and of forced rings. `line`: the layout's."""
    judged = session.gpu and placement(session).sharing() == 1
    for length in LENGTHS:
        shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"][length])
        for command in hosts.PASSES:
            found = {}
            for name, plan in PLANS.items():
                key = f"{length} {command} {name}"
                found[name] = line["passes"][key] = steps.run(key, 40, measure, session, shape, command, plan)
                session.harness.log(f"{key}: {found[name]}")
            if not all(found.values()):
                continue
            seconds = {name: times["ring_seconds"] for name, times in found.items()}
            ratio = round(seconds["choice"] / min(seconds.values()), 4)
            line["choice_to_best"][f"{length} {command}"] = ratio
            if judged:
                result["goals"].append({"what": f"{length} {command}: time of the choice / of the best",
                                        "goal": WORST_CHOICE, "value": ratio, "met": ratio <= WORST_CHOICE})


def part(session):
    def run(result):
        shared = session.ring
        shared.down()
        steps = Steps(session.harness, result)
        placed = placement(session)
        name = "two hosts of 2 and 1"
        line = {"passes": {}, "sweep": {}, "choice_to_best": {}}
        result.update(gpus=list(placed.gpus), goals=[], layouts={name: line})
        try:
            with cluster(session, "unequal", placed, "peer+wire" if session.gpu else "wire", line):
                steps.run("sweep", 90, sweep, session, line["sweep"], len(placed.hosts))
                session.harness.log(f"sweep: {line['sweep']}")
                passes(session, steps, line, result)
        finally:
            session.ring = shared
        check(not steps.failures, "; ".join(steps.failures))
    return run
