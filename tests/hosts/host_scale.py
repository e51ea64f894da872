#!/usr/bin/env python3
"""How a ring of many CPU workers on emulated hosts forms: seconds from a worker's loss or start until the ring of
the others or of all serves, bytes from the coordinator to all workers meanwhile, and each worker's threads and
sockets. Prints a JSON object. Needs root, ip and ss.

    /usr/bin/python3 tests/hosts/host_scale.py --hosts=8 --per_host=8
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e/support"))

from attention import assert_close, make_inputs, reference, run  # noqa: E402
from cluster import WORKER, Cluster  # noqa: E402

def ip(*words, check=True):
    subprocess.run(["ip", *map(str, words)], check=check, capture_output=not check)


class Hosts:
    """Network namespaces on a bridge, which the test reaches as well."""

    def __init__(self, count):
        tag = f"ra{os.getpid() % 10000}"
        self.bridge = f"{tag}b"
        self.names = [f"{tag}s{host}" for host in range(count)]
        self.outside = f"10.{192 + os.getpid() % 32}.0.1"
        self.addresses = [self.outside[:-1] + str(host + 2) for host in range(count)]
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.outside}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for host, (name, address) in enumerate(zip(self.names, self.addresses)):
            ip("netns", "add", name)
            ip("link", "add", f"{tag}v{host}", "type", "veth", "peer", "name", "e0", "netns", name)
            ip("link", "set", f"{tag}v{host}", "master", self.bridge, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "e0")
            ip("-n", name, "link", "set", "e0", "up")

    def close(self):
        for name in self.names:
            ip("netns", "del", name, check=False)
        ip("link", "del", self.bridge, check=False)


class ScaleCluster(Cluster):
    def __init__(self, directory, hosts, per_host):
        self.hosts, self.per_host = hosts, per_host
        super().__init__(directory, workers=0, server_flags=["--single_device_threshold_tokens=128", "--insecure"])

    def start_server(self):
        self.ports = self.ports or {"listen": "0.0.0.0:0", "control": "0.0.0.0:0", "metrics": "127.0.0.1:0"}
        super().start_server()

    def start_worker(self, index, flags=()):
        host = index // self.per_host
        address = self.hosts.addresses[host]
        port = self.ports["control"].rpartition(":")[2]
        self.workers[index] = self._spawn(f"worker-{index}", [
            "ip", "netns", "exec", self.hosts.names[host], WORKER, f"--coordinator={self.hosts.outside}:{port}",
            f"--secret_file={self.secret}", f"--name=worker-{index:03}", f"--host_id=host-{host}", "--device=cpu",
            "--threads=1", "--memory_limit=256MiB", f"--data_listen={address}:0", f"--metrics_listen={address}:0",
            f"--ring_address={address}", "--insecure", *flags])

    def sent_to_workers(self):
        """Bytes that the coordinator has sent on its control connections."""
        port = self.ports["control"].rpartition(":")[2]
        text = subprocess.run(["ss", "-tinH", "state", "established", f"( sport = :{port} )"], check=True,
                              capture_output=True, text=True).stdout
        return sum(map(int, re.findall(r"bytes_sent:(\d+)", text)))

    def threads(self, index):
        status = pathlib.Path(f"/proc/{self.workers[index].pid}/status").read_text()
        return int(re.search(r"^Threads:\s+(\d+)", status, re.M)[1])

    def sockets(self, index):
        folder = pathlib.Path(f"/proc/{self.workers[index].pid}/fd")
        return sum(os.readlink(entry).startswith("socket:") for entry in folder.iterdir())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--per_host", type=int, default=8)
    parser.add_argument("--rings", type=int, default=3, help="measured formings")
    options = parser.parse_args()
    count = options.hosts * options.per_host
    hosts = Hosts(options.hosts)
    found = {"workers": count, "hosts": options.hosts, "seconds_after_a_loss": [], "seconds_after_a_start": [],
             "bytes_to_workers": []}
    with tempfile.TemporaryDirectory() as directory:
        cluster = None
        try:
            cluster = ScaleCluster(directory, hosts, options.per_host)
            cluster.start_worker(0)
            cluster.wait_ready(1)
            alone = cluster.threads(0)
            for index in range(1, count):
                cluster.start_worker(index)
            cluster.wait_ready(count, 180)
            for _ in range(options.rings):
                # A ring without one worker, and with it again.
                generation, sent, begin = cluster.topology().generation, cluster.sent_to_workers(), time.monotonic()
                cluster.kill_worker(count - 1)
                generation = cluster.wait_ready(count - 1, 120, generation).generation
                found["seconds_after_a_loss"].append(round(time.monotonic() - begin, 2))
                found["bytes_to_workers"].append(cluster.sent_to_workers() - sent)
                begin = time.monotonic()
                cluster.start_worker(count - 1)
                cluster.wait_ready(count, 120, generation)
                found["seconds_after_a_start"].append(round(time.monotonic() - begin, 2))
            found["threads_for_the_ring"] = max(cluster.threads(index) for index in range(count - 1)) - alone
            found["sockets"] = max(cluster.sockets(index) for index in range(count - 1))
            inputs = make_inputs(sq=64 * count)
            result = run(cluster.attention, inputs, causal=True, world_size=count)
            few = {name: tensor[:, :200] for name, tensor in inputs.items()}
            assert_close(result.array("out")[:, :200], reference(few, causal=True)["out"], 1e-4)
        finally:
            if cluster is not None:
                cluster.close()
            hosts.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
