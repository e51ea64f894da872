"""The chart on a real cluster: what stands there, and a first request by every way."""

import json
import pathlib
import subprocess

import pytest

from release import CHART, COORDINATOR, NAMESPACE, ROOT, WORKERS, timed

GRPCURL = ROOT / ".deps/bin/grpcurl"


def test_the_ring_spans_both_nodes(release):
    nodes = {pod["spec"]["nodeName"] for pod in release.pods("worker").values()}
    assert nodes == {"node1", "node2"}
    assert sum(release.restarts().values()) == 0


def test_a_request_through_the_service_is_right(release, short_input, report):
    with timed(report, "a verified request"):
        assert release.forward(short_input, "--causal", "--schedule=ring") == 1


def follow_notes(release, name, folder):
    """The printed commands, as they are printed; what they print."""
    notes = release.kubernetes.helm("get", "notes", name, "-n", NAMESPACE).stdout
    commands = [line.strip() for line in notes.splitlines()
                if line.strip().startswith(("kubectl", "grpcurl"))]
    *before, call = commands
    script = "\n".join([f"cd {folder}", f"PATH={GRPCURL.parent}:$PATH", *before,
                        f"for i in $(seq 50); do sleep 0.2; {call} && break; done", "kill %1"])
    return release.kubernetes.run("bash", "-c", script, check=False)


def test_the_notes_lead_to_an_answer(release):
    done = follow_notes(release, "ringattn", release.directory)
    assert '"AAAAQA=="' in done.stdout, done.stdout + done.stderr  # out = v = 2


def test_plain_text_and_a_drawn_secret(release, report):
    """The defaults: another release, with one worker."""
    with timed(report, "install of a release in plain text"):
        release.kubernetes.helm(
            "install", "plain", CHART, "-n", NAMESPACE, "--wait", "--timeout=120s", "--set",
            "image.tag=test,image.pullPolicy=Never,worker.replicas=1,worker.threads=1,"
            "worker.resources.requests.cpu=50m,worker.resources.requests.memory=128Mi,"
            "worker.resources.limits.memory=512Mi,coordinator.resources.requests.cpu=50m")
    try:
        done = follow_notes(release, "plain", release.directory)
        assert '"AAAAQA=="' in done.stdout, done.stdout + done.stderr
        secret = release.get("secret", "plain-ringattn-cluster")["data"]
        release.kubernetes.helm("upgrade", "plain", CHART, "-n", NAMESPACE, "--reuse-values")
        assert release.get("secret", "plain-ringattn-cluster")["data"] == secret
    finally:
        release.kubernetes.helm("uninstall", "plain", "-n", NAMESPACE, "--wait")
        release.kubectl("wait", "--for=delete", "pod", "-l", "app.kubernetes.io/instance=plain",
                        "--timeout=90s")
    left = release.kubectl("get", "all,secrets,networkpolicies,pdb,sa", "-l",
                           "app.kubernetes.io/instance=plain", "-o", "name").stdout
    assert not left, left


def test_pod_security_is_enforced(release):
    """The namespace admits nothing that is not restricted, so ours is."""
    refused = release.kubernetes.run(
        "kubectl", "-n", NAMESPACE, "run", "privileged", "--image=localhost/pause:1",
        "--privileged", check=False)
    assert refused.returncode != 0
    assert "violates PodSecurity" in refused.stderr
    namespace = release.kubernetes.get("namespace", NAMESPACE)
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_pods_have_no_token_and_no_shell(release):
    for pod in (*release.pods("coordinator"), *release.pods("worker")):
        for words in (("sh", "-c", "true"), ("cat", "/etc/passwd")):
            done = release.kubectl("exec", pod, "--", *words, check=False)
            assert "executable file not found" in done.stderr, done.stderr
        spec = release.get("pod", pod)["spec"]
        assert not any("serviceAccountToken" in json.dumps(v) for v in spec["volumes"])
    program = release.kubectl("exec", COORDINATOR, "--", "ringattn-server", "--version")
    assert program.stdout.strip()


def test_metrics_are_served(release):
    for component, port in (("coordinator", 7702), ("worker", 7810)):
        for pod in release.pods(component).values():
            page = release.kubernetes.run(
                "curl", "-sfm5", f"http://{pod['status']['podIP']}:{port}/metrics").stdout
            assert "ringattn_" in page


@pytest.mark.parametrize("values", sorted((CHART / "ci").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_api_server_takes_every_variant(release, values):
    """Strict validation by the server; objects of other projects' kinds are left out."""
    text = release.kubernetes.helm("template", "other", CHART, "-n", NAMESPACE, "-f", values,
                                   "--kube-version", "1.34.0",
                                   "--set", "metrics.podMonitor.enabled=false,"
                                   "metrics.prometheusRule.enabled=false").stdout
    done = release.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text,
                           check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert done.stdout.count("created (server dry run)") >= 9


def test_kustomize_takes_the_rendered_example(release):
    example = ROOT / "deploy/kubernetes/example"
    text = subprocess.run([pathlib.Path(release.kubernetes.tools) / "kubectl", "kustomize", example],
                          check=True, capture_output=True, text=True).stdout
    release.kubernetes.apply((example / "namespace.yaml").read_text())
    done = release.kubernetes.run("kubectl", "apply", "--dry-run=server", "--validate=strict", "-f",
                                  "-", stdin=text)
    assert "Warning" not in done.stderr, done.stderr


def test_upgrading_to_the_same_restarts_nothing(release):
    before = {name: pod["metadata"]["uid"] for component in ("coordinator", "worker")
              for name, pod in release.pods(component).items()}
    release.upgrade()
    after = {name: pod["metadata"]["uid"] for component in ("coordinator", "worker")
             for name, pod in release.pods(component).items()}
    assert after == before
    release.settled(WORKERS)
