"""The chart without a cluster. Tests that need Helm are skipped by name if it is missing."""

import json
import os
import re
import subprocess

import pytest
import yaml

from chart import (CHART, EXAMPLE, HELM, ROOT, VARIANTS, VERSIONS, command_line, containers, helm,
                   objects, of_kind, one, template)

# Variants and the oldest Kubernetes that they need.
NEEDS = {"gpu-peers-values": "1.28", "gpu-network-values": "1.33", "gpu-claims-values": "1.34"}
needs_helm = pytest.mark.skipif(
    HELM is None, reason=f"no Helm: {os.environ.get('RINGATTN_NO_HELM') or 'run tests/lib/chart_tests.sh'}")
SECRET = ("--set", "cluster.existingSecret=s")
PROGRAMS = {"ringattn-server": ROOT / "bazel-bin/server/ringattn-server",
            "ringattn-worker": ROOT / "bazel-bin/worker/ringattn-worker",
            "ringattn": ROOT / "bazel-bin/client/ringattn"}


def by_name(paths):
    return pytest.mark.parametrize("values", paths, ids=lambda path: path.stem)


def check_schemas(found, version):
    import kubernetes_validate
    for manifest in found:
        if "monitoring.coreos.com" in manifest["apiVersion"]:
            continue  # of another project
        kubernetes_validate.validate(manifest, version, strict=True)


