#!/usr/bin/env python3
"""Compares the planner's choice of hosts with both forced choices, on two emulated hosts of one CPU worker
each. Prints CSV. Needs root, ip and tc, and an idle machine of two cores.

    /usr/bin/python3 tests/hosts/host_choice.py --rates=10,50,500 >choice.csv
"""

import argparse
import csv
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e/support"))

from attention import make_inputs, run  # noqa: E402
from host_network import HostCluster, HostNetwork, is_available  # noqa: E402


def seconds_of(result):
    return result.summary.compute_time.ToTimedelta().total_seconds()


def measure(cluster, tokens, repeats):
    """The chosen world size, and the shortest run of one and of two hosts."""
    inputs = make_inputs(sq=tokens, heads=4, kv_heads=1, dim=64)
    plan = run(cluster.attention, inputs, causal=True).accepted.plan
    times, predicted = {1: [], 2: []}, {}
    for _ in range(repeats):
        for hosts, found in times.items():
            result = run(cluster.attention, inputs, causal=True, world_size=hosts)
            found.append(seconds_of(result))
            predicted[hosts] = result.accepted.plan.predicted_compute_time.ToTimedelta().total_seconds()
    return plan.world_size, {hosts: min(found) for hosts, found in times.items()}, predicted


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="10,50,500", help="Mbit/s between the hosts")
    parser.add_argument("--tokens", default="250,500,1000,1500,2000,3000,4000")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if not is_available():
        sys.exit("needs root, ip netns and tc tbf")
    out = csv.writer(sys.stdout)
    out.writerow(["megabits", "measured_bytes_per_second", "tokens", "chosen_hosts", "one_host_seconds",
                  "two_hosts_seconds", "predicted_one", "predicted_two", "choice_to_best",
                  "choice_to_one_host"])
    ratios, added = [], []
    for rate in (int(text) for text in options.rates.split(",")):
        network = HostNetwork()
        try:
            network.set_rate(rate)
            with tempfile.TemporaryDirectory() as directory:
                cluster = HostCluster(directory, network)
                try:
                    link = min(w.host_link_bytes_per_second for w in cluster.topology().workers)
                    for tokens in (int(text) for text in options.tokens.split(",")):
                        chosen, times, predicted = measure(cluster, tokens, options.repeats)
                        ratios.append(times[chosen] / min(times.values()))
                        added.append(times[chosen] / times[1])
                        out.writerow([rate, f"{link:.4g}", tokens, chosen, f"{times[1]:.4f}",
                                      f"{times[2]:.4f}", f"{predicted[1]:.4f}", f"{predicted[2]:.4f}",
                                      f"{ratios[-1]:.3f}", f"{added[-1]:.3f}"])
                        sys.stdout.flush()
                finally:
                    cluster.close()
        finally:
            network.close()
    print(f"choice / best: at most {max(ratios):.3f}, mean {sum(ratios) / len(ratios):.3f}; "
          f"choice / one host: at most {max(added):.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
