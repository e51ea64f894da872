"""Values for workers on several hosts: zones, networks, NCCL, claims. Rendered without a cluster."""

import json
import subprocess

import pytest

from chart import CHART, VERSIONS, containers, objects, of_kind, one, template
from test_chart import PROGRAMS, SECRET, needs_helm

GPU = "worker.mode=gpu"
ZONE_LABEL = "worker.topology.zoneLabel=topology.kubernetes.io/zone"
# --set separates by commas and dots.
RDMA = r"worker.network.resources.rdma/hca=1"
NETWORKS = r"worker.network.annotations.k8s\.v1\.cni\.cncf\.io/networks=rdma"
CLAIM = ("worker.resourceClaims[0].name=gpu", "worker.resourceClaims[0].resourceClaimTemplateName=gpus")


def settings(*assignments):
    return [word for assignment in assignments for word in ("--set", assignment)]


def render(*words, version=VERSIONS[-1]):
    """(the StatefulSet's pod, its container, all objects)"""
    found = objects(template(*SECRET, *words, version=version).stdout)
    pod = one(found, "StatefulSet")["spec"]["template"]
    return pod, pod["spec"]["containers"][0], found


def environment(container):
    return {entry["name"]: entry.get("value") for entry in container["env"]}


def ring_flags(container):
    return [word for word in container["args"] if word.startswith("--ring_")
            and not word.startswith("--ring_transport")]


def zone_flags(container):
    return [word for word in container["args"] if word.startswith("--zone")]


@needs_helm
def test_defaults_add_nothing():
    pod, container, found = render()
    assert not zone_flags(container)
    assert ring_flags(container) == ["--ring_address=$(POD_IP)"]
    assert set(environment(container)) == {"POD_NAME", "POD_IP", "CPU_REQUEST"}
    assert container["resources"] == {"requests": {"cpu": "2", "memory": "4Gi"},
                                      "limits": {"memory": "4Gi"}}
    assert set(pod["metadata"]["annotations"]) == {"kubectl.kubernetes.io/default-container"}
    assert not {"resourceClaims", "affinity"} & set(pod["spec"])
    assert not of_kind(found, "ResourceClaimTemplate")


@needs_helm
@pytest.mark.parametrize("label", ["topology.kubernetes.io/zone", "example.test/Rack_1", "rack"])
def test_the_zone_is_the_nodes_label(label):
    _, container, _ = render(*settings(f"worker.topology.zoneLabel={label}"))
    assert zone_flags(container) == [f"--zone={label.rpartition('/')[2]}=$(NODE_ZONE)"]
    entry = next(entry for entry in container["env"] if entry["name"] == "NODE_ZONE")
    assert entry["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{label}']"


@needs_helm
def test_a_node_without_the_label_swallows_no_flag(tmp_path):
    """NODE_ZONE is then empty. A flag without a value would take the next flag as its value."""
    (tmp_path / "secret").write_text("0123456789abcdef")
    _, container, _ = render(*settings(ZONE_LABEL))
    zone, = [word.replace("$(NODE_ZONE)", "") for word in zone_flags(container)]
    assert zone == "--zone=zone="
    for after, right in (("--threads=1", True), ("--no_such_flag=1", False)):
        done = subprocess.run([PROGRAMS["ringattn-worker"], "--name=worker-3", "--coordinator=coordinator:7701",
                               "--insecure", f"--secret_file={tmp_path}/secret", "--check_flags", zone, after],
                              capture_output=True, timeout=30)
        assert (done.returncode == 0) == right


@needs_helm
def test_the_zone_is_the_releases():
    _, container, _ = render(*settings("worker.topology.zone=rack-7"), version="1.27")
    assert zone_flags(container) == ["--zone=rack-7"]
    assert "NODE_ZONE" not in environment(container)


@needs_helm
@pytest.mark.parametrize("spread", ["soft", "hard", "none"])
@pytest.mark.parametrize("placement", ["together", "spread", "none"])
def test_placement_by_zone(placement, spread):
    pod, _, _ = render(*settings(ZONE_LABEL, f"worker.topology.zonePlacement={placement}",
                                 f"worker.spread={spread}"))
    affinity = pod["spec"].get("affinity", {})
    keys = [constraint["topologyKey"] for constraint in pod["spec"].get("topologySpreadConstraints", [])]
    together = affinity.get("podAffinity", {}).get("preferredDuringSchedulingIgnoredDuringExecution", [])
    assert [term["podAffinityTerm"]["topologyKey"] for term in together] == (
        ["topology.kubernetes.io/zone"] if placement == "together" else [])
    for term in together:
        assert (term["podAffinityTerm"]["labelSelector"]["matchLabels"].items()
                <= pod["metadata"]["labels"].items())
    assert ("podAntiAffinity" in affinity) == (spread == "hard")
    assert keys == ["kubernetes.io/hostname"] * (spread == "soft") + [
        "topology.kubernetes.io/zone"] * (placement == "spread")


@needs_helm
def test_affinity_of_the_operator_replaces_the_charts():
    mine = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "rack", "operator": "In", "values": ["a"]}]}]}}}
    constraint = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule",
                  "labelSelector": {"matchLabels": {"a": "b"}}}
    pod, _, _ = render(*settings(ZONE_LABEL, "worker.topology.zonePlacement=spread"),
                       "--set-json", f"worker.affinity={json.dumps(mine)}",
                       "--set-json", f"worker.topologySpreadConstraints={json.dumps([constraint])}")
    assert pod["spec"]["affinity"] == mine
    assert pod["spec"]["topologySpreadConstraints"] == [constraint]