def example_objects():
    found = []
    for name in yaml.safe_load((EXAMPLE / "kustomization.yaml").read_text())["resources"]:
        found += objects((EXAMPLE / name).read_text())
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_example_keeps_the_schemas(version):
    found = example_objects()
    assert {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= {
        manifest["kind"] for manifest in found}
    check_schemas(found, version)


def test_the_schemas_find_what_is_wrong():
    found = example_objects()
    one(found, "Deployment")["spec"]["template"]["spec"]["containers"][0]["portz"] = []
    with pytest.raises(Exception, match="portz"):
        check_schemas(found, VERSIONS[-1])


def test_the_version_is_the_programs():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    header = (ROOT / "common/base/version.h").read_text()
    assert f'"{chart["appVersion"]}"' in header


@pytest.mark.parametrize("name", ["rules.yaml", "dashboard.json"])
def test_monitoring_files_are_those_of_the_project(name):
    """Helm takes files from the chart's folder alone."""
    source, copy = ROOT / "deploy/monitoring" / name, CHART / "files" / name
    if not source.exists():
        pytest.skip(f"missing {source.relative_to(ROOT)}")
    assert copy.read_text() == source.read_text(), f"cp {source} {copy}"


@needs_helm
def test_the_example_is_what_the_chart_renders():
    rendered = template("-f", EXAMPLE / "values.yaml").stdout
    assert (EXAMPLE / "ringattn.yaml").read_text() == rendered, (
        "render it again: deploy/kubernetes/render_example.sh")


@needs_helm
@by_name(VARIANTS)
def test_lint(values):
    helm("lint", CHART, "--strict", "-f", values)


@needs_helm
@by_name(VARIANTS)
def test_every_variant_keeps_the_schemas(values):
    for version in VERSIONS:
        done = template("-f", values, version=version, check=False)
        if values.stem in NEEDS and version == "1.27":
            assert done.returncode != 0
            assert f"needs Kubernetes {NEEDS[values.stem]}" in done.stderr
            continue
        assert done.returncode == 0, done.stderr
        found = objects(done.stdout)
        names = [(o["kind"], o["metadata"]["name"]) for o in found]
        assert len(names) == len(set(names))
        check_schemas(found, version)


@needs_helm
@by_name(VARIANTS)
def test_what_is_named_is_there(values):
    """Selectors find the pods, ports the containers' ports, mounts the volumes."""
    found = objects(template("-f", values).stdout)
    pods = {w["kind"]: w["spec"]["template"] for w, _ in containers(found)}
    for service in of_kind(found, "Service"):
        pod = next(p for p in pods.values()
                   if service["spec"]["selector"].items() <= p["metadata"]["labels"].items())
        ports = {port["name"] for c in pod["spec"]["containers"] for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for workload, container in containers(found):
        assert all(len(port["name"]) <= 15 for port in container["ports"])
        numbers = [port["containerPort"] for port in container["ports"]]
        assert len(numbers) == len(set(numbers))
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["grpc"]["port"] in numbers
        volumes = {v["name"] for v in workload["spec"]["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    stateful = one(found, "StatefulSet")
    assert one(found, "Service", stateful["spec"]["serviceName"])
    account = stateful["spec"]["template"]["spec"]["serviceAccountName"]
    assert one(found, "ServiceAccount")["metadata"]["name"] == account
    labels = stateful["spec"]["template"]["metadata"]["labels"].items()
    assert one(found, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels


@needs_helm
@by_name(VARIANTS)
def test_pods_are_restricted(values):
    for workload, container in containers(objects(template("-f", values).stdout)):
        spec = workload["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]}}
        assert all(set(v) - {"name"} <= {"secret", "emptyDir", "persistentVolumeClaim"}
                   for v in spec["volumes"])


def check_command_lines(found, folder):
    """The programs take them, and would not take others."""
    (folder / "secret").write_text("0123456789abcdef")
    checked = 0
    for _, container in containers(found):
        environment = {"POD_NAME": "worker-3", "POD_IP": "127.0.0.1", "CPU_REQUEST": "2",
                       "POD_INDEX": "3", "NODE_ZONE": "rack-7"}
        program, *words = command_line(container, environment)
        words = [re.sub(r"=/etc/ringattn/cluster/secret$", f"={folder}/secret", w) for w in words]
        words = [w.replace("=/etc/ringattn/", f"={folder}/") for w in words]
        if program == "ringattn":
            words.append(f"--bin_dir={PROGRAMS['ringattn-worker'].parents[1]}")
            words = [words[0], words[-1], *words[1:-1]]
        for more, right in (([], True), (["--no_such_flag=1"], False)):
            done = subprocess.run([PROGRAMS[program], *words, "--check_flags", *more],
                                  capture_output=True, text=True, timeout=30)
            assert (done.returncode == 0) == right, f"{program} {words}: {done.stderr}{done.stdout}"
        checked += 1
    assert checked == 2


def test_the_programs_take_the_examples_command_lines(tmp_path):
    check_command_lines(example_objects(), tmp_path)


@needs_helm
@by_name(VARIANTS)
def test_the_programs_take_every_variants_command_lines(values, tmp_path):
    make_tls_files(tmp_path)
    check_command_lines(objects(template("-f", values).stdout), tmp_path)


def make_tls_files(folder):
    """The files that the TLS variants mount."""
    for part in ("tls", "cluster-tls"):
        (folder / part).mkdir()
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                        "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=test",
                        "-keyout", folder / part / "tls.key", "-out", folder / part / "tls.crt"],
                       check=True, capture_output=True)
        (folder / part / "ca.crt").write_text((folder / part / "tls.crt").read_text())
    (folder / "clients").mkdir()
    (folder / "clients/clients.json").write_text('{"clients": []}')


PEERS = ("worker.mode=gpu", "worker.gpu.peerSocketVolume.hostPath.path=/var/lib/ringattn")
WRONG = {
    "a value that does not exist": (("worker.replica=3",), "replica"),
    "a mode": (("worker.mode=tpu",), "mode"),
    "no certificate": (("tls.enabled=true",), "tls.existingSecret"),
    "no cluster certificate": (("tls.enabled=true", "tls.existingSecret=a"), "tls.clusterSecret"),
    "clients in plain text": (("clients.existingSecret=a",), "tls.enabled"),
    "two secrets": (("cluster.secret=0123456789abcdef",), "exclude each other"),
    "a short secret": (("cluster.existingSecret=", "cluster.secret=short"), "secret"),
    "a quantity": (("worker.memoryLimit=much",), "memoryLimit"),
    "several GPUs for a CPU": (("worker.gpu.perPod=2",), "worker.mode=gpu"),
    "a socket folder for CPUs": (("worker.gpu.peerSocketVolume.hostPath.path=/a",), "worker.mode=gpu"),
    "a socket folder for a pod's own GPUs": (PEERS + ("worker.gpu.perPod=2",), "worker.gpu.perPod=1"),
    "a socket folder beside NCCL": (PEERS + ("worker.gpu.ringTransport=nccl",), "ringTransport=nccl"),
    "a socket folder without copy engines": (PEERS + ("worker.gpu.ringTransport=wire",), "ringTransport=wire"),
    "a socket folder of several nodes": (PEERS + ("worker.spread=hard",), "worker.spread=hard"),
    "a socket folder that no other pod has": (
        ("worker.mode=gpu", "worker.gpu.peerSocketVolume.emptyDir.medium=Memory"), "emptyDir"),
    "a socket folder of two volumes": (
        PEERS + ("worker.gpu.peerSocketVolume.persistentVolumeClaim.claimName=a",), "peerSocketVolume"),
    "a flag without dashes": (("worker.extraArgs[0]=x=1",), "extraArgs"),
    "a port": (("ports.public=70000",), "public"),
}


@needs_helm
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_by_name(name):
    settings, words = WRONG[name]
    flags = [word for setting in settings for word in ("--set", setting)]
    done = template(*SECRET, *flags, check=False)
    assert done.returncode != 0
    assert words in done.stderr


@needs_helm
def test_monitoring_is_handed_on_as_it_is():
    found = objects(template("-f", CHART / "ci/everything-values.yaml").stdout)
    rules = yaml.safe_load((CHART / "files/rules.yaml").read_text())
    assert one(found, "PrometheusRule")["spec"] == rules
    dashboard = json.loads((CHART / "files/dashboard.json").read_text())
    assert json.loads(one(found, "ConfigMap")["data"]["ringattn.json"]) == dashboard
    ports = {port["port"] for port in one(found, "PodMonitor")["spec"]["podMetricsEndpoints"]}
    assert ports == {"metrics", "metrics-0"}


@needs_helm
def test_gpus_of_one_pod_share_a_container():
    """A device plugin gives devices to containers, and copy engines need them all in one."""
    found = objects(template("-f", CHART / "ci/gpu-node-values.yaml").stdout)
    spec = one(found, "StatefulSet")["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]
    egress = one(found, "NetworkPolicy", "coordinator")["spec"]["egress"][0]["ports"][0]
    assert (egress["port"], egress["endPort"]) == (7710, 7717)


@needs_helm
@pytest.mark.parametrize("volume", [
    {"persistentVolumeClaim": {"claimName": "ringattn-peers"}},
    {"hostPath": {"path": "/var/lib/ringattn", "type": "Directory"}}], ids=lambda v: next(iter(v)))
def test_pods_of_one_gpu_meet_in_a_volume(volume):
    """Pods share one node and one folder at one path, use different GPUs, and can see all of them."""
    found = objects(template(
        "-f", CHART / "ci/gpu-single-values.yaml", "--set", "worker.gpu.ringTransport=auto",
        "--set-json", f"worker.gpu.peerSocketVolume={json.dumps(volume)}").stdout)
    stateful = one(found, "StatefulSet")
    labels = stateful["spec"]["selector"]["matchLabels"]
    spec = stateful["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert {"--device=cuda:$(POD_INDEX)", "--peer_socket_dir=/run/ringattn/peers",
            "--ring_transport=auto"} <= set(container["args"])
    assert "--device=cuda:0" not in container["args"]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment["NVIDIA_VISIBLE_DEVICES"]["value"] == "all"
    assert (environment["POD_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]
            == "metadata.labels['apps.kubernetes.io/pod-index']")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "peers", "mountPath": "/run/ringattn/peers"} in container["volumeMounts"]
    assert {"name": "peers", **volume} in spec["volumes"]
    together = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["topologyKey"] for term in together] == ["kubernetes.io/hostname"]
    assert together[0]["labelSelector"]["matchLabels"] == labels
    assert "topologySpreadConstraints" not in spec


@needs_helm
def test_pods_of_one_gpu_do_not_meet_unless_told():
    found = objects(template("-f", CHART / "ci/gpu-single-values.yaml").stdout)
    spec = one(found, "StatefulSet")["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert "--device=cuda:0" in container["args"]
    assert not [word for word in container["args"] if "peer_socket_dir" in word]
    assert not {"POD_INDEX", "NVIDIA_VISIBLE_DEVICES"} & {entry["name"] for entry in container["env"]}
    assert "affinity" not in spec


@needs_helm
def test_memory_is_counted_in_bytes():
    for quantity, percent, expected in (("4Gi", 50, 2 << 30), ("8G", 25, 2 * 10**9),
                                        ("1536Mi", 10, (1536 << 20) // 10)):
        found = objects(template(*SECRET, "--set", f"coordinator.resources.limits.memory={quantity}",
                                 "--set", f"coordinator.transportMemoryPercent={percent}").stdout)
        args = one(found, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
        assert f"--max_transport_bytes={expected}" in args
