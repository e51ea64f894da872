"""A real Kubernetes of two nodes on this machine: etcd and the control plane next to the first
node's kubelet, CoreDNS, no registry. `Kubernetes(...)` starts it, `close()` removes everything."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

from node import HERE, Node, wait_for
from pki import Pki

API = "https://10.1.0.1:6443"


class Kubernetes:
    def __init__(self, tools):
        self.tools = pathlib.Path(tools)  # tests/k8s/build_tools.sh
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="ringattn-k8s-"))
        self.images = []
        self.nodes = [Node(self.home, index, self.tools) for index in (1, 2)]
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def first(self):
        return self.nodes[0]

    def close(self):
        for node in reversed(self.nodes):
            node.pull_the_plug()
        if os.environ.get("RINGATTN_K8S_KEEP"):
            print(f"logs stay in {self.home}")
            return
        shutil.rmtree(self.home, ignore_errors=True)

    # ------------------------------------------------------------------ coming up

    def _start(self):
        began = time.monotonic()
        self._make_own_images()
        self.first.start()
        self.pki = Pki(self.home / "pki", API)
        self._start_control_plane()
        self._join(self.first)
        self.apply(self._dns())
        self.nodes[1].start(self.first)
        self._join(self.nodes[1])
        self.kubectl("-n", "kube-system", "rollout", "status", "deployment/coredns",
                     "--timeout=90s")
        print(f"Kubernetes of two nodes is up after {time.monotonic() - began:.1f} s")

    def _make_own_images(self):
        (self.home / "bin").mkdir()
        pause = self.home / "bin/pause"
        subprocess.run(["gcc", "-Os", "-static", "-s", "-o", pause, HERE / "pause.c"], check=True)
        for name, program in (("pause", pause), ("coredns", self.tools / "coredns")):
            archive = self.home / f"{name}.tar"
            subprocess.run([HERE / "static_image.sh", f"localhost/{name}:1", program, archive],
                           check=True)
            self.images.append(archive)

    def _start_control_plane(self):
        node, pki = self.first, self.pki.folder
        etcd = "http://127.0.0.1:2379"
        node.spawn("etcd", self.tools / "etcd", f"--data-dir={self.home}/etcd", "--unsafe-no-fsync",
                   f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
                   "--listen-peer-urls=http://127.0.0.1:2380", "--log-level=warn")
        node.spawn(
            "kube-apiserver", self.tools / "kube-apiserver", f"--etcd-servers={etcd}",
            f"--advertise-address={node.address}", "--secure-port=6443",
            "--service-cluster-ip-range=10.96.0.0/16", f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
            # Pods get the zone of their node (worker.topology.zoneLabel).
            "--feature-gates=PodTopologyLabelsAdmission=true",
            "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            # Pods of a lost node are given up after this, not after five minutes.
            "--default-not-ready-toleration-seconds=5",
            "--default-unreachable-toleration-seconds=5")
        wait_for(lambda: self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0, 90,
                 "the API server is ready")
        node.spawn("kube-controller-manager", self.tools / "kube-controller-manager",
                   f"--kubeconfig={self.pki.config('kube-controller-manager')}",
                   f"--service-account-private-key-file={pki}/sa.key",
                   f"--root-ca-file={pki}/ca.crt", "--use-service-account-credentials=true",
                   "--leader-elect=false", "--node-monitor-grace-period=10s",
                   "--node-monitor-period=2s")
        node.spawn("kube-scheduler", self.tools / "kube-scheduler",
                   f"--kubeconfig={self.pki.config('kube-scheduler')}", "--leader-elect=false")

    def _join(self, node):
        node.join(self.pki, self.images)
        wait_for(lambda: self.kubectl("get", "node", node.name, check=False).returncode == 0, 60,
                 f"{node.name} is known")
        self.kubectl("wait", "--for=condition=Ready", f"node/{node.name}", "--timeout=60s")
        self.kubectl("label", "node", node.name, "--overwrite",
                     f"topology.kubernetes.io/zone=rack-{node.index}")
        for a in self.nodes:
            for b in self.nodes:
                if a is not b and a.pid and b.pid:
                    a.route_to(b)

    @staticmethod
    def _dns():
        return (HERE / "coredns.yaml").read_text()

    # ------------------------------------------------------------------ the second node

    def lose_node(self):
        """Kills the second node without any notice to the cluster."""
        self.nodes[1].pull_the_plug()

    def replace_node(self):
        """A new machine of the same name."""
        node = self.nodes[1]
        self.kubectl("delete", "node", node.name, "--wait=true", check=False)
        shutil.rmtree(node.dir, ignore_errors=True)
        self.first.run("ip", "link", "del", f"to-{node.name}", check=False, capture_output=True)
        node.start(self.first)
        self._join(node)

    # ------------------------------------------------------------------ the link between the nodes

    def part(self, first, second):
        """Loses packets between these pods of the first node and those of the second, in silence. All
        other traffic passes. The pods are given by address."""
        first, second = (", ".join(addresses) for addresses in (first, second))
        rules = [f"ip saddr {{ {a} }} ip daddr {{ {b} }} drop" for a, b in ((first, second), (second, first))]
        self.first.run("nft", "-f", "-", text=True, input="\n".join([
            "table inet parted {", "chain between {", "type filter hook forward priority -10;", *rules,
            "}", "}", ""]))

    def heal(self):
        """Undoes part()."""
        self.first.run("nft", "delete", "table", "inet", "parted", check=False, capture_output=True)

    def shape(self, megabits):
        """Limits the link between the nodes, each way. None: no limit. The queue holds what TCP sends
        ahead: the link has a rate but loses nothing."""
        for node, device in ((self.nodes[1], "eth0"), (self.first, f"to-{self.nodes[1].name}")):
            node.run("tc", "qdisc", "del", "dev", device, "root", check=False, capture_output=True)
            if megabits is not None:
                node.run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate",
                         f"{megabits}mbit", "burst", "64kb", "latency", "2000ms")

    # ------------------------------------------------------------------ using it

    def load_image(self, archive):
        self.images.append(pathlib.Path(archive))
        for node in self.nodes:
            node.load(archive)

    def command(self, *words):
        """Runs on the first node, where Services' addresses and names lead somewhere."""
        environment = [f"KUBECONFIG={self.pki.config('admin')}",
                       f"PATH={self.tools}:{os.environ['PATH']}", f"HELM_CACHE_HOME={self.home}/helm",
                       f"HELM_CONFIG_HOME={self.home}/helm", f"HELM_DATA_HOME={self.home}/helm"]
        return self.first.command("env", *environment, *words)

    def run(self, *words, check=True, timeout=180, stdin=None):
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=timeout,
                              input=stdin)
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(map(str, words))}: exit {done.returncode}\n"
                                 + done.stdout[-4000:] + done.stderr[-4000:])
        return done

    def kubectl(self, *words, **options):
        return self.run(self.tools / "kubectl", *words, **options)

    def helm(self, *words, **options):
        return self.run(self.tools / "helm", *words, **options)

    def apply(self, text):
        self.kubectl("apply", "-f", "-", stdin=text)

    def get(self, *words):
        return json.loads(self.kubectl("get", *words, "-o", "json").stdout)

    def start(self, *words, **options):
        """Starts a process on the first node that runs concurrently with the test."""
        return subprocess.Popen(self.command(*words), **options)
