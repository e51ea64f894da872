"""A cluster started by `ringattn up`, and what can be asked of it without gRPC."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.request

from harness import Failure


class Ring:
    def __init__(self, harness, binaries, workers, device, state_dir, log_file, transport=""):
        self.harness = harness
        self.cli = binaries / "ringattn"
        self.workers = workers
        self.device = device
        self.state_dir = pathlib.Path(state_dir)
        self.log_file = log_file  # where logs of ended clusters are kept
        self.transport = transport  # --ring_transport, unless empty
        self.up_seconds = None
        self.incarnation = 0
        self.up_flags = []  # more of them

    def up(self):
        begin = time.monotonic()
        transport = [f"--worker_flag=--ring_transport={self.transport}"] if self.transport else []
        self.incarnation += 1
        self.harness.run_ok([self.cli, "up", f"--workers={self.workers}",
                             f"--device={self.device}", "--port=0", "--detach", *transport,
                             *self.up_flags,
                             f"--state_dir={self.state_dir}", "--ready_timeout=40s"], seconds=45)
        self.up_seconds = round(time.monotonic() - begin, 2)
        return self.up_seconds

    def ensure(self):
        """Starts it unless it runs with all its workers."""
        if self.topology_or_none() is None:
            self.down()
            self.up()
        self.wait_members(self.workers, seconds=30)

    def down(self):
        if self.state_dir.exists():
            self.harness.run([self.cli, "down", f"--state_dir={self.state_dir}"], seconds=15,
                             cleans_up=True)
        for pid in self.pids().values():  # what outlived its launcher
            os.kill(pid, signal.SIGKILL)
        if self.state_dir.exists():
            self.collect_logs()
            shutil.rmtree(self.state_dir)

    def ports(self):
        return json.loads((self.state_dir / "server.json").read_text())

    @property
    def address(self):
        return self.ports()["listen"]

    def pids(self):
        """Process ids of the workers by name."""
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = pathlib.Path(f"/proc/{entry}/cmdline").read_bytes().decode().split("\0")
                state = pathlib.Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if f"--secret_file={self.state_dir}/secret" in words and state != "Z":
                for word in words:
                    if word.startswith("--name="):
                        found[word[len("--name="):]] = int(entry)
        return found

    def topology_or_none(self):
        try:
            code, output = self.harness_quiet([self.cli, "topology", f"--server={self.address}",
                                               "--deadline=2s", "--json"])
            return json.loads(output) if code == 0 else None
        except (OSError, ValueError):
            return None

    @staticmethod
    def harness_quiet(command):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                              timeout=5, check=False)
        return done.returncode, done.stdout

    def state(self):
        """(ready, members, generation)"""
        topology = self.topology_or_none()
        if topology is None:
            return False, 0, 0
        members = sum(1 for worker in topology.get("workers", []) if "rank" in worker)
        return (topology.get("state") == "RING_STATE_READY", members,
                int(topology.get("generation", 0)))

    def wait_members(self, members, seconds, after_generation=0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ready, now, generation = self.state()
            if ready and now == members and generation > after_generation:
                return generation
            time.sleep(0.05)
        raise Failure(f"no ring of {members} within {seconds} s; now (ready, members, generation) "
                      f"= {self.state()}")

    @staticmethod
    def metrics(address):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=2) as reply:
            return reply.read().decode().splitlines()

    def worker_metrics(self):
        """Where each worker's last process serves its metrics, by worker's name."""
        found = {}
        for path in self.state_dir.glob("worker-*.log"):
            addresses = re.findall(r'"metrics_address":"([^"]+)"', path.read_text(errors="replace"))
            if addresses:
                found[path.stem] = addresses[-1]
        return found

    def failed_requests(self):
        """Requests that ended badly, by status code, from the coordinator's metrics."""
        codes = {}
        for line in self.metrics(self.ports()["metrics"]):
            match = re.match(r'ringattn_requests_total\{(.*)\} (\S+)', line)
            if match and (code := re.search(r'code="(\w+)"', match[1])) and code[1] != "OK":
                codes[code[1]] = codes.get(code[1], 0) + float(match[2])
        return codes

    def collect_logs(self, tail_bytes=1 << 18):
        with open(self.log_file, "a", encoding="utf-8") as out:
            for path in sorted(self.state_dir.glob("*.log")):
                text = path.read_text(errors="replace")[-tail_bytes:]
                out.write(f"======== {self.state_dir.name} {self.incarnation}, {path.name}\n{text}\n")


class GaugeWatch:
    """The largest value of a gauge on each worker while the `with` block runs."""

    def __init__(self, ring, gauge):
        self.addresses, self.metrics, self.gauge = ring.worker_metrics(), ring.metrics, gauge
        self.peak = {}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def _work(self):
        while not self.ended.wait(0.1):
            for name, address in self.addresses.items():
                try:
                    lines = self.metrics(address)
                except OSError:
                    continue  # it has just gone
                for line in lines:
                    if line.startswith(self.gauge + " "):
                        self.peak[name] = max(self.peak.get(name, 0.0), float(line.split()[1]))
