"""One machine of the test's cluster: a tree of namespaces (processes, network, mounts, names) on this
machine, without a way out, with its own containerd, kubelet and kube-proxy. Ending its first process ends
everything in it, as pulling a plug does."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time

HERE = pathlib.Path(__file__).resolve().parent
CONTROLLERS = pathlib.Path("/sys/fs/cgroup")
BRIDGE = "nodes"  # the switch that joins the nodes, in the first one's network


def wait_for(condition, seconds, what):
    """Polls until `condition` returns something true; its value."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.1)


class Node:
    def __init__(self, home, index, tools):
        self.home = pathlib.Path(home)
        self.tools = tools
        self.index = index
        self.name = f"node{index}"
        self.address = f"10.1.0.{index}"
        self.pods = f"10.244.{index}.0/24"
        self.dir = self.home / self.name
        self.pid = None

    # ------------------------------------------------------------------ life

    def start(self, switch=None):
        """`switch`: the node whose network holds the bridge; the first one is its own."""
        for part in ("etc/cni/net.d", "var", "log"):
            (self.dir / part).mkdir(parents=True, exist_ok=True)
        (self.dir / "etc/resolv.conf").write_text("nameserver 10.96.0.10\n")
        (self.dir / "etc/hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        log = open(self.dir / "log/init.log", "wb")
        parent = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--mount", "--uts",
             "--ipc", "--cgroup", HERE / "node_init.sh", self.dir, self.name],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        self.parent = parent

        def is_up():
            if parent.poll() is not None:
                raise RuntimeError(f"{self.name}: " + (self.dir / "log/init.log").read_text())
            children = pathlib.Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
            pid = int((children.read_text().split() or ["0"])[0])
            with contextlib.suppress(OSError):
                if pid and os.readlink(f"/proc/{pid}/exe").endswith("/bin/pause"):
                    return pid
            return None

        self.pid = wait_for(is_up, 20, f"{self.name} is up")
        self._connect(switch or self)

    def _connect(self, switch):
        """An address on the bridge; the default route leads nowhere, but kube-proxy wants one."""
        if switch is self:
            self.run("ip", "link", "add", BRIDGE, "type", "bridge")
            device = BRIDGE
        else:
            subprocess.run(["nsenter", "-t", str(switch.pid), "-n", "ip", "link", "add",
                            f"to-{self.name}", "type", "veth", "peer", "name", "eth0", "netns",
                            str(self.pid)], check=True)
            switch.run("ip", "link", "set", f"to-{self.name}", "master", BRIDGE)
            switch.run("ip", "link", "set", f"to-{self.name}", "up")
            device = "eth0"
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", device)
        self.run("ip", "link", "set", device, "up")
        self.run("ip", "route", "add", "default", "via", "10.1.0.254", "dev", device)
        for setting in ("net.ipv4.ip_forward", "net.bridge.bridge-nf-call-iptables"):
            self.run("sysctl", "-qw", f"{setting}=1")

    def pull_the_plug(self):
        """Kills all processes of the node at once, without notice."""
        if self.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.parent.wait(timeout=20)
        self.pid = None
        self._remove_cgroups()

    def _remove_cgroups(self):
        own = {}
        for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.removeprefix("name=").split(","):
                own[controller] = path
        for controller, path in own.items():
            group = CONTROLLERS / controller / path.lstrip("/") / self.name
            for folder, _, _ in os.walk(group, topdown=False):
                for _ in range(20):  # the last processes take a moment to go
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
                        break
                    time.sleep(0.05)

    # ------------------------------------------------------------------ commands

    def command(self, *words):
        return ["nsenter", "-t", str(self.pid), "-p", "-n", "-m", "-u", "-i", "-C",
                f"--wdns={self.home}", "--", *map(str, words)]

    def run(self, *words, **options):
        options.setdefault("check", True)
        return subprocess.run(self.command(*words), **options)

    def spawn(self, name, *words):
        """A daemon of the node; its log is log/NAME.log."""
        log = open(self.dir / f"log/{name}.log", "ab")
        subprocess.Popen(["setsid", *self.command("nice", "-n", "10", *words)], stdout=log, stderr=log,
                         stdin=subprocess.DEVNULL)
        log.close()

    # ------------------------------------------------------------------ Kubernetes' part

    def join(self, pki, images):
        """containerd with these images, kubelet and kube-proxy. The API server must be up."""
        self._write_network()
        (self.dir / "etc/containerd.toml").write_text(CONTAINERD)
        self.spawn("containerd", "containerd", "-c", self.dir / "etc/containerd.toml")
        wait_for(lambda: self.run("ctr", "version", check=False, capture_output=True).returncode == 0,
                 30, "containerd")
        self.load(*images)
        (self.dir / "etc/resolv.empty").write_text("")
        kubelet = dict(KUBELET, cgroupRoot=f"/{self.name}", resolvConf=str(self.dir / "etc/resolv.empty"),
                       authentication={"anonymous": {"enabled": False}, "webhook": {"enabled": True},
                                       "x509": {"clientCAFile": str(pki.ca)}})
        self._spawn_with_config("kubelet", kubelet, f"--kubeconfig={pki.node_config(self)}",
                                f"--hostname-override={self.name}", f"--node-ip={self.address}")
        proxy = dict(PROXY, hostnameOverride=self.name,
                     clientConnection={"kubeconfig": str(pki.config("kube-proxy"))})
        self._spawn_with_config("kube-proxy", proxy)

    def _spawn_with_config(self, name, config, *flags):
        path = self.dir / f"etc/{name}.json"
        path.write_text(json.dumps(config))
        self.spawn(name, self.tools / name, f"--config={path}", *flags)

    def load(self, *images):
        for image in images:
            self.run("ctr", "-n", "k8s.io", "images", "import", image, stdout=subprocess.DEVNULL)

    def _write_network(self):
        (self.dir / "etc/cni/net.d/10-bridge.conflist").write_text(json.dumps({
            "cniVersion": "0.4.0", "name": "pods", "plugins": [
                {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True,
                 "ipam": {"type": "host-local", "ranges": [[{"subnet": self.pods}]],
                          "routes": [{"dst": "0.0.0.0/0"}]}},
                {"type": "portmap", "capabilities": {"portMappings": True}}]}))

    def route_to(self, other):
        self.run("ip", "route", "replace", other.pods, "via", other.address)


# restrict_oom_score_adj: below a process's own score only CAP_SYS_RESOURCE may go.
CONTAINERD = """version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""

KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
    "authorization": {"mode": "Webhook"},
    "cgroupDriver": "cgroupfs",
    "failCgroupV1": False,
    "failSwapOn": False,
    "clusterDNS": ["10.96.0.10"],
    "clusterDomain": "cluster.local",
    "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    "imageGCHighThresholdPercent": 100,
    "nodeStatusUpdateFrequency": "2s",
    # Mounted Secrets are renewed this often.
    "syncFrequency": "10s",
}

PROXY = {
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "kind": "KubeProxyConfiguration",
    "mode": "iptables",
    "clusterCIDR": "10.244.0.0/16",
    "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
}
