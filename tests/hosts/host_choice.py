#!/usr/bin/env python3
"""Compares the planner's choice of hosts and schedule with all forced ones, on two emulated hosts of CPU
workers, and predicted with measured times. Prints CSV. Each forced result is verified before it is timed.
Needs root, ip and tc, and an idle machine with a core for each worker.

    /usr/bin/python3 tests/hosts/host_choice.py --rates=10,50,500 >choice.csv
    /usr/bin/python3 tests/hosts/host_choice.py --per_host=2 --cards=2 --rates=50 >choice.csv
"""

import argparse
import csv
import pathlib
import sys
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e/support"))

from attention import make_inputs, run  # noqa: E402
from host_network import HostCluster, HostNetwork, is_available  # noqa: E402
from stubs import attention_pb2 as pb  # noqa: E402

COLUMNS = ["per_host", "cards", "megabits", "link_bytes_per_second", "total_bytes_per_second", "tokens",
           "chosen", "one_host_seconds", "flat_seconds", "double_seconds", "one_host_predicted",
           "flat_predicted", "double_predicted", "choice_to_best", "choice_to_one_host"]


def check_rows(inputs, result, rows=16):
    """Compares sampled rows of a causal forward with fp64 arithmetic."""
    q, k, v = (inputs[name][0].astype(np.float64) for name in "qkv")
    out = result.array("out")[0]
    for row in np.linspace(0, len(q) - 1, rows).astype(int):
        for head in range(q.shape[1]):
            shared = head * k.shape[1] // q.shape[1]
            scores = k[:row + 1, shared] @ q[row, head] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            exact = weights @ v[:row + 1, shared] / weights.sum()
            np.testing.assert_allclose(out[row, head], exact, atol=1e-4, rtol=1e-3)


def forced_plans(per_host):
    """The options of each choice, by name."""
    plans = {"one_host": dict(world_size=per_host),
             "flat": dict(world_size=2 * per_host, schedule=pb.SCHEDULE_RING)}
    if per_host > 1:
        plans["one_host"]["schedule"] = pb.SCHEDULE_RING
        plans["double"] = dict(world_size=2 * per_host, schedule=pb.SCHEDULE_DOUBLE_RING)
    return plans


def name_of(plan, per_host):
    if plan.world_size <= per_host:
        return "one_host"
    return "double" if plan.schedule == pb.SCHEDULE_DOUBLE_RING else "flat"


def measure(cluster, tokens, repeats):
    """The chosen plan, and by forced plan the shortest time and the prediction."""
    inputs = make_inputs(sq=tokens, heads=4, kv_heads=1, dim=64)
    plans = forced_plans(cluster.per_host)
    chosen = name_of(run(cluster.attention, inputs, causal=True).accepted.plan, cluster.per_host)
    times, predicted = {name: [] for name in plans}, {}
    for options in plans.values():
        check_rows(inputs, run(cluster.attention, inputs, causal=True, **options))
    for _ in range(repeats):
        for name, options in plans.items():
            result = run(cluster.attention, inputs, causal=True, **options)
            times[name].append(result.summary.compute_time.ToTimedelta().total_seconds())
            predicted[name] = result.accepted.plan.predicted_compute_time.ToTimedelta().total_seconds()
    return chosen, {name: min(found) for name, found in times.items()}, predicted


class Summary:
    def __init__(self):
        self.choices, self.added, self.predictions = [], [], []

    def add(self, chosen, times, predicted):
        self.choices.append(times[chosen] / min(times.values()))
        self.added.append(times[chosen] / times["one_host"])
        self.predictions += [predicted[name] / times[name] for name in times if name != "one_host"]

    def text(self):
        low, middle, high = np.percentile(self.predictions, [10, 50, 90])
        return (f"{len(self.choices)} pairs of rate and length. choice / best: at most "
                f"{max(self.choices):.3f}, mean {np.mean(self.choices):.3f}; choice / one host: at most "
                f"{max(self.added):.3f}; predicted / measured over two hosts: median {middle:.2f}, "
                f"80% from {low:.2f} to {high:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="10,50,500", help="Mbit/s of a link between the hosts")
    parser.add_argument("--tokens", default="250,500,1000,1500,2000,3000,4000")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each choice, in turn")
    parser.add_argument("--per_host", type=int, default=1, help="workers per host")
    parser.add_argument("--cards", type=int, default=1, help="links between the hosts")
    options = parser.parse_args()
    if not is_available():
        sys.exit("needs root, ip netns and tc tbf")
    out = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    out.writeheader()
    summary = Summary()
    for rate in (int(text) for text in options.rates.split(",")):
        network = HostNetwork(options.cards)
        try:
            network.set_rate(rate)
            with tempfile.TemporaryDirectory() as directory:
                cluster = HostCluster(directory, network, per_host=options.per_host)
                try:
                    workers = cluster.topology().workers
                    row = {"per_host": options.per_host, "cards": options.cards, "megabits": rate,
                           "link_bytes_per_second": "%.4g" % min(
                               w.host_link_bytes_per_second for w in workers
                               if w.host_link_bytes_per_second > 0),
                           "total_bytes_per_second": "%.4g" % workers[0].host_total_bytes_per_second}
                    for tokens in (int(text) for text in options.tokens.split(",")):
                        chosen, times, predicted = measure(cluster, tokens, options.repeats)
                        summary.add(chosen, times, predicted)
                        row.update(tokens=tokens, chosen=chosen,
                                   choice_to_best=f"{summary.choices[-1]:.3f}",
                                   choice_to_one_host=f"{summary.added[-1]:.3f}")
                        row.update({f"{name}_seconds": f"{times[name]:.4f}" for name in times})
                        row.update({f"{name}_predicted": f"{predicted[name]:.4f}" for name in times})
                        out.writerow(row)
                        sys.stdout.flush()
                finally:
                    cluster.close()
        finally:
            network.close()
    print(summary.text(), file=sys.stderr)


if __name__ == "__main__":
    main()