@needs_helm
def test_networks_of_gpu_pods():
    pod, container, _ = render("-f", CHART / "ci/gpu-network-values.yaml")
    assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma-net-1, rdma-net-2"
    assert container["resources"] == {
        "requests": {"cpu": "32", "memory": "128Gi", "rdma/hca_shared": 8},
        "limits": {"memory": "128Gi", "nvidia.com/gpu": 8, "rdma/hca_shared": 8}}
    # Large integers keep their digits, although YAML's numbers are floats in templates.
    assert {name: value for name, value in environment(container).items() if name.startswith("NCCL_")} == {
        "NCCL_SOCKET_IFNAME": "=net1,net2", "NCCL_IB_HCA": "mlx5_0,mlx5_1", "NCCL_IB_GID_INDEX": "3",
        "NCCL_NET_GDR_LEVEL": "PHB", "NCCL_BUFFSIZE": "16777216"}
    assert ring_flags(container) == ["--ring_interface=net1,net2"]


@needs_helm
@pytest.mark.parametrize("words", [(), (GPU, "worker.gpu.ringTransport=wire"),
                                   (GPU, "worker.gpu.ringTransport=peer+wire")])
def test_sockets_use_the_interfaces_and_nccl_is_not_told(words):
    _, container, _ = render(*settings("worker.network.interfaces={net1,net2}", *words))
    assert ring_flags(container) == ["--ring_interface=net1,net2"]
    assert "NCCL_SOCKET_IFNAME" not in environment(container)


@needs_helm
def test_networks_of_cpu_pods():
    pod, container, found = render(*settings(RDMA, NETWORKS))
    assert container["resources"]["limits"] == {"memory": "4Gi", "rdma/hca": 1}
    assert container["resources"]["requests"]["rdma/hca"] == 1
    assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma"
    coordinator = one(found, "Deployment")["spec"]["template"]
    assert "k8s.v1.cni.cncf.io/networks" not in coordinator["metadata"]["annotations"]


@needs_helm
def test_claims():
    pod, container, found = render("-f", CHART / "ci/gpu-claims-values.yaml")
    assert pod["spec"]["resourceClaims"] == [
        {"name": "gpu-and-card", "resourceClaimTemplateName": "ringattn-worker-gpu-and-card"},
        {"name": "scratch", "resourceClaimTemplateName": "scratch-template"}]
    assert container["resources"]["claims"] == [{"name": "gpu-and-card"},
                                                {"name": "scratch", "request": "disk"}]
    assert container["resources"]["limits"] == {"memory": "16Gi"}
    made = one(found, "ResourceClaimTemplate")
    assert made["metadata"]["name"] == "ringattn-worker-gpu-and-card"
    assert made["spec"]["spec"]["devices"]["constraints"] == [
        {"requests": ["gpu", "card"], "matchAttribute": "resource.kubernetes.io/pcieRoot"}]


