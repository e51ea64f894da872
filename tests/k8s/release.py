"""The installed chart, and a client of it outside the cluster's nodes."""

import contextlib
import json
import os
import pathlib
import subprocess
import threading
import time

from credentials import Credentials
from node import HERE, wait_for

ROOT = HERE.parents[1]
CHART = ROOT / "deploy/helm/ringattn"
CLI = pathlib.Path(os.environ["RINGATTN_K8S_CLI"])
NAMESPACE = "attention"
RELEASE = "ringattn"
COORDINATOR = "deployment/ringattn-coordinator"
WORKERS = "statefulset/ringattn-worker"


class Release:
    def __init__(self, kubernetes, directory):
        self.kubernetes = kubernetes
        self.directory = pathlib.Path(directory)
        self.credentials = Credentials(directory)
        # The flags of the command line.
        self.flags = [f"--tls_ca={self.credentials.public_ca}",
                      f"--token_file={self.credentials.token_file}"]
        self.worker_program = CLI.parent / "ringattn-worker"
        self.replicas = 2  # of the workers

    # ------------------------------------------------------------------ helm and kubectl

    def install(self, *settings):
        self._helm("install", *settings)

    def upgrade(self, *settings, wait=True):
        """Settings add to those of the release."""
        self._helm("upgrade", "--reset-then-reuse-values", *settings, wait=wait)

    def _helm(self, verb, *settings, wait=True):
        waiting = ["--wait", "--timeout=240s"] if wait else []
        values = ["-f", HERE / "values.yaml"] if verb == "install" else []
        self.kubernetes.helm(verb, RELEASE, CHART, "-n", NAMESPACE, *values, *settings, *waiting,
                             timeout=300)

    def kubectl(self, *words, **options):
        return self.kubernetes.kubectl("-n", NAMESPACE, *words, **options)

    def apply_secret(self, name):
        self.kubectl("apply", "-f", "-", stdin=self.credentials.manifest(name))

    def get(self, *words):
        return self.kubernetes.get("-n", NAMESPACE, *words)

    def pods(self, component):
        found = self.get("pods", "-l", f"app.kubernetes.io/instance={RELEASE},"
                         f"app.kubernetes.io/component={component}")["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def settled(self, what, seconds=180):
        self.kubectl("rollout", "status", what, f"--timeout={seconds}s", timeout=seconds + 20)

    def restarts(self):
        return {name: pod["status"]["containerStatuses"][0]["restartCount"]
                for component in ("coordinator", "worker")
                for name, pod in self.pods(component).items()
                if pod["status"].get("containerStatuses")}

    def kill_container(self, pod):
        """SIGKILL to the first process of a pod's only container, from outside."""
        container = self.get("pod", pod)["status"]["containerStatuses"][0]["containerID"]
        node = self.node_of(pod)
        node.run("ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", container.split("//")[1])

    def node_of(self, pod):
        name = self.get("pod", pod)["spec"]["nodeName"]
        return next(node for node in self.kubernetes.nodes if node.name == name)

    # ------------------------------------------------------------------ the service

    @property
    def address(self):
        return f"ringattn.{NAMESPACE}.svc.cluster.local:7700"

    def cli(self, *words, check=True, timeout=240):
        return self.kubernetes.run(CLI, *words, check=check, timeout=timeout)

    def call(self, verb, *words, **options):
        return self.cli(verb, f"--server={self.address}", *self.flags, *words, **options)

    def topology(self):
        done = self.call("topology", "--json", "--deadline=5s", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def wait_ring(self, members, seconds=90, after=0):
        """The topology, once the ring has so many members and is younger than generation `after`."""
        def there():
            topology = self.topology()
            if topology is None:
                return None
            ranks = [worker for worker in topology["workers"] if "rank" in worker]
            ready = topology["state"].lower().endswith("ready") and len(ranks) == members
            return topology if ready and int(topology["generation"]) > after else None

        return wait_for(there, seconds, f"a ring of {members}; last seen: {self.topology()}")

    def generation(self, members=None):
        """That of a ring of `members`. None: of all workers."""
        return int(self.wait_ring(members or len(self.pods("worker")))["generation"])

    def inputs(self, name, *shape):
        path = self.directory / f"{name}.safetensors"
        if not path.exists():
            subprocess.run([CLI, "generate", f"--output={path}", "--seed=1", *shape], check=True,
                           capture_output=True)
        return path

    def forward(self, inputs, *flags, check=True, timeout=240):
        """One verified request; how often it was sent, or the failed process."""
        output = self.directory / f"out-{threading.get_ident()}-{time.monotonic_ns()}.safetensors"
        done = self.call("forward", f"--input={inputs}", f"--output={output}", "--json",
                         "--deadline=200s", *flags, check=check, timeout=timeout)
        if done.returncode != 0:
            return done
        self.verify(inputs, output, *flags)
        output.unlink()
        return int(json.loads(done.stdout)["attempts"])

    @staticmethod
    def verify(inputs, output, *flags):
        options = [flag for flag in flags if flag in ("--causal",) or flag.startswith("--window")]
        subprocess.run([CLI, "verify", f"--input={inputs}", f"--output={output}", "--rows=16",
                        *options], check=True, capture_output=True)

    def wait_busy(self, seconds=30):
        """Until requests hold memory on every member."""
        def busy():
            topology = self.topology()
            workers = [w for w in (topology or {}).get("workers", []) if "rank" in w]
            return workers and all(int(w.get("reserved_bytes", 0)) > 0 for w in workers)

        wait_for(busy, seconds, "a request is in flight on every worker")


class Load:
    """Clients that send one verified request after another while something happens."""

    def __init__(self, release, inputs, *flags, clients=2):
        self.release, self.inputs, self.flags = release, inputs, flags
        self.attempts, self.failures = [], []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def _run(self):
        while not self._stop.is_set():
            try:
                self.attempts.append(self.release.forward(self.inputs, *self.flags))
            except (AssertionError, subprocess.SubprocessError) as failure:
                self.failures.append(str(failure))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        wait_for(lambda: self.attempts or self.failures, 120, "the first request")
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def check(self):
        assert not self.failures, self.failures[0]
        assert self.attempts
        replayed = sum(1 for attempts in self.attempts if attempts > 1)
        return f"{len(self.attempts)} requests, none lost, {replayed} of them replayed"


class InFlight:
    """Sends one long request concurrently with the test."""

    def __init__(self, release, inputs, *flags):
        self._result = None
        self._release, self._inputs, self._flags = release, inputs, flags
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        release.wait_busy()

    def _run(self):
        try:
            self._result = self._release.forward(self._inputs, *self._flags)
        except (AssertionError, subprocess.SubprocessError) as failure:
            self._result = failure

    def running(self):
        return self._thread.is_alive()

    def attempts(self):
        self._thread.join(timeout=240)
        assert not self._thread.is_alive(), "the request does not end"
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


@contextlib.contextmanager
def timed(report, what):
    began = time.monotonic()
    yield
    report(f"{what}: {time.monotonic() - began:.1f} s")


__all__ = ["CHART", "CLI", "COORDINATOR", "InFlight", "Load", "NAMESPACE", "RELEASE", "ROOT",
           "Release", "WORKERS", "timed"]
