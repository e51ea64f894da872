"""A coordinator and its workers as real processes on loopback."""

import contextlib
import json
import os
import pathlib
import random
import secrets
import signal
import socket
import subprocess
import time
import urllib.request

import grpc

from stubs import (ROOT, admin_pb2, admin_pb2_grpc, attention_pb2, attention_pb2_grpc, cluster_pb2,
                   cluster_pb2_grpc)

BIN = pathlib.Path(os.environ.get("RINGATTN_BIN", ROOT / "bazel-bin"))
SERVER = BIN / "server/ringattn-server"
WORKER = BIN / "worker/ringattn-worker"
CLI = BIN / "client/ringattn"

# Larger than any chunk a test asks for.
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 32 << 20),
                   ("grpc.use_local_subchannel_pool", 1)]


def wait_until(condition, seconds, what):
    """Polls `condition` until it returns something true; its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


def free_port(count=1):
    """Returns the first of `count` consecutive free ports outside the system's ephemeral range. A
    client's connection may take a free port inside that range, and a client that dials such a port
    while no process listens there may be connected to itself."""
    first = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = random.SystemRandom().randrange(10000, max(first, 20000) - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for each in range(port, port + count):
                held.enter_context(socket.create_server(("127.0.0.1", each)))
            return port
    raise AssertionError("no port is free")


class Cluster:
    def __init__(self, directory, workers=4, server_flags=(), worker_flags=(), dial=None):
        """`dial(address)`: a channel to the public listener; plain text unless given."""
        self.dial = dial or (lambda address: grpc.insecure_channel(address, CHANNEL_OPTIONS))
        self.directory = pathlib.Path(directory)
        self.server_flags = list(server_flags)
        self.worker_flags = list(worker_flags)
        self.secret = self.directory / "secret"
        self.secret.write_text(secrets.token_hex(16))
        self.secret.chmod(0o600)
        self.server = None
        self.workers = {}
        self.logs = []
        self.ports = None
        try:
            self.start_server()
            for index in range(workers):
                self.start_worker(index)
            if workers:
                self.wait_ready(workers)
        except BaseException:
            self.close()
            raise

    # -------------------------------------------------------------- processes

    def _spawn(self, name, command):
        log = open(self.directory / f"{name}.log", "ab")
        self.logs.append(log)
        return subprocess.Popen([str(part) for part in command], stdout=log, stderr=log,
                                stdin=subprocess.DEVNULL)

    def start_server(self):
        port_file = self.directory / "server.json"
        port_file.unlink(missing_ok=True)
        old = self.ports or {"listen": "127.0.0.1:0", "control": "127.0.0.1:0",
                             "metrics": "127.0.0.1:0"}
        self.server = self._spawn("server", [
            SERVER, f"--listen={old['listen']}", f"--control_listen={old['control']}",
            f"--metrics_listen={old['metrics']}", f"--secret_file={self.secret}",
            f"--port_file={port_file}", *self.server_flags])
        self.ports = json.loads(wait_until(
            lambda: port_file.exists() and port_file.read_text().strip(), 30, "server's ports"))
        self.channel = self.dial(self.address)
        self.attention = attention_pb2_grpc.AttentionServiceStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterServiceStub(self.channel)

    def start_worker(self, index, flags=()):
        name = f"worker-{index}"
        port_file = self.directory / f"{name}.json"
        port_file.unlink(missing_ok=True)
        self.workers[index] = self._spawn(name, [
            WORKER, f"--coordinator={self.control_address}", f"--secret_file={self.secret}",
            f"--name={name}", "--device=cpu", "--threads=1", f"--port_file={port_file}",
            *self.worker_flags, *flags])

    @property
    def control_address(self):
        """Where workers find the coordinator."""
        return self.ports["control"]

    def worker_ports(self, index):
        return json.loads((self.directory / f"worker-{index}.json").read_text())

    def worker_metric(self, index, series):
        """The value of a worker's series, which is a name with its labels as exported; 0 if there is none."""
        url = f"http://{self.worker_ports(index)['metrics']}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(series + " "))

    def kill_worker(self, index):
        self.workers[index].send_signal(signal.SIGKILL)
        self.workers[index].wait()

    def stop_worker(self, index):
        self.workers[index].send_signal(signal.SIGSTOP)

    def kill_server(self):
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()
        self.channel.close()

    def close(self):
        for process in filter(None, [*self.workers.values(), self.server]):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
        self.channel.close()
        for log in self.logs:
            log.close()

    # -------------------------------------------------------------- state

    @property
    def address(self):
        return self.ports["listen"]

    def topology(self):
        return self.cluster.GetTopology(cluster_pb2.GetTopologyRequest(), timeout=5).topology

    def wait_ready(self, members, seconds=40, after_generation=0):
        def ready():
            try:
                topology = self.topology()
            except grpc.RpcError:
                return None
            in_ring = [w for w in topology.workers if w.HasField("rank")]
            if (topology.state == cluster_pb2.RING_STATE_READY and len(in_ring) == members
                    and topology.generation > after_generation):
                return topology
            return None

        try:
            return wait_until(ready, seconds, f"a ring of {members}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    def even_rates(self, ratio=1.5, restarts=12):
        """Restarts workers until the rates that they measured at their start differ by less than the ratio.

        Workers that start on busy processors measure low rates, and placement by predicted time follows them.
        """
        for _ in range(restarts):
            topology = self.topology()
            rates = {worker.name: min(rate.flops_per_second for rate in worker.kernel_rates
                                      if not rate.backward and not rate.score_terms)
                     for worker in topology.workers}
            slowest = min(rates, key=rates.get)
            if max(rates.values()) < ratio * rates[slowest]:
                return
            index = int(slowest.rsplit("-", 1)[1])
            self.kill_worker(index)
            self.start_worker(index)
            self.wait_ready(len(rates), after_generation=topology.generation)
        raise AssertionError(f"the rates of workers differ too much: {rates}")

    def admin(self):
        channel = grpc.insecure_channel(self.ports["control"], CHANNEL_OPTIONS)
        return admin_pb2_grpc.AdminServiceStub(channel)

    @property
    def credentials(self):
        return [("ringattn-secret", self.secret.read_text())]

    def tail(self):
        parts = []
        for path in sorted(self.directory.glob("*.log")):
            parts.append(f"--- {path.name}\n" + path.read_text(errors="replace")[-1500:])
        return "\n".join(parts)


def memory_of(pid, field):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field}")


def resident_bytes(pid):
    return memory_of(pid, "VmRSS")


def reset_peak(pid):
    """From here on peak_resident_bytes counts; what is resident now."""
    pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")
    return resident_bytes(pid)


def peak_resident_bytes(pid):
    return memory_of(pid, "VmHWM")


def open_descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def await_state(ring, request_id, states):
    """Until the operation is in one of these states."""
    def reached():
        try:
            reply = ring.attention.GetStatus(
                attention_pb2.GetStatusRequest(request_id=request_id), timeout=5)
        except grpc.RpcError:
            return False
        return reply.state in states
    wait_until(reached, 60, f"operation in {states}")
