"""Emulated hosts: network namespaces that reach the test by one link each and one another by other
links, which have a rate. Needs root, ip and tc."""

import itertools
import os
import shutil
import subprocess

from cluster import WORKER, Cluster

# Requests above this many tokens need more than one device.
THRESHOLD = 128


def is_available():
    """Whether this machine can make namespaces with shaped links."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "tc", "sysctl")):
        return False
    name = f"ra{os.getpid() % 10000}probe"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    shapes = subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "tbf", "rate",
                             "100mbit", "burst", "16kb", "latency", "50ms"], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return shapes.returncode == 0


def _run(*command):
    subprocess.run([str(part) for part in command], check=True)


class HostNetwork:
    """Two hosts with `cards` network cards each. Control and tensor traffic is not shaped; the ring's
    traffic between the hosts is, by card."""

    def __init__(self, cards=1):
        tag = f"ra{os.getpid() % 10000}"
        # Two pytest processes of one run differ in the last bit.
        lane = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        subnet = 64 + os.getpid() % 64 * 2 + lane % 2
        self.names = [f"{tag}h0", f"{tag}h1"]
        # The test's own end of each host's first link, and the host's.
        self.outside = [f"10.{subnet}.{host}.1" for host in range(2)]
        self.inside = [f"10.{subnet}.{host}.2" for host in range(2)]
        # By card and host.
        self.cards = [[f"10.{subnet}.{9 + card}.{host + 1}" for host in range(2)]
                      for card in range(cards)]
        self.ring = self.cards[0]
        self._links = [f"{tag}l{host}" for host in range(2)]
        try:
            for host, name in enumerate(self.names):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "link", "add", self._links[host], "type", "veth", "peer", "name", "c0",
                     "netns", name)
                _run("ip", "addr", "add", f"{self.outside[host]}/24", "dev", self._links[host])
                _run("ip", "link", "set", self._links[host], "up")
                _run("ip", "-n", name, "addr", "add", f"{self.inside[host]}/24", "dev", "c0")
                _run("ip", "-n", name, "link", "set", "c0", "up")
                _run("ip", "-n", name, "route", "add", "default", "via", self.outside[host])
            for card, addresses in enumerate(self.cards):
                _run("ip", "link", "add", f"e{card}", "netns", self.names[0], "type", "veth", "peer",
                     "name", f"e{card}", "netns", self.names[1])
                for address, name in zip(addresses, self.names):
                    _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", f"e{card}")
                    _run("ip", "-n", name, "link", "set", f"e{card}", "up")
            for name in self.names:
                # Acknowledgements wait in the queue of the other direction's data. A window shorter than a block
                # would then halve the rate.
                for buffer in ("rmem", "wmem"):
                    _run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.tcp_{buffer}=4096 4194304 8388608")
        except BaseException:
            self.close()
            raise

    def set_rate(self, megabits):
        """Limits each link between the hosts, each way, to at most 500 Mbit/s. None: no limit.

        The queue holds what TCP sends ahead: the link has a rate but loses nothing.
        """
        # The link has one queue, in which acknowledgements and short messages wait for the data of all connections.
        # With a block of 256 KiB in it, a measured rate was sometimes half of the link's. Network cards serve
        # connections in turn. So a connection may queue what the link sends in 4 ms, and at least two segments.
        queued_bytes = 4 << 20 if megabits is None else max(32 << 10, megabits * 500)
        for host in range(2):
            _run(*self.command(host, ["sysctl", "-qw", f"net.ipv4.tcp_limit_output_bytes={queued_bytes}"]))
        for name, card in itertools.product(self.names, range(len(self.cards))):
            if megabits is None:
                subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", f"e{card}", "root"],
                               capture_output=True)
                continue
            # tbf splits a segment above its burst into packets of 1,500 bytes, which takes three times as much
            # processor time for each byte. Network cards divide segments themselves.
            _run("ip", "-n", name, "link", "set", "dev", f"e{card}", "gso_max_size", "15000")
            _run("tc", "-n", name, "qdisc", "replace", "dev", f"e{card}", "root", "tbf", "rate",
                 f"{megabits}mbit", "burst", "16kb", "latency", "2000ms")

    def cut(self, hosts=(0, 1)):
        """Loses what these hosts send to the other one by the first card, in silence. Control traffic
        passes."""
        for host in hosts:
            # Frames to a station that does not exist.
            _run("ip", "-n", self.names[host], "neigh", "replace", self.ring[1 - host], "lladdr",
                 "02:00:00:00:00:01", "dev", "e0", "nud", "permanent")

    def heal(self):
        """Undoes cut()."""
        for host, name in enumerate(self.names):
            subprocess.run(["ip", "-n", name, "neigh", "del", self.ring[1 - host], "dev", "e0"],
                           capture_output=True)

    def command(self, host, arguments):
        """The command line that runs `arguments` on a host."""
        return ["ip", "netns", "exec", self.names[host], *arguments]

    def close(self):
        for link in self._links:
            subprocess.run(["ip", "link", "del", link], capture_output=True)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class HostCluster(Cluster):
    """A coordinator outside of both hosts, and workers on each: worker-0 and so on are those of the
    first host. Workers of a host use its cards in turn."""

    def __init__(self, directory, network, server_flags=(), worker_flags=(), members=None, per_host=1,
                 by_interface=False):
        """Waits for a ring of `members`. None: all workers. `by_interface`: workers get the names of the
        cards instead of an address."""
        self.network = network
        self.by_interface = by_interface
        self.per_host = per_host
        super().__init__(directory, workers=0, worker_flags=worker_flags, server_flags=[
            f"--single_device_threshold_tokens={THRESHOLD}", "--insecure", *server_flags])
        try:
            for index in range(2 * per_host):
                self.start_worker(index)
            self.wait_ready(members or 2 * per_host)
        except BaseException:
            self.close()
            raise

    def start_server(self):
        self.ports = self.ports or {"listen": "0.0.0.0:0", "control": "0.0.0.0:0",
                                    "metrics": "127.0.0.1:0"}
        super().start_server()

    def start_worker(self, index, flags=()):
        host, card = index // self.per_host, index % self.per_host % len(self.network.cards)
        name, inside = f"worker-{index}", self.network.inside[host]
        port = self.ports["control"].rpartition(":")[2]
        ring = [f"--ring_address={self.network.cards[card][host]}"]
        if self.by_interface:
            names = ",".join(f"e{number}" for number in range(len(self.network.cards)))
            ring = [f"--ring_interface={names}", f"--local_rank={index % self.per_host}",
                    f"--local_workers={self.per_host}"]
        self.workers[index] = self._spawn(name, self.network.command(host, [
            WORKER, f"--coordinator={self.network.outside[host]}:{port}",
            f"--secret_file={self.secret}", f"--name={name}", f"--host_id=host-{host}",
            "--device=cpu", "--threads=1", f"--data_listen={inside}:0",
            f"--metrics_listen={inside}:0", *ring, "--insecure", *self.worker_flags, *flags]))