@needs_helm
def test_claims_in_addition_to_the_device_plugin():
    _, container, found = render(*settings(GPU, *CLAIM, "worker.resources.claims[0].name=other"))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["resources"]["claims"] == [{"name": "other"}, {"name": "gpu"}]
    assert not of_kind(found, "ResourceClaimTemplate")


@needs_helm
def test_locked_memory_is_for_workers_only():
    """IPC_LOCK for RDMA; the coordinator keeps the restricted security context."""
    _, _, found = render(*settings("worker.securityContext.capabilities.add[0]=IPC_LOCK"))
    contexts = {workload["kind"]: container["securityContext"] for workload, container in containers(found)}
    assert contexts["Deployment"]["capabilities"] == {"drop": ["ALL"]}
    assert contexts["StatefulSet"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert contexts["StatefulSet"]["readOnlyRootFilesystem"] is True


# name: (settings, what the error must contain)
WRONG = {
    "a label with a space": (("worker.topology.zoneLabel=rack zone",), ("/worker/topology/zoneLabel", "pattern")),
    "a label with a quote": (("worker.topology.zoneLabel=a'b",), ("/worker/topology/zoneLabel",)),
    "a zone with a space": (("worker.topology.zone=rack 7",), ("/worker/topology/zone", "rack 7")),
    "a zone that the kubelet would expand": (("worker.topology.zone=$(POD_IP)",), ("/worker/topology/zone",)),
    "a long zone": (("worker.topology.zone=" + "z" * 64,), ("/worker/topology/zone", "63")),
    "two zones": ((ZONE_LABEL, "worker.topology.zone=a"), ("zoneLabel and worker.topology.zone exclude",)),
    "a placement": (("worker.topology.zonePlacement=apart",),
                    ("/worker/topology/zonePlacement", "'together', 'spread', 'none'")),
    "a placement without zones": (("worker.topology.zonePlacement=spread",), ("needs worker.topology.zoneLabel",)),
    "an unknown part of the topology": (("worker.topology.rack=a",), ("/worker/topology", "'rack'")),
    "an interface with a space": ((GPU, "worker.network.interfaces={a b}"), ("/worker/network/interfaces/0",)),
    "an interface with a long name": ((GPU, "worker.network.interfaces={abcdefghijklmnop}"),
                                      ("/worker/network/interfaces/0", "abcdefghijklmnop")),
    "an interface twice": ((GPU, r"worker.network.interfaces={net1,net1}"), ("/worker/network/interfaces",)),
    "interfaces as a text": ((GPU, "worker.network.interfaces=net1"),
                                    ("/worker/network/interfaces", "array")),
    "interfaces that copy engines ignore": (
        (GPU, "worker.network.interfaces={net1}", "worker.gpu.ringTransport=peer"), ("ringTransport=peer",)),
    "interfaces twice": ((GPU, "worker.network.interfaces={net1}", "worker.nccl.NCCL_SOCKET_IFNAME=net1"),
                         ("worker.network.interfaces and worker.nccl.NCCL_SOCKET_IFNAME exclude",)),
    "a core resource as a network resource": (("worker.network.resources.memory=1",),
                                        ("/worker/network/resources", "'memory'")),
    "a fraction of a network resource": (("worker.network.resources.rdma/hca=1.5",),
                                     ("/worker/network/resources/rdma~1hca", "integer")),
    "zero network resources": (("worker.network.resources.rdma/hca=0",), ("/worker/network/resources/rdma~1hca", "1")),
    "GPUs as network resources": ((GPU, r"worker.network.resources.nvidia\.com/gpu=1"), ("worker.gpu.perPod",)),
    "a network resource twice": ((RDMA, "worker.resources.limits.rdma/hca=1"),
                                 ("rdma/hca is in both worker.network.resources and worker.resources",)),
    "an annotation with a space": (("worker.network.annotations.a b=c",), ("/worker/network/annotations", "'a b'")),
    "an annotation twice": ((NETWORKS, r"worker.podAnnotations.k8s\.v1\.cni\.cncf\.io/networks=a"),
                            ("k8s.v1.cni.cncf.io/networks is in both worker.network.annotations",)),
    "a name without NCCL_": ((GPU, "worker.nccl.SOCKET_IFNAME=eth0"), ("/worker/nccl", "'SOCKET_IFNAME'")),
    "a name in lower case": ((GPU, "worker.nccl.NCCL_ib_hca=a"), ("/worker/nccl", "'NCCL_ib_hca'")),
    "a boolean for NCCL": ((GPU, "worker.nccl.NCCL_IB_DISABLE=true"), ("/worker/nccl/NCCL_IB_DISABLE", "boolean")),
    "an empty text for NCCL": ((GPU, "worker.nccl.NCCL_IB_TIMEOUT="), ("/worker/nccl/NCCL_IB_TIMEOUT",)),
    "NCCL for CPUs": (("worker.nccl.NCCL_DEBUG=INFO",), ("worker.nccl is for worker.mode=gpu",)),
    "NCCL that copy engines ignore": ((GPU, "worker.nccl.NCCL_DEBUG=INFO", "worker.gpu.ringTransport=peer"),
                                      ("ringTransport=peer",)),
    "a variable that workers set": ((GPU, "worker.nccl.NCCL_NVLS_ENABLE=1"), ("NCCL_NVLS_ENABLE has no effect",)),
    "a variable twice": ((GPU, "worker.nccl.NCCL_DEBUG=INFO", "worker.extraEnv[0].name=NCCL_DEBUG"),
                         ("worker.extraEnv repeats NCCL_DEBUG",)),
    "a claim without a name": (("worker.resourceClaims[0].resourceClaimTemplateName=a",),
                               ("/worker/resourceClaims/0", "'name'")),
    "a claim's name": (("worker.resourceClaims[0].name=GPU",), ("/worker/resourceClaims/0/name", "GPU")),
    "a claim of nothing": (("worker.resourceClaims[0].name=gpu",),
                           ("worker.resourceClaims gpu needs either resourceClaimTemplateName or spec",)),
    "a claim of two templates": ((*CLAIM, "worker.resourceClaims[0].spec.devices.requests[0].name=a"),
                                 ("worker.resourceClaims gpu needs either",)),
    "a claim twice": ((*CLAIM, "worker.resourceClaims[1].name=gpu",
                       "worker.resourceClaims[1].resourceClaimTemplateName=a"),
                      ("two entries with the name gpu",)),
    "a claim that resources repeat": ((*CLAIM, "worker.resources.claims[0].name=gpu"),
                                      ("worker.resources.claims repeats gpu",)),
    "an unknown part of a claim": ((*CLAIM, "worker.resourceClaims[0].count=1"),
                                   ("/worker/resourceClaims/0", "'count'")),
    "no source of GPUs": ((GPU, "worker.gpu.resourceName="), ("worker.gpu.resourceName is empty",)),
    "a socket folder with claimed GPUs": (
        (GPU, *CLAIM, "worker.gpu.resourceName=", "worker.gpu.peerSocketVolume.hostPath.path=/a"),
        ("worker.gpu.peerSocketVolume needs worker.gpu.resourceName",)),
}
TOO_OLD = {
    "node labels": ("1.32", (ZONE_LABEL,), "worker.topology.zoneLabel needs Kubernetes 1.33"),
    "claims": ("1.33", CLAIM, "worker.resourceClaims needs Kubernetes 1.34"),
}


@needs_helm
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_by_name(name):
    assignments, words = WRONG[name]
    done = template(*SECRET, *settings(*assignments), check=False)
    assert done.returncode != 0
    for word in words:
        assert word in done.stderr


@needs_helm
@pytest.mark.parametrize("name", TOO_OLD)
def test_old_clusters_are_refused_by_name(name):
    version, assignments, words = TOO_OLD[name]
    done = template(*SECRET, *settings(*assignments), version=version, check=False)
    assert done.returncode != 0
    assert words in done.stderr and f"the cluster has v{version}.0" in done.stderr
